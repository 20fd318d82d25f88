"""tools/run_multi_gpu where there is no GPU: what it would do, and what it says."""

import os
import subprocess
import sys

import pytest

from conftest import ROOT, clean_environment
from test_tp import on_cuda

TOOL = ROOT / "tools" / "run_multi_gpu"


def tool(*arguments):
  return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=120,
                        env=clean_environment() | {"KDTREE_RUN": os.environ.get("KDTREE_RUN", "")})


def test_help_and_steps():
  assert "under eight minutes" in tool("--help").stdout
  steps = tool("--dry-run", "--tp", "2,4")
  assert steps.returncode == 0, steps.stderr
  names = [line.split()[0] for line in steps.stdout.splitlines()]
  assert [name for name in names if name not in ("sums", "engine")] == \
    ["tp", "crowd", "streams-tp2", "streams-tp4", "rank-none", "rank-emulate"]
  assert "--collectives emulate" in steps.stdout and "KDTREE_TEST_TP=4" in steps.stdout


def test_bad_ranks():
  done = tool("--dry-run", "--tp", "3")
  assert done.returncode == 1 and done.stderr == "error: --tp: 3: expected 1, 2, 4 or 8, between commas\n"


def test_without_a_gpu_it_says_so():
  if on_cuda():
    pytest.skip("there is a GPU")
  done = tool()
  assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
  assert "expected" in done.stderr and not done.stdout
