"""A vLLM server in processes of its own: ids in and out, weights through files, and what happens when it dies."""

import importlib.util
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from fastir.rollout.engine import EngineError, SampleRequest, generate
from fastir.training.model import model_source

if importlib.util.find_spec("vllm") is None:
    pytest.skip("scripts/setup.sh --vllm", allow_module_level=True)

from fastir.rollout.vllm import HEAD
from fastir.rollout.vllm_server import VLLMServerEngine, start_server

pytestmark = pytest.mark.slow

#: One thread, and no pinning of it to a core that others may be using.
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
STOP = ("\n```\n", "on")


@pytest.fixture(scope="module")
def folder(model_config):
    return model_source(model_config)[0]


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    server = start_server(folder, batch_size=16, max_model_len=512, log=log, environment=ENVIRONMENT)
    yield server
    server.close()


@pytest.fixture
def engine(server, tokenizer, folder, tmp_path):
    engine = VLLMServerEngine(server.url, tokenizer, stop=STOP, batch_size=16, folder=tmp_path / "weights")
    engine.load_weights(AutoModelForCausalLM.from_pretrained(folder).named_parameters(), 0, check="sampled")
    yield engine
    engine.close()


def requests_of(tokenizer, count, max_tokens=24, temperature=1.0):
    prompts = [f"Q: What is {i * 37 + 11} + {i * 1009 + 5}?\nA: " for i in range(count)]
    ids = [np.array(tokenizer.encode(p, add_special_tokens=False), dtype=np.int32) for p in prompts]
    return [SampleRequest((i,), ids[i], max_tokens, (0, i), temperature) for i in range(count)]


def largest_gap(model, requests, samples):
    gaps = []
    for request, sample in zip(requests, samples, strict=True):
        ids = torch.from_numpy(np.concatenate([request.token_ids, sample.token_ids])).long()
        logits = model(ids[None], use_cache=False).logits[0, len(request.token_ids) - 1 : -1]
        logprobs = (logits / (request.temperature or 1.0)).log_softmax(-1)
        expected = logprobs.gather(1, ids[len(request.token_ids) :, None])[:, 0].detach().numpy()
        gaps.append(np.abs(sample.logprobs - expected).max())
    return max(gaps)


def drain(engine):
    samples = {}
    while engine._flights:
        samples.update(engine.step())
    return samples


def test_logprobs_stops_and_repeatability(engine, tokenizer, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    for temperature in (0.0, 0.7):
        requests = requests_of(tokenizer, 20, temperature=temperature)
        assert largest_gap(model, requests, generate(engine, requests)) < 1e-4
    requests = requests_of(tokenizer, 100, max_tokens=12, temperature=1.5)
    samples = generate(engine, requests)
    assert {s.stop for s in samples} == {"eos", "stop", "length"}
    for sample in samples:
        ids = sample.token_ids.tolist()
        assert any(stop in tokenizer.decode(ids) for stop in STOP) == (sample.stop == "stop")
        assert not any(stop in tokenizer.decode(ids[:-1]) for stop in STOP)
        assert (ids[-1] == tokenizer.eos_token_id) == (sample.stop == "eos")
        assert (len(ids) == 12) if sample.stop == "length" else (len(ids) <= 12)
    again = generate(engine, requests[:10])
    assert [s.token_ids.tolist() for s in again] == [s.token_ids.tolist() for s in samples[:10]]


def test_new_weights_arrive_and_leave_no_file(engine, tokenizer, folder, tmp_path):
    requests = requests_of(tokenizer, 8)
    generate(engine, requests)
    moved = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    torch.manual_seed(0)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(0.01 * torch.randn_like(p))
    engine.load_weights(moved.named_parameters(), 5, check="full")
    samples = generate(engine, requests)
    assert {s.weight_version for s in samples} == {5}
    assert largest_gap(moved.double(), requests, samples) < 1e-4
    assert list((tmp_path / "weights").iterdir()) == []


def test_wrong_weights_are_noticed(engine, folder, monkeypatch):
    base = AutoModelForCausalLM.from_pretrained(folder)
    named = dict(base.named_parameters())
    with pytest.raises(EngineError, match="no parameter 'nope'"):
        engine.load_weights([("nope", named["model.norm.weight"])], 1, check="sampled")
    with torch.no_grad():
        base.model.embed_tokens.weight.mul_(1.01)
    send = engine._send
    monkeypatch.setattr(engine, "_send", lambda bucket: send({n: t for n, t in bucket.items() if n != HEAD}))
    with pytest.raises(EngineError, match=HEAD):
        engine.load_weights(base.named_parameters(), 1, check="sampled")


def test_aborted_requests_return_nothing(engine, tokenizer):
    requests = requests_of(tokenizer, 24, max_tokens=200, temperature=2.0)
    for request in requests:
        engine.add(request)
    engine.abort([(i,) for i in range(4, 24)])
    assert set(drain(engine)) == {(0,), (1,), (2,), (3,)}
    engine.forget()  # nothing is left in flight on the server


def test_another_owner_of_the_weights_is_noticed(engine, tokenizer):
    engine._post("/update_weight_version", {"new_version": "77"})
    with pytest.raises(EngineError, match="sampled with weights 77 instead of 0"):
        generate(engine, requests_of(tokenizer, 1))


def test_nothing_at_the_address_is_said_at_once(tokenizer, tmp_path):
    with pytest.raises(EngineError, match="is lost"):
        VLLMServerEngine("http://127.0.0.1:9", tokenizer, stop=STOP, batch_size=1, folder=tmp_path)


def test_a_server_that_cannot_start_says_why(tmp_path, folder):
    with pytest.raises(EngineError, match=r"cannot start with .*none"):
        start_server(tmp_path / "none", batch_size=1, max_model_len=64, log=tmp_path / "log")
    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())  # and no weights
    with pytest.raises(EngineError, match="the vLLM server ended"):
        start_server(tmp_path, batch_size=1, max_model_len=64, log=tmp_path / "log")


def test_a_killed_worker_ends_the_run_within_a_minute(engine, server, tokenizer):
    """The last test of the server: it does not survive this."""
    requests = requests_of(tokenizer, 64, max_tokens=400, temperature=2.0)
    for request in requests:
        engine.add(request)
    engine.step()
    began = time.monotonic()
    children = psutil.Process(server.process.pid).children(recursive=True)
    for child in children:
        if "resource_tracker" not in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"is lost .*--resume"):
        drain(engine)
    assert time.monotonic() - began < 60
    with pytest.raises(EngineError, match="is lost"):
        engine.forget()
    server.close()
    assert psutil.wait_procs(children, timeout=20)[1] == []
