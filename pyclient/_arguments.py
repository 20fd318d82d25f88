"""What arguments have to be, before the library sees them: each check names the argument, what it got and expected."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import numpy as np

from ._errors import InvalidArgument

_MAX_SHOWN = 80   # characters of a value in a message


def shown(value: object) -> str:
  """A value in a message: its repr on one line, cut short. Python refuses to write an integer of thousands of digits in
  decimal."""
  text = hex(value) if isinstance(value, int) and value.bit_length() > 128 else " ".join(repr(value).split("\n"))
  return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN - 1] + "…"


def wrong_type(field: str, value: object, expected: str) -> TypeError:
  return TypeError(f"{field}: {type(value).__name__}: expected {expected}")


def integer(field: str, value: SupportsIndex) -> int:
  try:
    return operator.index(value)
  except TypeError:
    raise wrong_type(field, value, "an integer") from None


def number(field: str, value: Any) -> float:
  """A float of a number; InvalidArgument for an integer beyond all floats."""
  try:
    if isinstance(value, (str, bytes, bytearray)):   # float() would read them
      raise TypeError
    return float(value)
  except (TypeError, ValueError):
    raise wrong_type(field, value, "a number") from None
  except OverflowError:
    raise InvalidArgument(f"{field}: {shown(value)}: expected a number within its range") from None


def flag(field: str, value: Any) -> bool:
  """True or False, numpy's too, or the integers 1 and 0: any other value would be true or false by accident."""
  if isinstance(value, (bool, np.bool_)) or isinstance(value, (int, np.integer)) and value in (0, 1):
    return bool(value)
  if isinstance(value, (int, np.integer)):
    raise TypeError(f"{field}: {shown(value)}: expected True or False")
  raise wrong_type(field, value, "True or False")
