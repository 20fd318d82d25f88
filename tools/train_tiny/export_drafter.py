"""Write tiny-k2-dflash in z-lab/dflash's format (step 6): config.json, model.safetensors and a card."""

import argparse
from pathlib import Path

import torch

from .cli import RecipeError, existing_file, positive_int, run_step, step_parser
from .config import DraftConfig, TargetConfig
from .export_config import draft_config
from .export_target import TEMPLATES
from .files import read_tensors, write_json, write_tensors, write_text


def model_card(cfg: DraftConfig, row_tokens: int) -> str:
    return (TEMPLATES / "tiny-k2-dflash.md").read_text(encoding="utf-8").format(
        L=cfg.num_hidden_layers, b=cfg.block_size, ids=list(cfg.target_layer_ids), w=cfg.sliding_window,
        row=row_tokens)


def export_drafter(checkpoint: Path, out: Path, row_tokens: int) -> int:
    """Write the whole folder (the tensors have their final names already); returns the parameters."""
    cfg = DraftConfig()
    tensors = read_tensors(checkpoint)
    for name, value in tensors.items():
        if value.dtype != torch.bfloat16:
            raise RecipeError(f"{checkpoint}: {name}: {value.dtype}: expected {torch.bfloat16}")
    write_tensors(out / "model.safetensors", tensors, metadata={"format": "pt"})
    write_json(out / "config.json", draft_config(cfg, TargetConfig().n_ranks), indent=2)
    write_text(out / "README.md", model_card(cfg, row_tokens))
    return sum(value.numel() for value in tensors.values())


def parse_args() -> argparse.Namespace:
    parser = step_parser("export_drafter", __doc__)
    parser.add_argument("--checkpoint", type=existing_file, required=True,
                        help="drafter.safetensors of train_drafter")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--row-tokens", type=positive_int, default=768,
                        help="train_drafter's --max-prompt + --new, for the model card")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    n_params = export_drafter(args.checkpoint, args.out, args.row_tokens)
    print(f"{args.out}: {n_params / 1e6:.3f} M parameters, {2 * n_params / 1e6:.2f} MB")


if __name__ == "__main__":
    run_step(main)
