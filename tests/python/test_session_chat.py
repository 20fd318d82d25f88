"""pyclient: chat turns split into reasoning, content and tool calls."""

import asyncio
import random

import pytest

from pyclient import ChatReply, InvalidArgument, KdtreeError, Part, Session, Token, ToolCall

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
  "type": "object", "properties": {"city": {"type": "string"}}}}}]
MARKERS = ["<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
           "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"]


@pytest.fixture(scope="module")
def special(session):
  """The token of a control token's name."""
  ids = {}
  for token in range(session.score([0]).shape[1]):
    name = session.detokenize([token])
    if name in MARKERS:
      ids[name] = token
  return lambda name: Token(ids[name], name)


def read(reader, tokens, result=None):
  parts = [part for token in tokens for part in reader.push(token)] + reader.finish()
  return parts, reader.reply(result)


def test_a_turn_is_split(session, special):
  think, end, section, call, arguments, call_end, section_end = map(special, MARKERS)
  turn = ["why ", "so", end, "I look.", section, call, "functions.get_weather:0", arguments, '{"city": ', '"Zürich"}',
          call_end, call, "functions.f:1", arguments, "{}", call_end, section_end]
  parts, reply = read(session.reply_reader(thinking=True, tools=True), turn)
  assert parts[:2] == [Part("reasoning", "why "), Part("reasoning", "so")]
  assert Part("tool_begin", "", 0, "functions.get_weather:0", "get_weather") in parts
  assert reply == ChatReply(reasoning="why so", content="I look.", result=None, tool_calls=[
    ToolCall(id="functions.get_weather:0", name="get_weather", arguments='{"city": "Zürich"}'),
    ToolCall(id="functions.f:1", name="f", arguments="{}")])
  assert reply.message() == {"role": "assistant", "content": "I look.", "reasoning_content": "why so", "tool_calls": [
    {"id": "functions.get_weather:0", "type": "function",
     "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}},
    {"id": "functions.f:1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
  _, plain = read(session.reply_reader(thinking=True, tools=False), turn)
  assert plain.tool_calls == [] and "get_weather" in plain.content and "<|" not in plain.content
  assert read(session.reply_reader(), [think, "a", end, "b"])[1].reasoning == "a"


def test_the_message_goes_back_into_the_conversation(session, special):
  turn = [special(name) if name in MARKERS else name for name in (
    "hm", "</think>", "x", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0",
    "<|tool_call_argument_begin|>", '{"a": 1}', "<|tool_call_end|>", "<|tool_calls_section_end|>")]
  reply = read(session.reply_reader(thinking=True, tools=True), turn)[1]
  messages = QUESTION + [reply.message(), {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "42"}]
  text = session.detokenize(session.chat_tokens(messages, TOOLS, thinking=True))
  assert "<think>hm</think>x<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0" \
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>' in text
  assert "## Return of functions.f:0\n42" in text
  messages += [{"role": "assistant", "content": "done"}, *QUESTION]
  assert "hm" not in session.detokenize(session.chat_tokens(messages, thinking=True))
  kept = session.chat_tokens(messages, thinking=True, preserve_thinking=True)
  assert "<think>hm</think>" in session.detokenize(kept)


def test_text_that_looks_like_a_marker_is_text(session):
  for name in MARKERS:
    _, reply = read(session.reply_reader(tools=True), [name, Token(None, name)])
    assert reply.content == 2 * name and not reply.tool_calls


def test_any_turn_reads_alike_however_it_is_cut(session, special):
  rng = random.Random(3)
  for _ in range(60):
    words = [*MARKERS, "a\n", " ", "é漢🙂", '{"x": 1}', "functions.f:0"]
    turn = rng.choices(words, k=rng.randrange(16))
    whole = [special(piece) if piece in MARKERS else piece for piece in turn]
    cut = [part for piece in whole for part in ([piece] if isinstance(piece, Token) else list(piece))]
    for thinking in (False, True):
      replies = [read(session.reply_reader(thinking=thinking, tools=True), tokens)[1] for tokens in (whole, cut)]
      assert replies[0] == replies[1]
      assert not any(name in repr(replies[0]) for name in MARKERS)


@pytest.mark.parametrize("thinking", [None, False, True])
def test_chat_generates_a_turn(session, thinking):
  ids = session.chat_tokens(QUESTION, thinking=thinking)
  plain = session.generate(ids, max_tokens=24)
  reply = session.chat(QUESTION, thinking=thinking, max_tokens=24)
  assert reply.result.token_ids == plain.token_ids
  assert reply.reasoning + reply.content == plain.text.replace("<think>", "").replace("</think>", "")
  assert reply == _same(asyncio.run(session.achat(QUESTION, thinking=thinking, max_tokens=24)), reply)
  assert session.chat(QUESTION, TOOLS, max_tokens=4, ignore_eos=True).result.prompt_tokens > len(ids)
  if thinking:
    dull = session.chat(QUESTION, thinking=True, max_tokens=3, ignore_eos=True, logit_bias={32: 100.0})
    assert dull.reasoning == dull.result.text == 3 * session.detokenize([32]) and dull.content == ""


def _same(reply, other):
  """The reply with the other's result, whose times differ, once their ids and texts are known to agree."""
  assert (reply.result.token_ids, reply.result.text) == (other.result.token_ids, other.result.text)
  return ChatReply(reasoning=reply.reasoning, content=reply.content, tool_calls=reply.tool_calls, result=other.result)


def test_a_reader_outlives_its_session():
  with Session(threads=1) as opened:
    reader = opened.reply_reader(thinking=True)
  assert reader.push("a") == [Part("reasoning", "a")]
  assert reader.finish() == []
  with pytest.raises(KdtreeError, match="finished"):
    reader.push("b")


def test_wrong_use_is_named(session):
  with pytest.raises(InvalidArgument, match="surrogate"):
    session.reply_reader().push("\ud800")
  with pytest.raises(InvalidArgument, match="messages"):
    session.chat([])
  with pytest.raises(InvalidArgument, match="chat"):
    session.chat(QUESTION, chat=True)
  with pytest.raises(TypeError):
    session.chat(QUESTION, unknown=1)
