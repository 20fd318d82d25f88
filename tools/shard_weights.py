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
import re
import shutil
import signal
import sys
from typing import Any

signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main() has an answer to Ctrl-C

import checkout_python

checkout_python.demand("pyclient", "tqdm")

from pyclient._errors import KdtreeError
from sharding.library import Sharding, checksum_of, file_checksum
from sharding.rank_files import (JOURNAL, MANIFEST, PARTIAL, Journal, RankFiles, ShardError, header_of, identities, read_file,
                                 write_whole)
from sharding.work import CtrlC, Work

CONFIG, DRAFT_CONFIG = "config.json", "draft_config.json"
COPIED = (CONFIG, "generation_config.json", "tiktoken.model", "tokenizer_config.json", "chat_template.jinja",
          "tokenization_kimi.py", "tool_declaration_ts.py", "special_tokens_map.json")
REQUIRED = (CONFIG, "tiktoken.model")
RANK_FILE = re.compile(rf"rank-[0-9]{{5}}-of-[0-9]{{5}}\.safetensors({re.escape(PARTIAL)})?")
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
    raise ShardError(f"{args.out}: holds complete shards: expected --verify to check them, --overwrite to make them anew, "
                     "or an empty directory")
  if not (args.out / JOURNAL).exists() and any(args.out.iterdir()):
    raise ShardError(f"{args.out}: not empty: expected an empty directory, or --overwrite")


def remove_shards(out: pathlib.Path, plan: dict[str, Any]) -> None:
  """Rank files, of another number of ranks too. The manifest first: from then on nothing here looks complete."""
  (out / MANIFEST).unlink(missing_ok=True)
  for path in out.iterdir():
    if path.name.removesuffix(PARTIAL) in plan["files"] or RANK_FILE.fullmatch(path.name):
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


def read_texts(args: argparse.Namespace) -> dict[str, bytes]:
  """Configs and tokenizer files, as the checkpoint has them."""
  sources = {name: args.checkpoint / name for name in COPIED if (args.checkpoint / name).is_file()}
  if args.draft is not None:
    sources[DRAFT_CONFIG] = args.draft / CONFIG
  return {name: read_file(source) for name, source in sources.items()}


def copy_texts(args: argparse.Namespace) -> dict[str, bytes]:
  texts = read_texts(args)
  for name, data in texts.items():
    write_whole(args.out / name, data)
  return texts


def manifest_of(sharding: Sharding, files: RankFiles, finished: dict[int, list[str]],
                texts: dict[str, bytes]) -> dict[str, Any]:
  plan = sharding.plan
  return {
    "format": "kdtree-shards",
    "format_version": plan["format_version"],
    "tp": plan["tp"],
    "tile_layout": plan["tile_layout"],
    "checksum": plan["checksum"],
    "config": CONFIG,
    "draft_config": DRAFT_CONFIG if DRAFT_CONFIG in texts else None,
    "files": {name: {"bytes": len(data), "checksum": checksum_of(data)} for name, data in texts.items()},
    "ranks": [{
      "file": plan["files"][rank],
      "bytes": files.size(rank),
      "checksums": {tensor["name"]: finished[i][rank] for i, tensor in enumerate(plan["tensors"])},
    } for rank in range(plan["tp"])],
  }


def resume(args: argparse.Namespace, work: Work, journal: Journal) -> None:
  """What the journal says may never have reached the disk, or not these files: it is read again."""
  if journal.trusted:
    return
  for tensor in work.check(journal.finished, journal.finished, "checking", compare=False):
    journal.forget(tensor)
  journal.trust(identities(args.out, work.plan))


def shard(args: argparse.Namespace, sharding: Sharding, ctrl_c: CtrlC) -> None:
  check_places(args)
  check_disk(args.out, sharding.plan)
  args.out.mkdir(parents=True, exist_ok=True)
  journal = Journal(args.out, identity(args, sharding), sharding.plan)
  try:
    complete = (args.out / MANIFEST).exists()
    if journal.of_another_run and not args.overwrite:
      raise ShardError(f"{args.out}: shards of another checkpoint, tp or drafter, begun: "
                       "expected this one's, or --overwrite")
    if args.overwrite and (complete or journal.of_another_run or not journal.finished):
      remove_shards(args.out, sharding.plan)
      journal.start_anew()
    (args.out / MANIFEST).unlink(missing_ok=True)  # of a run that was killed after its last step but one
    files = RankFiles(args.out, sharding.plan, writing=True)
    try:
      work = Work(sharding, files, args.jobs, ctrl_c)
      resume(args, work, journal)
      tensors = range(len(sharding.plan["tensors"]))
      print(f"{len(tensors) - len(journal.finished)} of {len(tensors)} tensors to make, "
            f"{gigabytes(sharding.plan['rank_bytes'])} a rank", flush=True)
      try:
        with files.flushing():
          work.make([tensor for tensor in tensors if tensor not in journal.finished], journal)
        files.finish()
      except OSError:  # of a flush: what the kernel could not write it may have thrown away
        journal.start_anew()
        raise
      manifest = manifest_of(sharding, files, journal.finished, copy_texts(args))
      write_whole(args.out / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    finally:
      files.close()
    journal.remove()
  finally:
    journal.close()


def demand_equal(path: pathlib.Path, found: Any, expected: Any, field: str = "") -> None:
  """Names the first field of the manifest in which two JSON values differ."""
  if isinstance(expected, dict) and isinstance(found, dict):
    for key, value in expected.items():
      demand_equal(path, found.get(key), value, f"{field}.{key}")
    for key in found.keys() - expected.keys():
      raise ShardError(f"{path}: {field}.{key}: {shown(found[key])}: expected no such field".replace(": .", ": ", 1))
  elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
    for i, value in enumerate(expected):
      demand_equal(path, found[i], value, f"{field}.{i}")
  elif type(found) is not type(expected) or found != expected:
    raise ShardError(f"{path}: {field[1:]}: {shown(found)}: expected {shown(expected)}")


def shown(value: Any) -> str:
  text = f"an array of {len(value)}" if isinstance(value, list) else json.dumps(value)
  text = text[1:-1] if isinstance(value, str) else text
  return text if len(text) <= 80 else text[:77] + "..."


def told_checksums(path: pathlib.Path, manifest: dict[str, Any], sharding: Sharding) -> dict[int, list[str]]:
  """By tensor and rank, as the manifest has them: what they are worth the files will show."""
  ranks, tensors = manifest.get("ranks"), sharding.plan["tensors"]
  if not isinstance(ranks, list) or len(ranks) != sharding.plan["tp"]:
    raise ShardError(f"{path}: ranks: {shown(ranks)}: expected an array of {sharding.plan['tp']}")
  try:
    return {i: [rank["checksums"][tensor["name"]] for rank in ranks] for i, tensor in enumerate(tensors)}
  except (KeyError, TypeError) as error:
    raise ShardError(f"{path}: ranks: {error!r}: expected the checksums of every tensor") from error


def verify(args: argparse.Namespace, sharding: Sharding, ctrl_c: CtrlC) -> None:
  """Every byte of OUT against the checkpoint and against the manifest."""
  path = args.out / MANIFEST
  try:
    manifest = json.loads(read_file(path))
    if not isinstance(manifest, dict):
      raise ValueError(type(manifest).__name__)
  except (ValueError, RecursionError) as error:
    raise ShardError(f"{path}: {error!r:.200}: expected a manifest of shards") from error
  demand_equal(path, manifest.get("tp"), args.tp, ".tp")
  if (manifest.get("draft_config") is None) != (args.draft is None):
    raise ShardError(f"{path}: draft_config: {shown(manifest.get('draft_config'))}: expected " +
                     ("--draft, the drafter's checkpoint" if args.draft is None else "shards of a drafter too"))
  texts = read_texts(args)
  told = told_checksums(path, manifest, sharding)
  for name, data in texts.items():
    if read_file(args.out / name) != data:
      raise ShardError(f"{args.out / name}: another file: expected the checkpoint's")
  files = RankFiles(args.out, sharding.plan, writing=False)
  try:
    demand_equal(path, manifest, manifest_of(sharding, files, told, texts))
    tensors = sharding.plan["tensors"]
    wrong = Work(sharding, files, args.jobs, ctrl_c).check(range(len(tensors)), told, "verifying", compare=True)
  finally:
    files.close()
  if wrong:
    raise ShardError(f"{path}: {tensors[wrong[0]]['name']}: expected the checksums of the rank files")
  print(f"verified: {len(tensors)} tensors of {args.tp} ranks, {gigabytes(sharding.plan['rank_bytes'] * args.tp)}")


def main() -> int:
  sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files may be any bytes
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
