"""Checkpoints: everything a run needs to continue with the numbers of a run that never stopped.

A checkpoint is written under a temporary name, flushed to disk, then renamed; a folder named ``step-N`` is therefore
complete. Inside: ``model/`` (Hugging Face format, loads with transformers), ``state/`` (torch distributed checkpoint:
float32 weights and optimizer), ``trainer.json`` (counters), ``rng-R.json`` (random state of rank R).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from fastir.training.model import Policy, full_parameters


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not belong to this run."""


def save(
    folder: Path,
    step: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    tokenizer: Any,
    counters: dict[str, Any],
    *,
    keep: int,
    export_dtype: torch.dtype,
) -> Path:
    """Write ``folder/step-<step>`` (collective) and remove all but the ``keep`` newest.

    Args:
        step: steps completed.
        counters: JSON-able; given back by `load`.
        export_dtype: of the Hugging Face copy in ``model/``.
    """
    rank = dist.get_rank()
    target, partial = folder / f"step-{step}", folder / f".partial-step-{step}"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    export_model(partial / "model", policy, tokenizer, export_dtype)
    fresh = not optimizer.state  # torch's state dict would make the state of an optimizer that has done one step
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    if fresh:
        optimizer.state.clear()
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial / "state")
    (partial / f"rng-{rank}.json").write_text(json.dumps({"torch": torch.get_rng_state().tolist()}))
    dist.barrier()
    if rank == 0:
        (partial / "trainer.json").write_text(json.dumps({"step": step, "fresh": fresh, **counters}, indent=1))
        for path in sorted(partial.rglob("*")):
            _flush(path)
        _flush(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _flush(folder)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def load(path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore weights, optimizer and random state (collective); returns the counters.

    Raises:
        CheckpointError: the folder is damaged or holds another model.
    """
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    try:
        counters = json.loads((path / "trainer.json").read_text())
        dcp.load(state, checkpoint_id=path / "state")
        rng = path / f"rng-{dist.get_rank()}.json"
        if rng.exists():  # a larger number of ranks than before starts its new ones afresh
            torch.set_rng_state(torch.tensor(json.loads(rng.read_text())["torch"], dtype=torch.uint8))
    except (OSError, KeyError, ValueError, RuntimeError, dcp.api.CheckpointException) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be loaded: {error}; remove it to resume from an older one"
        ) from error
    set_state_dict(
        policy,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],  # type: ignore[arg-type]
    )
    if counters.pop("fresh", False):
        optimizer.state.clear()
    return counters


def snapshot(policy: Policy, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Copy this rank's weights and optimizer state to host memory; calling the result puts them back."""
    weights = [_to_host(p.detach()) for p in policy.parameters()]
    states = [
        {name: _to_host(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        for state in (optimizer.state.get(p, {}) for p in policy.parameters())
    ]

    @torch.no_grad()
    def restore() -> None:
        for parameter, weight, state in zip(policy.parameters(), weights, states, strict=True):
            _local(parameter).copy_(weight)
            if not state:
                optimizer.state.pop(parameter, None)
            for name, value in state.items():
                held = optimizer.state[parameter][name]
                if isinstance(held, torch.Tensor):
                    _local(held).copy_(value)
                else:
                    optimizer.state[parameter][name] = value

    return restore


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [
        p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdigit() and (p / "trainer.json").exists()
    ]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def export_model(folder: Path, policy: Policy, tokenizer: Any, dtype: torch.dtype) -> None:
    """Write the weights in Hugging Face format with the tokenizer (collective; rank 0 writes)."""
    weights = {name: tensor.to(dtype).cpu() for name, tensor in full_parameters(policy)}
    if dist.get_rank() != 0:
        return
    buffers = {
        name: tensor
        for name, tensor in policy.model.state_dict().items()
        if name not in dict(policy.model.named_parameters(remove_duplicate=False))
    }
    policy.model.save_pretrained(folder, state_dict={**weights, **buffers})
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return _local(tensor).to("cpu", copy=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
