"""pyclient.Session's settings of a generation: stops, penalties, log-probabilities, choices, priority, timeout."""

import numpy as np
import pytest

from pyclient import InvalidArgument, Session

PROMPT = "def add(a, b):\n"
LONG = PROMPT + "".join(f"    x{i} = a[{i}] + b[{i}]\n" for i in range(40))


@pytest.fixture(scope="module")
def plain(session):
  return session.generate(PROMPT, max_tokens=48, ignore_eos=True)


# ------------------------------------------------------------------------------------------------ where the text ends

@pytest.mark.parametrize("speculate", ["off", "chain", "tree"])
def test_a_stop_string_ends_the_text_before_it(session, plain, speculate):
  for begin in (1, 5, 17, 40):
    stop = plain.text[begin:begin + 6]
    at = plain.text.index(stop)
    result = session.generate(PROMPT, max_tokens=48, ignore_eos=True, stop=["no such text", stop], speculate=speculate)
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert result.text == plain.text[:at]
    assert result.token_ids == plain.token_ids[:len(result.token_ids)]
    streamed = session.stream(PROMPT, max_tokens=48, ignore_eos=True, stop=stop, speculate=speculate)
    assert "".join(token.text for token in streamed) == result.text
  assert session.generate(PROMPT, max_tokens=48, ignore_eos=True, stop="no such text").text == plain.text


def test_a_stop_token_ends_the_text(session, plain):
  stop = plain.token_ids[20]
  result = session.generate(PROMPT, max_tokens=48, ignore_eos=True, stop_token_ids=[stop])
  assert (result.finish_reason, result.stop_reason) == ("stop", stop)
  assert result.token_ids == plain.token_ids[:plain.token_ids.index(stop)]
  assert plain.stop_reason is None


def test_min_tokens_puts_the_end_off(session, plain):
  first = session.detokenize(plain.token_ids[:1])
  assert session.generate(PROMPT, max_tokens=48, ignore_eos=True, stop=first).text == ""
  result = session.generate(PROMPT, max_tokens=48, ignore_eos=True, stop=first, min_tokens=4)
  assert result.text.startswith(session.detokenize(plain.token_ids[:4]))
  stop = plain.token_ids[2]
  result = session.generate(PROMPT, max_tokens=48, ignore_eos=True, stop_token_ids=[stop], min_tokens=10)
  assert len(result.token_ids) >= 10


def test_a_timeout_cancels(session):
  result = session.generate(PROMPT, max_tokens=3000, ignore_eos=True, speculate="off", timeout=0.05)
  assert (result.finish_reason, result.stop_reason) == ("cancelled", "timeout") and len(result.token_ids) < 3000
  for timeout in (None, 300):
    with session.stream(PROMPT, max_tokens=3000, ignore_eos=True, timeout=timeout) as stream:
      next(stream)
    assert (stream.result.finish_reason, stream.result.stop_reason) == ("cancelled", None)
  assert session.generate(PROMPT, max_tokens=2, ignore_eos=True, timeout=300).finish_reason == "length"


# ------------------------------------------------------------------------------------------------ what is sampled

def test_bias_and_penalties_change_what_is_sampled(session, plain):
  banned = plain.token_ids[0]
  assert banned not in session.generate(PROMPT, max_tokens=24, ignore_eos=True, logit_bias={banned: -100}).token_ids
  forced = session.generate(PROMPT, max_tokens=5, ignore_eos=True, logit_bias={np.int64(banned): 100.0})
  assert forced.token_ids == [banned] * 5
  once = session.generate(PROMPT, max_tokens=24, ignore_eos=True, logit_bias={}, presence_penalty=0.0)
  assert once.token_ids == plain.token_ids[:24]
  for settings in ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, {"repetition_penalty": 5.0}):
    varied = session.generate(PROMPT, max_tokens=48, ignore_eos=True, **settings)
    assert len(set(varied.token_ids)) > len(set(plain.token_ids))


def test_n_choices_are_those_of_choice_and_seed(session):
  options = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0}
  results = session.generate(PROMPT, n=5, seed=11, **options)
  assert len({tuple(result.token_ids) for result in results}) == 5
  assert [result.token_ids for result in results] == \
    [session.generate(PROMPT, seed=11, choice=choice, **options).token_ids for choice in range(5)]
  drawn = session.generate(PROMPT, n=2, **options)
  assert drawn[0].seed == drawn[1].seed
  assert [result.token_ids for result in session.generate(PROMPT, n=2, seed=drawn[0].seed, **options)] == \
    [result.token_ids for result in drawn]
  one, = session.generate("hi", chat=True, n=1, max_tokens=2, ignore_eos=True)
  assert len(one.token_ids) == 2


# ------------------------------------------------------------------------------------------------ log-probabilities

def log_softmax(logits):
  shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("options", [{"speculate": "off"}, {"speculate": "tree"},
                                     {"temperature": 1.3, "seed": 3, "presence_penalty": 1.0, "logit_bias": {32: 3.0}}])
def test_logprobs_are_the_models_own(session, options):
  with session.stream(PROMPT, max_tokens=16, ignore_eos=True, logprobs=4, prompt_logprobs=2, **options) as stream:
    tokens = list(stream)
  result = stream.result
  ids = session.tokenize(PROMPT)
  expected = log_softmax(session.score(ids + result.token_ids))
  assert [token.id for token in tokens] == result.token_ids
  assert [token.logprob for token in tokens] == result.logprobs
  assert [token.top_logprobs for token in tokens] == result.top_logprobs
  for i, token in enumerate(tokens):
    row = expected[len(ids) - 1 + i]
    assert token.logprob == pytest.approx(row[token.id], abs=1e-4)
    assert list(token.top_logprobs) == [int(t) for t in np.argsort(-row, kind="stable")[:4]]
    assert list(token.top_logprobs.values()) == pytest.approx([row[t] for t in token.top_logprobs], abs=1e-4)
  assert result.prompt_logprobs[0] is None and result.prompt_top_logprobs[0] == {}
  assert result.prompt_logprobs[1:] == pytest.approx([expected[i, t] for i, t in enumerate(ids[1:])], abs=1e-4)
  assert all(len(top) == 2 for top in result.prompt_top_logprobs[1:])
  assert result.token_ids == session.generate(PROMPT, max_tokens=16, ignore_eos=True, **options).token_ids


def test_prompt_logprobs_need_no_token(session):
  result = session.generate(PROMPT, max_tokens=0, prompt_logprobs=0)
  assert result.token_ids == [] and result.text == "" and result.finish_reason == "length"
  assert len(result.prompt_logprobs) == result.prompt_tokens
  assert result.logprobs is None and all(top == {} for top in result.prompt_top_logprobs)
  assert session.generate(PROMPT, max_tokens=1, logprobs=0).top_logprobs == [{}]


# ------------------------------------------------------------------------------------------------ the engine's pages

def test_the_prefix_cache_is_used_and_reset():
  with Session(threads=1) as cached, Session(threads=1, prefix_cache=False) as uncached:
    cold, hit = (cached.generate(LONG, max_tokens=12, ignore_eos=True) for _ in range(2))
    assert cold.cached_tokens == 0 and 64 <= hit.cached_tokens < hit.prompt_tokens
    assert cached.reset_prefix_cache() > 0
    again = cached.generate(LONG, max_tokens=12, ignore_eos=True)
    assert again.cached_tokens == 0
    never = [uncached.generate(LONG, max_tokens=12, ignore_eos=True) for _ in range(2)]
    assert [result.cached_tokens for result in never] == [0, 0]
    assert uncached.reset_prefix_cache() == 0
    assert len({tuple(result.token_ids) for result in (cold, hit, again, *never)}) == 1
    assert cold.queue_ms >= 0 and cold.total_ms >= cold.first_token_ms > 0 and cold.preemptions == 0


def test_priority_goes_before_order():
  with Session(threads=1, max_streams=1) as narrow:
    first = narrow.stream(PROMPT, max_tokens=200, ignore_eos=True)
    next(first)
    late, urgent = (narrow.stream(PROMPT, max_tokens=4, ignore_eos=True, priority=p) for p in (5, -5))
    list(urgent)
    list(first)
    list(late)
    assert urgent.result.total_ms < late.result.total_ms


@pytest.mark.parametrize("options, words", [
  ({"min_tokens": -1}, "min_tokens"), ({"min_tokens": 10**12}, "min_tokens"),
  ({"repetition_penalty": 0.0}, "repetition_penalty"), ({"repetition_penalty": 11.0}, "repetition_penalty"),
  ({"presence_penalty": 2.5}, "presence_penalty"), ({"frequency_penalty": float("nan")}, "frequency_penalty"),
  ({"logit_bias": {1: 101.0}}, "bias"), ({"logit_bias": {1: float("nan")}}, "bias"),
  ({"logit_bias": {1: 1e300}}, "bias"), ({"logit_bias": {-1: 1.0}}, "bias"), ({"logit_bias": {10**6: 1.0}}, "bias"),
  ({"logit_bias": {10**12: 1.0}}, "token id"),
  ({"logit_bias": {i: 0.0 for i in range(1025)}}, "bias"),
  ({"stop": [""]}, "stop"), ({"stop": ["a"] * 33}, "stop"), ({"stop": "a" * 1025}, "stop"), ({"stop": "a\0b"}, "NUL"),
  ({"stop": "\ud800"}, "surrogate"), ({"stop_token_ids": [-1]}, "stop_token"),
  ({"stop_token_ids": [10**6]}, "stop_token"), ({"stop_token_ids": [1] * 257}, "stop_token"),
  ({"logprobs": -1}, "logprobs"), ({"logprobs": 21}, "logprobs"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
  ({"choice": -1}, "choice"), ({"choice": 2**32}, "choice"), ({"n": 0}, "n: 0"), ({"n": 2, "choice": 1}, "choice"),
  ({"n": 2, "stream": True}, "n: 2"), ({"priority": 2**31}, "priority"),
  ({"timeout": 0}, "timeout"), ({"timeout": -1}, "timeout"), ({"timeout": float("nan")}, "timeout"),
  ({"timeout": 1e9}, "timeout"),
])
def test_a_bad_setting_is_named(session, options, words):
  with pytest.raises(InvalidArgument, match=words) as caught:
    session.generate(PROMPT, **options)
  assert "expected" in str(caught.value)


@pytest.mark.parametrize("options", [{"stop": [1]}, {"stop": b"x"}, {"logit_bias": {"1": 1.0}}, {"stop_token_ids": "1"},
                                     {"n": 1.5}, {"unknown": 1}])
def test_a_setting_of_the_wrong_type_is_a_type_error(session, options):
  with pytest.raises(TypeError):
    session.generate(PROMPT, **options)
