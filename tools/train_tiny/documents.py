"""The corpus file: one JSON object a line, one document each."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NotRequired, TypedDict

KINDS = ("code", "test", "prose", "chat")


class Message(TypedDict):
    role: str
    content: str


class Document(TypedDict):
    kind: str  # one of KINDS
    split: str  # "train" or "eval"
    weight: int  # how often the document appears in one epoch
    name: str  # the file that it comes from
    text: NotRequired[str]  # code, test, prose
    messages: NotRequired[list[Message]]  # chat


def read_documents(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def write_documents(path: Path, documents: list[Document]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")


def n_bytes(document: Document) -> int:
    """UTF-8 bytes of the text, or of all message contents."""
    if "text" in document:
        return len(document["text"].encode())
    return sum(len(message["content"].encode()) for message in document["messages"])
