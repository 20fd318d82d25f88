"""Kimi K2.5's special tokens: 256 reserved ids directly after the base vocabulary.

Id = base + offset; an id without a name is `<|reserved_token_{id}|>`.
"""

N_RESERVED = 256

# offset -> (content, the `special` flag of tokenizer_config.json)
NAMED = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    6: ("<|start_header_id|>", True),
    7: ("<|end_header_id|>", True),
    9: ("[EOT]", True),
    10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False),
    12: ("<|tool_calls_section_end|>", False),
    13: ("<|tool_call_begin|>", False),
    14: ("<|tool_call_argument_begin|>", False),
    15: ("<|tool_call_end|>", False),
    17: ("<|im_middle|>", True),
    18: ("<|media_begin|>", True),
    19: ("<|media_content|>", True),
    20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True),
    22: ("<think>", False),
    23: ("</think>", False),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}

_OFFSETS = {content: offset for offset, (content, _) in NAMED.items()}


def special_id(content: str, base: int) -> int:
    """The id of a named special token after a base vocabulary of that many ranks."""
    return base + _OFFSETS[content]
