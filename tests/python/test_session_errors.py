"""pyclient.Session refuses what is wrong, by type and message."""

import pytest

from pyclient import ContextLength, InvalidArgument, KdtreeError, ReadFailed, Session

PROMPT = "def add(a, b):\n"


def vocabulary(session):
  return session.score([0]).shape[1]


@pytest.mark.parametrize("options, kind, words", [
  ({"max_tokens": 0}, InvalidArgument, "max_tokens"),
  ({"max_tokens": -1}, InvalidArgument, "max_tokens"),
  ({"max_tokens": 2**31 - 1}, ContextLength, "max_tokens"),
  ({"max_tokens": 10**30}, InvalidArgument, "max_tokens"),
  ({"temperature": -0.5}, InvalidArgument, "temperature"),
  ({"temperature": float("nan")}, InvalidArgument, "temperature"),
  ({"temperature": float("inf")}, InvalidArgument, "temperature"),
  ({"top_p": 0.0}, InvalidArgument, "top_p"),
  ({"top_p": float("nan")}, InvalidArgument, "top_p"),
  ({"top_k": -1}, InvalidArgument, "top_k"),
  ({"min_p": 1.5}, InvalidArgument, "min_p"),
  ({"seed": -1}, InvalidArgument, "seed"),
  ({"seed": 2**64}, InvalidArgument, "seed"),
  ({"budget": 0}, InvalidArgument, "budget"),
  ({"budget": -1}, InvalidArgument, "budget"),
  ({"budget": 2**31 - 1, "speculate": "tree"}, InvalidArgument, "budget"),
  ({"speculate": "fast"}, InvalidArgument, "speculate"),
  ({"ranking": "best"}, InvalidArgument, "ranking"),
  ({"thinking": True}, InvalidArgument, "thinking"),
])
def test_a_bad_setting_is_named(session, options, kind, words):
  with pytest.raises(kind, match=words) as caught:
    session.generate(PROMPT, **options)
  assert isinstance(caught.value, KdtreeError) and isinstance(caught.value, ValueError)
  assert "expected" in str(caught.value)


@pytest.mark.parametrize("prompt", [[], "", [-1], [10**6], [2**40], [0, -(2**31)], "\ud800"])
def test_a_bad_prompt_is_named(session, prompt):
  with pytest.raises(InvalidArgument, match="expected"):
    session.generate(prompt)


@pytest.mark.parametrize("prompt", [[1.5], ["a"], b"bytes", None])
def test_a_prompt_of_the_wrong_type_is_a_type_error(session, prompt):
  with pytest.raises(TypeError):
    session.generate(prompt)


def test_ids_outside_the_vocabulary(session):
  size = vocabulary(session)
  for wrong in (size, -1, 2**31 - 1, -(2**31), 2**63):
    for call in (session.detokenize, session.score, lambda ids: session.generate(ids, max_tokens=1)):
      with pytest.raises(InvalidArgument, match=str(wrong)):
        call([0, wrong])


def test_what_does_not_fit_the_context(session):
  limit = 4096
  ids = session.tokenize("x = 1\n") * limit
  with pytest.raises(ContextLength, match="expected"):
    session.generate(ids[:limit + 1], max_tokens=1)
  with pytest.raises(ContextLength, match="expected"):
    session.generate(ids[:100], max_tokens=limit - 99)
  with pytest.raises((ContextLength, InvalidArgument), match="expected"):
    session.score(ids[:limit + 1])
  with pytest.raises(InvalidArgument):
    session.score([])
  assert session.generate(ids[:limit - 1], max_tokens=1, ignore_eos=True).finish_reason == "length"


@pytest.mark.parametrize("messages", [
  {"role": "user"}, "text", [1], [{"content": "x"}], [{"role": "user", "content": 5}],
  [{"role": "user", "content": "\ud800"}], [{"role": "user", "content": object()}]])
def test_bad_messages_are_named(session, messages):
  with pytest.raises(InvalidArgument, match="expected"):
    session.chat_tokens(messages)


def test_bad_session_settings_are_named(tmp_path):
  with pytest.raises(ReadFailed, match="expected") as caught:
    Session(model=tmp_path / "absent")
  assert isinstance(caught.value, OSError) and "absent" in str(caught.value)
  for settings in ({"threads": -1}, {"threads": 10**12}, {"max_budget": 4096}, {"prefill_chunk": 5000},
                   {"max_context": -1}, {"chat_format": "xml"}, {"cpu_target": "Z80"}, {"model": "a\0b"},
                   {"cpu_target": "AVX2\0b"}, {"backend": "cpu\0b"}, {"chat_format": "json\0b"}):
    with pytest.raises(InvalidArgument, match=next(iter(settings))):
      Session(**settings)
