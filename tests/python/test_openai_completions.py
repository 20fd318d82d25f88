"""Completions with the `openai` client: prompts of every form, echo, stop, bias, penalties, log-probabilities."""

from __future__ import annotations

import pytest

from openai_support import CODE, MODES, complete, client_of
from serve_support import Daemon


@pytest.fixture(scope="module")
def daemon():
  with Daemon() as running:
    yield running


@pytest.fixture(scope="module")
def client(daemon):
  with client_of(daemon) as opened:
    yield opened


def text_of(answer):
  return answer.choices[0].text


def streamed(client, **settings):
  pieces, finish = [], None
  for chunk in complete(client, stream=True, **settings):
    for choice in chunk.choices:
      pieces.append(choice.text)
      finish = choice.finish_reason
  return "".join(pieces), finish


def ids_of(daemon, text):
  return daemon.post("/tokenize", {"prompt": text})[1]["tokens"]


def test_defaults(client):
  answer = client.completions.create(model="tiny-k2", prompt=CODE)
  assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
  assert answer.usage.completion_tokens <= 16 and answer.choices[0].logprobs is None


def test_text_and_ids_and_lists_of_them(daemon, client):
  ids = ids_of(daemon, CODE)
  expected = text_of(complete(client))
  assert text_of(complete(client, ids)) == expected
  for prompts in ([CODE, "x = "], [ids, ids_of(daemon, "x = ")]):
    answer = complete(client, prompts, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text == expected != answer.choices[2].text
    assert answer.usage.prompt_tokens == len(ids) + len(ids_of(daemon, "x = "))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["speculate"])
def test_a_stop_string_ends_the_text_wherever_it_lies_in_a_block(client, mode):
  whole = text_of(complete(client, max_tokens=40))
  for start in range(0, len(whole) - 4, 3):
    stop = whole[start:start + 4]
    expected = whole[:whole.index(stop)]
    settings = {"max_tokens": 40, "stop": [stop, "never \0".replace("\0", "")], "logprobs": 0, "extra": mode}
    answer = complete(client, **settings)
    assert text_of(answer) == expected
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].model_extra["stop_reason"] == stop
    # Neither tokens nor log-probabilities go past the stop.
    tokens = answer.choices[0].logprobs.tokens
    assert len(tokens) == answer.usage.completion_tokens
    assert len("".join(tokens[:-1])) <= len(expected) <= len("".join(tokens))
    assert streamed(client, **settings) == (expected, "stop")


def test_stop_ids_and_min_tokens(client):
  ids = complete(client, extra={"return_token_ids": True}).choices[0].model_extra["token_ids"]
  answer = complete(client, extra={"stop_token_ids": [ids[5]], "return_token_ids": True}).choices[0]
  assert answer.model_extra["token_ids"] == ids[:ids.index(ids[5])]
  assert answer.finish_reason == "stop" and answer.model_extra["stop_reason"] == ids[5]
  later = complete(client, extra={"stop_token_ids": [ids[5]], "min_tokens": 12, "return_token_ids": True})
  assert later.usage.completion_tokens >= 12


@pytest.mark.parametrize("mode", MODES[:3], ids=lambda mode: mode["speculate"])
def test_echo_with_log_probabilities(client, mode):
  answer = complete(client, echo=True, logprobs=3, max_tokens=10, extra=mode)
  logprobs = answer.choices[0].logprobs
  assert text_of(answer).startswith(CODE) and "".join(logprobs.tokens) == text_of(answer)
  assert len(logprobs.tokens) == answer.usage.total_tokens
  assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:])
  for token, offset in zip(logprobs.tokens, logprobs.text_offset):
    assert text_of(answer)[offset:].startswith(token)
  for token, value, top in list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs))[1:]:
    assert top[token] == value and len(top) in (3, 4)
  # The prompt's own: what the continuation had, scored as a prompt.
  again = complete(client, text_of(answer), echo=True, logprobs=3, max_tokens=0)
  assert again.choices[0].logprobs.token_logprobs == logprobs.token_logprobs
  assert again.choices[0].logprobs.top_logprobs == logprobs.top_logprobs


def test_echo_without_a_token_to_generate(client):
  for settings in ({}, {"logprobs": 0}):
    answer = complete(client, echo=True, max_tokens=0, **settings)
    assert text_of(answer) == CODE and answer.usage.completion_tokens == 0
    assert streamed(client, echo=True, max_tokens=0, **settings)[0] == CODE


def test_echo_streams_as_it_is_whole(client):
  for settings in ({"echo": True}, {"echo": True, "logprobs": 2}):
    assert streamed(client, **settings)[0] == text_of(complete(client, **settings))


def test_prompt_logprobs(client):
  answer = complete(client, max_tokens=0, extra={"prompt_logprobs": 2})
  items = answer.choices[0].model_extra["prompt_logprobs"]
  assert items[0] is None and len(items) == answer.usage.prompt_tokens
  echoed = complete(client, echo=True, logprobs=2, max_tokens=0).choices[0].logprobs
  for item, value in list(zip(items, echoed.token_logprobs))[1:]:
    assert value in [each["logprob"] for each in item.values()]
    assert 1 in [each["rank"] for each in item.values()]


def test_bias_and_penalties(daemon, client):
  answer = complete(client, max_tokens=8, logit_bias={"65": 100}, extra={"return_token_ids": True})
  assert answer.choices[0].model_extra["token_ids"] == [65] * 8
  plain = complete(client, max_tokens=60, extra={"ignore_eos": True, "return_token_ids": True})
  for penalty in ({"presence_penalty": 2, "frequency_penalty": 2}, {"extra": {"repetition_penalty": 1.8}}):
    settings = {"max_tokens": 60} | penalty
    settings["extra"] = {"ignore_eos": True, "return_token_ids": True} | settings.get("extra", {})
    ids = complete(client, **settings).choices[0].model_extra["token_ids"]
    assert len(set(ids)) > len(set(plain.choices[0].model_extra["token_ids"]))
    for mode in MODES[:3]:
      same = complete(client, **(settings | {"extra": settings["extra"] | mode}))
      assert same.choices[0].model_extra["token_ids"] == ids


def test_ignore_eos_runs_to_the_limit(client):
  answer = complete(client, max_tokens=200, extra={"ignore_eos": True})
  assert answer.usage.completion_tokens == 200 and answer.choices[0].finish_reason == "length"


def test_special_tokens_have_no_text_unless_asked_for(daemon, client):
  bias, ends = special_tokens(daemon)
  for stream in (False, True):
    def text(skip, stream=stream):
      settings = {"max_tokens": 6, "logit_bias": bias, "extra": {"ignore_eos": True} | skip}
      return streamed(client, **settings)[0] if stream else text_of(complete(client, **settings))
    assert text({}) == text({"skip_special_tokens": True}) == ""
    assert text({"skip_special_tokens": False}) == ends * 6


def special_tokens(daemon):
  """A bias that makes every token the one that ends a message, and that one's name."""
  body = {"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {"thinking": False}}
  ids = daemon.post("/tokenize", body)[1]["tokens"]
  names = {each: daemon.post("/detokenize", {"tokens": [each]})[1]["prompt"] for each in ids}
  end = next(each for each, name in names.items() if name == "<|im_end|>")
  return {str(end): 100}, names[end]


def test_sampling_settings_narrow_the_choice(client):
  greedy, sampled = text_of(complete(client)), text_of(complete(client, temperature=1.7, seed=1))
  for narrow in ({"top_p": 0}, {"extra": {"top_k": 1}}, {"extra": {"min_p": 1}}):
    assert text_of(complete(client, temperature=1.7, seed=1, **narrow)) == greedy
  for off in ({"extra": {"top_k": -1}}, {"extra": {"top_k": 0, "min_p": 0}}, {"top_p": 1}):
    assert text_of(complete(client, temperature=1.7, seed=1, **off)) == sampled


def test_a_cached_prompt_gives_the_same(daemon, client):
  prompt = CODE * 60
  cold = complete(client, prompt, temperature=0.8, seed=4, logprobs=2)
  warm = complete(client, prompt, temperature=0.8, seed=4, logprobs=2)
  assert warm.usage.prompt_tokens_details.cached_tokens > 0
  assert warm.choices[0].text == cold.choices[0].text and warm.choices[0].logprobs == cold.choices[0].logprobs
