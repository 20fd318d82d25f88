"""The console script `kdtree-run`: becomes the daemon that lies inside the package."""

from __future__ import annotations

import os
import sys

from ._locate import package_file


def main() -> None:
  """Replaces this process by kdtree-run with the same arguments; returns never, or exits 1 with a message."""
  try:
    daemon = package_file("kdtree-run")
    os.execv(daemon, [daemon, *sys.argv[1:]])
  except OSError as error:
    sys.exit(f"error: {error}")
