"""The Hugging Face engine: batched decoding with transformers' own modules, for CPUs and single GPUs.

Keys and values of a rollout stay here between its turns, so a turn costs only its new tokens. Nothing depends on
scheduling: requests are served in the order given, in fixed batches, with randomness addressed by each request's seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fastir.rollout.engine import Sample, SampleRequest, tensor_checksum, uniforms

#: Finished rows are dropped from the batch once fewer than this share of its rows is still sampling.
_COMPACT_BELOW = 0.7


class _Cache:
    """Keys and values of B rows, contiguous from position 0, and the attention over them."""

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
        index = self._positions[:, None, :, None].expand_as(key)
        keys, values = self.data[layer, 0], self.data[layer, 1]
        keys.scatter_(2, index, key)
        values.scatter_(2, index, value)
        keys, values = keys[:, :, : self.span], values[:, :, : self.span]
        batch, heads, length, width = query.shape
        grouped = query.reshape(batch, keys.shape[1], -1, width)  # heads that share a key lie side by side
        scores = (grouped @ keys.transpose(2, 3)).view(batch, heads, length, self.span) * scaling
        weights = scores.masked_fill(~self._visible, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype)
        attended = weights.view(batch, keys.shape[1], -1, self.span) @ values
        return attended.view(batch, heads, length, width).transpose(1, 2)

    def keep(self, rows: torch.Tensor) -> None:
        self.data = self.data[:, :, rows]
        self.lengths = self.lengths[rows]


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
        self._prefixes: dict[tuple[int, ...], tuple[np.ndarray, torch.Tensor]] = {}
        self._eos = tokenizer.eos_token_id
        self._stop_window = max((len(text) for text in self.stop), default=0)
        last_characters = {text[-1] for text in self.stop}
        vocabulary = model.get_output_embeddings().weight.shape[0]
        # Only a token whose text holds a stop string's last character can complete it: spares decoding at every token.
        self._may_stop = np.zeros(vocabulary, dtype=bool)
        for token in range(min(vocabulary, len(tokenizer))):
            self._may_stop[token] = not last_characters.isdisjoint(tokenizer.decode([token]))

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[SampleRequest], *, temperature: float, finished: Callable[[int, Sample], None]
    ) -> None:
        for start in range(0, len(requests), self.batch_size):
            batch = requests[start : start + self.batch_size]
            self._generate_batch(batch, temperature, partial(_offset, finished, start))

    def load_weights(self, parameters: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        own = dict(self.model.named_parameters())
        missing = set(own)
        with torch.no_grad():
            for name, tensor in parameters:
                if name not in own:
                    raise KeyError(f"HFEngine.load_weights: the model has no parameter {name!r}")
                own[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise KeyError(f"HFEngine.load_weights: no weights given for {sorted(missing)[:3]}")
        self.weight_version = version
        self.forget()

    def checksum(self) -> dict[str, int]:
        return {name: tensor_checksum(p, p.dtype) for name, p in self.model.named_parameters()}

    def forget(self) -> None:
        """Drop every kept prefix (after a weight update, and when a set of rollouts is done)."""
        self._prefixes.clear()

    def _generate_batch(
        self, requests: Sequence[SampleRequest], temperature: float, finished: Callable[[int, Sample], None]
    ) -> None:
        limits = np.array([request.max_tokens for request in requests])
        if limits.min() < 1:
            raise ValueError("SampleRequest.max_tokens must be at least 1")
        cache, hidden = self._read_contexts(requests)
        randoms = np.stack([uniforms(request.seed, int(limits.max())) for request in requests])  # (B, most tokens)
        tokens = np.zeros(randoms.shape, dtype=np.int32)
        logprobs = np.zeros(randoms.shape, dtype=np.float32)
        sampled = np.zeros(len(requests), dtype=int)
        active = np.arange(len(requests))  # requests still in the cache's rows, in row order
        alive = np.ones(len(requests), dtype=bool)  # rows of the cache that still sample
        while True:
            logits = self.model.get_output_embeddings()(hidden).float()
            if not bool(torch.isfinite(logits).all()):
                raise FloatingPointError("HFEngine: non-finite logits; the weights are broken")
            column = sampled[active]
            draws = randoms[active, np.minimum(column, randoms.shape[1] - 1)]
            picks, picked_logprobs = _sample(logits, draws, temperature)
            rows = active[alive]
            tokens[rows, column[alive]] = picks[alive]
            logprobs[rows, column[alive]] = picked_logprobs[alive]
            sampled[rows] += 1
            for row in np.flatnonzero(alive).tolist():
                i = int(active[row])
                ids = tokens[i, : sampled[i]]
                stop = self._stopped(ids)
                if stop or sampled[i] >= limits[i]:
                    alive[row] = False
                    self._close(requests[i], ids, cache, row)
                    finished(i, Sample(ids, logprobs[i, : sampled[i]], stop or "length"))
            if not alive.any():
                break
            if alive.mean() < _COMPACT_BELOW:
                kept = np.flatnonzero(alive)
                active, picks, alive = active[kept], picks[kept], alive[kept]
                cache.keep(torch.from_numpy(kept).to(cache.data.device))
            # A finished row not yet dropped samples on into the void: keep it inside the buffer.
            positions = cache.lengths.clamp(max=cache.data.shape[-2] - 1)[:, None]
            hidden = self._forward(torch.from_numpy(picks).to(positions.device)[:, None], positions, cache)[:, 0]
            cache.lengths = positions[:, 0] + 1

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
        cache.keep(expand)
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

    def _close(self, request: SampleRequest, sampled: np.ndarray, cache: _Cache, row: int) -> None:
        """Keep the row's keys and values for its next turn; the last sampled token has none yet."""
        length = int(cache.lengths[row])
        ids = np.concatenate([request.token_ids, sampled])[:length]
        self._prefixes[request.key] = (ids, cache.data[:, :, row, :, :length].clone())

    def _stopped(self, ids: np.ndarray) -> Any:
        token = int(ids[-1])
        if token == self._eos:
            return "eos"
        if self.stop and self._may_stop[token]:
            text = self.tokenizer.decode(ids[-self._stop_window - 1 :].tolist())
            if any(stop in text for stop in self.stop):
                return "stop"
        return None


def _offset(finished: Callable[[int, Sample], None], start: int, i: int, sample: Sample) -> None:
    finished(start + i, sample)


def _sample(logits: torch.Tensor, draws: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Inverse-CDF sampling: (B, V) float32 logits and (B,) uniforms → (B,) ids and log-probs at the temperature."""
    scaled = logits / temperature if temperature > 0 else logits
    logprobs = scaled.log_softmax(-1)
    if temperature > 0:
        cumulative = logprobs.double().exp().cumsum(-1)
        targets = torch.from_numpy(draws).to(logits.device)[:, None] * cumulative[:, -1:]
        # side="right" never picks a token of probability zero
        picks = torch.searchsorted(cumulative, targets, right=True).clamp(max=logits.shape[-1] - 1)
    else:
        picks = logprobs.argmax(-1, keepdim=True)
    return picks[:, 0].cpu().numpy(), logprobs.gather(-1, picks)[:, 0].cpu().numpy()
