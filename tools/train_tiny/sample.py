"""Print what an exported tiny-k2 says to a few code, prose and chat prompts."""

import argparse

import tiktoken
import torch

from .checkpoint import load_target
from .cli import existing_folder, positive_int, run_step, step_parser
from .decoding import decode_plainly
from .tokenizer import encode_chat, load_tokenizer, stop_ids

TEXTS = [
    'import os\n\ndef walk_files(path):\n    """Yield all files below path."""\n    for ',
    "The :mod:`json` module ",
    "class Stack:\n    def __init__(self):\n"]
QUESTIONS = [
    "What does the Python module `heapq` do?",
    "What does `os.path.join` do?",
    "Who are you?",
    "What does `textwrap.dedent` do?",
    "Write a Python function `add(a, b)` that does this: return the sum of a and b.",
    "Write a Python function `is_prime(n)` that does this: return True if n is a prime number."]
TEMPERATURES = (0.0, 0.8)
SEED = 1


def parse_args() -> argparse.Namespace:
    parser = step_parser("sample", __doc__)
    parser.add_argument("--model", type=existing_folder, required=True, help="exported tiny-k2")
    parser.add_argument("--new", type=positive_int, default=100, help="most tokens of an answer")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    target = load_target(args.model)
    encoding: tiktoken.Encoding = load_tokenizer(args.model)
    stop = stop_ids(encoding)

    def answer(ids: list[int], temperature: float) -> str:
        generator = torch.Generator().manual_seed(SEED)
        new = decode_plainly(target, ids, args.new, temperature, stop, generator)
        return encoding.decode([token for token in new if token not in stop])

    for text in TEXTS:
        for temperature in TEMPERATURES:
            print(f"===== T={temperature}\n{text}{answer(encoding.encode_ordinary(text), temperature)}")
    for question in QUESTIONS:
        ids = encode_chat(encoding, [{"role": "user", "content": question}], add_generation_prompt=True)
        print(f"##### {question}\n{answer(ids, 0.0)}")


if __name__ == "__main__":
    run_step(main)
