"""Texts and conversations that a tokenizer or a chat format may get wrong."""

from typing import Any

# white space, contractions, digits, line ends, scripts and their mixes, combining marks, emoji, special
# tokens as plain text, runs, title case, numbers that are not digits
TEXTS = [
    "",
    " ",
    "\n",
    "\r\n",
    "\t\t x",
    "Hello, world!",
    "hello  world   three",
    "I'm you're they'LL we'd IT'S",
    "0 1 12 123 1234 12345678901234567890",
    "3.14159e-10",
    "x" * 300,
    " " * 300,
    "\n" * 50,
    "a\r\nb\rc\n\nd",
    "naïve café façade",
    "ÅÄÖ åäö ß ẞ",
    "Привет, мир",
    "γειά σου κόσμε",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "你好,世界",
    "汉字と仮名とabc混ぜる",
    "漢字漢字漢字",
    "カタカナひらがな",
    "한국어 문장",
    "👋🏽 👨‍👩‍👧‍👦 🇫🇮 e\u0301",
    "\u200b\u200d\ufeff",
    "\u00a0\u2003\u3000",
    "\u0000\u0001\u007f",
    "def f(x):\n    return x ** 2  # square\n",
    "if a<b and c>=d: {e: [f, g]}",
    "::= |> <| <|x|>",
    "<|im_end|>",
    "<|im_user|>user<|im_middle|>hi<|im_end|>",
    "[BOS][EOS]",
    "<think>not special</think>",
    "<|tool_calls_section_begin|>",
    "https://example.org/a?b=c&d=%20e#f",
    "C:\\path\\to\\file.txt",
    "CamelCaseAndSnake_case_MIXED",
    "ALLCAPS lower Title",
    "ǅ ǈ titlecase",
    "ⅫⅣ Ⅷ ½ ²",
    "१२३ ٤٥٦ 七八",
    "!!!???...;;;",
    "a" + "\u0301" * 40,
    "tail space ",
    " lead",
    "mixed\ttabs\tand  spaces \n  next",
    "\U0001F600" * 20,
    "zażółć gęślą jaźń",
    "fi ﬁ ﬂ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "x\u2028y\u2029z",
    "'s 's'S’s",
    "don’t",
    "100% sure: 1,000,000.00 €",
    "\ufffd\ufffd",
]


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def _result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


_TOOL = {
    "type": "function",
    "function": {
        "name": "f", "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}

CHATS: list[dict[str, Any]] = [
    {"messages": [_user("Hi  there\n\n  x ")]},
    {"messages": [_system("sys"), _user(" a "), _assistant("b\n"), _user("c")]},
    {"messages": [_user("q"), _assistant("r", reasoning_content="because"), _user("s")]},
    {"messages": [
        _user("w?"),
        _assistant("", reasoning_content="hm", tool_calls=[_call("functions.f:0")]),
        _result("functions.f:0", "42")]},
    {"messages": [
        _user("w?"),
        _assistant("let me see", tool_calls=[_call("functions.f:0"), _call("functions.f:1")]),
        _result("functions.f:0", "42"), _result("functions.f:1", "43"),
        _assistant("85"), _user("sure?")]},
    {"messages": [_user([
        {"type": "text", "text": "part one "}, {"type": "text", "text": "part two"}])]},
    {"messages": [_system(""), _user("")]},
    {"messages": [{"role": "user", "name": "ann", "content": "named"}]},
    {"messages": [_user("use it")], "tools": [_TOOL]},
]
