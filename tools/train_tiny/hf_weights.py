"""A plain fp32 copy of an exported tiny-k2 for transformers, unpacked by compressed-tensors itself."""

from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from .checkpoint import read_exported
from .files import read_json, write_json, write_tensors
from .int4 import int4_dequant


def write_plain_copy(folder: Path, out: Path) -> None:
    """config.json (model type deepseek_v3, no quantization) and one fp32 safetensors file."""
    stored = read_exported(folder)
    plain = {}
    for name, value in stored.items():
        if name.endswith("weight_packed"):
            stem = name.removesuffix("_packed")
            shape = torch.Size(stored[stem + "_shape"].tolist())
            plain[stem] = int4_dequant(unpack_from_int32(value, 4, shape), stored[stem + "_scale"])
        elif not name.endswith(("weight_scale", "weight_shape")):
            plain[name] = value.float()
    write_tensors(out / "model.safetensors", plain, metadata={"format": "pt"})
    config = read_json(folder / "config.json")
    config = config.get("text_config", config)
    del config["quantization_config"]
    write_json(out / "config.json", {**config, "model_type": "deepseek_v3", "dtype": "float32"})
