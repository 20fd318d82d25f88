"""Bad input end to end: kdtree-run says what is wrong, exits with the right code, and no sanitizer speaks up."""

import pathlib

import pytest

from conftest import MODELS, golden, kdtree_run
from make_bad_checkpoints import bad_checkpoints

MODEL, DRAFT = MODELS / "tiny-k2", MODELS / "tiny-k2-dflash"
FAILED, USAGE = 1, 2


def demand_error(done, codes, words=""):
  err = done.stderr.decode("utf-8", "replace")
  for report in ("Sanitizer", "runtime error:", "terminate called"):
    assert report not in err, err
  assert done.returncode in codes, (done.returncode, err)
  lines = [line for line in err.splitlines() if not line.startswith("note: ")]
  assert len(lines) == 1 and lines[0].startswith("error: ") and ": expected " in lines[0], err
  assert words in lines[0], err
  assert done.stdout == b"", done.stdout


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
  return list(bad_checkpoints(MODELS, tmp_path_factory.mktemp("checkpoints")))


def test_bad_checkpoints(checkpoints, subtests):
  assert checkpoints
  for name, model, draft, words in checkpoints:
    with subtests.test(msg=name):
      drafter = [] if draft is None else ["--draft", draft]
      done = kdtree_run("generate", "--model", model, *drafter, "--prompt", "x", "--max-tokens", "1")
      demand_error(done, [FAILED], words)


def generate(*arguments):
  return kdtree_run("generate", "--model", MODEL, "--draft", DRAFT, *arguments)


def test_the_sound_pair_works():
  done = generate("--prompt", "x = 1\n", "--max-tokens", "4")
  assert done.returncode == 0, done.stderr
  assert b"Sanitizer" not in done.stderr and b"runtime error:" not in done.stderr


def prompt_file(folder: pathlib.Path, data: bytes) -> pathlib.Path:
  path = folder / "prompt.txt"
  path.write_bytes(data)
  return path


@pytest.mark.parametrize("data", [
  b"\xff", b"abc\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"x" * 5000 + b"\x80",
], ids=["byte", "cut", "surrogate", "beyond", "overlong", "late"])
def test_invalid_utf8(tmp_path, data):
  demand_error(generate("--prompt-file", prompt_file(tmp_path, data), "--max-tokens", "1"), [FAILED], "UTF-8")


def test_invalid_utf8_on_the_command_line():
  demand_error(generate("--prompt", b"a\xff", "--max-tokens", "1"), [FAILED, USAGE], "UTF-8")


def test_empty_prompts(tmp_path):
  demand_error(generate("--prompt", "", "--max-tokens", "1"), [FAILED, USAGE], "prompt")
  demand_error(generate("--prompt-file", prompt_file(tmp_path, b""), "--max-tokens", "1"), [FAILED], "prompt")


def test_files_that_cannot_be_read(tmp_path):
  demand_error(generate("--prompt-file", tmp_path / "absent", "--max-tokens", "1"), [FAILED], "absent")
  demand_error(generate("--prompt-file", tmp_path, "--max-tokens", "1"), [FAILED], str(tmp_path))
  demand_error(kdtree_run("generate", "--model", tmp_path / "absent", "--prompt", "x"), [FAILED], "absent")
  demand_error(kdtree_run("generate", "--model", tmp_path, "--prompt", "x"), [FAILED], "config.json")
  demand_error(kdtree_run("generate", "--model", MODEL, "--draft", MODEL, "--prompt", "x"), [FAILED], str(MODEL))


def test_a_prompt_longer_than_the_context(tmp_path):
  long = prompt_file(tmp_path, b"x = 1\n" * 4096)
  demand_error(generate("--prompt-file", long, "--max-tokens", "1"), [FAILED], "4096")


def test_a_prompt_that_leaves_no_room(tmp_path):
  text = golden("golden.json")["code"]["prompt"].encode()
  demand_error(generate("--prompt-file", prompt_file(tmp_path, text), "--max-tokens", "4096"), [FAILED], "4096")


@pytest.mark.parametrize("arguments, codes", [
  (["--max-tokens", "0"], [FAILED, USAGE]),
  (["--max-tokens", "-1"], [FAILED, USAGE]),
  (["--max-tokens", "999999999"], [FAILED]),
  (["--max-tokens", "99999999999999999999"], [FAILED, USAGE]),
  (["--max-tokens", "many"], [USAGE]),
  (["--max-tokens", ""], [USAGE]),
  (["--max-tokens"], [USAGE]),
  (["--temperature", "-1"], [FAILED, USAGE]),
  (["--temperature", "nan"], [FAILED, USAGE]),
  (["--top-p", "0"], [FAILED, USAGE]),
  (["--min-p", "2"], [FAILED, USAGE]),
  (["--top-k", "-1"], [FAILED, USAGE]),
  (["--seed", "1.5"], [FAILED, USAGE]),
  (["--budget", "1025"], [FAILED, USAGE]),
  (["--threads", "257"], [FAILED, USAGE]),
  (["--speculate", "fast"], [USAGE]),
  (["--no-such-flag"], [USAGE]),
  (["stray"], [USAGE]),
], ids=lambda value: " ".join(map(str, value)))
def test_bad_flags(arguments, codes):
  demand_error(generate("--prompt", "x", *arguments), codes)


def test_bad_commands():
  demand_error(kdtree_run("no-such-command"), [USAGE], "no-such-command")
  demand_error(kdtree_run("--no-such-flag"), [USAGE], "--no-such-flag")


def test_speculation_without_a_drafter():
  for mode in ("chain", "tree"):
    demand_error(kdtree_run("generate", "--model", MODEL, "--prompt", "x", "--speculate", mode), [FAILED, USAGE])
