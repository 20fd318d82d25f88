"""Tokens per round of the exported pair, on a CPU in fp32 (step 7).

Every prompt is decoded autoregressively, with the plain DFlash chain and with DDTree at several budgets;
at T = 0 all should give the same tokens. Committed tokens per round count the bonus token, not the token
that prefill yields; tokens of the last block past the limit are counted.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .checkpoint import load_drafter, load_target
from .choose_prompts import Prompt
from .cli import existing_file, existing_folder, int_list, number_list, positive_int, run_step, step_parser
from .decoding import Speculator, decode_plainly
from .draft_tree import DraftTree, build_chain, build_ddtree
from .drafter import Drafter
from .files import read_json, write_json
from .target import TinyK2
from .tokenizer import load_tokenizer, stop_ids

SEED = 1000
Build = Callable[[torch.Tensor], DraftTree]


def methods(budgets: list[int]) -> dict[str, Build]:
    """The ways to propose tokens, by name."""
    return {"chain": build_chain, **{f"ddtree{b}": partial(build_ddtree, budget=b) for b in budgets}}


@dataclass
class Tally:
    """What one method did on all prompts."""

    committed: Counter[str] = field(default_factory=Counter)  # by kind
    rounds: Counter[str] = field(default_factory=Counter)
    n_nodes: int = 0
    n_tokens: int = 0
    seconds: float = 0.0

    def tokens_per_round(self) -> dict[str, float]:
        by_kind = {kind: self.committed[kind] / max(n, 1) for kind, n in self.rounds.items()}
        by_kind["all"] = self.committed.total() / max(self.rounds.total(), 1)
        return {kind: round(value, 3) for kind, value in by_kind.items()}

    def summary(self) -> dict[str, Any]:
        return {
            "tokens_per_round": self.tokens_per_round(),
            "tokens_per_second": round(self.n_tokens / self.seconds, 1),
            "nodes_per_round": round(self.n_nodes / max(self.rounds.total(), 1), 1)}


class Evaluation:
    def __init__(
        self, target: TinyK2, drafter: Drafter, prompts: list[Prompt], stop: set[int], n_new: int
    ) -> None:
        self.target, self.drafter, self.prompts = target, drafter, prompts
        self.stop, self.n_new = stop, n_new

    def plain_outputs(self) -> list[list[int]]:
        """Greedy autoregressive decoding of every prompt."""
        progress = tqdm(self.prompts, desc="autoregressive", unit="prompt")
        return [decode_plainly(self.target, p["ids"], self.n_new, stop=self.stop) for p in progress]

    def run(self, name: str, build: Build, temperature: float) -> tuple[Tally, list[list[int]]]:
        tally, outputs = Tally(), []
        for i, prompt in enumerate(tqdm(self.prompts, desc=f"T={temperature:g} {name}", unit="prompt")):
            speculator = Speculator(self.target, self.drafter, build)
            generator = torch.Generator().manual_seed(SEED + i)
            started = time.time()
            output = speculator.decode(prompt["ids"], self.n_new, temperature, self.stop, generator)
            tally.seconds += time.time() - started
            tally.committed[prompt["kind"]] += speculator.n_committed
            tally.rounds[prompt["kind"]] += speculator.n_rounds
            tally.n_nodes += speculator.n_nodes
            tally.n_tokens += len(output)
            outputs.append(output)
        return tally, outputs


def parse_args() -> argparse.Namespace:
    parser = step_parser("evaluate_speculation", __doc__)
    parser.add_argument("--model", type=existing_folder, required=True, help="exported tiny-k2")
    parser.add_argument("--draft", type=existing_folder, required=True, help="exported tiny-k2-dflash")
    parser.add_argument("--prompts", type=existing_file, required=True, help="output of choose_prompts")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all results to write")
    parser.add_argument("--acceptance", type=Path,
                        help="JSON file to write with the tokens per round at T = 0 alone")
    parser.add_argument("--budgets", type=int_list, default="1,3,8,16,32,64", help="nodes of the trees")
    parser.add_argument("--temperatures", type=number_list, default="0,1", help="of sampling; 0 = greedy")
    parser.add_argument("--new", type=positive_int, default=96, help="most tokens of an answer")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    stop = stop_ids(load_tokenizer(args.model))
    evaluation = Evaluation(
        load_target(args.model), load_drafter(args.draft), read_json(args.prompts), stop, args.new)
    plain = evaluation.plain_outputs() if 0 in args.temperatures else []
    results: dict[str, Any] = {}
    acceptance: dict[str, Any] = {}
    for temperature in args.temperatures:
        for name, build in methods(args.budgets).items():
            tally, outputs = evaluation.run(name, build, temperature)
            result = tally.summary()
            if temperature == 0:
                n_identical = sum(a == b for a, b in zip(outputs, plain, strict=True))
                result["identical_to_autoregressive"] = f"{n_identical}/{len(plain)}"
                acceptance[name] = tally.tokens_per_round()
            results[f"T{temperature:g}/{name}"] = result
            print(f"T={temperature:g} {name}: {result}")
    write_json(args.out, results)
    if args.acceptance:
        write_json(args.acceptance, acceptance)


if __name__ == "__main__":
    run_step(main)
