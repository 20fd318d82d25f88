"""Sharding that is killed: at any moment, as often as you like, and the result is that of a run that was not."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT, clean_environment, matrix
from shard_support import DRAFT, MODEL, SHARD, contents, demand_refusal, rank_name, shard, start_tool, tool

ARGUMENTS = ["--tp", "4", "--draft", DRAFT, "--jobs", "2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """(contents of an uninterrupted run, seconds from the start of its work to its end)."""
  out = tmp_path_factory.mktemp("whole") / "out"
  with start_tool(SHARD, MODEL, out, *ARGUMENTS) as process:
    process.stdout.readline()
    start = time.monotonic()
    _, err = process.communicate(timeout=600)
  assert process.returncode == 0, err
  return contents(out), time.monotonic() - start


def looks_complete(out):
  return (out / "manifest.json").exists()


def kill_after(out, seconds):
  """Starts a run and kills it that long after its work began; whether it was killed."""
  with start_tool(SHARD, MODEL, out, *ARGUMENTS) as process:
    process.stdout.readline()
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=600)
  return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("moment", matrix(range(20)))
def test_killed_at_a_random_moment(tmp_path, whole, moment):
  blobs, seconds = whole
  out = tmp_path / "out"
  rng = random.Random(moment)
  killed = 0
  for _ in range(3):
    killed += kill_after(out, rng.random() * seconds)
    if looks_complete(out):
      break
    assert not any(path.name == "manifest.json" for path in out.iterdir())
  if not looks_complete(out):
    shard(MODEL, out, *ARGUMENTS)
  found = contents(out)
  found.pop("sharding.journal", None)  # killed between the manifest and the end
  assert found == blobs


def write_journal(out, whole_blobs, n_finished, cut):
  """A directory as a kill would leave it: the first n_finished tensors made, the rest of the files zero."""
  shard(MODEL, out, *ARGUMENTS)
  manifest = json.loads((out / "manifest.json").read_text())
  names = list(manifest["ranks"][0]["checksums"])
  with start_tool(SHARD, MODEL, out.with_name("other"), *ARGUMENTS) as process:
    process.stdout.readline()
    process.kill()
    process.communicate(timeout=600)
  first = (out.with_name("other") / "sharding.journal").read_text().splitlines()[0]
  lines = [first] + [json.dumps({"tensor": i, "checksums": [rank["checksums"][names[i]] for rank in manifest["ranks"]]})
                     for i in range(n_finished)]
  (out / "manifest.json").unlink()
  for rank in range(4):
    path = out / rank_name(rank, 4)
    blob = bytearray(whole_blobs[path.name])
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    end = start + header[names[n_finished]]["data_offsets"][0]
    path.unlink()
    (out / f"{path.name}.partial").write_bytes(bytes(blob[:end]) + bytes(len(blob) - end))
  partials = [(out / f"{rank_name(rank, 4)}.partial").stat() for rank in range(4)]
  lines.insert(1, json.dumps({"boot": json.loads(first)["boot"], "files": [[of.st_ino, of.st_size] for of in partials]}))
  (out / "sharding.journal").write_text("\n".join(lines) + "\n" + cut)
  return names


def test_finished_tensors_are_not_made_again_and_a_cut_line_is_none(tmp_path, whole):
  out = tmp_path / "out"
  names = write_journal(out, whole[0], 30, '{"tensor": 30, "checks')
  # Bytes of a finished tensor that only a tensor made anew would put right: they must stay.
  path = out / f"{rank_name(0, 4)}.partial"
  with open(path, "r+b") as file:
    file.seek(4096 * 40)
    marked = bytes(255 - byte for byte in file.read(64))
    file.seek(4096 * 40)
    file.write(marked)
  done = shard(MODEL, out, *ARGUMENTS)
  assert f"{len(names) - 30} of {len(names)} tensors to make" in done.stdout
  found = contents(out)
  assert found[rank_name(0, 4)] != whole[0][rank_name(0, 4)]
  assert found[rank_name(1, 4)] == whole[0][rank_name(1, 4)]
  done = tool(SHARD, MODEL, out, *ARGUMENTS, "--verify")
  demand_refusal(done, rank_name(0, 4))
  assert "byte 0x" in done.stderr and " of the file); --overwrite makes all shards anew" in done.stderr


def test_after_a_restart_of_the_machine_nothing_is_believed_unread(tmp_path, whole):
  out = tmp_path / "out"
  write_journal(out, whole[0], 30, "")
  journal = out / "sharding.journal"
  first, *rest = journal.read_text().splitlines()
  texts = [json.dumps(json.loads(line) | ({"boot": "another"} if "boot" in line else {})) for line in (first, *rest)]
  journal.write_text("\n".join(texts) + "\n")
  path = out / f"{rank_name(0, 4)}.partial"
  with open(path, "r+b") as file:
    file.seek(4096 * 40)
    file.write(bytes(64))
  done = shard(MODEL, out, *ARGUMENTS)
  assert " tensors to make" in done.stdout
  assert contents(out) == whole[0]


@pytest.mark.parametrize("how", ["gone", "cut", "another"])
def test_rank_files_that_are_not_those_of_the_run_are_read_first(tmp_path, whole, how):
  out = tmp_path / "out"
  write_journal(out, whole[0], 30, "")
  path = out / f"{rank_name(1, 4)}.partial"
  if how == "gone":
    path.unlink()
  elif how == "cut":
    os.truncate(path, path.stat().st_size // 3)
  else:
    data = path.read_bytes()
    path.rename(tmp_path / "kept")   # its place on the disk stays taken
    path.write_bytes(data[:8192] + bytes(len(data) - 8192))
  shard(MODEL, out, *ARGUMENTS)
  assert contents(out) == whole[0]


def test_what_a_disk_refused_is_made_anew(tmp_path, whole):
  out = tmp_path / "out"
  program = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
sys.argv = ["shard_weights.py", *{[os.fspath(argument) for argument in (MODEL, out, *ARGUMENTS)]!r}]
def refuse(descriptor):
  raise OSError(5, "Input/output error")
os.fdatasync = os.fsync = refuse
import shard_weights
sys.exit(shard_weights.main())
"""
  done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, env=clean_environment())
  demand_refusal(done, "Input/output error")
  assert not looks_complete(out)
  assert "tensor" not in json.dumps([json.loads(line) for line in (out / "sharding.journal").read_text().splitlines()][1:])
  shard(MODEL, out, *ARGUMENTS)
  assert contents(out) == whole[0]


def test_a_run_of_something_else_is_not_continued(tmp_path, whole):
  out = tmp_path / "out"
  write_journal(out, whole[0], 10, "")
  first = (out / "sharding.journal").read_text().splitlines(keepends=True)[0]
  before = contents(out)
  demand_refusal(tool(SHARD, MODEL, out, "--tp", "2"), "shards of another checkpoint, tp or drafter, begun")
  demand_refusal(tool(SHARD, MODEL, out, "--tp", "4"), "shards of another checkpoint, tp or drafter, begun")
  other = tmp_path / "model"
  shutil.copytree(MODEL, other)
  os.utime(other / "model-00001-of-000002.safetensors", ns=(1, 1))
  demand_refusal(tool(SHARD, other, out, *ARGUMENTS), "begun")
  for text in ("garbage\n", "{}\n", "[1, 2]\n", '{"boot": 3}\n{"tensor": "x"}\n', "\0\n",
               "[" * 3000 + "\n", *(first + line + "\n" for line in ('{"tensor": 1, "checksums": []}', '{"tensor": 1e400}',
                                                                    '{"tensor": -1, "checksums": ["", "", "", ""]}'))):
    (out / "sharding.journal").write_text(text)
    demand_refusal(tool(SHARD, MODEL, out, *ARGUMENTS), "begun")
  assert contents(out).keys() == before.keys()
  shard(MODEL, out, *ARGUMENTS, "--overwrite")
  assert contents(out) == whole[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own: needs root")
def test_a_disk_that_fills_up(tmp_path, whole):
  disk = tmp_path / "disk"
  disk.mkdir()
  program = f"""
import shutil, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
sys.argv = ["shard_weights.py", *{[os.fspath(argument) for argument in (MODEL, disk / "out", *ARGUMENTS)]!r}]
shutil.disk_usage = lambda path: shutil._ntuple_diskusage(10**9, 0, 10**9)
import shard_weights
sys.exit(shard_weights.main())
"""
  mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", disk], capture_output=True)
  if mounted.returncode != 0:
    pytest.skip(f"no mount: {mounted.stderr!r}")
  try:
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, env=clean_environment())
    demand_refusal(done, "No space left on device: expected ")
    assert not looks_complete(disk / "out")
    subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
    shard(MODEL, disk / "out", *ARGUMENTS)
    assert contents(disk / "out") == whole[0]
  finally:
    subprocess.run(["umount", disk], check=True)


def test_two_runs_at_once(tmp_path):
  import fcntl
  out = tmp_path / "out"
  out.mkdir()
  with open(out / "sharding.journal", "ab") as journal:
    fcntl.flock(journal, fcntl.LOCK_EX)
    demand_refusal(tool(SHARD, MODEL, out, *ARGUMENTS), "sharding.journal: locked: expected no other run")
