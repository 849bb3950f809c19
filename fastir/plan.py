"""What a run will cost, before it starts: tokens and updates per step, memory by part, files on disk.

Everything is an estimate from formulas that stand in the docstrings; nothing is allocated. Counts of tokens are upper
bounds: rollouts mostly end early, and what cannot train is never forwarded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastir.config import Config, ConfigError
from fastir.observe.metrics import METRICS_FILE, TENSORBOARD_DIR, TRAJECTORIES_FILE

#: Prompts have no limit in the configuration; the plan takes this many tokens for each.
PROMPT_TOKENS = 256
#: A logged token takes about this many bytes in trajectories.jsonl: id, mask, turn, log-prob, and its text.
BYTES_PER_LOGGED_TOKEN = 32


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model that memory depends on."""

    parameters: int  #: tied weights counted once
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = True  #: the head is the embedding

    @property
    def root_parameters(self) -> int:
        """Outside the layers: embedding, head, last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def layer_parameters(self) -> int:
        return (self.parameters - self.root_parameters) // self.layers


@dataclass(frozen=True)
class TokenPlan:
    """Upper bounds for one step, over all ranks."""

    rollouts: int
    response_tokens: int  #: policy and feedback tokens of one rollout
    policy_tokens: int  #: sampled tokens of one rollout
    trained_tokens: int  #: tokens through the model in one pass of training, prompts included
    micro_batches: int  #: forward-backward passes for that, on each rank
    updates: int


def token_plan(config: Config, ranks: int = 1) -> TokenPlan:
    """Counts from the limits of the configuration.

    A rollout's response is at most ``min(response_tokens, max_turns · (turn_tokens + feedback_tokens))``, of which
    the policy samples at most ``max_turns · turn_tokens``; updates are ``mini_batches · epochs``. With
    ``dynamic_sampling`` a step may sample up to ``1 + max_resample_rounds`` times as many rollouts as it trains.
    """
    tir, training = config.tir, config.training
    rollouts = config.rollout.prompts_per_step * config.rollout.group_size
    response = min(tir.response_tokens, tir.max_turns * (tir.turn_tokens + tir.feedback_tokens))
    policy = min(response, tir.max_turns * tir.turn_tokens)
    forwarded = rollouts * (PROMPT_TOKENS + response)
    per_update_and_rank = math.ceil(forwarded / training.mini_batches / ranks)
    return TokenPlan(
        rollouts=rollouts,
        response_tokens=response,
        policy_tokens=policy,
        trained_tokens=forwarded,
        micro_batches=training.mini_batches * math.ceil(per_update_and_rank / training.token_budget),
        updates=training.mini_batches * training.epochs,
    )


def memory_plan(shape: ModelShape, config: Config, ranks: int = 1) -> dict[str, int]:
    """Bytes on each rank at its fullest, by part. P parameters, T = token_budget, b bytes of the compute dtype.

    - weights: float32 masters, ``4·P / ranks``
    - gathered weights: what FSDP holds unsharded in the compute dtype, ``b · (embedding and head + two layers)``
    - gradients: ``4·P / ranks``
    - AdamW state: two float32 moments, ``8·P / ranks``
    - activations: `activation_bytes`
    - loss: three float32 blocks of logits for one chunk of rows, and the head's float32 gradient ``4·V·H``
    - engine weights: a copy, ``b·P``
    - engine KV cache: ``2 · layers · kv_heads · head_dim · b`` for each token of the rollouts of the rank, plus those
      of the batch being decoded
    """
    from fastir_kernels.chunks import chunk_rows

    from fastir.training.model import resolve_device

    width = 4 if config.model.dtype == "float32" else 2
    tokens = token_plan(config, ranks)
    rollouts = math.ceil(tokens.rollouts / ranks)
    context = PROMPT_TOKENS + tokens.response_tokens
    rows = min(config.training.token_budget, chunk_rows(shape.vocabulary, resolve_device(config.model.device)))
    kv_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * width
    return {
        "weights": 4 * shape.parameters // ranks,
        "gathered weights": width * (shape.root_parameters + 2 * shape.layer_parameters),
        "gradients": 4 * shape.parameters // ranks,
        "AdamW state": 8 * shape.parameters // ranks,
        "activations": activation_bytes(shape, config),
        "loss": 4 * (3 * rows * shape.vocabulary + shape.vocabulary * shape.hidden),
        "engine weights": width * shape.parameters,
        "engine KV cache": kv_token * context * (rollouts + min(rollouts, config.rollout.batch_size)),
    }


def activation_bytes(shape: ModelShape, config: Config) -> int:
    """Bytes kept for the backward pass of one micro-batch of T tokens.

    A layer of the Llama family keeps, per token, about ``8·H + 2·Q + 3·K + 4·I`` numbers of the compute dtype (norms
    with their float32 inputs; rotated queries, attention output, keys and values; the gated MLP), where Q and K are
    the widths of queries and of keys. With gradient checkpointing only the layer's input (H) stays, and one layer at a
    time is recomputed in full.
    """
    width = 4 if config.model.dtype == "float32" else 2
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = 8 * shape.hidden + 2 * queries + 3 * keys + 4 * shape.intermediate
    kept = shape.layers * shape.hidden + layer if config.model.gradient_checkpointing else shape.layers * layer
    return config.training.token_budget * width * kept


def disk_plan(shape: ModelShape, config: Config) -> dict[str, int]:
    """Bytes on disk by file. A checkpoint holds float32 weights and both moments (``12·P``) and the model for
    transformers in the compute dtype (``b·P``); one more than ``keep`` exists while the next is written."""
    tokens = token_plan(config)
    width = 4 if config.model.dtype == "float32" else 2
    files = {"checkpoints/": (12 + width) * shape.parameters * (config.checkpoint.keep + 1)}
    if config.observe.trajectories:
        per_step = tokens.rollouts * (PROMPT_TOKENS + tokens.response_tokens) * BYTES_PER_LOGGED_TOKEN
        files[TRAJECTORIES_FILE] = config.run.steps * per_step
    return files


def model_shape(config: Config) -> ModelShape:
    """Sizes of the configured model, counted on torch's meta device: no weights are read or allocated.

    Raises:
        ConfigError: the model's configuration cannot be found.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from fastir.training.model import model_config

    try:
        hf: Any = model_config(config.model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {config.model.path!r}: its configuration cannot be read: {error}") from None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf, trust_remote_code=config.model.trust_remote_code)
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        intermediate=hf.intermediate_size,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        vocabulary=hf.vocab_size,
        tied=bool(hf.tie_word_embeddings),
    )


def render(config: Config, shape: ModelShape, ranks: int = 1) -> str:
    """The plan as text."""
    tokens = token_plan(config, ranks)
    memory = memory_plan(shape, config, ranks)
    steps = config.run.steps
    lines = [
        "plan (estimates; token counts are upper bounds)",
        f"  model         {shape.parameters:,} parameters, {shape.layers} layers, width {shape.hidden},"
        f" vocabulary {shape.vocabulary:,}",
        f"  rollouts      {config.rollout.prompts_per_step} problems × {config.rollout.group_size} ="
        f" {tokens.rollouts:,} per step, {steps} steps",
    ]
    if config.rollout.dynamic_sampling:
        most = (1 + config.rollout.max_resample_rounds) * tokens.rollouts
        lines.append(f"                dynamic sampling draws up to {most:,}")
    mini_batch = f", in batches of ≤ {tokens.rollouts // config.training.mini_batches} rollouts"
    lines += [
        f"  tokens        ≤ {tokens.policy_tokens:,} sampled, ≤ {tokens.response_tokens:,} with feedback per rollout;"
        f" ≤ {tokens.rollouts * tokens.policy_tokens:,} sampled per step",
        f"  training      ≤ {tokens.trained_tokens:,} tokens per pass (prompts taken as {PROMPT_TOKENS}),"
        f" ≤ {tokens.micro_batches} micro-batches of {config.training.token_budget:,} on each of {ranks} rank(s)",
        f"  updates       {tokens.updates} per step, {steps * tokens.updates} in all"
        + (mini_batch if config.training.mini_batches > 1 else ""),
        f"  memory        {size(sum(memory.values()))} per rank, beside about 1 GB for Python and its libraries",
        *(f"    {part:<18}{size(amount):>9}" for part, amount in memory.items()),
        f"  files         {config.run_dir}/",
        *(f"    {name:<18}{'≤ ' + size(amount):>11}" for name, amount in disk_plan(shape, config).items()),
        f"    {', '.join(_small_files(config))}",
    ]
    return "\n".join(lines)


def size(amount: float) -> str:
    """Bytes for people: 3 significant digits and a decimal unit."""
    units: Sequence[str] = ("B", "kB", "MB", "GB", "TB")
    power = min(len(units) - 1, int(math.log10(amount) // 3)) if amount >= 1 else 0
    return f"{amount / 1000**power:.3g} {units[power]}"


def _small_files(config: Config) -> list[str]:
    return [METRICS_FILE, "summary.json", *([f"{TENSORBOARD_DIR}/"] if config.observe.tensorboard else [])]
