"""Prompts and turn boundaries in tokens. What the policy sampled is never decoded and encoded again: a boundary only
appends the template's own pieces around the feedback."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from fastir.config import ConfigError, DataConfig, TirConfig
from fastir.data import Problem
from fastir.tir.feedback import encode_feedback
from fastir.types import IntArray

_POLICY, _FEEDBACK = "fastirpolicyturn", "fastirfeedback"  # survive any template; cut out again right away


class TurnFormat:
    """How a problem becomes prompt ids, and a tool's output the ids between two turns.

    Without chat template: ``prompt_template``, then feedback, then ``assistant_cue``. With one: the template's prompt,
    and around each feedback the text the template puts between an assistant message and the next, as a user message.

    Raises:
        ConfigError: the template is missing, or does not keep messages apart as text.
    """

    def __init__(self, tokenizer: Any, data: DataConfig, tir: TirConfig) -> None:
        self._tokenizer, self._data, self._tir = tokenizer, data, tir
        # Siblings run the same code, so the same feedback comes many times in a step.
        self._feedback = lru_cache(maxsize=4096)(lambda text: encode_feedback(text, tokenizer, tir.feedback_tokens))
        self._before = ""  # text between the policy's last token and the feedback
        self._after = tir.assistant_cue
        if data.chat_template:
            if not getattr(tokenizer, "chat_template", None):
                raise ConfigError("data.chat_template = true: this tokenizer has none; use data.prompt_template")
            messages = [
                *self._messages("question"),
                {"role": "assistant", "content": _POLICY},
                {"role": "user", "content": _FEEDBACK},
            ]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            _, found, rest = text.partition(_POLICY)
            before, found_too, after = rest.partition(_FEEDBACK)
            if not found or not found_too:
                raise ConfigError(
                    "data.chat_template = true: the template alters message contents; use prompt_template"
                )
            self._before, self._after = before, after + tir.assistant_cue

    def prompt(self, problem: Problem) -> IntArray:
        """(L,) ids of the prompt, ready for the policy's first turn."""
        if self._data.chat_template:
            text = self._tokenizer.apply_chat_template(
                self._messages(problem.question), tokenize=False, add_generation_prompt=True
            )
            return self._encode(text)
        ids = self._encode(self._data.prompt_template.replace("{question}", problem.question))
        bos = self._tokenizer.bos_token_id
        if bos is not None and getattr(self._tokenizer, "add_bos_token", False):
            ids = np.concatenate([np.array([bos], dtype=np.int32), ids])
        return ids

    def between(self, feedback: str, policy_ids: IntArray) -> tuple[str, IntArray]:
        """The feedback as shown (cut to the token budget) and the (n,) ids appended after ``policy_ids``."""
        shown, feedback_ids = self._feedback(feedback)
        before = self._before
        eos = self._tokenizer.eos_token
        if len(policy_ids) and policy_ids[-1] == self._tokenizer.eos_token_id:
            before = before.removeprefix(eos)  # the policy has said it already
        return shown, np.concatenate(
            [self._encode(before), np.array(feedback_ids, dtype=np.int32), self._encode(self._after)]
        )

    def _messages(self, question: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._data.system_prompt}] if self._data.system_prompt else []
        return [*system, {"role": "user", "content": question}]

    def _encode(self, text: str) -> IntArray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
