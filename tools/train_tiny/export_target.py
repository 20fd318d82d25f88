"""Write tiny-k2 in the on-disk format of Kimi's INT4 checkpoints (step 6).

Routed experts (compressed-tensors' pack-quantized): weight_packed int32 [out, in / 8] (value i of a word in
bits 4i..4i + 3, stored + 8), weight_scale bf16 [out, in / 32], weight_shape int32 [2]. Everything else
bf16; e_score_correction_bias fp32.

--wrap writes K2.5/K2.6's multimodal wrapper instead of K2-Thinking's plain naming: tensors under
`language_model.`, the text model's config (and quantization_config) inside `text_config`.
"""

import argparse
import shutil
from pathlib import Path

import torch

from .checkpoint import BIAS, INDEX_FILE, WRAPPER_PREFIX, Tensors, load_quantised
from .cli import RecipeError, existing_folder, existing_path, positive_int, run_step, step_parser
from .config import TargetConfig
from .export_config import target_config, wrapper_config
from .files import write_json, write_tensors, write_text
from .int4 import pack_words
from .special_tokens import special_id

TEMPLATES = Path(__file__).parent / "templates"
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")
N_SHARDS = 2


def stored_tensors(tensors: Tensors) -> tuple[Tensors, int]:
    """Quantised tensors -> (tensors by their names on disk, number of parameters)."""
    stored: Tensors = {}
    n_params = 0
    for name in sorted(tensors):
        value = tensors[name]
        if name.endswith("weight_q"):
            stem = name.removesuffix("q")
            stored[stem + "packed"] = pack_words(value)
            stored[stem + "shape"] = torch.tensor(value.shape, dtype=torch.int32)
            n_params += value.numel()
            continue
        expected = torch.float32 if name.endswith(BIAS) else torch.bfloat16
        if value.dtype != expected:
            raise RecipeError(f"{name}: {value.dtype}: expected {expected}")
        stored[name] = value
        if not name.endswith(("weight_scale", BIAS)):
            n_params += value.numel()
    return stored, n_params


def shard_of(name: str, n_layers: int) -> int:
    """0: the embedding and the first layers; 1: the rest."""
    name = name.removeprefix(WRAPPER_PREFIX)
    if name.startswith("model.layers."):
        return 0 if int(name.split(".")[2]) <= n_layers // 2 else 1
    return 0 if "embed_tokens" in name else 1


def write_shards(folder: Path, stored: Tensors, n_layers: int) -> int:
    """Write the shards and their index; returns the tensors' bytes."""
    weight_map = {}
    for shard in range(N_SHARDS):
        file = f"model-{shard + 1:05d}-of-{N_SHARDS:06d}.safetensors"
        part = {name: value for name, value in stored.items() if shard_of(name, n_layers) == shard}
        write_tensors(folder / file, part, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    n_bytes = sum(value.numel() * value.element_size() for value in stored.values())
    index = {"metadata": {"total_size": n_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX_FILE, index)
    return n_bytes


def model_card(cfg: TargetConfig, n_params: int, trained_context: int) -> str:
    return (TEMPLATES / "tiny-k2.md").read_text(encoding="utf-8").format(
        params=n_params / 1e6, moe=cfg.num_hidden_layers - cfg.first_k_dense_replace,
        E=cfg.n_routed_experts, k=cfg.num_experts_per_tok, ctx=cfg.max_position_embeddings,
        trained=trained_context)


def export_target(
    checkpoint: Path, tokenizer: Path, out: Path, wrap: bool, trained_context: int
) -> tuple[int, int]:
    """Write the whole folder; returns the number of parameters and the bytes of their tensors."""
    cfg = TargetConfig()
    stored, n_params = stored_tensors(load_quantised(checkpoint))
    if wrap:
        stored = {WRAPPER_PREFIX + name: value for name, value in stored.items()}
    n_bytes = write_shards(out, stored, cfg.num_hidden_layers)
    write_json(out / "config.json", wrapper_config(cfg) if wrap else target_config(cfg), indent=2)
    generation = {
        "eos_token_id": special_id("<|im_end|>", cfg.n_ranks), "max_length": trained_context}
    write_json(out / "generation_config.json", generation, indent=2)
    for file in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / file, out / file)
    shutil.copyfile(TEMPLATES / "chat_template.jinja", out / "chat_template.jinja")
    write_text(out / "README.md", model_card(cfg, n_params, trained_context))
    return n_params, n_bytes


def parse_args() -> argparse.Namespace:
    parser = step_parser("export_target", __doc__)
    parser.add_argument("--checkpoint", type=existing_path, required=True,
                        help="target_q.safetensors of train_target, or an exported folder")
    parser.add_argument("--tokenizer", type=existing_folder, required=True,
                        help="folder with tiktoken.model and tokenizer_config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--wrap", action="store_true", help="write K2.5/K2.6's wrapper")
    parser.add_argument("--trained-context", type=positive_int, default=4096,
                        help="train_target's --window, for generation_config.json and the model card")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    n_params, n_bytes = export_target(
        args.checkpoint, args.tokenizer, args.out, args.wrap, args.trained_context)
    print(f"{args.out}: {n_params / 1e6:.2f} M parameters, {n_bytes / 1e6:.2f} MB")


if __name__ == "__main__":
    run_step(main)
