"""Shards of the bundled pair: the layout against numpy, to the byte; the manifest; what is refused, and by which name."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from checkpoint_edits import SHARDS, config, copy_of, drop, edit_header, put, rewrite, truncate
from conftest import ROOT, clean_environment, matrix
from make_bad_checkpoints import BAD_DRAFTERS, BAD_MODELS, good_checkpoints
from reference import marlin
from shard_support import (DRAFT, MODEL, SHARD, contents, demand_layout, demand_refusal, rank_name, shard, start_tool,
                           tool)


@pytest.fixture(scope="module")
def api():
  from pyclient import _ffi
  return _ffi.api()


def int4(rng, n_out, n_in):
  packed = rng.integers(-2**31, 2**31, (n_out, n_in // 8)).astype(np.int32)
  return packed, rng.integers(0, 2**16, (n_out, n_in // 32)).astype(np.uint16)


def through(api, function, packed, scale, n_out, n_in):
  ffi = api.ffi
  out, out_scale = np.zeros(packed.size, np.uint32), np.zeros(scale.size, np.uint16)
  packed, scale = np.ascontiguousarray(packed).reshape(-1), np.ascontiguousarray(scale).reshape(-1)
  api.check(function(ffi.from_buffer("uint32_t[]", packed), ffi.from_buffer("uint16_t[]", scale), n_out, n_in,
                     ffi.from_buffer("uint32_t[]", out), ffi.from_buffer("uint16_t[]", out_scale), out.size,
                     out_scale.size))
  return out, out_scale


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_tiles_are_the_marlin_repack(api, n_tiles, n_groups, seed):
  n_out, n_in = 64 * n_tiles, 32 * n_groups
  packed, scale = int4(np.random.default_rng(seed), n_out, n_in)
  tiles, tile_scale = through(api, api.lib.kdt_int4_to_tiles, packed, scale, n_out, n_in)
  assert tiles.tobytes() == marlin.tiles(packed).tobytes()
  assert tile_scale.tobytes() == marlin.scales(scale).tobytes()
  back, scale_back = through(api, api.lib.kdt_tiles_to_int4, tiles, tile_scale, n_out, n_in)
  assert back.tobytes() == packed.tobytes() and scale_back.tobytes() == scale.tobytes()


@pytest.mark.parametrize("n_out, n_in, words", [(32, 32, "n_out: 32"), (0, 32, "n_out: 0"), (64, 48, "n_in: 48"),
                                                (-64, 32, "n_out: -64"), (64, 1 << 40, "n_in: "),
                                                (128, 32, "n_words: ")])
def test_ragged_matrices_are_refused(api, n_out, n_in, words):
  from pyclient import InvalidArgument
  packed, scale = int4(np.random.default_rng(0), 64, 32)
  for function in (api.lib.kdt_int4_to_tiles, api.lib.kdt_tiles_to_int4):
    with pytest.raises(InvalidArgument, match=words):
      through(api, function, packed, scale, n_out, n_in)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_rank_holds_what_numpy_says(tmp_path, tp):
  out = tmp_path / "out"
  shard(MODEL, out, "--tp", str(tp), "--draft", DRAFT, "--verify")
  demand_layout(out, MODEL, DRAFT, tp)
  names = {rank_name(rank, tp) for rank in range(tp)}
  texts = {"config.json", "generation_config.json", "tiktoken.model", "tokenizer_config.json", "chat_template.jinja",
           "draft_config.json"}
  assert {path.name for path in out.iterdir()} == names | texts | {"manifest.json"}
  manifest = json.loads((out / "manifest.json").read_text())
  assert manifest["format_version"] == 1 and manifest["tp"] == tp and manifest["checksum"] == "xxh64"
  assert set(manifest["files"]) == texts
  for rank, entry in enumerate(manifest["ranks"]):
    assert entry["file"] == rank_name(rank, tp) and entry["bytes"] == (out / entry["file"]).stat().st_size
    with safe_open(out / entry["file"], framework="numpy") as opened:
      assert set(opened.keys()) == set(entry["checksums"])
      assert opened.metadata()["rank"] == str(rank)


def test_every_spelling_of_a_checkpoint_gives_the_same_shards(tmp_path):
  shard(MODEL, tmp_path / "plain", "--tp", "2", "--draft", DRAFT)
  plain = contents(tmp_path / "plain")
  for case in good_checkpoints(MODEL.parent, tmp_path / "cases"):
    if case.name == "extra-tensor":
      demand_refusal(tool(SHARD, case.model_dir, tmp_path / "extra", "--tp", "2"),
                     "model.layers.5.extra: a tensor that no shard")
      continue
    out = tmp_path / case.name
    shard(case.model_dir, out, "--tp", "2", "--draft", case.draft_dir)
    for name, blob in contents(out).items():
      if name.endswith(".safetensors"):
        assert blob == plain[name], (case.name, name)


def test_jobs_change_no_bit(tmp_path):
  for jobs in ("1", "7"):
    shard(MODEL, tmp_path / jobs, "--tp", "4", "--draft", DRAFT, "--jobs", jobs)
  assert contents(tmp_path / "1") == contents(tmp_path / "7")


@pytest.mark.parametrize("tp, words, code", [
  ("3", "tp: 3: expected a divisor of vocab_size, 2048", 1),
  ("16", "tp: 16: expected a divisor of num_attention_heads, 8", 1),
  ("0", "", 2), ("65", "", 2), ("-1", "", 2), ("two", "", 2),
])
def test_a_tp_that_does_not_fit(tmp_path, tp, words, code):
  done = tool(SHARD, MODEL, tmp_path / "out", "--tp", tp)
  assert done.returncode == code
  if words:
    demand_refusal(done, words)
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", matrix(BAD_MODELS))
def test_bad_models_are_refused(tmp_path, name):
  edit, words = BAD_MODELS[name]
  folder = copy_of(MODEL, tmp_path / "model")
  edit(folder)
  if name in ("eos-past-vocabulary", "no-tokenizer"):
    words = ""
  demand_refusal(tool(SHARD, folder, tmp_path / "out", "--tp", "2"), words)
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", matrix(BAD_DRAFTERS))
def test_bad_drafters_are_refused(tmp_path, name):
  edit, words = BAD_DRAFTERS[name]
  folder = copy_of(DRAFT, tmp_path / "draft")
  edit(folder)
  demand_refusal(tool(SHARD, MODEL, tmp_path / "out", "--tp", "2", "--draft", folder), words)
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("edit, words", [
  (rewrite(SHARDS[0], lambda t: t.update({"model.layers.0.self_attn.q_a_proj.bias": ("BF16", [128], bytes(256))})),
   "model.layers.0.self_attn.q_a_proj.bias: a tensor that no shard would hold"),
  (rewrite(SHARDS[0], lambda t: t.pop("model.layers.1.mlp.experts.7.up_proj.weight_scale")),
   "experts.7.up_proj.weight_scale"),
  (edit_header(SHARDS[0], put("model.layers.1.self_attn.kv_b_proj.weight", "shape", [256, 256])),
   "kv_b_proj.weight: BF16 [256, 256]: expected a tensor of BF16 [512, 128]"),
  (truncate(SHARDS[1], -1), SHARDS[1]),
  (config(drop("moe_intermediate_size")), "moe_intermediate_size: absent"),
], ids=["bias", "scale-absent", "shape", "truncated", "config"])
def test_checkpoints_it_does_not_understand(tmp_path, edit, words):
  folder = copy_of(MODEL, tmp_path / "model")
  edit(folder)
  demand_refusal(tool(SHARD, folder, tmp_path / "out", "--tp", "2"), words)
  assert not (tmp_path / "out").exists()


def test_existing_output(tmp_path):
  out = tmp_path / "out"
  shard(MODEL, out, "--tp", "2")
  before = contents(out)
  demand_refusal(tool(SHARD, MODEL, out, "--tp", "4"), "holds complete shards: expected --verify to check them, --overwrite")
  assert contents(out) == before
  shard(MODEL, out, "--tp", "4", "--overwrite")
  shard(MODEL, tmp_path / "four", "--tp", "4")
  assert contents(out) == contents(tmp_path / "four")
  other = tmp_path / "other"
  other.mkdir()
  for name in ("notes.txt", "thesis.partial", "rank-a-of-b.safetensors"):
    (other / name).write_text("mine")
  demand_refusal(tool(SHARD, MODEL, other, "--tp", "2"), "not empty")
  shard(MODEL, other, "--tp", "2", "--overwrite")
  for name in ("notes.txt", "thesis.partial", "rank-a-of-b.safetensors"):
    assert (other / name).read_text() == "mine"
  demand_refusal(tool(SHARD, MODEL, tmp_path / "out" / "config.json", "--tp", "2"), "expected a directory")


def test_the_checkpoint_is_never_the_output(tmp_path):
  folder = copy_of(MODEL, tmp_path / "model")
  demand_refusal(tool(SHARD, folder, folder, "--tp", "2", "--overwrite"), "expected another directory")


def test_too_little_disk_is_refused_before_anything_is_written(tmp_path):
  program = f"""
import shutil, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
sys.argv = ["shard_weights.py", {str(MODEL)!r}, {str(tmp_path / "out")!r}, "--tp", "2"]
shutil.disk_usage = lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 7, 70_000_000)
import shard_weights
sys.exit(shard_weights.main())
"""
  done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, env=clean_environment())
  demand_refusal(done, "0.07 GB of disk free: expected 0.08 GB")
  assert not (tmp_path / "out").exists()


def flip(path, at):
  with open(path, "r+b") as file:
    file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
    byte = file.read(1)
    file.seek(-1, os.SEEK_CUR)
    file.write(bytes([byte[0] ^ 1]))


def test_verify_finds_what_is_wrong(tmp_path):
  out = tmp_path / "out"
  shard(MODEL, out, "--tp", "2", "--draft", DRAFT)
  arguments = [MODEL, out, "--tp", "2", "--draft", DRAFT, "--verify"]
  assert "verified" in shard(*arguments).stdout
  rank = out / rank_name(1, 2)
  flip(rank, -1)
  demand_refusal(tool(SHARD, *arguments), f"{rank_name(1, 2)}: draft.norm.weight: byte ")
  flip(rank, -1)
  flip(rank, rank.stat().st_size // 2)
  demand_refusal(tool(SHARD, *arguments), f"{rank_name(1, 2)}: model.layers.")
  flip(rank, rank.stat().st_size // 2)
  flip(rank, 100)
  demand_refusal(tool(SHARD, *arguments), "another header")
  flip(rank, 100)
  flip(out / "tiktoken.model", 5)
  demand_refusal(tool(SHARD, *arguments), "tiktoken.model: another file")
  flip(out / "tiktoken.model", 5)
  demand_refusal(tool(SHARD, MODEL, out, "--tp", "4", "--verify"), "tp: 2: expected 4")
  manifest = json.loads((out / "manifest.json").read_text())
  manifest["ranks"][0]["checksums"]["lm_head.weight"] = "0" * 16
  (out / "manifest.json").write_text(json.dumps(manifest))
  demand_refusal(tool(SHARD, *arguments), "lm_head.weight: expected the checksums")
  os.truncate(rank, rank.stat().st_size - 1)
  demand_refusal(tool(SHARD, *arguments), f"{rank_name(1, 2)}: ")
  (out / "manifest.json").write_text("{}")
  demand_refusal(tool(SHARD, *arguments), "manifest.json")


@pytest.mark.parametrize("change, words", [
  (lambda m: m.update(format_version=2), "manifest.json: format_version: 2: expected 1"),
  (lambda m: m.update(tile_layout="zzz"), "tile_layout: zzz: expected "),
  (lambda m: m["ranks"][0].update(file="nope"), "ranks.0.file: nope: expected rank-00000-of-00002.safetensors"),
  (lambda m: m["ranks"][1].update(bytes=5), "ranks.1.bytes: 5: expected "),
  (lambda m: m["ranks"][0]["checksums"].update(x="0"), "ranks.0.checksums.x: 0: expected no such field"),
  (lambda m: m["files"]["config.json"].update(bytes=1), "files.config.json.bytes: 1: expected "),
  (lambda m: m["files"].update({"a\0b": {}}), "expected no such field"),
  (lambda m: m["files"].pop("tokenizer_config.json"), "files.tokenizer_config.json: null: expected "),
  (lambda m: m.update(config="x"), "config: x: expected config.json"),
  (lambda m: m.update(ranks=7), "ranks: 7: expected an array of 2"),
  (lambda m: m["ranks"].__setitem__(0, {}), "ranks: KeyError('checksums'): expected the checksums of every tensor"),
])
def test_verify_wants_the_manifest_that_would_be_written(two_ranks, change, words):
  path = two_ranks / "manifest.json"
  text = path.read_text()
  manifest = json.loads(text)
  change(manifest)
  path.write_text(json.dumps(manifest))
  try:
    demand_refusal(tool(SHARD, MODEL, two_ranks, "--tp", "2", "--verify"), words)
  finally:
    path.write_text(text)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
  out = tmp_path_factory.mktemp("two") / "out"
  shard(MODEL, out, "--tp", "2")
  return out


def test_verify_waits_for_no_fifo_and_survives_deep_json(tmp_path):
  out = tmp_path / "out"
  shard(MODEL, out, "--tp", "2")
  for name in (rank_name(0, 2), "tiktoken.model", "manifest.json"):
    (out / name).rename(tmp_path / "kept")
    os.mkfifo(out / name)
    demand_refusal(tool(SHARD, MODEL, out, "--tp", "2", "--verify", timeout=60), f"{name}: not a file")
    (out / name).unlink()
    (tmp_path / "kept").rename(out / name)
  (out / "manifest.json").write_text("[" * 100_000)
  demand_refusal(tool(SHARD, MODEL, out, "--tp", "2", "--verify"), "expected a manifest of shards")


def test_a_name_that_is_no_text(tmp_path):
  out = os.fsencode(tmp_path) + b"/\xff"
  environment = clean_environment() | {"PYTHONIOENCODING": "utf-8:strict"}
  done = subprocess.run([sys.executable, os.fspath(SHARD), os.fspath(MODEL), out, "--tp", "2"], capture_output=True, env=environment)
  assert done.returncode == 0 and b"2 ranks" in done.stdout, done.stderr


def test_shards_are_no_checkpoint(tmp_path):
  shards = tmp_path / "shards"
  shard(MODEL, shards, "--tp", "2", "--draft", DRAFT)
  demand_refusal(tool(SHARD, shards, tmp_path / "out", "--tp", "2"), "shards: shards: expected a checkpoint")
  demand_refusal(tool(SHARD, MODEL, tmp_path / "out", "--tp", "2", "--draft", shards), "expected a drafter's checkpoint")
  demand_refusal(tool(SHARD, MODEL, shards, "--tp", "2", "--verify"), "draft_config: draft_config.json: expected --draft")
  shard(MODEL, tmp_path / "alone", "--tp", "2")
  demand_refusal(tool(SHARD, MODEL, tmp_path / "alone", "--tp", "2", "--draft", DRAFT, "--verify"),
                 "draft_config: null: expected shards of a drafter too")


def test_a_hub_s_links_and_spaces_in_names(tmp_path):
  snapshot, blobs = tmp_path / "hub dir" / "snapshots" / "abc", tmp_path / "hub dir" / "blobs"
  snapshot.mkdir(parents=True)
  blobs.mkdir()
  for number, path in enumerate(sorted(MODEL.iterdir())):
    (blobs / str(number)).write_bytes(path.read_bytes())
    (snapshot / path.name).symlink_to(f"../../blobs/{number}")
  shard(snapshot, tmp_path / "with space", "--tp", "2", "--verify")
  shard(MODEL, tmp_path / "plain", "--tp", "2")
  assert contents(tmp_path / "with space") == contents(tmp_path / "plain")


@pytest.mark.parametrize("milliseconds", [0, 1, 3, 10, 30])
def test_ctrl_c_says_how_to_go_on(tmp_path, milliseconds):
  with start_tool(SHARD, MODEL, tmp_path / "out", "--tp", "8", "--jobs", "2") as process:
    process.stdout.readline()
    time.sleep(milliseconds / 1e3)
    process.send_signal(signal.SIGINT)
    try:
      _, err = process.communicate(timeout=120)
    finally:
      process.kill()
  assert process.returncode in (0, 130), err
  assert "Traceback" not in err
  assert process.returncode == 0 or not (tmp_path / "out" / "manifest.json").exists()
