"""Row operations in Triton: the same two as in `rows`, one program per row, each reading its row once.

Exponentials are in base 2 with one FMA in front: d = z c - m c, c = log2(e) / temperature, where m c is rounded once
for the whole row and so drops out of every difference. One exponential per element in either kernel. Logits of -inf are
handled by the clamp of d at -1000, far below where exp2 is 0 (NaN passes through it). Block sizes depend on V alone,
there are no atomics, and the grid is flat, so a row gives the same bits wherever it stands.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 2048  # with 256 threads 8 elements each: one 128-bit access in bf16
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
NAN: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _log1p_small(x):  # type: ignore[no-untyped-def]
    """log(1 + x) for x in [0, 1], right to fp32: 2 atanh(y) with y = x / (2 + x) <= 1/3."""
    y = x / (2.0 + x)
    w = y * y
    series = 1.0 + w * (1 / 3 + w * (1 / 5 + w * (1 / 7 + w * (1 / 9 + w * (1 / 11 + w * (1 / 13 + w / 15))))))
    return 2.0 * y * series


@triton.jit
def _log(x):  # type: ignore[no-untyped-def]
    """log x, right to fp32 just above 1 as well."""
    return tl.where(x < 2.0, _log1p_small(tl.maximum(tl.minimum(x, 2.0) - 1.0, 0.0)), tl.log(x))


@triton.jit
def _one_minus_exp(x):  # type: ignore[no-untyped-def]
    """1 - e^x for x <= 0, right to fp32 near 0 as well."""
    y = tl.maximum(x, -0.5)
    series = 1 + y / 2 * (1 + y / 3 * (1 + y / 4 * (1 + y / 5 * (1 + y / 6 * (1 + y / 7 * (1 + y / 8 * (1 + y / 9)))))))
    return tl.where(x < -0.5, 1.0 - tl.exp(x), -y * series)


@triton.jit
def _load(row_ptr, column, columns):  # type: ignore[no-untyped-def]
    """Logits of a row at these columns, -inf past its end."""
    return tl.load(row_ptr + column, mask=column < columns, other=-float("inf"))


@triton.jit
def _fold(z, scale, shifted, r1, r2, first):  # type: ignore[no-untyped-def]
    """The lane sums of e, e^2 and e d with one more block of logits."""
    d = tl.maximum(tl.fma(z, scale, -shifted), -1000.0, propagate_nan=NAN)
    e = tl.exp2(d)
    return r1 + e, tl.fma(e, e, r2), tl.fma(e, d, first)


@triton.jit
def stats_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # (T, V), rows row_stride apart
    target_ptr,  # (T,) int64
    inverse_temperature_ptr,  # (T,) fp32
    mask_ptr,  # (T,) uint8
    out_ptr,  # (4, T) fp32: logprob, entropy, ||pi - e_target||^2, lse
    row_stride,
    rows,
    columns,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row
    step = rows.to(tl.int64)
    if HAS_MASK:  # noqa: SIM102
        if tl.load(mask_ptr + row) == 0:
            for i in tl.static_range(4):
                tl.store(out_ptr + i * step, 0.0)
            return
    logits_ptr += row * row_stride
    target = tl.load(target_ptr + row)
    scale = tl.load(inverse_temperature_ptr + row) * LOG2E

    column = tl.arange(0, BLOCK)
    m = -float("inf")  # running maximum of the logits, the target's included
    r1 = tl.zeros([BLOCK], tl.float32)  # lane sums of e, e^2 and e d over the other columns
    r2 = tl.zeros([BLOCK], tl.float32)
    first = tl.zeros([BLOCK], tl.float32)
    z0 = _load(logits_ptr, column, columns)
    z1 = _load(logits_ptr, column + BLOCK, columns)
    z2 = _load(logits_ptr, column + 2 * BLOCK, columns)
    z3 = _load(logits_ptr, column + 3 * BLOCK, columns)
    for start in range(0, columns, 4 * BLOCK):
        f0, f1, f2, f3 = z0.to(tl.float32), z1.to(tl.float32), z2.to(tl.float32), z3.to(tl.float32)
        following = column + (start + 4 * BLOCK)  # loads run one step ahead of the arithmetic
        z0 = _load(logits_ptr, following, columns)
        z1 = _load(logits_ptr, following + BLOCK, columns)
        z2 = _load(logits_ptr, following + 2 * BLOCK, columns)
        z3 = _load(logits_ptr, following + 3 * BLOCK, columns)
        new_m = tl.maximum(m, tl.max(tl.maximum(tl.maximum(f0, f1), tl.maximum(f2, f3)), axis=0))
        if new_m > m:
            # d falls by shift, so sum e d becomes k (sum e d - shift sum e); nothing was summed while m = -inf
            shift = tl.where(m == -float("inf"), 0.0, (new_m - m) * scale)
            k = tl.exp2(-shift)
            first = k * (first - shift * r1)
            r1 *= k
            r2 *= k * k
            m = new_m
        if (target >= start) & (target < start + 4 * BLOCK):
            here = column + start
            f0 = tl.where(here == target, -float("inf"), f0)
            f1 = tl.where(here + BLOCK == target, -float("inf"), f1)
            f2 = tl.where(here + 2 * BLOCK == target, -float("inf"), f2)
            f3 = tl.where(here + 3 * BLOCK == target, -float("inf"), f3)
        shifted = tl.where(m == -float("inf"), 0.0, m * scale)
        r1, r2, first = _fold(f0, scale, shifted, r1, r2, first)
        r1, r2, first = _fold(f1, scale, shifted, r1, r2, first)
        r1, r2, first = _fold(f2, scale, shifted, r1, r2, first)
        r1, r2, first = _fold(f3, scale, shifted, r1, r2, first)

    shifted = tl.where(m == -float("inf"), 0.0, m * scale)
    z_a = tl.load(logits_ptr + target, mask=target >= 0, other=-float("inf")).to(tl.float32)
    d_a = tl.fma(z_a, scale, -shifted)
    e_a = tl.exp2(d_a)
    s1 = tl.sum(r1, axis=0)
    s2 = tl.sum(r2, axis=0)
    total = s1 + e_a
    log_total = tl.where((e_a == 1.0) & (s1 < 1.0), _log1p_small(tl.minimum(s1, 1.0)), _log(total))
    likely = _log1p_small(tl.minimum(s1 / tl.maximum(e_a, 1e-30), 1.0))
    logprob = tl.where(e_a > s1, -likely, d_a * LN2 - _log(total))
    mean_d = (tl.sum(first, axis=0) + tl.where(e_a > 0.0, e_a * d_a, 0.0)) / total
    tl.store(out_ptr, logprob)
    tl.store(out_ptr + step, log_total - mean_d * LN2)
    tl.store(out_ptr + 2 * step, (s1 * s1 + s2) / (total * total))
    tl.store(out_ptr + 3 * step, shifted * LN2 + log_total)


@triton.jit
def grad_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # (T, V), rows row_stride apart
    out_ptr,  # (T, V), rows out_stride apart; may be the logits
    sqnorm_ptr,  # (T,) fp32: squared norm of each row of the gradient, written with an entropy term only
    target_ptr,
    inverse_temperature_ptr,
    mask_ptr,
    logprob_ptr,
    entropy_ptr,
    lse_ptr,
    coefficient_ptr,  # (T,) fp32
    entropy_coefficient_ptr,
    row_stride,
    out_stride,
    columns,
    HAS_MASK: tl.constexpr,
    HAS_LOGPROB: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row * out_stride
    column = tl.arange(0, BLOCK)
    if HAS_MASK:  # noqa: SIM102
        if tl.load(mask_ptr + row) == 0:
            for start in range(0, columns, BLOCK):
                zero = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
                tl.store(out_ptr + start + column, zero, mask=column + start < columns)
            return
    logits_ptr += row * row_stride
    target = tl.load(target_ptr + row)
    inverse = tl.load(inverse_temperature_ptr + row)
    scale = inverse * LOG2E
    lse = tl.load(lse_ptr + row) * LOG2E
    c = 0.0
    at_target = 0.0
    if HAS_LOGPROB:
        c = tl.load(coefficient_ptr + row) * inverse
        at_target = c * _one_minus_exp(tl.load(logprob_ptr + row))
    h = 0.0
    entropy = 0.0
    if HAS_ENTROPY:
        h = tl.load(entropy_coefficient_ptr + row) * inverse
        entropy = tl.load(entropy_ptr + row)
    square = tl.zeros([BLOCK], tl.float32)
    ahead = _load(logits_ptr, column, columns)
    for start in range(0, columns, BLOCK):
        z = ahead.to(tl.float32)
        here = column + start
        ahead = _load(logits_ptr, here + BLOCK, columns)
        d = tl.maximum(tl.fma(z, scale, -lse), -1000.0, propagate_nan=NAN)
        pi = tl.exp2(d)
        g = -c * pi
        if HAS_LOGPROB:  # noqa: SIM102
            if (target >= start) & (target < start + BLOCK):
                g = tl.where(here == target, at_target, g)
        if HAS_ENTROPY:
            g -= h * pi * (d * LN2 + entropy)
            square = tl.fma(g, g, square)
        tl.store(out_ptr + here, g.to(out_ptr.dtype.element_ty), mask=here < columns)
    if HAS_ENTROPY:
        tl.store(sqnorm_ptr + row, tl.sum(square, axis=0))


def launch_shape(columns: int) -> tuple[int, int]:
    """(BLOCK, number of warps) for so many columns. A step is four blocks in stats_kernel, one in grad_kernel."""
    block = min(MAX_BLOCK, max(32, triton.next_power_of_2(columns) // 4))
    return block, max(1, block // 256)


def stats(logits: Tensor, target: Tensor, inverse_temperature: Tensor, mask: Tensor | None) -> Tensor:
    """logits (T, V), target (T,) int64, inverse_temperature (T,), mask (T,) bool -> (4, T) fp32: logprob, entropy,
    ||pi - e_target||^2, lse; 0 on masked rows, which are not read. Negative targets as in `rows.row_stats`."""
    rows, columns = logits.shape
    out = torch.empty((4, rows), dtype=torch.float32, device=logits.device)
    if rows == 0:
        return out
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    block, warps = launch_shape(columns)
    stats_kernel[(rows,)](
        logits,
        target.long().contiguous(),
        inverse_temperature.contiguous(),
        None if mask is None else mask.contiguous().view(torch.uint8),
        out,
        logits.stride(0),
        rows,
        columns,
        HAS_MASK=mask is not None,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def grad(
    logits: Tensor,
    target: Tensor,
    inverse_temperature: Tensor,
    logprob: Tensor,
    entropy: Tensor,
    lse: Tensor,
    coefficient: Tensor | None,
    entropy_coefficient: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
) -> Tensor | None:
    """Writes into out (T, V) what `rows.row_grad` does, 0 on masked rows, returns the same; out may be the logits."""
    rows, columns = logits.shape
    if rows == 0:
        return None if entropy_coefficient is None else logprob.new_empty(0)
    source = logits if logits.stride(1) == 1 else logits.contiguous()
    into = out if out.stride(1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    sqnorm = None if entropy_coefficient is None else torch.zeros_like(logprob)
    block, warps = launch_shape(columns)
    grad_kernel[(rows,)](
        source,
        into,
        sqnorm,
        target.long().contiguous(),
        inverse_temperature.contiguous(),
        None if mask is None else mask.contiguous().view(torch.uint8),
        logprob.contiguous(),
        entropy.contiguous(),
        lse.contiguous(),
        None if coefficient is None else coefficient.float().contiguous(),
        None if entropy_coefficient is None else entropy_coefficient.float().contiguous(),
        source.stride(0),
        into.stride(0),
        columns,
        HAS_MASK=mask is not None,
        HAS_LOGPROB=coefficient is not None,
        HAS_ENTROPY=entropy_coefficient is not None,
        BLOCK=block,
        num_warps=warps,
    )
    if into is not out:
        out.copy_(into)
    return sqnorm
