"""The engine against the golden vectors (tests/golden/README.md) and, for any drafter's layers, against numpy."""

import json

import numpy as np
import pytest

import checkpoint_edits
from conftest import GOLDEN, MODELS
from model_hooks import Models
from reference import drafter, numbers, target

TARGET, DRAFT = MODELS / "tiny-k2", MODELS / "tiny-k2-dflash"
CONFIG = json.loads((TARGET / "config.json").read_text())
TOLERANCE = 1e-4   # of logits, absolute
NEAR_TIE = 1e-5    # a router gap under this may flip a set of experts
PROMPTS = ["code", "prose", "chat", "long"]


@pytest.fixture(scope="module")
def models():
  with Models(TARGET, DRAFT, CONFIG) as opened:
    yield opened


@pytest.fixture(scope="module", params=PROMPTS)
def golden(request):
  with np.load(GOLDEN / f"{request.param}.npz") as file:
    return dict(file)


def assert_close(got, want, tolerance=TOLERANCE):
  assert got.shape == want.shape
  assert np.abs(got.astype(np.float64) - want).max() <= tolerance


def flipped(models, golden):
  """The positions where a set of experts differs from the golden one."""
  experts = models.forward(golden["ids"])
  return np.flatnonzero((np.sort(experts) != np.sort(golden["experts"])).any((0, 2)))


def test_experts(models, golden):
  """Exactly the same, in the same order, but for sets at a near-tie and order within them."""
  ties = np.flatnonzero((golden["router_gap"] < NEAR_TIE).any(0))
  at = flipped(models, golden)
  assert np.isin(at, ties).all()
  assert len(at) <= 1


@pytest.mark.parametrize("chunk", [7, 100])
def test_experts_do_not_depend_on_chunks(models, golden, chunk):
  ids = golden["ids"][:300]
  assert (models.forward(ids, chunk) == models.forward(ids)).all()


def test_logits(session, models, golden, record_property):
  """A flipped set of experts moves its position and every later one: those are left out, and counted."""
  ids = golden["ids"]
  positions = golden.get("positions", np.arange(len(ids)))
  at = flipped(models, golden)
  clear = positions < at.min(initial=len(ids))
  record_property("positions_left_out", int((~clear).sum()))
  assert clear.sum() >= len(clear) // 3
  assert_close(session.score(ids)[positions[clear]], golden["logits"][clear])


@pytest.mark.parametrize("options", [{"speculate": "off"}, {"speculate": "tree", "budget": 16}, {}])
def test_greedy(session, golden, options):
  result = session.generate(golden["ids"], max_tokens=64, ignore_eos=True, **options)
  assert result.token_ids == golden["greedy"].tolist()


def test_draft(models, golden):
  start, root = int(golden["draft_start"]), int(golden["draft_root"])
  models.forward(golden["ids"][:start])
  want = golden["draft_logits"]
  logits = models.propose(root, start, len(want))
  assert_close(logits, want)
  for depths in range(1, len(want)):
    assert np.array_equal(models.propose(root, start, depths), logits[:depths])
  models.forward(golden["ids"][:start], 64)
  assert np.array_equal(models.propose(root, start, len(want)), logits)


def test_tree(models, golden):
  start = int(golden["draft_start"])
  token, parent, depth, logits = models.tree(golden["ids"][:start], int(golden["draft_root"]), 16, 7)
  assert token[1:].tolist() == golden["tree16_tokens"].tolist()
  assert parent[1:].tolist() == golden["tree16_parents"].tolist()
  assert depth[1:].tolist() == golden["tree16_depths"].tolist()
  assert_close(logits, golden["tree16_logits"])


# ------------------------------------------------------------------------------------------------ any drafter

# layer types (window, 0: full), heads, kv heads, head_dim, block, taps
DRAFTERS = [
  ([0, 7], 6, 3, 24, 5, [0, 4]),
  ([64, 0, 64], 4, 4, 32, 8, [2]),
  ([5, 0, 5, 0], 8, 1, 16, 3, [0, 1, 2, 3, 4]),
]


def random_drafter(folder, rng, windows, heads, kv_heads, head_dim, block, taps):
  """A drafter of these layers with random weights, on disk as a checkpoint."""
  hidden, width = CONFIG["hidden_size"], 96
  config = json.loads((DRAFT / "config.json").read_text())
  config |= {"num_hidden_layers": len(windows), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
             "head_dim": head_dim, "intermediate_size": width, "block_size": block, "rope_scaling": None,
             "rope_theta": 1000.0, "sliding_window": max(windows), "max_window_layers": len(windows),
             "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
             "dflash_config": {"mask_token_id": 2046, "target_layer_ids": taps}}
  matrix = lambda n_out, n_in: rng.standard_normal((n_out, n_in)) * n_in ** -0.5
  norm = lambda n: rng.uniform(0.5, 1.5, n)
  tensors = {"fc.weight": matrix(hidden, len(taps) * hidden), "hidden_norm.weight": norm(hidden),
             "norm.weight": norm(hidden)}
  for i in range(len(windows)):
    layer = {"input_layernorm": norm(hidden), "post_attention_layernorm": norm(hidden),
             "self_attn.q_proj": matrix(heads * head_dim, hidden), "self_attn.q_norm": norm(head_dim),
             "self_attn.k_proj": matrix(kv_heads * head_dim, hidden), "self_attn.k_norm": norm(head_dim),
             "self_attn.v_proj": matrix(kv_heads * head_dim, hidden),
             "self_attn.o_proj": matrix(hidden, heads * head_dim),
             "mlp.gate_proj": matrix(width, hidden), "mlp.up_proj": matrix(width, hidden),
             "mlp.down_proj": matrix(hidden, width)}
    tensors |= {f"layers.{i}.{name}.weight": value for name, value in layer.items()}
  header, data = {}, b""
  for name, value in tensors.items():
    bits = numbers.float_to_bf16(value.astype(np.float32))
    header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [len(data), len(data) + bits.nbytes]}
    data += bits.tobytes()
  (folder / "config.json").write_text(json.dumps(config))
  checkpoint_edits.write_safetensors(folder / "model.safetensors", header, data)


@pytest.fixture(scope="module")
def reference_target():
  return target.Target(TARGET, np.float32)


@pytest.mark.parametrize("shape", DRAFTERS, ids=lambda shape: "-".join(map(str, shape[0])))
def test_random_drafter(tmp_path, reference_target, shape):
  """Full layers and windows mixed, contexts below, at and past the window, chunks that cross pages."""
  rng = np.random.default_rng(len(shape[0]))
  random_drafter(tmp_path, rng, *shape)
  reference = drafter.Drafter(tmp_path, np.float32)
  ids = rng.integers(0, 1792, 150)
  tapped = reference.tapped(reference_target.forward(ids)[1])
  with Models(TARGET, tmp_path, CONFIG, max_context=256) as models:
    for n, chunk in ((1, 1), (5, 2), (63, 64), (64, 7), (70, 64), (150, 100)):
      models.forward(ids[:n], chunk)
      root = int(rng.integers(0, 1792))
      context = reference.context(tapped[:n], np.arange(n))
      want = reference.block(reference_target, root, n, context)
      assert_close(models.propose(root, n, len(want)), want)
