"""Make `fastir/tiny/base`: the language model the quickstart starts from, in a few minutes on two CPU cores.

    python scripts/make_tiny_base.py              # retrain, measure, write the package data
    python scripts/make_tiny_base.py --check      # retrain, measure, compare with the committed figures (exit 1 if they differ)

The model (two layers, 130k parameters, Llama layout) has learned to copy numbers and has read transcripts of a tool being used,
mostly badly: fences left open, code without a fence, rambling, answers guessed instead of computed, wrong operators. The right
behaviour is in the text, but in a minority, so the model can find it and does not prefer it. Reinforcement learning has to.

Pre-training has two parts. In the first most text is number-copying drill, because copying digits from the context is the hard
skill: without it no reward is ever seen. (Muon finds the copying circuit several times sooner than Adam.) The second is transcripts
of problems of the *training* split. The loss is on the policy's tokens only, so the model never learns to write tool output.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, LlamaConfig, LlamaForCausalLM

from fastir.tiny.problems import Arithmetic, arithmetic

PROMPT = "Q: {question}\nA: "
FEEDBACK = "\nCode execution result: {output}\n"
STOP = "\n```\n"
EOS = "<|endoftext|>"
MAX_TURNS = 3
MAX_NEW_TOKENS = 48

# A document is a list of segments (text, is_policy): the pieces a rollout tokenises apart, so the ids met in pre-training are
# the ids met in a rollout.
Segments = list[tuple[str, bool]]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, besides the code."""

    vocab_size: int = 512
    hidden_size: int = 64
    layers: int = 2
    heads: int = 2
    intermediate_size: int = 192
    rope_theta: float = 1000.0
    seed: int = 0
    drill_steps: int = 300
    text_steps: int = 400
    batch: int = 64
    lr_muon: float = 0.02
    lr_adam: float = 3e-3


# --- text -----------------------------------------------------------------------------------------------------------------

_OPENERS = ("Let me compute it.\n", "I will use Python.\n", "Run the code:\n", "")
_RAMBLES = (
    "Let me think about it.",
    "I will use Python.",
    "The answer is a number.",
    "How many are there? Let me think.",
    "Let me compute it. It is a number.",
    "I am not sure.",
)
_GUESSES = ("The answer is", "I think the answer is", "It is", "So it is")


def code_block(line: str) -> str:
    """A complete code block, as the policy writes it; it ends with the stop string."""
    return f"```python\n{line}\n```\n"


def _wrong_number(rng: random.Random) -> int:
    return rng.randint(10, 10 ** rng.choice((3, 4, 4, 5, 6)))


def _wrong_expression(p: Arithmetic, rng: random.Random) -> str:
    """The right numbers with wrong operators, or some of the numbers only."""
    numbers = [str(n) for n in p.operands]
    if len(numbers) == 3 and rng.random() < 0.4:
        numbers = rng.sample(numbers, 2)
    out = numbers[0]
    for n in numbers[1:]:
        out += f" {rng.choice('+-*')} {n}"
    return out


def _void_turn(p: Arithmetic, rng: random.Random) -> str:
    """A turn with neither a complete block nor an answer: the ways a weak model loses the thread."""
    r = rng.random()
    if r < 0.25:
        return f"{rng.choice(_OPENERS)}```python\nprint({p.expression})\n"  # fence left open
    if r < 0.4:
        return f"{rng.choice(_OPENERS)}print({p.expression})\n"  # no fence
    if r < 0.5:
        return f"{rng.choice(_OPENERS)}```\nprint({p.expression})\n"  # no language tag, left open
    if r < 0.6:
        return f"The answer is {_wrong_number(rng)}."  # no box
    return " ".join(rng.sample(_RAMBLES, rng.randint(1, 2)))


def transcript(p: Arithmetic, rng: random.Random) -> Segments:
    """One transcript of a problem: up to three turns, each good or bad at random."""
    out: Segments = [(PROMPT.format(question=p.question), False)]
    result: str | None = None
    for turn in range(MAX_TURNS):
        r = rng.random()
        if result is not None:
            if r < 0.50:
                out.append((f"The answer is \\boxed{{{result}}}{EOS}", True))
                return out
            if r < 0.70:
                out.append((f"{rng.choice(_GUESSES)} \\boxed{{{_wrong_number(rng)}}}{EOS}", True))
                return out
            if r < 0.88:
                out.append((_void_turn(p, rng) + EOS, True))
                return out
        else:
            if r < 0.25:
                out.append((_void_turn(p, rng) + EOS, True))
                return out
            if r < 0.45:
                out.append((f"{rng.choice(_GUESSES)} \\boxed{{{_wrong_number(rng)}}}{EOS}", True))
                return out
        r = rng.random()
        opener = rng.choice(_OPENERS)
        if r < 0.60:
            line, output = f"print({p.expression})", str(p.answer)
        elif r < 0.85:
            expression = _wrong_expression(p, rng)
            line, output = f"print({expression})", str(eval(expression))
        elif r < 0.93:
            name = rng.choice("xn")
            line, output = f"print({name})", f"NameError: name '{name}' is not defined"
        else:
            line, output = p.expression, "(no output)"
        result = output if output.lstrip("-").isdigit() else None
        out.append((opener + code_block(line), True))
        if turn < MAX_TURNS - 1:
            out.append((FEEDBACK.format(output=output), False))
    return out


def _number(rng: random.Random) -> str:
    digits = rng.choice((2, 2, 3, 3, 4, 5, 6))
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def drill(p: Arithmetic, rng: random.Random) -> Segments:
    """Copying: numbers repeated after a prompt, or the numbers of a problem, or a tool's output."""
    r = rng.random()
    if r < 0.4:
        numbers = " ".join(_number(rng) for _ in range(rng.randint(2, 5)))
        return [(PROMPT.format(question=numbers), False), (numbers + EOS, True)]
    if r < 0.7:
        return [(PROMPT.format(question=p.question), False), (code_block(f"print({p.expression})"), True)]
    number = _number(rng)
    return [
        (PROMPT.format(question=p.question), False),
        (code_block(f"print({p.expression})"), True),
        (FEEDBACK.format(output=number), False),
        (f"The answer is \\boxed{{{number}}}{EOS}", True),
    ]


# --- tokenizer ------------------------------------------------------------------------------------------------------------


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Byte-level BPE that cuts numbers, left to right, in pieces of two digits; every piece of one or two digits is a token."""
    rng = random.Random(recipe.seed)
    stream = arithmetic("train", recipe.seed)
    texts = [" ".join(f"{a}{b}" for a in range(10) for b in range(10))] * 400
    for _ in range(2000):
        texts += [text.replace(EOS, "") for text, _ in transcript(next(stream), rng)]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d{1,2}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=recipe.vocab_size,
            special_tokens=[EOS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token=EOS, pad_token=EOS, clean_up_tokenization_spaces=False, model_max_length=1024
    )


# --- pre-training ---------------------------------------------------------------------------------------------------------


def make_model(recipe: Recipe, tok: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    eos = tok.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tok),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    return LlamaForCausalLM(config).float()


def batches(recipe: Recipe, tok: PreTrainedTokenizerFast) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Right-padded ids and labels (-100 off the policy's tokens), (B, T) each, for every step of both parts."""
    rng = random.Random(recipe.seed + 1)
    stream = arithmetic("train", recipe.seed + 1)
    for step in range(recipe.drill_steps + recipe.text_steps):
        drills = 0.7 if step < recipe.drill_steps else 0.0
        docs = []
        for _ in range(recipe.batch):
            p = next(stream)
            docs.append(drill(p, rng) if rng.random() < drills else transcript(p, rng))
        flat = tok([text for doc in docs for text, _ in doc])["input_ids"]
        pieces = iter(flat)
        rows = []
        for doc in docs:
            ids: list[int] = []
            labels: list[int] = []
            for _, is_policy in doc:
                piece = next(pieces)
                ids += piece
                labels += piece if is_policy else [-100] * len(piece)
            rows.append((ids, labels))
        longest = max(len(ids) for ids, _ in rows)
        x = torch.full((len(rows), longest), tok.eos_token_id)
        y = torch.full((len(rows), longest), -100)
        for i, (ids, labels) in enumerate(rows):
            x[i, : len(ids)] = torch.tensor(ids)
            y[i, : len(ids)] = torch.tensor(labels)
        yield x, y


def pretrain(recipe: Recipe, tok: PreTrainedTokenizerFast, log_every: int = 50) -> LlamaForCausalLM:
    model = make_model(recipe, tok)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in ids]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=recipe.lr_muon, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=recipe.lr_adam, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    total = recipe.drill_steps + recipe.text_steps
    base_lrs = [recipe.lr_muon, recipe.lr_adam]
    start = time.time()
    for step, (x, y) in enumerate(batches(recipe, tok)):
        scale = min(1.0, (step + 1) / 20) * min(1.0, (total - step) / (0.5 * total))
        for optimizer, lr in zip(optimizers, base_lrs):
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
        hidden = model.model(input_ids=x, use_cache=False).last_hidden_state
        target = y[:, 1:]
        keep = target != -100
        logits = model.lm_head(hidden[:, :-1][keep])
        loss = F.cross_entropy(logits, target[keep])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % log_every == 0 or step == total - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}  {x.shape[1]} tokens  {time.time() - start:.0f} s", flush=True)
    return model.eval()


if __name__ == "__main__":
    torch.set_num_threads(2)
    r = Recipe()
    tok = make_tokenizer(r)
    m = pretrain(r, tok)
    print(sum(p.numel() for p in m.parameters()))
    m.save_pretrained("/tmp/tiny/base")
    tok.save_pretrained("/tmp/tiny/base")
