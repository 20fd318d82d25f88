"""One measurement of llama.cpp in a process of its own; prints one JSON object. Started by bench_peers.py.

  llama_worker.py MODEL.gguf PROMPTS.json THREADS PREFILL MAX_TOKENS RUNS      (needs numpy and llama-cpp-python)

Works on llama.cpp's C functions directly: the loop around them is a decode, an argmax, and nothing else.
"""

import ctypes
import json
import sys
import time

import llama_cpp
import numpy as np


class Llama:
  def __init__(self, path, threads, n_batch):
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 4096, n_batch, n_batch
    params.n_threads = params.n_threads_batch = threads
    self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not self.model:
      raise SystemExit(f"error: {path}: not loaded: expected a GGUF file of this llama.cpp's")
    self.context = llama_cpp.llama_init_from_model(self.model, params)
    self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
    self.n_batch = n_batch

  def clear(self):
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

  def decode(self, ids):
    """Runs ids after what came before; returns the likeliest next token."""
    tokens = (llama_cpp.llama_token * len(ids))(*ids)
    for begin in range(0, len(ids), self.n_batch):
      n = min(self.n_batch, len(ids) - begin)
      part = ctypes.cast(ctypes.byref(tokens, begin * ctypes.sizeof(llama_cpp.llama_token)),
                         ctypes.POINTER(llama_cpp.llama_token))
      if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(part, n)) != 0:
        raise SystemExit("error: llama_decode: failed: expected 0")
    logits = llama_cpp.llama_get_logits_ith(self.context, -1)
    return int(np.ctypeslib.as_array(logits, (self.n_vocab,)).argmax())


def prefill_ms(llama, ids):
  llama.clear()
  begin = time.perf_counter()
  llama.decode(ids)
  return 1000 * (time.perf_counter() - begin)


def decode_seconds(llama, ids, max_tokens):
  """Seconds for the tokens after the first, as the engine's own figure counts them."""
  llama.clear()
  token = llama.decode(ids)
  begin = time.perf_counter()
  for _ in range(max_tokens - 1):
    token = llama.decode([token])
  return time.perf_counter() - begin


def main():
  path, prompts_path = sys.argv[1:3]
  threads, n_prefill, max_tokens, runs = map(int, sys.argv[3:7])
  with open(prompts_path, encoding="utf-8") as file:
    prompts = json.load(file)
  llama = Llama(path, threads, n_batch=512)
  text = [token for prompt in prompts for token in prompt["ids"]]
  text *= (n_prefill + runs) // len(text) + 1
  decode_seconds(llama, prompts[0]["ids"], 16)
  best = {}
  for _ in range(runs):
    seconds, tokens = {}, {}
    for prompt in prompts:
      kind = prompt["kind"]
      seconds[kind] = seconds.get(kind, 0) + decode_seconds(llama, prompt["ids"], max_tokens)
      tokens[kind] = tokens.get(kind, 0) + max_tokens - 1
    seconds["all"], tokens["all"] = sum(seconds.values()), sum(tokens.values())
    for kind in seconds:
      best[kind] = max(best.get(kind, 0), tokens[kind] / seconds[kind])
  ms = min(prefill_ms(llama, text[i:i + n_prefill]) for i in range(max(runs, 5)))
  print(json.dumps({"version": llama_cpp.__version__, "prefill_ms": ms, "tokens_per_second": best}))


if __name__ == "__main__":
  main()
