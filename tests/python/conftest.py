"""What the tests share: paths, the bundled model in a session, the daemon's command, and matrices cut to a fixed tenth.

The library is the installed package's; KDTREE_LIBRARY and KDTREE_RUN name another build's.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
GOLDEN = ROOT / "tests" / "golden"
FULL = os.environ.get("KDTREE_TEST_FULL") == "1"
RUN = os.environ.get("KDTREE_RUN") or str(pathlib.Path(sys.prefix) / "bin" / "kdtree-run")

# A shell's background jobs ignore Ctrl-C, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def matrix(items):
  """All items with KDTREE_TEST_FULL=1; else a tenth of them (at least one), always the same ones, in their order."""
  items = list(items)
  if FULL:
    return items
  order = list(range(len(items)))
  random.Random(20240607).shuffle(order)
  return [items[i] for i in sorted(order[::10])]


def golden(name):
  return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def clean_environment():
  """The environment without KDTREE_* (each flag of kdtree-run has a variable), save where library and models are."""
  return {k: v for k, v in os.environ.items()
          if not k.startswith("KDTREE_") or k in ("KDTREE_LIBRARY", "KDTREE_MODELS_DIR")}


def kdtree_run(*arguments, timeout=300):
  """Runs the daemon with these arguments; a CompletedProcess with bytes."""
  return subprocess.run([RUN, *map(os.fspath, arguments)], stdin=subprocess.DEVNULL, capture_output=True,
                        env=clean_environment(), timeout=timeout)


@pytest.fixture(scope="session")
def session():
  from pyclient import Session
  with Session() as opened:
    yield opened
