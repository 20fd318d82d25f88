"""Reading and writing JSON and safetensors so that a partial file never looks complete."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from .cli import RecipeError


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{path}: missing: expected the file that an earlier step writes") from None
    except ValueError as error:
        raise RecipeError(f"{path}: {error}: expected JSON") from None


def _write_aside(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_bytes(content)
    os.replace(aside, path)


def write_text(path: Path, text: str) -> None:
    _write_aside(path, text.encode())


def write_json(path: Path, value: Any, indent: int | None = 1, ascii_only: bool = False) -> None:
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=ascii_only))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise RecipeError(f"{path}: missing: expected a safetensors file") from None


def write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=metadata)
    _write_aside(path, content)
