"""The vocabulary cut over two processes against the whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fastir_kernels import linear_token_logprobs
from kernel_cases import BACKENDS, relative

T, H, V, CUT = 9, 8, 101, 37  # shards of unequal size


def problem() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    weight = torch.randn(V, H, generator=g)
    hidden = torch.randn(T, H, generator=g)
    targets = torch.tensor([0, 36, 37, 100, 50, 3, 99, 40, 10])
    weight[100] *= 4
    hidden[3] = 40 * weight[100] / weight[100].norm() ** 2  # this target holds nearly all the mass
    return {"hidden": hidden, "weight": weight, "bias": torch.randn(V, generator=g), "targets": targets}


def step(p: dict[str, torch.Tensor], **options: object) -> list[torch.Tensor]:
    leaves = {k: p[k].clone().requires_grad_() for k in ("hidden", "weight", "bias")}
    mask = torch.arange(T) != 5
    out = linear_token_logprobs(
        **leaves,
        targets=p["targets"],
        mask=mask,
        softcap=60.0,
        temperature=0.7,
        **options,  # type: ignore[arg-type]
    )
    (out.logprob * torch.arange(T) + 0.3 * out.entropy).sum().backward()
    return [*(x.detach() for x in out), *(x.grad for x in leaves.values() if x.grad is not None)]


def rank(index: int, store: str, out: str, backend: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=index, world_size=2)
    p = problem()
    rows = slice(0, CUT) if index == 0 else slice(CUT, V)
    shard = {**p, "weight": p["weight"][rows], "bias": p["bias"][rows]}
    group = dist.group.WORLD
    torch.save(step(shard, tp_group=group, vocab_start=rows.start, backend=backend), f"{out}{index}")
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_processes_match_the_whole_vocabulary(backend: str, tmp_path: Path) -> None:
    mp.spawn(rank, args=(str(tmp_path / "store"), str(tmp_path / "out"), backend), nprocs=2)
    truth = step(problem())
    assert truth[0][3] > -1e-6  # the row whose mass is on the target
    for index, rows in ((0, slice(0, CUT)), (1, slice(CUT, V))):
        got = torch.load(tmp_path / f"out{index}")
        for a, b in zip(got[:5], truth[:5]):  # the statistics and the hidden gradient are whole on both ranks
            assert relative(a, b) < 3e-6
        assert abs(got[2][3] / truth[2][3] - 1) < 1e-5  # the norm of the peaked row, itself
        assert relative(got[5], truth[5][rows]) < 3e-6
        assert relative(got[6], truth[6][rows]) < 3e-6
