"""Attention over packed sequences, plugged into transformers without touching any model's code.

transformers calls one function per layer, registered here as ``fastir``; what it does is decided by the ``plan`` that
travels with the forward call: `PackedAttention` for training, or the engine's key-value cache for decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

#: (layer index, query (B, Hq, L, D), key (B, Hkv, L, D), value, scaling) → (B, L, Hq, D)
AttentionPlan = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

IMPLEMENTATION = "fastir"

#: Sequences share one SDPA call when the shortest is at least this share of the longest: bounds the work on padding.
_BUCKET_FILL = 0.75


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    plan: AttentionPlan,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    return plan(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(IMPLEMENTATION, _attend)


class PackedAttention:
    """Causal attention within each sequence of a packed row: SDPA on sequences of similar length, never a T×T mask.

    Args:
        lengths: tokens of each sequence, in packed order.
        device: where the index tensors live.

    Sequences are sorted by length and cut into buckets; one bucket is gathered to (b, H, L, D), attended with
    ``is_causal`` and scattered back. Rows are padded on the right, behind every real key, so causality alone keeps
    the padding out.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.total = sum(lengths)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        order = sorted((i for i in range(len(lengths)) if lengths[i] > 0), key=lambda i: -lengths[i])
        buckets: list[list[int]] = []
        for i in order:
            if buckets and lengths[i] >= _BUCKET_FILL * lengths[buckets[-1][0]]:
                buckets[-1].append(i)
            else:
                buckets.append([i])
        self._gathers: list[torch.Tensor] = []  # (b, L) rows of each bucket
        scatter = torch.empty(self.total, dtype=torch.long)  # row → its place among all buckets' padded rows
        offset = 0
        for bucket in buckets:
            width = lengths[bucket[0]]
            columns = torch.arange(width)
            sizes = torch.tensor([lengths[i] for i in bucket])[:, None]
            rows = torch.tensor([starts[i] for i in bucket])[:, None] + torch.minimum(columns, sizes - 1)
            places = offset + torch.arange(len(bucket) * width).view(len(bucket), width)
            valid = columns < sizes
            scatter[rows[valid]] = places[valid]
            offset += len(bucket) * width
            self._gathers.append(rows.to(device))
        self._scatter = scatter.to(device)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        if query.shape[0] != 1 or query.shape[2] != self.total:
            raise ValueError(f"PackedAttention: expected one row of {self.total} tokens, got {tuple(query.shape)}")
        rows_q, rows_k, rows_v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, D)
        outputs = []
        for gather in self._gathers:
            # index_select, because its gradient is far cheaper than that of x[gather]
            q, k, v = (
                x.index_select(0, gather.flatten()).unflatten(0, gather.shape).transpose(1, 2)  # (b, H, L, D)
                for x in (rows_q, rows_k, rows_v)
            )
            attended = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1))  # (b·L, H, D)
        return torch.cat(outputs).index_select(0, self._scatter).unsqueeze(0)
