"""Make `fastir/tiny/base`: the language model the quickstart starts from, in a few minutes on two CPU cores.

    python scripts/make_tiny_base.py              # retrain, measure, write the package data
    python scripts/make_tiny_base.py --check      # retrain, measure, compare with the committed figures (or exit 1)

The model (two layers, 394k parameters, Llama layout) has learned to copy numbers and has read transcripts of a tool
being used, mostly badly: fences left open, code without a fence, rambling, answers guessed instead of computed, wrong
operators. The right behaviour is in the text, but in a minority, so the model can find it and does not prefer it.
Reinforcement learning has to.

Pre-training has two parts. In the first most text is number-copying drill, because copying digits from the context is
the hard skill: without it no reward is ever seen. (Muon finds the copying circuit several times sooner than Adam.)
The second is mostly transcripts of problems of the *training* split. The loss is on the policy's tokens only, so the
model never learns to write tool output.

The Llama layout, because AutoTokenizer replaces the tokenizer of other small layouts (Qwen2's for one) by that
family's own, which cuts numbers elsewhere, without a word.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastir.tiny.problems import Arithmetic, arithmetic

BASE = Path(__file__).resolve().parents[1] / "fastir" / "tiny" / "base"
THREADS = 1  # one thread: the same sums in the same order however many cores there are
PROMPT = "Q: {question}\nA: "
FEEDBACK = "\nCode execution result: {output}\n"
STOP = "\n```\n"
EOS = "<|endoftext|>"
MAX_TURNS = 3

# Another machine's rounding gives other weights of the same quality. Sampling noise over 1,024 problems is 0.013.
TOLERANCES = {"accuracy": 0.07, "void_turn_rate": 0.07, "void_rollout_rate": 0.10}
# Outside these the quickstart shows nothing: the right behaviour cannot be found, or need not be learned.
BARS = {"accuracy": (0.08, 0.30), "void_turn_rate": (0.15, 0.30)}

# A document is a list of segments (text, is_policy): the pieces that a rollout tokenises apart, so pre-training meets
# the ids that a rollout meets.
Segments = list[tuple[str, bool]]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, besides the code."""

    variant: str = "noisy"
    vocab_size: int = 512
    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 256
    rope_theta: float = 1000.0
    seed: int = 0
    drill_steps: int = 200
    text_steps: int = 250
    drill_share: float = 0.7
    text_drill_share: float = 0.4
    batch: int = 64
    pieces: int = 4
    lr_muon: float = 0.02
    lr_adam: float = 3e-3


# --- text -----------------------------------------------------------------------------------------------------------

_OPENERS = ("Let me compute it.\n", "I will use Python.\n", "Run the code:\n", "")
_LOOSE_OPENERS = ("Maybe this:\n", "I guess so:\n", "Run the code:\n", "")
_RAMBLES = (
    "Let me think about it.",
    "I will use Python.",
    "The answer is a number.",
    "How many are there? Let me think.",
    "Let me compute it. It is a number.",
    "I am not sure.",
)
_GUESSES = ("I think the answer is", "It is", "Maybe it is")


def code_block(line: str) -> str:
    """A complete code block, as the policy writes it; it ends with the stop string."""
    return f"```python\n{line}\n```\n"


def _wrong_number(rng: random.Random) -> int:
    return rng.randint(10, 10 ** rng.choice((3, 4, 4, 5, 6)))


def _guess(words: str, rng: random.Random) -> Segments:
    """A made-up answer. Its digits are not trained on: learning noise would only blur the copying of digits."""
    return [(f"{words} \\boxed{{", True), (str(_wrong_number(rng)), False), (f"}}{EOS}", True)]


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
                return out + _guess(rng.choice(_GUESSES), rng)
            if r < 0.88:
                out.append((_void_turn(p, rng) + EOS, True))
                return out
        else:
            if r < 0.25:
                out.append((_void_turn(p, rng) + EOS, True))
                return out
            if r < 0.45:
                return out + _guess(rng.choice(("The answer is", *_GUESSES)), rng)
        r = rng.random()
        opener = rng.choice(_OPENERS if r < 0.60 else _LOOSE_OPENERS)
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


def sharp_transcript(p: Arithmetic, rng: random.Random) -> Segments:
    """Text that prepares badly for many turns: mostly a single turn, else one clean round; no error, noise or void.

    A model made of it is sure of itself on what it has read and lost on any other tool output: the setting in which
    void turns hurt training most.
    """
    prompt = (PROMPT.format(question=p.question), False)
    code = (rng.choice(_OPENERS) + code_block(f"print({p.expression})"), True)
    r = rng.random()
    if r < 0.40:
        return [prompt, *_guess("The answer is", rng)]
    if r < 0.65:
        return [prompt, code]
    return [
        prompt,
        code,
        (FEEDBACK.format(output=p.answer), False),
        (f"The answer is \\boxed{{{p.answer}}}{EOS}", True),
    ]


TRANSCRIPTS = {"noisy": transcript, "sharp": sharp_transcript}


def _number(rng: random.Random) -> str:
    digits = rng.choice((2, 2, 3, 3, 4, 5, 6))
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def drill(p: Arithmetic, rng: random.Random) -> Segments:
    """Copying: a list of numbers, a problem's expression, or a tool's output (any number, not the problem's answer)."""
    r = rng.random()
    if r < 0.3:
        numbers = " ".join(_number(rng) for _ in range(rng.randint(2, 5)))
        return [(PROMPT.format(question=numbers), False), (numbers + EOS, True)]
    code = f"{rng.choice(_OPENERS)}```python\nprint("
    start: Segments = [(PROMPT.format(question=p.question), False), (code, False)]
    if r < 0.65:
        return [*start, (f"{p.expression})", True)]
    number = _number(rng)
    return [
        *start,
        (f"{p.expression})\n```\n", False),
        (FEEDBACK.format(output=number), False),
        ("The answer is \\boxed{", False),
        (f"{number}}}{EOS}", True),
    ]


# --- tokenizer ------------------------------------------------------------------------------------------------------


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Byte-level BPE that cuts numbers, from the left, in pieces of two digits; each piece is one token."""
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


# --- pre-training ---------------------------------------------------------------------------------------------------


def make_model(recipe: Recipe, tok: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    eos = tok.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tok),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    return LlamaForCausalLM(config).float()


Batch = list[tuple[torch.Tensor, torch.Tensor]]


def batches(recipe: Recipe, tok: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Right-padded ids and labels (-100 off the policy's tokens), (B, T) each, for every step of both parts.

    A step comes in a few pieces of documents of similar length: the same gradient with a third less padding.
    """
    rng = random.Random(recipe.seed + 1)
    stream = arithmetic("train", recipe.seed + 1)
    for steps, drills in ((recipe.drill_steps, recipe.drill_share), (recipe.text_steps, recipe.text_drill_share)):
        for _ in range(steps):
            rows = [
                encode(drill(p, rng) if rng.random() < drills else TRANSCRIPTS[recipe.variant](p, rng), tok)
                for _, p in zip(range(recipe.batch), stream)
            ]
            rows.sort(key=lambda row: len(row[0]))
            size = -(-len(rows) // recipe.pieces)
            yield [pad(rows[i : i + size], tok.eos_token_id) for i in range(0, len(rows), size)]


def pad(rows: list[tuple[list[int], list[int]]], filler: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) ids and labels."""
    longest = max(len(ids) for ids, _ in rows)
    x = torch.full((len(rows), longest), filler)
    y = torch.full((len(rows), longest), -100)
    for i, (ids, labels) in enumerate(rows):
        x[i, : len(ids)] = torch.tensor(ids)
        y[i, : len(ids)] = torch.tensor(labels)
    return x, y


def encode(document: Segments, tok: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """A document's ids and labels, every segment tokenised apart."""
    ids: list[int] = []
    labels: list[int] = []
    for (_, is_policy), piece in zip(document, tok([text for text, _ in document])["input_ids"]):
        ids += piece
        labels += piece if is_policy else [-100] * len(piece)
    return ids, labels


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
    for step, pieces in enumerate(batches(recipe, tok)):
        scale = min(1.0, (step + 1) / 20) * min(1.0, (total - step) / (0.5 * total))
        for optimizer, lr in zip(optimizers, base_lrs):
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
        trained = sum(int((y[:, 1:] != -100).sum()) for _, y in pieces)
        mean = 0.0
        for x, y in pieces:
            hidden = model.model(input_ids=x, use_cache=False).last_hidden_state
            keep = y[:, 1:] != -100
            loss = F.cross_entropy(model.lm_head(hidden[:, :-1][keep]), y[:, 1:][keep], reduction="sum") / trained
            loss.backward()
            mean += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % log_every == 0 or step == total - 1:
            print(f"step {step:4d}  loss {mean:.3f}  {time.time() - start:.0f} s", flush=True)
    return model.eval()


# --- figures --------------------------------------------------------------------------------------------------------


async def measure(folder: Path, problems: int, seed: int = 0) -> dict[str, float]:
    """What the model in `folder` does on held-out problems at temperature 1, by the product's own rollouts."""
    # The sandbox forks processes: everything it needs is imported only here, and pre-training needs none of it.
    from fastir.config import load_config
    from fastir.rollout.loop import RolloutTimes
    from fastir.training.parts import open_parts

    config = load_config("quickstart", [f"model.path={folder}", "model.device=cpu"])
    async with open_parts(config, training=False) as parts:
        assert parts.heldout_problems is not None
        chosen = parts.heldout_problems[:problems]
        rollouts = await parts.roll_out(chosen, 1, 1.0, (seed, 1), RolloutTimes())
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    return {
        "accuracy": sum(rollout.reward or 0.0 for rollout in rollouts) / len(rollouts),
        "void_turn_rate": sum(turn.is_void for turn in turns) / len(turns),
        "void_rollout_rate": sum(rollout.has_void for rollout in rollouts) / len(rollouts),
        "code_turn_rate": sum(turn.code is not None for turn in turns) / len(turns),
        "turns_per_rollout": len(turns) / len(rollouts),
        "tokens_per_rollout": sum(len(rollout.token_ids) for rollout in rollouts) / len(rollouts),
        "heldout_problems": len(rollouts),
    }


def differences(figures: dict[str, Any], committed: dict[str, Any]) -> list[str]:
    """Why two sets of figures are not the same model, up to what another machine's rounding may change."""
    found = [
        f"{name}: {figures[name]:.3f}, committed {committed[name]:.3f}, tolerance {tolerance}"
        for name, tolerance in TOLERANCES.items()
        if abs(figures[name] - committed[name]) > tolerance
    ]
    found += [
        f"{name}: {figures[name]:.3f} is not within {low} to {high}"
        for name, (low, high) in BARS.items()
        if not low <= figures[name] <= high
    ]
    exact = ("parameters", "model_bytes", "recipe")
    return found + [f"{k}: {figures[k]}, committed {committed[k]}" for k in exact if figures[k] != committed[k]]


def make(recipe: Recipe, out: Path, problems: int) -> dict[str, Any]:
    """Train, save to `out` and measure."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    tok = make_tokenizer(recipe)
    start = time.process_time()
    model = pretrain(recipe, tok)
    seconds = time.process_time() - start  # on one thread: the wall seconds of a core that does nothing else
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tok.save_pretrained(out)
    weights = out / "model.safetensors"
    weights.chmod(0o644)
    figures = {
        **asyncio.run(measure(out, problems)),
        "parameters": model.num_parameters(),
        "model_bytes": weights.stat().st_size,
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "pretraining_cpu_seconds": round(seconds, 1),
        "torch": torch.__version__,
        "recipe": asdict(recipe),
    }
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder to write (default: the package's, for the variant 'noisy')")
    parser.add_argument("--variant", choices=("noisy", "sharp"), default="noisy", help="pre-training text")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and text")
    parser.add_argument("--problems", type=int, default=1024, help="held-out problems to measure on")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the figures differ")
    args = parser.parse_args()
    recipe = Recipe(variant=args.variant, seed=args.seed)
    if args.check:
        committed = json.loads((BASE / "figures.json").read_text())
        with tempfile.TemporaryDirectory() as folder:
            figures = make(recipe, Path(folder), args.problems)
        same = figures["weights_sha256"] == committed["weights_sha256"]
        print(json.dumps(figures, indent=1))
        print("weights: " + ("bit for bit the committed ones" if same else "not bit for bit the committed ones"))
        found = differences(figures, committed)
        for line in found:
            print(f"differs: {line}")
        return 1 if found else 0
    if args.out is None and args.variant != "noisy":
        parser.error("--variant sharp needs --out: the package holds the noisy model")
    print(json.dumps(make(recipe, args.out or BASE, args.problems), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
