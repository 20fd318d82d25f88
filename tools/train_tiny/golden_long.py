"""long.npz: a golden vector of a context far past the drafter's window (step 8).

As golden.py's files, without expert_weights, hidden_last and margin, and with `logits` only at `positions`;
experts and router_gap are of every position.
"""

import argparse
from pathlib import Path

import numpy as np

from .checkpoint import load_drafter, load_target
from .cli import RecipeError, existing_file, existing_folder, positive_int, run_step, step_parser
from .documents import KINDS
from .reference_run import ReferenceRun, reference_run

NEAR_TIE = 1e-5


def chosen_positions(length: int) -> np.ndarray:
    """int32: around 64 and 128, where a chunk or a page may end, and 30 spread over the rest."""
    spread = np.linspace(200, length - 1, 30).astype(int)
    positions = np.unique(np.concatenate([np.arange(60, 70), np.arange(120, 132), spread]))
    return positions.astype(np.int32)


def save_arrays(path: Path, run: ReferenceRun) -> None:
    positions = chosen_positions(len(run.ids))
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path, ids=run.ids, positions=positions, logits=run.logits[positions], experts=run.experts,
        router_gap=run.router_gap, greedy=run.greedy, **run.draft_arrays())


def parse_args() -> argparse.Namespace:
    parser = step_parser("golden_long", __doc__)
    parser.add_argument("--model", type=existing_folder, required=True, help="exported tiny-k2")
    parser.add_argument("--draft", type=existing_folder, required=True, help="exported tiny-k2-dflash")
    parser.add_argument("--data", type=existing_file, required=True, help="data.npz of pack_data")
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    parser.add_argument("--kind", choices=KINDS, default="code", help="held-out stream to cut from")
    parser.add_argument("--start", type=int, default=3000, help="first token")
    parser.add_argument("--length", type=positive_int, default=3000, help="tokens")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.length <= 200:
        raise RecipeError(f"--length: {args.length}: expected more than 200")
    stream = np.load(args.data)[f"eval_{args.kind}"]
    ids = stream[args.start:args.start + args.length].astype(int).tolist()
    if len(ids) < args.length:
        raise RecipeError(f"--start: {args.start}: expected {args.length} of {len(stream)} tokens after it")
    run = reference_run(load_target(args.model), load_drafter(args.draft), ids)
    save_arrays(args.out, run)
    n_ties = int((run.router_gap < NEAR_TIE).sum())
    print(f"{args.out}: {args.out.stat().st_size} bytes; router gaps under {NEAR_TIE:g}: {n_ties}")


if __name__ == "__main__":
    run_step(main)
