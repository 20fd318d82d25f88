"""Choose held-out prompts for the evaluation (step 7): of code, prose and chat.

Code prompts end after a `def` line (and its docstring), prose prompts within the first words of a
paragraph, chats before the assistant's last turn. At most two come from one file.
"""

import argparse
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NotRequired, TypedDict

from .cli import RecipeError, existing_file, existing_folder, positive_int, run_step, step_parser
from .documents import Document, Message, read_documents
from .files import write_json
from .tokenizer import encode_chat, load_tokenizer

SEED = 11
MAX_PER_FILE = 2
DEFINITION = re.compile(r'^( *)def \w+\(.*\):\n( *(?:r|u)?""".*"""\n)?', re.M)
PARAGRAPH = re.compile(r"\n\n([A-Z][^\n]{30,}\n[^\n]{30,})")


class Prompt(TypedDict):
    kind: str
    name: str
    text: NotRequired[str]
    messages: NotRequired[list[Message]]
    ids: NotRequired[list[int]]


def code_prompts(documents: Iterable[Document], rng: random.Random) -> Iterator[Prompt]:
    """About 450 characters before the end of a function's head, from the start of a line."""
    found = [
        (document, match.end())
        for document in documents for match in DEFINITION.finditer(document["text"])
        if match.start() > 300]
    rng.shuffle(found)
    for document, end in found:
        start = document["text"].rfind("\n", 0, max(1, end - 450)) + 1
        yield {"kind": "code", "name": document["name"], "text": document["text"][start:end]}


def prose_prompts(documents: Iterable[Document], rng: random.Random) -> Iterator[Prompt]:
    """About 350 characters before a paragraph and its first 40, to the end of a word."""
    found = [
        (document, match.start(1))
        for document in documents for match in PARAGRAPH.finditer(document["text"])
        if match.start() > 200]
    rng.shuffle(found)
    for document, position in found:
        text = document["text"]
        end = position + 40 + text[position + 40:].find(" ")
        start = text.rfind("\n", 0, max(1, position - 350)) + 1
        yield {"kind": "prose", "name": document["name"], "text": text[start:end]}


def chat_prompts(documents: Iterable[Document], rng: random.Random) -> Iterator[Prompt]:
    found = [d for d in documents if d["messages"][-1]["role"] == "assistant"]
    rng.shuffle(found)
    for document in found:
        yield {"kind": "chat", "name": document["name"], "messages": document["messages"]}


def is_code_answer(prompt: Prompt) -> bool:
    return "messages" in prompt and prompt["messages"][-1]["content"].startswith("```")


def first_of_each_file(prompts: Iterable[Prompt], n_prompts: int) -> list[Prompt]:
    """The first n_prompts, at most two of a file, at most half of them asking for code in a chat."""
    chosen: list[Prompt] = []
    used: Counter[str] = Counter()
    n_code_answers = 0
    for prompt in prompts:
        is_code = is_code_answer(prompt)
        if used[prompt["name"]] >= MAX_PER_FILE or (is_code and n_code_answers >= n_prompts // 2):
            continue
        used[prompt["name"]] += 1
        n_code_answers += is_code
        chosen.append(prompt)
        if len(chosen) == n_prompts:
            break
    return chosen


def parse_args() -> argparse.Namespace:
    parser = step_parser("choose_prompts", __doc__)
    parser.add_argument("--corpus", type=existing_file, required=True, help="output of corpus")
    parser.add_argument("--tokenizer", type=existing_folder, required=True,
                        help="folder with tiktoken.model and tokenizer_config.json")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--per-kind", type=positive_int, default=6, help="prompts of each kind")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    encoding = load_tokenizer(args.tokenizer)
    rng = random.Random(SEED)
    held_out = [d for d in read_documents(args.corpus) if d["split"] == "eval"]
    chosen: list[Prompt] = []
    for kind, candidates in (("code", code_prompts), ("prose", prose_prompts), ("chat", chat_prompts)):
        of_kind = candidates([d for d in held_out if d["kind"] == kind], rng)
        prompts = first_of_each_file(of_kind, args.per_kind)
        if not prompts:
            raise RecipeError(f"--corpus: {args.corpus}: expected held-out documents of kind {kind}")
        chosen += prompts
    for prompt in chosen:
        if "messages" in prompt:
            prompt["messages"] = prompt["messages"][:-1]
            prompt["ids"] = encode_chat(encoding, prompt["messages"], add_generation_prompt=True)
        else:
            prompt["ids"] = encoding.encode_ordinary(prompt["text"])
    write_json(args.out, chosen)
    counts = Counter(prompt["kind"] for prompt in chosen)
    print(f"{args.out}: {dict(counts)} prompts of {[len(prompt['ids']) for prompt in chosen]} tokens")


if __name__ == "__main__":
    run_step(main)
