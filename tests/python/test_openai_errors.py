"""What is refused, as the `openai` client sees it: exception, status, code and field; and the daemon goes on."""

from __future__ import annotations

import openai
import pytest

from openai_support import CODE, QUESTION, chat, client_of, complete
from serve_support import Daemon

CONTEXT = 256


@pytest.fixture(scope="module")
def daemon():
  with Daemon("--max-context", CONTEXT) as running:
    yield running


@pytest.fixture(scope="module")
def client(daemon):
  with client_of(daemon) as opened:
    yield opened


@pytest.fixture(autouse=True)
def still_serving(client):
  yield
  assert complete(client, max_tokens=2).usage.completion_tokens > 0


def refused(call, status, code, param=None):
  with pytest.raises(openai.APIStatusError) as caught:
    call()
  error = caught.value
  assert (error.status_code, error.code, error.param) == (status, code, param), error.body
  assert error.type and error.body["message"]
  return error


def test_a_prompt_beyond_the_context(client):
  long = [{"role": "user", "content": "word " * 400}]
  for stream in (False, True):
    error = refused(lambda: chat(client, long, stream=stream), 400, "context_length_exceeded", "messages")
    assert isinstance(error, openai.BadRequestError)
    assert error.body["n_ctx"] == CONTEXT and error.body["n_prompt_tokens"] > CONTEXT
    refused(lambda: complete(client, max_tokens=CONTEXT, stream=stream), 400, "context_length_exceeded", "prompt")


def test_without_max_tokens_a_chat_has_what_the_context_leaves(client):
  answer = client.chat.completions.create(model="tiny-k2", messages=QUESTION, extra_body={"ignore_eos": True})
  assert answer.usage.total_tokens == CONTEXT and answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [CODE, ""]])
def test_an_empty_prompt(client, prompt):
  with pytest.raises(openai.BadRequestError) as caught:
    complete(client, prompt)
  assert caught.value.param.startswith("prompt")


def test_no_messages(client):
  refused(lambda: chat(client, []), 400, "invalid_value", "messages")
  refused(lambda: chat(client, [{"role": "king", "content": "x"}]), 400, "invalid_value", "messages[0].role")
  refused(lambda: chat(client, [{"role": "user"}]), 400, "invalid_value", "messages[0].content")
  picture = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
  look = [{"role": "user", "content": [picture]}]
  refused(lambda: chat(client, look), 400, "invalid_value", "messages[0].content[0].type")


def test_models(client):
  assert [model.id for model in client.models.list()] == ["tiny-k2"]
  assert client.models.retrieve("tiny-k2").model_extra["max_model_len"] == CONTEXT
  with pytest.raises(openai.NotFoundError) as caught:
    client.models.retrieve("gpt-4")
  assert caught.value.code == "model_not_found" and "'tiny-k2'" in caught.value.body["message"]
  assert isinstance(refused(lambda: chat(client, model="gpt-4"), 404, "model_not_found", "model"), openai.NotFoundError)


@pytest.mark.parametrize("settings, param", [
  ({"temperature": 2.5}, "temperature"), ({"top_p": -1}, "top_p"), ({"n": 0}, "n"), ({"n": 65}, "n"),
  ({"max_tokens": 0}, "max_tokens"), ({"stop": [""]}, "stop[0]"), ({"stop": ["x"] * 33}, "stop"),
  ({"logit_bias": {"x": 1}}, "logit_bias"),
  ({"logit_bias": {str(i): 1 for i in range(1025)}}, None), ({"presence_penalty": 3}, "presence_penalty"),
  ({"seed": 2**70}, "seed"), ({"extra": {"top_k": -2}}, "top_k"), ({"extra": {"min_tokens": 99}}, "min_tokens"),
  ({"extra": {"timeout": 0}}, "timeout"),
  ({"extra": {"speculate": "maybe"}}, "speculate"), ({"extra": {"stop_token_ids": [2**31]}}, "stop_token_ids[0]")])
def test_values_out_of_range(client, settings, param):
  for call in (chat, complete):
    with pytest.raises(openai.BadRequestError) as caught:
      call(client, **settings)
    assert caught.value.param == param


@pytest.mark.parametrize("extra", [
  {"response_format": {"type": "json_object"}}, {"guided_json": {"type": "object"}},
  {"structured_outputs": {"regex": "x"}},
  {"use_beam_search": True}, {"include_stop_str_in_output": True}, {"typical_p": 0.5}])
def test_what_would_change_the_meaning_is_refused_by_name(client, extra):
  for call in (chat, complete):
    refused(lambda call=call: call(client, extra=extra), 400, "unsupported_parameter", next(iter(extra)))


def test_names_of_openai_that_are_refused_or_ignored(client):
  refused(lambda: chat(client, tools=[], tool_choice="required"), 400, "unsupported_parameter", "tool_choice")
  refused(lambda: chat(client, functions=[]), 400, "unsupported_parameter", "functions")
  refused(lambda: chat(client, reasoning_effort="high"), 400, "unsupported_parameter", "reasoning_effort")
  refused(lambda: complete(client, suffix="x"), 400, "unsupported_parameter", "suffix")
  refused(lambda: complete(client, best_of=3), 400, "unsupported_parameter", "best_of")
  for name, meant in (("temprature", "temperature"), ("max_token", "max_tokens"), ("seeed", "seed")):
    error = refused(lambda name=name: chat(client, extra={name: 1}), 400, "unknown_parameter", name)
    assert f"did you mean '{meant}'?" in error.body["message"]
  error = refused(lambda: chat(client, extra={"frobnicate": 1}), 400, "unknown_parameter", "frobnicate")
  assert "did you mean" not in error.body["message"]
  chat(client, user="me", metadata={"a": "b"}, store=True, service_tier="auto", parallel_tool_calls=True,
       response_format={"type": "text"}, modalities=["text"], safety_identifier="x", prompt_cache_key="x")


def test_two_names_of_one_limit(client):
  assert chat(client, max_completion_tokens=3, max_tokens=None).usage.completion_tokens <= 3
  refused(lambda: chat(client, max_completion_tokens=3, max_tokens=3), 400, "invalid_value", "max_tokens")


@pytest.mark.parametrize("body", [
  b"", b"{", b"[]", b'{"messages": [], "messages": []}', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b'{"n": 1e999}',
  b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_bodies_that_are_no_json(daemon, body):
  for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
    status, answer = daemon.post(path, body, headers={"Content-Type": "application/json"})
    assert status == 400 and answer["error"]["code"] == "invalid_json"
    assert answer["error"].keys() >= {"message", "type", "param", "code"}


def test_a_key(monkeypatch):
  with Daemon(env={"KDTREE_API_KEY": "secret"}) as locked:
    with client_of(locked, key="wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
      chat(client)
    assert caught.value.code == "invalid_api_key"
    with client_of(locked, key="secret") as client:
      assert chat(client).choices[0].message.content


def test_choices_that_places_and_queue_hold_are_taken():
  """None is told to come again later that never could be taken, or that need not."""
  with Daemon("--max-streams", 4, "--max-waiting", 2) as narrow:
    status, answer = narrow.post("/v1/completions", {"prompt": ["a", "b"], "n": 3, "max_tokens": 2})
    assert status == 200 and len(answer["choices"]) == 6
    status, answer = narrow.post("/v1/completions", {"prompt": "a", "n": 7, "max_tokens": 2})
    assert status == 400 and answer["error"]["param"] == "n" and "6" in answer["error"]["message"]
    assert narrow.get("/ready")[0] == 200


def test_bodies_that_are_no_object(daemon):
  body = b'{"prompt": "a", "max_tokens": 1}'
  for sent, words in ((body + b"\0", "NUL byte"), (b"\0" + body, "NUL byte"), (b'"' + b"a" * 100000 + b'"', "expected a JSON object"),
                      (b'"a"', r'The request body is \"a\": expected a JSON object')):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\nConnection: close\r\n\r\n"
    answer = daemon.raw(head.encode() + sent)
    assert answer.startswith(b"HTTP/1.1 400") and words.encode() in answer and len(answer) < 2000
