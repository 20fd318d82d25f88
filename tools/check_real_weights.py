#!/usr/bin/env python3
"""Check a downloaded Kimi checkpoint, and a DFlash drafter, against what this engine takes them for.

    check_real_weights.py MODEL [--draft DRAFTER]                      # files alone: tensors, tokenizer, template, values
    check_real_weights.py MODEL --draft DRAFTER --run [--fixture F]    # with the model loaded: acceptance, agreement

Without --run no weights are loaded: tokenizer and chat template run in a small model of random weights with the
checkpoint's vocabulary. With --run the model must fit this machine: the drafter's acceptance by depth is measured with
YaRN's two amplitudes side by side, and greedy tokens and log-probabilities are compared with --fixture, a JSON file
{"prompts": [{"prompt_ids": […], "token_ids": […], "logprobs": […]}]}. MODEL may then be a shard directory of one rank.
Exit codes: 0 all checks passed, 1 one failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable

import checkout_python

checkout_python.demand("pyclient", "numpy")

from pyclient._errors import KdtreeError
from sharding import real_checks as checks

PROMPTS = [
  "def quicksort(items):\n", "Write a haiku about the sea.\n", "The derivative of x**3 * sin(x) is",
  '{"name": "widget", "price": 12.5, "tags": [', "Once upon a time, in a village by the river, there lived",
]


class Report:
  def __init__(self) -> None:
    self.failed = 0

  def run(self, name: str, check: Callable[[], str]) -> None:
    try:
      print(f"ok      {name}: {check()}", flush=True)
    except (checks.CheckFailed, KdtreeError) as error:
      self.failed += 1
      print(f"FAILED  {name}: {error}", flush=True)
    except ModuleNotFoundError as error:
      self.failed += 1
      print(f"FAILED  {name}: {error.name}: expected to be installed (pip install {error.name})", flush=True)


def parse_arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("model", metavar="MODEL", type=pathlib.Path)
  parser.add_argument("--draft", metavar="DRAFTER", type=pathlib.Path, help="directory of a DFlash drafter")
  parser.add_argument("--per-layer", metavar="N", type=int, default=4,
                      help="experts of a layer whose values are read; 0: all [default: %(default)s]")
  parser.add_argument("--run", action="store_true", help="load the model and measure")
  parser.add_argument("--prompts", metavar="FILE", type=pathlib.Path, help="a JSON list of prompts for the acceptance")
  parser.add_argument("--max-tokens", metavar="N", type=int, default=128, help="of each prompt [default: %(default)s]")
  parser.add_argument("--fixture", metavar="FILE", type=pathlib.Path,
                      help="greedy token ids and log-probabilities to agree with")
  parser.add_argument("--tolerance", metavar="X", type=float, default=0.05,
                      help="of log-probabilities, and what counts as a near-tie [default: %(default)s]")
  args = parser.parse_args()
  if args.per_layer < 0 or args.max_tokens < 1 or not args.tolerance >= 0:
    parser.error("--per-layer, --max-tokens, --tolerance: expected 0 or more, 1 or more, 0 or more")
  if args.draft and (args.draft / "manifest.json").exists():
    parser.error(f"--draft: {args.draft}: shards: expected the directory that the drafter was downloaded to")
  if args.fixture and not args.run:
    parser.error("--fixture: expected --run with it")
  return args


def measure_acceptance(args: argparse.Namespace, prompts: list[str]) -> str:
  lines = []
  for name, full in (("1", False), ("1 + 0.1 ln factor", True)):
    with checks.with_amplitude(args.draft, full) as draft:
      per_round, depths = checks.acceptance(args.model, draft, prompts, args.max_tokens)
    shares = " ".join(f"{share:.3f}" for share in depths)
    lines.append(f"amplitude {name}: {per_round:.3f} tokens a round, by depth {shares}")
  return "; ".join(lines)


def main() -> int:
  args = parse_arguments()
  report = Report()
  try:
    sharded = (args.model / "manifest.json").exists()
    if not sharded:
      report.run("tensors", lambda: checks.check_tensors(args.model))
      report.run("values", lambda: checks.check_nibbles(args.model, args.per_layer))
    try:
      with checks.small_session(args.model) as session:
        report.run("tokenizer", lambda: checks.check_tokenizer(args.model, session))
        report.run("template", lambda: checks.check_template(args.model, session))
    except (checks.CheckFailed, KdtreeError) as error:
      message = str(error)
      report.run("tokenizer and template", lambda: fail(message))
    if args.draft:
      report.run("drafter", lambda: checks.check_drafter(args.model, args.draft))
    if args.run:
      prompts = json.loads(args.prompts.read_text()) if args.prompts else PROMPTS
      if args.draft:
        report.run("acceptance", lambda: measure_acceptance(args, prompts))
      if args.fixture:
        report.run("agreement", lambda: checks.check_agreement(args.model, args.draft, args.fixture, args.tolerance))
  except (OSError, ValueError) as error:
    where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    print(f"error: {where}{checks.reason(error)}: expected files of a checkpoint", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    return 130
  return 1 if report.failed else 0


def fail(message: str) -> str:
  raise checks.CheckFailed(message)


if __name__ == "__main__":
  sys.exit(main())
