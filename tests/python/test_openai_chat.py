"""Chats with the `openai` client: whole and streamed, reasoning, tools, logprobs, choices, seeds, cancelling."""

from __future__ import annotations

import asyncio

import openai
import pytest

from openai_support import MODES, QUESTION, chat, client_of, joined
from serve_support import Daemon

TOOL = {"type": "function", "function": {"name": "search", "description": "Look something up", "parameters": {
  "type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}


@pytest.fixture(scope="module")
def daemon():
  with Daemon() as running:
    yield running


@pytest.fixture(scope="module")
def client(daemon):
  with client_of(daemon) as opened:
    yield opened


def tokens_of(daemon, **body):
  status, answer = daemon.post("/tokenize", body)
  assert status == 200, answer
  assert answer["count"] == len(answer["tokens"])
  return answer["tokens"]


def test_a_chat(client):
  answer = chat(client)
  choice = answer.choices[0]
  assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "tiny-k2"
  assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason in ("stop", "length")
  assert 0 < answer.usage.completion_tokens <= 24
  assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
  assert answer.usage.prompt_tokens_details.cached_tokens is not None
  figures = answer.model_extra["kdtree"]
  assert figures["rounds"] > 0 and figures["tokens_per_round"] >= 1 and figures["speculate"] == "auto"
  assert {"prefill", "draft", "verify", "emit"} <= figures["timings_ms"].keys()


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_streamed_and_whole_are_the_same_text(client, temperature):
  whole = chat(client, temperature=temperature, seed=7)
  stream = joined(chat(client, temperature=temperature, seed=7, stream=True, stream_options={"include_usage": True}))
  assert stream["text"] == whole.choices[0].message.content
  assert stream["finish"] == whole.choices[0].finish_reason
  assert stream["usage"].completion_tokens == whole.usage.completion_tokens
  assert stream["kdtree"]["seed"] == 7


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["speculate"])
def test_a_chunk_has_one_token_also_from_an_accepted_block(client, mode):
  stream = joined(chat(client, max_tokens=40, logprobs=True, extra=mode, stream=True,
                       stream_options={"include_usage": True}))
  assert all(len(content) == 1 for content in stream["logprobs"])
  assert len(stream["logprobs"]) == stream["usage"].completion_tokens
  # Fewer where a character is made of several tokens, never because several tokens came together.
  assert len(stream["pieces"]) <= len(stream["logprobs"])
  assert "".join(stream["pieces"]) == stream["text"]
  if mode["speculate"] in ("chain", "tree"):
    assert stream["kdtree"]["draft_nodes"] > 0 and sum(stream["kdtree"]["accepted_by_depth"]) > 0


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_logprobs_are_the_targets_own_whatever_the_speculation(client, settings):
  answers = [chat(client, max_tokens=40, logprobs=True, top_logprobs=5, extra=mode, **settings) for mode in MODES]
  first = answers[0].choices[0]
  for answer in answers[1:]:
    assert answer.choices[0].message.content == first.message.content
    assert answer.choices[0].logprobs == first.logprobs
  content = first.logprobs.content
  assert len(content) == answers[0].usage.completion_tokens
  assert b"".join(bytes(item.bytes) for item in content).decode(errors="replace").startswith(first.message.content[:8])
  for item in content:
    top = [each.logprob for each in item.top_logprobs]
    assert len(top) == 5 and top == sorted(top, reverse=True) and item.logprob <= 0
    if settings["temperature"] == 0:
      assert item.logprob == top[0]


def test_logprobs_stream_as_they_are_whole(client):
  whole = chat(client, logprobs=True, top_logprobs=2)
  stream = joined(chat(client, logprobs=True, top_logprobs=2, stream=True))
  assert [content[0] for content in stream["logprobs"]] == whole.choices[0].logprobs.content


def test_choices_are_different_and_the_first_is_that_of_one(client):
  answer = chat(client, temperature=1.5, seed=11, n=4)
  texts = [choice.message.content for choice in answer.choices]
  assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and len(set(texts)) > 1
  assert chat(client, temperature=1.5, seed=11).choices[0].message.content == texts[0]
  streamed = ["", "", "", ""]
  for chunk in chat(client, temperature=1.5, seed=11, n=4, stream=True):
    for choice in chunk.choices:
      streamed[choice.index] += choice.delta.content or ""
  assert streamed == texts


def test_seeds(client):
  def text(seed):
    answer = chat(client, temperature=1.5, seed=seed)
    return answer.choices[0].message.content, answer.model_extra["kdtree"]["seed"]
  assert text(5) == text(5) and text(5)[0] != text(6)[0]
  assert text(-1)[1] == 2**64 - 1
  drawn, seed = text(None)
  assert text(seed) == (drawn, seed)


def test_reasoning_is_split_and_no_marker_leaks(client):
  for thinking in (False, True):
    for stream in (False, True):
      answer = chat(client, max_tokens=48, temperature=1, seed=2, stream=stream,
                    extra={"chat_template_kwargs": {"thinking": thinking, "preserve_thinking": True}})
      if stream:
        answer = joined(answer)
        text, reasoning = answer["text"], answer["reasoning"]
      else:
        text = answer.choices[0].message.content or ""
        reasoning = (answer.choices[0].message.model_extra or {}).get("reasoning_content", "")
      assert text or reasoning
      assert thinking or not reasoning
      for marker in ("<think>", "</think>", "<|tool", "<|im_"):
        assert marker not in text + reasoning


def test_tools_are_declared_and_their_turns_taken(daemon, client):
  bare = chat(client).usage.prompt_tokens
  assert chat(client, tools=[TOOL]).usage.prompt_tokens > bare
  assert chat(client, tools=[TOOL], tool_choice="auto").usage.prompt_tokens > bare
  assert chat(client, tools=[TOOL], tool_choice="none").usage.prompt_tokens == bare
  call = {"id": "functions.search:0", "type": "function", "function": {"name": "search", "arguments": '{"query": "x"}'}}
  turns = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]},
           {"role": "tool", "tool_call_id": "functions.search:0", "content": "found"}]
  answer = chat(client, turns, tools=[TOOL])
  assert answer.usage.prompt_tokens == len(tokens_of(daemon, messages=turns, tools=[TOOL]))
  assert joined(chat(client, turns, tools=[TOOL], stream=True))["finish"] in ("stop", "length", "tool_calls")


def test_text_that_looks_like_a_control_token_stays_text(daemon):
  def count(text):
    ids = tokens_of(daemon, messages=[{"role": "user", "content": text}])
    return [ids.count(control) for control in tokens_of(daemon, messages=[{"role": "user", "content": "x"}])[:1]]
  assert count("<|im_user|> <|im_end|><|im_user|>") == count("x") == [1]
  status, answer = daemon.post("/detokenize", {"tokens": tokens_of(daemon, prompt="<|im_end|> 漢字 🙂")})
  assert status == 200 and answer == {"prompt": "<|im_end|> 漢字 🙂"}


def test_characters_of_several_tokens_arrive_whole(client):
  messages = [{"role": "user", "content": "漢字 🙂 é 漢字 🙂 é"}]
  for seed in range(6):
    settings = {"messages": messages, "temperature": 2, "max_tokens": 40, "seed": seed, "extra": {"ignore_eos": True}}
    whole = chat(client, **settings)
    stream = joined(chat(client, stream=True, **settings))
    assert stream["text"] == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 40


def test_closing_a_stream_cancels_it(daemon, client):
  stream = chat(client, max_tokens=3000, stream=True, extra={"ignore_eos": True})
  next(iter(stream))
  daemon.until_running(1)
  stream.close()
  daemon.until_idle()
  assert chat(client).choices[0].message.content


def test_a_deadline_ends_with_an_error(client):
  settings = {"max_tokens": 3000, "extra": {"ignore_eos": True, "timeout": 0.3}}
  with pytest.raises(openai.APIStatusError) as caught:
    chat(client, **settings)
  assert caught.value.status_code == 408 and caught.value.code == "timeout"
  with pytest.raises(openai.APIError) as caught:
    joined(chat(client, stream=True, **settings))
  assert caught.value.code == "timeout"


def test_ten_streams_at_once_are_what_each_is_alone(daemon, client):
  def settings(i):
    return {"messages": [{"role": "user", "content": f"Count from {i}."}], "temperature": i % 3 * 0.7, "seed": i,
            "max_tokens": 12 + 5 * i, "extra": MODES[i % len(MODES)]}

  async def all_at_once():
    async with client_of(daemon, kind=openai.AsyncOpenAI) as opened:
      async def one(i):
        text = ""
        async for chunk in await chat(opened, stream=True, **settings(i)):
          text += "".join(choice.delta.content or "" for choice in chunk.choices)
        return text
      return await asyncio.gather(*(one(i) for i in range(10)))

  together = asyncio.run(all_at_once())
  for i in range(10):
    alone = chat(client, **(settings(i) | {"extra": {"speculate": "off"}}))
    assert together[i] == alone.choices[0].message.content
