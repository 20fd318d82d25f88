"""pyclient.Session on the bundled model: results and streams, tokens, logits, figures."""

import contextlib
import dataclasses
import json
import re

import numpy as np
import pytest

from conftest import golden
from pyclient import GenerateOptions, SamplingOptions, Session, Stream, Token

PROMPT = "def add(a, b):\n"
STAGES = ["prefill", "draft", "build", "verify", "sample", "accept", "commit", "emit"]
FIELDS = ["schema_version", "text", "token_ids", "prompt_tokens", "rounds", "tokens_per_round", "tokens_per_second",
          "first_token_ms", "accepted_by_depth", "finish_reason", "stop_reason", "seed", "timings_ms", "cached_tokens",
          "drafted_rounds", "draft_nodes", "preemptions", "queue_ms", "total_ms", "logprobs", "top_logprobs",
          "prompt_logprobs", "prompt_top_logprobs"]


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
  chats = [case["ids"] for case in golden("eval_prompts.json") if case["kind"] == "chat"]
  results = ((chat, session.generate(chat, max_tokens=400)) for chat in chats)
  chat, stopped = next((chat, result) for chat, result in results if result.finish_reason == "stop")
  went_on = session.generate(chat, max_tokens=400, ignore_eos=True)
  assert went_on.finish_reason == "length"
  assert len(went_on.token_ids) == 400
  assert went_on.token_ids[:len(stopped.token_ids)] == stopped.token_ids
  stop = went_on.token_ids[len(stopped.token_ids)]
  assert session.detokenize([stop]) in ("[EOS]", "<|im_end|>")
  assert "<|im_end|>" not in stopped.text and stop not in stopped.token_ids


def test_special_tokens_have_no_text_when_they_are_skipped(session):
  end = next(i for i in session.chat_tokens([{"role": "user", "content": ""}]) if session.detokenize([i]) == "<|im_end|>")
  settings = {"max_tokens": 3, "ignore_eos": True, "logit_bias": {end: 100}}
  assert session.generate(PROMPT, **settings).text == "<|im_end|>" * 3
  skipped = session.generate(PROMPT, skip_special_tokens=True, **settings)
  assert skipped.text == "" and skipped.token_ids == [end] * 3


def test_result_of_a_running_stream_is_an_error(session):
  with session.stream(PROMPT, max_tokens=8) as stream:
    with pytest.raises(RuntimeError, match="still runs"):
      stream.result


def test_closing_a_stream_ends_it(session):
  with contextlib.closing(session.stream(PROMPT, max_tokens=500, ignore_eos=True)) as stream:
    next(stream)
  assert stream.result.finish_reason == "cancelled" and list(stream) == []
  stream.close()


def test_help_describes_every_setting():
  for options in (SamplingOptions, GenerateOptions):
    described = re.findall(r"^    (\w+) {2,}\S", options.__doc__, re.MULTILINE)
    assert sorted(described) == sorted(options.__optional_keys__)


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
  assert info["model_path"] and info["backend"] in ("cpu", "cuda") and info["threads"] >= 1
  before = session.stats()
  session.generate(PROMPT, max_tokens=8, ignore_eos=True)
  after = session.stats()
  assert list(before) == list(after) and all(isinstance(value, float) for value in after.values())
  totals = [name for name in after if name.endswith("_total")]
  assert totals and all(after[name] >= before[name] for name in totals)
  assert any(after[name] > before[name] for name in totals)


@pytest.mark.parametrize("context", [4, 17, 63, 64, 65])
def test_every_mode_works_in_a_context_too_short_to_measure_costs_in(context):
  with Session(max_context=context, threads=1) as short:
    options = {"max_tokens": context - 2, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    ids = [short.generate([5], speculate=mode, **options).token_ids for mode in ("off", "chain", "tree", "auto")]
  assert ids[0] == ids[1] == ids[2] == ids[3]
