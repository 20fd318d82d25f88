#!/usr/bin/env python3
"""kdtree-engine beside llama.cpp: the same weights, prompts, threads and machine, in one run, as ratios.

  tools/bench_peers/bench_peers.py --install     makes .venv-peers with llama-cpp-python and gguf (compiles: minutes)
  tools/bench_peers/bench_peers.py               runs, prints a table; --json for machines, --help for the rest

Needs `.venv/bin/kdtree-run` (tools/setup) or --run. Speeds of a shared machine drift, so the two engines take turns:
each alternation runs llama.cpp, then kdtree-run in every mode, each in a fresh process and the best of a few runs, and
forms its ratios from those neighbours. The table has the median over alternations, the best one, and the spread
(largest - smallest) / median. Prefill counts from the prompt to the first token, and decode the tokens after it.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
PEER_PACKAGES = ["numpy==2.4.6", "gguf==0.19.0", "llama-cpp-python==0.3.36"]
FIXED_MODES = ["off", "chain", "tree:2", "tree:3", "tree:4", "tree:8"]
START_RUNS = 5

# Figure -> what it should reach, and whether larger is better.
GOALS = {
    "prefill / llama.cpp": (2.0, True),
    "off / llama.cpp, all": (1.5, True),
    "best / llama.cpp, code": (2.0, True),
    "best / off, code": (1.15, True),
    "start to first token, s": (0.3, False),
    "peak memory / weights": (3.0, False),
}
AUTO_OF_BEST, AUTO_OF_OFF = 0.95, 0.97


def fail(field, value, expected):
  raise SystemExit(f"error: {field}: {value}: expected {expected}")


def environment():
  """Without KDTREE_*: a variable that mirrors a flag would change what is measured."""
  return {k: v for k, v in os.environ.items() if not k.startswith("KDTREE_")}


def run_json(command):
  done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                        env=environment())
  if done.returncode != 0:
    fail(command[0], f"exit code {done.returncode}, {done.stderr.strip()[-400:]}", "exit code 0")
  return json.loads(done.stdout)


def install(venv):
  if not (venv / "bin" / "python").exists():
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
  subprocess.run([str(venv / "bin" / "python"), "-m", "pip", "install", "-q", *PEER_PACKAGES], check=True)


def ensure_gguf(python, model, path):
  """Makes the GGUF file, aside and then renamed, unless it is newer than the checkpoint's config."""
  if path.exists() and path.stat().st_mtime > (model / "config.json").stat().st_mtime:
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  aside = path.with_suffix(".part")
  subprocess.run([str(python), str(HERE / "make_gguf.py"), str(model), str(aside)], check=True)
  aside.rename(path)


def weight_bytes(*folders):
  files = [file for folder in folders if folder for file in pathlib.Path(folder).glob("*.safetensors")]
  return sum(file.stat().st_size for file in files)


def measure_start(run, threads):
  """(seconds from the start of the process to its first byte of text, peak resident bytes of a whole run).

  The kernel counts this script's own memory at the fork into the peak: about 20 MB, a floor and not a sum.
  """
  command = [str(run), "generate", "--prompt", "def get(self, key, default=None):\n", "--threads", str(threads),
             "--max-tokens", "96", "--ignore-eos"]
  begin = time.perf_counter()
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(),
                        bufsize=0) as process:
    first = process.stdout.read(1)
    seconds = time.perf_counter() - begin
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
  if not first or process.returncode != 0:
    fail("kdtree-run generate", f"exit code {process.returncode}", "text")
  return seconds, usage.ru_maxrss * 1024


def alternation(args, gguf, prompts_path, weights):
  """One turn of each engine; the figures of this turn by name."""
  llama = run_json([args.python, HERE / "llama_worker.py", gguf, prompts_path, args.threads, args.prefill,
                    args.max_tokens, args.runs])
  ours = run_json([args.run, "bench", "--json", "--prompts", prompts_path, "--threads", args.threads, "--prefill",
                   args.prefill, "--max-tokens", args.max_tokens, "--repeat", args.runs, "--modes",
                   ",".join([*FIXED_MODES, "auto"])])
  speed = {}
  for row in ours["rows"]:
    speed.setdefault(row["kind"], {})[row["mode"]] = row["tokens_per_second"]["best"]
  if "all" not in speed:
    speed["all"] = next(iter(speed.values()))
  starts = [measure_start(args.run, args.threads) for _ in range(START_RUNS)]

  figures = {
      "llama.cpp prefill, tok/s": 1000 * args.prefill / llama["prefill_ms"],
      "prefill, tok/s": ours["prefill"]["tokens_per_second"]["best"],
      "prefill / llama.cpp": llama["prefill_ms"] / ours["prefill"]["first_token_ms"]["best"],
  }
  for kind, modes in speed.items():
    peer, best = llama["tokens_per_second"][kind], max(modes[mode] for mode in FIXED_MODES)
    figures[f"llama.cpp decode, {kind}, tok/s"] = peer
    for mode, value in modes.items():
      figures[f"{mode}, {kind}, tok/s"] = value
    figures[f"off / llama.cpp, {kind}"] = modes["off"] / peer
    figures[f"best / llama.cpp, {kind}"] = best / peer
    figures[f"best / off, {kind}"] = best / modes["off"]
    figures[f"auto / best fixed, {kind}"] = modes["auto"] / best
    figures[f"auto / off, {kind}"] = modes["auto"] / modes["off"]
  figures["start to first token, s"] = min(seconds for seconds, _ in starts)
  figures["peak memory / weights"] = max(peak for _, peak in starts) / weights
  return figures


def goal_of(name):
  if name.startswith("auto / best fixed"):
    return AUTO_OF_BEST, True
  if name.startswith("auto / off"):
    return AUTO_OF_OFF, True
  return GOALS.get(name)


def summarise(turns):
  """name -> {median, best, spread, values, and goal and reached where there is one}."""
  summary = {}
  for name in turns[0]:
    values = [turn[name] for turn in turns]
    goal = goal_of(name)
    larger = goal is None or goal[1]
    median = statistics.median(values)
    summary[name] = {"median": median, "best": max(values) if larger else min(values),
                     "spread": (max(values) - min(values)) / median, "values": values}
    if goal:
      reached = median >= goal[0] if larger else median <= goal[0]
      summary[name] |= {"goal": goal[0], "reached": reached}
  return summary


def print_table(summary):
  def number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"

  width = max(map(len, summary))
  print(f"{'':{width}}  {'median':>8}  {'best':>8}  {'spread':>6}  goal")
  print("-" * (width + 36))
  for name, row in summary.items():
    goal = ""
    if "goal" in row:
      sign = ">=" if goal_of(name)[1] else "<="
      goal = f"{sign} {row['goal']:g}: {'reached' if row['reached'] else 'MISSED'}"
    cells = f"{number(row['median']):>8}  {number(row['best']):>8}  {row['spread']:>6.0%}"
    print(f"{name:{width}}  {cells}  {goal}".rstrip())


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--install", action="store_true", help="make or complete the peers' venv, then exit")
  parser.add_argument("--venv", type=pathlib.Path, default=ROOT / ".venv-peers", help="default: .venv-peers")
  parser.add_argument("--run", type=pathlib.Path, default=ROOT / ".venv/bin/kdtree-run", help="default: .venv's")
  parser.add_argument("--gguf", type=pathlib.Path, help="default: made in the peers' venv")
  parser.add_argument("--prompts", type=pathlib.Path, default=ROOT / "tests/golden/eval_prompts.json",
                      help="array of {kind, name, text or messages, ids}; default: the evaluation prompts")
  parser.add_argument("--prompts-per-kind", type=int, default=3, help="default: 3")
  parser.add_argument("--alternations", type=int, default=5, help="default: 5")
  parser.add_argument("--runs", type=int, default=2, help="runs per turn, the best one counts; default: 2")
  parser.add_argument("--threads", type=int, default=2, help="default: 2")
  parser.add_argument("--prefill", type=int, default=512, help="default: 512")
  parser.add_argument("--max-tokens", type=int, default=96, help="default: 96")
  parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
  args = parser.parse_args()
  args.python = args.venv / "bin" / "python"
  return args


def first_of_each_kind(prompts, n):
  taken = {}
  chosen = []
  for prompt in prompts:
    taken[prompt["kind"]] = taken.get(prompt["kind"], 0) + 1
    if taken[prompt["kind"]] <= n:
      chosen.append(prompt)
  return chosen


def main():
  args = parse_arguments()
  if args.install:
    install(args.venv)
    return
  if not args.python.exists():
    fail(args.python, "no such file", "the peers' venv; make it with --install")
  if not args.run.exists():
    fail(args.run, "no such file", "kdtree-run; tools/setup installs it")
  info = run_json([args.run, "info", "--json"])
  model = pathlib.Path(info["model_path"])
  gguf = args.gguf or args.venv / "bundled.gguf"
  if args.gguf is None:
    ensure_gguf(args.python, model, gguf)
  weights = weight_bytes(model, info["draft_path"])
  prompts = first_of_each_kind(json.loads(args.prompts.read_text(encoding="utf-8")), args.prompts_per_kind)
  turns = []
  with tempfile.TemporaryDirectory() as folder:
    prompts_path = pathlib.Path(folder) / "prompts.json"
    prompts_path.write_text(json.dumps(prompts), encoding="utf-8")
    for i in range(args.alternations):
      print(f"alternation {i + 1} of {args.alternations}", file=sys.stderr)
      turns.append(alternation(args, gguf, prompts_path, weights))
  summary = summarise(turns)
  if args.json:
    print(json.dumps({"schema_version": 1, "threads": args.threads, "cpu_target": info.get("cpu_target"),
                      "alternations": args.alternations, "figures": summary}))
  else:
    print_table(summary)


if __name__ == "__main__":
  main()
