"""What pyclient.Session says of arguments that the library never sees: which one, what it got, what it expected."""

import math

import numpy as np
import pytest

from pyclient import InvalidArgument, Session

PROMPT = "def add(a, b):\n"
HUGE = 10**5000
MESSAGE = 300   # characters that a message never exceeds


def refused(kind, call, words):
  with pytest.raises(kind) as caught:
    call()
  message = str(caught.value)
  assert message.startswith(words) and "expected" in message and len(message) < MESSAGE, message
  assert "\n" not in message


@pytest.mark.parametrize("prompt", ["", [], (), np.array([], np.int32)], ids=repr)
def test_an_empty_prompt(session, prompt):
  refused(InvalidArgument, lambda: session.generate(prompt), "prompt: empty: expected at least one token")


@pytest.mark.parametrize("prompt, words", [
  (None, "prompt: NoneType: expected text or a sequence of token ids"), (5, "prompt: int:"),
  (math.nan, "prompt: float:"), (b"x", "prompt: bytes:"), ([1, "a"], "prompt[1]: str: expected an integer"),
  ([1.0], "prompt[0]: float:"), ([[1]], "prompt[0]: list:")])
def test_a_prompt_of_the_wrong_type(session, prompt, words):
  for call in (session.generate, session.stream, session.astream, lambda ids: session.generate(ids, n=2)):
    refused(TypeError, lambda: call(prompt), words)


def test_texts_and_ids_of_the_wrong_type(session):
  refused(TypeError, lambda: session.tokenize(5), "text: int: expected a string")
  refused(TypeError, lambda: session.tokenize(b"x"), "text: bytes: expected a string")
  refused(TypeError, lambda: session.score(None), "token_ids: NoneType: expected a sequence of token ids")
  refused(TypeError, lambda: session.detokenize("x"), "ids: str: expected a sequence of token ids")
  refused(InvalidArgument, lambda: session.detokenize([0, HUGE]), "ids[1]: 0x")
  refused(InvalidArgument, lambda: session.generate([2**31]), "prompt[0]: 2147483648: expected a token id")


def test_an_unknown_option_names_the_method_and_a_near_one(session):
  for method in (session.generate, session.stream, session.astream):
    refused(TypeError, lambda: method(PROMPT, temprature=1.0),
            f"Session.{method.__name__}() got an unexpected option 'temprature': expected perhaps 'temperature'")
  refused(TypeError, lambda: session.chat([{"role": "user", "content": "x"}], max_token=1),
          "Session.chat() got an unexpected option 'max_token': expected perhaps 'max_tokens'")
  refused(TypeError, lambda: session.generate(PROMPT, n=2, zzz=1),
          "Session.generate() got an unexpected option 'zzz': expected one of GenerateOptions")
  refused(TypeError, lambda: session.stream(PROMPT, n=2), "Session.stream() got an unexpected option 'n'")


@pytest.mark.parametrize("options, kind, words", [
  ({"stop": ""}, InvalidArgument, "stop[0]: empty:"), ({"stop": ["a", ""]}, InvalidArgument, "stop[1]: empty:"),
  ({"stop": 5}, TypeError, "stop: int:"), ({"stop": [5]}, TypeError, "stop[0]: int:"),
  ({"logit_bias": 5}, TypeError, "logit_bias: int:"), ({"logit_bias": 0}, TypeError, "logit_bias: int:"),
  ({"logit_bias": [1]}, TypeError, "logit_bias: list:"), ({"logit_bias": {1: "1"}}, TypeError, "logit_bias[1]: str:"),
  ({"logit_bias": {1: HUGE}}, InvalidArgument, "logit_bias[1]: 0x"),
  ({"timeout": 1e308}, InvalidArgument, "timeout: 1e+308:"), ({"timeout": HUGE}, InvalidArgument, "timeout: 0x"),
  ({"timeout": "1"}, TypeError, "timeout: str: expected a number"),
  ({"max_tokens": None}, TypeError, "max_tokens: NoneType: expected an integer"),
  ({"max_tokens": 1.5}, TypeError, "max_tokens: float:"), ({"max_tokens": np.float32(2)}, TypeError, "max_tokens:"),
  ({"temperature": "1"}, TypeError, "temperature: str: expected a number"),
  ({"temperature": HUGE}, InvalidArgument, "temperature: 0x"),
  ({"logprobs": "1"}, TypeError, "logprobs: str:"), ({"logprobs": -HUGE}, InvalidArgument, "logprobs: -0x"),
  ({"stop_token_ids": 5}, TypeError, "stop_token_ids: int:"), ({"speculate": HUGE}, InvalidArgument, "speculate: 0x"),
  ({"speculate": "x" * 1000}, InvalidArgument, "speculate: 'xxx"), ({"n": 1.5}, TypeError, "n: float:"),
  ({"n": -HUGE}, InvalidArgument, "n: -0x"), ({"n": 2, "choice": HUGE}, InvalidArgument, "choice: 0x"),
  ({"speculate": np.array(["auto", "tree"])}, InvalidArgument, "speculate: array(['auto', 'tree']"),
  ({"speculate": np.arange(1000)}, InvalidArgument, "speculate: array("),
  ({"ranking": np.array(["plain", "noise"])}, InvalidArgument, "ranking: array("),
  ({"budget": np.array([1, 2])}, TypeError, "budget: ndarray: expected an integer"),
  ({"temperature": np.array(["x"])}, TypeError, "temperature: ndarray: expected a number"),
  ({"n": HUGE, "stream": True}, InvalidArgument, "n: 0x"), ({"thinking": HUGE}, InvalidArgument, "thinking: 0x"),
])
def test_a_wrong_setting(session, options, kind, words):
  refused(kind, lambda: session.generate(PROMPT, **options), words)


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens", "top_k", "seed", "choice", "budget", "priority",
                                   "logprobs", "prompt_logprobs"])
def test_an_integer_of_any_size_is_named_in_short(session, field):
  refused(InvalidArgument, lambda: session.generate(PROMPT, **{field: HUGE}), f"{field}: 0x")


@pytest.mark.parametrize("field", ["ignore_eos", "spine", "skip_special_tokens", "chat", "stream"])
def test_a_flag_is_true_or_false(session, field):
  for wrong in ("x", "", math.nan, 1.0, None, [], 2, -1, HUGE):
    refused(TypeError, lambda: session.generate(PROMPT, **{field: wrong}), f"{field}: ")
  if field != "stream":
    for value in (False, 0, np.False_, np.int64(0), True, 1, np.True_):
      session.generate(PROMPT, max_tokens=1, **{field: value})


def test_flags_of_other_methods(session):
  messages = [{"role": "user", "content": "x"}]
  refused(TypeError, lambda: session.chat_tokens(messages, thinking="on"), "thinking: str:")
  refused(TypeError, lambda: session.chat_tokens(messages, preserve_thinking="x"), "preserve_thinking: str:")
  refused(TypeError, lambda: session.reply_reader(tools="x"), "tools: str:")
  refused(TypeError, lambda: session.generate("x", chat=True, thinking="on"), "thinking: str:")


def test_the_time_of_a_drain():
  with Session(threads=1) as own:
    for wrong in (math.nan, math.inf, 1e308, HUGE):
      refused(InvalidArgument, lambda: own.drain(timeout=wrong), "timeout: ")
    refused(TypeError, lambda: own.drain(timeout="x"), "timeout: str: expected a number")
    assert not own.health().draining
    for right in (-1, -math.inf, 0, 1e-9, 1, 2e6, np.float32(1)):
      assert own.drain(timeout=right)


@pytest.mark.parametrize("settings, kind, words", [
  ({"chat_format": 1}, TypeError, "chat_format: int: expected a string"),
  ({"cpu_target": 1}, TypeError, "cpu_target: int: expected a string"),
  ({"backend": b"cpu"}, TypeError, "backend: bytes: expected a string"),
  ({"model": 1}, TypeError, "model: int: expected a path"), ({"draft": []}, TypeError, "draft: list: expected a path"),
  ({"model": "\ud800"}, InvalidArgument, "model: "), ({"draft": "\ud800"}, InvalidArgument, "draft: "),
  ({"threads": "1"}, TypeError, "threads: str: expected an integer"), ({"device": HUGE}, InvalidArgument, "device: 0x"),
  ({"prefix_cache": "no"}, TypeError, "prefix_cache: str: expected True or False"),
  ({"max_stream": 1}, TypeError, "Session() got an unexpected option 'max_stream': expected perhaps 'max_streams'"),
  ({"zzz": 1}, TypeError, "Session() got an unexpected option 'zzz': expected one of Session's settings"),
])
def test_a_wrong_setting_of_a_session(settings, kind, words):
  refused(kind, lambda: Session(**settings), words)
