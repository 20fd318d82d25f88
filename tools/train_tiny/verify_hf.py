"""Compare the exported pair with transformers (step 7; needs requirements-verify.txt).

The target: DeepseekV3ForCausalLM on weights that compressed-tensors unpacked. transformers computes the
latent norms (q_a, kv_a) with an eps of 1e-6; both that and the config's eps are reported, and the second
must agree. The drafter: Qwen3's parts, assembled as z-lab/dflash does.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import DeepseekV3ForCausalLM
from transformers import __version__ as transformers_version

from .checkpoint import load_drafter, load_target
from .cli import RecipeError, existing_file, existing_folder, positive_int, run_step, step_parser
from .hf_weights import write_plain_copy
from .qwen3_drafter import Qwen3Drafter
from .rope import yarn_inv_freq
from .target import TinyK2

TOLERANCE = 1e-4  # of logits up to about 25
N_DRAFT_CONTEXT = 320  # longer than the drafter's window


def load_reference(folder: Path) -> DeepseekV3ForCausalLM:
    with tempfile.TemporaryDirectory() as plain:
        write_plain_copy(folder, Path(plain))
        model, info = DeepseekV3ForCausalLM.from_pretrained(
            plain, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"]:
        raise RecipeError(f"{folder}: {info}: expected the tensors of DeepseekV3ForCausalLM")
    return model.eval()


def compare_constants(target: TinyK2, reference: DeepseekV3ForCausalLM) -> None:
    cfg = target.cfg
    ours = target.model.layers[1].self_attn.scale
    print(f"softmax scale: {ours:.8f} here, {reference.model.layers[1].self_attn.scaling:.8f} there")
    inv_freq = yarn_inv_freq(cfg.qk_rope_head_dim, cfg.rope_theta, cfg.rope_scaling)
    distance = (reference.model.rotary_emb.inv_freq - inv_freq).abs().max().item()
    print(f"rope: largest difference of inverse frequencies {distance:.1e}, "
          f"amplitude there {reference.model.rotary_emb.attention_scaling}")


def set_latent_eps(reference: DeepseekV3ForCausalLM, eps: float) -> None:
    for layer in reference.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = eps
        layer.self_attn.kv_a_layernorm.variance_epsilon = eps


def compare_logits(
    target: TinyK2, reference: DeepseekV3ForCausalLM, ids: torch.Tensor, label: str
) -> float:
    """ids [1, n]; prints and returns the largest difference."""
    ours, theirs = target(ids).out, reference(ids).logits
    distance = (ours - theirs).abs().max().item()
    agrees = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    print(f"{label}: largest difference {distance:.2e} of logits up to {ours.abs().max().item():.1f}, "
          f"same best token {agrees:.4f}")
    return distance


def compare_drafter(
    target: TinyK2, reference: DeepseekV3ForCausalLM, folder: Path, tokens: torch.Tensor
) -> float:
    """tokens [n]; one block after N_DRAFT_CONTEXT of them, each side with its own features."""
    drafter, qwen3 = load_drafter(folder), Qwen3Drafter(folder)
    cfg, n = drafter.cfg, N_DRAFT_CONTEXT
    context, root = tokens[None, :n], int(tokens[n])
    hidden_states = reference(context, output_hidden_states=True).hidden_states
    their_features = torch.cat([hidden_states[i + 1] for i in cfg.target_layer_ids], -1)
    our_features = target(context, taps=cfg.target_layer_ids).taps
    ids = torch.tensor([[root] + [cfg.mask_token_id] * (cfg.block_size - 1)])
    embedded = target.model.embed_tokens(ids)
    theirs = reference.lm_head(qwen3.block_hidden(embedded, their_features))[0, 1:]
    keys_values = drafter.context_keys_values(our_features, torch.arange(n))
    ours = target.lm_head(drafter(embedded, torch.arange(n, n + cfg.block_size), keys_values))[0, 1:]
    distance = (ours - theirs).abs().max().item()
    print(f"drafter: largest difference {distance:.2e} of logits up to {ours.abs().max().item():.1f}")
    return distance


def parse_args() -> argparse.Namespace:
    parser = step_parser("verify_hf", __doc__)
    parser.add_argument("--model", type=existing_folder, required=True, help="exported tiny-k2")
    parser.add_argument("--draft", type=existing_folder, required=True, help="exported tiny-k2-dflash")
    parser.add_argument("--data", type=existing_file, required=True, help="data.npz of pack_data")
    parser.add_argument("--tokens", type=positive_int, default=512, help="of each kind")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    args = parse_args()
    print(f"transformers {transformers_version}")
    target, reference = load_target(args.model), load_reference(args.model)
    data = np.load(args.data)
    streams = {
        kind: torch.from_numpy(data[f"eval_{kind}"].astype(np.int64)) for kind in ("code", "prose", "chat")}
    compare_constants(target, reference)
    for kind, tokens in streams.items():
        compare_logits(target, reference, tokens[None, :args.tokens], f"{kind}, eps as transformers has it")
    set_latent_eps(reference, target.cfg.rms_norm_eps)
    distances = [
        compare_logits(target, reference, tokens[None, :args.tokens], f"{kind}, the config's eps")
        for kind, tokens in streams.items()]
    distances.append(compare_drafter(target, reference, args.draft, streams["code"]))
    if max(distances) > TOLERANCE:
        raise RecipeError(f"largest difference: {max(distances):.2e}: expected at most {TOLERANCE:g}")


if __name__ == "__main__":
    run_step(main)
