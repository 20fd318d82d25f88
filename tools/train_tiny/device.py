"""Where training runs: a CUDA GPU with bf16 autocast, or a CPU in fp32 (a few steps, for a rehearsal)."""

import torch


def training_device(seed: int) -> torch.device:
    """Pick the device, seed the global generators and allow TF32 products."""
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def peak_gigabytes(device: torch.device) -> float:
    """Most GPU memory used so far; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
