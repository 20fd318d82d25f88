"""Train tiny-k2's tokenizer on the corpus (step 2).

Byte-level BPE by Hugging Face's `tokenizers`, written in tiktoken's form, and checked to encode exactly as
the trained one on a sample of the corpus and some hard strings.
"""

import argparse
import base64
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from .cli import RecipeError, existing_file, positive_int, run_step, step_parser
from .documents import Document, read_documents
from .files import write_text
from .special_tokens import NAMED
from .tokenizer import CONFIG_FILE, MODEL_FILE, PATTERN, load_tokenizer

N_SAMPLE = 800
SAMPLE_CHARACTERS = 20_000
HARD_STRINGS = [
    "", " ", "\n\n  x", "中文English混合 123456", "naïve café – “quotes” 😀 don't I'LL we've",
    "\t\tif x:\r\n\r\n", "a" * 300]
ADDITIONAL_SPECIAL_TOKENS = [
    "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|start_header_id|>", "<|end_header_id|>", "[EOT]",
    "<|im_system|>", "<|im_middle|>"]


def training_text(document: Document) -> str:
    if "text" in document:
        return document["text"]
    return "\n".join(message["content"] for message in document["messages"])


def training_texts(corpus: Path) -> list[str]:
    """Texts of the training documents; tests of the standard library count once, the rest twice."""
    texts: list[str] = []
    for document in read_documents(corpus):
        if document["split"] == "train":
            texts += [training_text(document)] * (1 if document["kind"] == "test" else 2)
    return texts


def train_bpe(texts: list[str], n_ranks: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_ranks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[],
        show_progress=False)
    progress = tqdm(texts, desc="reading for BPE", unit="text")
    tokenizer.train_from_iterator(progress, trainer)
    return tokenizer


def byte_of_character() -> dict[str, int]:
    """GPT-2's printable alphabet of bytes: the printable ones as themselves, the others from U+0100."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


def ranked_tokens(tokenizer: Tokenizer, n_ranks: int) -> list[bytes]:
    """The tokens' bytes in the order of their ranks."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if [rank for _, rank in vocabulary] != list(range(n_ranks)):
        raise RecipeError(
            f"--base: {n_ranks}: expected as many tokens, but the corpus gave {len(vocabulary)}; "
            "use a larger corpus or fewer ranks")
    byte_of = byte_of_character()
    return [bytes(byte_of[character] for character in token) for token, _ in vocabulary]


def tokenizer_config(base: int) -> dict[str, Any]:
    """tokenizer_config.json as Kimi's checkpoints have it."""
    added = {
        str(base + offset): {
            "content": content, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": special}
        for offset, (content, special) in sorted(NAMED.items())}
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": ADDITIONAL_SPECIAL_TOKENS,
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]"}


def check_export(tokenizer: Tokenizer, folder: Path, texts: list[str]) -> None:
    """The written files must encode as the trained tokenizer does, and decode to the same text."""
    rng = random.Random(0)
    random_text = "".join(chr(rng.randrange(1, 0x2FFF)) for _ in range(2000))
    sample = [text[:SAMPLE_CHARACTERS] for text in rng.sample(texts, min(N_SAMPLE, len(texts)))]
    encoding = load_tokenizer(folder)
    n_tokens = 0
    for text in tqdm([*HARD_STRINGS, random_text, *sample], desc="checking", unit="text"):
        ids = encoding.encode_ordinary(text)
        n_tokens += len(ids)
        if ids != tokenizer.encode(text, add_special_tokens=False).ids:
            raise RecipeError(f"{folder}: {text[:60]!r}: expected the ids of the trained tokenizer")
        if encoding.decode_bytes(ids) != text.encode():
            raise RecipeError(f"{folder}: {text[:60]!r}: expected to decode to itself")
    print(f"{encoding.n_vocab} tokens; tiktoken and tokenizers agree on {n_tokens} tokens of text")


def parse_args() -> argparse.Namespace:
    parser = step_parser("train_tokenizer", __doc__)
    parser.add_argument("--corpus", type=existing_file, required=True, help="output of corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two tokenizer files")
    parser.add_argument("--base", type=positive_int, default=1792, help="ranks, without the 256 reserved")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    texts = training_texts(args.corpus)
    tokenizer = train_bpe(texts, args.base)
    lines = [
        base64.b64encode(token).decode() + f" {rank}\n"
        for rank, token in enumerate(ranked_tokens(tokenizer, args.base))]
    write_text(args.out / MODEL_FILE, "".join(lines))
    config = json.dumps(tokenizer_config(args.base), indent=2, ensure_ascii=False)
    write_text(args.out / CONFIG_FILE, config + "\n")
    check_export(tokenizer, args.out, texts)


if __name__ == "__main__":
    run_step(main)
