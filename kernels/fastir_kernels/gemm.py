"""The matrix products of the linear ops: how they are cut, and the dtype they run in.

Logits are fp32 whatever the inputs: rounding them to bf16 costs up to 2^-9 of a logit in each log-probability.
On CUDA bf16 operands go in as they are, with fp32 accumulation and output. On a CPU the operands are widened to fp32
(exact for bf16), block by block: torch has no bf16 product with fp32 output there, and without AMX the fp32 product is
also the faster one. The two gradient products take dlogits in the dtype of the inputs on CUDA and on a CPU with AMX, in
fp32 elsewhere; the weight gradient accumulates in fp32 over all chunks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

CPU_PRODUCT_ROWS = 128
CUDA_PRODUCT_ROWS = 1024
BLOCK_COLUMNS = 16384  # of the vocabulary, widened to fp32 at a time


def _as_given(function: Any) -> Any:
    """function, out of reach of an autocast region, which would round the operands of its products to bf16."""

    @functools.wraps(function)
    def wrapped(first: Tensor, *rest: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *rest)

    return wrapped


def gradient_dtype(x: Tensor) -> torch.dtype:
    """The dtype of dlogits in the gradient products of inputs like x."""
    narrow = x.device.type == "cuda" or (x.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported())
    return x.dtype if narrow else torch.float32


def _blocks(weight: Tensor) -> list[tuple[int, int]]:
    step = BLOCK_COLUMNS if weight.device.type == "cpu" and weight.dtype != torch.float32 else max(len(weight), 1)
    return [(a, min(a + step, len(weight))) for a in range(0, len(weight), step)]


@_as_given
def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
    """softcap * tanh((hidden weight^T + bias) / softcap) as (R, V) fp32; softcap 0 means none.

    Every product has the same number of rows, the last one padded, since a library may sum in another order for another
    number: a row's logits have the same bits in any batch, for one library, device and number of threads.
    """
    on_gpu = hidden.device.type == "cuda"
    narrow = on_gpu and hidden.dtype != torch.float32
    rows, step = len(hidden), CUDA_PRODUCT_ROWS if on_gpu else CPU_PRODUCT_ROWS
    tail = rows % step
    full = hidden if narrow else hidden.float()
    padded = torch.nn.functional.pad(full[rows - tail :], (0, 0, 0, step - tail)) if tail else None
    logits = hidden.new_empty((rows, len(weight)), dtype=torch.float32)

    def product(x: Tensor, w: Tensor, out: Tensor) -> None:
        if narrow:
            torch.mm(x, w.t(), out_dtype=torch.float32, out=out)
        else:
            torch.mm(x, w.t(), out=out)

    for a, b in _blocks(weight):
        w = weight[a:b] if narrow else weight[a:b].float()
        for r in range(0, rows - tail, step):
            product(full[r : r + step], w, logits[r : r + step, a:b])
        if padded is not None:
            spare = logits.new_empty((step, b - a))
            product(padded, w, spare)
            logits[rows - tail :, a:b] = spare[:tail]
    if bias is not None:
        logits += bias
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits


@_as_given
def hidden_gradient(dlogits: Tensor, weight: Tensor) -> Tensor:
    """dlogits (R, V) in `gradient_dtype` times weight (V, H) -> (R, H)."""
    if dlogits.dtype == weight.dtype:
        return torch.mm(dlogits, weight)
    out = dlogits.new_zeros((len(dlogits), weight.shape[1]))
    for a, b in _blocks(weight):
        out.addmm_(dlogits[:, a:b], weight[a:b].float())
    return out


@_as_given
def add_weight_gradient(total: Tensor, dlogits: Tensor, hidden: Tensor) -> None:
    """total (V, H) fp32 += dlogits^T hidden."""
    if dlogits.dtype == torch.float32:
        total.addmm_(dlogits.t(), hidden.float())
    elif dlogits.device.type == "cuda":
        torch.addmm(total, dlogits.t(), hidden, out_dtype=torch.float32, out=total)
    else:
        total += torch.mm(dlogits.t(), hidden)
