"""Golden vectors of the pair for tests of other implementations (step 8), by the fp32 CPU reference.

code.npz, prose.npz (the shortest prompt of the kind) and chat.npz (the longest): the fields of
reference_run.ReferenceRun, the tree as tree16_*. golden.json: texts, margins, tokens per round of every
way to speculate and whether it gave the greedy tokens, and how far a plain bf16 evaluation of the same
model is from these logits, as a yardstick for tolerances.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from .checkpoint import load_drafter, load_target
from .choose_prompts import Prompt
from .cli import existing_file, existing_folder, run_step, step_parser
from .decoding import Speculator
from .drafter import Drafter
from .evaluate_speculation import methods
from .files import read_json, write_json
from .reference_run import N_GREEDY, ReferenceRun, reference_run
from .target import TinyK2
from .tokenizer import load_tokenizer

BUDGETS = [8, 16, 32, 64]


def choose(prompts: list[Prompt]) -> dict[str, Prompt]:
    """Short prompts keep the files small; the longest chat has the most turns."""
    def by_length(kind: str) -> list[Prompt]:
        return sorted((p for p in prompts if p["kind"] == kind), key=lambda p: len(p["ids"]))

    return {"code": by_length("code")[0], "prose": by_length("prose")[0], "chat": by_length("chat")[-1]}


def save_arrays(path: Path, run: ReferenceRun) -> None:
    np.savez_compressed(
        path, ids=run.ids, logits=run.logits, experts=run.experts, expert_weights=run.expert_weights,
        router_gap=run.router_gap, hidden_last=run.hidden_last, greedy=run.greedy, margin=run.margin,
        **run.draft_arrays())


def speculative_runs(
    target: TinyK2, drafter: Drafter, ids: list[int], greedy: list[int]
) -> dict[str, dict[str, Any]]:
    results = {}
    for name, build in methods(BUDGETS).items():
        speculator = Speculator(target, drafter, build)
        is_identical = speculator.decode(ids, N_GREEDY) == greedy
        results[name] = {
            "identical": is_identical,
            "tokens_per_round": round(speculator.n_committed / speculator.n_rounds, 3),
            "rounds": speculator.n_rounds}
    return results


@torch.no_grad()
def bf16_distance(target_bf16: TinyK2, run: ReferenceRun) -> dict[str, float]:
    logits = target_bf16(torch.from_numpy(run.ids).long()[None]).out[0].float().numpy()
    difference = np.abs(logits - run.logits)
    agrees = logits.argmax(-1) == run.logits.argmax(-1)
    return {
        "bf16_max_abs_diff": float(difference.max()), "bf16_mean_abs_diff": float(difference.mean()),
        "bf16_argmax_agrees": float(agrees.mean())}


def parse_args() -> argparse.Namespace:
    parser = step_parser("golden", __doc__)
    parser.add_argument("--model", type=existing_folder, required=True, help="exported tiny-k2")
    parser.add_argument("--draft", type=existing_folder, required=True, help="exported tiny-k2-dflash")
    parser.add_argument("--prompts", type=existing_file, required=True, help="output of choose_prompts")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    encoding = load_tokenizer(args.model)
    target, drafter = load_target(args.model), load_drafter(args.draft)
    target_bf16 = load_target(args.model, dtype=torch.bfloat16)
    summary = {}
    for name, prompt in tqdm(choose(read_json(args.prompts)).items(), desc="golden", unit="prompt"):
        run = reference_run(target, drafter, prompt["ids"])
        greedy = run.greedy.tolist()
        path = args.out / f"{name}.npz"
        save_arrays(path, run)
        speculative = speculative_runs(target, drafter, prompt["ids"], greedy)
        summary[name] = {
            "prompt": prompt.get("text") or prompt.get("messages"),
            "tokens": len(prompt["ids"]),
            "greedy_text": encoding.decode(greedy),
            "min_margin": float(run.margin.min()),
            "speculative": speculative,
            "all_identical": all(result["identical"] for result in speculative.values()),
            "min_router_gap": float(run.router_gap.min()),
            **bf16_distance(target_bf16, run),
            "bytes": path.stat().st_size}
    write_json(args.out / "golden.json", summary)


if __name__ == "__main__":
    run_step(main)
