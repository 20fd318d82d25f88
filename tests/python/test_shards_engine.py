"""The engine on a shard directory: the bits of the checkpoint it came from, and hostile manifests and shards by name."""

import json
import pathlib
import random
import shutil

import pytest

from checkpoint_edits import copy_of, edit_header, edit_json, put, read_safetensors, truncate, write_safetensors
from conftest import kdtree_run, matrix
from make_bad_checkpoints import wrap
from shard_support import DRAFT, MODEL, SHARD, demand_refusal, rank_name, shard, tool

RANK = rank_name(0, 1)
MANIFEST = "manifest.json"


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
  out = tmp_path_factory.mktemp("shards") / "out"
  shard(MODEL, out, "--tp", "1", "--draft", DRAFT)
  return out


@pytest.fixture
def copy(shards, tmp_path):
  """Whole files: edits may write into them."""
  return pathlib.Path(shutil.copytree(shards, tmp_path / "copy"))


def generate(model, draft, *arguments):
  drafter = [] if draft is None else ["--draft", draft]
  return kdtree_run("generate", "--model", model, *drafter, "--prompt", "def add(a, b):\n", "--max-tokens", "24",
                    *arguments)


def test_logits_are_those_of_the_checkpoint_to_the_bit(shards):
  from pyclient import Session
  ids = list(range(200))
  with Session(MODEL, DRAFT, threads=1) as plain, Session(shards, shards, threads=1) as sharded:
    assert plain.score(ids).tobytes() == sharded.score(ids).tobytes()
    for settings in ({"speculate": "off"}, {"speculate": "tree", "budget": 12}, {"temperature": 0.8, "seed": 5}):
      a, b = (session.generate("import os\n\ndef ", max_tokens=48, **settings) for session in (plain, sharded))
      assert a.token_ids == b.token_ids, settings
    a, b = (session.generate("import os\n\ndef ", max_tokens=48, speculate="tree", budget=12)
            for session in (plain, sharded))
    assert a.accepted_by_depth == b.accepted_by_depth and a.rounds == b.rounds
    turn = [{"role": "user", "content": "hi"}]
    assert plain.chat_tokens(turn) == sharded.chat_tokens(turn)


def test_a_wrapped_checkpoint_and_shards_without_a_drafter(tmp_path):
  from pyclient import Session
  model = copy_of(MODEL, tmp_path / "model")
  wrap(model)
  shard(model, tmp_path / "out", "--tp", "1")
  with Session(model, threads=1) as plain, Session(tmp_path / "out", threads=1) as sharded, \
       Session(tmp_path / "out", DRAFT, threads=1) as drafted:
    logits = plain.score(range(64))
    assert logits.tobytes() == sharded.score(range(64)).tobytes() == drafted.score(range(64)).tobytes()
  demand_error(generate(tmp_path / "out", tmp_path / "out"), "draft_config.json: No such file")


def demand_error(done, words):
  done.stderr = done.stderr.decode("utf-8", "replace")
  demand_refusal(done, words)
  for report in ("Sanitizer", "runtime error:", "terminate called"):
    assert report not in done.stderr


def manifest(*path_and_value):
  return edit_json(MANIFEST, put(*path_and_value))


def replace(name, text):
  return lambda folder: (folder / name).write_bytes(text)


def swap_ranks(folder):
  """The other rank's file under this rank's name."""
  header, data = read_safetensors(folder / RANK)
  header["__metadata__"]["rank"] = "3"
  padded = json.dumps(header, separators=(",", ":")).encode()
  write_safetensors(folder / RANK, padded + b" " * (-(8 + len(padded)) % 4096), data)


def flip_byte_of(name):
  def edit(folder):
    blob = bytearray((folder / RANK).read_bytes())
    start = 8 + int.from_bytes(blob[:8], "little")
    begin, end = json.loads(blob[8:start])[name]["data_offsets"]
    blob[start + (begin + end) // 2] ^= 4
    (folder / RANK).write_bytes(blob)

  return edit


def rename_tensor(folder):
  header, data = read_safetensors(folder / RANK)
  header["model.norm.other"] = header.pop("model.norm.weight")
  padded = json.dumps(header, separators=(",", ":")).encode()
  write_safetensors(folder / RANK, padded + b" " * (-(8 + len(padded)) % 4096), data)


W2 = "model.layers.3.mlp.experts.w2"
BAD = {
  "not-json": (replace(MANIFEST, b"{"), "manifest.json: JSON error"),
  "empty": (replace(MANIFEST, b""), "manifest.json: JSON error"),
  "array": (replace(MANIFEST, b"[]"), "manifest.json: an array of 0: expected a JSON object"),
  "deep": (replace(MANIFEST, b"[" * 100000), "manifest.json: JSON nested too deep"),
  "no-fields": (replace(MANIFEST, b"{}"), "manifest.json: format: absent"),
  "other-format": (manifest("format", "x"), "format: \"x\": expected kdtree-shards"),
  "newer": (manifest("format_version", 2), "format_version: 2: expected 1"),
  "version-text": (manifest("format_version", "1"), "format_version: \"1\""),
  "layout": (manifest("tile_layout", "row-major"), "tile_layout: \"row-major\": expected marlin-int4-16x64-group32"),
  "checksum": (manifest("checksum", "md5"), "checksum: \"md5\": expected xxh64"),
  "tp-zero": (manifest("tp", 0), "tp: 0: expected an integer from 1 to 64"),
  "tp-huge": (manifest("tp", 1 << 63), "tp: 9223372036854775808"),
  "tp-two": (manifest("tp", 2), "ranks: an array of 1: expected a list of 2, as tp says"),
  "ranks-object": (manifest("ranks", {}), "ranks: an object"),
  "rank-number": (manifest("ranks", [7]), "ranks.0: no object"),
  "rank-elsewhere": (manifest("ranks", 0, "file", "../" + RANK), "ranks.0.file: \"../rank"),
  "rank-bytes": (manifest("ranks", 0, "bytes", 4096), f"{RANK}: "),
  "rank-bytes-negative": (manifest("ranks", 0, "bytes", -1), "ranks.0.bytes: -1"),
  "sum-short": (manifest("ranks", 0, "checksums", W2, "12"), f"checksums.{W2}: \"12\": expected 16 hexadecimal digits"),
  "sum-wrong": (manifest("ranks", 0, "checksums", W2, "0" * 16), f"{RANK}: {W2}: checksum "),
  "sum-absent": (edit_json(MANIFEST, lambda m: m["ranks"][0]["checksums"].pop(W2)),
                 f"{RANK}: {W2}: a tensor without a checksum"),
  "sum-too-many": (manifest("ranks", 0, "checksums", "x", "0" * 16),
                   f"{RANK}: x: absent: expected the tensor, as manifest.json says"),
  "files-escape": (manifest("files", "../config.json", {"bytes": 1, "checksum": "0" * 16}), "files.../config.json"),
  "files-no-config": (edit_json(MANIFEST, lambda m: m["files"].pop("config.json")), "files.config.json: absent"),
  "config-edited": (lambda d: (d / "config.json").write_text((d / "config.json").read_text() + " "),
                    "config.json: 2153 bytes: expected 2152"),
  "template-edited": (lambda d: (d / "chat_template.jinja").write_bytes((d / "chat_template.jinja").read_bytes()[::-1]),
                      "chat_template.jinja: checksum "),
  "text-absent": (lambda d: (d / "generation_config.json").unlink(), "generation_config.json: "),
  "rank-absent": (lambda d: (d / RANK).unlink(), f"{RANK}: no such file"),
  "rank-empty": (truncate(RANK, 0), f"{RANK}: truncated: 0 bytes"),
  "rank-cut-in-header": (truncate(RANK, 2000), f"{RANK}: truncated: 2000 bytes"),
  "rank-cut": (truncate(RANK, -1), f"{RANK}: draft.norm.weight: bytes "),
  "rank-longer": (lambda d: open(d / RANK, "ab").write(b"x"), f"{RANK}: "),
  "other-rank": (swap_ranks, f"{RANK}: __metadata__.rank: 3: expected 0, as manifest.json says"),
  "dtype": (edit_header(RANK, put("model.norm.weight", "dtype", "F16")), f"{RANK}: "),
  "tensor-absent": (rename_tensor, f"{RANK}: model.norm.weight: absent"),
  "bit-of-a-norm": (flip_byte_of("model.norm.weight"), f"{RANK}: model.norm.weight: checksum "),
  "bit-of-tiles": (flip_byte_of(W2), f"{RANK}: {W2}: checksum "),
  "bit-of-scales": (flip_byte_of(W2 + "_scale"), f"{RANK}: {W2}_scale: checksum "),
  "bit-of-keys": (flip_byte_of("model.layers.0.self_attn.w_uk"), "model.layers.0.self_attn.w_uk: checksum "),
  "bit-of-drafter": (flip_byte_of("draft.fc.weight"), "draft.fc.weight: checksum "),
}


def opened(folder):
  """The message of the error that opening the shards ends with; "" when they open."""
  from pyclient import KdtreeError, Session
  try:
    with Session(folder, folder, threads=1):
      return ""
  except KdtreeError as error:
    return str(error)


@pytest.mark.parametrize("name", BAD)
def test_bad_shards(copy, name):
  edit, words = BAD[name]
  edit(copy)
  message = opened(copy)
  assert words in message and ": expected " in message and str(copy) in message


@pytest.mark.parametrize("name", matrix(BAD))
def test_bad_shards_end_to_end(copy, name):
  edit, words = BAD[name]
  edit(copy)
  demand_error(generate(copy, copy), words)


@pytest.mark.parametrize("arguments", [["--load", "direct"], ["--load", "mapped", "--checksums", "off"],
                                       ["--load", "direct", "--checksums", "off"]])
def test_however_they_are_read_the_text_is_the_same(shards, arguments):
  plain, other = (json.loads(generate(shards, shards, "--json", *flags).stdout) for flags in ([], arguments))
  assert plain["token_ids"] == other["token_ids"]


@pytest.mark.parametrize("name", ["bit-of-a-norm", "bit-of-tiles", "bit-of-drafter", "rank-cut", "sum-wrong"])
def test_bad_shards_read_past_the_cache(copy, name):
  edit, words = BAD[name]
  edit(copy)
  demand_error(generate(copy, copy, "--load", "direct"), words)


def test_without_checksums_a_changed_bit_is_not_looked_for(copy):
  flip_byte_of("model.norm.weight")(copy)
  assert generate(copy, copy, "--checksums", "off").returncode == 0


@pytest.mark.parametrize("direct", [0, 1])
def test_progress_ends_where_the_files_do(shards, direct):
  from pyclient import _ffi
  api = _ffi.api()
  ffi, lib = api.ffi, api.lib
  progress = ffi.new("kdt_load_progress **")
  api.check(lib.kdt_load_progress_create(progress))
  done, total = ffi.new("int64_t *"), ffi.new("int64_t *")
  api.check(lib.kdt_load_progress_read(progress[0], done, total))
  assert (done[0], total[0]) == (0, 0)
  options, engine = ffi.new("kdt_engine_options *"), ffi.new("kdt_engine **")
  api.check(lib.kdt_engine_options_init(options, ffi.sizeof("kdt_engine_options")))
  path = ffi.new("char[]", str(shards).encode())
  options.model_path = options.draft_path = path
  options.threads, options.load_direct, options.load_progress = 1, direct, progress[0]
  api.check(lib.kdt_engine_create(options, engine))
  lib.kdt_engine_destroy(engine[0])
  api.check(lib.kdt_load_progress_read(progress[0], done, total))
  lib.kdt_load_progress_destroy(progress[0])
  blob = (shards / RANK).read_bytes()
  assert done[0] == total[0] == len(blob) - 8 - int.from_bytes(blob[:8], "little")


def test_shards_of_more_ranks_than_this_engine_runs(tmp_path):
  shard(MODEL, tmp_path / "out", "--tp", "2")
  demand_error(generate(tmp_path / "out", None), "manifest.json: tp: 2: expected 1")


def test_unfinished_shards_say_how_to_go_on(shards, tmp_path):
  out = pathlib.Path(shutil.copytree(shards, tmp_path / "out", ignore=shutil.ignore_patterns(MANIFEST, "*config.json")))
  (out / "sharding.journal").touch()
  demand_error(generate(out, None), f"{out}: unfinished shards: expected finished ones: tools/shard_weights.py")
  demand_error(generate(MODEL, out), f"{out}: unfinished shards")


def test_shards_are_no_checkpoint_to_shard(shards, tmp_path):
  demand_refusal(tool(SHARD, shards, tmp_path / "again", "--tp", "1"), "shards: expected a checkpoint")


def test_bytes_changed_at_random_are_never_silent(copy):
  """A manifest or header with a changed byte is refused, or means the same."""
  from pyclient import Session
  rng = random.Random(3)

  def logits():
    with Session(copy, copy, threads=1) as session:
      return session.score(range(16)).tobytes()

  good = logits()
  blobs = {name: (copy / name).read_bytes() for name in (MANIFEST, RANK)}
  for _ in range(30):
    name = rng.choice([MANIFEST, RANK])
    blob = bytearray(blobs[name])
    blob[rng.randrange(len(blob) if name == MANIFEST else 8000)] = rng.randrange(256)
    (copy / name).write_bytes(blob)
    message = opened(copy)
    assert ": expected " in message or (message == "" and logits() == good), (name, message)
    (copy / name).write_bytes(blobs[name])
