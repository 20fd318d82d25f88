"""Muon (kellerjordan.github.io/posts/muon) for matrices, AdamW for the rest.

Matrices of one shape (and stacks of them) are orthogonalised together. The update is scaled by
0.2 * sqrt(max(out, in)), which matches AdamW's update size (arXiv 2502.16982), so that one learning rate
and weight decay fits both.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ROUTER_RATE = 0.3  # of adam_lr: the router moves more slowly than the rest


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """[n, out, in] -> about the nearest semi-orthogonal matrices, fp32, by a Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if is_tall else x).float()


class Muon:
    """adam_names: parts of the names of matrices that AdamW keeps (embedding, head, router)."""

    def __init__(
        self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], lr: float, weight_decay: float,
        adam_lr: float, momentum: float = 0.95, betas: tuple[float, float] = (0.9, 0.95),
        adam_names: Sequence[str] = (),
    ) -> None:
        matrices: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        rest, routers = [], []
        for name, param in named_parameters:
            if param.dim() >= 2 and not any(part in name for part in adam_names):
                matrices.setdefault(tuple(param.shape[-2:]), []).append(param)
            elif name.endswith("mlp.gate.weight"):
                routers.append(param)
            else:
                rest.append(param)
        self.groups = [(params, [torch.zeros_like(p) for p in params]) for params in matrices.values()]
        self.lr, self.weight_decay, self.momentum = lr, weight_decay, momentum
        adam_groups: list[dict[str, Any]] = [{"params": rest, "lr": adam_lr}]
        if routers:
            adam_groups.append({"params": routers, "lr": adam_lr * ROUTER_RATE})
        self.adam_lrs = [group["lr"] for group in adam_groups]
        self.adam = torch.optim.AdamW(adam_groups, betas=betas, weight_decay=0.0, fused=rest[0].is_cuda)

    @torch.no_grad()
    def step(self, lr_share: float) -> None:
        """One update at lr_share of the learning rates."""
        for group, adam_lr in zip(self.adam.param_groups, self.adam_lrs, strict=True):
            group["lr"] = adam_lr * lr_share
        self.adam.step()
        lr = self.lr * lr_share
        for params, buffers in self.groups:
            grads = [p.grad for p in params]
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, grads)
            nesterov = torch._foreach_add(grads, buffers, alpha=self.momentum)
            n_out, n_in = params[0].shape[-2:]
            stack = torch.cat([u.view(-1, n_out, n_in) for u in nesterov])
            updates = orthogonalise(stack) * (0.2 * max(n_out, n_in) ** 0.5)
            split = updates.split([p.numel() // (n_out * n_in) for p in params])
            torch._foreach_mul_(params, 1 - lr * self.weight_decay)
            shaped = [update.view_as(p) for update, p in zip(split, params, strict=True)]
            torch._foreach_add_(params, shaped, alpha=-lr)

    def zero_grad(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        for params, _ in self.groups:
            for param in params:
                param.grad = None
