"""Golden vectors of the tokenizer and the chat format (step 8).

tokenizer.json: [{text, ids}] by tiktoken's encode_ordinary. chat.json: [{messages, tools?, thinking?, text,
ids}] rendered by the model's chat_template.jinja with add_generation_prompt; ids with the special tokens
parsed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jinja2
import tiktoken
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .cli import existing_folder, run_step, step_parser
from .files import write_json
from .hard_texts import CHATS, TEXTS
from .tokenizer import load_tokenizer

THINKING: list[dict[str, bool]] = [{}, {"thinking": False}, {"thinking": True}]


def chat_template(folder: Path) -> jinja2.Template:
    """The template in an environment like that of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def tojson(value: Any, separators: tuple[str, str] | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, separators=separators)

    environment.filters["tojson"] = tojson
    return environment.from_string((folder / "chat_template.jinja").read_text(encoding="utf-8"))


def text_cases(encoding: tiktoken.Encoding) -> list[dict[str, Any]]:
    return [{"text": text, "ids": encoding.encode_ordinary(text)} for text in TEXTS]


def chat_cases(encoding: tiktoken.Encoding, template: jinja2.Template) -> list[dict[str, Any]]:
    cases = []
    for chat in CHATS:
        for thinking in THINKING:
            text = template.render(**chat, **thinking, add_generation_prompt=True)
            ids = encoding.encode(text, allowed_special="all")
            cases.append({**chat, **thinking, "text": text, "ids": ids})
    return cases


def parse_args() -> argparse.Namespace:
    parser = step_parser("golden_text", __doc__)
    parser.add_argument("--model", type=existing_folder, required=True, help="exported tiny-k2")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    encoding = load_tokenizer(args.model)
    texts, chats = text_cases(encoding), chat_cases(encoding, chat_template(args.model))
    write_json(args.out / "tokenizer.json", texts, indent=0, ascii_only=True)
    write_json(args.out / "chat.json", chats, indent=0, ascii_only=True)
    print(f"{args.out}: {len(texts)} texts, {len(chats)} chats")


if __name__ == "__main__":
    run_step(main)
