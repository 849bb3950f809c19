"""The Hugging Face engine against plain forward passes of the same weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fastir.rollout.engine import EngineError, SampleRequest, generate, tensor_checksum, uniforms
from fastir.rollout.hf import HFEngine
from fastir.training.model import full_parameters, load_model
from fastir.training.sync import sync_weights


def requests_of(tokenizer, count, max_tokens=24, seed=0, temperature=1.0):
    prompts = [f"Q: What is {i * 37 + 11} + {i * 1009 + 5}?\nA: " for i in range(count)]
    return [
        SampleRequest(
            (i,),
            np.array(tokenizer.encode(p, add_special_tokens=False), dtype=np.int32),
            max_tokens,
            (seed, i),
            temperature,
        )
        for i, p in enumerate(prompts)
    ]


def continued(request, sample, more, tokenizer):
    extra = np.array(tokenizer.encode(more, add_special_tokens=False), dtype=np.int32)
    ids = np.concatenate([request.token_ids, sample.token_ids, extra])
    return replace(request, token_ids=ids, seed=(*request.seed, 1))


@pytest.fixture(scope="module")
def eager(model_config):
    from fastir.training.model import model_source

    return (
        AutoModelForCausalLM.from_pretrained(model_source(model_config)[0], attn_implementation="eager").double().eval()
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass(engine, tokenizer, eager, temperature):
    requests = requests_of(tokenizer, 11, temperature=temperature)
    for turn in range(2):
        samples = generate(engine, requests)
        for request, sample in zip(requests, samples, strict=True):
            ids = torch.from_numpy(np.concatenate([request.token_ids, sample.token_ids])).long()
            logits = eager(ids[None], use_cache=False).logits[0, len(request.token_ids) - 1 : -1] / temperature
            expected = logits.log_softmax(-1).gather(1, ids[len(request.token_ids) :, None])[:, 0]
            np.testing.assert_allclose(sample.logprobs, expected.detach(), atol=3e-4)
            assert np.abs(sample.logprobs - expected.detach().numpy()).mean() < 3e-5
            assert len(sample.token_ids) <= request.max_tokens
        requests = [continued(r, s, f"\nresult {turn}\n", tokenizer) for r, s in zip(requests, samples, strict=True)]


def test_same_seed_same_tokens_whatever_the_batch(engine, tokenizer):
    requests = requests_of(tokenizer, 10)
    together = generate(engine, requests)
    engine.forget()
    engine.batch_size = 3
    apart = [generate(engine, [r])[0] for r in requests]
    for a, b in zip(together, apart, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
    other = generate(engine, requests_of(tokenizer, 10, seed=1))
    assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(together, other, strict=True))


def test_kept_prefix_changes_nothing(engine, tokenizer):
    requests = requests_of(tokenizer, 6)
    first = generate(engine, requests)
    second = [continued(r, s, "\nCode execution result: 12\n", tokenizer) for r, s in zip(requests, first, strict=True)]
    with_prefix = generate(engine, second)
    engine.forget()
    without = generate(engine, second)
    for a, b in zip(with_prefix, without, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_siblings_with_one_context_are_read_once_and_sampled_apart(engine, tokenizer):
    first = requests_of(tokenizer, 2)
    siblings = [
        replace(r, key=(r.key[0], k), seed=(7, r.key[0], k)) for r in first for k in range(4)
    ]
    rows = []
    forward = engine._forward
    engine._forward = lambda ids, positions, cache: rows.append(len(ids)) or forward(ids, positions, cache)
    together = generate(engine, siblings)
    assert rows[0] == 2
    assert rows[1] > 2
    engine.forget()
    for request, sample in zip(siblings, together, strict=True):
        assert generate(engine, [request])[0].token_ids.tolist() == sample.token_ids.tolist()
    assert len({tuple(s.token_ids.tolist()) for s in together}) > 2


def test_a_prefix_that_does_not_match_is_not_used(engine, tokenizer):
    request = requests_of(tokenizer, 1)[0]
    generate(engine, [request])
    changed = request.token_ids.copy()
    changed[3] += 1
    other = replace(request, token_ids=np.concatenate([changed, changed]), max_tokens=8, seed=(5,))
    reused = generate(engine, [other])[0]
    engine.forget()
    assert generate(engine, [other])[0].token_ids.tolist() == reused.token_ids.tolist()


def test_stop_string_keeps_the_ids_that_completed_it(model_config, tokenizer):
    engine = HFEngine(load_model(model_config, torch.float32), tokenizer, stop=("on",), batch_size=64)
    samples = generate(engine, requests_of(tokenizer, 64, max_tokens=40, temperature=1.5))
    stopped = [s for s in samples if s.stop == "stop"]
    assert stopped
    for sample in samples:
        ids = sample.token_ids.tolist()
        assert ("on" in tokenizer.decode(ids)) == (sample.stop == "stop")
        assert "on" not in tokenizer.decode(ids[:-1])
        assert (ids[-1] == tokenizer.eos_token_id) == (sample.stop == "eos")
        assert tokenizer.eos_token_id not in ids[:-1]
        assert sample.stop != "length" or len(ids) == 40


def test_sampling_frequencies_follow_the_policy(engine, tokenizer, eager):
    """The first token of 4,000 draws against its exact distribution (chi-squared over tokens expected ≥ 5 times)."""
    request = requests_of(tokenizer, 1)[0]
    many = [replace(request, key=(i,), max_tokens=1, seed=(3, i)) for i in range(4000)]
    engine.batch_size = 1000
    drawn = np.bincount([s.token_ids[0] for s in generate(engine, many)], minlength=600)
    logits = eager(torch.from_numpy(request.token_ids).long()[None], use_cache=False).logits[0, -1]
    expected = 4000 * logits.softmax(-1).detach().numpy()
    likely = expected >= 5
    chi2 = ((drawn[: len(expected)] - expected) ** 2 / expected)[likely].sum()
    freedom = max(1, likely.sum() - 1)
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)


def test_greedy_takes_the_most_likely_token(engine, tokenizer, eager):
    request = requests_of(tokenizer, 1, max_tokens=5, temperature=0.0)[0]
    sample = generate(engine, [request])[0]
    ids = request.token_ids.tolist()
    for token in sample.token_ids.tolist():
        assert token == int(eager(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        ids.append(token)


def test_new_weights_arrive_and_forget_the_prefixes(engine, policy, tokenizer):
    request = requests_of(tokenizer, 1)[0]
    generate(engine, [request])
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.01)
    sync_weights(policy, engine, 7, torch.float32, "full")
    assert engine.weight_version == 7
    assert not engine._prefixes
    expected = dict(full_parameters(policy))
    assert all(torch.equal(p, expected[n]) for n, p in engine.model.named_parameters())


@pytest.mark.parametrize("check", ["sampled", "full"])
def test_an_engine_that_keeps_old_weights_is_noticed(engine, policy, monkeypatch, check):
    with torch.no_grad():
        next(policy.parameters()).mul_(1.5)
    held = list(engine.model.named_parameters())
    monkeypatch.setattr(engine.model, "named_parameters", lambda: [(name, p.detach().clone()) for name, p in held])
    with pytest.raises(EngineError, match="holds other values of"):
        sync_weights(policy, engine, 1, torch.float32, check)
    sync_weights(policy, engine, 1, torch.float32, "off")


def test_missing_or_unknown_weights_are_refused(engine):
    named = dict(engine.model.named_parameters())
    name = next(iter(named))
    with pytest.raises(EngineError, match="no weights given"):
        engine.load_weights([(name, named[name])], 1, check="sampled")
    with pytest.raises(EngineError, match="no parameter 'nope'"):
        engine.load_weights([("nope", named[name])], 1, check="sampled")


def test_weights_are_not_changed_under_a_request(engine, policy, tokenizer):
    engine.add(requests_of(tokenizer, 1)[0])
    for _ in range(2):
        with pytest.raises(EngineError, match="in flight"):
            sync_weights(policy, engine, 1, torch.float32, "sampled")
        engine.step()
    engine.abort([(0,)])
    sync_weights(policy, engine, 1, torch.float32, "sampled")


def test_requests_join_and_leave_a_running_batch(engine, tokenizer):
    """Whenever they are added, and whatever is aborted beside them, requests sample what they sample alone."""
    requests = requests_of(tokenizer, 24, max_tokens=30)
    alone = {r.key: generate(engine, [r])[0] for r in requests}
    engine.forget()
    rng, waiting, samples = np.random.default_rng(0), list(requests), {}
    aborted = {requests[3].key, requests[20].key}
    while len(samples) < len(requests) - len(aborted):
        for _ in range(int(rng.integers(0, 3))):
            if waiting:
                engine.add(waiting.pop(0))
        if len(waiting) < 4:
            engine.abort(aborted)
            waiting = [r for r in waiting if r.key not in aborted]
        samples |= engine.step()
        assert len(engine._rows) <= engine.batch_size
    aborted -= set(samples)
    assert not engine.step()
    for key, sample in samples.items():
        assert sample.token_ids.tolist() == alone[key].token_ids.tolist()
        np.testing.assert_allclose(sample.logprobs, alone[key].logprobs, atol=1e-4)


def test_temperatures_may_differ_within_a_batch(engine, tokenizer):
    requests = [
        replace(r, temperature=t) for r, t in zip(requests_of(tokenizer, 3), (1.0, 0.0, 0.5), strict=True)
    ]
    together = generate(engine, requests)
    engine.forget()
    for request, sample in zip(requests, together, strict=True):
        assert generate(engine, [request])[0].token_ids.tolist() == sample.token_ids.tolist()


def test_checksum_sees_order_and_scale():
    x = torch.randn(100)
    assert tensor_checksum(x, torch.float32) == tensor_checksum(x.clone(), torch.float32)
    assert tensor_checksum(x, torch.float32) != tensor_checksum(x.flip(0), torch.float32)
    assert tensor_checksum(x, torch.float32) != tensor_checksum(x * 1.001, torch.float32)
    y = torch.randn(1 << 17)
    z = y.clone()
    z[1] += 1
    assert tensor_checksum(y, torch.float32) == tensor_checksum(z, torch.float32)
    assert tensor_checksum(y, torch.float32, None) != tensor_checksum(z, torch.float32, None)


def test_uniforms_depend_only_on_their_address():
    assert uniforms((1, 2, 3), 5).tolist() == uniforms((1, 2, 3), 9)[:5].tolist()
    assert uniforms((1, 2, 3), 5).tolist() != uniforms((1, 3, 2), 5).tolist()
