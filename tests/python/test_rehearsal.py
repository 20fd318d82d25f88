"""`kdtree-run bench --synthetic`: one rank with made-up weights. Bytes are those an independent count finds, shared experts
are fewer experts, and what cannot be rehearsed is an error by name."""

import json

import pytest

from conftest import kdtree_run
from shard_support import DRAFT, MODEL, demand_refusal

SMALL = ["--nodes", "1,4,9", "--prefixes", "70,200", "--streams", "1,3", "--overlaps", "0", "--op-nodes", "none", "--replays", "2"]


def rehearse(*arguments):
  prefill = [] if "--prompt-tokens" in arguments else ["--prompt-tokens", "none"]
  done = kdtree_run("bench", "--synthetic", "--backend", "cpu", *map(str, arguments), *prefill, "--json")
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def weight_bytes(c, tp, layers, rows):
  """What a step of so many rows reads of a rank's weights, experts apart."""
  hidden, heads, lora, q_lora = c["hidden_size"], c["num_attention_heads"] // tp, c["kv_lora_rank"], c["q_lora_rank"]
  nope, rope, v_head = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
  attention = 2 * ((q_lora + lora + rope) * hidden + heads * (nope + rope) * q_lora + heads * (nope + v_head) * lora
                   + hidden * heads * v_head) + 4 * (2 * hidden + q_lora + lora)
  dense = 2 * 3 * hidden * c["intermediate_size"] // tp
  moe = 2 * (c["n_routed_experts"] * hidden + 3 * hidden * c["n_shared_experts"] * c["moe_intermediate_size"] // tp) \
    + 4 * c["n_routed_experts"]
  n_dense = min(layers, c["first_k_dense_replace"])
  head = 4 * hidden + 2 * c["vocab_size"] // tp * hidden
  return layers * attention + n_dense * dense + (layers - n_dense) * moe + head + 2 * rows * hidden


@pytest.mark.parametrize("tp, layers", [(1, 5), (2, 2), (8, 3)])
def test_bytes_are_those_of_an_independent_count(tp, layers):
  config = json.loads((MODEL / "config.json").read_text())
  found = rehearse("--model", MODEL, "--tp", tp, "--rank", tp - 1, "--layers", layers, *SMALL)
  assert found["tp"] == tp and found["rank"] == tp - 1 and found["model"]["layers"] == layers
  assert found["model"]["heads"] == 8 // tp and found["model"]["expert_width"] == 256 // tp
  cells = [(step["streams"], step["prefix"], step["nodes"]) for step in found["steps"]]
  assert cells == [(s, p, n) for s in (1, 3) for p in (70, 200) for n in (1, 4, 9)]
  expert = 3 * config["hidden_size"] * config["moe_intermediate_size"] // tp * (0.5 + 2 / 32)
  for step in found["steps"]:
    assert step["rows"] == step["nodes"] * step["streams"]
    assert step["weight_bytes"] == weight_bytes(config, tp, layers, step["rows"])
    assert step["expert_bytes"] == pytest.approx(step["distinct_experts"] * (layers - 1) * expert)
    assert step["kv_bytes"] == step["streams"] * step["prefix"] * layers * (128 + 32) * 4
    assert step["bytes"] == pytest.approx(step["weight_bytes"] + step["expert_bytes"] + step["kv_bytes"])
    assert step["floor_ms"] == pytest.approx(1e3 * step["bytes"] / found["read_bandwidth"])
    assert step["times_floor"] == pytest.approx(step["ms"] / step["floor_ms"])
    assert 0 < step["fastest_ms"] <= step["ms"] and set(step["stages_ms"]) == {"verify", "sample"}
    if step["rows"] == 1:
      assert step["distinct_experts"] == 4


def test_prefill():
  config = json.loads((MODEL / "config.json").read_text())
  found = rehearse("--model", MODEL, "--draft", DRAFT, "--tp", 2, "--layers", 3, "--nodes", "1", "--prefixes", "8", "--streams", "1",
                   "--overlaps", "0", "--round-nodes", "none", "--op-nodes", "none", "--replays", "2", "--prompt-tokens", "50,150",
                   "--chunk-tokens", "64,100")
  assert [(of["tokens"], of["chunk"]) for of in found["prefill"]] == [(50, 50), (150, 64), (150, 100)]
  draft = json.loads((DRAFT / "config.json").read_text())
  hidden, width = config["hidden_size"], config["moe_intermediate_size"] // 2
  attention = weight_bytes(config, 2, 1, 0) - weight_bytes(config, 2, 0, 0)    # of the dense layer, its norms too
  norms = 4 * (2 * hidden + config["q_lora_rank"] + config["kv_lora_rank"])
  dense = (attention - norms) // 2
  moe = (weight_bytes(config, 2, 2, 0) - weight_bytes(config, 2, 1, 0) - norms - 4 * config["n_routed_experts"]) // 2
  experts = 3 * hidden * width * config["num_experts_per_tok"]
  kv = 2 * draft["num_key_value_heads"] * draft["head_dim"] // 2
  taps = len({min(tap, 2) for tap in draft["dflash_config"]["target_layer_ids"]})    # of three layers
  drafter = hidden * hidden * taps // 2 + draft["num_hidden_layers"] * kv * hidden
  of_position = 3 * config["num_attention_heads"] // 2 * (2 * config["kv_lora_rank"] + config["qk_rope_head_dim"])
  for of in found["prefill"]:
    n = of["tokens"]
    want = 2 * (n * (dense + 2 * (moe + experts) + drafter) + of_position * n * (n + 1) // 2)
    assert of["tflop"] == pytest.approx(want * 1e-12)
    assert 0 < of["attention_ms"] < 3 * of["ms"] and of["tokens_per_second"] == pytest.approx(n / of["ms"] * 1e3)
  refused = kdtree_run("bench", "--synthetic", "--model", MODEL, "--prefixes", "8", "--prompt-tokens", "100000000")
  assert refused.returncode == 1 and b"prompts: 100000000" in refused.stderr


def test_distinct_experts_follow_overlap():
  found = rehearse("--model", MODEL, "--layers", 3, "--nodes", "2,16", "--prefixes", "64", "--streams", "1",
                   "--overlaps", "0,0.5,1", "--op-nodes", "none", "--replays", "5")
  distinct = {(step["nodes"], step["overlap"]): step["distinct_experts"] for step in found["steps"]}
  assert distinct[16, 1.0] == distinct[2, 1.0] == 4
  assert 4 < distinct[2, 0.5] < distinct[2, 0.0] <= 8 and distinct[16, 0.5] <= distinct[16, 0.0]
  assert distinct[2, 0.0] == pytest.approx(16 * (1 - 0.75**2), abs=0.8)
  routed = rehearse("--model", MODEL, "--layers", 3, "--nodes", "3", "--prefixes", "64", "--streams", "1", "--overlaps", "0",
                    "--op-nodes", "none", "--routed", "--replays", "2")
  assert routed["routing"] == "router" and 4 <= routed["steps"][0]["distinct_experts"] <= 12


def test_rounds_and_operations():
  found = rehearse("--model", MODEL, "--draft", DRAFT, "--tp", 2, "--nodes", "8", "--prefixes", "100", "--streams", "2",
                   "--overlaps", "0", "--round-nodes", "1,8", "--op-nodes", "8", "--replays", "3")
  plain, drafted = found["rounds"]
  assert set(plain["stages_ms"]) == {"verify", "sample", "accept", "commit"}
  assert set(drafted["stages_ms"]) == {"draft", "build", "verify", "sample", "accept", "commit"}
  step, = found["steps"]
  assert drafted["weight_bytes"] > step["weight_bytes"] and drafted["kv_bytes"] > step["kv_bytes"]
  assert drafted["ms"] > 0 and all(ms > 0 for ms in drafted["stages_ms"].values())
  of, = found["ops"]
  calls = {op["op"]: op["calls"] for op in of["ops"]}
  assert calls["experts"] == calls["route"] == 4 and calls["mla_attention"] == calls["latent_write"] == 5
  assert calls["mlp 256x256"] == calls["embed"] == calls["sample"] == calls["logits 1024x256"] == 1
  assert calls["linear 288x256"] == 5 and calls["copy"] == 3
  assert sum(op["bytes"] for op in of["ops"]) == pytest.approx(step["bytes"], rel=0.2)   # experts are drawn anew
  experts, = (op for op in of["ops"] if op["op"] == "experts")
  assert experts["us"] > 0


def test_emulated_collectives_take_their_time():
  """The embedding's sum, two a layer and the gather of the logits, each as long as it was said to take."""
  config = json.loads((MODEL / "config.json").read_text())
  cell = ["--model", MODEL, "--layers", 3, "--nodes", "1,4", "--prefixes", "64", "--streams", "1", "--overlaps", "0",
          "--op-nodes", "4", "--replays", "2"]
  plain = rehearse(*cell, "--tp", 2)
  found = rehearse(*cell, "--tp", 2, "--collectives", "emulate", "--collective-us", "3000", "--link-gbps", "0.05")
  assert plain["collectives"] == "none" and "collectives_ms" not in plain["steps"][0]
  assert (found["collectives"], found["collective_us"], found["link_gbps"]) == ("emulate", 3000, 0.05)
  for step in found["steps"]:
    read = step["rows"] * 4 * (7 * config["hidden_size"] + config["vocab_size"] // 2)
    assert step["collectives_ms"] == pytest.approx(8 * 3 + 1e3 * read / 0.05e9)
    assert step["ms"] > step["collectives_ms"]
  calls = {op["op"]: op["calls"] for op in found["ops"][0]["ops"]}
  assert calls["collective"] == 8 and calls["sum_ranks"] == 7 and calls["gather_ranks"] == 1
  # In two shots: of four ranks a rank reads the others' partials of its quarter, and then their three quarters of the sums.
  found = rehearse(*cell, "--tp", 4, "--collectives", "emulate", "--collective-us", "0.1", "--link-gbps", "0.05")
  for step in found["steps"]:
    read = step["rows"] * 4 * (7 * 1.5 * config["hidden_size"] + 3 * config["vocab_size"] // 4)
    assert step["collectives_ms"] == pytest.approx(15 * 1e-4 + 1e3 * read / 0.05e9)


def test_tables_and_a_limit():
  done = kdtree_run("bench", "--synthetic", "--backend", "cpu", "--model", str(MODEL), "--layers", "2", *SMALL)
  text = done.stdout.decode()
  assert done.returncode == 0 and "x floor" in text and "2 layers, made-up weights" in text and "no time" not in text
  done = kdtree_run("bench", "--synthetic", "--backend", "cpu", "--model", str(MODEL), "--layers", "2", *SMALL, "--json",
                    "--prompt-tokens", "none", "--limit", "0.000000001")
  found = json.loads(done.stdout)
  assert found["steps"] == [] and found["left_out"] == 12
  assert done.returncode == 1 and b"error: --limit: nothing was measured: expected more seconds" in done.stderr


@pytest.mark.parametrize("arguments, code, words", [
  (["--synthetic"], 2, "--model and --preset: neither"),
  (["--synthetic", "--preset", "kimi-k2.6", "--model", MODEL], 2, "--model and --preset: both"),
  (["--preset", "kimi-k2.6"], 2, "--preset: no rehearsal: expected --synthetic"),
  (["--layers", "8"], 2, "--layers: no rehearsal: expected --synthetic"),
  (["--synthetic", "--model", MODEL, "--repeat", "3"], 2, "--repeat: of no use"),
  (["--synthetic", "--model", MODEL, "--max-context", "64"], 2, "--max-context: of no use"),
  (["--synthetic", "--preset", "kimi-k9"], 1, "preset: kimi-k9"),
  (["--synthetic", "--model", MODEL, "--tp", "3"], 1, "tp: 3: expected a divisor of vocab_size"),
  (["--synthetic", "--model", MODEL, "--tp", "2", "--rank", "2"], 1, "rank: 2: expected 0 to 1"),
  (["--synthetic", "--model", MODEL, "--layers", "6"], 1, "layers: 6"),
  (["--synthetic", "--model", MODEL, "--layers", "1"], 1, "layers: 1: expected more than the 1 without experts"),
  (["--synthetic", "--model", MODEL, "--nodes", "0"], 2, "--nodes: 0"),
  (["--synthetic", "--model", MODEL, "--nodes", ","], 2, "--nodes: ,"),
  (["--synthetic", "--model", MODEL, "--overlaps", "1.5"], 2, "--overlaps: 1.5"),
  (["--synthetic", "--model", MODEL, "--round-nodes", "8"], 2, "--round-nodes"),
  (["--synthetic", "--model", MODEL, "--prefixes", "4096"], 1, "prefixes: 4096: expected at most"),
  (["--synthetic", "--model", MODEL, "--collectives", "nccl"], 2, "--collectives: nccl"),
  (["--synthetic", "--model", MODEL, "--collective-us", "3"], 2, "--collective-us: nothing to wait for: expected --collectives emulate"),
  (["--synthetic", "--model", MODEL, "--collectives", "emulate", "--link-gbps", "0"], 2, "--link-gbps: 0"),
])
def test_bad_rehearsals(arguments, code, words):
  within = ["--prefixes", "64", "--prompt-tokens", "none"] if "--synthetic" in arguments else []
  done = kdtree_run("bench", "--backend", "cpu", *within, *map(str, arguments))
  done.stderr = done.stderr.decode()
  demand_refusal(done, words, code)


def test_what_does_not_fit_says_how_much_it_needs():
  done = kdtree_run("bench", "--synthetic", "--backend", "cpu", "--preset", "kimi-k2.6")
  message = done.stderr.decode()
  assert done.returncode == 1 and "memory of the cpu backend" in message and "wanted (weights 55" in message and "fewer layers" in message
