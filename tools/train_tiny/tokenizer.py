"""tiny-k2's tokenizer as a tiktoken Encoding: Kimi's layout at 1/80 of its size.

Byte-level BPE by ranks with Kimi's pre-tokenisation pattern, read from tiktoken.model (base64 token, space,
rank; one a line) and tokenizer_config.json (`added_tokens_decoder`), as Kimi's tokenization code does.
"""

import base64
from collections.abc import Sequence
from pathlib import Path

import tiktoken

from .documents import Message
from .files import read_json
from .special_tokens import N_RESERVED

MODEL_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join([
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])

ROLE_TOKENS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
OTHER_ROLE_TOKEN = "<|im_system|>"


def load_tokenizer(folder: Path) -> tiktoken.Encoding:
    """The Encoding of a folder that holds MODEL_FILE and CONFIG_FILE."""
    ranks = {}
    for line in (folder / MODEL_FILE).read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    base = len(ranks)
    added = read_json(folder / CONFIG_FILE)["added_tokens_decoder"]
    named = {int(token_id): entry["content"] for token_id, entry in added.items()}
    special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(base, base + N_RESERVED)}
    return tiktoken.Encoding(
        "tiny-k2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def stop_ids(encoding: tiktoken.Encoding) -> set[int]:
    return {encoding.encode_single_token(content) for content in ("[EOS]", "<|im_end|>")}


def encode_chat(
    encoding: tiktoken.Encoding, messages: Sequence[Message], add_generation_prompt: bool = False
) -> list[int]:
    """Kimi K2.5's chat format with an empty <think></think> in every assistant turn.

    Control tokens become ids; contents are encoded as ordinary text, so nothing in them can be a control
    token.
    """
    token = encoding.encode_single_token
    ids: list[int] = []

    def open_turn(role: str) -> None:
        ids.append(token(ROLE_TOKENS.get(role, OTHER_ROLE_TOKEN)))
        ids.extend(encoding.encode_ordinary(role))
        ids.append(token("<|im_middle|>"))
        if role == "assistant":
            ids.extend((token("<think>"), token("</think>")))

    for message in messages:
        open_turn(message["role"])
        ids.extend(encoding.encode_ordinary(message["content"]))
        ids.append(token("<|im_end|>"))
    if add_generation_prompt:
        open_turn("assistant")
    return ids
