"""`Session`: a loaded model, its drafter, and what can be asked of them."""

from __future__ import annotations

import inspect
import json
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Never, TypeVar, Unpack, overload

import numpy as np

from . import _ffi, _owner
from ._arguments import flag, number, shown
from ._engine import Engine
from ._errors import InvalidArgument
from ._generation import Generation
from .async_stream import AsyncStream, finish_concurrently
from .chat import ChatReply, ReplyReader
from .options import GenerateOptions, SamplingOptions, check_names, milliseconds, n_choices, request_options, unexpected
from .result import Health, Result
from .stream import Stream, finish_together

FigureKind = Literal["counter", "gauge", "histogram"]
Running = TypeVar("Running", Stream, AsyncStream)

# How long one wait for a drain lasts at most: Python delivers Ctrl-C between two of them.
_WAIT_SLICE_MS = 100


class Session:
  """A model loaded for generation. Every method may be called from several threads at once, and generations of several
  threads or tasks run together; none changes any bit of another's output.

  model: a checkpoint directory in Kimi's Hugging Face format; None: the bundled model with its drafter.
  draft: the directory of a DFlash drafter that fits it; None: none (for the bundled model: its own).
  threads: compute threads, 0 for every CPU this process may run on.
  max_context: tokens of prompt + output of one request, 0 for the model's own limit.
  prefill_chunk: prompt tokens per round, 0 for the default.
  max_budget: the largest draft tree (in nodes) that may be asked for, 0 for the default.
  max_streams: generations that run together, up to 64; 0: 64. The others wait, max_waiting of them at most (0: 1024);
    beyond that generating raises QueueFull.
  kv_tokens: tokens the KV pages hold, all streams and the prefix cache together; 0: by the machine's memory.
  prefix_cache: KV pages of equal beginnings of prompts are shared between generations, and kept for later ones.
  chat_format: "auto", "json" or "typescript": how tools are declared in chats.
  cpu_target: the name of an instruction set of this machine; None: the best.
  backend: "auto", "cpu" or "cuda": what the engine computes on; auto is CUDA where `device` is usable.
  device: the index of the CUDA device; of several ranks the first's, the next ones have those after it, round and round.
  tp: tensor-parallel ranks, threads of this process that share `threads`; what does not divide the model is refused.
  rank_deadline: seconds a rank waits for another within a round before it is named and the engine fails; None: 10.

  Of these, within a backend, only model, draft, max_context, max_budget, chat_format and tp can change any bit of an output.

  A process that was forked cannot use a session of its parent (SessionClosed); it can open its own.

  Errors are KdtreeErrors: BadCheckpoint and ReadFailed for the files, InvalidArgument for the rest.
  """

  def __init__(self, model: str | os.PathLike[str] | None = None, draft: str | os.PathLike[str] | None = None, *,
               threads: int = 0, max_context: int = 0, prefill_chunk: int = 0, max_budget: int = 0,
               max_streams: int = 0, max_waiting: int = 0, kv_tokens: int = 0, prefix_cache: bool = True,
               chat_format: Literal["auto", "json", "typescript"] = "auto", cpu_target: str | None = None,
               backend: Literal["auto", "cpu", "cuda"] = "auto", device: int = 0, tp: int = 1,
               rank_deadline: float | None = None, **unknown: Never) -> None:
    for name in unknown:
      raise unexpected("Session()", name, inspect.signature(Session).parameters, "one of Session's settings")
    self._api = api = _ffi.api()
    texts = [_c_string(api, _ffi.path_bytes("model", model)), _c_string(api, _ffi.path_bytes("draft", draft)),
             _c_string(api, _ffi.c_text("chat_format", chat_format)),
             _c_string(api, None if cpu_target is None else _ffi.c_text("cpu_target", cpu_target)),
             _c_string(api, _ffi.c_text("backend", backend))]
    options = api.options("kdt_engine_options", api.lib.kdt_engine_options_init)
    _ffi.assign(options, threads=threads, max_context=max_context, prefill_chunk=prefill_chunk, max_budget=max_budget,
                max_streams=max_streams, max_waiting=max_waiting, kv_tokens=kv_tokens,
                no_prefix_cache=not flag("prefix_cache", prefix_cache), device=device, tp=tp,
                rank_deadline_ms=0 if rank_deadline is None else milliseconds("rank_deadline", rank_deadline))
    (options.model_path, options.draft_path, options.chat_format, options.cpu_target, options.backend) = texts
    self._engine = Engine(api, options)
    self._close = weakref.finalize(self, self._engine.close)

  def __enter__(self) -> Session:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def close(self) -> None:
    """Cancels what still runs, waits for calls of other threads and frees the engine. May be called again.

    A signal handler may call it too. If it interrupted a call of this session, close() returns at once, and the engine
    is freed when that call is over: `score` returns its result or, like `drain`, raises SessionClosed.
    """
    self._engine.close()
    self._close.detach()

  # ---------------------------------------------------------------------------------------------- generating

  @overload
  def generate(self, prompt: str | Sequence[int], *, n: None = None, stream: Literal[False] = False,
               **options: Unpack[GenerateOptions]) -> Result: ...

  @overload
  def generate(self, prompt: str | Sequence[int], *, n: None = None, stream: Literal[True],
               **options: Unpack[GenerateOptions]) -> Stream: ...

  @overload
  def generate(self, prompt: str | Sequence[int], *, n: int, stream: Literal[False] = False,
               **options: Unpack[GenerateOptions]) -> list[Result]: ...

  def generate(self, prompt: str | Sequence[int], *, n: int | None = None, stream: bool = False,
               **options: Unpack[GenerateOptions]) -> Result | Stream | list[Result]:
    """Generates and returns the whole result; with `stream=True` the iterator that `stream` returns; with `n` that many
    results at temperature > 0, whose i-th is that of `choice=i` with the same seed.

    prompt: text (special-token strings in it are text; no BOS is added) or token ids.
    options: the keyword arguments that `GenerateOptions` describes.

    Ctrl-C cancels the generation, wherever it comes. If another thread closes the session, finish_reason is
    "cancelled". Raises InvalidArgument, ContextLength, QueueFull, ShuttingDown, EngineFailed, SessionClosed; TypeError
    for an option that there is not, or of another type.
    """
    stream = flag("stream", stream)
    if n is not None:
      if stream:
        raise InvalidArgument(f"n: {shown(n)}: expected none with stream=True")
      return finish_together(self._choices("generate", prompt, n, options))
    running = self._start(Stream, "generate", prompt, options)
    if stream:
      return running
    try:
      for _ in running:
        pass
    except BaseException:
      running.cancel()
      raise
    return running.result

  def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Stream:
    """Starts a generation and returns the iterator of its `Token`s at once. The arguments are those of `generate`."""
    return self._start(Stream, "stream", prompt, options)

  @overload
  async def agenerate(self, prompt: str | Sequence[int], *, n: None = None,
                      **options: Unpack[GenerateOptions]) -> Result: ...

  @overload
  async def agenerate(self, prompt: str | Sequence[int], *, n: int,
                      **options: Unpack[GenerateOptions]) -> list[Result]: ...

  async def agenerate(self, prompt: str | Sequence[int], *, n: int | None = None,
                      **options: Unpack[GenerateOptions]) -> Result | list[Result]:
    """`generate` for asyncio. No thread waits; cancelling the task cancels the generation."""
    if n is not None:
      return await finish_concurrently(self._choices("agenerate", prompt, n, options))
    return await self._start(AsyncStream, "agenerate", prompt, options).finish()

  def astream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> AsyncStream:
    """`stream` for asyncio: `async for token in session.astream(...)`. Cancelling the task cancels the generation."""
    return self._start(AsyncStream, "astream", prompt, options)

  def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, *,
           thinking: bool | None = None, preserve_thinking: bool = False,
           **options: Unpack[SamplingOptions]) -> ChatReply:
    """Generates the assistant's turn of a conversation, split into reasoning, content and tool calls.

    messages, tools, thinking, preserve_thinking: as for `chat_tokens`; options: as for `generate`. Without tools, what
    the model writes as a call is content.
    """
    reader = self.reply_reader(thinking=thinking, tools=bool(tools))
    running = self._start(Stream, "chat", self.chat_tokens(messages, tools, thinking, preserve_thinking), options)
    try:
      for token in running:
        reader.push(token)
    except BaseException:
      running.cancel()
      raise
    reader.finish()
    return reader.reply(running.result)

  async def achat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, *,
                  thinking: bool | None = None, preserve_thinking: bool = False,
                  **options: Unpack[SamplingOptions]) -> ChatReply:
    """`chat` for asyncio."""
    reader = self.reply_reader(thinking=thinking, tools=bool(tools))
    ids = self.chat_tokens(messages, tools, thinking, preserve_thinking)
    async with self._start(AsyncStream, "achat", ids, options) as running:
      async for token in running:
        reader.push(token)
    reader.finish()
    return reader.reply(running.result)

  def reply_reader(self, *, thinking: bool | None = None, tools: bool = False) -> ReplyReader:
    """Splits the tokens of a turn that is streamed; thinking and tools: as the turn is asked for."""
    api, lib = self._api, self._api.lib
    slot = _owner.slot(api, "kdt_reply", lib.kdt_reply_destroy)
    api.check(self._engine.call(lib.kdt_reply_create, _thinking(api, thinking), flag("tools", tools), slot))
    return ReplyReader(api, slot)

  # ---------------------------------------------------------------------------------------------- text and logits

  def score(self, token_ids: Iterable[int]) -> np.ndarray:
    """The target's logits at every position: float32 [n, vocab]. Blocks, and runs to its end even on Ctrl-C."""
    api, lib = self._api, self._api.lib
    ids = api.token_ids("token_ids", token_ids)
    if not len(ids):
      raise InvalidArgument("token_ids: none: expected at least one")
    n = api.ffi.new("int64_t *")
    status = self._engine.call(lib.kdt_engine_score, ids, len(ids), api.ffi.NULL, 0, n)
    if status != lib.KDT_ERR_BUFFER_TOO_SMALL:
      api.check(status)
    logits = np.empty(n[0], np.float32)
    out = api.ffi.from_buffer("float[]", logits)
    api.check(self._engine.call(lib.kdt_engine_score, ids, len(ids), out, n[0], n))
    return logits.reshape(len(ids), -1)

  def tokenize(self, text: str) -> list[int]:
    """Token ids of a text. Special-token strings in it are text; no BOS is added."""
    api, data = self._api, _ffi.utf8("text", text)
    ids, n = api.filled("int32_t", len(data), lambda out, capacity, n: self._engine.call(
      api.lib.kdt_tokenize, data, len(data), out, capacity, n))
    return list(api.ffi.unpack(ids, n))

  def detokenize(self, ids: Iterable[int]) -> str:
    """The text of token ids; bytes that are no whole characters become U+FFFD. A special token yields its name."""
    api, array = self._api, self._api.token_ids("ids", ids)
    data, n = api.filled("char", 16 * len(array), lambda out, capacity, n: self._engine.call(
      api.lib.kdt_detokenize, array, len(array), out, capacity, n))
    return bytes(api.ffi.buffer(data, n)).decode("utf-8", "replace")

  def chat_tokens(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
                  thinking: bool | None = None, preserve_thinking: bool = False) -> list[int]:
    """Token ids of a conversation in the model's chat format, up to where the assistant's answer begins.

    messages and tools are in OpenAI's form. Message text is never parsed for special tokens. thinking None: the model's
    default. preserve_thinking: the reasoning of earlier turns stays. InvalidArgument names the message and field that
    is wrong.
    """
    api, lib = self._api, self._api.lib
    messages_json = _json("messages", messages)
    tools_json = api.ffi.NULL if tools is None else _json("tools", tools)
    mode, preserve = _thinking(api, thinking), flag("preserve_thinking", preserve_thinking)
    ids, n = api.filled("int32_t", len(messages_json) + 64, lambda out, capacity, n: self._engine.call(
      lib.kdt_chat_encode, messages_json, tools_json, mode, preserve, out, capacity, n))
    return list(api.ffi.unpack(ids, n))

  # ---------------------------------------------------------------------------------------------- the engine

  def drain(self, timeout: float | None = None) -> bool:
    """From now on generating and score raise ShuttingDown. Waits until nothing runs or waits any more; False: something
    still does after `timeout` seconds. May be called again."""
    api = self._api
    end = None
    if timeout is not None:
      wait = 0 if number("timeout", timeout) <= 0 else milliseconds("timeout", timeout)
      end = time.monotonic() + wait / 1000
    while True:
      left = _WAIT_SLICE_MS if end is None else min(_WAIT_SLICE_MS, int(1000 * (end - time.monotonic())))
      status = self._engine.call(api.lib.kdt_engine_drain, max(left, 0))
      if status != api.lib.KDT_ERR_TIMEOUT:
        api.check(status)
        return True
      if left <= 0:
        return False

  def cancel_all(self) -> None:
    """Cancels every generation, queued or running."""
    self._api.check(self._engine.call(self._api.lib.kdt_engine_cancel_all))

  def reset_prefix_cache(self) -> int:
    """Forgets the KV pages that are kept for later prompts and that no generation uses; how many those were."""
    n = self._api.ffi.new("int64_t *")
    self._api.check(self._engine.call(self._api.lib.kdt_engine_reset_prefix_cache, n))
    return int(n[0])

  def health(self) -> Health:
    """How the engine is. Never waits for a round."""
    api = self._api
    out = api.ffi.new("kdt_health *")
    out.struct_size = api.ffi.sizeof("kdt_health")

    def read(engine: Any) -> Health:
      api.check(api.lib.kdt_engine_health(engine, out))
      return Health(failed=bool(out.failed), draining=bool(out.draining), running=out.running, waiting=out.waiting,
                    seconds_since_round=out.seconds_since_round, error=api.text(out.error))

    return self._engine.call(read)

  def info(self) -> dict[str, Any]:
    """What was loaded: paths, backend, threads, the configs, byte counts, load times, the cost table."""
    api = self._api
    return dict(json.loads(self._engine.call(lambda engine: api.text(api.lib.kdt_engine_info_json(engine)))))

  def stats(self) -> dict[str, float]:
    """The engine's running figures by series, in a stable order: `generation_tokens_total`,
    `request_success_total{finished_reason="stop"}`. Cheap, and safe while it decodes."""
    api, lib = self._api, self._api.lib
    n = api.ffi.new("int64_t *")

    def read(engine: Any) -> dict[str, float]:
      while True:
        capacity = n[0]
        names, values = api.ffi.new("char *[]", max(capacity, 1)), api.ffi.new("double[]", max(capacity, 1))
        status = lib.kdt_engine_figures(engine, names, values, capacity, n)
        if status != lib.KDT_ERR_BUFFER_TOO_SMALL:
          api.check(status)
          return {api.text(names[i]): values[i] for i in range(n[0])}

    return self._engine.call(read)

  def figure_families(self) -> dict[str, tuple[FigureKind, str]]:
    """The families of the series of `stats` (their names without `_bucket`, `_sum`, `_count`): kind and a line of
    help."""
    api, lib = self._api, self._api.lib
    n = api.ffi.new("int64_t *")
    status = lib.kdt_figure_families(api.ffi.NULL, api.ffi.NULL, api.ffi.NULL, 0, n)
    if status != lib.KDT_ERR_BUFFER_TOO_SMALL:
      api.check(status)
    size = max(n[0], 1)
    names, kinds, helps = api.ffi.new("char *[]", size), api.ffi.new("int32_t[]", size), api.ffi.new("char *[]", size)
    api.check(lib.kdt_figure_families(names, kinds, helps, n[0], n))
    kind_names: dict[int, FigureKind] = {lib.KDT_FIGURE_COUNTER: "counter", lib.KDT_FIGURE_GAUGE: "gauge",
                                         lib.KDT_FIGURE_HISTOGRAM: "histogram"}
    return {api.text(names[i]): (kind_names[kinds[i]], api.text(helps[i])) for i in range(n[0])}

  # ---------------------------------------------------------------------------------------------- inside

  def _start(self, reader: Callable[[Generation], Running], method: str, prompt: str | Sequence[int],
             settings: GenerateOptions) -> Running:
    """A new generation with what reads it; on an exception, Ctrl-C included, it is cancelled."""
    ids, sampling = self._prompt(method, prompt, settings)
    return self._submit(reader, self._ids(ids), sampling)

  def _submit(self, reader: Callable[[Generation], Any], ids: Any, sampling: SamplingOptions) -> Any:
    api = self._api
    options, _owned = request_options(api, ids, **sampling)
    generation = Generation(api, logprobs=options.logprobs >= 0, prompt_logprobs=options.prompt_logprobs >= 0)
    try:
      api.check(self._engine.call(api.lib.kdt_request_submit, options, generation.slot))
      return reader(generation)
    except BaseException:   # the traceback of an exception keeps the generation
      generation.cancel()
      raise

  def _choices(self, method: str, prompt: str | Sequence[int], n: int, settings: GenerateOptions) -> list[Generation]:
    """n generations of one seed. Dropped ones are cancelled, should a later one be refused."""
    ids, sampling = self._prompt(method, prompt, settings)
    if sampling.get("choice"):
      raise InvalidArgument(f"choice: {shown(sampling['choice'])}: expected none beside n")
    if sampling.get("seed") is None:
      sampling["seed"] = secrets.randbits(64)
    array = self._ids(ids)
    return [self._submit(_itself, array, {**sampling, "choice": choice}) for choice in range(n_choices(n))]

  def _ids(self, prompt: Sequence[int]) -> Any:
    return self._api.token_ids("prompt", prompt, "text or a sequence of token ids")

  def _prompt(self, method: str, prompt: str | Sequence[int],
              settings: GenerateOptions) -> tuple[Sequence[int], SamplingOptions]:
    """The prompt's ids, and the settings without those that say how it is meant."""
    check_names(method, settings)
    sampling: Any = dict(settings)
    chat, thinking = flag("chat", sampling.pop("chat", False)), sampling.pop("thinking", None)
    if thinking is not None and not chat:
      raise InvalidArgument(f"thinking: {shown(thinking)}: expected chat=True beside it")
    if chat:
      if not isinstance(prompt, str):
        raise InvalidArgument("prompt: token ids: expected text with chat=True")
      return self.chat_tokens([{"role": "user", "content": prompt}], thinking=thinking), sampling
    return self.tokenize(prompt) if isinstance(prompt, str) else prompt, sampling


def _itself(generation: Generation) -> Generation:
  return generation


def _c_string(api: _ffi.Api, data: bytes | None) -> Any:
  return api.ffi.NULL if data is None else api.ffi.new("char[]", data)


def _thinking(api: _ffi.Api, thinking: bool | None) -> int:
  lib = api.lib
  if thinking is None:
    return int(lib.KDT_THINKING_DEFAULT)
  return int(lib.KDT_THINKING_ON if flag("thinking", thinking) else lib.KDT_THINKING_OFF)


def _json(field: str, value: Any) -> bytes:
  try:
    return _ffi.utf8(field, json.dumps(value, ensure_ascii=False, allow_nan=False))
  except (TypeError, ValueError, RecursionError) as error:
    if isinstance(error, InvalidArgument):
      raise
    raise InvalidArgument(f"{field}: {error}: expected what JSON can hold") from error
