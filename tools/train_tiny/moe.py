"""DeepSeek-V3's mixture of experts (arXiv 2412.19437): sigmoid router with a correction bias.

scores = sigmoid(x W^T) in fp32; the top-k is taken of scores + e_score_correction_bias; the weights are
the scores WITHOUT the bias, normalised to sum 1 (+ 1e-20), times routed_scaling_factor. The shared expert
is added unweighted. There is no auxiliary loss: training moves the bias against the load.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .config import TargetConfig
from .int4 import fake_int4
from .layers import MLP


class Router(nn.Module):
    e_score_correction_bias: torch.Tensor  # [experts]

    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cfg.n_routed_experts, cfg.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(cfg.n_routed_experts))
        self.top_k = cfg.num_experts_per_tok
        self.scale = cfg.routed_scaling_factor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] -> (weights fp32 [T, k], experts int64 [T, k], best biased score first)."""
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.weight.float()))
            biased = scores.detach() + self.e_score_correction_bias
            experts = torch.topk(biased, self.top_k, dim=-1, sorted=True).indices
            weights = scores.gather(1, experts)
            return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale, experts

    def gap(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T]: how far the k-th best biased score is above the next one's."""
        biased = torch.sigmoid(x.float() @ self.weight.float().T) + self.e_score_correction_bias
        best = biased.topk(self.top_k + 1, -1).values
        return best[:, -2] - best[:, -1]


class Experts(nn.Module):
    """The routed experts of a layer, stacked [experts, out, in]; checkpoints hold them one by one."""

    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        n, hidden, inner = cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(n, inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(n, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(n, hidden, inner))


class MoE(nn.Module):
    """Every expert is computed for every token and masked by its gate.

    16 small experts make one 4096-wide MLP, which keeps the graph free of sorting and is fast enough on
    a GPU.
    """

    def __init__(self, cfg: TargetConfig, fake_quant: bool) -> None:
        super().__init__()
        self.gate = Router(cfg)
        self.experts = Experts(cfg)
        self.shared_experts = MLP(cfg.hidden_size, cfg.moe_intermediate_size * cfg.n_shared_experts)
        self.n_experts = cfg.n_routed_experts
        self.fake_quant = fake_quant

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [..., hidden] -> (same shape, experts [T, k], load [experts]: tokens that chose each)."""
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        n_tokens = x.shape[0]
        weights, chosen = self.gate(x)
        gates = torch.zeros(n_tokens, self.n_experts, dtype=weights.dtype, device=x.device)
        gates = gates.scatter(1, chosen, weights)

        gate, up, down = self.experts.gate_proj, self.experts.up_proj, self.experts.down_proj
        if self.fake_quant:
            gate, up, down = fake_int4(gate), fake_int4(up), fake_int4(down)
        inner = gate.shape[1]
        width = self.n_experts * inner
        gate_up = F.linear(x, torch.cat((gate.flatten(0, 1), up.flatten(0, 1))))
        h = F.silu(gate_up[:, :width]) * gate_up[:, width:]
        h = h.view(n_tokens, self.n_experts, inner) * gates.to(h.dtype).unsqueeze(-1)
        y = F.linear(h.view(n_tokens, width), down.permute(1, 0, 2).flatten(1)) + self.shared_experts(x)
        return y.view(shape), chosen, (gates.detach() > 0).float().sum(0)
