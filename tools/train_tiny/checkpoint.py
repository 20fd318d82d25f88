"""The pair's checkpoints: the training file, and the exported folders in the Hugging Face layout.

"Quantised tensors" below: a dictionary by the checkpoint's tensor names (without a wrapper's prefix), where
a routed expert's matrix is `<name>.weight_q` (int8, -8..7) and `<name>.weight_scale` (bf16), the
router's bias fp32 and everything else bf16.
"""

from pathlib import Path

import torch

from .cli import RecipeError
from .config import DraftConfig, TargetConfig
from .drafter import Drafter
from .files import read_json, read_tensors, write_tensors
from .int4 import int4_dequant, int4_quant, pack_bytes, unpack_bytes, unpack_words
from .target import TinyK2

Tensors = dict[str, torch.Tensor]

INDEX_FILE = "model.safetensors.index.json"
WRAPPER_PREFIX = "language_model."
BIAS = "e_score_correction_bias"


def quantised_tensors(model: TinyK2) -> Tensors:
    """Quantise a model in training; with fake INT4 the result is exactly what the loss was computed with."""
    tensors: Tensors = {}
    for name, value in model.state_dict().items():
        value = value.detach()
        if ".experts." in name:
            stem, projection = name.rsplit(".", 1)
            q, scale = int4_quant(value)
            for expert in range(value.shape[0]):
                tensors[f"{stem}.{expert}.{projection}.weight_q"] = q[expert].cpu()
                tensors[f"{stem}.{expert}.{projection}.weight_scale"] = scale[expert].cpu()
        elif name.endswith(BIAS):
            tensors[name] = value.float().cpu()
        else:
            tensors[name] = value.to(torch.bfloat16).cpu()
    return tensors


def save_training_file(path: Path, tensors: Tensors) -> None:
    """Write quantised tensors as one safetensors file, two INT4 values a byte."""
    write_tensors(path, {
        name: pack_bytes(value) if name.endswith("weight_q") else value for name, value in tensors.items()})


def read_exported(folder: Path) -> Tensors:
    """All tensors of an exported folder under their names on disk, a wrapper's prefix removed."""
    weight_map = read_json(folder / INDEX_FILE)["weight_map"]
    tensors: Tensors = {}
    for file in sorted(set(weight_map.values())):
        tensors.update(read_tensors(folder / file))
    return {name.removeprefix(WRAPPER_PREFIX): value for name, value in tensors.items()}


def load_quantised(path: Path) -> Tensors:
    """Quantised tensors of a training file or of an exported folder."""
    if path.is_file():
        return {
            name: unpack_bytes(value) if name.endswith("weight_q") else value
            for name, value in read_tensors(path).items()}
    stored = read_exported(path)
    tensors: Tensors = {}
    for name, value in stored.items():
        if name.endswith("weight_packed"):
            n_in = int(stored[name.removesuffix("packed") + "shape"][1])
            tensors[name.removesuffix("packed") + "q"] = unpack_words(value, n_in)
        elif not name.endswith("weight_shape"):
            tensors[name] = value
    return tensors


def _state_dict(model: TinyK2, tensors: Tensors) -> Tensors:
    """Quantised tensors -> the model's fp32 parameters, the experts stacked and dequantised."""
    state: Tensors = {}
    for name, value in model.state_dict().items():
        if ".experts." not in name:
            state[name] = tensors[name].float()
            continue
        stem, projection = name.rsplit(".", 1)
        prefixes = [f"{stem}.{expert}.{projection}.weight_" for expert in range(value.shape[0])]
        state[name] = torch.stack([int4_dequant(tensors[p + "q"], tensors[p + "scale"]) for p in prefixes])
    return state


def load_target(
    path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> TinyK2:
    """The dequantised model of a training file (the default config) or an exported folder (its own)."""
    cfg = TargetConfig() if path.is_file() else TargetConfig.from_json(path / "config.json")
    model = TinyK2(cfg)
    try:
        state = _state_dict(model, load_quantised(path))
    except KeyError as missing:
        raise RecipeError(f"{path}: tensor {missing} is missing: expected a tiny-k2 checkpoint") from None
    model.load_state_dict(state)
    model = model.to(device=device, dtype=dtype).eval()
    # the routers' biases and the rope tables stay fp32
    for name, value in state.items():
        if name.endswith(BIAS):
            model.get_submodule(name.rsplit(".", 1)[0]).e_score_correction_bias = value.to(device)
    model.fill_rope_tables(device)
    return model


def load_drafter(folder: Path) -> Drafter:
    """The fp32 drafter of an exported folder, on the CPU."""
    drafter = Drafter(DraftConfig.from_json(folder / "config.json"))
    tensors = read_tensors(folder / "model.safetensors")
    drafter.load_state_dict({name: value.float() for name, value in tensors.items()})
    return drafter.eval()
