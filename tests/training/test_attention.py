"""Packed attention against one dense causal attention per sequence."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastir.training.attention import PackedAttention


def dense(query, key, value, scaling):
    """(H, L, D) each; float64 softmax over the causal past."""
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) * scaling
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ value


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.sampled_from([(4, 4), (4, 2), (3, 1)]))
def test_equals_attention_within_each_sequence(lengths, heads):
    torch.manual_seed(sum(lengths))
    total, (q_heads, kv_heads) = sum(lengths), heads
    query = torch.randn(1, q_heads, total, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, kv_heads, total, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = PackedAttention(lengths)(0, query, key, value, 0.3)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad((out * upstream).sum(), (query, key, value))
    parts, low = [], 0
    for length in lengths:
        span = slice(low, low + length)
        parts.append(dense(query[0, :, span], key[0, :, span], value[0, :, span], 0.3).transpose(0, 1))
        low += length
    expected = torch.cat(parts)[None]
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    for ours, theirs in zip(grads, torch.autograd.grad((expected * upstream).sum(), (query, key, value)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


def test_never_materialises_a_square_mask():
    """One long sequence of 4096 tokens: a dense float mask would be 64 MB, the rows here are 1 MB."""
    plan = PackedAttention([4096] + [1] * 64)
    assert sum(g.numel() for g in plan._gathers) < 2 * 4200


def test_padding_is_bounded():
    lengths = np.random.default_rng(0).integers(1, 500, 100).tolist()
    plan = PackedAttention(lengths)
    assert sum(g.numel() for g in plan._gathers) <= sum(lengths) / 0.75


def test_refuses_rows_of_another_length():
    with pytest.raises(ValueError, match="expected one row of 5"):
        PackedAttention([2, 3])(0, *[torch.zeros(1, 1, 4, 8)] * 3, 1.0)
