"""Held-out loss, perplexity and bits per byte of an exported tiny-k2, on a CPU in fp32 (step 7)."""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from .checkpoint import load_target
from .cli import existing_file, existing_folder, positive_int, run_step, step_parser
from .documents import KINDS
from .files import read_json, write_json
from .target import TinyK2


@torch.no_grad()
def mean_loss(target: TinyK2, tokens: torch.Tensor, window: int, name: str) -> tuple[float, int]:
    """tokens [n] in windows, each from an empty context -> (mean loss per token, tokens counted)."""
    total, n_counted = 0.0, 0
    for start in tqdm(range(0, len(tokens) - 1, window), desc=name, unit="window"):
        labels = tokens[start + 1:start + 1 + window]
        if len(labels) < 2:
            continue
        inputs = tokens[start:start + len(labels)]
        logits = target(inputs[None]).out[0]
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        n_counted += len(labels)
    return total / n_counted, n_counted


def parse_args() -> argparse.Namespace:
    parser = step_parser("evaluate_loss", __doc__)
    parser.add_argument("--model", type=existing_folder, required=True, help="exported tiny-k2")
    parser.add_argument("--data", type=existing_file, required=True,
                        help="data.npz of pack_data, with data.json beside it")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--window", type=positive_int, default=2048, help="tokens of a window")
    parser.add_argument("--max-tokens", type=positive_int, default=1_000_000, help="of each kind")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    target = load_target(args.model)
    data = np.load(args.data)
    sizes = read_json(args.data.with_suffix(".json"))["eval"]
    results = {}
    for kind in KINDS:
        tokens = torch.from_numpy(data[f"eval_{kind}"][:args.max_tokens].astype(np.int64))
        loss, n_counted = mean_loss(target, tokens, args.window, kind)
        bytes_per_token = sizes[kind]["bytes"] / sizes[kind]["tokens"]
        results[kind] = {
            "loss": loss, "bits_per_byte": loss / math.log(2) / bytes_per_token,
            "perplexity": math.exp(loss), "tokens": n_counted, "bytes_per_token": bytes_per_token}
        print(kind, {name: round(value, 4) for name, value in results[kind].items()})
    write_json(args.out, results)


if __name__ == "__main__":
    run_step(main)
