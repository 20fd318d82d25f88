"""tools/setup with stubs for apt and pip: what is built when, and what it says meanwhile."""

import os
import shutil
import signal
import subprocess
import time

import pytest

from conftest import ROOT

PYTHON = """#!/bin/bash
case "$*" in
  --version) echo Python 3.11.0 ;;
  *'pip install'*' -r '*) printf 'Collecting one==1 (from x)\\nInstalling collected packages: one\\n' ;;
  *'pip install -v'*)
    printf '%s\\n' "$*" >>builds
    printf 'noise\\n  [1/2] Compiling a.cpp\\n  [2/2] Linking b\\n'
    [ ! -e broken ] || { echo 'a.cpp:1: error: broken'; exit 1; }
    printf '#!/bin/sh\\n' >.venv/bin/kdtree-run && chmod +x .venv/bin/kdtree-run ;;
esac
"""


def executable(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
  path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
  """A folder that tools/setup takes for a checkout whose packages and .venv are there."""
  for name in ("tools/setup", "tools/requirements.txt", "meson.options"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / name, tmp_path / name)
  for name in ("engine/x", "pyclient/x", "models/x", "tests/meson.build", "LICENSE", "README.md", "meson.build",
               "pyproject.toml"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
  executable(tmp_path / ".venv/bin/python", PYTHON)
  executable(tmp_path / "stubs/dpkg-query", "#!/bin/sh\nprintf installed\n")
  return tmp_path


def setup(checkout, *arguments):
  """What it printed, its exit code, and the settings of the build it made, if any."""
  builds = checkout / "builds"
  builds.unlink(missing_ok=True)
  done = subprocess.run([checkout / "tools/setup", *arguments], capture_output=True, text=True, timeout=60,
                        stdin=subprocess.DEVNULL, env=os.environ | {"PATH": f"{checkout}/stubs:{os.environ['PATH']}"})
  made = builds.read_text().split() if builds.exists() else []
  return done, [word.removeprefix("--config-settings=setup-args=") for word in made if "setup-args" in word]


def test_ctrl_c_says_how_to_go_on(checkout):
  executable(checkout / ".venv/bin/python", PYTHON.replace("printf 'noise", "touch building; sleep 60; printf 'noise"))
  with subprocess.Popen([checkout / "tools/setup"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                        start_new_session=True, env=os.environ | {"PATH": f"{checkout}/stubs:{os.environ['PATH']}"}) as process:
    for _ in range(600):
      if (checkout / "building").exists():
        break
      time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)   # as a terminal does: the whole foreground job
    _, said = process.communicate(timeout=30)
  assert process.returncode == 130
  assert b"interrupted; the same command goes on" in said and b"error" not in said


def test_ctrl_c_on_the_tests_names_the_stage(checkout):
  shutil.copy(ROOT / "tools/test", checkout / "tools/test")
  executable(checkout / "tools/setup", "#!/bin/bash\ntrap 'exit 2' INT\ntouch begun\nsleep 60\n")
  with subprocess.Popen([checkout / "tools/test"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=checkout,
                        start_new_session=True) as process:
    for _ in range(600):
      if (checkout / "begun").exists():
        break
      time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=30)
  assert process.returncode == 130
  assert b"==== interrupted in: set-up after" in said and b"FAILED" not in said


def test_settings_are_a_reason_to_build(checkout):
  builds = [setup(checkout, *arguments)[1] for arguments in
            (["--cpu"], ["--cpu"], [], [], ["--tests"], ["--cpu"], ["--tests"], ["--tests"], [])]
  cpu, plain, tests = ["-Dcuda=disabled"], ["-Dgpu_ptx=80"], ["-Dgpu_ptx="]
  # What has the PTX of other cards does for the tests, too.
  assert builds == [cpu, [], plain, [], [], cpu, tests, [], plain]


def test_sources_are_a_reason_to_build(checkout):
  setup(checkout)
  (checkout / "engine/x").write_text("new")
  assert setup(checkout)[1] and not setup(checkout)[1]


def test_stages_say_what_and_how_long(checkout):
  done, _ = setup(checkout)
  assert done.returncode == 0 and done.stderr == ""
  lines = done.stdout.splitlines()
  for stage in ("installing tools/requirements.txt", "building and installing kdtree-engine"):
    at = lines.index(f"setup: {stage}")
    assert lines[at + 1].startswith(f"setup: {stage}: done, ") and lines[at + 1].endswith(" s")
  assert lines[-1].startswith("setup: ready")


def test_a_broken_build_is_shown_and_made_again(checkout):
  (checkout / "broken").touch()
  done, _ = setup(checkout)
  assert done.returncode == 1 and "a.cpp:1: error: broken" in done.stderr
  assert "error: building and installing kdtree-engine: failed: expected" in done.stderr
  (checkout / "broken").unlink()
  assert setup(checkout)[1]
