"""Train the DFlash drafter of tiny-k2 against the frozen target (step 5): one CUDA GPU.

1. The target continues prompts itself, half of the rows greedily, the rest sampled (on_policy.py).
2. Its residual stream after the tapped layers is computed once for all rows and kept (draft_rows.py).
3. Per row, random anchors; a block is [token at the anchor, MASK x (block - 1)]. The loss is the
   cross-entropy at the mask positions, weighted exp(-(k - 1) / gamma) for the k-th.

The defaults are those of the bundled drafter and need about 60 GB of GPU memory. A few steps also run on
a CPU. Output under --out: drafter.safetensors (bf16, z-lab/dflash's tensor names), drafter_log.json.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from .checkpoint import load_target
from .cli import existing_file, existing_path, positive_int, run_step, step_parser
from .config import DraftConfig
from .device import autocast, peak_gigabytes, training_device
from .draft_batches import Blocks, block_mask, random_blocks
from .draft_rows import DraftRows, corpus_rows, held_out_prompts, training_prompts, with_features
from .drafter import Drafter
from .files import write_json, write_tensors
from .muon import Muon
from .on_policy import write_rows

WARMUP_STEPS = 100
DECAY = 0.7  # last share of the steps with a falling rate
PROMPT_TAIL = 4
GREEDY_SHARE = 0.5
MAX_HELD_OUT_ROWS = 512
VALIDATION_ROWS, VALIDATION_ANCHORS, VALIDATION_SEED = 256, 16, 123
REPORT_EVERY = 500


def lr_share(step: int, total: int) -> float:
    return min(1.0, (step + 1) / WARMUP_STEPS) * max(min(1.0, (total - step) / (DECAY * total)), 0.0)


class DrafterTrainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = training_device(args.seed)
        self.cfg = DraftConfig()
        self.target = load_target(args.target, self.device).requires_grad_(False)
        self.log: dict[str, Any] = {
            "args": {name: str(value) for name, value in vars(args).items()}, "steps": [], "evals": []}
        self.train_rows, self.held_out_rows = self.make_rows()
        self.drafter = Drafter(self.cfg).init_weights(args.seed).to(self.device)
        self.optimiser = Muon(
            self.drafter.named_parameters(), lr=args.lr, weight_decay=args.weight_decay, adam_lr=args.lr)
        weights = torch.exp(-torch.arange(self.cfg.block_size - 1, device=self.device) / args.gamma)
        self.position_weights = weights / weights.mean()

    def make_rows(self) -> tuple[DraftRows, DraftRows]:
        """The rows to train on (written by the target and from the corpus) and held-out ones."""
        args, block_size, taps = self.args, self.cfg.block_size, self.cfg.target_layer_ids
        data = dict(np.load(args.data))
        n_ranks = self.target.cfg.n_ranks
        prompts = training_prompts(data, n_ranks, args.max_prompt, args.seed)
        held_out = held_out_prompts(data, n_ranks, args.max_prompt, args.seed + 1)
        rows = []
        for _ in tqdm(range(args.passes), desc=f"target writes on {self.device.type}", unit="pass"):
            rows.append(write_rows(
                self.target, prompts, args.write_batch, args.new, GREEDY_SHARE, PROMPT_TAIL, self.device))
        n_written = args.passes * args.write_batch
        n_corpus = int(n_written * args.corpus_share)
        if n_corpus:
            length = args.max_prompt + args.new
            rows.append(corpus_rows(data["tokens"], n_corpus, length, self.device))
        n_held_out = min(MAX_HELD_OUT_ROWS, args.write_batch)
        held_out_rows = write_rows(
            self.target, held_out, n_held_out, args.new, greedy_share=1.0, prompt_tail=0, device=self.device)
        train = with_features(self.target, rows, block_size, taps)
        self.log.update(rows=len(train.tokens), written_rows=n_written)
        return train, with_features(self.target, [held_out_rows], block_size, taps)

    def block_logits(self, features: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """features [R, S, taps * hidden] -> logits [R, N, size - 1, vocab] at the mask positions."""
        n_rows, n_blocks, size = blocks.ids.shape
        n_context = features.shape[1]
        if self.device.type == "cpu":
            features = features.float()
        context = self.drafter.context_keys_values(
            features, torch.arange(n_context, device=self.device))
        embedded = F.embedding(blocks.ids.view(n_rows, -1), self.target.model.embed_tokens.weight)
        mask = block_mask(blocks, n_context, self.cfg.sliding_window)
        hidden = self.drafter(embedded, blocks.positions(), context, mask)
        hidden = hidden.view(n_rows, n_blocks, size, -1)[:, :, 1:]
        return F.linear(hidden, self.target.lm_head.weight)

    def draw_blocks(
        self, rows: DraftRows, chosen: torch.Tensor | slice, n_anchors: int,
        generator: torch.Generator | None = None,
    ) -> Blocks:
        return random_blocks(
            rows.tokens[chosen].long(), rows.first[chosen], rows.end[chosen], n_anchors,
            self.cfg.block_size, self.cfg.mask_token_id, generator)

    def train_step(self, share: float) -> torch.Tensor:
        """One optimiser step -> mean cross-entropy of each mask position [size - 1]."""
        rows = self.train_rows
        chosen = torch.randint(0, len(rows.tokens), (self.args.rows,), device=self.device)
        blocks = self.draw_blocks(rows, chosen, self.args.anchors)
        with autocast(self.device):
            logits = self.block_logits(rows.features[chosen], blocks)
        losses = F.cross_entropy(logits.float().flatten(0, 2), blocks.labels.flatten(), reduction="none")
        losses = losses.view(blocks.labels.shape)
        (losses * self.position_weights).mean().backward()
        self.optimiser.step(share)
        self.optimiser.zero_grad()
        return losses.detach().mean((0, 1))

    @torch.no_grad()
    def validate(self) -> tuple[list[float], float]:
        """On held-out greedy text: share of right tokens by position, and tokens per round of a chain."""
        rows = self.held_out_rows
        chosen = slice(VALIDATION_ROWS)
        generator = torch.Generator(self.device).manual_seed(VALIDATION_SEED)
        with autocast(self.device):
            blocks = self.draw_blocks(rows, chosen, VALIDATION_ANCHORS, generator)
            logits = self.block_logits(rows.features[chosen], blocks)
        is_right = (logits.argmax(-1) == blocks.labels).float()
        return is_right.mean((0, 1)).tolist(), is_right.cumprod(-1).sum(-1).mean().item() + 1

    def run(self) -> None:
        total = self.args.steps
        started = time.time()
        losses: list[torch.Tensor] = []
        progress = tqdm(range(total), desc=f"drafter on {self.device.type}", unit="step")
        for step in progress:
            losses.append(self.train_step(lr_share(step, total)))
            done = step + 1
            if done % REPORT_EVERY == 0 or done == total:
                by_position = torch.stack(losses).mean(0).tolist()
                losses.clear()
                hits, per_round = self.validate()
                self.log["steps"].append((done, by_position))
                self.log["evals"].append((done, hits, per_round))
                progress.write(
                    f"step {done}: loss by position {[round(x, 2) for x in by_position]}, held-out hits "
                    f"{[round(x, 2) for x in hits]}, tokens per round {per_round:.3f}")
        self.log["seconds"] = time.time() - started
        self.log["peak_gigabytes"] = peak_gigabytes(self.device)
        self.save()
        print(f"{total} steps on {self.log['rows']} rows in {self.log['seconds']:.0f} s, "
              f"peak {self.log['peak_gigabytes']:.1f} GB")

    def save(self) -> None:
        state = self.drafter.state_dict()
        write_tensors(
            self.args.out / "drafter.safetensors",
            {name: value.detach().to(torch.bfloat16).cpu() for name, value in state.items()})
        write_json(self.args.out / "drafter_log.json", self.log)


def parse_args() -> argparse.Namespace:
    parser = step_parser("train_drafter", __doc__)
    parser.add_argument("--target", type=existing_path, required=True,
                        help="target_q.safetensors of train_target, or an exported folder")
    parser.add_argument("--data", type=existing_file, required=True, help="data.npz of pack_data")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=positive_int, default=3984, help="optimiser steps")
    parser.add_argument("--passes", type=positive_int, default=20, help="batches that the target writes")
    parser.add_argument("--write-batch", type=positive_int, default=2048, help="rows of such a batch")
    parser.add_argument("--max-prompt", type=positive_int, default=512, help="longest prompt in tokens")
    parser.add_argument("--new", type=positive_int, default=256, help="tokens that follow a prompt")
    parser.add_argument("--corpus-share", type=float, default=0.15,
                        help="rows of plain corpus text, as a share of the written ones")
    parser.add_argument("--rows", type=positive_int, default=256, help="rows of an optimiser step")
    parser.add_argument("--anchors", type=positive_int, default=16, help="blocks of a row")
    parser.add_argument("--gamma", type=float, default=4.0, help="fall of the loss's weights in tokens")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak rate of Muon and AdamW")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of Muon's matrices")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts, sampling and anchors")
    return parser.parse_args()


def main() -> None:
    DrafterTrainer(parse_args()).run()


if __name__ == "__main__":
    run_step(main)
