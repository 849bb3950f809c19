"""The matrix products of the linear ops: how they are cut, and the dtype they run in.

Logits are fp32 whatever the inputs: rounding them to bf16 costs up to 2^-9 of a logit in each log-probability.
On CUDA bf16 operands go in as they are, with fp32 accumulation and output. On a CPU the operands are widened to fp32
(exact for bf16), block by block: torch has no bf16 product with fp32 output there, and without AMX the fp32 product is
also the faster one. The two gradient products take dlogits in the dtype of the inputs on CUDA and on a CPU with AMX, in
fp32 elsewhere; the weight gradient accumulates in fp32 over all chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CPU_PRODUCT_ROWS = 256
CUDA_PRODUCT_ROWS = 1024
BLOCK_COLUMNS = 8192  # of the vocabulary, widened to fp32 at a time


def _as_given(function: Any) -> Any:
    """function, out of reach of an autocast region, which would round the operands of its products to bf16."""

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        with torch.autocast(args[-1].device.type, enabled=False):
            return function(*args)

    return wrapped


def gradient_dtype(x: Tensor) -> torch.dtype:
    """The dtype of dlogits in the gradient products of inputs like x."""
    narrow = x.device.type == "cuda" or (x.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported())
    return x.dtype if narrow else torch.float32


class Head:
    """softcap * tanh((hidden weight^T + bias) / softcap), and the products of its backward.

    Its buffers are made once and used again for every chunk: fresh memory from the system costs a CPU more than the
    widening that fills it. weight (V, H), bias (V,) or None; softcap 0 means none.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, softcap: float) -> None:
        self.weight, self.bias, self.softcap = weight, bias, softcap
        self._logits = weight.new_empty(0, dtype=torch.float32)
        self._widened = weight.new_empty(0, dtype=torch.float32)

    @_as_given
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (R, H) -> (R, V) fp32, contiguous, in a buffer that the next call writes again.

        Every product has the same number of rows, the last one padded, since a library may sum in another order for
        another number: a row's logits have the same bits in any batch, for one library, device and number of threads.
        """
        on_gpu = hidden.device.type == "cuda"
        narrow = on_gpu and hidden.dtype != torch.float32
        rows, step = len(hidden), CUDA_PRODUCT_ROWS if on_gpu else CPU_PRODUCT_ROWS
        whole = rows + -rows % step
        padded = torch.nn.functional.pad(hidden if narrow else hidden.float(), (0, 0, 0, whole - rows))
        if len(self._logits) < whole:
            self._logits = hidden.new_empty((whole, len(self.weight)), dtype=torch.float32)
        for a, b, w in self._blocks(narrow):
            for r in range(0, whole, step):
                out = self._logits[r : r + step, a:b]
                if narrow:
                    torch.mm(padded[r : r + step], w.t(), out_dtype=torch.float32, out=out)
                else:
                    torch.mm(padded[r : r + step], w.t(), out=out)
        logits = self._logits[:rows]
        if self.bias is not None:
            logits += self.bias
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    @_as_given
    def hidden_gradient(self, dlogits: Tensor) -> Tensor:
        """dlogits (R, V) in `gradient_dtype` -> (R, H)."""
        if dlogits.dtype == self.weight.dtype:
            return torch.mm(dlogits, self.weight)
        out = dlogits.new_zeros((len(dlogits), self.weight.shape[1]))
        for a, b, w in self._blocks(False):
            out.addmm_(dlogits[:, a:b], w)
        return out

    def _blocks(self, narrow: bool) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, end, those rows of the weight in the dtype of the products)."""
        vocabulary, width = self.weight.shape
        if narrow or self.weight.dtype == torch.float32:
            yield 0, vocabulary, self.weight
            return
        step = vocabulary if self.weight.device.type == "cuda" else min(vocabulary, BLOCK_COLUMNS)
        if not len(self._widened):
            self._widened = self.weight.new_empty((step, width), dtype=torch.float32)
        for a in range(0, vocabulary, step):
            b = min(a + step, vocabulary)
            yield a, b, self._widened[: b - a].copy_(self.weight[a:b])


def keep_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] for ascending rows; on a CPU moved within x's own memory."""
    if x.device.type == "cuda":
        return x[rows]
    for i, r in enumerate(rows.tolist()):
        if i != r:
            x[i] = x[r]
    return x[: len(rows)]


@_as_given
def add_weight_gradient(total: Tensor, dlogits: Tensor, hidden: Tensor) -> None:
    """total (V, H) fp32 += dlogits^T hidden."""
    if dlogits.dtype == torch.float32:
        total.addmm_(dlogits.t(), hidden.float())
    elif dlogits.device.type == "cuda":
        torch.addmm(total, dlogits.t(), hidden, out_dtype=torch.float32, out=total)
    else:
        total += torch.mm(dlogits.t(), hidden)
