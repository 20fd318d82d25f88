"""Question/answer pairs derived mechanically from a Python module's docstrings and functions."""

import ast
import random
import textwrap
from collections.abc import Iterator

from .docstrings import as_clause, first_paragraph, first_sentence, one_line
from .documents import Message

MIN_PARAGRAPH = 21  # characters
MIN_FUNCTION, MAX_FUNCTION = 60, 3000  # characters
SHARE_WITH_SIGNATURE, SHARE_WITH_NAME = 0.55, 0.8  # cumulative; the rest asks what the function does
SHARE_SECOND_TURN = 0.3


def turns(*contents: str) -> list[Message]:
    """Alternate user and assistant messages."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def chats_from_module(module: str, source: str, rng: random.Random) -> Iterator[list[Message]]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # the standard library holds broken test inputs
        return
    paragraph = first_paragraph(ast.get_docstring(tree) or "", 700)
    if len(paragraph) >= MIN_PARAGRAPH:
        question = rng.choice([
            f"What does the Python module `{module}` do?",
            f"What is the `{module}` module for?",
            f"Describe the Python module `{module}`."])
        yield turns(question, paragraph)
    yield from _chats_in(tree, None, module, source.splitlines(), rng)


def _chats_in(
    node: ast.AST, class_name: str | None, module: str, lines: list[str], rng: random.Random
) -> Iterator[list[Message]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _class_chats(child, module, rng)
            yield from _chats_in(child, child.name, module, lines, rng)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _function_chats(child, class_name, module, lines, rng)


def _class_chats(node: ast.ClassDef, module: str, rng: random.Random) -> Iterator[list[Message]]:
    paragraph = first_paragraph(ast.get_docstring(node) or "")
    if len(paragraph) >= MIN_PARAGRAPH and not node.name.startswith("_"):
        question = rng.choice([
            f"What is the class `{node.name}` in `{module}`?",
            f"Explain the class `{module}.{node.name}`."])
        yield turns(question, one_line(paragraph))


def _function_chats(
    node: ast.FunctionDef | ast.AsyncFunctionDef, class_name: str | None, module: str, lines: list[str],
    rng: random.Random,
) -> Iterator[list[Message]]:
    doc = ast.get_docstring(node) or ""
    sentence = first_sentence(doc)
    code = textwrap.dedent("\n".join(lines[node.lineno - 1:node.end_lineno]))
    if not sentence or not MIN_FUNCTION <= len(code) <= MAX_FUNCTION:
        return
    form = rng.random()
    if form >= SHARE_WITH_NAME:
        qualified = f"{class_name or module}.{node.name}"
        yield turns(f"What does `{qualified}` do?", one_line(first_paragraph(doc)) or sentence)
        return
    what = "method" if class_name else "function"
    where = f" of the class `{class_name}`" if class_name else ""
    task = as_clause(sentence)
    if form < SHARE_WITH_SIGNATURE:
        signature = f"{node.name}({ast.unparse(node.args)})"
        question = f"Write a Python {what} `{signature}`{where} that does this: {task}."
    else:
        question = f"Write a Python {what} `{node.name}`{where}: {task}."
    answer = f"```python\n{code}\n```"
    yield turns(question, answer)
    if rng.random() < SHARE_SECOND_TURN:
        yield turns(question, answer, "What does it do?", sentence)
