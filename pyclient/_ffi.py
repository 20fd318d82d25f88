"""libkdtree.so through cffi's ABI mode. The declarations are read from the installed kdtree.h: there is no second copy.

cffi releases the GIL around every call, so other Python threads run while the engine works.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import cffi

from ._arguments import integer, number, shown, wrong_type
from ._errors import BY_STATUS_NAME, InternalError, InvalidArgument, KdtreeError, ReadFailed
from ._locate import package_file

# What this package was written for; the library must answer the same.
ABI_VERSION = 3

_load_lock = threading.Lock()


class Api:
  """The loaded library: `ffi`, `lib` with the functions and constants of kdtree.h, and what every call needs."""

  def __init__(self, library_path: str, header_path: str) -> None:
    self.ffi = cffi.FFI()
    try:
      with open(header_path, encoding="utf-8") as header:
        self.ffi.cdef(declarations(header.read()))
      # Never unloaded: the end of a handle may come late in the interpreter's own.
      self.lib: Any = self.ffi.dlopen(library_path, self.ffi.RTLD_NOW | self.ffi.RTLD_NODELETE)
    except OSError as error:
      raise ReadFailed(f"{library_path}: {error}: expected the shared library of kdtree-engine") from error
    try:
      found = self.lib.kdt_abi_version()
    except AttributeError as error:
      raise KdtreeError(f"{library_path}: no kdt_abi_version: expected the shared library of kdtree-engine") from error
    if found != ABI_VERSION:
      raise KdtreeError(f"{library_path}: ABI version {found}: expected {ABI_VERSION}")

  def check(self, status: int) -> None:
    """Raises what a failed call's status says, with this thread's last error message."""
    if status == self.lib.KDT_OK:
      return
    name = self.text(self.lib.kdt_status_name(status))
    message = self.text(self.lib.kdt_last_error()) or name
    raise BY_STATUS_NAME.get(name, InternalError)(message)

  def text(self, c_string: Any) -> str:
    return bytes(self.ffi.string(c_string)).decode("utf-8", "replace")

  def options(self, kind: str, initialise: Callable[[Any, int], int]) -> Any:
    """A new options struct with every default set."""
    options = self.ffi.new(f"{kind} *")
    self.check(initialise(options, self.ffi.sizeof(kind)))
    return options

  def filled(self, item: str, guess: int, fill: Callable[[Any, int, Any], int]) -> tuple[Any, int]:
    """The array and length of an output (pointer, capacity, *n) call, made again when `guess` elements were too few."""
    n = self.ffi.new("int64_t *")
    capacity = guess
    while True:
      out = self.ffi.new(f"{item}[]", max(capacity, 1))
      status = fill(out, capacity, n)
      if status != self.lib.KDT_ERR_BUFFER_TOO_SMALL:
        self.check(status)
        return out, n[0]
      capacity = n[0]

  def token_ids(self, field: str, ids: Iterable[int], expected: str = "a sequence of token ids") -> Any:
    """An int32_t array of token ids; InvalidArgument for one that is no 32-bit integer."""
    if isinstance(ids, (str, bytes, bytearray, memoryview)):
      raise wrong_type(field, ids, expected)
    try:
      items = list(ids)
    except TypeError:
      raise wrong_type(field, ids, expected) from None
    values = [integer(f"{field}[{i}]", token) for i, token in enumerate(items)]
    try:
      return self.ffi.new("int32_t[]", values)
    except OverflowError:
      i = next(i for i, value in enumerate(values) if not -2**31 <= value < 2**31)
      raise InvalidArgument(f"{field}[{i}]: {shown(values[i])}: expected a token id of the vocabulary") from None


def declarations(header: str) -> str:
  """What cffi parses: the lines of kdtree.h between the cffi marks, without the export macro."""
  begin, end = "/* cffi:begin */", "/* cffi:end */"
  if header.count(begin) != 1 or header.count(end) != 1:
    raise KdtreeError(f"kdtree.h: no slice to parse: expected one {begin} and one {end}")
  return header.partition(begin)[2].partition(end)[0].replace("KDT_API ", "")


def utf8(field: str, text: str) -> bytes:
  """The UTF-8 bytes of a text; InvalidArgument when it has lone surrogates."""
  if not isinstance(text, str):
    raise wrong_type(field, text, "a string")
  try:
    return text.encode("utf-8")
  except UnicodeEncodeError as error:
    raise InvalidArgument(f"{field}: lone surrogate at character {error.start}: expected Unicode text") from None


def c_text(field: str, text: str) -> bytes:
  """The UTF-8 bytes of a text that C reads up to its NUL; InvalidArgument when it has one."""
  data = utf8(field, text)
  if b"\0" in data:
    raise InvalidArgument(f"{field}: {shown(text)}: expected text without NUL")
  return data


def path_bytes(field: str, path: str | os.PathLike[str] | None) -> bytes | None:
  if path is None:
    return None
  try:
    name = os.fsencode(path)
  except TypeError:
    raise wrong_type(field, path, "a path") from None
  except UnicodeEncodeError:
    raise InvalidArgument(f"{field}: {shown(path)}: expected a path of Unicode text") from None
  if b"\0" in name:
    raise InvalidArgument(f"{field}: {shown(os.fspath(path))}: expected a path without NUL")
  return name


def assign(options: Any, **fields: Any) -> None:
  """Sets number fields of an options struct; InvalidArgument for an integer that its field cannot hold."""
  for name, value in fields.items():
    checked = number(name, value) if isinstance(getattr(options, name), float) else integer(name, value)
    try:
      setattr(options, name, checked)
    except OverflowError:
      raise InvalidArgument(f"{name}: {shown(value)}: expected an integer within its range") from None


@functools.cache
def _load(library_path: str, header_path: str) -> Api:
  return Api(library_path, header_path)


def api() -> Api:
  """The library of this process: KDTREE_LIBRARY when it is set, else the one of the package. Loaded once."""
  with _load_lock:
    try:
      return _load(os.environ.get("KDTREE_LIBRARY") or package_file("libkdtree.so"), package_file("kdtree.h"))
    except FileNotFoundError as error:
      raise ReadFailed(str(error)) from None
