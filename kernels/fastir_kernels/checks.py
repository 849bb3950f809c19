"""Argument checks: every message names the argument. None of them reads a CUDA tensor on the host."""

from __future__ import annotations

import os

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def debug() -> bool:
    """FASTIR_KERNELS_DEBUG=1: check tensor contents on the host, on CUDA too (costs a device sync)."""
    return os.environ.get("FASTIR_KERNELS_DEBUG", "0") not in ("", "0")


def _plain(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
    if type(x).__name__ == "DTensor":
        raise TypeError(
            f"{name} is a DTensor, of which this process holds only a shard: call inside the FSDP forward, "
            f"where the weight is whole, or pass {name}.full_tensor(), or a shard with tp_group"
        )


def matrix(name: str, x: Tensor, columns: int | None = None) -> None:
    """A floating-point matrix, (rows, columns)."""
    _plain(name, x)
    if x.dim() != 2:
        raise ValueError(f"{name} must be 2-D; got shape {tuple(x.shape)}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be bfloat16, float16 or float32; got {x.dtype}")
    if columns is not None and x.shape[1] != columns:
        raise ValueError(f"{name} must have {columns} columns; got shape {tuple(x.shape)}")


def per_row(name: str, x: Tensor | None, rows: int, device: torch.device) -> None:
    """A floating-point vector (rows,) on the device, or None."""
    if x is None:
        return
    _plain(name, x)
    if x.shape != (rows,):
        raise ValueError(f"{name} must have shape ({rows},); got {tuple(x.shape)}")
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating point; got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}; it is on {x.device}")


def mask_rows(mask: Tensor | None, rows: int, device: torch.device) -> None:
    """A bool vector (rows,), or None."""
    if mask is None:
        return
    _plain("mask", mask)
    if mask.shape != (rows,):
        raise ValueError(f"mask must have shape ({rows},); got {tuple(mask.shape)}")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool; got {mask.dtype}")
    if mask.device != device:
        raise ValueError(f"mask must be on {device}; it is on {mask.device}")


def offsets(cu_seqlens: Tensor, rows: int, device: torch.device) -> None:
    """cu_seqlens: int32 or int64 (N + 1,), from 0 to rows, not decreasing."""
    _plain("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens must have shape (N + 1,); got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64; got {cu_seqlens.dtype}")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens must be on {device}; it is on {cu_seqlens.device}")
    fine = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == rows) & (cu_seqlens.diff() >= 0).all()
    _require(fine, f"cu_seqlens must rise from 0 to the number of rows ({rows})")


def labels(targets: Tensor, mask: Tensor | None, rows: int, vocabulary: int | None, device: torch.device) -> None:
    """targets: int64 or int32 (rows,), in [0, vocabulary) where the mask holds; vocabulary None: of unknown size."""
    _plain("targets", targets)
    if targets.shape != (rows,):
        raise ValueError(f"targets must have shape ({rows},); got {tuple(targets.shape)}")
    if targets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"targets must be int32 or int64; got {targets.dtype}")
    if targets.device != device:
        raise ValueError(f"targets must be on {device}; it is on {targets.device}")
    fine = targets >= 0
    if vocabulary is not None:
        fine = fine & (targets < vocabulary)
    if mask is not None:
        fine = fine | ~mask
    _require(fine.all(), f"targets must lie in [0, {vocabulary or 'V'}) on rows that count")


def row_temperature(temperature: float | Tensor, rows: int, device: torch.device) -> Tensor:
    """The temperature as (rows,) fp32; it must be positive."""
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"temperature must be positive; got {temperature}")
        return torch.full((rows,), float(temperature), dtype=torch.float32, device=device)
    if temperature.numel() != 1 and temperature.shape != (rows,):
        raise ValueError(f"temperature must be a scalar or have shape ({rows},); got {tuple(temperature.shape)}")
    temperature = temperature.detach().to(device=device, dtype=torch.float32).reshape(-1)
    _require((temperature > 0).all(), "temperature must be positive")
    return temperature.expand(rows).contiguous()


def softcap_value(softcap: float | None) -> float:
    """The softcap as a float; 0 stands for none."""
    if softcap is None:
        return 0.0
    if not softcap > 0:
        raise ValueError(f"softcap must be positive; got {softcap}")
    return float(softcap)


def _require(condition: Tensor, message: str) -> None:
    """Raise ValueError where that needs no device sync; on CUDA the device asserts, later, unless debugging."""
    if torch.compiler.is_compiling():
        return
    if condition.device.type == "cpu" or debug():
        if not bool(condition):
            raise ValueError(message)
    else:
        torch._assert_async(condition, message)
