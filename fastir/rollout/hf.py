"""The Hugging Face engine: continuous batching with transformers' own modules, for CPUs and single GPUs.

Keys and values of a rollout stay here between its turns, so a turn costs only its new tokens. Randomness is addressed
by each request's seed. Which rows share a batch changes the last bits of a log-prob; requests that were all added
before the first step always meet in the same batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from fastir.rollout.engine import EngineError, Sample, SampleRequest, WeightCheck, tensor_checksum, uniforms

#: Finished rows are dropped from the batch once fewer than this share of its rows is still sampling.
_COMPACT_BELOW = 0.7

#: While others sample, new contexts are read at every fourth step at most: reading one costs about a step of all rows.
_READ_EVERY = 4


class _Cache:
    """Keys and values of B rows, contiguous from position 0, and the attention over them. The buffer may be larger."""

    def __init__(self, layers: int, rows: int, heads: int, capacity: int, width: int, like: torch.Tensor) -> None:
        self.data = like.new_zeros(layers, 2, rows, heads, capacity, width)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=like.device)  # (B,) tokens held
        self.span = 0  # longest row after the tokens now being added

    def extend(self, positions: torch.Tensor) -> None:
        """Say which (B, L) positions the next forward pass fills. Padding writes behind a row's end, where the row's
        next token overwrites it before any query may look there."""
        self._positions = positions
        self.span = int(positions.max()) + 1
        self._visible = torch.arange(self.span, device=positions.device) <= positions[:, None, :, None]  # (B,1,L,span)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        batch, heads, length, width = query.shape
        index = self._positions[:, None, :, None].expand_as(key)
        keys, values = self.data[layer, 0, :batch], self.data[layer, 1, :batch]
        keys.scatter_(2, index, key)
        values.scatter_(2, index, value)
        keys, values = keys[:, :, : self.span], values[:, :, : self.span]
        grouped = query.reshape(batch, keys.shape[1], -1, width)  # heads that share a key lie side by side
        scores = (grouped @ keys.transpose(2, 3)).view(batch, heads, length, self.span) * scaling
        weights = scores.masked_fill(~self._visible, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype)
        attended = weights.view(batch, keys.shape[1], -1, self.span) @ values
        return attended.view(batch, heads, length, width).transpose(1, 2)

    def select(self, rows: torch.Tensor) -> None:
        """Make these rows, in this order and as often as they are named, the cache's rows."""
        self.data = self.data[:, :, rows]
        self.lengths = self.lengths[rows]

    def compact(self, rows: torch.Tensor) -> None:
        """Keep these rows, in order, at the front of the buffer."""
        self.lengths = self.lengths[rows]
        span = int(self.lengths.max())
        self.data[:, :, : len(rows), :, :span] = self.data[:, :, rows, :, :span]

    def put(self, rows: torch.Tensor, other: _Cache, most_rows: int) -> None:
        """Copy the rows of ``other`` to ``rows``, which are free or lie behind the last; the buffer grows as needed."""
        count, capacity = max(int(rows.max()) + 1, len(self.lengths)), other.data.shape[-2]
        layers, _, held_rows, heads, held, width = self.data.shape
        if count > held_rows or capacity > held:
            data = self.data.new_zeros(
                layers,
                2,
                held_rows if count <= held_rows else min(most_rows, max(count, 2 * held_rows)),
                heads,
                held if capacity <= held else max(capacity, held + held // 4),
                width,
            )
            data[:, :, :held_rows, :, :held] = self.data
            self.data = data
        self.lengths = torch.cat([self.lengths, self.lengths.new_zeros(count - len(self.lengths))])
        self.lengths[rows] = other.lengths
        span = int(other.lengths.max())
        self.data[:, :, rows, :, :span] = other.data[..., :span, :]


@dataclass(eq=False)
class _Row:
    """A request being decoded, at the same place as its row of the cache."""

    request: SampleRequest
    draws: np.ndarray  # (max_tokens,) uniforms
    tokens: np.ndarray = field(init=False)  # (max_tokens,), filled as sampled
    logprobs: np.ndarray = field(init=False)
    sampled: int = 0
    alive: bool = True  # a finished or aborted row samples on into the void until its place is taken or dropped

    def __post_init__(self) -> None:
        self.tokens = np.zeros(len(self.draws), dtype=np.int32)
        self.logprobs = np.zeros(len(self.draws), dtype=np.float32)


class HFEngine:
    """Samples with a transformers model of its own (a copy: the trainer's weights arrive by `load_weights`).

    Args:
        model: a causal LM loaded by `fastir.training.model.load_model`.
        tokenizer: its tokenizer; gives EOS and the text that stop strings are looked for in.
        stop: a turn ends when its text contains one of these; the ids that completed it stay.
        batch_size: rows decoded at once.
    """

    def __init__(self, model: Any, tokenizer: Any, *, stop: Sequence[str], batch_size: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.batch_size = batch_size
        self.weight_version = 0
        self._waiting: deque[SampleRequest] = deque()
        self._rows: list[_Row] = []
        self._steps_since_reading = 0
        self._cache: Any = None  # of the rows
        self._hidden: Any = None  # (B, H) what each row's next token is drawn from
        self._prefixes: dict[tuple[int, ...], tuple[np.ndarray, torch.Tensor]] = {}
        self._eos = tokenizer.eos_token_id
        self._stop_window = max((len(text) for text in self.stop), default=0)
        last_characters = {text[-1] for text in self.stop}
        vocabulary = model.get_output_embeddings().weight.shape[0]
        # Only a token whose text holds a stop string's last character can complete it: spares decoding at every token.
        self._may_stop = np.zeros(vocabulary, dtype=bool)
        for token in range(min(vocabulary, len(tokenizer))):
            self._may_stop[token] = not last_characters.isdisjoint(tokenizer.decode([token]))

    def add(self, request: SampleRequest) -> None:
        if request.max_tokens < 1:
            raise ValueError("SampleRequest.max_tokens must be at least 1")
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[tuple[tuple[int, ...], Sample]]:
        """Read in waiting requests while rows are free, then sample one token in every row."""
        self._admit()
        if not self._rows:
            return []
        logits = self.model.get_output_embeddings()(self._hidden).float()
        if not bool(torch.isfinite(logits).all()):
            raise EngineError("HFEngine: non-finite logits: the weights are broken; resume from an older checkpoint")
        draws = np.array([row.draws[min(row.sampled, len(row.draws) - 1)] for row in self._rows])
        temperatures = np.array([row.request.temperature for row in self._rows], dtype=np.float32)
        picks, logprobs = _sample(logits, draws, temperatures)
        completed = []
        for i, row in enumerate(self._rows):
            if row.alive:
                row.tokens[row.sampled], row.logprobs[row.sampled] = picks[i], logprobs[i]
                row.sampled += 1
                ids = row.tokens[: row.sampled]
                stop = self._stopped(ids)
                if stop or row.sampled >= row.request.max_tokens:
                    row.alive = False
                    self._keep_prefix(row.request, ids, i)
                    sample = Sample(ids, row.logprobs[: row.sampled], stop or "length", self.weight_version)
                    completed.append((row.request.key, sample))
        self._forward_batch(picks)
        return completed

    def abort(self, keys: Iterable[tuple[int, ...]]) -> None:
        dropped = set(keys)
        self._waiting = deque(request for request in self._waiting if request.key not in dropped)
        for row in self._rows:
            row.alive = row.alive and row.request.key not in dropped
        self._drop_finished()

    def load_weights(
        self, parameters: Iterable[tuple[str, torch.Tensor]], version: int, *, check: WeightCheck
    ) -> None:
        if self._waiting or any(row.alive for row in self._rows):
            raise EngineError("HFEngine.load_weights: requests are in flight; finish or abort them first")
        own = dict(self.model.named_parameters())
        missing = set(own)
        limit = None if check == "full" else 1 << 16
        expected: dict[str, int] = {}
        with torch.no_grad():
            for name, tensor in parameters:
                if name not in own:
                    raise EngineError(f"HFEngine.load_weights: the model has no parameter {name!r}")
                if check != "off":
                    expected[name] = tensor_checksum(tensor, own[name].dtype, limit)
                own[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise EngineError(f"HFEngine.load_weights: no weights given for {sorted(missing)[:3]}")
        self.forget()
        held = {name: tensor_checksum(p, p.dtype, limit) for name, p in self.model.named_parameters() if expected}
        wrong = [name for name, sent in expected.items() if held[name] != sent]
        if wrong:
            raise EngineError(
                f"after weight update {version} the engine holds other values of {wrong[0]} and {len(wrong) - 1} more"
            )
        self.weight_version = version

    def forget(self) -> None:
        self._prefixes.clear()

    def sleep(self) -> None:
        """Nothing to free but the cached prefixes: the model is small where this engine is the right one."""
        self.forget()

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self.forget()
        self._waiting.clear()
        self._rows, self._cache, self._hidden = [], None, None

    def _admit(self) -> None:
        """Read the contexts of waiting requests into free rows."""
        alive = sum(row.alive for row in self._rows)
        count = min(len(self._waiting), self.batch_size - alive)
        self._steps_since_reading += 1
        if count <= 0 or (alive and self._steps_since_reading < _READ_EVERY):
            return
        self._steps_since_reading = 0
        requests = [self._waiting.popleft() for _ in range(count)]
        cache, hidden = self._read_contexts(requests)
        rows = [_Row(request, uniforms(request.seed, request.max_tokens)) for request in requests]
        if not alive:
            self._rows, self._cache, self._hidden = rows, cache, hidden
            return
        free = [i for i, row in enumerate(self._rows) if not row.alive]
        places = [*free, *range(len(self._rows), len(self._rows) + count)][:count]
        self._rows += rows[len(free) :]
        for place, row in zip(places, rows, strict=True):
            self._rows[place] = row
        index = torch.tensor(places, device=hidden.device)
        self._cache.put(index, cache, self.batch_size)
        grown = hidden.new_zeros(len(self._rows), hidden.shape[1])
        grown[: len(self._hidden)] = self._hidden
        grown[index] = hidden
        self._hidden = grown

    def _forward_batch(self, picks: np.ndarray) -> None:
        """Run the tokens just picked, (B,), so that every row has its next hidden state; drops finished rows."""
        picks = picks[self._drop_finished()]
        if not self._rows:
            return
        # A finished row not yet dropped samples on into the void: keep it inside the buffer.
        positions = self._cache.lengths.clamp(max=self._cache.data.shape[-2] - 1)[:, None]
        token_ids = torch.from_numpy(picks).to(positions.device)[:, None]
        self._hidden = self._forward(token_ids, positions, self._cache)[:, 0]
        self._cache.lengths = positions[:, 0] + 1

    def _drop_finished(self) -> np.ndarray:
        """Once too few rows still sample, drop the others; returns the places of the rows that stayed."""
        alive = np.array([row.alive for row in self._rows], dtype=bool)
        kept = np.arange(len(alive))
        if not alive.any():
            kept = kept[:0]
            self._rows, self._cache, self._hidden = [], None, None
        elif alive.mean() < _COMPACT_BELOW:
            kept = np.flatnonzero(alive)
            self._rows = [self._rows[i] for i in kept]
            index = torch.from_numpy(kept).to(self._hidden.device)
            self._cache.compact(index)
            self._hidden = self._hidden[index]
        return kept

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: _Cache) -> torch.Tensor:
        """(B, L) ids at their positions → (B, L, H) last hidden states; the cache takes their keys and values."""
        cache.extend(positions)
        body = self.model.base_model(input_ids=token_ids, position_ids=positions, use_cache=False, plan=cache)
        return body.last_hidden_state

    def _read_contexts(self, requests: Sequence[SampleRequest]) -> tuple[_Cache, torch.Tensor]:
        """A cache that holds every context, and the (B, H) hidden states after their last tokens.

        Each distinct context is read once: siblings start from the same prompt.
        """
        places: dict[bytes, int] = {}
        owner = [places.setdefault(request.token_ids.tobytes(), len(places)) for request in requests]
        distinct = [requests[owner.index(place)] for place in range(len(places))]
        room = max(len(request.token_ids) + request.max_tokens for request in requests)
        cache, new_tokens, positions = self._open(distinct, room)
        device = positions.device
        padded = [[*row, *[0] * (positions.shape[1] - len(row))] for row in new_tokens]
        hidden = self._forward(torch.tensor(padded, device=device), positions, cache)
        rows = torch.arange(len(distinct), device=device)
        last = torch.tensor([len(row) - 1 for row in new_tokens], device=device)
        cache.lengths = positions[rows, last] + 1
        expand = torch.tensor(owner, device=device)
        hidden = hidden[rows, last][expand]
        cache.select(expand)
        return cache, hidden

    def _open(self, requests: Sequence[SampleRequest], room: int) -> tuple[_Cache, list[np.ndarray], torch.Tensor]:
        """A cache for ``room`` tokens with what is kept of each context, the tokens it lacks, and their positions."""
        parameter = next(self.model.parameters())
        config = self.model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kept: list[torch.Tensor | None] = []
        new_tokens: list[np.ndarray] = []
        for request in requests:
            ids, data = self._prefixes.pop(request.key, (None, None))
            # The last token is always run again: its logits are what comes next.
            if (
                ids is not None
                and len(ids) < len(request.token_ids)
                and np.array_equal(ids, request.token_ids[: len(ids)])
            ):
                kept.append(data)
                new_tokens.append(request.token_ids[len(ids) :])
            else:
                kept.append(None)
                new_tokens.append(request.token_ids)
        longest = max(len(row) for row in new_tokens)
        # Padding of the first pass may write behind a row's context, so there must be room for it.
        padded = max(len(r.token_ids) - len(new) + longest for r, new in zip(requests, new_tokens, strict=True))
        capacity = max(room, padded)
        cache = _Cache(config.num_hidden_layers, len(requests), config.num_key_value_heads, capacity, width, parameter)
        starts = []
        for row, data in enumerate(kept):
            length = 0 if data is None else data.shape[-2]
            starts.append(length)
            if data is not None:
                cache.data[:, :, row, :, :length] = data
        first = torch.tensor(starts, device=parameter.device)
        return cache, new_tokens, first[:, None] + torch.arange(longest, device=parameter.device)

    def _keep_prefix(self, request: SampleRequest, sampled: np.ndarray, row: int) -> None:
        """Keep the row's keys and values for its next turn; the last sampled token has none yet."""
        length = int(self._cache.lengths[row])
        ids = np.concatenate([request.token_ids, sampled])[:length]
        self._prefixes[request.key] = (ids, self._cache.data[:, :, row, :, :length].clone())

    def _stopped(self, ids: np.ndarray) -> Literal["eos", "stop"] | None:
        token = int(ids[-1])
        if token == self._eos:
            return "eos"
        if self.stop and self._may_stop[token]:
            text = self.tokenizer.decode(ids[-self._stop_window - 1 :].tolist())
            if any(stop in text for stop in self.stop):
                return "stop"
        return None


def _sample(logits: torch.Tensor, draws: np.ndarray, temperatures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inverse-CDF sampling: (B, V) float32 logits, (B,) uniforms and temperatures → (B,) ids and log-probs."""
    divisors = torch.from_numpy(np.where(temperatures > 0, temperatures, 1).astype(np.float32)).to(logits.device)
    logprobs = (logits / divisors[:, None]).log_softmax(-1)
    if (temperatures == 0).all():
        picks = logprobs.argmax(-1, keepdim=True)
    else:
        cumulative = logprobs.double().exp().cumsum(-1)
        targets = torch.from_numpy(draws).to(logits.device)[:, None] * cumulative[:, -1:]
        # side="right" never picks a token of probability zero
        picks = torch.searchsorted(cumulative, targets, right=True).clamp(max=logits.shape[-1] - 1)
        greedy = torch.from_numpy(temperatures == 0).to(logits.device)
        if bool(greedy.any()):
            picks[greedy] = logprobs[greedy].argmax(-1, keepdim=True)
    return picks[:, 0].cpu().numpy(), logprobs.gather(-1, picks)[:, 0].cpu().numpy()
