"""The multi-turn loop with the real sandbox, and an engine that says what a test wants it to say."""

import time
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastir.config import DataConfig, TirConfig
from fastir.data import Problem
from fastir.rollout.engine import EngineError, Sample
from fastir.rollout.loop import RolloutParts, rollout
from fastir.rollout.prompt import TurnFormat
from fastir.rollout.thread import EngineThread
from fastir.tir.sandbox import ExecResult, Sandbox, SandboxConfig, SandboxError

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

    def abort(self, keys):
        self.waiting = [r for r in self.waiting if r.key not in set(keys)]

    def close(self):
        pass

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


async def run(tokenizer, turns, *, data=None, sandbox=None, share=True, schedule="turns", engine=None, **tir):
    tir = TirConfig(**{"turn_tokens": 400, "response_tokens": 4000, "feedback_tokens": 60, "max_turns": 3, **tir})
    engine = engine or Script(tokenizer, turns)
    thread = EngineThread(engine)
    try:
        async with Sandbox(SandboxConfig()) as real:
            parts = RolloutParts(
                thread,
                sandbox or real,
                TurnFormat(tokenizer, data or DataConfig(), tir),
                tir,
                decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
                share_executions=share,
            )
            trajectories = await rollout(
                [Problem(id="p", question="1+1?", answer="2", source="test")],
                parts,
                group_size=len(turns),
                temperature=1.0,
                seed=(0, 0, 0),
                schedule=schedule,
            )
    finally:
        thread.close()
    return trajectories, engine


@pytest.mark.parametrize("schedule", ["turns", "async"])
async def test_every_way_to_end(bytes_tokenizer, schedule):
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
        schedule=schedule,
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


@pytest.mark.parametrize("schedule", ["turns", "async"])
async def test_a_failing_sandbox_costs_that_rollout_only(bytes_tokenizer, schedule):
    class Failing:
        failures = 1

        async def run(self, code):
            if "boom" in code and self.failures:
                self.failures -= 1
                raise SandboxError("gone")
            return await real.run(code.replace("boom", "2"))

    async with Sandbox(SandboxConfig()) as real:
        trajectories, _ = await run(
            bytes_tokenizer,
            [
                [CODE.format("print(boom)")],
                [CODE.format("print(1)"), "\\boxed{1}"],
                [CODE.format("print(boom)"), "\\boxed{1}"],  # shared the failed execution, does not share its failure
            ],
            sandbox=Failing(),
            schedule=schedule,
        )
    assert [t.finish_reason for t in trajectories] == ["failed", "answer", "answer"]
    assert [t.failure for t in trajectories] == ["tool", "", ""]
    assert not trajectories[0].has_void
    assert trajectories[2].turns[0].feedback == "\nCode execution result: 2\n"


class Playing(Script):
    """A script that gives some requests up, or returns log-probs that are no numbers."""

    def sample(self, request):
        sample = super().sample(request)
        sibling, turn = request.seed[-2:]
        if (sibling, turn) == (0, 1):
            return replace(sample, token_ids=sample.token_ids[:2], logprobs=sample.logprobs[:2], stop="aborted")
        if (sibling, turn) == (1, 0):
            return replace(sample, token_ids=sample.token_ids[:0], logprobs=sample.logprobs[:0], stop="aborted")
        if sibling == 2:
            return replace(sample, logprobs=np.full(len(sample.logprobs), np.nan, np.float32))
        return sample


@pytest.mark.parametrize("schedule", ["turns", "async"])
async def test_a_request_that_the_engine_gives_up_costs_that_rollout_only(bytes_tokenizer, schedule):
    code = CODE.format("print(1)")
    turns = [[code, "xx"], ["xx"], ["\\boxed{1}"], [code, "\\boxed{1}"]]
    trajectories, _ = await run(
        bytes_tokenizer, turns, schedule=schedule, engine=Playing(bytes_tokenizer, turns)
    )
    assert [t.failure for t in trajectories] == ["engine", "engine", "engine", ""]
    assert [t.finish_reason for t in trajectories] == ["failed", "failed", "failed", "answer"]
    assert [t.has_void for t in trajectories] == [False] * 4
    assert [t.policy_tokens for t in trajectories[:2]] == [len(bytes_tokenizer.encode(code)) + 2, 0]


class Lost(Script):
    """Dies when the second turn of sibling 0 is asked for."""

    def step(self):
        if any(request.seed[-2:] == (0, 1) for request in self.waiting):
            raise EngineError("the engine's process ended")
        return super().step()


@pytest.mark.parametrize("schedule", ["turns", "async"])
async def test_a_lost_engine_is_an_error_at_once(bytes_tokenizer, schedule):
    turns = [[CODE.format("print(1)"), "\\boxed{1}"], [CODE.format("import time; time.sleep(4)"), "\\boxed{1}"]]
    began = time.perf_counter()
    with pytest.raises(EngineError, match="process ended"):
        await run(bytes_tokenizer, turns, schedule=schedule, engine=Lost(bytes_tokenizer, turns))
    assert time.perf_counter() - began < 30


async def test_async_rollouts_do_not_wait_for_each_other(bytes_tokenizer):
    """Sibling 0's slow tool call is still running when the others are done."""
    slow = CODE.format("import time; time.sleep(1.5)")
    fast = [CODE.format("print(1)")] * 2 + ["\\boxed{1}"]
    order = {}
    for schedule in ("turns", "async"):
        _, engine = await run(bytes_tokenizer, [[slow, "\\boxed{1}"], fast, fast], schedule=schedule)
        order[schedule] = [request.seed[-2:] for request in engine.requests]
    assert order["turns"].index((0, 1)) < order["turns"].index((1, 2))
    assert order["async"][-1] == (0, 1)
    assert sorted(order["async"]) == sorted(order["turns"])


async def test_in_flight_rollouts_are_bounded(bytes_tokenizer):
    turns = [[CODE.format("print(1)"), "\\boxed{1}"]] * 6
    engine, highest, tir = Script(bytes_tokenizer, turns), [], TirConfig(turn_tokens=400, response_tokens=4000)

    class Watched:
        async def run(self, code):
            highest.append(len({r.key for r in engine.requests}) - done[0])
            return ExecResult("ok", "1")

    done = [0]
    thread = EngineThread(engine)
    decode = bytes_tokenizer.decode

    def counted(ids):
        done[0] += "boxed" in decode(ids)
        return decode(ids, skip_special_tokens=True)

    parts = RolloutParts(
        thread, Watched(), TurnFormat(bytes_tokenizer, DataConfig(), tir), tir, decode=counted, share_executions=False
    )
    problem = Problem(id="p", question="1+1?", answer="2", source="test")
    try:
        await rollout([problem], parts, group_size=6, temperature=1.0, seed=(0,), schedule="async", max_in_flight=2)
    finally:
        thread.close()
    assert max(highest) == 2


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
