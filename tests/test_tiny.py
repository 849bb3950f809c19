"""The quickstart's problems and base model: what they promise, checked on the committed files."""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastir.tiny.problems import arithmetic, split_of, tiny_problems

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "fastir" / "tiny" / "base"


def _numbers(question: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", question))


def _solve(question: str) -> int:
    """The answer, worked out from the question's words alone."""
    n = _numbers(question)
    if match := re.fullmatch(r"What is \d+ (\*|times|\+|-) \d+\?", question):
        return {"*": n[0] * n[1], "times": n[0] * n[1], "+": n[0] + n[1], "-": n[0] - n[1]}[match[1]]
    assert question.startswith("A shop has ")
    change = -n[2] if "sells" in question else n[2]
    assert ("sells" in question) == question.endswith("are left?")
    return sum([n[1]] * n[0]) + change


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_answers_are_right_and_never_negative(split: Any) -> None:
    for problem in tiny_problems(split, 1000, seed=3):
        assert int(problem.answer) == _solve(problem.question) >= 0


def test_expression_and_answer_agree() -> None:
    for _, problem in zip(range(300), arithmetic("train", 5)):
        assert eval(problem.expression) == problem.answer
        assert _numbers(problem.question) == problem.operands


def test_same_seed_same_problems_other_seed_others() -> None:
    first = tiny_problems("train", 200, seed=1)
    assert first == tiny_problems("train", 200, seed=1)
    assert first[:50] == tiny_problems("train", 50, seed=1)
    assert first != tiny_problems("train", 200, seed=2)
    ids = [p.id for p in first + tiny_problems("heldout", 200, seed=1) + tiny_problems("train", 200, seed=2)]
    assert len(set(ids)) == len(ids)


def test_splits_share_no_operands_whatever_the_seeds() -> None:
    def keys(split: Any, seed: int) -> set[tuple[int, ...]]:
        return {tuple(sorted(_numbers(p.question))) for p in tiny_problems(split, 3000, seed)}

    train = set.union(*(keys("train", seed) for seed in range(3)))
    heldout = set.union(*(keys("heldout", seed) for seed in range(3)))
    assert len(train) > 6000
    assert len(heldout) > 3000
    assert not train & heldout
    assert split_of((12, 345)) == split_of((345, 12))


def test_problems_do_not_repeat_within_a_set() -> None:
    questions = [p.question for p in tiny_problems("heldout", 1024, seed=0)]
    assert len(set(questions)) == len(questions)


def test_no_problem_is_small_enough_to_know_by_heart() -> None:
    assert all(min(p.operands) >= 12 for _, p in zip(range(2000), arithmetic("train", 0)))


def test_base_is_small_and_shaped_for_every_engine() -> None:
    config = json.loads((BASE / "config.json").read_text())
    assert (BASE / "model.safetensors").stat().st_size <= 4 * 2**20
    assert config["head_dim"] in {32, 64, 80, 96, 112, 128}
    assert config["tie_word_embeddings"] is True


def test_figures_are_within_their_bars() -> None:
    figures = json.loads((BASE / "figures.json").read_text())
    make = _script()
    for name, (low, high) in make.BARS.items():
        assert low <= figures[name] <= high, name
    assert figures["accuracy"] <= 0.30
    assert figures["model_bytes"] == (BASE / "model.safetensors").stat().st_size
    assert figures["recipe"] == dataclasses.asdict(make.Recipe()), "the committed model was made by another recipe"
    assert make.differences(figures, figures) == []
    assert make.differences(figures | {"accuracy": figures["accuracy"] + 0.2}, figures)
    assert str(ROOT) not in (BASE / "figures.json").read_text()


def test_tokenizer_keeps_text_and_cuts_numbers_in_two_digit_pieces() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    texts = [p.question for p in tiny_problems("heldout", 50)]
    texts += [
        "```python\nprint(12 * 345)\n```\n",
        "\nCode execution result: NameError: name 'x'\n",
        "é ✓\t\\boxed{-7}  x",
    ]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        pieces = [tokenizer.decode([i]) for i in ids]
        for number in re.findall(r"\d+", text):
            assert [number[i : i + 2] for i in range(0, len(number), 2)] in [
                pieces[i : i + (len(number) + 1) // 2] for i in range(len(pieces))
            ]
        assert all(re.fullmatch(r"\d{1,2}|\D+", piece) for piece in pieces)
    assert all(len(tokenizer.encode(f"{n:02d}")) == 1 for n in range(100))
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.bos_token is None


def test_base_loads_and_samples_text_of_its_format() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = AutoModelForCausalLM.from_pretrained(BASE)
    assert model.dtype == torch.float32
    assert len(tokenizer) == model.config.vocab_size
    torch.manual_seed(0)
    prompt = tokenizer("Q: What is 37 * 482?\nA: ", return_tensors="pt")
    out = model.generate(**prompt, do_sample=True, max_new_tokens=48, num_return_sequences=16)
    text = "".join(tokenizer.batch_decode(out))
    assert "```python\n" in text
    assert "482" in text.replace("37 * 482?", "")


def test_pretraining_repeats_bit_for_bit() -> None:
    import torch

    make = _script()
    recipe = make.Recipe(drill_steps=2, text_steps=2, batch=8)
    threads = torch.get_num_threads()
    torch.set_num_threads(make.THREADS)
    try:
        tokenizer = make.make_tokenizer(recipe)
        assert tokenizer.get_vocab() == make.make_tokenizer(recipe).get_vocab()
        first, second = (make.pretrain(recipe, tokenizer).state_dict() for _ in range(2))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_transcripts_hold_good_and_bad_turns() -> None:
    import random

    from fastir.tir.grammar import parse_turn

    make = _script()
    rng = random.Random(0)
    void = right = policy_turns = 0
    for _, problem in zip(range(500), arithmetic("train", 9)):
        text = "".join(segment for segment, _ in make.transcript(problem, rng)[1:])
        turns = re.split(r"\nCode execution result: .*\n", text.replace(make.EOS, ""))
        parsed = [parse_turn(turn) for turn in turns]
        policy_turns += len(turns)
        void += sum(turn.is_void for turn in parsed)
        right += parsed[-1].answer == str(problem.answer)
        assert len(turns) <= make.MAX_TURNS
        assert all(not turn.is_void for turn in parsed[:-1])
    assert 0.15 < void / policy_turns < 0.40
    assert 0.10 < right / 500 < 0.40


def _script() -> ModuleType:
    """scripts/make_tiny_base.py, which is not in a package."""
    if "make_tiny_base" not in sys.modules:
        spec = importlib.util.spec_from_file_location("make_tiny_base", ROOT / "scripts" / "make_tiny_base.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["make_tiny_base"] = module
        spec.loader.exec_module(module)
    return sys.modules["make_tiny_base"]
