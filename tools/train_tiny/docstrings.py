"""Small cuts of docstrings."""

import re
import textwrap


def first_paragraph(doc: str, limit: int = 600) -> str:
    """The first paragraph, or nothing when it is longer than limit characters."""
    paragraph = re.split(r"\n\s*\n", textwrap.dedent(doc).strip())[0].strip()
    return paragraph if len(paragraph) <= limit else ""


def first_sentence(doc: str) -> str:
    """The first sentence on one line, or nothing when it is too short or too long to be one."""
    paragraph = one_line(first_paragraph(doc, 100_000))
    match = re.match(r"(.+?[.!?])(\s|$)", paragraph)
    sentence = (match.group(1) if match else paragraph).strip()
    return sentence if 12 <= len(sentence) <= 200 else ""


def one_line(text: str) -> str:
    return " ".join(text.split())


def as_clause(sentence: str) -> str:
    """Lower the first letter (not of an abbreviation) and drop the full stop."""
    if len(sentence) > 1 and sentence[0].isupper() and sentence[1].islower():
        sentence = sentence[0].lower() + sentence[1:]
    return sentence.rstrip(".")
