"""Settings: every one documented, and every mistake answered with the field, what is allowed, and the nearest name."""

import json
import os
import subprocess
import sys

import pytest

from fastir.config import Config, ConfigError, allowed, fields, load_config, recipe_names, validate


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads(name):
    assert load_config(name).run.steps > 0


def test_every_field_has_a_description_and_a_type_in_words():
    names = dict(fields())
    assert {"run.name", "algorithm.loss.kind", "sandbox.memory_mb"} <= names.keys()
    for name, info in names.items():
        assert info.description, f"{name} has no description"
        assert info.description.endswith("."), f"{name}: a description is a sentence"
        assert allowed(info), name
        assert not info.is_required(), f"{name} needs a default"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        # An unknown key: the nearest name in its section, a name in another section, a whole section.
        ("rollout.engin=hf", ["'rollout.engin'", "did you mean 'rollout.engine'?", "group_size"]),
        ("lr=1", ["did you mean 'optimizer.lr'?"]),
        ("rollout.lr=1", ["did you mean 'optimizer.lr'?"]),
        ("loss.kind=grpo", ["did you mean 'algorithm.loss'?"]),
        ("optimizr.lr=1", ["did you mean 'optimizer'?"]),
        ("sandbox.memory=1", ["did you mean 'sandbox.memory_mb'?"]),
        # A bad value: the field, the value, what is allowed, the nearest.
        (
            "algorithm.void_filter=maks",
            ["algorithm.void_filter = 'maks'", "allowed: 'mask', 'drop' or 'off'", "did you mean 'mask'?"],
        ),
        ("optimizer.lr=fast", ["optimizer.lr = 'fast'", "allowed: number > 0"]),
        ("optimizer.lr=nan", ["optimizer.lr"]),
        ("run.seed=-1", ["run.seed = -1", "allowed: whole number >= 0"]),
        ("run.steps=1.5", ["run.steps = 1.5", "allowed: whole number > 0"]),
        ("rollout.max_failed_share=2", ["allowed: number >= 0 and <= 1"]),
        ("algorithm.loss.dual_clip=0.5", ["allowed: number > 1 or none"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas", "allowed: [number, number]"]),
        ("tir.stop=x", ["tir.stop = 'x'", "allowed: list of text"]),
        ("observe.tensorboard=maybe", ["allowed: true or false"]),
        ("run.name=../x", ["run.name = '../x'", "allowed: text matching"]),
        ("algorithm.loss=3", ["algorithm.loss is a section", "algorithm.loss.kind"]),
        ("run.name.x=3", ["run.name.x: name is a value"]),
        ("run.steps", ["'run.steps' is not of the form section.field=value"]),
        # Settings that contradict one another.
        ("training.mini_batches=17", ["training.mini_batches cannot exceed rollout.prompts_per_step"]),
        ("algorithm.loss.importance_correction=tis", ["needs training.old_logprobs = 'recompute'"]),
        ("data.prompt_template=Q", ["data.prompt_template must contain {question}"]),
    ],
)
def test_mistakes_are_explained(override, words):
    with pytest.raises(ConfigError) as error:
        load_config("quickstart", [override])
    for word in words:
        assert word in str(error.value)


def test_every_mistake_is_reported_at_once():
    with pytest.raises(ConfigError) as error:
        load_config("quickstart", ["run.seed=-1", "eval.evry=3"])
    assert "run.seed" in str(error.value)
    assert "eval.every" in str(error.value)


def test_overrides_win_and_keep_their_type():
    config = load_config(
        "quickstart",
        [
            "optimizer.lr=2e-5",
            "run.steps=7",
            "observe.tensorboard=false",
            "run.name=2024",  # text, though it looks like a number
            "model.path=/tmp/a b=c",
            'data.prompt_template="{question}\\n"',
            "tir.stop=['a', '\\n']",
            "optimizer.betas=[0.8, 0.9]",
            "algorithm.loss.kind=cispo",
        ],
    )
    assert config.optimizer.lr == 2e-5
    assert config.run.steps == 7
    assert config.observe.tensorboard is False
    assert config.run.name == "2024"
    assert config.model.path == "/tmp/a b=c"
    assert config.data.prompt_template == "{question}\n"
    assert config.tir.stop == ("a", "\\n")  # a TOML literal string keeps its backslash
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.algorithm.loss.kind == "cispo"
    assert config.rollout.prompts_per_step == load_config("quickstart").rollout.prompts_per_step


def test_none_empties_a_field_that_may_be_empty_and_is_a_word_elsewhere(tmp_path):
    config = load_config("quickstart", ["data.heldout=none", "optimizer.grad_clip=none", "run.name=none"])
    assert config.data.heldout is None
    assert config.optimizer.grad_clip is None
    assert config.run.name == "none"
    assert load_config("quickstart", ["algorithm.loss.importance_correction=none"]) == load_config("quickstart")
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[optimizer]\ngrad_clip = "none"\n')
    assert load_config(recipe).optimizer.grad_clip is None


def test_recipes_from_files(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[run]\nname = "mine"\n')
    assert load_config(path, ["run.seed=3"]).run_dir.name == "mine"
    path.write_text("[run\n")
    with pytest.raises(ConfigError, match=r"mine\.toml: not valid TOML"):
        load_config(path)
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "other.toml")
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        load_config("quickstrat")


def test_a_config_round_trips_through_json():
    config = load_config("quickstart", ["optimizer.grad_clip=none"])
    assert validate(json.loads(config.model_dump_json())) == config


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Config().run.seed = 3


def test_reading_settings_imports_nothing_heavy():
    code = "import fastir.config, sys; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=60)
