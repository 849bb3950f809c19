"""TRL's ``GRPOTrainer(tools=[...])`` made to do the same work as a fastir recipe, and the meter that both sides use."""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from fastir.config import Config
from fastir.data import Problem


class Meter:
    """Adds up counts and seconds within a step; `mark` ends the step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._open: Counter[str] = Counter()
        self._since = time.perf_counter()

    def add(self, **values: float) -> None:
        self._open.update(values)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.add(**{name: time.perf_counter() - began})

    def mark(self) -> None:
        now = time.perf_counter()
        self.steps.append({"seconds": now - self._since, **self._open})
        self._open, self._since = Counter(), now

    def count_positions(self, body: type[Any]) -> None:
        """Count the input positions of every forward pass of a transformers model class."""
        import torch

        plain = body.forward

        @functools.wraps(plain)
        def forward(module: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
            kind = "training_positions" if torch.is_grad_enabled() else "sampling_positions"
            self.add(**{kind: input_ids.numel()})
            return plain(module, input_ids, *args, **kwargs)

        body.forward = forward


# The tool's name makes the fence: ```python. Arguments never reach the model's context (TRL goes on from the sampled
# ids); TRL checks that a template renders them.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{ 'Q: ' + message.content + '\\nA: ' }}
{%- elif message.role == 'assistant' -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '```' + call.function.name + '\\n' }}
{%- for name, value in call.function.arguments.items() -%}{{ '# ' + name + '\\n' + value }}{%- endfor -%}
{{ '\\n```\\n' }}
{%- endfor -%}
{%- elif message.role == 'tool' -%}
{{ message.content }}
{%- endif -%}
{%- endfor -%}"""

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    # The policy's turn starts after the prompt, or after the fence it closed (tool output follows, and is content).
    "start_anchor_pattern": r"\nA: |\n```\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?m:^)```(?i:python|py)[ \t]*\n(?=[\s\S]*?(?m:^)```[ \t]*(?:\n|\Z))",
            "close_pattern": r"\n?(?m:^)```[ \t]*(?:\n|\Z)",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "python", "arguments": {"code": "{content}"}}},
        },
        "content": {"content": "text"},
    },
}


def make_tool(tokenizer: Any, feedback_tokens: int, meter: Meter) -> Callable[[str], str]:
    from fastir.tir.feedback import encode_feedback, feedback_text

    def python(code: str) -> str:
        """
        Run Python code.

        Args:
            code: The source to run.

        Returns:
            What it printed.
        """
        with meter.timed("tool_seconds"):
            stdout, error = io.StringIO(), None
            try:
                with contextlib.redirect_stdout(stdout):
                    exec(code, {})
            except (Exception, SystemExit) as raised:
                error = f"{type(raised).__name__}: {raised}"
            outcome = SimpleNamespace(
                status="error" if error else "ok", stdout=stdout.getvalue(), error=error, traceback=None
            )
            shown, _ = encode_feedback(feedback_text(outcome), tokenizer, feedback_tokens)
        meter.add(tool_calls=1)
        return shown

    return python


def run_trl(
    config: Config, folder: str, problems: Sequence[Problem], steps: int, seed: int
) -> list[dict[str, float]]:
    """Train the model in ``folder`` (float32) on the problems in order; what each step did and took."""
    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.models.llama.modeling_llama import LlamaModel
    from trl import GRPOConfig, GRPOTrainer

    from fastir.tir.grammar import parse_turn

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stop_ids: list[int] = tokenizer.encode(config.tir.stop[0], add_special_tokens=False)

    meter = Meter()
    meter.count_positions(LlamaModel)

    class TurnEnd(transformers.StoppingCriteria):
        """A row ends when the tokens sampled in this call end with the stop string."""

        def __init__(self, start: int) -> None:
            self.start, self.ids = start, torch.tensor(stop_ids)

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            tail = input_ids[:, self.start :][:, -len(self.ids) :]
            if tail.shape[1] < len(self.ids):
                return torch.zeros(len(tail), dtype=torch.bool)
            return (tail == self.ids).all(-1)

    plain_generate = model.generate

    def generate(**kwargs: Any) -> Any:
        criteria = transformers.StoppingCriteriaList([TurnEnd(kwargs["input_ids"].shape[1])])
        return plain_generate(**kwargs, stopping_criteria=criteria)

    model.generate = generate

    class Trainer(GRPOTrainer):
        """GRPOTrainer that counts what it does, and takes off the padding after a turn that ended at a fence."""

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            with meter.timed("generate_seconds"):
                completions, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            padded = [*stop_ids, tokenizer.eos_token_id]
            completions = [ids[:-1] if ids[-len(padded) :] == padded else ids for ids in completions]
            meter.add(turns=len(completions), sampled_tokens=sum(map(len, completions)))
            return completions, logprobs

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with meter.timed("rollout_seconds"):
                return super()._generate_and_score_completions(inputs)

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            tokens = (inputs["completion_mask"] * inputs["tool_mask"]).sum(1)
            meter.add(rollouts=len(tokens), loss_rollouts=len(tokens), loss_tokens=int(tokens.sum()))
            return super()._compute_loss(model, inputs)

    def reward(completions: Any, answer: list[str], **kwargs: Any) -> list[float | None]:
        rewards: list[float | None] = [
            float(parse_turn(messages[-1]["content"]).answer == gold)
            for messages, gold in zip(completions, answer, strict=True)
        ]
        meter.add(reward=rewards.count(1.0) / len(rewards))
        return rewards

    class Marks(transformers.TrainerCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            meter.add(updates=1)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            meter.mark()

    rollouts = config.rollout.prompts_per_step * config.rollout.group_size
    loss, optimizer = config.algorithm.loss, config.optimizer
    assert loss.aggregation == "token_mean"
    assert optimizer.grad_clip is not None
    with tempfile.TemporaryDirectory() as output:
        arguments = GRPOConfig(
            output_dir=output,
            max_steps=steps,
            seed=seed,
            per_device_train_batch_size=rollouts,
            gradient_accumulation_steps=1,
            num_generations=config.rollout.group_size,
            num_iterations=1,
            shuffle_dataset=False,
            max_completion_length=config.tir.response_tokens,
            max_tool_calling_iterations=config.tir.max_turns - 1,
            generation_kwargs={"max_new_tokens": config.tir.turn_tokens},
            temperature=config.rollout.temperature,
            loss_type="dapo",  # the mean over tokens
            scale_rewards="group",
            beta=0.0,
            epsilon=loss.eps_low,
            epsilon_high=loss.eps_high,
            learning_rate=optimizer.lr,
            lr_scheduler_type="constant",
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_epsilon=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.grad_clip,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        rows = [{"prompt": [{"role": "user", "content": p.question}], "answer": p.answer} for p in problems]
        trainer = Trainer(
            model=model,
            args=arguments,
            reward_funcs=reward,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            tools=[make_tool(tokenizer, config.tir.feedback_tokens, meter)],
            callbacks=[Marks()],
        )
        trainer.train()
    for row in meter.steps:
        row["train_seconds"] = row["seconds"] - row.pop("rollout_seconds")
    return meter.steps
