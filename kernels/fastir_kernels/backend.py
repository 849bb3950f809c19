"""Which backend runs an op: ``triton`` (CUDA; under TRITON_INTERPRET=1 also the CPU, for tests) or ``torch``."""

from __future__ import annotations

import importlib.util
import os

import torch

NAMES = ("torch", "triton")


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def resolve(backend: str | None, device: torch.device) -> str:
    """The argument, else FASTIR_KERNELS_BACKEND, else by device. ValueError on a name or a device that does not fit."""
    source = "backend"
    if backend is None:
        backend, source = os.environ.get("FASTIR_KERNELS_BACKEND") or None, "FASTIR_KERNELS_BACKEND"
    if backend is None:
        on_gpu = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        return "triton" if on_gpu else "torch"
    if backend not in NAMES:
        raise ValueError(f"{source} must be one of {', '.join(NAMES)}; got {backend!r}")
    if backend == "triton" and device.type != "cuda" and not interpreting():
        raise ValueError(f"{source} 'triton' needs CUDA tensors (or TRITON_INTERPRET=1); these are on {device}")
    return backend
