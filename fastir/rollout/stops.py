"""Where a sampled turn ends: EOS, or a stop string in its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np


class StopFinder:
    """Tells after each sampled token whether it ended the turn.

    Args:
        tokenizer: gives EOS and the text that stop strings are looked for in.
        stop: a turn ends when its text contains one of these. The token that completes a stop string may go on behind
            it: tokens are never cut.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self.eos: int = tokenizer.eos_token_id
        # Tokens that may hold a stop string: a character can take a token per byte.
        self._window = max((len(text.encode()) for text in self._stop), default=0) + 1
        last = {text[-1] for text in self._stop}
        # Only a token whose own text holds a stop string's last character can complete it, which spares decoding at
        # most tokens. A token alone does not show a part of a multi-byte character, nor (SentencePiece) its space.
        plain = all(character.isascii() and character != " " for character in last)
        self._may_stop = np.full(len(tokenizer), not plain)
        if plain and last:
            for token in range(len(tokenizer)):
                self._may_stop[token] = not last.isdisjoint(tokenizer.decode([token]))

    def __call__(self, token_ids: Sequence[int]) -> Literal["eos", "stop"] | None:
        """Whether the last of the turn's ``token_ids`` ended it."""
        token = token_ids[-1]
        if token == self.eos:
            return "eos"
        if self._stop and token < len(self._may_stop) and self._may_stop[token]:
            text = self._tokenizer.decode(list(token_ids[-self._window :]))
            if any(stop in text for stop in self._stop):
                return "stop"
        return None
