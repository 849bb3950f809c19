"""What runs inside a vLLM worker, in process or in a server: it shows which weights it holds, and takes new ones.

A server is given this module by ``--worker-extension-cls fastir.rollout.vllm_worker.WorkerExtension``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from fastir.rollout.vllm_weights import Probe, combine

#: Name of the weight-transfer backend below (``--weight-transfer-config '{"backend": "fastir_files"}'``).
FILE_BACKEND = "fastir_files"


def parameter_names(model: torch.nn.Module) -> list[str]:
    """Transformers names of all weights; of tied ones only the first."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    names = []
    for name, _ in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        names += [f"{parent}.{part}.{attribute}" for part in fused[module]] if module in fused else [name]
    return names


def held_fingerprints(model: torch.nn.Module, probes: list[Probe], dtype: torch.dtype) -> dict[str, int | None]:
    """`fastir.rollout.vllm_weights.fingerprint` of what the model computes with, by name; None where it has no such
    weight."""
    return {probe.name: _held(model, probe, dtype) for probe in probes}


@torch.inference_mode()
def _held(model: torch.nn.Module, probe: Probe, dtype: torch.dtype) -> int | None:
    found = _locate(model, probe.name)
    if found is None:
        return None
    module, attribute, first = found
    rows = slice(first, first + probe.shape[0])
    weight = getattr(module, attribute)
    repacked = (
        attribute == "weight"
        and hasattr(module, "cpu_linear")
        and (isinstance(module, ParallelLMHead) or not isinstance(module, VocabParallelEmbedding))
    )

    def parts() -> Iterator[torch.Tensor]:
        for columns in probe.columns():
            if len(probe.shape) == 1:
                yield weight[rows][columns.to(weight.device)].to(dtype)[:, None]
            elif repacked:
                identity = torch.zeros(len(columns), probe.shape[1], dtype=dtype)
                identity[torch.arange(len(columns)), columns] = 1
                yield module.quant_method.apply(module, identity)[:, rows]
            else:
                yield weight[rows][:, columns.to(weight.device)].to(dtype).T

    return combine(parts())


def _locate(model: torch.nn.Module, name: str) -> tuple[Any, str, int] | None:
    """(module, attribute, first row in it) that hold a weight of this transformers name."""
    path, _, attribute = name.rpartition(".")
    modules = dict(model.named_modules())
    if path in modules:
        return (modules[path], attribute, 0) if getattr(modules[path], attribute, None) is not None else None
    parent, _, part = path.rpartition(".")
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        module = modules.get(f"{parent}.{fused}")
        if part in parts and module is not None:
            return module, attribute, sum(module.output_sizes[: parts.index(part)])
    return None


class WorkerExtension:
    """Methods that the client of a server calls on its workers."""

    def fastir_parameters(self) -> dict[str, Any]:
        """Names of all weights, their type, and the tensor-parallel size."""
        config = self.vllm_config  # type: ignore[attr-defined]
        return {
            "names": parameter_names(self.model_runner.get_model()),  # type: ignore[attr-defined]
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "tied": bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False)),
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        }

    def fastir_fingerprints(self, probes: list[list[Any]]) -> dict[str, int | None]:
        """`held_fingerprints`; a probe comes as (name, shape, start, step)."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        dtype = self.vllm_config.model_config.dtype  # type: ignore[attr-defined]
        wanted = [Probe(name, tuple(shape), start, step) for name, shape, start, step in probes]
        return held_fingerprints(model, wanted, dtype)


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing is set up: each update names its file."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    path: str  #: a safetensors file of full tensors that the worker can read


class FileWeightTransfer(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """vLLM weight transfer over files in a folder that trainer and server share: works on every device, where vLLM's
    own transports need CUDA on both sides."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        with safe_open(update_info.path, framework="pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(FILE_BACKEND, __name__, "FileWeightTransfer")
