"""The ids trained on are the ids sampled: whatever is sampled, with every kind of tokenizer, with and without template.

An engine plays back arbitrary ids (what a policy samples is not up to us); everything else is the real thing but the
tool, whose output is drawn too.
"""

import asyncio
from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastir.config import DataConfig, TirConfig
from fastir.data import Problem
from fastir.rollout.engine import Sample
from fastir.rollout.loop import RolloutParts, rollout
from fastir.rollout.prompt import TurnFormat
from fastir.rollout.thread import EngineThread
from fastir.tir.feedback import feedback_text
from fastir.tir.sandbox import ExecResult

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["print", "```python\n", "\n```\n", "result", "Code", "execution", "the", "\\boxed{", "})", "1 + 1"]
LETTERS = sorted({*map(chr, range(32, 127)), "\n", "é", "\u2581"})


def byte_level():
    """GPT-2 and Qwen style: bytes and merges; a character may be cut in two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet)}
    merges = [("p", "r"), ("i", "n"), ("`", "`"), ("in", "t"), ("``", "`"), ("Ċ", "```"), ("Ã", "©")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return inner


def sentencepiece():
    """Llama style: spaces are ▁, unknown characters fall back to bytes."""
    pieces = [("<unk>", 0.0), *[(f"<0x{b:02X}>", -20.0) for b in range(256)]]
    pieces += [(c, -8.0) for c in LETTERS] + [(f"\u2581{w.strip()}", -4.0) for w in ("print", "result", "Code", "the")]
    inner = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return inner


def characters():
    vocabulary = {c: i for i, c in enumerate(["<unk>", *LETTERS])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    return inner


TOKENIZERS = {}
for make in (byte_level, sentencepiece, characters):
    made = PreTrainedTokenizerFast(tokenizer_object=make(), clean_up_tokenization_spaces=False)
    made.add_special_tokens(
        {"eos_token": "<|im_end|>", "additional_special_tokens": [AddedToken("<|im_start|>", special=True)]}
    )
    made.chat_template = CHATML
    TOKENIZERS[make.__name__] = made


class Playback:
    """Samples the given turns, a list of id lists per sibling; cuts them at the request's limit."""

    batch_size, weight_version = 64, 3

    def __init__(self, turns, eos):
        self.turns, self.eos, self.waiting, self.requests, self.samples = turns, eos, [], [], {}

    def add(self, request):
        self.requests.append(request)
        self.waiting.append(request)

    def step(self):
        waiting, self.waiting = self.waiting, []
        return [(request.key, self.sample(request)) for request in waiting]

    def sample(self, request):
        *_, sibling, turn = request.seed
        ids = self.turns[sibling][turn % len(self.turns[sibling])][: request.max_tokens]
        stop = "length" if len(ids) == request.max_tokens else "eos" if ids[-1:] == [self.eos] else "stop"
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 7
        sample = Sample(np.array(ids, dtype=np.int32), logprobs, stop, self.weight_version)
        self.samples[request.seed[-2:]] = sample
        return sample

    def abort(self, keys):
        raise AssertionError("nothing is aborted here")

    def close(self):
        pass


class DrawnTool:
    def __init__(self, outputs):
        self.outputs = outputs

    async def run(self, code):
        return ExecResult("ok", self.outputs[len(code) % len(self.outputs)])


def play(tokenizer, template, turns, outputs, schedule, limits):
    tir = TirConfig(
        max_turns=4, turn_tokens=limits[0], response_tokens=limits[1], feedback_tokens=limits[2], assistant_cue="> "
    )
    engine = Playback(turns, tokenizer.eos_token_id)
    thread = EngineThread(engine)
    turn_format = TurnFormat(tokenizer, DataConfig(chat_template=template), tir)
    parts = RolloutParts(
        thread, DrawnTool(outputs), turn_format, tir, decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    )
    problem = Problem(id="p", question="1+1?", answer="2", source="test")
    try:
        trajectories = asyncio.run(
            rollout([problem], parts, group_size=len(turns), temperature=1.0, seed=(0,), schedule=schedule)
        )
    finally:
        thread.close()
    return trajectories, engine, turn_format


@st.composite
def cases(draw):
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]
    code = st.text(alphabet=["x", "é", "∑", " ", "1", "\n"], max_size=6).map(lambda t: f"```python\n{t}\n```\n")
    encoded = st.one_of(code, st.sampled_from(WORDS), st.text(max_size=4)).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    anything = st.lists(st.integers(0, len(tokenizer) - 1), max_size=6)  # half characters, control tokens, nonsense
    eos = st.sampled_from([[], [tokenizer.eos_token_id]])
    turn = st.tuples(st.lists(st.one_of(encoded, anything), max_size=3), eos).map(lambda p: [*chain(*p[0]), *p[1]])
    turns = draw(st.lists(st.lists(turn, min_size=1, max_size=4), min_size=1, max_size=3))
    outputs = draw(st.lists(st.text(max_size=30), min_size=1, max_size=3))
    limits = (draw(st.integers(1, 60)), draw(st.integers(1, 300)), draw(st.integers(1, 40)))
    return tokenizer, draw(st.booleans()), turns, outputs, draw(st.sampled_from(["turns", "async"])), limits


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_trained_ids_are_sampled_ids(case):
    trajectories, engine, turn_format = play(*case)
    tokenizer, template, *_, limits = case
    control = set(tokenizer.all_special_ids)
    after = turn_format._encode(turn_format._after).tolist()
    for t in trajectories:
        for k, turn in enumerate(t.turns):
            sample = engine.samples[t.sibling, k]
            assert t.token_ids[turn.start : turn.end].tolist() == sample.token_ids.tolist()
            assert t.behavior_logprobs[turn.start : turn.end].tolist() == sample.logprobs.tolist()
            assert turn.weight_version == sample.weight_version
            feedback = t.token_ids[turn.end : turn.feedback_end].tolist()
            if feedback:  # appended once, ends with the cue, and no control token comes from a tool
                assert feedback[len(feedback) - len(after) :] == after
                allowed = 0 if not template else sum(i in control for i in feedback)
                assert sum(i in control for i in feedback) == allowed
                if template:
                    closing = int(sample.token_ids[-1:].tolist() != [tokenizer.eos_token_id])
                    assert sum(i in control for i in feedback) == closing + 3
        assert int(t.policy_mask.sum()) == sum(turn.end - turn.start for turn in t.turns)
        assert (t.behavior_logprobs[~t.policy_mask] == 0).all()
        assert len(t.token_ids) - t.prompt_length <= limits[1]
        # What was trained on is what the engine was given: every request is a prefix of the trajectory.
        asked = [r for r in engine.requests if r.seed[-2] == t.sibling]
        assert len(asked) == len(t.turns)
        for request, turn in zip(asked, t.turns, strict=True):
            assert request.token_ids.tolist() == t.token_ids[: turn.start].tolist()
            assert request.max_tokens >= 1


@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_consecutive_tool_messages(name, template):
    """Four turns of code in a row: each feedback is whole, in its place, and not trained."""
    tokenizer = TOKENIZERS[name]
    code = tokenizer.encode("```python\nprint(1)\n```\n", add_special_tokens=False)
    (t,), _, _ = play(tokenizer, template, [[code]], ["17"], "async", (60, 1000, 40))
    assert t.finish_reason == "max_turns"
    shown = feedback_text(ExecResult("ok", "17"))
    for turn in t.turns[:-1]:
        text = tokenizer.decode(t.token_ids[turn.end : turn.feedback_end])
        assert shown.strip() in text
        assert not t.policy_mask[turn.end : turn.feedback_end].any()
    assert t.turns[-1].feedback_end == t.turns[-1].end


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_character_cut_by_the_token_limit_stays_cut(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("∑", add_special_tokens=False)
    assert len(ids) > 2
    (t,), _, _ = play(tokenizer, False, [[ids]], ["1"], "turns", (len(ids) - 1, 100, 40))
    assert t.token_ids[t.policy_mask].tolist() == ids[:-1]
    assert "\ufffd" in t.turns[0].text
    assert t.turns[0].truncated


def test_the_real_engine_cut_in_mid_token(engine, tokenizer):
    """Ids of the real engine, turn limits down to one token: the trajectory holds exactly what it returned."""
    returned = {}
    original = engine.step

    def step():
        completed = original()
        returned.update({(key, len(returned)): sample for key, sample in completed})
        return completed

    engine.step = step
    for limit in (1, 3, 30):
        returned.clear()
        tir = TirConfig(max_turns=3, turn_tokens=limit, response_tokens=90, feedback_tokens=20)
        thread = EngineThread(engine)
        parts = RolloutParts(
            thread, DrawnTool(["5", "∑"]), TurnFormat(tokenizer, DataConfig(), tir), tir,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        )  # fmt: skip
        problem = Problem(id="p", question="1+1?", answer="2", source="test")
        trajectories = asyncio.run(
            rollout([problem], parts, group_size=8, temperature=1.0, seed=(limit,), schedule="async")
        )
        thread.close()
        for t in trajectories:
            samples = [sample for (key, _), sample in returned.items() if key[-1] == t.sibling]
            sampled = np.concatenate([s.token_ids for s in samples])
            assert t.token_ids[t.policy_mask].tolist() == sampled.tolist()
            assert t.behavior_logprobs[t.policy_mask].tolist() == np.concatenate([s.logprobs for s in samples]).tolist()
