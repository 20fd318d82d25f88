"""Lets the tools of this checkout be started by any Python: they go on in the one that has what they need."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

VENV = pathlib.Path(__file__).resolve().parents[1] / ".venv"


def demand(*packages: str, provider: str = "tools/setup to have been run") -> None:
  """Goes on in the checkout's .venv where this Python lacks one of the packages; ends with an error where that does too,
  which says what should have provided them."""
  lacking = [name for name in packages if importlib.util.find_spec(name) is None]
  if not lacking:
    return
  python = VENV / "bin" / "python"
  if python.exists() and pathlib.Path(sys.prefix).resolve() != VENV.resolve():
    os.execv(python, [os.fspath(python), *sys.argv])
  print(f"error: {lacking[0]}: not installed: expected {provider}", file=sys.stderr)
  sys.exit(1)
