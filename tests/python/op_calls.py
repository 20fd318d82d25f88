"""The ops of a backend on numpy arrays. Inputs are copied between NaN, outputs come back checked (op_hooks.py)."""
import numpy as np

from op_hooks import Array, Arrays, Backend, Guarded, Rows, placed

SAMPLING = np.dtype([("temperature", np.float64), ("top_p", np.float64), ("min_p", np.float64), ("top_k", np.int32),
                     ("seed", np.uint64), ("choice", np.uint32)], align=True)     # kdt::Sampling
SAMPLING_DEFAULTS = dict(temperature=0.0, top_p=1.0, min_p=0.0, top_k=0, seed=0, choice=0)


def samplings(settings):
  """One dictionary a stream, with any of SAMPLING's names."""
  return np.array([tuple((SAMPLING_DEFAULTS | s)[name] for name in SAMPLING.names) for s in settings], SAMPLING)


class Adjust(Arrays):
  """Lists of all streams, one after the other: those of stream i begin at `…_first[i]`."""
  _fields_ = [(name, Array) for name in ("penalties", "seen_first", "seen", "seen_count", "bias_first", "bias_token",
                                         "bias", "banned_first", "banned", "banned_until")]

  def __init__(self, adjust):
    """adjust: one dict a stream, with the arguments of reference.sampling.adjusted."""
    lists = lambda key: [list(a.get(key, {}).items()) for a in adjust]
    first = lambda of: np.concatenate([[0], np.cumsum([len(x) for x in of])]).astype(np.int64)
    part = lambda of, i, dtype: placed([x[i] for one in of for x in one] or [0], dtype)
    seen, bias, banned = lists("seen"), lists("bias"), [[(t, 0) for t in a.get("banned", ())] for a in adjust]
    self.columns = [Array(a) for a in (
        np.array([[a.get("repetition", 1), a.get("frequency", 0), a.get("presence", 0)] for a in adjust], np.float32),
        first(seen), part(seen, 0, np.int32), part(seen, 1, np.int32),
        first(bias), part(bias, 0, np.int32), part(bias, 1, np.float32),
        first(banned), part(banned, 0, np.int32), np.array([a.get("banned_until", 0) for a in adjust], np.int32))]
    super().__init__(*self.columns)


class Ops(Backend):
  def embed(self, tokens, table, hidden):
    n = len(tokens)
    out = self.rows_out((n, hidden))
    self.call("embed", Rows(np.zeros(n), token=tokens), table, hidden, out)
    return out.check()

  def rms_norm(self, x, weight, eps):
    out = self.rows_out(x.shape)
    self.call("rms_norm", self.count(len(x)), x.shape[1], self.rows_in(x), 0, None, placed(weight), eps, out, 0, None)
    return out.check()

  def linear(self, x, weight, n_out, initial=None):
    out = self.rows_out((len(x), n_out), fill=initial)
    self.call("linear", self.count(len(x)), self.rows_in(x), 0, None, weight, out, 0, None, initial is not None)
    return out.check()

  def logits(self, x, weight, n_out, index=None):
    """Of the rows `index` of x, where it is given: the first of them."""
    n = len(x) if index is None else len(index)
    out = self.rows_out((n, n_out))
    rows = None if index is None else self.rows_in(index, np.int32)
    self.call("logits", self.count(n), self.rows_in(x), rows, weight, out)
    return out.check()

  def copy(self, x):
    out = self.rows_out(x.shape)
    self.call("copy", self.count(len(x)), x.shape[1], self.rows_in(x), out)
    return out.check()

  def mlp(self, x, gate_up, down, initial):
    out = self.rows_out(x.shape, fill=initial)
    self.call("mlp", self.count(len(x)), self.rows_in(x), gate_up, down, out, None)
    return out.check()

  def route(self, x, gate, bias, k, normalise, scaling):
    n = len(x)
    expert, weight = self.rows_out((n, k), np.int32), self.rows_out((n, k))
    self.call("route", self.count(n), self.rows_in(x), gate, placed(bias), k, normalise, scaling, expert, weight)
    return expert.check(), weight.check()

  def experts(self, x, expert, weight, gate_up, down, shared_gate_up, shared_down, initial):
    n, hidden = x.shape
    out = self.rows_out(x.shape, fill=initial)
    self.call("experts", self.count(n), hidden, self.rows_in(x), self.rows_in(expert, np.int32), self.rows_in(weight),
              len(gate_up), expert.shape[1], gate_up, down, shared_gate_up, shared_down, out)
    return out.check()

  def count_experts(self, expert, n_experts):
    distinct = Guarded((1,), np.int32)
    self.call("count_experts", self.count(len(expert)), n_experts, expert.shape[1], self.rows_in(expert, np.int32),
              distinct)
    return int(distinct.check()[0])

  def top_k(self, logits, k, sampling=None, position=None):
    """sampling: one dictionary a stream, of temperature, seed and choice; rows are shared out evenly."""
    n, vocab = logits.shape
    depths = n // len(sampling) if sampling else 1
    token, log_q = self.rows_out((n, k), np.int32), self.rows_out((n, k))
    streams = None if sampling is None else samplings(sampling + [{}] * (self.spare // depths + 1))
    self.call("top_k", self.count(n), vocab, k, self.rows_in(logits), streams, depths,
              None if position is None else self.rows_in(position, np.int32), token, log_q)
    return token.check(), log_q.check()

  def sample(self, logits, position, sampling, stream, row_token=None, parent=None, adjust=None):
    """sampling, adjust: one dictionary a stream."""
    token = self.rows_out((len(logits),), np.int32)
    self.call("sample", Rows(position, stream, parent, token=row_token), logits.shape[1], self.rows_in(logits),
              samplings(sampling), None if adjust is None else Adjust(adjust), token)
    return token.check()

  def logprobs(self, logits, row, token, n_top):
    """Of rows whose token is -1 everything stays poisoned."""
    n = len(row)
    own, top, values = self.rows_out((n,)), self.rows_out((n, n_top), np.int32), self.rows_out((n, n_top))
    self.call("logprobs", self.count(n), logits.shape[1], n_top, placed(logits), self.rows_in(row, np.int32),
              self.rows_in(token, np.int32), own, top, values)
    return own.check(), top.check(), values.check()
