"""The house: which room may include which, what library code may not do, and that the lists of the ABI agree."""

import re
import subprocess

import pytest

from conftest import ROOT

ENGINE = ROOT / "engine"
HEADER = ENGINE / "include" / "kdtree.h"
CODE_SUFFIXES = {".h", ".hpp", ".c", ".cc", ".cpp", ".cu", ".cuh", ".py", ".sh"}
MAX_LINES, MAX_KERNEL_LINES = 400, 600

# Whose headers a room may include, besides its own. Dependencies point one way; see docs/architecture.md.
LEAVES = {"base"}
FOUNDATION = {"base", "checkpoint", "text", "spec"}
MAY_INCLUDE = {
  "base": set(),
  "checkpoint": LEAVES,
  "text": LEAVES,
  "spec": LEAVES,
  "comm": LEAVES,
  "ops": FOUNDATION,
  "cpu": FOUNDATION | {"comm", "ops"},
  "cuda": FOUNDATION | {"comm", "ops"},
  "model": FOUNDATION | {"ops"},
  "runtime": FOUNDATION | {"comm", "ops", "model"},
  "rehearsal": FOUNDATION | {"ops", "model", "runtime"},
  "capi": FOUNDATION | {"comm", "ops", "cpu", "cuda", "model", "runtime", "rehearsal", "include"},
  "daemon": {"include"},
  "include": set(),
}


def project_files():
  """The files of the checkout that git tracks or would track."""
  listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                          capture_output=True, check=True).stdout.decode().split("\0")
  return [path for path in (ROOT / name for name in listed if name) if path.is_file()]


def engine_code():
  return sorted(path for path in ENGINE.rglob("*") if path.suffix in CODE_SUFFIXES)


def room(path):
  return path.relative_to(ENGINE).parts[0]


def without_comments(source):
  """Comments and the contents of literals become blanks; lines stay lines."""
  token = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
  return token.sub(lambda match: " " + "\n" * match.group().count("\n"), source)


def includes(path):
  """(name, is quoted) of every include of a file."""
  source = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
  return [(name, mark == '"')
          for mark, name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', source, re.MULTILINE)]


# Under engine/comm: what NCCL's communicator asks of a device.
DEVICE_COMMUNICATOR = ("cuda_stream.cpp", "nccl_library.h")


def home_of(path, name):
  """The engine's file that an include of `path` means, or None for a header from outside."""
  for candidate in (path.parent / name, ENGINE / name, ENGINE / "include" / name):
    if candidate.is_file():
      return candidate.resolve()
  return None


def test_every_room_is_known():
  assert {room(path) for path in engine_code()} <= set(MAY_INCLUDE)


@pytest.mark.parametrize("path", engine_code(), ids=lambda path: str(path.relative_to(ENGINE)))
def test_dependencies_point_one_way(path):
  allowed = MAY_INCLUDE[room(path)] | {room(path)}
  for name, quoted in includes(path):
    home = home_of(path, name)
    if quoted:
      assert home, f'"{name}" is no file of the engine: <> is for headers from outside'
    if home:
      assert room(home) in allowed, f"{room(path)} may not include {name}"
    elif room(path) != "cuda" and path.name not in DEVICE_COMMUNICATOR:
      assert not re.match(r"cuda|nccl|cub/|cooperative_groups|cublas", name), f"{name} belongs under engine/cuda"


@pytest.mark.parametrize("path", engine_code(), ids=lambda path: str(path.relative_to(ENGINE)))
def test_extern_c_lives_in_capi_alone(path):
  if room(path) != "capi" and path != HEADER:
    source = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not re.search(r'extern\s+"C"', source)


FORBIDDEN_CALLS = re.compile(
  r"\b(abort|exit|_exit|_Exit|quick_exit|terminate|assert|HWY_ASSERT|HWY_DASSERT|HWY_ABORT|printf|fprintf|vprintf"
  r"|vfprintf|puts|fputs|putchar|putc|fputc|perror|signal|sigaction)\s*\(")
FORBIDDEN_NAMES = re.compile(r"\bstd::(cout|cerr|clog|wcout|wcerr)\b|\b(stdout|stderr)\b")
FORBIDDEN_HEADERS = {"iostream", "cassert", "assert.h", "print", "csignal", "signal.h"}


@pytest.mark.parametrize("path", [path for path in engine_code() if room(path) != "daemon"],
                         ids=lambda path: str(path.relative_to(ENGINE)))
def test_the_library_neither_ends_the_process_nor_prints(path):
  code = without_comments(path.read_text(encoding="utf-8"))
  for pattern in (FORBIDDEN_CALLS, FORBIDDEN_NAMES):
    found = pattern.search(code)
    assert not found, f"line {code.count(chr(10), 0, found.start()) + 1}: {found.group()}"
  assert not FORBIDDEN_HEADERS & {name for name, _ in includes(path)}


def test_pyclient_sees_the_library_through_kdtree_h_alone():
  for path in (ROOT / "pyclient").glob("*.py"):
    assert not re.search(r"engine/|ctypes|libkdtree_core", path.read_text(encoding="utf-8")), path


def test_the_header_is_c11_and_cpp():
  for compiler, language in (("cc", ["-x", "c", "-std=c11"]), ("c++", ["-x", "c++", "-std=c++20"])):
    command = [compiler, *language, "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", f"-I{HEADER.parent}",
               "-"]
    program = '#include "kdtree.h"\nint main(void) { return kdt_abi_version() == KDT_OK; }\n'
    done = subprocess.run(command, input=program, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_header_includes_nothing_but_stdint():
  assert includes(HEADER) == [("stdint.h", False)]


def test_status_lists_agree():
  of_header = dict(re.findall(r"\bKDT_(?:ERR_)?(\w+) = (-?\d+)", re.search(
    r"typedef int32_t kdt_status;\s*enum \{(.*?)\};", HEADER.read_text(encoding="utf-8"), re.DOTALL).group(1)))
  of_engine = dict(re.findall(r"^\s*(\w+) = (-?\d+),", re.search(
    r"enum class Status[^{]*\{(.*?)\};", (ENGINE / "base" / "error.h").read_text(encoding="utf-8"), re.DOTALL).group(1),
    re.MULTILINE))
  assert len(of_header) > 10
  assert {name.lower(): value for name, value in of_header.items()} == of_engine


def test_python_has_an_exception_for_every_failure():
  from pyclient import _errors
  names = set(re.findall(r"\b(KDT_ERR_\w+) =", HEADER.read_text(encoding="utf-8")))
  assert set(_errors.BY_STATUS_NAME) == names - {"KDT_ERR_TIMEOUT", "KDT_ERR_BUFFER_TOO_SMALL"}


def test_files_are_short():
  for path in project_files():
    if path.suffix in CODE_SUFFIXES or path.parent == ROOT / "tools":
      limit = MAX_KERNEL_LINES if path.parent in (ENGINE / "cpu", ENGINE / "cuda") else MAX_LINES
      n_lines = path.read_bytes().count(b"\n")
      assert n_lines <= limit, f"{path.relative_to(ROOT)}: {n_lines} lines: expected at most {limit}"


def test_no_file_needs_what_lies_outside_the_repository():
  outside = re.compile(r"(?:\.\./)+" + r"shared/|(?<![\w.])" + r"/(?:work|root)/")
  for path in project_files():
    if path.suffix in {".safetensors", ".npz", ".gguf", ".model", ".png"} or "corpus" in path.parts:
      continue
    text = path.read_text(encoding="utf-8", errors="replace")
    found = outside.search(text)
    assert not found, f"{path.relative_to(ROOT)}: {text[max(0, found.start() - 40):found.end() + 40]!r}"


def test_scripts_stop_at_the_first_error():
  for path in [*(ROOT / "tools").iterdir(), *(ROOT / ".ci").iterdir()]:
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env bash\n"):
      assert "\nset -euo pipefail\n" in path.read_text(encoding="utf-8"), path
      assert path.stat().st_mode & 0o111, path
      subprocess.run(["bash", "-n", path], check=True)
