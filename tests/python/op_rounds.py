"""The ops of a round's trees on numpy arrays: plans, trees with gaps between them, rows and paths."""
import ctypes

import numpy as np

from op_calls import SAMPLING
from op_hooks import LIBRARY, NO_ID, Array, Arrays, Guarded, placed
from reference.rounds import OUTLOOK

# kdt::StreamPlan, kdt::RoundCounts and kdt::spec::CutTables
PLAN = ("root", "length", "first", "budget", "draft", "depths", "spine", "calibration", "wants_logprobs")
ROUND = ("n_decode", "n_prompt", "n_scored", "n_prompt_samples")
TABLES = np.dtype([("lambda", np.float64), ("verify", np.float64, 19),
                   ("calibration", [("hits", np.float64, 24), ("mass", np.float64, 24)], 3), ("base_rows", np.int32),
                   ("n_roots", np.int32), ("most_rows", np.int32)], align=True)
ROW_NAMES = ("token", "position", "stream", "parent", "visible", "logits_row", "sample_token", "sample_position",
             "sample_stream", "sample_parent")


def check_layouts():
  sizes = [ctypes.c_int64() for _ in range(4)]
  LIBRARY.kdt_hook_struct_bytes(*map(ctypes.byref, sizes))
  assert [s.value for s in sizes] == [SAMPLING.itemsize, 4 * len(PLAN), 4 * len(ROUND), TABLES.itemsize]


class Nodes(Arrays):
  _fields_ = [(name, Array) for name in ("token", "parent", "depth", "weight")]

  def __init__(self, columns):
    self.columns = [Array(c) for c in columns]
    super().__init__(*self.columns)


class Round:
  """A backend's trees of the streams of a plan: one dictionary a stream, with PLAN's names but `first`."""

  def __init__(self, ops, plan, rng):
    self.ops, self.plan, self.n = ops, plan, len(plan)
    # Trees lie in any order, with places between them that nobody may touch.
    self.first, at = np.zeros(self.n, np.int32), int(rng.integers(0, 3))
    for i in rng.permutation(self.n):
      self.first[i] = at
      at += plan[i]["budget"] + 1 + int(rng.integers(0, 3))
    self.places = at + 1
    rows = [[p["root"], p["length"], first, p["budget"], p["draft"], p["depths"], p["spine"], p["calibration"],
             p["wants_logprobs"]] for p, first in zip(plan, self.first)]
    self.plan_argument = ops.rows_in(np.array(rows, np.int32).reshape(-1, len(PLAN)), np.int32)
    self.count = ops.count(self.n)

  def put(self, trees):
    """Trees that a test has made."""
    self.nodes = [np.full(self.places, poison, dtype) for poison, dtype in
                  ((NO_ID, np.int32), (NO_ID, np.int32), (NO_ID, np.int32), (np.nan, np.float32))]
    for first, p, tree in zip(self.first, self.plan, trees):
      for column, root, nodes in zip(self.nodes, (p["root"], -1, 0, 0), tree):
        column[first:first + len(nodes) + 1] = [root, *nodes]
    self.n_nodes = np.array([len(tree[0]) for tree in trees], np.int32)

  def build(self, token, log_q):
    """-> trees (token, parent, depth, weight) of nodes 1..n."""
    nodes = [Guarded((self.places,), dtype) for dtype in (np.int32, np.int32, np.int32, np.float32)]
    n_nodes = self.ops.rows_out((self.n,), np.int32)
    self.ops.call("build_trees", self.count, self.plan_argument, *log_q.shape[1:], placed(token, np.int32),
                  placed(log_q), Nodes([c.array for c in nodes]), n_nodes)
    self.nodes, self.n_nodes = [c.check() for c in nodes], n_nodes.check().copy()
    untouched = np.ones(self.places, bool)
    for first, p in zip(self.first, self.plan):
      assert [c[first] for c in self.nodes] == [p["root"], -1, 0, 0]
      untouched[first:first + p["budget"] + 1] = False
    assert (self.nodes[0][untouched] == NO_ID).all() and np.isnan(self.nodes[3][untouched]).all()
    return [tuple(c[f + 1:f + 1 + n] for c in self.nodes) for f, n in zip(self.first, self.n_nodes)]

  def cut(self, tables):
    """tables: as in reference.rounds.joint_cut. -> (n_nodes, outlook)."""
    argument = np.zeros(1, TABLES)
    for name in ("lambda", "verify", "base_rows", "most_rows"):
      argument[name] = tables[name]
    argument["calibration"]["hits"], argument["calibration"]["mass"] = tables["hits"], tables["mass"]
    argument["n_roots"] = self.n
    n_nodes, outlook = self.ops.rows_out((self.n,), np.int32, self.n_nodes), Guarded((len(OUTLOOK),), np.float64)
    self.ops.call("cut", self.count, self.plan_argument, Nodes(self.nodes), argument, n_nodes, outlook)
    self.n_nodes = n_nodes.check().copy()
    return self.n_nodes.tolist(), outlook.check().copy()

  def lay_rows(self, n_prompt, n_scored, n_prompt_samples):
    """-> {name: array behind the entries of prompts}."""
    self.round = np.array([self.n, n_prompt, n_scored, n_prompt_samples], np.int32)
    self.scored, samples = n_scored + n_prompt_samples, n_prompt_samples
    n_tree = int(self.n_nodes.sum()) + self.n
    of_prompts = {name: n_prompt for name in ROW_NAMES[:5]} | dict(logits_row=self.scored)
    of_prompts |= {name: samples for name in ROW_NAMES[6:]}
    out = {name: Guarded((n + n_tree + 3,), np.int32) for name, n in of_prompts.items()}
    for name, n in of_prompts.items():
      out[name].array[:n] = np.arange(n) + 1000
    first_row, live = self.ops.rows_out((self.n,), np.int32), Guarded((3,), np.int32)
    self.ops.call("lay_rows", self.count, self.plan_argument, self.round, Nodes(self.nodes),
                  placed(self.n_nodes, np.int32), *(out[name] for name in ROW_NAMES), first_row, live)
    assert live.check().tolist() == [n_prompt + n_tree, self.scored + n_tree, samples + n_tree]
    self.position, self.first_row = out["position"].array, first_row.check().copy()
    for name, n in of_prompts.items():
      assert (out[name].check()[:n] == np.arange(n) + 1000).all() and (out[name].array[n + n_tree:] == NO_ID).all(), name
    return {name: out[name].array[n:n + n_tree].tolist() for name, n in of_prompts.items()} | dict(
        first_row=self.first_row.tolist())

  def accept(self, sample, scored_token):
    """sample: of every sampled row; scored_token: what the host has written for the prompts' rows of logits.

    -> paths, tokens, kept, scored as in reference.rounds.accept, and scored_token of prompts."""
    n_prompt, most = int(self.round[1]), int(self.n_nodes.sum()) + self.n
    path, token = Guarded((self.places,), np.int32), Guarded((self.places,), np.int32)
    n_path, live = self.ops.rows_out((self.n,), np.int32), Guarded((2,), np.int32)
    kept = [Guarded((n_prompt + most,), np.int32) for _ in range(3)]
    scored = [Guarded((self.scored + most,), np.int32) for _ in range(2)]
    for column in kept:
      column.array[:n_prompt] = np.arange(n_prompt) + 1000
    scored[0].array[:self.scored] = np.arange(self.scored) + 1000
    scored[1].array[:self.scored] = scored_token
    inputs = [placed(a, np.int32) for a in (self.n_nodes, self.first_row, self.position, sample)]
    self.ops.call("accept", self.count, self.plan_argument, self.round, Nodes(self.nodes), *inputs, path, token, n_path,
                  *kept, *scored, live)
    n_path, (n_kept, n_logprobs) = n_path.check(), live.check().tolist()
    assert n_kept == n_prompt + n_path.sum() and n_logprobs == self.scored + n_path.sum()
    own = lambda of: [of.check()[f:f + n].tolist() for f, n in zip(self.first, n_path)]
    rows = lambda columns, begin, end: list(zip(*(c.check()[begin:end].tolist() for c in columns)))
    assert rows(kept, 0, n_prompt) == [(1000 + i,) * 3 for i in range(n_prompt)]
    assert all((c.array[n:] == NO_ID).all() for columns, n in ((kept, n_kept), (scored, n_logprobs)) for c in columns)
    assert (scored[0].array[:self.scored] == np.arange(self.scored) + 1000).all()
    return own(path), own(token), rows(kept, n_prompt, n_kept), rows(scored, self.scored, n_logprobs), \
        scored[1].array[:self.scored].tolist()


check_layouts()
