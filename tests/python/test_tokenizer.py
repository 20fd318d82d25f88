"""Token ids of text and of chats: equal to tiktoken's, built from the same files as Kimi's own tokenizer builds it."""

import base64
import json
import random

import pytest
import tiktoken
from hypothesis import HealthCheck, example, given, settings, strategies as st

from conftest import FULL, MODELS, golden

PATTERN = "|".join([
  r"[\p{Han}]+",
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
  r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
  r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
  r"\p{N}{1,3}",
  r" ?[^\s\p{L}\p{N}]+[\r\n]*",
  r"\s*[\r\n]+",
  r"\s+(?!\S)",
  r"\s+",
])
MAX_PIECE = 400_000   # characters that Kimi's tokenizer hands to tiktoken at once
MAX_RUN = 25_000      # characters of one kind, white space or not, in a row


@pytest.fixture(scope="module")
def reference():
  """tiktoken with the bundled model's ranks and special tokens."""
  ranks = {}
  for line in (MODELS / "tiny-k2" / "tiktoken.model").read_bytes().splitlines():
    if line.strip():
      token, rank = line.split()
      ranks[base64.b64decode(token)] = int(rank)
  config = json.loads((MODELS / "tiny-k2" / "tokenizer_config.json").read_text(encoding="utf-8"))
  named = {int(i): token["content"] for i, token in config["added_tokens_decoder"].items()}
  special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), len(ranks) + 256)}
  return tiktoken.Encoding("tiny-k2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def kimi_splits(text):
  """The pieces that Kimi's tokenizer encodes one by one."""
  for begin in range(0, len(text), MAX_PIECE):
    piece = text[begin:begin + MAX_PIECE]
    start, run, is_space = 0, 0, piece[0].isspace()
    for i, character in enumerate(piece):
      if character.isspace() != is_space:
        is_space, run = not is_space, 1
        continue
      run += 1
      if run > MAX_RUN:
        yield piece[start:i]
        start, run = i, 1
    yield piece[start:]


def expected_ids(reference, text):
  return [token for piece in kimi_splits(text) for token in reference.encode_ordinary(piece)]


def check(session, reference, text):
  ids = session.tokenize(text)
  assert ids == expected_ids(reference, text)
  assert session.detokenize(ids) == text


@pytest.mark.parametrize("case", golden("tokenizer.json"), ids=range(60))
def test_golden_strings(session, reference, case):
  assert session.tokenize(case["text"]) == case["ids"]
  check(session, reference, case["text"])


# Characters of every class that the pattern tells apart, and those next to them.
TRICKY = ("aZéßǅʰªן中々〇㐀𠀀豈ー한あा0٣Ⅷ²½'’ \t\n\r\v\f\x1c\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000\ufeff\u0301"
          "\u200b\u200d!_-\"😀👩🏽\u2640\ufe0f\U000e0001\U0010ffff\0\x7f<|>[]")
WORDS = ["'s", "'LL", "'ve", "\r\n", "\n\n", "  ", "def ", "中文", "<|im_end|>", "[EOS]", "123456", "naïve", "\t\t",
         "ſ", "K's", "'ſ"]

text_of_everything = st.lists(
  st.one_of(st.text(max_size=8), st.text(TRICKY, max_size=12), st.sampled_from(WORDS),
            st.builds(str.__mul__, st.sampled_from(TRICKY), st.integers(1, 40))),
  max_size=24).map("".join)


@settings(max_examples=5000 if FULL else 500, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=text_of_everything)
@example(text="\ufeff\u200d'S 'ſ K's")
def test_random_text(session, reference, text):
  check(session, reference, text)


def test_every_assigned_plane_in_order(session, reference):
  """All code points, in blocks, each beside a letter, a digit and a space."""
  everything = [c for c in range(0x110000 if FULL else 0x3400) if not 0xD800 <= c < 0xE000]
  for begin in range(0, len(everything), 512):
    block = [chr(c) for c in everything[begin:begin + 512]]
    check(session, reference, "".join(block))
    check(session, reference, "".join(f"a{c}B{c} 1{c}" for c in block))


@pytest.mark.parametrize("run", ["a", "Z", "7", " ", "\n", "\t ", "中", "😀", "=", "é", "\r\n", "aB", "ab1", "-\n",
                                 "\u3000"], ids=ascii)
def test_a_line_of_one_run_of_100_kb(session, reference, run):
  """As one run, and on both sides of the lengths at which runs are split."""
  size = 100_000 // len(run.encode())
  check(session, reference, run * (size // len(run) + 1))
  for length in (MAX_RUN - 1, MAX_RUN, MAX_RUN + 1, 2 * MAX_RUN + 1):
    check(session, reference, "x " + (run * length)[:length] + " y")


def test_text_longer_than_one_piece(session, reference):
  source = random.Random(5)
  words = ["def f(x):\n", "  return x\n", "中文 ", "😀 ", "12345 ", "\r\n", "don't "]
  text = "".join(source.choice(words) for _ in range(120_000))
  assert len(text) > MAX_PIECE
  assert session.tokenize(text) == expected_ids(reference, text)


@pytest.mark.parametrize("case", [c for c in golden("chat.json") if "thinking" in c], ids=range(18))
def test_golden_chats(session, case):
  ids = session.chat_tokens(case["messages"], case.get("tools"), case["thinking"])
  assert ids == case["ids"]
  assert session.detokenize(ids) == case["text"]


def test_the_bundled_model_does_not_think_by_default(session):
  messages = [{"role": "user", "content": "hello"}]
  assert session.chat_tokens(messages) == session.chat_tokens(messages, thinking=False)
  assert session.chat_tokens(messages) != session.chat_tokens(messages, thinking=True)


@settings(max_examples=500 if FULL else 100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(text_of_everything, min_size=1, max_size=5))
def test_no_control_token_comes_from_a_message(session, reference, turns):
  messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": turn} for i, turn in enumerate(turns)]
  plain = [{**message, "content": ""} for message in messages]
  first_special = min(reference.encode_single_token(name) for name in reference.special_tokens_set)
  controls = lambda ids: [i for i in ids if i >= first_special]
  assert controls(session.chat_tokens(messages, thinking=True)) == controls(session.chat_tokens(plain, thinking=True))
