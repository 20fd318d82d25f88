"""Ranks as processes: bytes and sums under mpirun, on one host and on two; ranks that fail, hang or die, by name."""

import json
import os
import pathlib
import re
import shutil
import stat
import subprocess
import time

import pytest

from conftest import ROOT, RUN, clean_environment, kdtree_run

HOOKS = os.environ.get("KDTREE_TEST_HOOKS")
CHECK = pathlib.Path(HOOKS).parents[1] / "ranks" / "check_ranks" if HOOKS else None
MPIRUN = shutil.which("mpirun")
pytestmark = pytest.mark.skipif(not MPIRUN or not CHECK or not CHECK.exists(), reason="needs Open MPI and the C++ tests")


def launch(n, *arguments, mpi=(), prefix=(), program=CHECK, timeout=240):
  """(exit code, what the ranks printed, seconds)."""
  environment = {**clean_environment(), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
  command = [*prefix, MPIRUN, "--oversubscribe", "-n", str(n), *mpi, program, *map(str, arguments)]
  start = time.monotonic()
  done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
  return done.returncode, done.stdout + done.stderr, time.monotonic() - start


@pytest.mark.parametrize("n", [1, 2, 4])
def test_bytes_and_sums(n):
  code, out, _ = launch(n, "moves")
  assert code == 0 and sorted(re.findall(r"rank (\d): ok", out)) == [str(r) for r in range(n)], out


# With it mpirun leaves the other ranks alone when one ends, and has no exit code of its own to give.
RECOVERY = ["--enable-recovery"]


def test_a_rank_that_fails_is_named_by_all_others_at_once():
  _, out, seconds = launch(4, "fail", 2, 100000, mpi=RECOVERY)
  assert seconds < 90
  assert out.count("rank 2: no more memory: expected it to go on") == 4, out  # its own next call too


@pytest.mark.parametrize("how", ["hang", "die"])
def test_a_rank_that_does_not_answer_is_named_within_the_deadline(how):
  _, out, _ = launch(3, how, 1, 1500, mpi=RECOVERY)
  for rank in (0, 2):
    found = re.search(rf"rank {rank} after ([\d.]+) s: rank 1: no answer within 1500 ms: expected barrier of every rank", out)
    assert found, out
    assert 1.4 < float(found.group(1)) < 30


def test_a_job_with_a_dead_rank_ends():
  """As mpirun does it by default: the others are ended with it."""
  code, _, seconds = launch(3, "die", 1, 100000)
  assert code != 0 and seconds < 90


@pytest.fixture
def two_hosts(tmp_path):
  """Two network namespaces with a cable between them, and what stands in for ssh."""
  if os.geteuid() != 0 or not shutil.which("ip"):
    pytest.skip("needs root and ip")
  names = [f"kdtree-{os.getpid()}-{i}" for i in range(2)]

  def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)

  try:
    ip("netns", "add", names[0])
  except subprocess.CalledProcessError:
    pytest.skip("needs network namespaces")
  try:
    ip("netns", "add", names[1])
    ip("link", "add", "kdtree0", "netns", names[0], "type", "veth", "peer", "name", "kdtree1", "netns", names[1])
    for i, name in enumerate(names):
      ip("-n", name, "address", "add", f"10.211.55.{i + 1}/24", "dev", f"kdtree{i}")
      ip("-n", name, "link", "set", f"kdtree{i}", "up")
      ip("-n", name, "link", "set", "lo", "up")
    agent = tmp_path / "agent"
    agent.write_text(f'#!/bin/sh\n# HOST COMMAND…: in the namespace of that address\nhost=$1\nshift\n'
                     f'case $host in 10.211.55.1) space={names[0]} ;; *) space={names[1]} ;; esac\n'
                     'exec ip netns exec "$space" sh -c "$*"\n')
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    yield names, agent
  finally:
    for name in names:
      subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def network(agent):
  return ["--mca", "plm_rsh_agent", agent, "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "10.211.55.0/24",
          "--mca", "oob_tcp_if_include", "10.211.55.0/24", "--host", "10.211.55.1:2,10.211.55.2:2"]


def test_two_hosts(two_hosts):
  names, agent = two_hosts
  code, out, _ = launch(4, "moves", mpi=network(agent), prefix=["ip", "netns", "exec", names[0]])
  assert code == 0 and sorted(re.findall(r"rank (\d): ok", out)) == ["0", "1", "2", "3"], out


def test_the_engine_on_two_hosts(two_hosts):
  """The tokens of as many ranks in one process."""
  names, agent = two_hosts
  generate = ["generate", "--prompt", "def add(a, b):", "--max-tokens", "24", "--ignore-eos", "--json", "--backend", "cpu"]
  models = ["-x", "KDTREE_MODELS_DIR"] if "KDTREE_MODELS_DIR" in os.environ else []
  code, out, _ = launch(4, *generate, mpi=[*network(agent), *models], prefix=["ip", "netns", "exec", names[0]], program=RUN)
  assert code == 0, out
  threads = json.loads(kdtree_run(*generate, "--tp", "4").stdout)
  assert json.loads(out[out.index("{"):out.rindex("}") + 1])["token_ids"] == threads["token_ids"]
