"""`kdtree-run plan`: Kimi K2.6 on 8 ranks as its published sizes say, shards as large as planned, bad questions by name."""

import json

import pytest

from conftest import kdtree_run
from shard_support import DRAFT, MODEL, demand_refusal, rank_name, shard


def plan(*arguments):
  done = kdtree_run("plan", *arguments, "--json")
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def test_kimi_on_eight_ranks():
  found = plan("--preset", "kimi-k2.6", "--tp", "8", "--gpu-memory", "139.8", "--bandwidth", "4700")
  parts = found["weights"]["parts"]
  assert parts["experts"] == 60 * 1_189_085_184
  assert found["weights"]["bytes"] - parts["drafter"] == pytest.approx(76.18e9, rel=1e-4)
  assert found["kv"]["bytes_per_token"] == 70_272 and found["kv"]["draft_bytes_per_token"] == 3_072
  assert found["fits"] and found["kv"]["tokens"] == found["kv"]["free_bytes"] // 73_344 // 64 * 64
  steps = {step["nodes"]: step for step in found["steps"]}
  assert list(steps) == [1, 2, 4, 8, 16, 32, 64]
  assert steps[1]["bytes"] == pytest.approx(6.03e9, rel=1e-3) and steps[1]["floor_ms"] == pytest.approx(1.283, abs=1e-3)
  assert [round(steps[n]["distinct_experts"]) for n in (1, 4, 8, 16, 32, 64)] == [8, 31, 60, 110, 188, 284]
  assert [round(steps[n]["bytes"] / steps[1]["bytes"], 1) for n in (8, 16, 32)] == [2.6, 4.1, 6.6]
  # Every split tensor once and every replicated one on each rank, of 594 GB of text: nothing is lost.
  replicated = parts["norms"] + parts["router"] + 61 * 2112 * 7168 * 2
  scaled = 8 * (found["weights"]["bytes"] - parts["drafter"] - replicated) + replicated
  assert scaled == 594_205_904_896 - 60 * 384 * 3 * 8  # weight_shape is left out


def test_a_context_is_read_once_a_step():
  arguments = ["--preset", "kimi-k2.6", "--tp", "8", "--gpu-memory", "139"]
  assert plan(*arguments, "--context", "1000")["steps"][3]["kv_bytes"] == 70_272_000
  assert plan(*arguments)["steps"][3]["kv_bytes"] == 0


def test_what_does_not_fit():
  found = plan("--preset", "kimi-k2.6", "--tp", "4", "--gpu-memory", "80GB")
  assert not found["fits"] and found["kv"]["free_bytes"] < 0 and found["kv"]["tokens"] == 0
  assert all(row["streams"] == 0 for row in found["streams"])
  text = kdtree_run("plan", "--preset", "kimi-k2.6", "--tp", "4", "--gpu-memory", "80GB").stdout.decode()
  assert "It does not fit: 141.5 GiB of weights and 4.0 GiB reserved are 71.0 GiB more than the GPU's 74.5 GiB." in text
  assert "missing" in text and "KV tokens" not in text and "streams of" not in text


def test_one_is_singular():
  text = kdtree_run("plan", "--model", MODEL, "--tp", "1", "--gpu-memory", "5").stdout.decode()
  assert "one of 1 rank " in text and "It fits." in text


def test_a_stream_of_the_whole_context_may_not_fit():
  arguments = ["--preset", "kimi-k2.6", "--tp", "8", "--gpu-memory", "80GiB"]
  tokens = plan(*arguments)["kv"]["tokens"]
  text = kdtree_run("plan", *arguments).stdout.decode()
  assert 0 < tokens < 262144
  assert f"It fits, with streams of at most {tokens} of the model's 262144 tokens." in text


@pytest.mark.parametrize("tp", [1, 8])
def test_shards_are_as_large_as_planned(tmp_path, tp):
  shard(MODEL, tmp_path / "out", "--tp", str(tp), "--draft", DRAFT)
  blob = (tmp_path / "out" / rank_name(0, tp)).read_bytes()
  data = len(blob) - 8 - int.from_bytes(blob[:8], "little")
  assert plan("--model", MODEL, "--draft", DRAFT, "--tp", str(tp), "--gpu-memory", "5")["weights"]["bytes"] == data


@pytest.mark.parametrize("arguments, code, words", [
  (["--preset", "kimi-k2.6"], 2, "--gpu-memory: not given"),
  (["--gpu-memory", "80"], 2, "--model and --preset: neither"),
  (["--preset", "kimi-k2.6", "--model", MODEL, "--gpu-memory", "80"], 2, "--model and --preset: both"),
  (["--preset", "kimi-k9", "--gpu-memory", "80"], 1, "preset: kimi-k9: expected a folder of"),
  (["--preset", "../tiny-k2", "--gpu-memory", "80"], 1, "preset: ../tiny-k2"),
  (["--preset", "kimi-k2.6", "--tp", "3", "--gpu-memory", "80"], 1, "tp: 3: expected a divisor of vocab_size, 163840"),
  (["--preset", "kimi-k2.6", "--tp", "0", "--gpu-memory", "80"], 2, "--tp: 0"),
  (["--preset", "kimi-k2.6", "--gpu-memory", "80TB"], 2, "--gpu-memory: 80TB"),
  (["--preset", "kimi-k2.6", "--gpu-memory", "0"], 2, "--gpu-memory: 0: expected a size above 0"),
  (["--preset", "kimi-k2.6", "--gpu-memory", "-1"], 2, "--gpu-memory: -1"),
  (["--preset", "kimi-k2.6", "--gpu-memory", "1e300"], 2, "--gpu-memory: 1e300"),
  (["--preset", "kimi-k2.6", "--gpu-memory", "nan"], 2, "--gpu-memory: nan"),
  (["--preset", "kimi-k2.6", "--gpu-memory", "80", "--context", "999999999"], 1, "context: 999999999"),
  (["--preset", "kimi-k2.6", "--draft", DRAFT, "--gpu-memory", "80"], 1, "hidden_size: 256"),
])
def test_bad_questions(arguments, code, words):
  done = kdtree_run("plan", *arguments)
  done.stderr = done.stderr.decode()
  demand_refusal(done, words, code)
