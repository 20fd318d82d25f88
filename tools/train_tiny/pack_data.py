"""Pack the tokenised corpus into one file for the training machine (step 3).

data.npz: tokens uint16 (all training documents, one after another), offsets int64 [documents + 1],
weights int64, kinds uint8 (index into documents.KINDS), and eval_<kind> uint16, the held-out streams.
A file is [BOS] text [EOS]; a chat is the chat format and [EOS].
data.json: counts, and the held-out streams' sizes in bytes (for bits per byte).
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tqdm import tqdm

from .cli import existing_file, existing_folder, run_step, step_parser
from .documents import KINDS, Document, n_bytes, read_documents
from .files import write_json
from .tokenizer import encode_chat, load_tokenizer


def encode_document(encoding: tiktoken.Encoding, document: Document) -> np.ndarray:
    """uint16 [n]."""
    bos, eos = (encoding.encode_single_token(content) for content in ("[BOS]", "[EOS]"))
    if "text" in document:
        ids = [bos, *encoding.encode_ordinary(document["text"]), eos]
    else:
        ids = [*encode_chat(encoding, document["messages"]), eos]
    return np.array(ids, dtype=np.uint16)


def pack(corpus: Path, encoding: tiktoken.Encoding) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of data.npz and the content of data.json."""
    train: list[np.ndarray] = []
    weights: list[int] = []
    kinds: list[int] = []
    held_out: dict[str, list[np.ndarray]] = {}
    held_out_bytes: dict[str, int] = {}
    for document in tqdm(read_documents(corpus), desc="encoding", unit="document"):
        kind, ids = document["kind"], encode_document(encoding, document)
        if document["split"] == "train":
            train.append(ids)
            weights.append(document["weight"])
            kinds.append(KINDS.index(kind))
        else:
            held_out.setdefault(kind, []).append(ids)
            held_out_bytes[kind] = held_out_bytes.get(kind, 0) + n_bytes(document)
    offsets = np.concatenate(([0], np.cumsum([len(ids) for ids in train]))).astype(np.int64)
    arrays = {
        "tokens": np.concatenate(train), "offsets": offsets, "weights": np.array(weights, np.int64),
        "kinds": np.array(kinds, np.uint8)}
    for kind, streams in held_out.items():
        arrays[f"eval_{kind}"] = np.concatenate(streams)
    info = {
        "unique_tokens": int(offsets[-1]),
        "epoch_tokens": int((np.diff(offsets) * arrays["weights"]).sum()),
        "documents": len(weights),
        "eval": {
            kind: {"tokens": len(arrays[f"eval_{kind}"]), "bytes": held_out_bytes[kind]}
            for kind in held_out}}
    return arrays, info


def parse_args() -> argparse.Namespace:
    parser = step_parser("pack_data", __doc__)
    parser.add_argument("--corpus", type=existing_file, required=True, help="output of corpus")
    parser.add_argument("--tokenizer", type=existing_folder, required=True,
                        help="output of train_tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="data.npz; data.json is written beside it")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    arrays, info = pack(args.corpus, load_tokenizer(args.tokenizer))
    np.savez_compressed(args.out, **arrays)
    write_json(args.out.with_suffix(".json"), info)
    print(f"{args.out}: {info['unique_tokens']} tokens in {info['documents']} documents, "
          f"{info['epoch_tokens']} an epoch; held out {info['eval']}")


if __name__ == "__main__":
    run_step(main)
