"""Question/answer pairs from the documentation's reST: module synopses and object directives."""

import random
import re
from collections.abc import Iterator

from .chat_from_code import turns
from .docstrings import one_line
from .documents import Message

SYNOPSIS = re.compile(r"^\.\. module:: (\S+)\n(?:   .*\n)*?   :synopsis: (.+)$", re.M)
MODULE = re.compile(r"^\.\. (?:module|currentmodule):: (\S+)", re.M)
OBJECT = re.compile(
    r"^\.\. (function|class|method|data|exception|attribute|decorator):: (.+)$", re.M)
ROLE = re.compile(r":(?:\w+:)?\w+:`[~!]?([^`<]+?)(?: ?<[^>]+>)?`")
MIN_ANSWER, MAX_ANSWER = 25, 700  # characters


def chats_from_rst(text: str, rng: random.Random) -> Iterator[list[Message]]:
    synopsis = SYNOPSIS.search(text)
    if synopsis:
        name, line = synopsis.group(1), synopsis.group(2).strip().rstrip(".")
        yield turns(
            f"What is `{name}` in Python?", f"`{name}` is a module of the Python standard library: {line}.")
    module_match = MODULE.search(text)
    module = module_match.group(1) if module_match else None
    for match in OBJECT.finditer(text):
        answer = _answer(text[match.end():])
        if MIN_ANSWER <= len(answer) <= MAX_ANSWER:
            yield turns(_question(match.group(1), match.group(2).strip(), module, rng), answer)


def _answer(after: str) -> str:
    """The first prose paragraph of the directive whose body starts after its first line."""
    body = []
    for line in after.split("\n")[1:]:
        if line.strip() and not line.startswith("   "):
            break
        body.append(line[3:])
    for paragraph in re.split(r"\n\s*\n", "\n".join(body).strip("\n")):
        if paragraph.strip() and not paragraph.lstrip().startswith((".. ", ":")):
            return ROLE.sub(r"`\1`", one_line(paragraph)).replace("``", "`")
    return ""


def _question(kind: str, signature: str, module: str | None, rng: random.Random) -> str:
    name = signature.split("(")[0].strip()
    qualified = name if module is None or name.startswith(module) else f"{module}.{name}"
    if kind in ("function", "method", "decorator"):
        return rng.choice([
            f"What does `{qualified}` do?",
            f"What does the Python function `{qualified}` do?",
            f"How do I use `{signature}`?"])
    return rng.choice([f"What is `{qualified}`?", f"Explain `{qualified}` in Python."])
