"""The multi-turn loop with the real sandbox, and an engine that says what a test wants it to say."""

from typing import ClassVar

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastir.config import DataConfig, TirConfig
from fastir.data import Problem
from fastir.rollout.engine import Sample
from fastir.rollout.loop import rollout
from fastir.rollout.prompt import TurnFormat
from fastir.tir.sandbox import Sandbox, SandboxConfig, SandboxError

CODE = "```python\n{}\n```\n"


class Script:
    """Speaks the given turns, one list per sibling; a plain str ends with EOS, a code turn with its stop string."""

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns = tokenizer, turns
        self.batch_size, self.weight_version = 100, 4
        self.requests, self.waiting = [], []

    def add(self, request):
        self.requests.append(request)
        self.waiting.append(request)

    def step(self):
        completed = [(request.key, self.sample(request)) for request in self.waiting]
        self.waiting = []
        return completed

    def sample(self, request):
        *_, sibling, turn = request.seed
        text = self.turns[sibling][turn]
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        stop = "stop"
        if not text.endswith("```\n"):
            ids.append(self.tokenizer.eos_token_id)
            stop = "eos"
        if len(ids) > request.max_tokens:
            ids, stop = ids[: request.max_tokens], "length"
        return Sample(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), stop, self.weight_version)


@pytest.fixture(scope="module")
def bytes_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    return tokenizer


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def run(tokenizer, turns, *, data=None, sandbox=None, share=True, **tir):
    tir = TirConfig(**{"turn_tokens": 400, "response_tokens": 4000, "feedback_tokens": 60, "max_turns": 3, **tir})
    engine = Script(tokenizer, turns)
    async with Sandbox(SandboxConfig()) as real:
        trajectories = await rollout(
            [Problem(id="p", question="1+1?", answer="2", source="test")],
            group_size=len(turns),
            engine=engine,
            sandbox=sandbox or real,
            turn_format=TurnFormat(tokenizer, data or DataConfig(), tir),
            tir=tir,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            temperature=1.0,
            seed=(0, 0, 0),
            share_executions=share,
        )
    return trajectories, engine


async def test_every_way_to_end(bytes_tokenizer):
    code = CODE.format("print(6*7)")
    trajectories, _ = await run(
        bytes_tokenizer,
        [
            ["so\n" + code, "It is \\boxed{42}"],
            ["hm", ""],
            [code, code, code],
            [CODE.format("final_answer(41 + 1)")],
            [code + " \\boxed{7}"],
        ],
    )
    assert [t.finish_reason for t in trajectories] == ["answer", "void", "max_turns", "answer", "answer"]
    assert [t.answer for t in trajectories] == ["42", None, None, "42", "7"]
    assert [len(t.turns) for t in trajectories] == [2, 1, 3, 1, 1]
    assert [t.has_void for t in trajectories] == [False, True, False, False, False]
    assert trajectories[0].turns[0].feedback == "\nCode execution result: 42\n"
    assert trajectories[2].turns[2].exec_status == "ok"
    assert trajectories[2].turns[2].feedback_end == trajectories[2].turns[2].end  # nobody will read it
    assert all(t.weight_version == 4 for t in trajectories)


async def test_ids_trained_on_are_ids_sampled_and_masks_come_from_construction(bytes_tokenizer):
    turns = ["so\n" + CODE.format("print('policy \\\\boxed{1}')"), "\\boxed{2}"]
    (t,), engine = await run(bytes_tokenizer, [turns])
    first, second = engine.requests
    assert t.token_ids[: t.prompt_length].tolist() == first.token_ids.tolist()
    assert t.token_ids[: t.turns[1].start].tolist() == second.token_ids.tolist()
    sampled = [bytes_tokenizer.encode(turns[0]), [*bytes_tokenizer.encode(turns[1]), bytes_tokenizer.eos_token_id]]
    assert t.token_ids[t.policy_mask].tolist() == sampled[0] + sampled[1]
    assert bytes_tokenizer.decode(t.token_ids[t.turns[0].end : t.turns[0].feedback_end]) == (
        "\nCode execution result: policy \\boxed{1}\n"
    )
    assert t.answer == "2"  # an answer in tool output is not the policy's
    assert (t.behavior_logprobs == np.where(t.policy_mask, np.float32(-0.5), 0)).all()


@pytest.mark.parametrize("budget", [30, 60, 90, 200])
async def test_token_budget_is_never_exceeded(bytes_tokenizer, budget):
    code = CODE.format("print(1)")
    (t,), engine = await run(bytes_tokenizer, [[code] * 9], max_turns=9, response_tokens=budget)
    assert len(t.token_ids) - t.prompt_length <= budget
    assert t.finish_reason == "token_budget"
    assert t.truncated
    assert all(r.max_tokens >= 1 for r in engine.requests)


async def test_a_turn_cut_by_its_own_limit_is_void_and_truncated(bytes_tokenizer):
    (t,), _ = await run(bytes_tokenizer, [["x" * 50]], turn_tokens=20)
    assert (t.finish_reason, t.truncated, t.has_void, len(t.token_ids) - t.prompt_length) == ("void", True, True, 20)


async def test_exceptions_timeouts_and_silence_are_feedback_not_void(bytes_tokenizer):
    end = "\\boxed{0}"
    trajectories, _ = await run(
        bytes_tokenizer, [[CODE.format(c), end] for c in ("1/0", "pass", "import os; os._exit(3)")]
    )
    assert not any(t.has_void for t in trajectories)
    assert [t.turns[0].exec_status for t in trajectories] == ["error", "ok", "crashed"]
    assert "ZeroDivisionError: division by zero" in trajectories[0].turns[0].feedback


async def test_chat_template_pieces_between_turns_are_appended_once(bytes_tokenizer):
    bytes_tokenizer.chat_template = CHATML
    code = CODE.format("print(5)")
    data = DataConfig(chat_template=True, system_prompt="Use Python.")
    trajectories, _ = await run(
        bytes_tokenizer, [[code, "\\boxed{5}"], ["a\n" + code + "tail", "\\boxed{5}"]], data=data
    )
    shown = "<|im_start|>user\n\nCode execution result: 5\n<|im_end|>\n<|im_start|>assistant\n\\boxed{5}<|im_end|>"
    head = "<|im_start|>system\nUse Python.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    texts = [bytes_tokenizer.decode(t.token_ids) for t in trajectories]
    assert texts[0] == head + code + "<|im_end|>\n" + shown  # stopped at the fence: the template closes the message
    assert texts[1] == head + "a\n" + code + "tail<|im_end|>\n" + shown  # the policy closed it itself
    assert int((trajectories[0].token_ids[trajectories[0].policy_mask] == bytes_tokenizer.eos_token_id).sum()) == 1
    bytes_tokenizer.chat_template = None


async def test_control_tokens_printed_by_code_stay_text(bytes_tokenizer):
    (t,), _ = await run(bytes_tokenizer, [[CODE.format("print('<|im_end|>')"), "\\boxed{1}"]])
    feedback = t.token_ids[t.turns[0].end : t.turns[0].feedback_end]
    assert bytes_tokenizer.eos_token_id not in feedback.tolist()


async def test_a_failing_sandbox_costs_that_rollout_only(bytes_tokenizer):
    class Failing:
        async def run(self, code):
            if "boom" in code:
                raise SandboxError("gone")
            return await real.run(code)

    async with Sandbox(SandboxConfig()) as real:
        trajectories, _ = await run(
            bytes_tokenizer,
            [[CODE.format("boom")], [CODE.format("print(1)"), "\\boxed{1}"]],
            sandbox=Failing(),
        )
    assert [t.finish_reason for t in trajectories] == ["failed", "answer"]
    assert not trajectories[0].has_void


@pytest.mark.parametrize("share", [True, False])
async def test_identical_code_in_a_turn_runs_once(bytes_tokenizer, share):
    class Counting:
        seen: ClassVar[list[str]] = []

        async def run(self, code):
            self.seen.append(code)
            return await real.run(code)

    Counting.seen.clear()
    turns = [[CODE.format("print(1)"), "\\boxed{1}"], [CODE.format("print(1)"), CODE.format("print(1)"), "\\boxed{1}"]]
    async with Sandbox(SandboxConfig()) as real:
        trajectories, _ = await run(bytes_tokenizer, turns, sandbox=Counting(), share=share)
    assert Counting.seen == ["print(1)"] * (2 if share else 3)
    assert {t.turns[0].feedback for t in trajectories} == {"\nCode execution result: 1\n"}
