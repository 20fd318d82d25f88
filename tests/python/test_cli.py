"""kdtree-run from outside: flags and their mirrors, exit codes, errors by name, streaming, JSON, the bench."""

import json
import os
import re
import signal
import subprocess
import time

import pytest
from conftest import MODELS, RUN, clean_environment, kdtree_run

PROMPT = "class Stack:\n    def push(self, item):\n"
COMMANDS = ["generate", "info", "bench"]
ERROR = re.compile(r"error: [^\n]+: [^\n]+: expected [^\n]+\n")
TINY_BENCH = ["--kinds", "code,chat", "--prompts-per-kind", 1, "--max-tokens", 12, "--repeat", 2, "--prefill", 32]
STAGES = ["prefill", "draft", "build", "verify", "sample", "accept", "commit", "emit"]


def run(*arguments, stdin=b"", **variables):
  return subprocess.run([RUN, *(each if isinstance(each, bytes) else str(each) for each in arguments)], input=stdin, capture_output=True, timeout=300,
                        env=clean_environment() | variables)


def generate(*arguments, **variables):
  done = run("generate", "--json", *arguments, **variables)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def start(*arguments, **options):
  return subprocess.Popen([RUN, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=clean_environment(), bufsize=0, **options)


def assert_error(done, code, *words):
  message = done.stderr.decode()
  assert done.returncode == code, message
  assert done.stdout == b""
  assert ERROR.fullmatch(message), message
  for word in words:
    assert str(word) in message


# ------------------------------------------------------------------------------------------------ help and usage

@pytest.mark.parametrize("command", COMMANDS)
def test_help_gives_every_flag_a_default_and_a_variable(command):
  done = run(command, "--help")
  assert done.returncode == 0 and done.stderr == b""
  flags = re.split(r"\n  (?=-)", done.stdout.decode())[1:]
  names = [flag.split()[0] for flag in flags]
  assert names[0] == "-h,--help" and "--model" in names and "--json" in names
  for name, text in zip(names[1:], flags[1:]):
    variable = "KDTREE_" + name.removeprefix("--").replace("-", "_").upper()
    assert re.search(r"\[default: [^\]]+\]\s+\[env: " + variable + r"\]", text), text
    assert all(len(line) <= 80 for line in text.splitlines()[1:]), text


def test_root_help_and_version():
  for command in COMMANDS:
    assert command in run("--help").stdout.decode()
  assert re.fullmatch(r"kdtree-run \d+\.\d+\.\d+\n", run("--version").stdout.decode())


@pytest.mark.parametrize("arguments, words", [
    (["nonsense"], ["command", "nonsense", "generate"]),
    (["--foo"], ["--foo", "unknown flag"]),
    (["generate", "--foo", "3"], ["--foo", "unknown flag", "generate --help"]),
    (["generate", "--temprature", "1"], ["--temprature", "unknown flag", "perhaps --temperature ("]),
    (["generate", "--max_tokens=3"], ["--max_tokens: ", "perhaps --max-tokens ("]),
    (["generate", "--temp", "1"], ["perhaps --temperature (", "generate --help"]),
    (["info", "--max-streams", "3"], ["--max-streams", "a flag of serve", "info --help"]),
    (["generate", "--prompt", "a", "--model", ""], ["--model", "empty", "at least one character"]),
    (["generate", "--prompt", "a", "--draft="], ["--draft", "empty"]),
    (["generate", "--prompt-file", ""], ["--prompt-file", "empty"]),
    (["serve", "--host", ""], ["--host", "empty"]),
    (["serve", "--served-model-name", b"a\xff"], ["--served-model-name", "UTF-8"]),
    (["generate", "hello"], ["hello", "--prompt"]),
    (["generate"], ["--prompt", "not given"]),
    (["generate", "--prompt", "a", "--chat", "b"], ["--chat", "--prompt", "one prompt"]),
    (["generate", "--prompt", "a", "--prompt-file", "b"], ["--prompt-file", "--prompt", "one prompt"]),
    (["generate", "--budget"], ["--budget", "no value", "integer"]),
    (["generate", "--prompt", "a", "--budget", "abc"], ["--budget", "abc", "integer"]),
    (["generate", "--prompt", "a", "--budget", "0"], ["--budget", "0", "1 to 1024"]),
    (["generate", "--prompt", "a", "--budget", "1025"], ["--budget", "1025", "1 to 1024"]),
    (["generate", "--prompt", "a", "--budget", "8.5"], ["--budget", "8.5", "integer"]),
    (["generate", "--prompt", "a", "--max-tokens", "0"], ["--max-tokens", "0", "from 1"]),
    (["generate", "--prompt", "a", "--max-tokens", "99999999999999999999"], ["--max-tokens", "integer"]),
    (["generate", "--prompt", "a", "--temperature", "nan"], ["--temperature", "nan", "number"]),
    (["generate", "--prompt", "a", "--temperature", "-1"], ["--temperature", "-1", "number"]),
    (["generate", "--prompt", "a", "--top-p", "0"], ["--top-p", "0", "above 0"]),
    (["generate", "--prompt", "a", "--min-p", "1.5"], ["--min-p", "1.5", "from 0 to 1"]),
    (["generate", "--prompt", "a", "--seed", "-9223372036854775809"], ["--seed", "-9223372036854775809", "-2^63"]),
    (["generate", "--prompt", "a", "--seed", "18446744073709551616"], ["--seed", "18446744073709551616", "2^64"]),
    (["generate", "--prompt", "a", "--speculate", "maybe"], ["--speculate", "maybe", "auto, off, chain, tree"]),
    (["generate", "--prompt", "a", "--thinking", "maybe"], ["--thinking", "maybe", "on, off"]),
    (["generate", "--prompt", "a", "--threads", "257"], ["--threads", "257", "1 to 256"]),
    (["bench", "--modes", "off,forest"], ["--modes", "forest"]),
    (["bench", "--modes", "off:3"], ["--modes", "off:3"]),
    (["bench", "--repeat", "0"], ["--repeat", "0"]),
])
def test_usage_errors_name_the_flag(arguments, words):
  assert_error(run(*arguments), 2, *words)


@pytest.mark.parametrize("arguments, words", [
    (["--prompt", ""], ["--prompt", "empty"]),
    (["--prompt="], ["--prompt", "empty"]),
    (["--chat", ""], ["--chat", "empty"]),
    (["--prompt-file", "/dev/null"], ["/dev/null", "empty"]),
    (["--prompt-file", "no/such/file"], ["no/such/file", "readable"]),
    (["--prompt-file", "/"], ["/", "readable"]),
    (["--prompt-file", "/bin/true"], ["/bin/true: other bytes", "UTF-8 text"]),
    (["--prompt", "a", "--max-tokens", "2147483647"], []),
    (["--prompt", "a", "--cpu-target", "NONSENSE"], ["NONSENSE"]),
    (["--prompt", "a", "--max-context", "2", "--max-tokens", "8"], []),
    (["--prompt", "a", "--model", "no/such/model", "--draft", "no/such/draft"], ["no/such/model"]),
])
def test_bad_input_is_named(arguments, words):
  assert_error(run("generate", *arguments), 1, *words)


@pytest.mark.parametrize("flag", ["--prompt", "--chat"])
def test_invalid_utf8_is_refused(flag):
  done = subprocess.run([RUN.encode(), b"generate", flag.encode(), b"ab\xffcd"], capture_output=True,
                        env=clean_environment(), timeout=300)
  assert_error(done, 1, "UTF-8")


# ------------------------------------------------------------------------------------------------ environment

def test_variables_mirror_flags():
  wanted = generate("--prompt", PROMPT, "--max-tokens", 5, "--seed", 7, "--temperature", 0.8, "--ignore-eos")
  got = run("generate", KDTREE_PROMPT=PROMPT, KDTREE_MAX_TOKENS="5", KDTREE_SEED="7", KDTREE_TEMPERATURE="0.8",
            KDTREE_IGNORE_EOS="1", KDTREE_JSON="on")
  assert json.loads(got.stdout)["token_ids"] == wanted["token_ids"]


def test_one_variable_has_one_form_in_every_command():
  tokens = ["--prompt", "x = 1\n", "--max-tokens", 40]
  stopped, whole = generate(*tokens, KDTREE_IGNORE_EOS="off"), generate(*tokens, KDTREE_IGNORE_EOS="on")
  assert stopped == stopped | {"token_ids": generate(*tokens, "--ignore-eos", "off")["token_ids"]}
  assert len(whole["token_ids"]) == 40
  for flags in ([], ["--ignore-eos"], ["--ignore-eos", "off"]):
    done = run("bench", "--json", "--modes", "off", *TINY_BENCH, *flags, KDTREE_IGNORE_EOS="on")
    assert json.loads(done.stdout)["ignore_eos"] is (flags[-1:] != ["off"])
  assert_error(run("generate", *tokens, "--ignore-eos", "maybe"), 2, "--ignore-eos", "maybe", "on or off")


def test_the_command_line_wins():
  assert len(generate("--prompt", PROMPT, "--max-tokens", 3, "--ignore-eos", KDTREE_MAX_TOKENS="5")["token_ids"]) == 3
  assert generate("--prompt", PROMPT, "--max-tokens", 2, KDTREE_CHAT="not this one")["prompt_tokens"] > 0


def test_an_unknown_variable_is_warned_of():
  done = run("info", "--json", KDTREE_MAX_TOKNES="3", KDTREE_ZZZ="", KDTREE_SERVICE_HOST="10.0.0.1",
             KDTREE_TEST_X="1", KDTREE_RUN="x", KDTREE_API_KEY="k")
  assert done.returncode == 0 and json.loads(done.stdout)
  assert sorted(done.stderr.decode().splitlines()) == [
      "warning: KDTREE_MAX_TOKNES: unknown variable: expected perhaps KDTREE_MAX_TOKENS",
      "warning: KDTREE_ZZZ: unknown variable: expected KDTREE_ and the name of a flag"]


def test_an_empty_variable_is_none():
  done = run("info", "--json", KDTREE_MODEL="", KDTREE_DRAFT="", KDTREE_THREADS="")
  assert done.returncode == 0 and done.stderr == b""


def test_a_negative_seed_is_its_twos_complement():
  settings = ["--prompt", PROMPT, "--max-tokens", 8, "--temperature", 1]
  negative, positive = (generate(*settings, "--seed", seed) for seed in (-1, 2**64 - 1))
  assert negative["seed"] == 2**64 - 1 and negative["token_ids"] == positive["token_ids"]


def test_a_bad_variable_is_named_and_touches_its_command_only():
  assert_error(run("generate", "--prompt", "a", KDTREE_BUDGET="abc"), 2, "KDTREE_BUDGET", "abc")
  assert_error(run("generate", "--prompt", "a", KDTREE_SPINE="maybe"), 2, "KDTREE_SPINE", "maybe")
  assert run("generate", "--help", KDTREE_BUDGET="abc").returncode == 0
  assert run("info", KDTREE_BUDGET="abc").returncode == 0


# ------------------------------------------------------------------------------------------------ generate

def test_json_has_the_fields_of_a_result():
  result = generate("--prompt", PROMPT, "--max-tokens", 12, "--ignore-eos", "--seed", 2**64 - 1)
  assert list(result) == ["schema_version", "text", "token_ids", "prompt_tokens", "rounds", "tokens_per_round",
                          "tokens_per_second", "accepted_by_depth", "finish_reason", "stop_reason", "seed",
                          "timings_ms", "first_token_ms", "queue_ms", "total_ms", "cached_tokens", "preemptions",
                          "drafted_rounds", "draft_nodes", "speculate", "budget"]
  assert result["schema_version"] == 1 and result["seed"] == 2**64 - 1
  assert len(result["token_ids"]) == 12 and result["finish_reason"] == "length"
  assert list(result["timings_ms"]) == STAGES and all(ms >= 0 for ms in result["timings_ms"].values())
  assert result["rounds"] >= 1 and result["tokens_per_round"] >= 1 and result["tokens_per_second"] > 0
  assert result["speculate"] == "auto" and result["budget"] is None
  assert result["cached_tokens"] == result["preemptions"] == 0 and result["stop_reason"] is None
  assert 0 <= result["queue_ms"] <= result["first_token_ms"] <= result["total_ms"]


def test_text_is_what_json_has_and_a_summary_follows():
  done = run("generate", "--prompt", PROMPT, "--max-tokens", 12)
  result = generate("--prompt", PROMPT, "--max-tokens", 12)
  assert done.returncode == 0 and done.stdout.decode() == result["text"]
  assert re.fullmatch(r"\d+ tokens, [\d.]+ tokens/s, [\d.]+ tokens/round, (stop|length)\n",
                      done.stderr.decode())
  sampled = run("generate", "--prompt", PROMPT, "--max-tokens", 1, "--temperature", "1", "--seed", 5)
  assert sampled.stderr.endswith(b", seed 5\n")


def test_the_summary_has_its_own_line_in_a_file_of_both(tmp_path):
  text = generate("--prompt", PROMPT, "--max-tokens", 5)["text"]
  with open(tmp_path / "both", "wb") as both:
    subprocess.run([RUN, "generate", "--prompt", PROMPT, "--max-tokens", "5"], stdout=both, stderr=both,
                   env=clean_environment(), timeout=300, check=True)
  written = (tmp_path / "both").read_text()
  assert not text.endswith("\n") and re.fullmatch(re.escape(text) + r"\n5 tokens, [^\n]+\n", written), written
  one = run("generate", "--prompt", PROMPT, "--max-tokens", 1)
  assert one.stderr.startswith(b"1 token, ")


def test_a_drawn_seed_is_reported_and_reproduces():
  settings = ["--prompt", PROMPT, "--max-tokens", 16, "--temperature", 1, "--ignore-eos"]
  first = generate(*settings)
  assert generate(*settings, "--seed", first["seed"])["token_ids"] == first["token_ids"]


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--top-k", "40", "--top-p", "0.95", "--seed", "3"]])
def test_every_speculation_gives_the_same_ids(sampling):
  ids = {}
  for mode in (["off"], ["chain"], ["chain", "--budget", 3], ["tree"], ["tree", "--budget", 5, "--spine"],
               ["tree", "--ranking", "noise"], ["auto"]):
    ids[str(mode)] = generate("--prompt", PROMPT, "--max-tokens", 48, *sampling, "--speculate", *mode)["token_ids"]
  assert len({tuple(each) for each in ids.values()}) == 1, ids


def test_prompt_file_and_standard_input(tmp_path):
  path = tmp_path / "prompt.txt"
  path.write_text(PROMPT)
  wanted = generate("--prompt", PROMPT, "--max-tokens", 4)["token_ids"]
  assert generate("--prompt-file", path, "--max-tokens", 4)["token_ids"] == wanted
  done = run("generate", "--json", "--prompt-file", "-", "--max-tokens", 4, stdin=PROMPT.encode())
  assert json.loads(done.stdout)["token_ids"] == wanted


def test_special_tokens_in_a_chat_are_text():
  plain = generate("--chat", "say [EOS]", "--max-tokens", 2)["prompt_tokens"]
  assert plain > generate("--chat", "say x", "--max-tokens", 2)["prompt_tokens"]
  assert generate("--chat", 'quotes " and \\ and \n and \t', "--max-tokens", 2)["prompt_tokens"] > 0


def test_model_without_a_draft_says_that_speculation_is_off():
  alone = ["generate", "--json", "--prompt", PROMPT, "--max-tokens", "4", "--model", MODELS / "tiny-k2"]
  done = run(*alone)
  assert done.returncode == 0 and done.stderr == b"note: --model without --draft: speculation is off\n"
  assert json.loads(done.stdout)["speculate"] == "off"
  assert run(*alone, "--speculate", "off").stderr == b""
  assert_error(run(*alone, "--speculate", "tree"), 2, "--speculate", "tree", "--draft")
  both = run(*alone, "--draft", MODELS / "tiny-k2-dflash")
  assert both.stderr == b"" and json.loads(both.stdout)["speculate"] == "auto"


def test_text_arrives_before_the_end():
  with start("generate", "--prompt", PROMPT, "--max-tokens", 1500, "--ignore-eos") as process:
    assert process.stdout.read(1)
    assert process.poll() is None
    first = time.monotonic()
    process.stdout.read()
    assert process.wait(timeout=300) == 0
    assert time.monotonic() - first > 0.05


def test_a_reader_that_leaves_ends_the_run_quietly():
  with start("generate", "--prompt", PROMPT, "--max-tokens", 3000, "--ignore-eos") as process:
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    assert process.stderr.read() == b""


def test_a_full_disk_is_an_error():
  for command in (["generate", "--prompt", PROMPT, "--max-tokens", "4"], ["--help"], ["info", "--help"], ["--version"]):
    with open("/dev/full", "wb") as full:
      done = subprocess.run([RUN, *command], stdout=full, stderr=subprocess.PIPE, env=clean_environment(), timeout=300)
    assert done.returncode == 1 and ERROR.fullmatch(done.stderr.decode()), command


def test_a_closed_standard_output_is_an_error():
  for command in (["generate", "--prompt", PROMPT, "--max-tokens", "4"], ["generate", "--prompt", PROMPT, "--json"],
                  ["info", "--json"], ["plan", "--help"], ["--version"]):
    done = subprocess.run(["sh", "-c", 'exec "$0" "$@" >&-', RUN, *command], stderr=subprocess.PIPE,
                          env=clean_environment(), timeout=300)
    assert done.returncode == 1 and "error: standard output: " in done.stderr.decode(), command


def test_interrupt_prints_what_there_is():
  with start("generate", "--prompt", PROMPT, "--max-tokens", 3500, "--ignore-eos") as process:
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.stdout.read()
    assert process.wait(timeout=60) == 130
    assert b"cancelled" in process.stderr.read()


def test_interrupt_with_json_is_one_object():
  # Without text on stdout there is nothing to wait for: growing delays, until one falls into the decoding.
  for delay in (0.3, 0.5, 0.8, 1.2, 2, 4):
    with start("generate", "--json", "--prompt", PROMPT, "--max-tokens", 3500, "--ignore-eos") as process:
      time.sleep(delay)
      process.send_signal(signal.SIGINT)
      out = process.stdout.read()
      code = process.wait(timeout=60)
    if out:
      break
    assert code == 130
  result = json.loads(out)
  assert (result["finish_reason"], code) in [("cancelled", 130), ("length", 0)]


# ------------------------------------------------------------------------------------------------ info and bench

def test_info():
  done = run("info", "--json")
  assert done.returncode == 0 and done.stderr == b""
  info = json.loads(done.stdout)
  assert os.path.isfile(os.path.join(info["model_path"], "config.json"))
  table = run("info").stdout.decode()
  for key, value in info.items():
    if isinstance(value, (str, int)) and value != "":
      assert re.search(rf"^{re.escape(key)} +{re.escape(str(value))}", table, re.M | re.I), key
  assert not re.search(r"\.\d{6}", table) and " values]" not in table
  measured = re.findall(r"^ *(\d+)  +[\d.]+\b", table[table.index("rows verified"):], re.M)
  assert [int(rows) for rows in measured] == [cost["rows"] for cost in info["round_costs"]]
  assert re.search(r"^bytes\.cache_reserved +\d+ \([\d.]+ \wiB, for the KV pages", table, re.M)


def test_bench_json():
  done = run("bench", "--json", "--modes", "off,chain:3,tree:4,auto", *TINY_BENCH)
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout)
  assert report["seconds"] > 0
  assert report["identical"] is True and report["prompts"] == 2 and report["ignore_eos"] is True
  assert [(row["kind"], row["mode"]) for row in report["rows"]] == [
      (kind, mode) for kind in ("code", "chat", "all") for mode in ("off", "chain:3", "tree:4", "auto")]
  for row in report["rows"]:
    speed = row["tokens_per_second"]
    assert len(speed["values"]) == 2 and speed["best"] == max(speed["values"]) >= speed["median"] > 0
    assert list(row["us_per_round"]) == STAGES[1:]
    assert row["rounds"] > 0 and row["tokens_per_round"] >= 1
    if row["mode"] == "off":
      assert row["ratio_to_off"] == 1 and row["drafted_rounds"] == 0
  assert report["prefill"]["tokens"] == 32 and report["prefill"]["first_token_ms"]["best"] > 0


def test_bench_table():
  done = run("bench", "--modes", "off,tree", *TINY_BENCH)
  assert done.returncode == 0 and done.stderr == b""
  table = done.stdout.decode()
  assert "identical: yes\n" in table and re.search(r"^the run took [\d.]+ s$", table, re.M)
  assert "depth 1" in table and "prefill of 32 tokens" in table
  assert len(re.findall(r"^(?:code|chat|all) +(?:off|tree) +\d", table, re.M)) >= 6


@pytest.mark.parametrize("command", ["bench", "bench-streams"])
def test_a_prefill_that_does_not_fit_is_refused_at_start(command):
  done = run(command, "--modes", "off", "--max-context", 512, "--prefill", 512)
  assert done.returncode == 2 and b"error: --prefill: 512: expected" in done.stderr


def test_bench_prompts_of_a_file(tmp_path):
  path = tmp_path / "prompts.json"
  path.write_text(json.dumps([{"kind": "mine", "name": "one", "text": PROMPT},
                              {"kind": "mine", "name": "two", "messages": [{"role": "user", "content": "Hi"}]}]))
  done = run("bench", "--json", "--prompts", path, "--modes", "off", "--max-tokens", 4, "--repeat", 1, "--prefill", 0)
  report = json.loads(done.stdout)
  assert [row["kind"] for row in report["rows"]] == ["mine"] and report["prefill"] is None


@pytest.mark.parametrize("text, words", [
    ("{", ["array"]), ("[]", ["at least one prompt"]), ("[3]", ["prompt 0"]),
    ('[{"kind": "a", "name": "b"}]', ["prompt 0", "text"]),
    ('[{"kind": "a", "name": "b", "text": ""}]', ["prompt 0"]),
    ('[{"kind": "a", "name": 4, "text": "x"}]', ["prompt 0", "name"]),
])
def test_bench_refuses_bad_prompt_files(tmp_path, text, words):
  path = tmp_path / "prompts.json"
  path.write_text(text)
  assert_error(run("bench", "--prompts", path), 1, path.name, *words)


def test_bench_refuses_unknown_kinds():
  assert_error(kdtree_run("bench", "--kinds", "poetry"), 1, "--kinds", "poetry")
