"""Target and drafter through the test hooks library (tests/hooks/model_hooks.cpp): what the C ABI does not show."""
import ctypes

import numpy as np

import op_hooks
from op_hooks import Guarded


def argument(value):
  """Arrays as plain pointers: the models take and give host memory."""
  if isinstance(value, np.ndarray):
    return ctypes.c_void_p(value.ctypes.data)
  return ctypes.c_int64(value) if isinstance(value, int) else value


class Models:
  """Both models with one stream. Ids are committed in chunks of `chunk`, at most 512.

  backend: an instruction set, or "cuda"."""

  def __init__(self, target, draft, config, threads=2, max_context=4096, backend=""):
    self.config = config      # of the target: num_hidden_layers, …
    self.handle = ctypes.c_void_p()
    self.check("create", str(target).encode(), str(draft).encode(), backend.encode(), ctypes.c_int(threads), 512,
               max_context, ctypes.byref(self.handle))

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    op_hooks.LIBRARY.kdt_hook_models_destroy(self.handle)

  def check(self, name, *arguments):
    op_hooks.Backend.check(getattr(op_hooks.LIBRARY, "kdt_hook_models_" + name), *map(argument, arguments))

  def forward(self, ids, chunk=512):
    """-> chosen experts [MoE layers, n, k], best first. The drafter's context is these ids afterwards."""
    layers = self.config["num_hidden_layers"] - self.config["first_k_dense_replace"]
    experts = Guarded((layers, len(ids), self.config["num_experts_per_tok"]), np.int32)
    self.check("forward", self.handle, np.asarray(ids, np.int32), len(ids), chunk, experts.array)
    return experts.check()

  def propose(self, root, start, depths):
    """-> drafter logits [depths, vocab] of the block whose anchor is `root` at position `start`."""
    logits = Guarded((depths, self.config["vocab_size"]))
    self.check("propose", self.handle, ctypes.c_int32(root), start, depths, logits.array)
    return logits.check()

  def tree(self, ids, root, budget, depths, chunk=512):
    """A round behind ids -> (token, parent, depth, each with the root first; target's logits at root and nodes)."""
    token, parent, depth = (Guarded((budget + 1,), np.int32) for _ in range(3))
    logits = Guarded((budget + 1, self.config["vocab_size"]))
    n = ctypes.c_int64()
    self.check("tree", self.handle, np.asarray(ids, np.int32), len(ids), chunk, ctypes.c_int32(root), budget, depths,
               token.array, parent.array, depth.array, ctypes.byref(n), logits.array)
    return *(a.check()[:n.value + 1] for a in (token, parent, depth)), logits.check()[:n.value + 1]
