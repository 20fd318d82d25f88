"""Reading an assistant's turn: what is reasoning, what is content, what calls a tool."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Literal, NamedTuple

from ._ffi import Api, utf8
from .result import Result, Token

PartKind = Literal["reasoning", "content", "tool_begin", "tool_arguments"]


class Part(NamedTuple):
  """A piece of a turn, as it comes."""

  kind: PartKind
  text: str
  """Whole characters; "" of tool_begin."""
  tool_index: int | None = None
  """Of a tool's part: the call's number within the turn, from 0."""
  id: str = ""
  """Of tool_begin, as the model wrote it: "functions.search:0"."""
  name: str = ""
  """Of tool_begin: "search"."""


@dataclasses.dataclass(kw_only=True)
class ToolCall:
  """A call of a tool by the model."""

  id: str
  name: str
  arguments: str = ""
  """JSON as the model wrote it: perhaps malformed, and cut short where the turn was."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatReply:
  """A whole turn of the assistant."""

  reasoning: str
  content: str
  tool_calls: list[ToolCall]
  result: Result

  def message(self) -> dict[str, Any]:
    """The turn as a message in OpenAI's form, to go on with: append it, then a message of role "tool" for each call."""
    message: dict[str, Any] = {"role": "assistant", "content": self.content}
    if self.reasoning:
      message["reasoning_content"] = self.reasoning
    if self.tool_calls:
      message["tool_calls"] = [{"id": call.id, "type": "function",
                                "function": {"name": call.name, "arguments": call.arguments}}
                               for call in self.tool_calls]
    return message


class ReplyReader:
  """Splits the tokens of one turn while they come; made by `Session.reply_reader`, which it may outlive.

      reader = session.reply_reader(tools=True)
      for token in session.stream(session.chat_tokens(messages, tools)):
        for part in reader.push(token): ...
      reader.finish()

  Control tokens count only as token ids: text that looks like one is text. One thread at a time.
  """

  def __init__(self, api: Api, slot: Any) -> None:
    self._api = api
    self._slot = slot
    self._kinds: dict[int, PartKind] = {
      api.lib.KDT_PART_REASONING: "reasoning", api.lib.KDT_PART_CONTENT: "content",
      api.lib.KDT_PART_TOOL_BEGIN: "tool_begin", api.lib.KDT_PART_TOOL_ARGUMENTS: "tool_arguments"}
    self._lock = threading.Lock()
    self._texts: dict[PartKind, list[str]] = {"reasoning": [], "content": []}
    self._calls: list[tuple[Part, list[str]]] = []

  def push(self, token: Token | str) -> list[Part]:
    """The parts that a token makes; a string is text of no token."""
    token_id, text = (None, token) if isinstance(token, str) else (token.id, token.text)
    data = utf8("text", text)
    with self._lock:
      status = self._api.lib.kdt_reply_push(self._slot[0], -1 if token_id is None else token_id, data, len(data))
      self._api.check(status)
      return self._parts()

  def finish(self) -> list[Part]:
    """The turn has ended: the parts of what was held back. No token may follow."""
    with self._lock:
      self._api.check(self._api.lib.kdt_reply_finish(self._slot[0]))
      return self._parts()

  def reply(self, result: Result) -> ChatReply:
    """What was read so far, as a whole."""
    return ChatReply(
      reasoning="".join(self._texts["reasoning"]), content="".join(self._texts["content"]), result=result,
      tool_calls=[ToolCall(id=begin.id, name=begin.name, arguments="".join(texts)) for begin, texts in self._calls])

  def _parts(self) -> list[Part]:
    api, reply = self._api, self._slot[0]
    out, n = api.filled("kdt_part", 4, lambda out, capacity, n: api.lib.kdt_reply_parts(reply, out, capacity, n))
    parts = []
    for i in range(n):
      text = bytes(api.ffi.buffer(out[i].text, out[i].text_bytes)).decode("utf-8") if out[i].text_bytes else ""
      index = out[i].tool_index if out[i].tool_index >= 0 else None
      part = Part(self._kinds[out[i].kind], text, index, api.text(out[i].id), api.text(out[i].name))
      parts.append(part)
      if part.kind == "tool_begin":
        self._calls.append((part, []))
      elif part.kind == "tool_arguments":
        self._calls[-1][1].append(text)
      else:
        self._texts[part.kind].append(text)
    return parts
