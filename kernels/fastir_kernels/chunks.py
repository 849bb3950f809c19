"""A chunk of logits rows on either backend: how many rows, their statistics, their gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from . import rows
from .gemm import CPU_PRODUCT_ROWS

CPU_CHUNK_BYTES = 64 << 20  # of fp32 logits
CUDA_CHUNK_ROWS = 4096  # keeps the read and write of the weight gradient per chunk well below its product


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Rows of logits held at a time: a function of the vocabulary and the kind of device alone."""
    if device.type == "cuda":
        return CUDA_CHUNK_ROWS
    return max(1, CPU_CHUNK_BYTES // (4 * vocabulary) // CPU_PRODUCT_ROWS) * CPU_PRODUCT_ROWS


def row_chunks(rows: int, mask: Tensor | None, vocabulary: int, device: torch.device) -> list[Tensor | slice]:
    """The rows inside the mask, cut into chunks: slices where all rows count, otherwise int64 row indices."""
    step = chunk_rows(vocabulary, device)
    if mask is not None:
        kept = mask.nonzero()[:, 0]
        if len(kept) < rows:
            return list(kept.split(step)) if len(kept) else []
    return [slice(a, min(a + step, rows)) for a in range(0, rows, step)]


def stats(backend: str, logits: Tensor, target: Tensor, inverse_temperature: Tensor) -> Tensor:
    """logits (R, V) -> (4, R) fp32: logprob, entropy, ||pi - e_target||^2, lse."""
    if backend == "triton":
        from . import rows_triton

        return rows_triton.stats(logits, target, inverse_temperature, None)
    return rows.stats(logits.contiguous(), target.long(), inverse_temperature)


def dlogits(
    backend: str,
    logits: Tensor,
    target: Tensor,
    inverse_temperature: Tensor,
    statistics: Tensor,
    coefficient: Tensor | None,
    entropy_coefficient: Tensor | None,
    softcap: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Gradient of sum_t c_t logprob_t + h_t entropy_t: (R, V) in dtype with respect to the logits before the softcap,
    and (R,) its squared norm with respect to the logits after it.

    logits (R, V) fp32, contiguous, after the softcap: overwritten. statistics (4, R) from `stats`.
    """
    slope = 1 - (logits / softcap).square() if softcap else None
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    logprob, entropy, sqnorm, lse = statistics
    args = (logits, target.long(), inverse_temperature, logprob, entropy, lse, coefficient, entropy_coefficient)
    if backend == "triton":
        from . import rows_triton

        exact = rows_triton.grad(*args, None, out)
    else:
        exact = rows.grad(*args, out)
    if slope is not None:
        out *= slope
    if exact is None:
        assert coefficient is not None
        scale = coefficient * inverse_temperature
        exact = torch.where(scale == 0, 0.0, scale.square() * sqnorm)
    return out, exact
