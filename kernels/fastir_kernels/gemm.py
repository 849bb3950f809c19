"""The matrix products of the linear ops: chunk size, and the dtype they run in."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20


def chunk_rows(vocabulary: int) -> int:
    """Rows of fp32 logits held at a time by the torch backend: a function of the vocabulary alone."""
    return max(16, CHUNK_BYTES // (4 * vocabulary) // 16 * 16)


def row_chunks(rows: Tensor, vocabulary: int) -> list[Tensor]:
    """Row indices (R,) cut into chunks of `chunk_rows`; no chunk when there is no row."""
    return list(rows.split(chunk_rows(vocabulary))) if len(rows) else []


def operand(x: Tensor) -> Tensor:
    """x in the dtype the products run in: fp32, exact for bf16 inputs; logits are never rounded to bf16."""
    return x.float()


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
    """softcap * tanh((hidden weight^T + bias) / softcap), (R, V), for operands of one dtype; softcap 0 means none."""
    logits = torch.mm(hidden, weight.t())
    if bias is not None:
        logits += bias
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits
