"""The numpy reference against the golden vectors, which an implementation of the same models in PyTorch wrote."""
import pathlib

import numpy as np
import pytest

from reference import attention, drafter, numbers, sampling, target, tree

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN, MODELS = ROOT / "tests" / "golden", ROOT / "models"
TOLERANCE = 1e-4      # of logits, absolute
NEAR_TIE = 1e-5       # a router gap under this may flip a set of experts


@pytest.fixture(scope="module")
def target32():
  return target.Target(MODELS / "tiny-k2", np.float32)


@pytest.fixture(scope="module")
def target64():
  return target.Target(MODELS / "tiny-k2", np.float64)


@pytest.fixture(scope="module")
def drafter32():
  return drafter.Drafter(MODELS / "tiny-k2-dflash", np.float32)


def assert_close(got, want, tolerance=TOLERANCE):
  assert np.abs(got - want).max() < tolerance


def check_draft_and_tree(model, draft, golden, cache, context):
  """The block after the prompt, its tree of 16 nodes, and the target's logits at root and nodes."""
  start = int(golden["draft_start"])
  logits = draft.block(model, int(golden["draft_root"]), start, context)
  assert_close(logits, golden["draft_logits"])
  token, log_q = sampling.top_k(logits, 16)
  nodes = tree.build(token, log_q.astype(np.float32), 16)
  for got, name in zip(nodes, ("tree16_tokens", "tree16_parents", "tree16_depths")):
    assert got == golden[name].tolist()
  parents = [-1] + nodes[1]
  positions = start + np.array([0] + nodes[2])
  visible = attention.ancestors_visible(parents)
  got = model.forward([int(golden["draft_root"])] + nodes[0], positions, visible, cache, absorbed=True)[0]
  assert_close(got, golden["tree16_logits"])
  cache.keep(slice(0, start))


def check_greedy(model, golden, cache, first, n):
  """The first n greedy tokens, one by one through the cache, in absorbed form."""
  ids = [first]
  while len(ids) < n:
    ids.append(int(model.forward(ids[-1:], cache=cache, absorbed=True)[0][0].argmax()))
  assert ids == golden["greedy"][:n].tolist()


@pytest.mark.parametrize("name", ["code", "prose", "chat"])
def test_prompt(name, target64, target32, drafter32):
  golden = np.load(GOLDEN / f"{name}.npz")
  ids = golden["ids"]
  cache = target32.cache()
  for model, kept in ((target64, None), (target32, cache)):
    logits, hidden, routing = model.forward(ids, cache=kept)
    assert_close(logits, golden["logits"])
    assert_close(np.stack([h[-1] for h in hidden]), golden["hidden_last"])
    for layer, (experts, weights, gap) in enumerate(routing):
      clear = golden["router_gap"][layer] >= NEAR_TIE
      assert (experts == golden["experts"][layer])[clear].all()
      assert_close(weights[clear], golden["expert_weights"][layer][clear], 1e-5)
      assert_close(gap, golden["router_gap"][layer], 1e-5)
  context = drafter32.context(drafter32.tapped(hidden), np.arange(len(ids)))
  check_draft_and_tree(target32, drafter32, golden, cache, context)
  check_greedy(target32, golden, cache, int(logits[-1].argmax()), 32)


def test_absorbed_is_unabsorbed(target64):
  ids = np.load(GOLDEN / "code.npz")["ids"][:70]
  assert_close(target64.forward(ids, absorbed=True)[0], target64.forward(ids)[0], 1e-10)


def test_prompt_past_the_drafters_window(target32, drafter32):
  golden = np.load(GOLDEN / "long.npz")
  ids, positions = golden["ids"], golden["positions"]
  ties = np.flatnonzero((golden["router_gap"] < NEAR_TIE).any(0))
  assert len(ties) <= 1
  cache = target32.cache()
  logits, hidden, routing = target32.forward(ids, cache=cache, logits_at=positions)
  before_tie = positions < ties.min(initial=len(ids))     # a flipped set moves its position and all later ones
  assert_close(logits[before_tie], golden["logits"][before_tie])
  for layer, (experts, _, _) in enumerate(routing):
    differs = (np.sort(experts) != np.sort(golden["experts"][layer])).any(-1)
    assert np.isin(np.flatnonzero(differs), ties).all()
  assert_close(logits, golden["logits"])
  context = drafter32.context(drafter32.tapped(hidden), np.arange(len(ids)))
  check_draft_and_tree(target32, drafter32, golden, cache, context)
  check_greedy(target32, golden, cache, int(logits[-1].argmax()), 8)


def test_bf16_round_trip():
  bits = np.arange(1 << 16).astype(np.uint16)
  values = numbers.bf16_to_float(bits)
  number = ~np.isnan(values)
  assert (numbers.float_to_bf16(values)[number] == bits[number]).all()
  halfway = np.float32(1 + 2 ** -8), np.float32(1 + 3 * 2 ** -8)
  assert numbers.float_to_bf16(np.array(halfway)).tolist() == [0x3F80, 0x3F82]   # ties to even


def test_int4_round_trip():
  q = np.random.default_rng(0).integers(-8, 8, (5, 64))
  packed = numbers.pack_int4(q)
  assert (numbers.unpack_int4(packed) == q).all()
  assert numbers.pack_int4(np.array([[-8, -7, -6, -5, -4, -3, -2, 7]]))[0, 0] == np.int64(0xF6543210 - (1 << 32))


def test_philox_known_answers():
  """Random123's kat_vectors for philox4x32-10."""
  def words(counter, key):
    return [int(x) for x in sampling.philox4x32(counter, key)]
  assert words((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
  ones = 0xFFFFFFFF
  assert words((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
  pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
  assert words(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("spine", [False, True])
def test_heap_is_brute_force(spine):
  rng = np.random.default_rng(1)
  for _ in range(200):
    depths, k = rng.integers(1, 5), rng.integers(1, 5)
    log_q = -np.sort(rng.integers(0, 4, (depths, k)) / 4).astype(np.float32)     # many ties
    log_q[rng.random(log_q.shape) < 0.1] = np.nan
    log_q = -np.sort(-np.where(np.isnan(log_q), -np.inf, log_q))
    token = np.arange(depths * k).reshape(depths, k)
    budget = int(rng.integers(1, 2 * k ** depths + 2))
    nodes = tree.build(token, log_q, budget, spine)
    assert tree.rank_tuples(token, *nodes[:3]) == tree.brute_force(log_q, budget, spine)
