"""Train tiny-k2 (step 4): one CUDA GPU; a few steps also run on a CPU.

Routed experts are trained through fake INT4 quantisation from step 0 (straight-through), so the exported
INT4 weights are the very weights that the loss was computed with. The router's e_score_correction_bias is
moved against the load after each step (no auxiliary loss). The defaults are those of the bundled model.

Output under --out, rewritten at every evaluation: target_q.safetensors (input of train_drafter and
export) and log.json.
"""

import argparse
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from .checkpoint import quantised_tensors, save_training_file
from .cli import RecipeError, existing_file, positive_int, run_step, step_parser
from .config import TargetConfig
from .device import autocast, peak_gigabytes, training_device
from .files import write_json
from .muon import Muon
from .target import TinyK2
from .token_stream import TokenStream

ADAM_NAMES = ("embed_tokens", "lm_head", "gate.weight")
REPORT_EVERY = 100


def lr_share(step: int, total: int, warmup: int, decay: float) -> float:
    """Linear warm-up, flat, then a linear fall to 0 over the last share `decay` of the steps."""
    return min(1.0, (step + 1) / warmup, max((total - step) / total / decay, 0.0))


def head_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of hidden [B, L, hidden] through head [vocab, hidden]; labels [B, L]."""
    return F.cross_entropy(F.linear(hidden, head).float().flatten(0, 1), labels.flatten())


@contextmanager
def uncompiled_eval(model: TinyK2) -> Iterator[None]:
    """Evaluation mode, with the layers run eagerly: nothing is compiled for the evaluation's shapes."""
    layers = model.model.layers
    compiled = [layer._compiled_call_impl for layer in layers]
    model.eval()
    for layer in layers:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, call in zip(layers, compiled, strict=True):
            layer._compiled_call_impl = call
        model.train()


@torch.no_grad()
def held_out_losses(
    model: TinyK2, data: Mapping[str, np.ndarray], window: int, max_windows: int, device: torch.device
) -> dict[str, float]:
    """Mean loss per token of the first windows of each held-out stream, by kind."""
    losses = {}
    batch = 16 if device.type == "cuda" else 1
    for name in data:
        if not name.startswith("eval_"):
            continue
        tokens = torch.from_numpy(data[name].astype(np.int64))
        n_windows = min((len(tokens) - 1) // window, max_windows)
        total = 0.0
        for first in range(0, n_windows, batch):
            starts = [i * window for i in range(first, min(first + batch, n_windows))]
            inputs = torch.stack([tokens[s:s + window] for s in starts]).to(device)
            labels = torch.stack([tokens[s + 1:s + window + 1] for s in starts]).to(device)
            with autocast(device):
                logits = model(inputs).out
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
            total += loss.item()
        losses[name.removeprefix("eval_")] = total / max(n_windows * window, 1)
    return losses


class TargetTrainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = training_device(args.seed)
        self.data = dict(np.load(args.data))
        self.cfg = TargetConfig()
        model = TinyK2(self.cfg, dropout=args.dropout, fake_quant=True).init_weights(args.seed)
        self.model = model.to(self.device).train()
        self.optimiser = Muon(
            self.model.named_parameters(), lr=args.lr, weight_decay=args.weight_decay,
            adam_lr=args.adam_lr, adam_names=ADAM_NAMES)
        self.stream = TokenStream(self.data, args.window, args.batch, self.device, args.seed)
        self.loss_of = head_loss
        if self.device.type == "cuda" and not args.no_compile:
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
            self.loss_of = torch.compile(head_loss, dynamic=False)
        self.log: dict[str, Any] = {
            "args": {name: str(value) for name, value in vars(args).items()}, "steps": [], "evals": []}

    def forward_backward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One batch -> (loss, load per MoE layer [layers, experts])."""
        inputs, labels = self.stream.next()
        with autocast(self.device):
            output = self.model(inputs, return_norm=True)
            loss = self.loss_of(output.out, self.model.lm_head.weight, labels)
        loss.backward()
        return loss.detach(), torch.stack(output.loads)

    @torch.no_grad()
    def balance_routers(self, loads: torch.Tensor, rate: float) -> None:
        """Raise the bias of experts under the mean load, lower it over the mean (arXiv 2408.15664)."""
        for block, load in zip(self.model.moe_blocks(), loads, strict=True):
            block.gate.e_score_correction_bias += rate * torch.sign(load.mean() - load)

    def run(self) -> None:
        args, total = self.args, self.args.steps
        started = time.time()
        losses: list[torch.Tensor] = []
        load_sum = torch.zeros((), device=self.device)
        progress = tqdm(range(total), desc=f"target on {self.device.type}", unit="step")
        for step in progress:
            loss, loads = self.forward_backward()
            share = lr_share(step, total, args.warmup, args.decay)
            self.optimiser.step(share)
            self.optimiser.zero_grad()
            self.balance_routers(loads, args.bias_rate * (1.0 if step < args.warmup else share))
            losses.append(loss)
            load_sum = load_sum + loads
            done = step + 1
            if done % REPORT_EVERY == 0 or done == total:
                self.report(done, torch.stack(losses).mean().item(), load_sum, progress)
                losses.clear()
                load_sum = torch.zeros((), device=self.device)
            if done % args.eval_every == 0 or done == total:
                self.evaluate(done, progress)
        self.log["tokens"] = total * args.batch * args.window
        self.log["seconds"] = time.time() - started
        self.log["peak_gigabytes"] = peak_gigabytes(self.device)
        self.save()
        print(f"{total} steps, {self.log['tokens'] / 1e6:.0f} M tokens in {self.log['seconds']:.0f} s, "
              f"peak {self.log['peak_gigabytes']:.1f} GB")

    def report(self, done: int, loss: float, load_sum: torch.Tensor, progress: tqdm) -> None:
        if not math.isfinite(loss):
            raise RecipeError(f"loss at step {done}: {loss}: expected a finite number; lower --lr")
        share = load_sum / load_sum.sum(1, keepdim=True) * self.cfg.n_routed_experts
        progress.set_postfix_str(
            f"loss {loss:.4f}, epoch {self.stream.epoch}, load {share.min():.2f} to {share.max():.2f}")
        self.log["steps"].append((done, loss))

    def evaluate(self, done: int, progress: tqdm) -> None:
        with uncompiled_eval(self.model):
            losses = held_out_losses(
                self.model, self.data, self.args.window, self.args.eval_windows, self.device)
        self.log["evals"].append((done, losses))
        text = ", ".join(f"{kind} {loss:.4f}" for kind, loss in losses.items())
        progress.write(f"step {done}: held-out loss {text}")
        self.save()

    def save(self) -> None:
        save_training_file(self.args.out / "target_q.safetensors", quantised_tensors(self.model))
        write_json(self.args.out / "log.json", self.log)


def parse_args() -> argparse.Namespace:
    parser = step_parser("train_target", __doc__)
    parser.add_argument("--data", type=existing_file, required=True, help="data.npz of pack_data")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=positive_int, default=2600, help="optimiser steps")
    parser.add_argument("--batch", type=positive_int, default=24, help="windows a step")
    parser.add_argument("--window", type=positive_int, default=4096, help="tokens of a window")
    parser.add_argument("--lr", type=float, default=4e-3, help="Muon's peak rate")
    parser.add_argument("--adam-lr", type=float, default=3e-3, help="AdamW's peak rate")
    parser.add_argument("--weight-decay", type=float, default=0.15, help="of Muon's matrices")
    parser.add_argument("--dropout", type=float, default=0.1, help="of both residual branches")
    parser.add_argument("--bias-rate", type=float, default=1e-3, help="step of the routers' biases")
    parser.add_argument("--warmup", type=positive_int, default=60, help="steps with a rising rate")
    parser.add_argument("--decay", type=float, default=0.6, help="last share of steps with a falling rate")
    parser.add_argument("--eval-every", type=positive_int, default=400, help="steps between evaluations")
    parser.add_argument("--eval-windows", type=positive_int, default=64, help="windows of each kind")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile on CUDA")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order, shifts and dropout")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.window > TargetConfig().max_position_embeddings:
        raise RecipeError(f"--window: {args.window}: expected at most the model's 4096 positions")
    TargetTrainer(args).run()


if __name__ == "__main__":
    run_step(main)
