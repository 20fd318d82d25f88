"""Build the training corpus of tiny-k2 (step 1).

Sources, both under the PSF License Version 2:
  the CPython 3.11 standard library             (--stdlib, *.py, no site-packages)
  the CPython 3.11 documentation's rst sources  (--docs, Debian's python3.11-doc)

Writes one JSON-lines file (documents.py has its fields). About 2 % of the files are held out, by a hash of
the path so that the split is stable; chats made from a held-out file are held out with it.
"""

import argparse
import hashlib
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from .chat_from_code import chats_from_module, turns
from .chat_from_rst import chats_from_rst
from .cli import RecipeError, existing_folder, positive_int, run_step, step_parser
from .documents import Document, Message, n_bytes, write_documents
from .small_talk import SMALL_TALK, SYSTEM_MESSAGES

SKIPPED_FOLDERS = {
    "site-packages", "__pycache__", "lib-dynload", "config-3.11-x86_64-linux-gnu",
    "pydoc_data",  # a copy of the documentation as one string
    "cjkencodings", "bad_coding"}
SKIPPED_FILES = {"_sysconfigdata__linux_x86_64-linux-gnu.py"}
# encodings and generated tables: a taste is enough
TABLE = re.compile(
    r"^encodings/(cp|iso|mac_|koi|hp_|palm|ptcp|kz|tis)|^test/test_importlib/data|unicodedata|"
    r"^test/(test_stringprep|test_multibytecodec|.*_table|test_tk|cjkencodings)|keysym")
TEST = re.compile(r"(^|/)(test|tests|idle_test)/")
MIN_LENGTH, MAX_LENGTH, TASTE = 200, 400_000, 4000  # characters
HELD_OUT_PER_MILLE = 22
SMALL_TALK_WEIGHT = 20


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def is_held_out(name: str) -> bool:
    return _hash("tiny-k2:" + name) % 1000 < HELD_OUT_PER_MILLE


def is_kept(name: str, thin: int) -> bool:
    """Whether a file is in a corpus thinned to one training file in `thin`; held-out files stay."""
    return is_held_out(name) or _hash("thin:" + name) % thin == 0


def find_files(root: Path, suffix: str) -> list[Path]:
    """Files under root, folder by folder in the order of names: this order is the corpus's order."""
    found: list[Path] = []
    entries = sorted(root.iterdir(), key=lambda path: path.name)
    found += [path for path in entries if path.is_file() and path.name.endswith(suffix)]
    for path in entries:
        if path.is_dir() and not path.is_symlink() and path.name not in SKIPPED_FOLDERS:
            found += find_files(path, suffix)
    return found


def read_text(path: Path) -> str:
    """The file's text, or nothing when it is not UTF-8 or too short to be of use."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""
    return text if len(text) >= MIN_LENGTH else ""


def chat_document(name: str, split: str, weight: int, messages: list[Message]) -> Document:
    return {"kind": "chat", "split": split, "weight": weight, "name": name, "messages": messages}


def code_documents(stdlib: Path, thin: int) -> Iterator[Document]:
    for path in tqdm(find_files(stdlib, ".py"), desc="standard library", unit="file"):
        name = path.relative_to(stdlib).as_posix()
        text = read_text(path)
        if path.name in SKIPPED_FILES or not text or not is_kept(name, thin):
            continue
        if TABLE.search(name) or len(text) > MAX_LENGTH:
            text = text[:TASTE]
        is_test = bool(TEST.search(name))
        split = "eval" if is_held_out(name) else "train"
        yield {
            "kind": "test" if is_test else "code", "split": split, "weight": 1 if is_test else 2,
            "name": name, "text": text}
        if not is_test:
            module = name[:-3].replace("/", ".").removesuffix(".__init__")
            for messages in chats_from_module(module, text, random.Random(name)):
                yield chat_document(name, split, 2, messages)


def prose_documents(docs: Path, thin: int) -> Iterator[Document]:
    for path in tqdm(find_files(docs, ".rst.txt"), desc="documentation", unit="file"):
        name = "doc/" + path.relative_to(docs).as_posix()
        text = read_text(path)
        if not text or not is_kept(name, thin):
            continue
        split = "eval" if is_held_out(name) else "train"
        yield {"kind": "prose", "split": split, "weight": 2, "name": name, "text": text}
        for messages in chats_from_rst(text, random.Random(name)):
            yield chat_document(name, split, 2, messages)


def add_system_messages(documents: list[Document]) -> None:
    """Half of the chats start with a system message."""
    rng = random.Random(1)
    for document in documents:
        if document["kind"] == "chat" and rng.random() < 0.5:
            document["messages"].insert(0, {"role": "system", "content": rng.choice(SYSTEM_MESSAGES)})


def print_summary(documents: list[Document]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for document in documents:
        key = (document["split"], document["kind"])
        counts[key] += 1
        sizes[key] += n_bytes(document)
    for split, kind in sorted(counts):
        key = (split, kind)
        print(f"{split:6s} {kind:6s} {counts[key]:6d} documents {sizes[key] / 1e6:8.2f} MB")


def parse_args() -> argparse.Namespace:
    parser = step_parser("corpus", __doc__)
    parser.add_argument("--stdlib", type=existing_folder, default=sysconfig.get_paths()["stdlib"],
                        help="the standard library to read")
    parser.add_argument("--docs", type=existing_folder, required=True,
                        help="folder of python3.11-doc's *.rst.txt sources (html/_sources)")
    parser.add_argument("--out", type=Path, required=True, help="the JSON-lines file to write")
    parser.add_argument("--thin", type=positive_int, default=1,
                        help="keep one training file in this many (for a rehearsal)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    documents = [*code_documents(args.stdlib, args.thin), *prose_documents(args.docs, args.thin)]
    if not any(document["kind"] == "prose" for document in documents):
        raise RecipeError(f"--docs: {args.docs}: expected *.rst.txt files of python3.11-doc")
    for question, answer in SMALL_TALK:
        documents.append(chat_document("smalltalk", "train", SMALL_TALK_WEIGHT, turns(question, answer)))
    add_system_messages(documents)
    write_documents(args.out, documents)
    print_summary(documents)


if __name__ == "__main__":
    run_step(main)
