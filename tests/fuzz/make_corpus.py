"""Seeds of the fuzz targets: make_corpus.py SOURCE_ROOT STAMP writes corpus/<target>/* beside STAMP."""

import copy
import json
import pathlib
import struct
import sys


def safetensors(header: object, data: bytes) -> bytes:
  text = json.dumps(header).encode()
  return struct.pack("<Q", len(text)) + text + data


def safetensors_seeds() -> list[bytes]:
  seeds = [safetensors({}, b""), safetensors({"__metadata__": {"format": "pt"}}, b"")]
  header: dict[str, object] = {}
  end = 0
  sizes = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8}
  for dtype, size in sizes.items():
    header[f"layers.{dtype}"] = {"dtype": dtype, "shape": [1, 3], "data_offsets": [end, end + 3 * size]}
    end += 3 * size
  seeds.append(safetensors(header, bytes(end)))
  seeds.append(safetensors({"empty": {"dtype": "F32", "shape": [0, 2], "data_offsets": [0, 0]}}, b""))
  seeds.append(safetensors({"scalar": {"dtype": "BF16", "shape": [], "data_offsets": [0, 2]}}, b"ab"))
  return seeds


def config_seeds(root: pathlib.Path) -> list[bytes]:
  models = root / "models"
  target = json.loads((models / "tiny-k2/config.json").read_text())
  draft = json.loads((models / "tiny-k2-dflash/config.json").read_text())
  generation = (models / "tiny-k2/generation_config.json").read_bytes()
  wrapper = {"model_type": "kimi_k25", "text_config": target, "eos_token_id": [1793, 1794]}
  newer = copy.deepcopy(draft)
  newer["rope_parameters"] = {**newer.pop("rope_scaling"), "rope_theta": newer.pop("rope_theta")}
  newer["dflash_config"] = {"mask_token_id": 2046, "block_size": newer.pop("block_size")}
  newer["num_target_layers"] = 61
  del newer["layer_types"]
  seeds = [json.dumps(config, separators=(",", ":")).encode() for config in (target, draft, wrapper, newer)]
  return seeds + [seeds[0] + b"\0" + generation]


def text_seeds(root: pathlib.Path) -> list[bytes]:
  """The first byte chooses the reader: tokenizer files, conversation and tools, text, byte stream."""
  ranks = b"".join((root / "models/tiny-k2/tiktoken.model").read_bytes().splitlines(keepends=True)[:300])
  added = b'{"added_tokens_decoder":{"300":{"content":"[EOS]","special":true}}}'
  tool = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"]}}}
  call = {"id": "f:0", "type": "function", "function": {"name": "f", "arguments": '{"a":"x"}'}}
  messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]},
              {"role": "tool", "tool_call_id": "f:0", "content": [{"type": "text", "text": "漢"}]}]
  text = "def f(a):\r\n\t漢字 é 🙂 1234 it's".encode()
  conversation = json.dumps(messages).encode() + b"\0" + json.dumps([tool]).encode()
  return [b"\0" + ranks + b"\0" + added, b"\1" + conversation, b"\2" + text, b"\3" + text + b"\xf0\x9f\x99"]


def reply_seeds() -> list[bytes]:
  """Even first byte: stop strings and pieces; odd: a turn, whose bytes below 16 are control tokens."""
  pieces = [b"ab", b"bcd", b"xab", b"c", b"bc", "é".encode()]
  stop = b"\0\2" + b"".join(bytes([len(piece)]) + piece for piece in pieces)
  turn = b"why\1so\2\3functions.f:0\4{\"a\": 1}\5\3functions.g:1\4" + "{\"b\": \"é\"}".encode() + b"\5\6done\0"
  return [stop, *(bytes([first]) + turn for first in (1, 3, 5, 7))]


def openai_seeds() -> list[bytes]:
  """The first byte chooses the endpoint: chat, completion, tokenize, detokenize."""
  tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
  chat = {"model": "m", "messages": [{"role": "developer", "content": [{"type": "text", "text": "漢"}]}], "tools": [tool],
          "tool_choice": "auto", "stream": True, "stream_options": {"include_usage": True}, "logprobs": True,
          "top_logprobs": 2, "max_completion_tokens": 5, "chat_template_kwargs": {"thinking": True}, "user": "u",
          "response_format": {"type": "text"}}
  sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "presence_penalty": -1, "frequency_penalty": 1,
              "repetition_penalty": 1.1, "seed": -1, "max_tokens": 7, "min_tokens": 1, "stop": ["a", "\n"],
              "stop_token_ids": [1], "logit_bias": {"17": -100}, "n": 2, "priority": 1, "timeout": 1.5,
              "speculate": "tree", "budget": 8, "spine": True}
  bodies = [(0, chat), (0, {**sampling, "messages": [{"role": "user", "content": "x"}]}),
            (1, {"prompt": ["a", "b"], "echo": True, "logprobs": 3, "max_tokens": 0}), (1, {"prompt": [[1, 2]], **sampling}),
            (2, {"prompt": "x", "add_special_tokens": False}), (2, {"messages": chat["messages"]}), (3, {"tokens": [1, 2]})]
  return [bytes([first]) + json.dumps(body, ensure_ascii=False).encode() for first, body in bodies]


def shard_seeds(root: pathlib.Path) -> list[bytes]:
  """A manifest of two ranks, and the configs."""
  ranks = [{"file": f"rank-{i:05d}-of-00002.safetensors", "bytes": 8192,
            "checksums": {"model.norm.weight": "0123456789abcdef"}} for i in range(2)]
  manifest = {"format": "kdtree-shards", "format_version": 1, "tp": 2, "tile_layout": "marlin-int4-16x64-group32",
              "checksum": "xxh64", "config": "config.json", "draft_config": None,
              "files": {"config.json": {"bytes": 2152, "checksum": "9df7e06876d1783a"}}, "ranks": ranks}
  configs = [root / "models" / "tiny-k2" / "config.json", root / "models" / "presets" / "kimi-k2.6" / "config.json"]
  return [json.dumps(manifest).encode(), *(path.read_bytes() for path in configs)]


def main() -> None:
  root, stamp = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
  targets = {"safetensors": safetensors_seeds(), "config": config_seeds(root), "shards": shard_seeds(root),
             "text": text_seeds(root), "reply": reply_seeds(), "openai": openai_seeds()}
  for target, seeds in targets.items():
    folder = stamp.parent / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
      (folder / f"seed-{number}").write_bytes(seed)
  stamp.write_text("")


if __name__ == "__main__":
  main()
