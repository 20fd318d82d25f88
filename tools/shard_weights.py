#!/usr/bin/env python3
"""Cut a Kimi checkpoint (and its DFlash drafter) into one file for each tensor-parallel rank.

    shard_weights.py CHECKPOINT OUT --tp 8 [--draft DRAFTER] [--jobs 4] [--verify]

OUT gets rank-NNNNN-of-NNNNN.safetensors, manifest.json, the configs and the tokenizer's files; the engine opens it in
place of the checkpoint. The format is docs/shard_format.md. A run that was ended goes on where it was when it is started
again; until manifest.json is there, OUT is no shard directory. Memory stays within 2 GiB at any size of checkpoint.
Exit codes: 0 ok, 1 the input or the run failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import signal
import sys
from typing import Any

signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main() has an answer to Ctrl-C

import checkout_python

checkout_python.demand("pyclient", "tqdm")

from pyclient._errors import KdtreeError
from sharding.library import Sharding, file_checksum
from sharding.rank_files import JOURNAL, MANIFEST, PARTIAL, Journal, RankFiles, ShardError, header_of, write_whole
from sharding.work import CtrlC, Work

CONFIG, DRAFT_CONFIG = "config.json", "draft_config.json"
COPIED = (CONFIG, "generation_config.json", "tiktoken.model", "tokenizer_config.json", "chat_template.jinja",
          "tokenization_kimi.py", "tool_declaration_ts.py", "special_tokens_map.json")
REQUIRED = (CONFIG, "tiktoken.model")
MARGIN = 64 << 20  # of disk, for what lies beside the rank files


def count(low: int, high: int):
  def parse(text: str) -> int:
    if not (text.isdecimal() and low <= int(text) <= high):
      raise argparse.ArgumentTypeError(f"{text}: expected an integer from {low} to {high}")
    return int(text)

  return parse


def parse_arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("checkpoint", metavar="CHECKPOINT", type=pathlib.Path, help="directory of the checkpoint")
  parser.add_argument("out", metavar="OUT", type=pathlib.Path, help="directory of the shards")
  parser.add_argument("--tp", type=count(1, 64), required=True, help="tensor-parallel ranks: one file each")
  parser.add_argument("--draft", metavar="DRAFTER", type=pathlib.Path,
                      help="directory of a DFlash drafter to shard along")
  parser.add_argument("--jobs", type=count(1, 32), default=min(4, len(os.sched_getaffinity(0))),
                      help="tensors worked on side by side [default: %(default)s]")
  parser.add_argument("--verify", action="store_true",
                      help="read the shards back and compare them with the checkpoint; alone, if OUT is complete")
  parser.add_argument("--overwrite", action="store_true", help="replace the shards that OUT holds")
  return parser.parse_args()


def gigabytes(n_bytes: float) -> str:
  return f"{n_bytes / 1e9:.2f} GB"


def identity(args: argparse.Namespace, sharding: Sharding) -> dict[str, Any]:
  """What the shards are made of and how: a run goes on only where all of it is equal."""
  sources = []
  for path in sharding.plan["source_files"]:
    status = os.stat(path)
    sources.append([os.path.basename(path), status.st_size, status.st_mtime_ns])
  plan = {key: value for key, value in sharding.plan.items() if key != "source_files"}
  configs = [file_checksum(folder / CONFIG) for folder in (args.checkpoint, args.draft) if folder is not None]
  text = json.dumps([plan, sources, configs])
  return {"format": "kdtree-sharding", "of": hashlib.sha256(text.encode()).hexdigest()}


def check_places(args: argparse.Namespace) -> None:
  for source in (args.checkpoint, args.draft):
    if source is not None and args.out.exists() and source.exists() and os.path.samefile(source, args.out):
      raise ShardError(f"OUT: {args.out}: expected another directory than the checkpoint's")
  if args.out.exists() and not args.out.is_dir():
    raise ShardError(f"OUT: {args.out}: expected a directory")
  for name in REQUIRED:
    if not (args.checkpoint / name).is_file():
      raise ShardError(f"{args.checkpoint / name}: no such file: expected the checkpoint's")
  if args.overwrite or not args.out.exists():
    return
  if (args.out / MANIFEST).exists() and not (args.out / JOURNAL).exists():
    raise ShardError(f"{args.out}: holds shards: expected an empty directory, or --overwrite")
  if not (args.out / JOURNAL).exists() and any(args.out.iterdir()):
    raise ShardError(f"{args.out}: not empty: expected an empty directory, or --overwrite")


def remove_shards(out: pathlib.Path) -> None:
  """The manifest first: from then on nothing here looks complete."""
  (out / MANIFEST).unlink(missing_ok=True)
  for path in [*out.glob("rank-*-of-*.safetensors"), *out.glob(f"*{PARTIAL}")]:
    path.unlink()


def check_disk(out: pathlib.Path, plan: dict[str, Any]) -> None:
  """Before anything is written: the disk holds what is still to come."""
  there = out.absolute()
  while not there.exists():
    there = there.parent
  needed = MARGIN
  for rank, name in enumerate(plan["files"]):
    needed += len(header_of(plan, rank)) + plan["rank_bytes"]
    for path in (out / name, out / f"{name}{PARTIAL}"):
      needed -= path.stat().st_blocks * 512 if path.exists() else 0
  free = shutil.disk_usage(there).free
  if needed > free:
    raise ShardError(f"{out}: {gigabytes(free)} of disk free: expected {gigabytes(needed)}")


def copy_texts(args: argparse.Namespace) -> dict[str, Any]:
  """Configs and tokenizer files; the manifest's `files`."""
  sources = {name: args.checkpoint / name for name in COPIED if (args.checkpoint / name).is_file()}
  if args.draft is not None:
    sources[DRAFT_CONFIG] = args.draft / CONFIG
  files = {}
  for name, source in sources.items():
    data = source.read_bytes()
    write_whole(args.out / name, data)
    files[name] = {"bytes": len(data), "checksum": file_checksum(args.out / name)}
  return files


def manifest_of(sharding: Sharding, files: RankFiles, finished: dict[int, list[str]],
                texts: dict[str, Any]) -> dict[str, Any]:
  plan = sharding.plan
  return {
    "format": "kdtree-shards",
    "format_version": plan["format_version"],
    "tp": plan["tp"],
    "tile_layout": plan["tile_layout"],
    "checksum": plan["checksum"],
    "config": CONFIG,
    "draft_config": DRAFT_CONFIG if DRAFT_CONFIG in texts else None,
    "files": texts,
    "ranks": [{
      "file": plan["files"][rank],
      "bytes": files.size(rank),
      "checksums": {tensor["name"]: finished[i][rank] for i, tensor in enumerate(plan["tensors"])},
    } for rank in range(plan["tp"])],
  }


def resume(work: Work, journal: Journal) -> None:
  """After a restart of the machine: what the journal says may never have reached the disk."""
  if journal.trusted or not journal.finished:
    return
  for tensor in work.check(journal.finished, journal.finished, "checking", compare=False):
    journal.forget(tensor)
  journal.trust()


def shard(args: argparse.Namespace, sharding: Sharding, ctrl_c: CtrlC) -> None:
  check_places(args)
  check_disk(args.out, sharding.plan)
  args.out.mkdir(parents=True, exist_ok=True)
  journal = Journal(args.out, identity(args, sharding))
  try:
    complete = (args.out / MANIFEST).exists()
    if journal.of_another_run and not args.overwrite:
      raise ShardError(f"{args.out}: shards of another checkpoint, tp or drafter, begun: "
                       "expected this one's, or --overwrite")
    if args.overwrite and (complete or journal.of_another_run or not journal.finished):
      remove_shards(args.out)
      journal.start_anew()
    (args.out / MANIFEST).unlink(missing_ok=True)  # of a run that was killed after its last step but one
    files = RankFiles(args.out, sharding.plan, writing=True)
    try:
      work = Work(sharding, files, args.jobs, ctrl_c)
      resume(work, journal)
      tensors = range(len(sharding.plan["tensors"]))
      print(f"{len(tensors) - len(journal.finished)} of {len(tensors)} tensors to make, "
            f"{gigabytes(sharding.plan['rank_bytes'])} a rank", flush=True)
      with files.flushing():
        work.make([tensor for tensor in tensors if tensor not in journal.finished], journal)
      files.finish()
      manifest = manifest_of(sharding, files, journal.finished, copy_texts(args))
      write_whole(args.out / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    finally:
      files.close()
    journal.remove()
  finally:
    journal.close()


def verify(args: argparse.Namespace, sharding: Sharding, ctrl_c: CtrlC) -> None:
  """Every byte of OUT against the checkpoint and against the manifest."""
  path = args.out / MANIFEST
  try:
    manifest = json.loads(path.read_text())
    ranks = manifest["ranks"]
    tensors = sharding.plan["tensors"]
    if len(ranks) != args.tp or manifest["tp"] != args.tp:
      raise ShardError(f"{path}: tp: {manifest['tp']}: expected {args.tp}")
    if (manifest["draft_config"] is None) != (args.draft is None):
      raise ShardError(f"{path}: draft_config: {manifest['draft_config']}: expected " +
                       ("--draft, the drafter's checkpoint" if args.draft is None else "shards of a drafter too"))
    expected = {i: [rank["checksums"][tensor["name"]] for rank in ranks] for i, tensor in enumerate(tensors)}
    texts = {name: entry["checksum"] for name, entry in manifest["files"].items()}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ShardError(f"{path}: {error!r}: expected a manifest of shards") from error
  for name, checksum in texts.items():
    if (args.out / name).parent != args.out or file_checksum(args.out / name) != checksum:
      raise ShardError(f"{args.out / name}: another checksum: expected the manifest's {checksum}")
  for name, source in ((CONFIG, args.checkpoint / CONFIG), (DRAFT_CONFIG, args.draft and args.draft / CONFIG)):
    if source is not None and texts.get(name) != file_checksum(source):
      raise ShardError(f"{args.out / name}: another file: expected {source}")
  files = RankFiles(args.out, sharding.plan, writing=False)
  try:
    wrong = Work(sharding, files, args.jobs, ctrl_c).check(range(len(tensors)), expected, "verifying", compare=True)
  finally:
    files.close()
  if wrong:
    raise ShardError(f"{path}: {tensors[wrong[0]]['name']}: expected the checksums of the rank files")
  print(f"verified: {len(tensors)} tensors of {args.tp} ranks, {gigabytes(sharding.plan['rank_bytes'] * args.tp)}")


def main() -> int:
  args = parse_arguments()
  ctrl_c = CtrlC()
  try:
    sharding = Sharding(args.checkpoint, args.draft, args.tp)
    if not (args.verify and not args.overwrite and (args.out / MANIFEST).exists()):
      shard(args, sharding, ctrl_c)
      print(f"{args.out}: {args.tp} ranks, {gigabytes(sharding.plan['rank_bytes'])} each")
    if args.verify:
      verify(args, sharding, ctrl_c)
  except (KdtreeError, ShardError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  except OSError as error:
    print(f"error: {error.filename or args.out}: {error.strerror}: expected to be read and written", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print("interrupted: the same command goes on from here", file=sys.stderr)
    return 130
  return 0


if __name__ == "__main__":
  sys.exit(main())
