"""The settings of a generation: `SamplingOptions`, `GenerateOptions`, and how they become kdt_request_options."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from . import _ffi
from ._arguments import flag, integer, number, shown, wrong_type
from ._errors import InvalidArgument

Speculate = Literal["auto", "off", "chain", "tree"]
Ranking = Literal["auto", "plain", "noise"]

_MAX_SECONDS = (2**31 - 1) // 1000   # the library takes milliseconds as int32_t


class SamplingOptions(TypedDict, total=False):
  """The keyword arguments of every way to generate. Each has a default; what is out of range is an InvalidArgument.

  Length
    max_tokens           Tokens to generate, at least 1 (0 may stand beside prompt_logprobs); prompt + max_tokens must
                         fit the context. Default 128.
    min_tokens           Stop tokens and stop strings do not end the text before this many: 0 to max_tokens. Default 0.
    stop                 A string or several that end the text and do not appear in it: up to 32, each 1 to 1024 bytes
                         of UTF-8. Default None.
    stop_token_ids       Further ids that end the text, ignore_eos or not; up to 256. Default None.
    ignore_eos           True: the model's stop tokens are ordinary ones. Default False.
    timeout              Seconds from submit, above 0 and up to 2147483, after which the generation is cancelled: its
                         result has stop_reason "timeout". Default None: no limit.

  Choice of tokens
    temperature          0 to 100; 0, the default, is greedy.
    top_p                In (0, 1]. Default 1: off.
    top_k                At least 0. Default 0: off.
    min_p                In [0, 1]. Default 0: off.
    seed                 0 to 2^64 - 1. Equal settings and seed give equal text. Default None: a random one, returned in
                         the result.
    choice               0 to 2^32 - 1: which of several answers to one prompt this is, by other noise from the same
                         seed. Default 0.
    repetition_penalty   In (0, 10]: logits of tokens in prompt or output are divided by it (or multiplied, when
                         negative). Default 1: off.
    presence_penalty     In [-2, 2]: taken off the logits of tokens in the output. Default 0.
    frequency_penalty    In [-2, 2]: that times their count in the output. Default 0.
    logit_bias           Token ids and what is added to their logits, each in [-100, 100]; up to 1024. Default None.

  What is reported
    skip_special_tokens  True: special tokens of the answer have no text. Default False: it is their name.
    logprobs             0 to 20: every token has its log-probability, and this many of the most probable tokens.
                         Default None: none.
    prompt_logprobs      0 to 20: the same for the tokens of the prompt, in the result alone. Default None: none.

  Speed, which changes no token
    speculate            "auto", the default, "off", "chain" or "tree". Without a drafter "auto" is "off", and "chain"
                         and "tree" are errors.
    budget               Draft nodes per round without the root, 1 to the session's max_budget. Default None: 16 for
                         "tree", the drafter's block - 1 for "chain", 63 for "auto", which never uses more.
    spine                True: a tree always contains the drafter's best chain, counted inside the budget. Default
                         False.
    ranking              How candidates of a tree are ranked at temperature > 0: "plain", by the drafter's probability,
                         "noise", by it and the noise that the target samples with, or "auto", the default.
    priority             Any int32: lower is admitted earlier and preempted later; equal ones go in the order submitted.
                         Default 0.
  """

  max_tokens: int
  min_tokens: int
  temperature: float
  top_p: float
  top_k: int
  min_p: float
  seed: int | None
  choice: int
  repetition_penalty: float
  presence_penalty: float
  frequency_penalty: float
  logit_bias: Mapping[int, float] | None
  stop: str | Sequence[str] | None
  stop_token_ids: Sequence[int] | None
  ignore_eos: bool
  skip_special_tokens: bool
  logprobs: int | None
  prompt_logprobs: int | None
  speculate: Speculate
  budget: int | None
  spine: bool
  ranking: Ranking
  priority: int
  timeout: float | None


class GenerateOptions(SamplingOptions, total=False):
  """The keyword arguments of generate, stream, agenerate and astream: how the prompt is meant, and `SamplingOptions`.

  Prompt
    chat                 True: the prompt is one user turn in the model's chat format. Default False.
    thinking             With chat, whether the answer opens with reasoning. Default None: the model's default.
  """

  chat: bool
  thinking: bool | None


if GenerateOptions.__doc__ and SamplingOptions.__doc__:   # neither is there under python -OO
  GenerateOptions.__doc__ = GenerateOptions.__doc__.rstrip() + "\n\n" + SamplingOptions.__doc__.split("\n\n", 1)[1]


def request_options(
    api: _ffi.Api, prompt: Any, *, max_tokens: int = 128, min_tokens: int = 0, temperature: float = 0.0,
    top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, seed: int | None = None, choice: int = 0,
    repetition_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None, stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None, ignore_eos: bool = False,
    skip_special_tokens: bool = False, logprobs: int | None = None,
    prompt_logprobs: int | None = None, speculate: Speculate = "auto", budget: int | None = None, spine: bool = False,
    ranking: Ranking = "auto", priority: int = 0, timeout: float | None = None) -> tuple[Any, list[Any]]:
  """The struct, and what it points to: that must live until submit has copied it. `prompt`: an int32_t array."""
  lib = api.lib
  if not len(prompt):
    raise InvalidArgument("prompt: empty: expected at least one token")
  options = api.options("kdt_request_options", lib.kdt_request_options_init)
  options.prompt, options.n_prompt = prompt, len(prompt)
  _ffi.assign(
    options, max_tokens=max_tokens, min_tokens=min_tokens,
    temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, choice=choice,
    repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
    speculate=_choice(lib, "speculate", "KDT_SPECULATE_", speculate, ("auto", "off", "chain", "tree")),
    ranking=_choice(lib, "ranking", "KDT_RANKING_", ranking, ("auto", "plain", "noise")),
    spine=flag("spine", spine), ignore_eos=flag("ignore_eos", ignore_eos),
    skip_special_tokens=flag("skip_special_tokens", skip_special_tokens), priority=priority)
  for field, count in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
    if count is not None:
      if integer(field, count) < 0:
        raise InvalidArgument(f"{field}: {shown(count)}: expected 0 to 20, or None for none")
      _ffi.assign(options, **{field: count})
  if seed is not None:
    _ffi.assign(options, has_seed=1, seed=seed)
  if budget is not None:
    if integer("budget", budget) == 0:
      raise InvalidArgument("budget: 0: expected at least one node, or None for the default")
    _ffi.assign(options, budget=budget)
  if timeout is not None:
    _ffi.assign(options, timeout_ms=milliseconds("timeout", timeout))
  owned = [prompt]
  if logit_bias is not None:
    if not isinstance(logit_bias, Mapping):
      raise wrong_type("logit_bias", logit_bias, "a mapping of token ids to numbers")
    tokens = api.token_ids("logit_bias", logit_bias.keys())
    values = api.ffi.new("float[]", [number(f"logit_bias[{token}]", value) for token, value in logit_bias.items()])
    options.bias_tokens, options.bias_values, options.n_bias = tokens, values, len(tokens)
    owned += [tokens, values]
  if stop is not None:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, Iterable):
      raise wrong_type("stop", texts, "a string or several")
    strings = [_stop_string(api, i, text) for i, text in enumerate(texts)]
    options.stop = array = api.ffi.new("char *[]", strings)
    options.n_stop = len(strings)
    owned += [array, *strings]
  if stop_token_ids is not None:
    options.stop_tokens = ids = api.token_ids("stop_token_ids", stop_token_ids)
    options.n_stop_tokens = len(ids)
    owned.append(ids)
  return options, owned


def milliseconds(field: str, seconds: float) -> int:
  """Whole milliseconds, rounded up; InvalidArgument unless `seconds` is a positive number that an int32_t can hold."""
  if not 0 < number(field, seconds) <= _MAX_SECONDS:
    raise InvalidArgument(f"{field}: {shown(seconds)}: expected a positive number of seconds up to {_MAX_SECONDS}, or "
                          "None for no limit")
  return math.ceil(seconds * 1000)


def n_choices(n: int) -> int:
  """A number of choices; InvalidArgument unless positive."""
  if integer("n", n) < 1:
    raise InvalidArgument(f"n: {shown(n)}: expected at least 1")
  return n


def check_names(method: str, options: Mapping[str, Any]) -> None:
  """TypeError for a keyword argument of Session's `method` that is no option."""
  for name in options:
    if name not in GenerateOptions.__optional_keys__:
      raise unexpected(f"Session.{method}()", name, GenerateOptions.__optional_keys__, "one of GenerateOptions")


def unexpected(callee: str, name: str, known: Iterable[str], otherwise: str) -> TypeError:
  """For a keyword argument that there is not: with the one that is spelt most like it, or `otherwise`."""
  near = difflib.get_close_matches(name, sorted(known), n=1)
  return TypeError(f"{callee} got an unexpected option {name!r}: expected "
                   + (f"perhaps {near[0]!r}" if near else otherwise))


def _stop_string(api: _ffi.Api, index: int, text: str) -> Any:
  data = _ffi.utf8(f"stop[{index}]", text)
  if not data:
    raise InvalidArgument(f"stop[{index}]: empty: expected 1 to 1024 bytes")
  if b"\0" in data:
    raise InvalidArgument(f"stop[{index}]: {shown(text)}: expected a string without NUL")
  return api.ffi.new("char[]", data)


def _choice(lib: Any, field: str, prefix: str, value: str, choices: tuple[str, ...]) -> int:
  if not isinstance(value, str) or value not in choices:   # an array would compare each of its elements
    raise InvalidArgument(f"{field}: {shown(value)}: expected one of {', '.join(choices)}")
  return int(getattr(lib, prefix + value.upper()))
