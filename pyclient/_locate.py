"""Where the files that lie inside the installed package are: libkdtree.so, kdtree-run, kdtree.h."""

from __future__ import annotations

import os


def package_file(name: str) -> str:
  """The path of a file of the package; FileNotFoundError naming it when this is no installed package.

  Beside this module in an ordinary installation. An editable one maps names into its build folder, which
  importlib.resources knows. Where a source checkout hides the installed package (Python puts the current folder first),
  the installed distribution's record has it.
  """
  beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
  if os.path.isfile(beside):
    return beside
  import importlib.metadata
  import importlib.resources
  places = [str(importlib.resources.files(__package__) / name)]
  try:
    places.append(str(importlib.metadata.distribution("kdtree-engine").locate_file(f"{__package__}/{name}")))
  except importlib.metadata.PackageNotFoundError:
    pass
  for place in places:
    if os.path.isfile(place):
      return place
  raise FileNotFoundError(f"{beside}: no such file: expected {name} of an installed kdtree-engine")
