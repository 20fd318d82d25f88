"""Candidates, samples and log-probabilities of every backend, against the numpy reference."""
import numpy as np
import pytest

import op_hooks
from op_checks import assert_close, backends, check_rows_independent, same_bits, with_spare
from reference import sampling

# (seed, choice, position, token) -> (word, Gumbel noise): the vectors of docs/numerics.md.
NOISE_VECTORS = [
    ((0, 0, 0, 0), (0x6627E8D5, 0.08482025111138775)),
    ((1, 0, 1, 2), (0x971C0B2F, 0.6402276442356433)),
    ((0x0123456789ABCDEF, 0, 17, 2047), (0xA91D6AED, 0.8804434837032042)),
    ((0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), (0xEEC03824, 2.6627392683313778)),
    ((42, 3, 131071, 163839), (0x24D368BA, -0.6621611860623614)),
]


def test_noise_vectors():
  for arguments, (word, noise) in NOISE_VECTORS:
    assert op_hooks.noise(*arguments)[0] == word
    assert int(sampling.noise_words(*arguments)) == word
    assert abs(op_hooks.noise(*arguments)[1] - noise) < 1e-13 * max(1, abs(noise))
    assert abs(sampling.gumbel(word) - noise) < 1e-13 * max(1, abs(noise))


def test_noise_at_the_ends():
  """Finite for every word."""
  assert sampling.gumbel(np.array([0, 0xFFFFFFFF], np.uint32)).tolist() == pytest.approx([-3.1300, 22.8739], abs=1e-4)


def hostile_logits(rng, n, vocab):
  """Plain rows, rows of many ties, with NaN, with -inf, of nothing but one value, NaN or -inf."""
  logits = (rng.standard_normal((n, vocab)) * rng.uniform(0.1, 8, (n, 1))).astype(np.float32)
  for i in range(n):
    kind = i % 8
    if kind == 1:
      logits[i] = np.round(logits[i])
    elif kind == 2:
      logits[i, rng.random(vocab) < 0.3] = np.nan
    elif kind == 3:
      logits[i, rng.random(vocab) < 0.6] = -np.inf
    elif kind == 4:
      logits[i] = [3.25, np.nan, -np.inf][i // 8 % 3]
    elif kind == 5:
      logits[i] = -np.inf
      logits[i, rng.integers(vocab)] = -1e4
  return logits


def check_candidates(token, log_q, scores, tolerance, exact_ties):
  """token, log_q [k] of one row with float64 scores [vocab]; ties of equal scores are exact only for plain ranking."""
  k = len(token)
  want_token, want = sampling.top_k(scores[None], k)
  assert len(set(token.tolist())) == k and token.min() >= 0 and token.max() < len(scores)
  finite = np.isfinite(want[0])
  assert (log_q[~finite] == -np.inf).all()
  assert_close(log_q[finite], want[0][finite], tolerance)
  if exact_ties:
    assert token.tolist() == want_token[0].tolist()
  else:
    own = sampling.log_softmax(scores[None])[0][token]
    assert_close(log_q[finite], own[finite], tolerance)
  assert (log_q[1:] <= log_q[:-1]).all()


@pytest.mark.parametrize("vocab", [1, 2, 7, 31, 100, 129, 2048])
def test_top_k(backends, vocab):
  rng = np.random.default_rng(vocab)
  n = 33
  logits = hostile_logits(rng, n, vocab)
  for k in sorted({1, 2, 7, 16, 128, 129, 1024, vocab} & set(range(1, vocab + 1))):
    run = lambda backend, _, rows: backend.top_k(logits[rows], k)
    token, log_q = check_rows_independent(backends, lambda b: None, run, n, rng)
    for i in range(n):
      size = 1 + np.abs(logits[i][np.isfinite(logits[i])]).max(initial=0)
      check_candidates(token[i], log_q[i], logits[i].astype(np.float64), 4e-6 * size, True)


def test_top_k_of_ragged_pieces(backends):
  """More tokens than one block takes, few or most of them wanted; a row of equal logits, one of infinities, one that falls."""
  rng = np.random.default_rng(3)
  n, vocab = 6, 9001
  logits = hostile_logits(rng, n, vocab)
  logits[0], logits[1], logits[2] = 0.25, -np.inf, -np.arange(vocab) / 64
  for k in (1, 64, 128, 1024, 4096):
    token, log_q = backends[1].top_k(logits, k)
    for i in range(n):
      size = 1 + np.abs(logits[i][np.isfinite(logits[i])]).max(initial=0)
      check_candidates(token[i], log_q[i], logits[i].astype(np.float64), 4e-6 * size, True)


def test_top_k_with_noise(backends):
  rng = np.random.default_rng(7)
  vocab, depths = 300, 3
  sampling_of = [dict(temperature=t, seed=int(rng.integers(1 << 63)), choice=int(c))
                 for t, c in ((0.6, 0), (0.0, 0), (1.0, 5), (0.05, 0), (8.0, 1))]
  n = len(sampling_of) * depths
  logits = hostile_logits(rng, n, vocab)
  position = rng.integers(0, 5000, n)
  whole = backends[1].top_k(logits, 40, sampling_of, position)
  for i in range(n):
    s = sampling_of[i // depths]
    first = i // depths * depths
    stream = slice(first, first + depths)
    run = lambda: backends[3].top_k(logits[stream], 40, [s], position[stream])
    alone = [a[i - first:i - first + 1] for a in with_spare(backends[3], run, i % 4)]
    assert all(same_bits(np.ascontiguousarray(a[i:i + 1]), np.ascontiguousarray(b)) for a, b in zip(whole, alone))
    if s["temperature"] == 0:
      plain = backends[2].top_k(logits[i:i + 1], 40)
      assert all(same_bits(a, np.ascontiguousarray(b)) for a, b in zip(plain, alone))
      continue
    scores = sampling.noisy_logits(logits[i], s, position[i], depth=1 + i % depths)
    scale = 1 + np.abs(scores[np.isfinite(scores)]).max(initial=0)
    check_candidates(whole[0][i], whole[1][i], scores, 2e-6 * scale, False)


def settings(rng, vocab):
  return dict(temperature=float(rng.choice([0.0, 0.05, 0.6, 1.0, 1.0, 3.0, 100.0])),
              top_k=int(rng.choice([0, 0, 1, 2, 5, 40, vocab, vocab + 5])),
              top_p=float(rng.choice([1.0, 1.0, 0.95, 0.5, 0.1, 1e-9])),
              min_p=float(rng.choice([0.0, 0.0, 0.02, 0.3, 1.0])),
              seed=int(rng.integers(0, 1 << 64, dtype=np.uint64)), choice=int(rng.integers(0, 4)))


@pytest.mark.parametrize("vocab", [1, 2, 5, 33, 130, 2048])
def test_sample(backends, vocab):
  rng = np.random.default_rng(vocab)
  n, streams = 160, 40
  logits = hostile_logits(rng, n, vocab)
  sampling_of = [settings(rng, vocab) for _ in range(streams)]
  stream, position = rng.integers(0, streams, n), rng.integers(0, 1 << 20, n)
  run = lambda backend, _, rows: (backend.sample(logits[rows], position[rows], sampling_of, stream[rows]),)
  (token,) = check_rows_independent(backends, lambda b: None, run, n, rng)
  compared = 0
  for i in range(n):
    want, margin = sampling.sample(logits[i], int(position[i]), **sampling_of[stream[i]])
    assert 0 <= token[i] < vocab
    if margin > 1e-9:
      compared += 1
      assert token[i] == want, (i, sampling_of[stream[i]])
  assert compared > 0.8 * n


@pytest.mark.parametrize("cut", [("top_p",), ("min_p",), ("top_k",), ("top_p", "min_p", "top_k")], ids="-".join)
def test_sample_at_the_thresholds(backends, cut):
  """Few flat tokens and many settings: a threshold that is off by a hundredth picks another token somewhere."""
  rng = np.random.default_rng(5)
  n, vocab = 3000, 8
  logits = (rng.standard_normal((n, vocab)) * 0.5).astype(np.float32)
  position = rng.integers(0, 4096, n)
  sampling_of = [dict(temperature=1.0, seed=i, top_p=rng.uniform(0.3, 1) if "top_p" in cut else 1.0,
                      min_p=rng.uniform(0.3, 1) if "min_p" in cut else 0.0,
                      top_k=int(rng.integers(1, vocab + 1)) if "top_k" in cut else 0) for i in range(n)]
  token = backends[2].sample(logits, position, sampling_of, np.arange(n))
  for i in range(n):
    want, margin = sampling.sample(logits[i], int(position[i]), **sampling_of[i])
    assert token[i] == want or margin < 1e-9, (i, sampling_of[i])


def test_sample_of_infinite_logits(backends):
  """+inf wins whatever the settings; the token is in range in every case."""
  logits = np.zeros((3, 50), np.float32)
  logits[0, 7], logits[1, [9, 3]], logits[2] = np.inf, np.inf, np.inf
  for s in (dict(), dict(temperature=1.0), dict(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)):
    assert backends[2].sample(logits, [1, 2, 3], [s], [0, 0, 0]).tolist() == [7, 3, 0]


def test_candidates_use_the_noise_of_the_sample(backends):
  """With the target's own logits, the best noisy candidate of a position IS the token sampled for it."""
  rng = np.random.default_rng(11)
  logits = (rng.standard_normal((200, 97)) * 2).astype(np.float32)
  position = rng.integers(0, 4000, 200)
  s = dict(temperature=0.8, seed=123456789012345678, choice=2)
  best = backends[2].top_k(logits, 1, [s] * 200, position + 1)[0][:, 0]
  assert (best == backends[2].sample(logits, position, [s], np.zeros(200))).mean() > 0.99   # float32 may tie


def test_whole_vocabulary(backends):
  """As many tokens as the model has: candidates, samples, log-probabilities."""
  rng = np.random.default_rng(12)
  n, vocab = 8, 163840
  logits, position = hostile_logits(rng, n, vocab), rng.integers(0, 1 << 17, n)
  size = 1 + np.abs(logits[np.isfinite(logits)]).max()
  run = lambda backend, _, rows: backend.top_k(logits[rows], 64)
  token, log_q = check_rows_independent(backends, lambda b: None, run, n, rng)
  for i in range(n):
    check_candidates(token[i], log_q[i], logits[i].astype(np.float64), 4e-6 * size, True)
  followed = rng.integers(0, vocab, n)
  own, top, values = backends[1].logprobs(logits, np.arange(n), followed, 20)
  want = sampling.log_softmax(logits)
  assert same_bits(top, token[:, :20].copy())
  listed = np.isfinite(values)      # a backend may sum a row of candidates in other parts than one of log-probabilities
  assert_close(values[listed], log_q[:, :20][listed], 4e-6 * size if backends.bf16 else 0)
  finite = np.isfinite(want[np.arange(n), followed])
  assert_close(own[finite], want[np.arange(n), followed][finite], 4e-6 * size)
  sampling_of = [dict(temperature=1.0, seed=1), dict(temperature=0.7, seed=2, top_k=50, top_p=0.9), dict(temperature=0.0),
                 dict(temperature=1.5, seed=3, top_p=0.8), dict(temperature=1.0, seed=4, min_p=0.05)]
  for s in sampling_of:
    got = backends[1].sample(logits, position, [s], np.zeros(n))
    for i in range(n):
      chosen, margin = sampling.sample(logits[i], int(position[i]), **s)
      assert got[i] == chosen or margin < 1e-9, (i, s)


def random_adjust(rng, vocab):
  some = lambda most: rng.choice(vocab, int(rng.integers(0, min(vocab, most) + 1)), replace=False)
  return dict(repetition=float(rng.choice([1.0, 1.3, 0.7])), frequency=float(rng.choice([0.0, 0.5, -1.0])),
              presence=float(rng.choice([0.0, 1.5, -0.5])),
              seen={int(t): int(rng.integers(0, 4)) for t in some(12)},
              bias={int(t): float(rng.choice([-100.0, -1.0, 2.5, 100.0])) for t in some(5)},
              banned=[int(t) for t in some(3)] if vocab > 3 else [], banned_until=int(rng.integers(0, 60)))


@pytest.mark.parametrize("vocab", [2, 7, 40, 1000])
def test_sample_with_penalties_on_each_nodes_own_ancestors(backends, vocab):
  rng = np.random.default_rng(vocab)
  streams = 12
  token, position, stream, parent, path = [], [], [], [], []
  for s in range(streams):    # a tree a stream: the root, then nodes below earlier ones
    root, start = len(token), int(rng.integers(0, 50))
    for i in range(int(rng.integers(1, 20))):
      above = -1 if i == 0 else int(rng.integers(root, len(token)))
      token.append(int(rng.integers(vocab)))
      parent.append(above)
      path.append([] if i == 0 else path[above] + [token[-1]])
      position.append(start + len(path[-1]))
      stream.append(s)
  logits = hostile_logits(rng, len(token), vocab)
  adjust = [random_adjust(rng, vocab) if s else {} for s in range(streams)]
  sampling_of = [dict(temperature=float(rng.choice([0.0, 1.0])), seed=int(rng.integers(1 << 63))) for _ in range(streams)]
  run = lambda backend: backend.sample(logits, position, sampling_of, stream, token, parent, adjust)
  got = [run(backends[1]), run(backends[3]), with_spare(backends[1], lambda: run(backends[1]))]
  assert same_bits(*got[:2]) and same_bits(got[0], got[2].copy())
  compared = 0
  for i in range(len(token)):
    row = sampling.adjusted(logits[i], position[i], path[i], **adjust[stream[i]])
    want, margin = sampling.sample(row, position[i], **sampling_of[stream[i]])
    if margin > 1e-9:
      compared += 1
      assert got[0][i] == want, (i, adjust[stream[i]])
  assert compared > 0.7 * len(token)


@pytest.mark.parametrize("vocab", [1, 2, 33, 2048])
def test_logprobs(backends, vocab):
  rng = np.random.default_rng(vocab)
  logits = hostile_logits(rng, 30, vocab)
  row, token = rng.integers(0, 30, 50), rng.integers(0, vocab, 50)
  token[::7] = -1      # not wanted
  for n_top in sorted({0, 1, 5, 20} & set(range(vocab + 1))):
    run = lambda backend, _, rows: backend.logprobs(logits, row[rows], token[rows], n_top)
    own, top, values = check_rows_independent(backends, lambda b: None, run, 50, rng)
    want = sampling.log_softmax(logits[row])
    best, _ = sampling.top_k(logits[row], n_top)
    scale = 1 + np.abs(logits[np.isfinite(logits)]).max(initial=0)
    for i in range(50):
      if token[i] < 0:
        assert np.isnan(own[i]) and (top[i] == op_hooks.NO_ID).all() and np.isnan(values[i]).all()
        continue
      if np.isfinite(want[i, token[i]]):
        assert_close(own[i:i + 1], want[i, token[i:i + 1]], 4e-6 * scale)
      assert top[i].tolist() == best[i].tolist()
      finite = np.isfinite(want[i, top[i]])
      assert_close(values[i][finite], want[i, top[i]][finite], 4e-6 * scale)
