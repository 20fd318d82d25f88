"""API keys: from a file or the environment, what is refused without one, and what is no key."""

import os
import subprocess

import pytest
from conftest import RUN, clean_environment
from serve_support import KEYED, OPEN, Daemon, assert_error, status_of


def test_keys(tmp_path):
  file = tmp_path / "keys"
  file.write_text("# the team\nfirst-key\n\nsecond-key \r\n")
  with Daemon("--api-key-file", file, env={"KDTREE_API_KEY": "third-key"}) as daemon:
    for path in OPEN:
      assert daemon.request("GET", path)[0] == 200
    for method, path in KEYED:
      for value in (None, "Bearer wrong", "Bearer first-ke", "Bearer first-key2", "Bearer ", "first-key",
                    "Basic first-key", "Bearer # the team"):
        answer = daemon.request(method, path, headers={"Authorization": value} if value else {})
        assert_error(answer, 401, "invalid_api_key")
        assert answer[1]["WWW-Authenticate"] == "Bearer" and b"first-key" not in answer[2]
    for key in ("first-key", "second-key", "third-key"):
      assert daemon.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 200
      assert daemon.request("GET", "/v1/models", headers={"authorization": f"bearer  {key}"})[0] == 200
    # The body of a stranger is not waited for.
    data = daemon.raw(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 90000\r\n\r\n", timeout=5)
    assert status_of(data) == 401
    assert "-key" not in daemon.log()


@pytest.mark.parametrize("content", ["", "# nothing\n", "two words\n", "caf\u00e9\n"])
def test_key_files_without_usable_keys_are_refused(tmp_path, content):
  file = tmp_path / "keys"
  file.write_text(content)
  done = subprocess.run([RUN, "serve", "--port", "0", "--api-key-file", str(file)], capture_output=True, text=True,
                        env=clean_environment(), timeout=60)
  assert done.returncode == 1 and str(file) in done.stderr and "expected" in done.stderr


def test_key_files_that_are_no_small_files_are_named(tmp_path):
  pipe, large = tmp_path / "pipe", tmp_path / "large"
  os.mkfifo(pipe)
  large.write_text("# comment\n" * (1 << 17))
  for path, word in ((tmp_path / "none", "No such file or directory"), (tmp_path, "a directory"),
                     (pipe, "no regular file"), ("/dev/zero", "no regular file"), (large, "more than 1 MiB")):
    done = subprocess.run([RUN, "serve", "--port", "0", "--api-key-file", str(path)], capture_output=True, text=True,
                          env=clean_environment(), timeout=60)
    assert done.returncode == 1 and f"error: {path}: {word}: expected a regular file" in done.stderr, done.stderr


@pytest.mark.parametrize("value", [" ", "\n", "#secret", "# a\n#b\n"])
def test_a_variable_without_a_key_does_not_leave_the_door_open(value):
  done = subprocess.run([RUN, "serve", "--port", "0"], capture_output=True, text=True, timeout=60,
                        env=clean_environment() | {"KDTREE_API_KEY": value})
  assert done.returncode == 1 and "KDTREE_API_KEY: no key: expected API keys" in done.stderr


def test_listening_beyond_loopback_without_a_key_is_warned_of():
  with Daemon("--host", "0.0.0.0", "--port", "0") as daemon:
    assert "without an API key" in daemon.log()
  with Daemon("--host", "0.0.0.0", "--port", "0", env={"KDTREE_API_KEY": "k"}) as daemon:
    assert "without an API key" not in daemon.log()
  with Daemon("--host", "::1", "--port", "0") as daemon:
    assert "without an API key" not in daemon.log() and daemon.get("/health")[0] == 200
