"""pyclient.Session on the bundled model: lifecycle, streams, threads, cancellation, errors by type and message."""

import concurrent.futures
import dataclasses
import gc
import json
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import pyclient
from conftest import clean_environment, golden
from pyclient import ContextLength, InvalidArgument, KdtreeError, ReadFailed, Session, SessionClosed, Stream, Token

PROMPT = "def add(a, b):\n"
STAGES = ["prefill", "draft", "build", "verify", "sample", "accept", "commit", "emit"]
FIELDS = ["schema_version", "text", "token_ids", "prompt_tokens", "rounds", "tokens_per_round", "tokens_per_second",
          "first_token_ms", "accepted_by_depth", "finish_reason", "seed", "timings_ms"]


def vocabulary(session):
  return session.score([0]).shape[1]


# ------------------------------------------------------------------------------------------------ results and streams

def test_result_has_the_fields_of_the_json(session):
  result = session.generate(PROMPT, max_tokens=24, ignore_eos=True)
  as_json = json.loads(result.to_json())
  assert sorted(as_json) == sorted(FIELDS)
  assert as_json == dataclasses.asdict(result)
  assert result.schema_version == 1
  assert result.finish_reason == "length"
  assert len(result.token_ids) == 24
  assert result.prompt_tokens == len(session.tokenize(PROMPT))
  assert 1 <= result.rounds <= 23 and result.tokens_per_round >= 1
  assert 0 < result.first_token_ms
  assert list(result.timings_ms) == STAGES and all(ms >= 0 for ms in result.timings_ms.values())
  assert all(a >= b for a, b in zip(result.accepted_by_depth, result.accepted_by_depth[1:]))
  assert 0 <= result.seed < 2**64
  with pytest.raises(dataclasses.FrozenInstanceError):
    result.text = ""


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 7}, {"speculate": "off", "ignore_eos": True}])
def test_streaming_equals_blocking(session, options):
  whole = session.generate(PROMPT, max_tokens=40, **options)
  with session.stream(PROMPT, max_tokens=40, **options) as stream:
    tokens = list(stream)
    assert list(stream) == []
  again = session.generate(PROMPT, max_tokens=40, stream=True, **options)
  assert isinstance(again, Stream)
  for got, result in ((tokens, stream.result), (list(again), again.result)):
    assert all(isinstance(token, Token) for token in got)
    assert [token.id for token in got if token.id is not None] == whole.token_ids == result.token_ids
    assert "".join(token.text for token in got) == whole.text == result.text
    assert result.finish_reason == whole.finish_reason
  assert session.detokenize(whole.token_ids) == whole.text


def test_text_and_its_token_ids_are_the_same_prompt(session):
  assert session.generate(session.tokenize(PROMPT), max_tokens=16).token_ids == \
    session.generate(PROMPT, max_tokens=16).token_ids
  assert session.generate(np.asarray(session.tokenize(PROMPT)), max_tokens=16).text == \
    session.generate(PROMPT, max_tokens=16).text


def test_chat_is_one_user_turn(session):
  ids = session.chat_tokens([{"role": "user", "content": "What is a list?"}], thinking=True)
  assert session.generate("What is a list?", chat=True, thinking=True, max_tokens=8, ignore_eos=True).token_ids == \
    session.generate(ids, max_tokens=8, ignore_eos=True).token_ids


def test_seed_is_returned_and_repeats_the_text(session):
  drawn = session.generate(PROMPT, max_tokens=32, temperature=1.0, ignore_eos=True)
  again = session.generate(PROMPT, max_tokens=32, temperature=1.0, ignore_eos=True, seed=drawn.seed)
  assert again.seed == drawn.seed and again.token_ids == drawn.token_ids
  assert session.generate(PROMPT, max_tokens=2, seed=2**64 - 1).seed == 2**64 - 1
  seeds = {session.generate(PROMPT, max_tokens=1).seed for _ in range(4)}
  assert len(seeds) == 4


def test_ignore_eos_goes_on_past_the_stop_token(session):
  chat = [case for case in golden("eval_prompts.json") if case["kind"] == "chat"][0]["ids"]
  stopped = session.generate(chat, max_tokens=400)
  went_on = session.generate(chat, max_tokens=400, ignore_eos=True)
  assert stopped.finish_reason == "stop" and went_on.finish_reason == "length"
  assert len(went_on.token_ids) == 400
  assert went_on.token_ids[:len(stopped.token_ids)] == stopped.token_ids
  stop = went_on.token_ids[len(stopped.token_ids)]
  assert session.detokenize([stop]) in ("[EOS]", "<|im_end|>")
  assert "<|im_end|>" not in stopped.text and stop not in stopped.token_ids


def test_result_of_a_running_stream_is_an_error(session):
  with session.stream(PROMPT, max_tokens=8) as stream:
    with pytest.raises(RuntimeError, match="still runs"):
      stream.result


# ---------------------------------------------------------------------------------------- tokens, logits, figures

@pytest.mark.parametrize("text", ["", " ", "hello", "naïve café 😀 中文\r\n\tx", "a\0b", "<|im_end|>",
                                  "x" * 5000], ids=range(7))
def test_detokenize_gives_the_text_back(session, text):
  assert session.detokenize(session.tokenize(text)) == text


def test_detokenize_replaces_what_is_no_character(session):
  ids = session.tokenize("😀")
  assert len(ids) > 1
  assert "\ufffd" in session.detokenize(ids[:-1])


def test_special_tokens_are_text_in_text_and_names_in_detokenize(session):
  ids = session.chat_tokens([{"role": "user", "content": "<|im_end|>"}], thinking=False)
  ends = [i for i in ids if session.detokenize([i]) == "<|im_end|>"]
  assert len(ends) == 1
  assert ends[0] not in session.tokenize("<|im_end|>")


def test_score_is_float32_by_position_and_greedy_agrees(session):
  ids = session.tokenize(PROMPT)
  logits = session.score(ids)
  assert logits.dtype == np.float32 and logits.ndim == 2 and len(logits) == len(ids)
  assert np.isfinite(logits).all()
  assert session.generate(ids, max_tokens=1, ignore_eos=True).token_ids == [int(logits[-1].argmax())]
  assert np.array_equal(session.score(ids[:3]), logits[:3])


def test_info_and_stats(session):
  info = session.info()
  assert info["model_path"] and info["backend"] == "cpu" and info["threads"] >= 1
  before = session.stats()
  session.generate(PROMPT, max_tokens=8, ignore_eos=True)
  after = session.stats()
  assert list(before) == list(after) and all(isinstance(value, float) for value in after.values())
  totals = [name for name in after if name.endswith("_total")]
  assert totals and all(after[name] >= before[name] for name in totals)
  assert any(after[name] > before[name] for name in totals)


def test_figures_as_prometheus_metrics(session):
  client = pytest.importorskip("prometheus_client")
  from pyclient.metrics import SessionCollector
  registry = client.CollectorRegistry()
  registry.register(SessionCollector(session, model_name="tiny"))
  page = client.generate_latest(registry).decode()
  for name in session.stats():
    assert f'kdtree:{name}{{model_name="tiny"}}' in page


# ------------------------------------------------------------------------------------------------ errors

@pytest.mark.parametrize("options, kind, words", [
  ({"max_tokens": 0}, InvalidArgument, "max_tokens"),
  ({"max_tokens": -1}, InvalidArgument, "max_tokens"),
  ({"max_tokens": 2**31 - 1}, ContextLength, "max_tokens"),
  ({"max_tokens": 10**30}, InvalidArgument, "max_tokens"),
  ({"temperature": -0.5}, InvalidArgument, "temperature"),
  ({"temperature": float("nan")}, InvalidArgument, "temperature"),
  ({"temperature": float("inf")}, InvalidArgument, "temperature"),
  ({"top_p": 0.0}, InvalidArgument, "top_p"),
  ({"top_p": float("nan")}, InvalidArgument, "top_p"),
  ({"top_k": -1}, InvalidArgument, "top_k"),
  ({"min_p": 1.5}, InvalidArgument, "min_p"),
  ({"seed": -1}, InvalidArgument, "seed"),
  ({"seed": 2**64}, InvalidArgument, "seed"),
  ({"budget": 0}, InvalidArgument, "budget"),
  ({"budget": -1}, InvalidArgument, "budget"),
  ({"budget": 2**31 - 1, "speculate": "tree"}, InvalidArgument, "budget"),
  ({"speculate": "fast"}, InvalidArgument, "speculate"),
  ({"ranking": "best"}, InvalidArgument, "ranking"),
  ({"thinking": True}, InvalidArgument, "thinking"),
])
def test_a_bad_setting_is_named(session, options, kind, words):
  with pytest.raises(kind, match=words) as caught:
    session.generate(PROMPT, **options)
  assert isinstance(caught.value, KdtreeError) and isinstance(caught.value, ValueError)
  assert "expected" in str(caught.value)


@pytest.mark.parametrize("prompt", [[], "", [-1], [10**6], [2**40], [0, -(2**31)], "\ud800"])
def test_a_bad_prompt_is_named(session, prompt):
  with pytest.raises(InvalidArgument, match="expected"):
    session.generate(prompt)


@pytest.mark.parametrize("prompt", [[1.5], ["a"], b"bytes", None])
def test_a_prompt_of_the_wrong_type_is_a_type_error(session, prompt):
  with pytest.raises(TypeError):
    session.generate(prompt)


def test_ids_outside_the_vocabulary(session):
  size = vocabulary(session)
  for wrong in (size, -1, 2**31 - 1, -(2**31), 2**63):
    for call in (session.detokenize, session.score, lambda ids: session.generate(ids, max_tokens=1)):
      with pytest.raises(InvalidArgument, match=str(wrong)):
        call([0, wrong])


def test_what_does_not_fit_the_context(session):
  limit = 4096
  ids = session.tokenize("x = 1\n") * limit
  with pytest.raises(ContextLength, match="expected"):
    session.generate(ids[:limit + 1], max_tokens=1)
  with pytest.raises(ContextLength, match="expected"):
    session.generate(ids[:100], max_tokens=limit - 99)
  with pytest.raises((ContextLength, InvalidArgument), match="expected"):
    session.score(ids[:limit + 1])
  with pytest.raises(InvalidArgument):
    session.score([])
  assert session.generate(ids[:limit - 1], max_tokens=1, ignore_eos=True).finish_reason == "length"


@pytest.mark.parametrize("messages", [
  {"role": "user"}, "text", [1], [{"content": "x"}], [{"role": "user", "content": 5}],
  [{"role": "user", "content": "\ud800"}], [{"role": "user", "content": object()}]])
def test_bad_messages_are_named(session, messages):
  with pytest.raises(InvalidArgument, match="expected"):
    session.chat_tokens(messages)


def test_bad_session_settings_are_named(tmp_path):
  with pytest.raises(ReadFailed, match="expected") as caught:
    Session(model=tmp_path / "absent")
  assert isinstance(caught.value, OSError) and "absent" in str(caught.value)
  for settings in ({"threads": -1}, {"threads": 10**12}, {"max_budget": 4096}, {"prefill_chunk": 5000},
                   {"max_context": -1}, {"chat_format": "xml"}, {"cpu_target": "Z80"}, {"model": "a\0b"}):
    with pytest.raises(InvalidArgument, match=next(iter(settings))):
      Session(**settings)


# ------------------------------------------------------------------------------------------------ lifecycle

def test_use_after_close_and_closing_twice():
  with Session(threads=1) as opened:
    stream = opened.stream(PROMPT, max_tokens=4)
    list(stream)
  opened.close()
  for call in (lambda: opened.generate(PROMPT), lambda: opened.tokenize("x"), lambda: opened.detokenize([1]),
               lambda: opened.score([1]), lambda: opened.chat_tokens([]), opened.info, opened.stats):
    with pytest.raises(SessionClosed, match="closed"):
      call()
  assert stream.result.finish_reason in ("length", "stop")


def test_closing_ends_what_other_threads_wait_for():
  opened = Session(threads=1)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    running = opened.stream(PROMPT, max_tokens=3000, speculate="off", ignore_eos=True)
    next(running)
    waiting = pool.submit(lambda: list(running))
    opened.close()
    waiting.result(timeout=60)
  assert running.result.finish_reason == "cancelled"


def test_dropping_streams_and_sessions_frees_them():
  opened = Session(threads=1)
  engine = weakref.ref(opened._engine)
  stream = opened.stream(PROMPT, max_tokens=3000, speculate="off", ignore_eos=True)
  next(stream)
  del stream
  assert opened.generate(PROMPT, max_tokens=2, ignore_eos=True).finish_reason == "length"
  del opened
  gc.collect()
  assert engine() is None


def test_a_program_that_closes_nothing_ends_well():
  program = ("from pyclient import Session\n"
             "session = Session(threads=1)\n"
             f"stream = session.stream({PROMPT!r}, max_tokens=3000, speculate='off', ignore_eos=True)\n"
             "print(next(stream).id >= 0)\n")
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=clean_environment(),
                        timeout=120)
  assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_importing_the_package_loads_no_library():
  program = ("import sys, pyclient, pyclient._launch\n"
             "assert 'cffi' not in sys.modules and 'numpy' not in sys.modules\n"
             "assert set(pyclient.__all__) <= set(dir(pyclient))\n"
             "assert all(hasattr(pyclient, name) for name in pyclient.__all__)\n")
  subprocess.run([sys.executable, "-c", program], check=True, env=clean_environment(), timeout=120)
  with pytest.raises(AttributeError):
    pyclient.nothing


# --------------------------------------------------------------------------------------- threads and cancellation

def test_threads_share_a_session(session):
  jobs = [(f"def f{i}(x):\n", {"max_tokens": 24, "temperature": 0.9 * (i % 2), "seed": i, "ignore_eos": True})
          for i in range(12)]
  alone = [session.generate(prompt, **options).token_ids for prompt, options in jobs]
  with concurrent.futures.ThreadPoolExecutor(6) as pool:
    together = list(pool.map(lambda job: session.generate(job[0], **job[1]).token_ids, jobs))
    texts = list(pool.map(lambda job: session.detokenize(session.tokenize(job[0])), jobs))
  assert together == alone
  assert texts == [prompt for prompt, _ in jobs]


def test_cancel_ends_a_stream_early(session):
  stream = session.stream(PROMPT, max_tokens=3000, ignore_eos=True)
  got = [next(stream)]
  stream.cancel()
  got += stream
  assert stream.result.finish_reason == "cancelled"
  assert 1 <= len(stream.result.token_ids) < 3000
  assert "".join(token.text for token in got) == stream.result.text
  stream.cancel()


def test_leaving_the_with_block_cancels(session):
  with session.stream(PROMPT, max_tokens=3000, ignore_eos=True) as stream:
    next(stream)
  assert stream.result.finish_reason == "cancelled"
  assert list(stream) == []
  assert session.generate(PROMPT, max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_cancel_from_another_thread(session):
  stream = session.stream(PROMPT, max_tokens=3000, speculate="off", ignore_eos=True)
  threading.Timer(0.1, stream.cancel).start()
  list(stream)
  assert stream.result.finish_reason == "cancelled"


@pytest.mark.parametrize("streaming", [False, True])
def test_ctrl_c_cancels(streaming):
  work = "for token in session.stream(**options): pass" if streaming else "session.generate(**options)"
  program = ("from pyclient import Session\n"
             "session = Session(threads=1)\n"
             f"options = dict(prompt={PROMPT!r}, max_tokens=3500, speculate='off', ignore_eos=True)\n"
             "print('started', flush=True)\n"
             "try:\n"
             f"  {work}\n"
             "  print('ran to its end')\n"
             "except KeyboardInterrupt:\n"
             "  print(session.generate('x', max_tokens=2, ignore_eos=True).finish_reason)\n"
             "  raise\n")
  with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                        env=clean_environment(), restore_signals=True) as process:
    assert process.stdout.readline() == "started\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    out, err = process.communicate(timeout=120)
    assert time.monotonic() - sent < 5
  assert process.returncode in (130, -signal.SIGINT), err
  assert out == "length\n" and "KeyboardInterrupt" in err


def test_other_threads_run_while_the_engine_works(session):
  """One call of the library that lasts: were the GIL held, the ticker could not tick inside it."""
  ids = (session.tokenize("x = 1\n") * 2000)[:2000]
  ticks, stop = [], threading.Event()

  def tick():
    while not stop.wait(0.001):
      ticks.append(time.monotonic())

  ticker = threading.Thread(target=tick)
  ticker.start()
  try:
    start = time.monotonic()
    session.score(ids)
    end = time.monotonic()
  finally:
    stop.set()
    ticker.join()
  middle = [t for t in ticks if start + 0.1 * (end - start) < t < end - 0.1 * (end - start)]
  assert len(middle) >= min(10, (end - start) / 0.02)


@pytest.mark.parametrize("context", [4, 17, 63, 64, 65])
def test_every_mode_works_in_a_context_too_short_to_measure_costs_in(context):
  with Session(max_context=context, threads=1) as short:
    ids = [short.generate([5], max_tokens=context - 2, ignore_eos=True, temperature=1.0, seed=3, speculate=mode).token_ids
           for mode in ("off", "chain", "tree", "auto")]
  assert ids[0] == ids[1] == ids[2] == ids[3]
