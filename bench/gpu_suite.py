"""Correctness and speed of every kernel on one CUDA GPU in under eight minutes: ``python bench/gpu_suite.py``.

Needs torch and triton; TRL and Liger are measured too where they are installed. Sizes follow the memory of the device.
The ceilings (bandwidth of a device-to-device copy, rate of a plain bf16 product of the same shape) are measured in the
same run. Results go to a file (``--out``) after every step, so a run that is cut short leaves what it had. ``--smoke``
runs every step at toy sizes on a CPU, with Triton's interpreter, to try the script itself.
"""

# ruff: noqa: E402  (the environment is set before torch is imported)
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BUDGET_S = 450.0
START = time.monotonic()

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["FASTIR_KERNELS_BACKEND"] = "triton"

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "kernels")]

import fastir_kernels as fk
from fastir_kernels.linear_policy import naive_linear_policy_loss
from fastir_kernels.logprobs import naive_token_logprobs

SMOKE = "--smoke" in sys.argv
DEVICE = torch.device("cpu" if SMOKE else "cuda")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Drawn in slices, so that no fp32 copy of a large bf16 tensor is ever held."""
    out = torch.empty(shape, dtype=dtype, device=DEVICE)
    g = generator(seed)
    for part in out.split(max(1, (1 << 27) // max(1, out[0].numel()))):
        part.copy_(scale * torch.randn(part.shape, generator=g, device=DEVICE))
    return out


def labels(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randint(columns, (rows,), generator=generator(seed), device=DEVICE)


def relative(ours: Tensor, truth: Tensor) -> float:
    if not torch.isfinite(truth).all():
        raise ValueError("the float64 truth is not finite")
    return (
        float("inf")
        if ours.isnan().any()
        else ((ours.double() - truth.double()).abs().max() / truth.double().abs().max().clamp(min=1e-300)).item()
    )


def milliseconds(call: Callable[[], object], seconds: float = 3.0) -> float:
    """Median time of a call over at least five rounds, or what fits into so many seconds."""
    call()
    times: list[float] = []
    end = time.monotonic() + seconds
    while len(times) < 3 or (len(times) < 20 and time.monotonic() < end):
        if SMOKE:
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
            continue
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def free_bytes() -> int:
    return 1 << 30 if SMOKE else torch.cuda.mem_get_info()[0]


def rows_that_fit(bytes_per_row: float, most: int) -> int:
    rows = most
    while rows > 256 and rows * bytes_per_row > 0.7 * free_bytes():
        rows //= 2
    return rows


# --- steps: each returns a dict that goes into the report ---------------------------------------------------------


def device() -> dict[str, Any]:
    import triton

    name = "cpu" if SMOKE else torch.cuda.get_device_name()
    return {"name": name, "torch": torch.__version__, "triton": triton.__version__, "free_gib": free_bytes() >> 30}


def ceilings() -> dict[str, Any]:
    n = 1 << 16 if SMOKE else min(4 << 30, free_bytes() // 8)
    a = torch.zeros(n, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    copy = 2 * n / milliseconds(lambda: b.copy_(a)) / 1e6
    return {"copy_gb_per_s": copy}


def check_rows() -> dict[str, Any]:
    """token_logprobs against float64: vocabularies, dtypes, strides, masks, -inf, in place."""
    worst: dict[str, float] = {}
    shapes = (33, 1152, 2049) if SMOKE else (1, 129, 1152, 49152, 129920, 151936, 152064, 262144)
    for columns in shapes:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            z = randn(8, columns, dtype=dtype, scale=3)
            z[0, : columns // 2] = -torch.inf
            t = labels(8, columns)
            t[0] = columns - 1
            temperature = torch.linspace(0.5, 2, 8, device=DEVICE)
            mask = torch.arange(8, device=DEVICE) != 3
            up = torch.randn(2, 8, generator=generator(2), device=DEVICE)
            for layout in ("rows", "columns"):
                leaf = (z if layout == "rows" else z.t().contiguous().t()).detach().requires_grad_()
                ours = fk.token_logprobs(leaf, t, temperature=temperature, mask=mask)
                (ours.logprob * up[0] + ours.entropy * up[1]).sum().backward()
                true = z.double().requires_grad_()
                truth = naive_token_logprobs(true, t, temperature=temperature.double(), mask=mask)
                (truth.logprob * up[0] + truth.entropy * up[1]).sum().backward()
                if columns == 1:
                    continue
                for name, a, b in zip(fk.TokenStats._fields, ours, truth):
                    worst[name] = max(worst.get(name, 0.0), relative(a, b))
                key = f"gradient {dtype}".replace("torch.", "")
                worst[key] = max(worst.get(key, 0.0), relative(leaf.grad, true.grad))
    half = 1.0 if SMOKE else 0.51  # of a unit in the last place: the interpreter truncates
    bars = {
        "gradient bfloat16": half * 2**-7,
        "gradient float16": half * 2**-10,
        "gradient float32": 1e-5,
        "entropy": 5e-6,
    }
    return {"errors": worst, "passed": all(v <= bars.get(k, 3e-6) for k, v in worst.items())}


def check_batches() -> dict[str, Any]:
    """The same bits alone and in a batch of 4096; more than 65,535 rows; rows more than 2^31 elements apart."""
    rows, columns, hidden = (40, 300, 16) if SMOKE else (4096, 151936, 1024)
    z, t = randn(rows, columns, dtype=torch.bfloat16, scale=3), labels(rows, columns)
    whole = torch.stack(list(fk.token_logprobs(z, t)))
    picks = (0, 1, rows // 2, rows - 1)
    alone = all(
        torch.equal(torch.stack(list(fk.token_logprobs(z[r : r + 1], t[r : r + 1])))[:, 0], whole[:, r]) for r in picks
    )
    del z
    h, w = randn(rows, hidden, dtype=torch.bfloat16), randn(columns, hidden, dtype=torch.bfloat16, scale=0.1)
    linear = torch.stack(list(fk.linear_token_logprobs(h, w, t)))
    linear_alone = all(
        torch.equal(torch.stack(list(fk.linear_token_logprobs(h[r : r + 1], w, t[r : r + 1])))[:, 0], linear[:, r])
        for r in picks
    )
    small, ts = randn(200 if SMOKE else 65536, 32), labels(200 if SMOKE else 65536, 32)
    many = relative(fk.token_logprobs(small, ts).logprob, naive_token_logprobs(small.double(), ts).logprob)
    gap = 1000 if SMOKE else 2**31 + 16
    far = torch.empty(gap + 1000, dtype=torch.bfloat16, device=DEVICE).as_strided((2, 1000), (gap, 1))
    near = randn(2, 1000, dtype=torch.bfloat16)
    far.copy_(near)
    apart = torch.equal(fk.token_logprobs(far, ts[:2]).logprob, fk.token_logprobs(near, ts[:2]).logprob)
    return {
        "same_bits_alone": alone,
        "linear_same_bits_alone": linear_alone,
        "many_rows_error": many,
        "rows_2_31_apart": apart,
        "passed": alone and linear_alone and many < 3e-6 and apart,
    }


def policy_problem(rows: int, hidden: int, vocabulary: int, dtype: torch.dtype, kept: float) -> dict[str, Any]:
    g = generator(3)
    length = max(1, rows // 8)
    cu = torch.arange(0, rows + 1, length, dtype=torch.int32, device=DEVICE)
    cu[-1] = rows
    return {
        "hidden": randn(rows, hidden, dtype=dtype),
        "weight": randn(vocabulary, hidden, dtype=dtype, scale=2 / hidden**0.5, seed=4),
        "targets": labels(rows, vocabulary),
        "old_logprob": -5 - 4 * torch.rand(rows, generator=g, device=DEVICE),
        "advantages": torch.randn(rows, generator=g, device=DEVICE),
        "cu_seqlens": cu,
        "mask": torch.rand(rows, generator=g, device=DEVICE) < kept,
    }


def check_policy() -> dict[str, Any]:
    """linear_policy_loss against float64 autograd through materialised logits."""
    worst: dict[str, float] = {}
    specs = {
        "grpo": fk.LossSpec(),
        "gspo": fk.LossSpec(kind="gspo", dual_clip=3.0),
        "cispo k3": fk.LossSpec(kind="cispo", kl="k3", kl_coef=0.1, aggregation="token_mean"),
        "entropy tis": fk.LossSpec(entropy_coef=0.02, importance="tis"),
    }
    rows, hidden, vocabulary = (24, 8, 130) if SMOKE else (512, 256, 5000)
    for dtype in (torch.float32, torch.bfloat16):
        for name, spec in specs.items():
            p = policy_problem(rows, hidden, vocabulary, dtype, 0.6)
            p["ref_logprob"], p["behavior_logprob"] = p["old_logprob"] + 0.1, p["old_logprob"] - 0.1
            true = {k: v.double() if v.is_floating_point() else v for k, v in p.items()}
            for q in (p, true):
                q["hidden"].requires_grad_()
                q["weight"].requires_grad_()
            ours = fk.linear_policy_loss(**p, spec=spec)
            ours.loss.backward()
            naive_linear_policy_loss(**true, spec=spec).backward()
            error = max(relative(p[k].grad, true[k].grad) for k in ("hidden", "weight"))
            worst[f"{name} {dtype}".replace("torch.", "")] = error
    return {"errors": worst, "passed": all(v < (1e-5 if "float32" in k else 2**-6) for k, v in worst.items())}


def check_compile() -> dict[str, Any]:
    p = policy_problem(24, 8, 130, torch.float32, 0.6)
    leaf = p["hidden"].requires_grad_()

    def loss(**q: Any) -> Tensor:
        return fk.linear_policy_loss(**q, spec=fk.LossSpec()).loss

    (want,) = torch.autograd.grad(loss(**p), leaf)
    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(**p), leaf)
    return {"passed": relative(got, want) < 1e-5}


def speed_token_logprobs() -> dict[str, Any]:
    columns = 500 if SMOKE else 151936
    rows = 64 if SMOKE else rows_that_fit(2 * 2 * columns, 16384)
    z, t = randn(rows, columns, dtype=torch.bfloat16, scale=3), labels(rows, columns)
    with torch.no_grad():
        forward = milliseconds(lambda: fk.token_logprobs(z, t))
    out: dict[str, Any] = {"rows": rows, "columns": columns, "forward_ms": forward}
    out["forward_gb_per_s"] = 2 * rows * columns / forward / 1e6
    leaf = z.requires_grad_()

    def backward() -> None:
        leaf.grad = None
        fk.token_logprobs(leaf, t).logprob.sum().backward()

    out["forward_backward_ms"] = milliseconds(backward)
    leaf.grad = None
    try:
        from trl.kernels import selective_log_softmax_and_entropy as fused
    except Exception as error:
        out["trl"] = f"left out: {error}"
        return out
    with torch.no_grad():
        out["trl_forward_ms"] = milliseconds(lambda: fused(leaf, t))
    return out


def speed_linear() -> dict[str, Any]:
    """The head and the loss, the plain product of the same shape, and the peers."""
    from kernel_peers import Problem, loss_peers

    hidden, vocabulary = (16, 300) if SMOKE else (3584, 152064)
    rows = 64 if SMOKE else rows_that_fit(4 * hidden + 2 * vocabulary, 16384)
    out: dict[str, Any] = {"rows": rows, "hidden": hidden, "vocabulary": vocabulary}
    h = randn(rows, hidden, dtype=torch.bfloat16)
    w = randn(vocabulary, hidden, dtype=torch.bfloat16, scale=2 / hidden**0.5, seed=4)
    some = min(rows, 4096)
    product = milliseconds(lambda: torch.mm(h[:some], w.t()))
    out["product_tflops"] = 2 * some * hidden * vocabulary / product / 1e9
    t = labels(rows, vocabulary)
    with torch.no_grad():
        out["linear_token_logprobs_ms"] = milliseconds(lambda: fk.linear_token_logprobs(h, w, t))
        old = fk.linear_token_logprobs(h, w, t).logprob + 0.05 * torch.randn(rows, generator=generator(), device=DEVICE)
    h.requires_grad_()
    w.requires_grad_()
    for kept in (1.0, 0.5):
        mask = torch.rand(rows, generator=generator(5), device=DEVICE) < kept
        batch = (8, rows // 8)
        advantages = torch.linspace(-1, 1, 8, device=DEVICE)
        p = Problem(h.view(*batch, -1), w, t.view(batch), old.view(batch), advantages, mask.view(batch))
        for name, function in loss_peers().items():
            if name == "torch fp32":
                continue

            def step(function: Callable[[Problem], Tensor] = function, p: Problem = p) -> None:
                h.grad = w.grad = None
                function(p).backward()

            key = f"{name}, {kept:.0%} of the rows"
            try:
                if not SMOKE:
                    torch.cuda.reset_peak_memory_stats()
                    held = torch.cuda.memory_allocated()
                ms = milliseconds(step)
                peak = 0 if SMOKE else torch.cuda.max_memory_allocated() - held
                out[key] = {"ms": ms, "peak_extra_mib": peak >> 20}
                if name == "fastir_kernels":
                    rate = 6 * int(mask.sum()) * hidden * vocabulary / ms / 1e9
                    out[key] |= {"tflops": rate, "of_the_product": rate / out["product_tflops"]}
            except Exception as error:
                out[key] = f"failed: {type(error).__name__}: {str(error)[:200]}"
            print(f"  {key}: {out[key]}", flush=True)
    return out


def large_weight() -> dict[str, Any]:
    """A weight of more than 2^31 elements."""
    vocabulary, hidden = (300, 16) if SMOKE else (262144, 8208)
    if not SMOKE and free_bytes() < 4 * vocabulary * hidden * 2:
        return {"skipped": "not enough memory"}
    w, h = randn(vocabulary, hidden, dtype=torch.bfloat16, scale=0.02), randn(16, hidden, dtype=torch.bfloat16)
    t = torch.full((16,), vocabulary - 1, device=DEVICE)
    got = fk.linear_token_logprobs(h, w, t).logprob
    z = torch.cat([h.float() @ part.float().t() for part in w.split(16384)], dim=1).double()
    return {"passed": relative(got, naive_token_logprobs(z, t).logprob) < 1e-5}


STEPS: tuple[Callable[[], dict[str, Any]], ...] = (
    device,
    ceilings,
    check_rows,
    check_batches,
    check_policy,
    check_compile,
    speed_token_logprobs,
    speed_linear,
    large_weight,
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Correctness and speed of the kernels on one GPU.")
    parser.add_argument("--out", type=Path, default=Path("gpu_suite.json"))
    parser.add_argument("--smoke", action="store_true", help="toy sizes on a CPU, to try the script itself")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    for step in STEPS:
        used = time.monotonic() - START
        if used > BUDGET_S:
            print(f"{step.__name__}: left out, {used:.0f} s used", flush=True)
            report[step.__name__] = {"skipped": "time"}
            continue
        print(f"[{used:5.0f} s] {step.__name__}", flush=True)
        try:
            report[step.__name__] = step()
        except Exception as error:
            report[step.__name__] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        print(f"  {report[step.__name__]}", flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        if not SMOKE:
            torch.cuda.empty_cache()
    speed, copy = report.get("speed_token_logprobs", {}), report.get("ceilings", {})
    if "forward_gb_per_s" in speed and "copy_gb_per_s" in copy:
        print(f"token_logprobs forward: {speed['forward_gb_per_s'] / copy['copy_gb_per_s']:.1%} of the copy bandwidth")
    failed = [name for name, result in report.items() if result.get("passed") is False]
    print(f"failed: {', '.join(failed) or 'none'}; {time.monotonic() - START:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
