"""Fingerprints of weights, taken alike from the trainer's tensors and from what a vLLM worker computes with.

An engine may keep a weight repacked for its kernels, fused with others, or tied to another: it is read back through
the layer's own product with columns of the identity. Such a product is exact in every floating-point type (each sum
has one term that is not zero), so fingerprints are compared for equality, without tolerance: of the elements looked
at, a change of a single bit is seen. Without imports from vLLM, so that a trainer without it can drive a remote server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fastir.rollout.engine import WeightCheck

#: Elements of each tensor that the sampled check looks at (a whole column of a matrix at least).
SAMPLED_ELEMENTS = 1 << 16

#: Elements fingerprinted at a time.
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Probe:
    """Which elements of a tensor are looked at: these columns of a matrix, or these places of a vector."""

    name: str  #: transformers name
    shape: tuple[int, ...]
    start: int
    step: int

    def columns(self) -> Iterator[torch.Tensor]:
        """Column numbers, (k,) int64 at a time."""
        everything = torch.arange(self.start, self.shape[-1], self.step)
        rows = self.shape[0] if len(self.shape) > 1 else 1
        yield from everything.split(max(1, _CHUNK_ELEMENTS // rows))


def make_probe(name: str, shape: torch.Size, check: WeightCheck, version: int) -> Probe:
    """The probe of a tensor of this shape; the sampled one moves with ``version``: in time it sees everything."""
    if check == "full":
        return Probe(name, tuple(shape), 0, 1)
    rows = shape[0] if len(shape) > 1 else 1
    step = max(1, -(-shape[-1] * rows // SAMPLED_ELEMENTS))
    step = min(step, shape[-1])
    return Probe(name, tuple(shape), version % step, step)


def fingerprint(probe: Probe, tensor: torch.Tensor) -> int:
    """Of a trainer's full tensor, already in the engine's type."""
    matrix = tensor.detach().reshape(-1, tensor.shape[-1])
    return combine(matrix[:, columns.to(tensor.device)].T for columns in probe.columns())


def combine(parts: Iterator[torch.Tensor]) -> int:
    """One number in [0, 2**61) for the parts, (k, rows) each: sees changed, swapped and rescaled values."""
    total = 0
    for part in parts:
        values = (part + 0.0).contiguous().view(-1)  # −0 becomes 0, as it does in a product
        integers = torch.int16 if values.element_size() == 2 else torch.int32
        bits = values.view(integers).long()
        places = torch.arange(1, len(bits) + 1, device=bits.device) * 2 - 1
        total = (total * 1_000_003 + int((bits * places).sum())) % (2**61 - 1)
    return total
