"""The checks of tools/check_real_weights.py: each returns what it found, and raises CheckFailed where that is wrong."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from pyclient import Session

from .kimi_layout import PREFIX, checkpoint_files, drafter_tensors

MAKE_SYNTHETIC = pathlib.Path(__file__).resolve().parents[1] / "make_synthetic.py"
# Small in every dimension but the vocabulary: a model that carries the real tokenizer.
SMALL = {
  "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 2, "num_experts_per_tok": 1,
  "num_attention_heads": 1, "num_key_value_heads": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
  "qk_rope_head_dim": 16, "v_head_dim": 16, "num_hidden_layers": 1, "max_position_embeddings": 4096,
}
TEXTS = [
  "def add(a, b):\n    return a + b\n", "The quick brown fox doesn't jump.", "  leading and trailing  \n\n\t", "12345678 3.14159",
  "北京的天气很好。\n今天是2026年。", "日本語とEnglishの混在", "Größe, naïve café — “quotes”", "مرحبا بالعالم", "👩‍👩‍👧‍👦 and 🇺🇳",
  "x" * 300, " " * 300, "a\r\nb\rc\u2028d", "I'll you've WE'RE it's", "e\u0301\u0300 combining", "<|im_end|> [EOS] <think>",
]
CONVERSATIONS: list[list[dict[str, str]]] = [
  [{"role": "user", "content": "Hello"}],
  [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}],
  [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"},
   {"role": "user", "content": "And now?\n"}],
]


class CheckFailed(Exception):
  """`<file or tensor>: <found>: expected <what>`."""


def reason(error: Exception) -> str:
  """Why a file was not read, for a message that has its path already."""
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  return repr(error) if isinstance(error, KeyError) else str(error)   # a key alone says nothing


def read_config(folder: pathlib.Path) -> dict[str, Any]:
  try:
    config = json.loads((folder / "config.json").read_text())
  except (OSError, ValueError) as error:
    raise CheckFailed(f"{folder / 'config.json'}: {reason(error)}: expected a JSON file") from None
  if not isinstance(config, dict):
    raise CheckFailed(f"{folder / 'config.json'}: no object: expected a JSON object")
  return config


def read_header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
  """The header of a safetensors file and where its data begins."""
  try:
    with open(path, "rb") as file:
      (length,) = struct.unpack("<Q", file.read(8))
      if length > 100_000_000:
        raise CheckFailed(f"{path}: a header of {length} bytes: expected at most 100000000")
      return json.loads(file.read(length)), 8 + length
  except (OSError, ValueError, struct.error) as error:
    raise CheckFailed(f"{path}: {reason(error)}: expected a safetensors file") from None


def check_tensors(model: pathlib.Path) -> str:
  """Every name, dtype, shape and file against the published layout for its config."""
  config = read_config(model)
  n = 0
  for file, tensors in checkpoint_files(config).items():
    header, _ = read_header(model / file)
    header.pop("__metadata__", None)
    for tensor in tensors:
      entry = header.pop(tensor.name, None)
      found = None if entry is None else (entry["dtype"], tuple(entry["shape"]))
      if found != (tensor.dtype, tensor.shape):
        raise CheckFailed(f"{model / file}: {tensor.name}: {found}: expected {(tensor.dtype, tensor.shape)}")
      n += 1
    if header:
      raise CheckFailed(f"{model / file}: {next(iter(header))}: expected no such tensor")
  return f"{n} tensors where the published layout has them"


@contextlib.contextmanager
def small_session(model: pathlib.Path) -> Iterator[Session]:
  """A session whose weights are random and small, and whose tokenizer, chat format and vocabulary are the model's."""
  config = read_config(model)
  with tempfile.TemporaryDirectory(prefix="kdtree-check-") as folder:
    arguments = [f"{key}={value}" for key, value in SMALL.items()] + ["first_k_dense_replace=0"]
    command = [sys.executable, str(MAKE_SYNTHETIC), f"{folder}/model", "--config", str(model), "--no-vision",
               "--tokenizer", str(model), *(item for text in arguments for item in ("--set", text))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
      raise CheckFailed(done.stderr.strip().removeprefix("error: "))
    if "text_config" in config:
      config_path = pathlib.Path(folder, "model", "config.json")
      written = json.loads(config_path.read_text())
      written["text_config"].setdefault("model_type", "kimi_k2")
      config_path.write_text(json.dumps(written))
    with Session(f"{folder}/model", max_context=4096, threads=1) as session:
      yield session


def pattern_of(model: pathlib.Path) -> str:
  """The splitting pattern that the checkpoint's own tokenization_kimi.py has: the strings of its `pat_str` list."""
  import ast
  path = model / "tokenization_kimi.py"
  try:
    tree = ast.parse(path.read_text())
  except (OSError, SyntaxError) as error:
    raise CheckFailed(f"{path}: {reason(error)}: expected the checkpoint's tokenizer") from None
  for node in ast.walk(tree):
    if (isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pat_str" for t in node.targets)
        and isinstance(node.value, ast.Call) and node.value.args and isinstance(node.value.args[0], ast.List)):
      return "|".join(ast.literal_eval(item) for item in node.value.args[0].elts)
  raise CheckFailed(f"{path}: no pat_str: expected the splitting pattern")


def check_tokenizer(model: pathlib.Path, session: Session) -> str:
  """The engine's ids against tiktoken with the checkpoint's own ranks and pattern. Its code is read, never run."""
  import tiktoken
  from tiktoken.load import load_tiktoken_bpe
  ranks = load_tiktoken_bpe(str(model / "tiktoken.model"))
  encoding = tiktoken.Encoding("checkpoint", pat_str=pattern_of(model), mergeable_ranks=ranks, special_tokens={})
  for text in TEXTS:
    found, expected = session.tokenize(text), encoding.encode_ordinary(text)
    if found != expected:
      raise CheckFailed(f"{model / 'tiktoken.model'}: {text[:40]!r}: {found[:12]}: expected {expected[:12]}")
  return f"{len(TEXTS)} texts as tiktoken has them, {len(ranks)} ranks"


def check_template(model: pathlib.Path, session: Session) -> str:
  """The engine's chat format against the checkpoint's chat_template.jinja, rendered in jinja2's sandbox."""
  from jinja2 import TemplateError
  from jinja2.sandbox import ImmutableSandboxedEnvironment
  path = model / "chat_template.jinja"
  if not path.is_file():
    raise CheckFailed(f"{path}: no such file: expected the checkpoint's template")
  environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
  environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False, separators=(",", ":"))
  n = 0
  for messages in CONVERSATIONS:
    for thinking in (True, False):
      try:
        expected = environment.from_string(path.read_text()).render(messages=messages, add_generation_prompt=True,
                                                                    thinking=thinking)
      except TemplateError as error:
        raise CheckFailed(f"{path}: {error}: expected a template that renders") from None
      found = session.detokenize(session.chat_tokens(messages, thinking=thinking))
      if found != expected:
        raise CheckFailed(f"{path}: thinking {thinking}: {found!r}: expected {expected!r}")
      n += 1
  return f"{n} conversations as chat_template.jinja has them"


def check_nibbles(model: pathlib.Path, per_layer: int) -> str:
  """Which of the 16 stored values occur in packed experts: 0 (a weight of -8) should not."""
  config = read_config(model)
  prefix = PREFIX if "text_config" in config else ""
  counts = np.zeros(16, np.int64)
  n = 0
  for file, tensors in checkpoint_files(config).items():
    packed = [tensor for tensor in tensors if tensor.kind == "packed" and tensor.name.startswith(prefix + "model.layers.")]
    if not packed:
      continue
    header, start = read_header(model / file)
    step = max(1, len(packed) // (3 * per_layer)) if per_layer else 1
    for tensor in packed[:: step]:
      begin, end = header[tensor.name]["data_offsets"]
      pairs = np.bincount(np.fromfile(model / file, np.uint8, end - begin, offset=start + begin), minlength=256)
      counts += pairs.reshape(16, 16).sum(0) + pairs.reshape(16, 16).sum(1)
      n += 1
  share = ", ".join(f"{value - 8}: {100 * count / max(1, counts.sum()):.2f}%" for value, count in enumerate(counts))
  if counts[0]:
    raise CheckFailed(f"{model}: {counts[0]} weights of -8 in {n} matrices ({share}): expected -7 to 7")
  return f"{n} matrices, values -7 to 7 ({share})"


def amplitude(config: dict[str, Any]) -> tuple[str, float]:
  scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
  kind = scaling.get("rope_type", scaling.get("type", "none"))

  def mscale(m: float) -> float:
    return 0.1 * m * math.log(scaling["factor"]) + 1 if scaling.get("factor", 1) > 1 and m else 1.0

  if "factor" not in scaling:
    return kind, 1.0
  return kind, mscale(scaling.get("mscale", 1)) / mscale(scaling.get("mscale_all_dim", 0))


def check_drafter(model: pathlib.Path, draft: pathlib.Path) -> str:
  """The drafter's fields against its target's and its tensors against its fields."""
  from .kimi_layout import text_of
  target, config = text_of(read_config(model)), read_config(draft)
  for key, expected in (("hidden_size", target["hidden_size"]), ("vocab_size", target["vocab_size"]),
                        ("num_target_layers", target["num_hidden_layers"])):
    if config.get(key) != expected:
      raise CheckFailed(f"{draft / 'config.json'}: {key}: {config.get(key)}: expected the target's {expected}")
  headers = [read_header(path)[0] for path in sorted(draft.glob("*.safetensors"))]
  found = {name.removeprefix("model."): entry for header in headers for name, entry in header.items()}
  for tensor in drafter_tensors(config):
    entry = found.get(tensor.name)
    if entry is None or (entry["dtype"], tuple(entry["shape"])) != (tensor.dtype, tensor.shape):
      raise CheckFailed(f"{draft}: {tensor.name}: {entry}: expected {tensor.dtype} {list(tensor.shape)}")
  kind, value = amplitude(config)
  dflash = config["dflash_config"]
  return (f"block {config.get('block_size', dflash.get('block_size'))}, taps {dflash.get('target_layer_ids')}, "
          f"mask {dflash.get('mask_token_id')}, layers {config.get('layer_types', 'full attention')}, "
          f"window {config.get('sliding_window')}, rope {kind} of amplitude {value:.4f}")


@contextlib.contextmanager
def with_amplitude(draft: pathlib.Path, full: bool) -> Iterator[pathlib.Path]:
  """The drafter with YaRN's amplitude 1 + 0.1 ln factor (`full`), or 1."""
  with tempfile.TemporaryDirectory(prefix="kdtree-check-") as folder:
    for path in draft.iterdir():
      if path.name != "config.json":
        pathlib.Path(folder, path.name).symlink_to(path.resolve())
    config = read_config(draft)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not scaling or "factor" not in scaling:
      raise CheckFailed(f"{draft / 'config.json'}: rope_scaling: no YaRN: expected a factor")
    scaling.update(mscale=1.0, mscale_all_dim=0.0 if full else 1.0)
    pathlib.Path(folder, "config.json").write_text(json.dumps(config))
    yield pathlib.Path(folder)


def acceptance(model: pathlib.Path, draft: pathlib.Path, prompts: list[str],
               max_tokens: int) -> tuple[float, list[float]]:
  """(committed tokens per round, share of rounds that accept depth 1, 2, …) of full-length chains."""
  rounds = tokens = 0
  depths: list[int] = []
  with Session(model, draft) as session:
    for prompt in prompts:
      result = session.generate(prompt, max_tokens=max_tokens, speculate="chain", ignore_eos=True)
      rounds += result.rounds
      tokens += round(result.tokens_per_round * result.rounds)
      depths += [0] * (len(result.accepted_by_depth) - len(depths))
      for i, n in enumerate(result.accepted_by_depth):
        depths[i] += n
  return tokens / max(rounds, 1), [n / max(rounds, 1) for n in depths]


def check_agreement(model: pathlib.Path, draft: pathlib.Path | None, fixture: pathlib.Path, tolerance: float) -> str:
  """Greedy ids and log-probabilities against a fixture: {"prompts": [{"prompt_ids", "token_ids", "logprobs"?}]}.

  A token may differ where the fixture's own token has a log-probability within `tolerance` of the engine's: a near-tie,
  after which the two texts go different ways.
  """
  try:
    prompts = json.loads(fixture.read_text())["prompts"]
    cases = [([int(t) for t in p["prompt_ids"]], [int(t) for t in p["token_ids"]], p.get("logprobs")) for p in prompts]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise CheckFailed(f"{fixture}: {reason(error)}: expected prompts with prompt_ids, token_ids and logprobs") from None
  same = ties = 0
  worst = 0.0
  with Session(model, draft) as session:
    for i, (prompt, expected, logprobs) in enumerate(cases):
      logits = session.score([*prompt, *expected[:-1]])[len(prompt) - 1 :].astype(np.float64)
      shifted = logits - logits.max(1, keepdims=True)
      found = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
      for at, token in enumerate(expected):
        best = int(found[at].argmax())
        if logprobs is not None:
          worst = max(worst, abs(found[at, token] - logprobs[at]))
        if best == token:
          same += 1
        elif found[at, best] - found[at, token] <= tolerance:
          ties += 1
        else:
          raise CheckFailed(f"{fixture}: prompt {i}, token {at}: {best} by {found[at, best] - found[at, token]:.4f}: "
                            f"expected {token}")
      if worst > tolerance:
        raise CheckFailed(f"{fixture}: prompt {i}: log-probabilities differ by {worst:.4f}: expected at most {tolerance}")
  return f"{same} tokens of {len(cases)} prompts agree, {ties} near-ties, log-probabilities within {worst:.2e}"


