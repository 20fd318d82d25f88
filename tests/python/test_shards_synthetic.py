"""Synthetic checkpoints: the published one's tensors to the byte count, equal bytes for equal seeds, and shards of them."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest
from safetensors import safe_open

from conftest import ROOT, RUN, clean_environment, kdtree_run
from shard_support import (MODEL, SHARD, SYNTHETIC, contents, demand_layout, demand_refusal, raw_tensors, shard, tool)

sys.path.insert(0, str(ROOT / "tools"))
from sharding.kimi_layout import checkpoint_files, drafter_tensors  # noqa: E402

PRESETS = ROOT / "models" / "presets"
# Eight heads of the real sizes' proportions, every dimension small; tp 4 is the most that INT4 tiles allow.
NARROW = [item for pair in {
  "hidden_size": 192, "intermediate_size": 192, "moe_intermediate_size": 128, "n_routed_experts": 12, "num_experts_per_tok": 3,
  "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
  "qk_rope_head_dim": 16, "v_head_dim": 24, "vocab_size": 2048, "max_position_embeddings": 4096,
  "vision_config.vt_hidden_size": 16, "vision_config.vt_intermediate_size": 32, "vision_config.vt_num_hidden_layers": 2,
}.items() for item in ("--set", f"{pair[0]}={pair[1]}")]
NARROW_DRAFT = [item for key, value in {
  "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 96, "num_hidden_layers": 2,
}.items() for item in ("--draft-set", f"{key}={value}")]


def preset(name):
  return json.loads((PRESETS / name / "config.json").read_text())


def test_the_preset_is_the_published_checkpoint_to_the_byte():
  files = checkpoint_files(preset("kimi-k2.6"))
  tensors = [tensor for group in files.values() for tensor in group]
  assert len(files) == 64 and list(files)[61] == "model-00062-of-000064.safetensors"
  assert len(tensors) == 208_550
  assert sum(tensor.n_bytes for tensor in tensors) == 595_148_192_736
  vision = [tensor for tensor in tensors if tensor.name.startswith(("vision_tower.", "mm_projector."))]
  assert len(vision) == 335 and sum(tensor.n_bytes for tensor in vision) == 942_287_840
  top = files["model-00062-of-000064.safetensors"]
  assert sorted(tensor.name for tensor in top) == ["language_model.lm_head.weight",
                                                   "language_model.model.embed_tokens.weight",
                                                   "language_model.model.norm.weight"]
  drafter_bytes = sum(tensor.n_bytes for tensor in drafter_tensors(preset("kimi-k2.6-dflash")))
  assert drafter_bytes / 2**30 == pytest.approx(6.48, abs=0.005)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
  folder = tmp_path_factory.mktemp("narrow")
  done = tool(SYNTHETIC, folder / "model", "--layers", "3", *NARROW, "--draft", folder / "draft", *NARROW_DRAFT)
  assert done.returncode == 0, done.stderr
  return folder / "model", folder / "draft"


def test_files_and_values_of_a_narrow_one(narrow):
  model, draft = narrow
  index = json.loads((model / "model.safetensors.index.json").read_text())
  assert sorted(set(index["weight_map"].values())) == [f"model-{i:05d}-of-000006.safetensors" for i in range(1, 7)]
  total = 0
  for name in sorted(set(index["weight_map"].values())):
    with safe_open(model / name, framework="numpy") as opened:
      assert {index["weight_map"][key] for key in opened.keys()} == {name}
    total += sum(array.nbytes for array in raw_tensors(model / name).values())
  assert total == index["metadata"]["total_size"]
  layer = raw_tensors(model / "model-00002-of-000006.safetensors")
  packed = layer["language_model.model.layers.1.mlp.experts.5.up_proj.weight_packed"].view(np.uint8)
  assert not ((packed & 15) == 0).any() and not ((packed >> 4) == 0).any()
  shape = layer["language_model.model.layers.1.mlp.experts.5.down_proj.weight_shape"]
  assert shape.tolist() == [192, 128]
  draft_config = json.loads((draft / "config.json").read_text())
  assert len(raw_tensors(draft / "model.safetensors")) == len(list(drafter_tensors(draft_config)))


def test_equal_seeds_equal_bytes(tmp_path):
  for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
    assert tool(SYNTHETIC, tmp_path / name, "--layers", "2", *NARROW, "--seed", seed).returncode == 0
  assert contents(tmp_path / "a") == contents(tmp_path / "b")
  assert contents(tmp_path / "a") != contents(tmp_path / "c")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_of_a_narrow_one(narrow, tmp_path, tp):
  model, draft = narrow
  shard(model, tmp_path / "out", "--tp", str(tp), "--draft", draft, "--verify")
  demand_layout(tmp_path / "out", model, draft, tp)


def test_a_narrow_one_generates(narrow):
  model, draft = narrow
  done = kdtree_run("generate", "--model", model, "--draft", draft, "--prompt", "def f(x):", "--max-tokens", "8",
                    "--json")
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout)
  alone = kdtree_run("generate", "--model", model, "--prompt", "def f(x):", "--max-tokens", "8", "--json")
  assert result["token_ids"] == json.loads(alone.stdout)["token_ids"]


# About 200 MB: what CI rehearses of the full width.
MEDIUM = [item for pair in {
  "hidden_size": 2048, "intermediate_size": 2048, "moe_intermediate_size": 512, "n_routed_experts": 96, "num_experts_per_tok": 8,
  "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 256, "vocab_size": 2048, "max_position_embeddings": 4096,
}.items() for item in ("--set", f"{pair[0]}={pair[1]}")]


def peak_memory(tool_path, *arguments):
  """Runs a tool; its largest resident set in bytes. The kernel counts the memory a program was started from as the
  program's own, so a small one stands between it and the tests."""
  between = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
             "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
  done = subprocess.run([sys.executable, "-c", between, sys.executable, tool_path, *arguments], capture_output=True,
                        text=True, env=clean_environment())
  assert done.returncode == 0, done.stderr
  return int(done.stdout) * 1024


def test_two_hundred_megabytes(tmp_path):
  done = tool(SYNTHETIC, tmp_path / "model", "--layers", "2", "--no-vision", *MEDIUM)
  assert done.returncode == 0, done.stderr
  size = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
  assert 180e6 < size < 260e6
  assert peak_memory(SHARD, tmp_path / "model", tmp_path / "eight", "--tp", "8", "--jobs", "2") < 300e6
  assert "verified" in shard(tmp_path / "model", tmp_path / "eight", "--tp", "8", "--verify").stdout
  shard(tmp_path / "model", tmp_path / "one", "--tp", "1")
  bar, result = on_a_terminal("generate", "--model", tmp_path / "one", "--prompt", "def f(x):", "--max-tokens", "4", "--json",
                              "--max-context", "512")
  plain = kdtree_run("generate", "--model", tmp_path / "model", "--prompt", "def f(x):", "--max-tokens", "4", "--json",
                     "--max-context", "512")
  assert json.loads(result)["token_ids"] == json.loads(plain.stdout)["token_ids"]
  if b"loading" in bar:  # else it was loaded before the first line would have been drawn
    assert re.search(rb"loading \[#* *\] [\d.]+ of 2\d\d\.\d MB, [\d.]+ MB/s", bar), bar
    assert bar.endswith(b"\r\x1b[K")


def on_a_terminal(*arguments):
  """(what the daemon drew on the terminal that is its standard error, its standard output)."""
  master, terminal = pty.openpty()
  with subprocess.Popen([RUN, *map(os.fspath, arguments)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal,
                        env=clean_environment()) as process:
    os.close(terminal)
    drawn = b""
    with contextlib.suppress(OSError):  # EIO: nobody writes any more
      while piece := os.read(master, 4096):
        drawn += piece
    result = process.stdout.read()
  os.close(master)
  assert process.returncode == 0, drawn
  return drawn, result


def test_wide_tiles_that_a_rank_cannot_have(narrow, tmp_path):
  demand_refusal(tool(SHARD, narrow[0], tmp_path / "out", "--tp", "8"),
                 "w13 of 8 ranks: 32 outputs, 192 inputs: expected multiples")


@pytest.mark.parametrize("arguments, words", [
  (["--config", "kimi-k9"], "--config: kimi-k9: expected one of kimi-k2.6"),
  (["--set", "hidden_size"], "--set: hidden_size: expected KEY=VALUE"),
  (["--set", "no_such=1"], "--set: no_such: no such field"),
  (["--set", "hidden_sise=3"], "--set: hidden_sise: no such field: expected perhaps hidden_size"),
  (["--set", "vision.x=1"], "--set: vision.x: no vision in the config"),
  (["--set", "hidden_size=\"x\""], "expected"),
  (["--set", "num_hidden_layers=\"x\""], "--layers: "),
  (["--set", "moe_intermediate_size=7"], "expected positive integers"),
  (["--layers", "-1"], "expected"),
])
def test_what_cannot_be_made(tmp_path, arguments, words):
  done = tool(SYNTHETIC, tmp_path / "out", *([] if "num_hidden" in arguments[1] else ["--layers", "2"]), *NARROW,
              *arguments)
  demand_refusal(done, words)


def test_an_existing_folder_is_left_alone(tmp_path):
  (tmp_path / "file").write_text("mine")
  demand_refusal(tool(SYNTHETIC, tmp_path, "--layers", "1", *NARROW), "expected a directory that is empty")
  assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_bundled_config_is_one_too(tmp_path):
  done = tool(SYNTHETIC, tmp_path / "out", "--config", MODEL)
  assert done.returncode == 0, done.stderr
  names = {name for path in MODEL.glob("*.safetensors") for name in raw_tensors(path)}
  assert {name for path in (tmp_path / "out").glob("*.safetensors") for name in raw_tensors(path)} == names
