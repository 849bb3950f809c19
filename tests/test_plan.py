"""The plan's formulas against examples worked by hand, and against what a real model keeps."""

import pytest
import torch

from fastir.config import load_config
from fastir.plan import ModelShape, activation_bytes, disk_plan, memory_plan, model_shape, render, size, token_plan

#: 1,000 parameters in two layers of 200, beside an embedding of 30 · 19 + 30 = 600.
SMALL = ModelShape(
    parameters=1000, layers=2, hidden=30, intermediate=40, heads=3, kv_heads=1, head_dim=10, vocabulary=19, tied=True
)
LIMITS = [
    "rollout.prompts_per_step=4",
    "rollout.group_size=5",
    "tir.max_turns=3",
    "tir.turn_tokens=10",
    "tir.feedback_tokens=6",
    "tir.response_tokens=100",
    "training.token_budget=1000",
    "training.mini_batches=2",
    "training.epochs=3",
    "run.steps=7",
    "checkpoint.keep=2",
    "rollout.batch_size=8",
]


def plan_config(*more):
    return load_config("quickstart", [*LIMITS, *more])


def test_tokens_per_step():
    plan = token_plan(plan_config())
    assert plan.rollouts == 20
    assert plan.response_tokens == 48  # 3 turns of 10 + 6, under the budget of 100
    assert plan.policy_tokens == 30
    assert plan.trained_tokens == 20 * (256 + 48)
    assert plan.micro_batches == 2 * 4  # each half: 3,040 tokens in batches of 1,000
    assert plan.updates == 6


def test_the_token_budget_caps_a_rollout():
    plan = token_plan(plan_config("tir.response_tokens=20"))
    assert (plan.response_tokens, plan.policy_tokens) == (20, 20)


def test_ranks_share_the_micro_batches():
    assert token_plan(plan_config(), ranks=2).micro_batches == 2 * 2  # 1,520 tokens each


def test_memory_by_part():
    memory = memory_plan(SMALL, plan_config())
    assert memory == {
        "weights": 4000,
        "gathered weights": 4 * (600 + 2 * 200),
        "gradients": 4000,
        "AdamW state": 8000,
        "activations": 1000 * 4 * 2 * (8 * 30 + 2 * 30 + 3 * 10 + 4 * 40),
        "loss": 4 * (3 * 1000 * 19 + 19 * 30),
        "engine weights": 4000,
        "engine KV cache": 2 * 2 * 1 * 10 * 4 * (256 + 48) * (20 + 8),
    }


def test_bfloat16_halves_compute_and_ranks_divide_the_state():
    whole, halved = memory_plan(SMALL, plan_config()), memory_plan(SMALL, plan_config("model.dtype=bfloat16"), ranks=2)
    for part in ("gathered weights", "activations", "engine weights"):
        assert halved[part] * 2 == whole[part], part
    for part in ("weights", "gradients", "AdamW state"):
        assert halved[part] * 2 == whole[part], part
    assert halved["loss"] == whole["loss"]


def test_checkpointing_keeps_one_layer_in_full():
    layer = 8 * 30 + 2 * 30 + 3 * 10 + 4 * 40
    config = plan_config("model.gradient_checkpointing=true")
    assert activation_bytes(SMALL, config) == 1000 * 4 * (2 * 30 + layer)


def test_untied_heads_count_twice():
    untied = ModelShape(2000, 2, 30, 40, 3, 1, 10, 19, tied=False)
    assert untied.root_parameters == 2 * 19 * 30 + 30
    assert untied.layer_parameters == (2000 - 1170) // 2


def test_disk():
    assert disk_plan(SMALL, plan_config()) == {
        "checkpoints/": 16 * 1000 * 3,
        "trajectories.jsonl": 7 * 20 * (256 + 48) * 32,
    }
    assert "trajectories.jsonl" not in disk_plan(SMALL, plan_config("observe.trajectories=false"))


def test_shape_of_the_tiny_model_matches_its_weights(policy):
    shape = model_shape(load_config("quickstart"))
    assert shape.parameters == sum(parameter.numel() for parameter in policy.parameters())
    layer = sum(parameter.numel() for parameter in policy.model.base_model.layers[0].parameters())
    assert shape.layer_parameters == layer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_within_fifteen_percent_of_what_autograd_keeps(dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3, "vocab_size": 64}
    hf = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=32, attn_implementation="sdpa")
    model = LlamaForCausalLM(hf).to(getattr(torch, dtype)).model
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, 512, dtype=torch.long), use_cache=False)
    measured = sum(nbytes for nbytes, _ in kept.values())
    shape = ModelShape(0, 3, 128, 344, 4, 2, 32, 64)
    config = load_config("quickstart", [f"model.dtype={dtype}", "training.token_budget=512"])
    assert activation_bytes(shape, config) == pytest.approx(measured, rel=0.15)


def test_the_plan_reads_well():
    text = render(plan_config("rollout.dynamic_sampling=true"), SMALL)
    for words in ("1,000 parameters", "4 problems × 5 = 20 per step, 7 steps", "6 per step, 42 in all", "estimate"):
        assert words in text
    assert "dynamic sampling draws up to 100" in text


def test_sizes():
    assert [size(n) for n in (0, 999, 1000, 431_000_000, 26.5e9)] == ["0 B", "999 B", "1 kB", "431 MB", "26.5 GB"]
