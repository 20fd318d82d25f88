"""`Session`: a loaded model, its drafter, and what can be asked of them."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np

from . import _ffi
from ._errors import InvalidArgument, SessionClosed
from .result import Result
from .stream import Stream

Speculate = Literal["auto", "off", "chain", "tree"]
Ranking = Literal["auto", "plain", "noise"]


class GenerateOptions(TypedDict, total=False):
  """The keyword arguments that `Session.generate` and `Session.stream` share; `generate` describes them."""

  max_tokens: int
  temperature: float
  top_p: float
  top_k: int
  min_p: float
  seed: int | None
  speculate: Speculate
  budget: int | None
  spine: bool
  ignore_eos: bool
  ranking: Ranking
  chat: bool
  thinking: bool | None


class _Engine:
  """A kdt_engine that is destroyed once no call of another thread is inside it. Thread-safe."""

  def __init__(self, api: _ffi.Api, handle: Any) -> None:
    self._api = api
    self._handle = handle
    self._changed = threading.Condition()
    self._calls = 0
    self._closed = False
    self._destroyed = False

  @contextlib.contextmanager
  def use(self) -> Iterator[Any]:
    with self._changed:
      if self._closed:
        raise SessionClosed("session: closed: expected an open one")
      self._calls += 1
    try:
      yield self._handle
    finally:
      with self._changed:
        self._calls -= 1
        self._changed.notify_all()

  def close(self) -> None:
    with self._changed:
      self._closed = True
      self._changed.wait_for(lambda: self._calls == 0)
      if not self._destroyed:
        self._destroyed = True
        self._api.lib.kdt_engine_destroy(self._handle)


class Session:
  """A model loaded for generation. Every method may be called from several threads at once.

  model: a checkpoint directory in Kimi's Hugging Face format; None: the bundled model with its drafter.
  draft: the directory of a DFlash drafter that fits it; None: none (for the bundled model: its own).
  threads: compute threads, 0 for every CPU this process may run on. Changes no bit of the output.
  max_context: tokens of prompt + output of one request, 0 for the model's own limit.
  prefill_chunk: prompt tokens per round, 0 for the default. Changes no bit of the output.
  max_budget: the largest draft tree (in nodes) that may be asked for, 0 for the default.
  chat_format: "auto", "json" or "typescript": how tools are declared in chats.
  cpu_target: the name of an instruction set of this machine; None: the best.

  Errors are KdtreeErrors: BadCheckpoint and ReadFailed for the files, InvalidArgument for the rest.
  """

  def __init__(self, model: str | os.PathLike[str] | None = None, draft: str | os.PathLike[str] | None = None, *,
               threads: int = 0, max_context: int = 0, prefill_chunk: int = 0, max_budget: int = 0,
               chat_format: Literal["auto", "json", "typescript"] = "auto", cpu_target: str | None = None) -> None:
    self._api = api = _ffi.api()
    texts = [_c_string(api, _ffi.path_bytes("model", model)), _c_string(api, _ffi.path_bytes("draft", draft)),
             _c_string(api, _ffi.utf8("chat_format", chat_format)),
             _c_string(api, None if cpu_target is None else _ffi.utf8("cpu_target", cpu_target))]
    options = api.options("kdt_engine_options", api.lib.kdt_engine_options_init)
    _ffi.assign(options, threads=threads, max_context=max_context, prefill_chunk=prefill_chunk, max_budget=max_budget)
    options.model_path, options.draft_path, options.chat_format, options.cpu_target = texts
    out = api.ffi.new("kdt_engine **")
    api.check(api.lib.kdt_engine_create(options, out))
    self._engine = _Engine(api, out[0])
    self._close = weakref.finalize(self, self._engine.close)

  def __enter__(self) -> Session:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def close(self) -> None:
    """Cancels what still runs, waits for calls of other threads and frees the engine. May be called again."""
    self._engine.close()
    self._close.detach()

  @overload
  def generate(self, prompt: str | Sequence[int], *, stream: Literal[False] = False,
               **options: Unpack[GenerateOptions]) -> Result: ...

  @overload
  def generate(self, prompt: str | Sequence[int], *, stream: Literal[True],
               **options: Unpack[GenerateOptions]) -> Stream: ...

  def generate(self, prompt: str | Sequence[int], *, max_tokens: int = 128, temperature: float = 0.0,
               top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, seed: int | None = None,
               speculate: Speculate = "auto", budget: int | None = None, spine: bool = False, ignore_eos: bool = False,
               ranking: Ranking = "auto", chat: bool = False, thinking: bool | None = None,
               stream: bool = False) -> Result | Stream:
    """Generates and returns the whole result; with `stream=True` the iterator that `stream` returns.

    prompt: text (special-token strings in it are text; no BOS is added) or token ids.
    max_tokens: tokens to generate, at least 1; prompt + max_tokens must fit the context (ContextLength).
    temperature: 0 is greedy. top_p in (0, 1], top_k (0: off) and min_p in [0, 1] narrow the law that is sampled.
    seed: 0 to 2^64 - 1; None: a random one, returned in the result. Equal settings and seed give equal text.
    speculate: "auto", "off", "chain" or "tree"; changes the speed alone, no token. Without a drafter "auto" is "off".
    budget: draft nodes per round without the root; None: the mode's default. spine: a tree always contains the
      drafter's best chain, counted inside the budget. ranking: how candidates are ranked at temperature > 0.
    ignore_eos: stop tokens are ordinary ones.
    chat: the prompt is one user turn in the model's chat format; thinking: whether its answer opens with reasoning
      (None: the model's default).

    Ctrl-C cancels the generation. If another thread closes the session, finish_reason is "cancelled". Raises
    InvalidArgument, ContextLength, EngineFailed, SessionClosed.
    """
    running = self.stream(prompt, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
                          seed=seed, speculate=speculate, budget=budget, spine=spine, ignore_eos=ignore_eos,
                          ranking=ranking, chat=chat, thinking=thinking)
    if stream:
      return running
    with running:
      for _ in running:
        pass
    return running.result

  def stream(self, prompt: str | Sequence[int], *, max_tokens: int = 128, temperature: float = 0.0, top_p: float = 1.0,
             top_k: int = 0, min_p: float = 0.0, seed: int | None = None, speculate: Speculate = "auto",
             budget: int | None = None, spine: bool = False, ignore_eos: bool = False, ranking: Ranking = "auto",
             chat: bool = False, thinking: bool | None = None) -> Stream:
    """Starts a generation and returns the iterator of its `Token`s at once. The arguments are those of `generate`."""
    api, lib = self._api, self._api.lib
    if thinking is not None and not chat:
      raise InvalidArgument(f"thinking: {thinking}: expected chat=True beside it")
    if not chat:
      ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
    elif isinstance(prompt, str):
      ids = self.chat_tokens([{"role": "user", "content": prompt}], thinking=thinking)
    else:
      raise InvalidArgument("prompt: token ids: expected text with chat=True")
    array = api.token_ids(ids)
    options = api.options("kdt_request_options", lib.kdt_request_options_init)
    options.prompt, options.n_prompt = array, len(array)
    _ffi.assign(
      options, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
      speculate=_choice(lib, "speculate", "KDT_SPECULATE_", speculate, ("auto", "off", "chain", "tree")),
      ranking=_choice(lib, "ranking", "KDT_RANKING_", ranking, ("auto", "plain", "noise")),
      spine=bool(spine), ignore_eos=bool(ignore_eos))
    if seed is not None:
      _ffi.assign(options, has_seed=1, seed=seed)
    if budget is not None:
      if budget == 0:
        raise InvalidArgument("budget: 0: expected at least one node, or None for the default")
      _ffi.assign(options, budget=budget)
    out = api.ffi.new("kdt_request **")
    with self._engine.use() as engine:
      api.check(lib.kdt_request_submit(engine, options, out))
    return Stream(api, out[0])

  def score(self, token_ids: Iterable[int]) -> np.ndarray:
    """The target's logits at every position: float32 [n, vocab]. Blocks, and runs to its end even on Ctrl-C."""
    api, lib = self._api, self._api.lib
    ids = api.token_ids(token_ids)
    if not len(ids):
      raise InvalidArgument("token_ids: none: expected at least one")
    n = api.ffi.new("int64_t *")
    with self._engine.use() as engine:
      status = lib.kdt_engine_score(engine, ids, len(ids), api.ffi.NULL, 0, n)
      if status != lib.KDT_ERR_BUFFER_TOO_SMALL:
        api.check(status)
      logits = np.empty(n[0], np.float32)
      api.check(lib.kdt_engine_score(engine, ids, len(ids), api.ffi.from_buffer("float[]", logits), n[0], n))
    return logits.reshape(len(ids), -1)

  def tokenize(self, text: str) -> list[int]:
    """Token ids of a text. Special-token strings in it are text; no BOS is added."""
    api, data = self._api, _ffi.utf8("text", text)
    with self._engine.use() as engine:
      ids, n = api.filled("int32_t", len(data), lambda out, capacity, n: api.lib.kdt_tokenize(
        engine, data, len(data), out, capacity, n))
    return list(api.ffi.unpack(ids, n))

  def detokenize(self, ids: Iterable[int]) -> str:
    """The text of token ids; bytes that are no whole characters become U+FFFD. A special token yields its name."""
    api, array = self._api, self._api.token_ids(ids)
    with self._engine.use() as engine:
      data, n = api.filled("char", 16 * len(array), lambda out, capacity, n: api.lib.kdt_detokenize(
        engine, array, len(array), out, capacity, n))
    return bytes(api.ffi.buffer(data, n)).decode("utf-8", "replace")

  def chat_tokens(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
                  thinking: bool | None = None) -> list[int]:
    """Token ids of a conversation in the model's chat format, up to where the assistant's answer begins.

    messages and tools are in OpenAI's form. Message text is never parsed for special tokens. thinking None: the model's
    default. InvalidArgument names the message and field that is wrong.
    """
    api, lib = self._api, self._api.lib
    messages_json = _json("messages", messages)
    tools_json = api.ffi.NULL if tools is None else _json("tools", tools)
    mode = lib.KDT_THINKING_DEFAULT if thinking is None else lib.KDT_THINKING_ON if thinking else lib.KDT_THINKING_OFF
    with self._engine.use() as engine:
      ids, n = api.filled("int32_t", len(messages_json) + 64, lambda out, capacity, n: lib.kdt_chat_encode(
        engine, messages_json, tools_json, mode, out, capacity, n))
    return list(api.ffi.unpack(ids, n))

  def info(self) -> dict[str, Any]:
    """What was loaded: paths, backend, threads, the configs, byte counts, load times, the cost table."""
    with self._engine.use() as engine:
      return dict(json.loads(self._api.text(self._api.lib.kdt_engine_info_json(engine))))

  def stats(self) -> dict[str, float]:
    """The engine's running figures by name, in a stable order. Cheap, and safe while it decodes."""
    api, lib = self._api, self._api.lib
    n = api.ffi.new("int64_t *")
    with self._engine.use() as engine:
      status = lib.kdt_engine_figures(engine, api.ffi.NULL, api.ffi.NULL, 0, n)
      if status != lib.KDT_ERR_BUFFER_TOO_SMALL:
        api.check(status)
      names, values = api.ffi.new("char *[]", max(n[0], 1)), api.ffi.new("double[]", max(n[0], 1))
      api.check(lib.kdt_engine_figures(engine, names, values, n[0], n))
      return {api.text(names[i]): values[i] for i in range(n[0])}


def _c_string(api: _ffi.Api, data: bytes | None) -> Any:
  return api.ffi.NULL if data is None else api.ffi.new("char[]", data)


def _choice(lib: Any, field: str, prefix: str, value: str, choices: tuple[str, ...]) -> int:
  if value not in choices:
    raise InvalidArgument(f"{field}: {value!r}: expected one of {', '.join(choices)}")
  return int(getattr(lib, prefix + value.upper()))


def _json(field: str, value: Any) -> bytes:
  try:
    return _ffi.utf8(field, json.dumps(value, ensure_ascii=False, allow_nan=False))
  except (TypeError, ValueError, RecursionError) as error:
    if isinstance(error, InvalidArgument):
      raise
    raise InvalidArgument(f"{field}: {error}: expected what JSON can hold") from error
