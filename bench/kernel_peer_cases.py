"""Which installed libraries fail which case today: ``python bench/kernel_peer_cases.py [--json FILE]``.

Every cell is run here and now. ``ok``: right to fp32 (or, where a library computes in bf16 only, as near as it claims
nothing better); otherwise what went wrong. ``-``: the library has no such function or option. Without a GPU the Triton
functions run in Triton's interpreter. The same cases are tests of this library in tests/kernels/test_peer_cases.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Wrong(AssertionError):
    """The result is not what the mathematics says."""


def near(ours: Tensor, truth: Tensor, bar: float, what: str) -> None:
    if not torch.isfinite(ours[torch.isfinite(truth)]).all():
        raise Wrong(f"{what} not finite")
    error = ((ours.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-30)).item()
    if error > bar:
        raise Wrong(f"{what} off by {error:.1e}")


# --- what a library offers: name of the function -> adapter -----------------------------------------------------


def fastir() -> dict[str, Any]:
    import fastir_kernels as fk

    def loss(z: Tensor, p: dict[str, Tensor], level: str, **options: Any) -> Tensor:
        batch, length, vocabulary = z.shape
        aggregation = "token_mean" if "denominators" in options else "sequence_mean"
        cu = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=z.device)
        kind = "gspo" if level == "sequence" else "grpo"
        spec = fk.LossSpec(kind=kind, eps_high=0.2, aggregation=aggregation)
        return fk.linear_policy_loss(
            z.flatten(0, 1),
            torch.eye(vocabulary, device=z.device, dtype=z.dtype),
            p["targets"].flatten(),
            p["old"].flatten(),
            p["advantages"][:, None].expand(batch, length).flatten(),
            spec=spec,
            mask=p["mask"].flatten(),
            cu_seqlens=cu,
            **options,
        ).loss

    def part_of_token_mean(z: Tensor, p: dict[str, Tensor], tokens: int, sequences: int) -> Tensor:
        return loss(z, p, "token", denominators=fk.Denominators(tokens=tokens, sequences=sequences))

    def logprob(z: Tensor, t: Tensor, temperature: float = 1.0) -> Tensor:
        return fk.token_logprobs(z, t, temperature=temperature).logprob

    return {
        "logprob": logprob,
        "entropy": lambda z, t: fk.token_logprobs(z, t).entropy,
        "linear": lambda h, w, t: fk.linear_token_logprobs(h, w, t).logprob,
        "linear_bias": lambda h, w, t, b: fk.linear_token_logprobs(h, w, t, bias=b).logprob,
        "linear_softcap": lambda h, w, t, c: fk.linear_token_logprobs(h, w, t, softcap=c).logprob,
        "norm": lambda z, t: fk.token_logprobs(z, t).logit_grad_sqnorm,
        "loss": loss,
        "part_of_token_mean": part_of_token_mean,
        "zero_temperature": lambda z, t: fk.token_logprobs(z, t, temperature=0),
    }


def trl() -> dict[str, Any]:
    from trl.kernels import ChunkedLogProbFunction
    from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy as fused

    def chunked(h: Tensor, w: Tensor, t: Tensor, b: Tensor | None = None, cap: float | None = None) -> Tensor:
        return ChunkedLogProbFunction.apply(h, w, b, t, 1.0, 1024, cap, 1.0, ("entropy", "log_sum_sq_probs"))

    def norm(z: Tensor, t: Tensor) -> Tensor:
        one = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        logprob, _, log_square, *_ = chunked(z, one, t)  # type: ignore[misc]
        return 1 - 2 * logprob.exp() + log_square.exp()

    def logprob(z: Tensor, t: Tensor, temperature: float = 1.0) -> Tensor:
        return fused(z, t, temperature=temperature)[0]

    return {
        "logprob": logprob,
        "entropy": lambda z, t: fused(z, t)[1],
        "linear": lambda h, w, t: chunked(h, w, t)[0],
        "linear_bias": lambda h, w, t, b: chunked(h, w, t, b)[0],
        "linear_softcap": lambda h, w, t, c: chunked(h, w, t, None, c)[0],
        "norm": norm,
        "zero_temperature": lambda z, t: fused(z, t, temperature=0),
    }


def liger_fused_linear() -> dict[str, Any]:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def loss(z: Tensor, p: dict[str, Tensor], level: str, compiled: bool = False) -> Tensor:
        function = LigerFusedLinearGRPOLoss(
            beta=0.0, compiled=compiled, use_ref_model=False, loss_type="grpo", importance_sampling_level=level
        )
        one = torch.eye(z.shape[2], device=z.device, dtype=z.dtype)
        arguments = (z, one, p["targets"], p["mask"].to(z.dtype), p["advantages"])
        return function(*arguments, old_per_token_logps=p["old"])[0]

    def part_of_token_mean(z: Tensor, p: dict[str, Tensor], tokens: int, _: int) -> Tensor:
        function = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo")
        one = torch.eye(z.shape[2], device=z.device, dtype=z.dtype)
        arguments = (z, one, p["targets"], p["mask"].to(z.dtype), p["advantages"])
        return function(*arguments, old_per_token_logps=p["old"], num_items_in_batch=tokens)[0]

    return {
        "loss": loss,
        "compiled_loss": functools.partial(loss, compiled=True),
        "part_of_token_mean": part_of_token_mean,
    }


def liger_triton() -> dict[str, Any]:
    from liger_kernel.ops import grpo_loss as module
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    def loss(z: Tensor, p: dict[str, Tensor], level: str, reduce: bool = True) -> Tensor:
        padded = torch.cat([z, z[:, :1]], dim=1)
        out = triton_grpo_loss(
            padded,
            p["old"],
            None,
            p["targets"],
            p["advantages"],
            completion_mask=p["mask"].to(torch.int32),
            temperature=1.0,
            beta=0.0,
            eps_high=0.2,
            inplace=False,
            loss_type="grpo",
            importance_sampling_level=level,
            reduce=reduce,
        )[0]
        if reduce:
            return out
        weight = p["mask"] / p["mask"].sum(1, keepdim=True).clamp(min=1) / len(z)
        return (out * weight).sum()

    def logprob(z: Tensor, t: Tensor, temperature: float = 1.0) -> Tensor:
        padded = torch.cat([z, z[:1]])[None]
        return module.fused_selective_log_softmax(padded, t[None], temperature=temperature)[0]

    def grid(rows: int) -> tuple[int, ...]:
        seen: list[Any] = []

        class Spy:
            def __getitem__(self, shape: Any) -> Callable[..., None]:
                seen.append(shape)
                return lambda *args, **options: None

        kept, module._selective_log_softmax_kernel = module._selective_log_softmax_kernel, Spy()
        try:
            module.fused_selective_log_softmax(torch.zeros(1, rows + 1, 32), torch.zeros(1, rows, dtype=torch.long))
        finally:
            module._selective_log_softmax_kernel = kept
        return seen[0]

    return {
        "forward_only": logprob,
        "loss": loss,
        "loss_per_token": functools.partial(loss, reduce=False),
        "grid": grid,
        "zero_temperature": lambda z, t: logprob(z, t, 0),
    }


def verl() -> dict[str, Any]:
    from verl.utils.torch_functional import (
        calculate_sum_pi_squared_from_logits,
        entropy_from_logits,
        logprobs_from_logits,
    )

    def logprob(z: Tensor, t: Tensor, temperature: float = 1.0) -> Tensor:
        return logprobs_from_logits(z / temperature if temperature != 1 else z, t, inplace_backward=False)

    return {
        "logprob": logprob,
        "entropy": lambda z, t: entropy_from_logits(z),
        "norm": lambda z, t: 1 - 2 * logprob(z, t).exp() + calculate_sum_pi_squared_from_logits(z),
    }


LIBRARIES = {
    "fastir_kernels": fastir,
    "TRL": trl,
    "Liger fused linear": liger_fused_linear,
    "Liger Triton": liger_triton,
    "verl": verl,
}

# --- the cases: each takes the offer of a library; KeyError means it has no such function --------------------------


def random_logits(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    z, t = torch.randn(rows, columns, generator=g), torch.randint(columns, (rows,), generator=g)
    return z.to(DEVICE), t.to(DEVICE)


def true_logprob(z: Tensor, t: Tensor) -> Tensor:
    return torch.log_softmax(z.double(), 1).gather(1, t[:, None])[:, 0]


def logprob_of(offer: dict[str, Any]) -> Callable[..., Tensor]:
    return offer["logprob"] if "logprob" in offer else offer["forward_only"]


def masked_vocabulary(offer: dict[str, Any]) -> None:
    z, t = random_logits(2, 2348)
    z[:, :2048] = -torch.inf
    t = t % 300 + 2048
    near(logprob_of(offer)(z, t), true_logprob(z, t), 2e-6, "logprob")
    if "linear" in offer:
        one = torch.eye(z.shape[1], device=DEVICE)
        finite = torch.where(z.isinf(), 0.0, z)
        bias = torch.where(z[0].isinf(), -torch.inf, 0.0)
        near(offer["linear_bias"](finite, one, t, bias), true_logprob(z, t), 2e-6, "fused head with bias -inf: logprob")


def minus_200(offer: dict[str, Any]) -> None:
    z, t = torch.full((2, 1000), -200.0, device=DEVICE), torch.tensor([0, 999], device=DEVICE)
    near(logprob_of(offer)(z, t), true_logprob(z, t), 2e-6, "logprob")


def odd_vocabulary(columns: int, offer: dict[str, Any]) -> None:
    z, t = random_logits(2, columns)
    t[0] = columns - 1
    near(logprob_of(offer)(z, t), true_logprob(z, t), 2e-6, "logprob")


def many_rows(offer: dict[str, Any]) -> None:
    if "grid" in offer:
        grid = offer["grid"](65536)
        if max(grid[1:], default=1) > 65535:
            raise Wrong(f"launches a grid of {grid}; grid-y ends at 65,535")
        return
    if "logprob" not in offer:
        raise KeyError("logprob")
    z, t = random_logits(4096 if DEVICE == "cpu" else 65536, 32)
    near(offer["logprob"](z, t), true_logprob(z, t), 3e-6, "logprob")


def upstream(offer: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(0)
    h, w = torch.randn(6, 5, generator=g).to(DEVICE), torch.randn(40, 5, generator=g).to(DEVICE)
    t = torch.randint(40, (6,), generator=g).to(DEVICE)
    function = offer["linear"] if "linear" in offer else lambda h, w, t: offer["logprob"](h @ w.t(), t)
    for up in (torch.arange(12.0, device=DEVICE)[::2], torch.tensor(2.0, device=DEVICE).expand(6)):
        a, b = w.clone().requires_grad_(), w.double().requires_grad_()
        function(h, a, t).backward(up)
        true_logprob(h.double() @ b.t(), t).backward(up.double())
        near(a.grad, b.grad, 1e-5, "weight gradient")


def integer_temperature(offer: dict[str, Any]) -> None:
    z, t = random_logits(3, 50)
    near(logprob_of(offer)(z, t, 1), true_logprob(z, t), 2e-6, "logprob")


def zero_temperature(offer: dict[str, Any]) -> None:
    z, t = random_logits(3, 50)
    try:
        out = offer["zero_temperature"](z, t)
    except (ValueError, AssertionError):
        return
    raise Wrong(f"accepted; logprob {(out[0] if isinstance(out, tuple) else out).flatten()[0].item()}")


def rollouts() -> tuple[Tensor, dict[str, Tensor]]:
    """Two rollouts of 1 and 9 trained tokens; logits (2, 9, 12)."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(2, 9, 12, generator=g)
    targets = torch.randint(12, (2, 9), generator=g)
    logprob = torch.log_softmax(z, 2).gather(2, targets[..., None])[..., 0]
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 0] = mask[1] = True
    p = {"targets": targets, "old": logprob + 0.05 * torch.randn(2, 9, generator=g), "mask": mask}
    p["advantages"] = torch.tensor([1.0, -0.5])
    return z.to(DEVICE), {k: v.to(DEVICE) for k, v in p.items()}


def true_loss(z: Tensor, p: dict[str, Tensor], level: str) -> Tensor:
    logprob = torch.log_softmax(z, 2).gather(2, p["targets"][..., None])[..., 0]
    log_ratio, m = logprob - p["old"].double(), p["mask"]
    if level == "sequence":
        mean = (log_ratio * m).sum(1, keepdim=True) / m.sum(1, keepdim=True)
        log_ratio = mean.expand_as(log_ratio)
    ratio, a = log_ratio.exp(), p["advantages"][:, None].double()
    row = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    return ((row * m).sum(1) / m.sum(1)).mean()


def sequence_ratio(offer: dict[str, Any]) -> None:
    for name in ("loss", "loss_per_token"):
        if name == "loss" or name in offer:
            z, p = rollouts()
            a, b = z.clone().requires_grad_(), z.double().requires_grad_()
            offer[name](a, p, "sequence").backward()
            true_loss(b, p, "sequence").backward()
            for i, n in ((0, 1), (1, 9)):
                near(a.grad[i], b.grad[i], 1e-4, f"{'' if name == 'loss' else 'unreduced: '}gradient at length {n}")


def micro_batches(offer: dict[str, Any]) -> None:
    """Token mean of two rollouts of 1 and 9 tokens, one micro-batch each, told the counts of the whole batch."""
    z, p = rollouts()
    tokens, sequences = int(p["mask"].sum()), len(z)
    alone = [{k: v[i : i + 1] for k, v in p.items()} for i in range(sequences)]
    parts = [offer["part_of_token_mean"](z[i : i + 1], q, tokens, sequences) for i, q in enumerate(alone)]
    m = p["mask"]
    row = torch.stack([true_loss(z[i : i + 1].double(), q, "token") for i, q in enumerate(alone)])
    near(torch.stack(parts).sum(), (row * m.sum(1)).sum() / m.sum(), 1e-5, "loss")


def far_rows(offer: dict[str, Any]) -> None:
    """Two rows more than 2^31 elements apart; only their own pages are touched."""
    gap = 2**31 + 16
    z = torch.empty(gap + 300, dtype=torch.bfloat16, device=DEVICE).as_strided((2, 300), (gap, 1))
    values, t = random_logits(2, 300)
    z.copy_(values)
    near(logprob_of(offer)(z, t), true_logprob(z, t), 1e-2, "logprob")


def all_masked(offer: dict[str, Any]) -> None:
    z, p = rollouts()
    p["mask"][:] = False
    leaf = z.requires_grad_()
    loss = offer["loss"](leaf, p, "token")
    if loss.isnan():
        raise Wrong("loss NaN")
    loss.backward()
    if leaf.grad is None or leaf.grad.any():
        raise Wrong("gradient not 0")


def entropy_gradient(offer: dict[str, Any]) -> None:
    z, t = random_logits(3, 50)
    a, b = z.clone().requires_grad_(), z.double().requires_grad_()
    out = offer["entropy"](a, t)
    if not out.requires_grad:
        raise Wrong("detached")
    out.sum().backward()
    logpi = torch.log_softmax(b, 1)
    (-(logpi.exp() * logpi).sum()).backward()
    near(a.grad, b.grad, 1e-5, "gradient")


def softcap_and_bias(offer: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(*s, generator=g).to(DEVICE) for s in ((6, 5), (40, 5), (40,)))
    t = torch.randint(40, (6,), generator=g).to(DEVICE)
    z = h.double() @ w.double().t()
    near(offer["linear_softcap"](h, w, t, 2.0), true_logprob(2 * torch.tanh(z / 2), t), 2e-6, "softcap: logprob")
    near(offer["linear_bias"](h, w, t, b), true_logprob(z + b, t), 2e-6, "bias: logprob")


def batch_of_one(offer: dict[str, Any]) -> None:
    """The same bf16 row, alone and in a batch of 64."""
    g = torch.Generator().manual_seed(0)
    h, w = (
        torch.randn(64, 64, generator=g).bfloat16().to(DEVICE),
        torch.randn(512, 64, generator=g).bfloat16().to(DEVICE),
    )
    t = torch.randint(512, (64,), generator=g).to(DEVICE)
    whole = offer["linear"](h, w, t)
    alone = torch.cat([offer["linear"](h[i : i + 1], w, t[i : i + 1]) for i in range(64)])
    if not torch.equal(whole, alone):
        raise Wrong(f"logprob moves by {(whole - alone).abs().max().item():.1e}")


def peaked_bf16(offer: dict[str, Any]) -> None:
    z = torch.zeros(1, 4000, dtype=torch.bfloat16, device=DEVICE)
    z[0, 3] = 12.5
    t = torch.tensor([3], device=DEVICE)
    pi = torch.softmax(z.double(), 1)
    truth = (pi - torch.nn.functional.one_hot(t, 4000)).square().sum(1)
    out = offer["norm"](z, t)
    if (out.double() / truth - 1).abs().item() > 1e-4:
        raise Wrong(f"norm squared {out.item():.1e}, truly {truth.item():.1e}")


def forty_nats(offer: dict[str, Any]) -> None:
    z = torch.zeros(1, 1000, device=DEVICE)
    z[0, 7] = 40.0
    t = torch.tensor([7], device=DEVICE)
    out, truth = offer["norm"](z, t).item(), (999**2 + 999) * float(torch.tensor(-80.0, dtype=torch.float64).exp())
    if abs(out / truth - 1) > 1e-5:
        raise Wrong(f"norm squared {out:.1e}, truly {truth:.1e}")


def masked_entry_under_gspo(offer: dict[str, Any]) -> None:
    z, p = rollouts()
    before = offer["loss"](z.clone().requires_grad_(), p, "sequence")
    p["old"] = torch.where(p["mask"], p["old"], 1e4)
    after = offer["loss"](z.clone().requires_grad_(), p, "sequence")
    if not torch.equal(before, after):
        raise Wrong(f"loss {before.item():.4f} becomes {after.item():.4f}")


def new_length(offer: dict[str, Any]) -> None:
    """Compilations while the completion length goes 6, 7, 8, 9."""
    z, p = rollouts()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counts = []
    for n in (6, 7, 8, 9):
        part = {k: v if v.dim() == 1 else v[:, :n] for k, v in p.items()}
        offer["compiled_loss"](z[:, :n].clone().requires_grad_(), part, "token").backward()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    if counts[-1] > counts[1]:
        raise Wrong(f"{counts[-1]} compilations over 4 lengths")


CASES: dict[str, Callable[[dict[str, Any]], None]] = {
    "first 2048 logits -inf": masked_vocabulary,
    "all logits -200": minus_200,
    "V = 1024+128": functools.partial(odd_vocabulary, 1152),
    "V = 129920": functools.partial(odd_vocabulary, 129920),
    "L = 65536 rows": many_rows,
    "strided or expanded upstream gradient": upstream,
    "temperature 1 (int)": integer_temperature,
    "temperature 0": zero_temperature,
    "sequence ratio, lengths 1 and 9": sequence_ratio,
    "token mean over two micro-batches": micro_batches,
    "rows 2^31 elements apart": far_rows,
    "all rows masked": all_masked,
    "entropy gradient": entropy_gradient,
    "softcap, bias": softcap_and_bias,
    "same row in another batch": batch_of_one,
    "bf16 norm at a peaked row": peaked_bf16,
    "fp32 norm, target 40 nats above": forty_nats,
    "masked entry perturbed under GSPO": masked_entry_under_gspo,
    "a new completion length": new_length,
}


def run() -> dict[str, dict[str, str]]:
    """case -> library -> verdict, for the libraries that import."""
    offers: dict[str, dict[str, Any]] = {}
    for name, library in LIBRARIES.items():
        try:
            offers[name] = library()
        except Exception as error:
            print(f"{name} left out: {error}")
    verdicts: dict[str, dict[str, str]] = {}
    for case, check in CASES.items():
        verdicts[case] = {}
        for name, offer in offers.items():
            try:
                check(offer)
                verdict = "ok"
            except Wrong as error:
                verdict = f"FAILS: {error}"
            except KeyError:
                verdict = "-"
            except Exception as error:
                verdict = f"FAILS: {type(error).__name__}: {str(error).strip().splitlines()[0][:80]}"
            verdicts[case][name] = verdict
            print(f"{case:40} {name:20} {verdict}", flush=True)
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description="Which installed libraries fail which case.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    verdicts = run()
    if options.json:
        options.json.write_text(json.dumps(verdicts, indent=1) + "\n")


if __name__ == "__main__":
    main()
