"""The model over tensor-parallel ranks, as threads and as processes: the logits of one rank within rounding, the same bits
from run to run and however tokens are drafted; ranks that fail, hang or die, by name."""

import functools
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

from checkpoint_edits import copy_of, edit_json, put
from conftest import FULL, GOLDEN, RUN, clean_environment, golden, kdtree_run

from pyclient import InvalidArgument, KdtreeError, Session, Unsupported
from serve_support import READY
from shard_support import DRAFT, MODEL, shard

TOLERANCE = 2e-4        # of logits, between one rank and several
BF16_TOLERANCE = 2e-2   # the same where activations are BF16 (CUDA): of all logits together, flipped experts among them
NEAR_TIE = 1e-5         # a router's gap under this may choose other experts
PROMPTS = golden("eval_prompts.json")
TEXT = "def add(a, b):\n"
TPS = [2, 4, 8]


def ids_of(name):
  with np.load(GOLDEN / f"{name}.npz") as file:
    return file["ids"].tolist(), file["router_gap"], file["greedy"].tolist()


@functools.cache
def on_cuda():
  with Session(max_context=64) as session:
    return session.info()["backend"] == "cuda"


@functools.cache
def scores(tp, name):
  with Session(tp=tp, max_context=2048) as session:
    return session.score(ids_of(name)[0][:1500])


@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("name", ["code", "chat"])
def test_logits_are_those_of_one_rank(tp, name, record_property):
  """Where a router is near a tie that position and all later ones may differ: they are left out, and counted."""
  one, several = scores(1, name), scores(tp, name)
  assert np.any(one != several)   # that they are sums of several ranks at all
  if on_cuda():
    error = np.linalg.norm(one.astype(np.float64) - several) / np.linalg.norm(one)
    record_property("relative_error", float(error))
    assert error <= BF16_TOLERANCE
    return
  ties = np.flatnonzero((ids_of(name)[1] < NEAR_TIE).any(0))
  clear = min(int(ties.min(initial=len(one))), len(one))
  record_property("positions_left_out", len(one) - clear)
  assert clear >= len(one) // 3
  assert np.abs(one[:clear].astype(np.float64) - several[:clear]).max() <= TOLERANCE


N_TOKENS = 40 if FULL else 16
MODES = [{"speculate": "off"}, {"speculate": "chain"}, {"speculate": "tree", "budget": 16}, {}]
SETTINGS = [{}, {"temperature": 0.9, "seed": 11}, {"repetition_penalty": 1.3, "logit_bias": {300: 2.0}, "temperature": 0.7, "seed": 3}]


@pytest.mark.parametrize("tp", TPS)
def test_every_mode_yields_the_same_tokens_in_every_run(tp):
  runs = []
  for _ in range(2):
    with Session(tp=tp) as session:
      logits = session.score(PROMPTS[3]["ids"])
      texts = [[session.generate(PROMPTS[3]["ids"], max_tokens=N_TOKENS, ignore_eos=True, logprobs=3, **settings, **mode)
                for mode in MODES] for settings in SETTINGS]
    for of_setting in texts:
      assert len({tuple(result.token_ids) for result in of_setting}) == 1
    assert sum(max(result.accepted_by_depth, default=0) for result in texts[0]) > 0
    runs.append((logits.tobytes(), [[result.token_ids for result in of_setting] for of_setting in texts]))
  assert runs[0] == runs[1]


@pytest.mark.parametrize("tp", TPS)
def test_greedy_text_is_the_golden_one(tp):
  """Where the two best tokens are further apart than ranks can move them."""
  if on_cuda():
    pytest.skip("the golden text is that of fp32 activations")
  for name in ("code", "prose"):
    ids, _, greedy = ids_of(name)
    with Session(tp=tp) as session:
      tokens = session.generate(ids, max_tokens=len(greedy), ignore_eos=True).token_ids
      logits = session.score(ids + greedy)[len(ids) - 1:-1]
    best = np.sort(logits, axis=1)
    certain = best[:, -1] - best[:, -2] > 2 * TOLERANCE
    n = len(greedy) if certain.all() else int(np.argmin(certain))
    assert n > 8 and tokens[:n] == greedy[:n]


def test_shards_and_slices_made_in_memory_are_the_same(tmp_path):
  shard(MODEL, tmp_path / "out", "--tp", "4", "--draft", DRAFT)
  for path in (tmp_path / "out").glob("rank-00003*"):
    assert path.stat().st_size > 0
  with Session(tmp_path / "out", tmp_path / "out", tp=4) as sharded, Session(tp=4) as sliced:
    assert sharded.score(range(100)).tobytes() == sliced.score(range(100)).tobytes()
    a, b = (session.generate(TEXT, max_tokens=30, speculate="tree") for session in (sharded, sliced))
    assert a.token_ids == b.token_ids and a.accepted_by_depth == b.accepted_by_depth


def test_streams_together_prefix_hits_and_logprobs():
  """What follows rank 0's plans: several streams, prompts in chunks, pages that are known, prompts' log-probabilities."""
  with Session(tp=4, prefill_chunk=16, max_streams=4) as session:
    alone = [session.generate(p["ids"][:90], max_tokens=20, ignore_eos=True, temperature=0.8, seed=i, prompt_logprobs=2)
             for i, p in enumerate(PROMPTS[:5])]
    running = [session.stream(p["ids"][:90], max_tokens=20, ignore_eos=True, temperature=0.8, seed=i)
               for i, p in enumerate(PROMPTS[:5])]
    for one, stream in zip(alone, running, strict=True):
      for _ in stream:
        pass
      assert stream.result.token_ids == one.token_ids
    time.sleep(0.2)
    assert session.generate(PROMPTS[0]["ids"][:90], max_tokens=20, ignore_eos=True, temperature=0.8,
                            seed=0).token_ids == alone[0].token_ids


@pytest.mark.parametrize("tp, words", [
  (3, "tp: 3: expected a divisor of vocab_size, 2048"), (16, "tp: 16: expected a divisor of num_attention_heads, 8"),
  (65, "tp: 65: expected 0 to 64"), (-1, "tp: -1: expected 0 to 64"),
])
def test_ranks_that_do_not_divide_the_model(tp, words):
  with pytest.raises(InvalidArgument, match=re.escape(words)):
    Session(tp=tp)


def test_shards_of_another_number_of_ranks(tmp_path):
  shard(MODEL, tmp_path / "out", "--tp", "2")
  with pytest.raises(Unsupported, match=r"manifest.json: tp: 2: expected 4, .*start with --tp 2"):
    Session(tmp_path / "out", tp=4)
  with pytest.raises(KdtreeError, match=r"manifest.json: tp: 2: expected 1, .*start with --tp 2"):
    Session(tmp_path / "out")


def test_a_rank_whose_file_is_absent(tmp_path):
  shard(MODEL, tmp_path / "out", "--tp", "2")
  (tmp_path / "out" / "rank-00001-of-00002.safetensors").unlink()
  with pytest.raises(KdtreeError, match="rank-00001-of-00002.safetensors: no such file"):
    Session(tmp_path / "out", tp=2)


def test_the_flag_and_what_info_tells():
  info = json.loads(kdtree_run("info", "--tp", "2", "--json").stdout)
  assert info["tp"] == 2 and info["ranks"] == {"as": "threads", "deadline_ms": 10000}
  assert json.loads(kdtree_run("info", "--json").stdout)["ranks"] is None
  for flags in (["--tp", "3"], ["--tp", "0"]):
    done = kdtree_run("generate", "--prompt", TEXT, *flags)
    assert done.returncode == (1 if flags[1] == "3" else 2) and b"tp" in done.stderr


# ------------------------------------------------------------------------------------------------ processes
# Of the CPU backend; CUDA's ranks are threads.

MPIRUN = shutil.which("mpirun")
needs_mpi = pytest.mark.skipif(not MPIRUN, reason="needs Open MPI")


def mpi_command(n, command, *arguments, mpi=(), backend="cpu"):
  return [MPIRUN, "--oversubscribe", "-n", str(n), *mpi, RUN, command, "--backend", backend, *map(os.fspath, arguments)]


def mpi_environment():
  return {**clean_environment(), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def launch(n, *arguments, **options):
  return subprocess.run(mpi_command(n, *arguments, **options), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                        env=mpi_environment(), timeout=300)


GENERATE = ["generate", "--prompt", TEXT, "--max-tokens", "40", "--ignore-eos", "--json"]


@needs_mpi
@pytest.mark.parametrize("n", [2, 4])
def test_processes_yield_what_threads_do(n):
  """And rank 0 alone writes to standard output."""
  threads = json.loads(kdtree_run(*GENERATE, "--backend", "cpu", "--tp", str(n)).stdout)
  for flags in ([], ["--tp", str(n)], ["--temperature", "0"]):
    done = launch(n, *GENERATE, *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == threads["token_ids"]


@needs_mpi
def test_processes_that_disagree_with_tp():
  done = launch(2, *GENERATE, "--tp", "4")
  assert done.returncode != 0 and done.stdout == ""
  assert "tp: 4: expected 2, the ranks of the launcher" in done.stderr


@needs_mpi
def test_processes_that_were_given_different_models(tmp_path):
  other = copy_of(MODEL, tmp_path / "model")
  edit_json("config.json", put("routed_scaling_factor", 1.5))(other)
  generate = [RUN, *GENERATE, "--backend", "cpu", "--model"]
  done = subprocess.run([MPIRUN, "--oversubscribe", "-n", "1", *generate, MODEL, ":", "-n", "1", *generate, other],
                        stdin=subprocess.DEVNULL, capture_output=True, text=True, env=mpi_environment(), timeout=120)
  assert done.returncode != 0 and done.stdout == ""
  assert "rank 1: config.json of the model: " in done.stderr


@needs_mpi
def test_processes_on_cuda_are_refused():
  devices = json.loads(kdtree_run("info", "--list-devices", "--json").stdout)
  if not any(device["usable"] for device in devices["devices"]):
    pytest.skip(f"needs a CUDA device: {devices['error']}")
  done = launch(2, *GENERATE, backend="cuda")
  assert done.returncode != 0 and done.stdout == ""
  assert "rank 1: another process than rank 0's: expected ranks that are threads of one process" in done.stderr


def ranks_of(parent):
  """The processes of the job, by rank."""
  found = {}
  for name in os.listdir("/proc"):
    if not name.isdigit():
      continue
    try:
      with open(f"/proc/{name}/environ", "rb") as file:
        environment = dict(item.split(b"=", 1) for item in file.read().split(b"\0") if b"=" in item)
      with open(f"/proc/{name}/stat") as file:
        of = int(file.read().rsplit(")", 1)[1].split()[1])
    except OSError:
      continue
    if of == parent and b"OMPI_COMM_WORLD_RANK" in environment:
      found[int(environment[b"OMPI_COMM_WORLD_RANK"])] = int(name)
  return found


def alive(process):
  try:
    with open(f"/proc/{process}/stat") as file:
      return file.read().rsplit(")", 1)[1].split()[0] != "Z"   # a zombie waits for nobody but init
  except OSError:
    return False


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_hangs_is_named_and_ends_the_job(number):
  """Without --enable-recovery mpirun itself ends the job of a process that died."""
  mpi = ["--enable-recovery"] if number == signal.SIGKILL else []
  command = mpi_command(2, "generate", "--prompt", TEXT, "--max-tokens", "3000", "--ignore-eos",
                        "--speculate", "off", "--rank-deadline", "4", mpi=mpi)
  with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                        env=mpi_environment()) as job:
    first = job.stdout.read(20)
    assert first, job.stderr.read()
    ranks = ranks_of(job.pid)
    assert sorted(ranks) == [0, 1]
    start = time.monotonic()
    os.kill(ranks[1], number)
    try:
      stderr = b""
      while b"rank 1: no answer within 4000 ms" not in stderr:
        line = job.stderr.readline()
        assert line, stderr
        stderr += line
      assert time.monotonic() - start < 60
    finally:
      for process in ranks.values():
        try:
          os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
          pass
    job.communicate(timeout=60)
    assert number == signal.SIGKILL or job.returncode != 0


@needs_mpi
def test_a_process_that_dies_ends_the_job():
  """As mpirun does it by default."""
  command = mpi_command(2, "generate", "--prompt", TEXT, "--max-tokens", "3000", "--ignore-eos", "--speculate", "off")
  with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                        env=mpi_environment()) as job:
    assert job.stdout.read(20)
    ranks = ranks_of(job.pid)
    os.kill(ranks[1], signal.SIGKILL)
    job.communicate(timeout=60)
    assert job.returncode != 0
    end = time.monotonic() + 30
    while any(alive(process) for process in ranks.values()):
      assert time.monotonic() < end
      time.sleep(0.1)


@needs_mpi
def test_a_daemon_whose_rank_hangs_says_so_and_ends():
  command = mpi_command(2, "serve", "--port", "0", "--rank-deadline", "4")
  with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                        env=mpi_environment()) as job:
    lines = []
    for line in job.stderr:
      lines.append(line)
      if found := READY.search(line):
        break
    assert found, lines
    host, port = found.group(1), int(found.group(2))
    time.sleep(6)   # idle for longer than the deadline: the ranks look after each other

    def health():
      connection = http.client.HTTPConnection(host, port, timeout=10)
      connection.request("GET", "/health")
      return connection.getresponse().status

    assert health() == 200
    ranks = ranks_of(job.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    try:
      end = time.monotonic() + 60
      while health() == 200:
        assert time.monotonic() < end
        time.sleep(0.05)
      text = ""
      while "rank 1: no answer within 4000 ms" not in text:
        text = job.stderr.readline()
        assert text
    finally:
      os.kill(ranks[1], signal.SIGKILL)
    job.communicate(timeout=60)
    assert job.returncode != 0
