"""The written-out walk over the layers equals the Hugging Face model, at any batch size, with and without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.target import KVCache, Target, frozen_rms_norm, rms_norm
from sglang_ext.training.generate import BatchedGenerator, GenerationRequest
from tests.training.tiny_targets import EOS, VOCABULARY

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def test_prefill_equals_hugging_face(model: Any, target: Target) -> None:
    ids = torch.randint(0, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(target.logits(target.prefill(ids)), model(ids).logits.detach(), **TOLERANCE)


def test_decode_with_cache_equals_prefill(target: Target) -> None:
    """Rows of different lengths decoded together equal each sequence run alone (no dependence on the batch)."""
    generator = torch.Generator().manual_seed(2)
    lengths = [3, 9, 6]
    ids = [torch.randint(0, VOCABULARY, (length + 1,), generator=generator) for length in lengths]
    cache = KVCache(target.shape, 4, 16, target.dtype, target.device)
    for row, sequence in enumerate(ids):

        def store(index: int, _h: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: int = row) -> None:
            cache.keys[index][row, :, : k.shape[1]] = k[0].transpose(0, 1)
            cache.values[index][row, :, : k.shape[1]] = v[0].transpose(0, 1)

        target.prefill(sequence[None, :-1], store)
    newest = torch.stack([sequence[-1] for sequence in ids])
    together = target.decode(newest, torch.tensor(lengths), cache, max(lengths) + 1)
    alone = torch.stack([target.prefill(sequence[None])[0, -1] for sequence in ids])
    torch.testing.assert_close(together, alone, **TOLERANCE)


def test_right_padding_changes_nothing(target: Target) -> None:
    ids = torch.randint(0, VOCABULARY, (1, 8), generator=torch.Generator().manual_seed(3))
    padded = torch.cat((ids, torch.zeros(1, 5, dtype=torch.long)), dim=1)
    batch = torch.cat((padded, padded.flip(1)))
    torch.testing.assert_close(target.prefill(batch)[0, :8], target.prefill(ids)[0], **TOLERANCE)


def test_generation_with_refilling_equals_hugging_face(model: Any, target: Target) -> None:
    """Nine requests through three slots give the model's own greedy continuations, and the states of a prefill."""
    generator = torch.Generator().manual_seed(4)
    requests = [
        GenerationRequest(
            str(i), tuple(torch.randint(5, VOCABULARY, (3 + i % 4,), generator=generator).tolist()), 4 + i
        )
        for i in range(9)
    ]
    batched = BatchedGenerator(target, {EOS}, slots=3, capacity=32, state_layers=2)
    results = {result.request.key: result for result in batched.run(requests)}
    assert sorted(results) == sorted(request.key for request in requests)
    for request in requests:
        prompt = torch.tensor([request.prompt_ids])
        expected = model.generate(
            prompt, max_new_tokens=request.max_new_tokens, do_sample=False, eos_token_id=EOS, pad_token_id=0
        )[0, prompt.shape[1] :].tolist()
        result = results[request.key]
        assert list(result.response_ids) == expected
        assert result.finished == (expected[-1] == EOS)
        kept: list[torch.Tensor] = []
        target.prefill(
            torch.tensor([[*request.prompt_ids, *result.response_ids[:-1]]]),
            lambda _i, _h, k, v, kept=kept: kept.append(torch.stack((k[0], v[0])).transpose(1, 2)),
        )
        assert result.states is not None
        torch.testing.assert_close(result.states, torch.stack(kept[-2:]), **TOLERANCE)


def test_training_shortcuts_have_the_gradients_of_the_plain_operations(target: Target) -> None:
    torch.manual_seed(6)
    layer, x, upstream = target.layers[1], torch.randn(3, 5, 32, requires_grad=True), torch.randn(3, 5, 32)
    plain = rms_norm(x, layer.input_norm, target.eps)
    fused = frozen_rms_norm(x, layer.input_norm, target.eps)
    torch.testing.assert_close(fused, plain)
    for_plain, for_fused = (torch.autograd.grad(y, x, upstream)[0] for y in (plain, fused))
    torch.testing.assert_close(for_fused, for_plain, rtol=1e-4, atol=1e-5)
    gate, up = F.linear(rms_norm(x, layer.post_norm, target.eps), layer.gate_up).chunk(2, dim=-1)
    plain = x + F.linear(F.silu(gate) * up, layer.down)
    fused = target.feed_forward(layer, x)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused.detach(), target.feed_forward(layer, x.detach()), rtol=1e-4, atol=1e-5)
    for_plain, for_fused = (torch.autograd.grad(y, x, upstream)[0] for y in (plain, fused))
    torch.testing.assert_close(for_fused, for_plain, rtol=1e-4, atol=1e-4)


def test_sampling_follows_the_distribution(target: Target) -> None:
    """The first sampled token of many equal requests has the frequencies of softmax(logits / T)."""
    prompt, count, temperature = (5, 6, 7), 3000, 0.7
    batched = BatchedGenerator(target, set(), slots=250, capacity=8, seed=5)
    requests = [GenerationRequest(str(i), prompt, 1, temperature) for i in range(count)]
    drawn = torch.tensor([result.response_ids[0] for result in batched.run(requests)])
    expected = (target.logits(target.prefill(torch.tensor([prompt]))[0, -1]) / temperature).softmax(-1)
    observed = torch.bincount(drawn, minlength=VOCABULARY) / count
    deviation = (observed - expected).abs() / (expected * (1 - expected) / count).sqrt().clamp_min(1 / count)
    assert deviation.max() < 5, f"seed 5: {deviation.max():.2f} standard deviations"


def test_unsupported_targets_are_refused() -> None:
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_bias=True
    )
    with pytest.raises(Refusal, match="bias"):
        Target(LlamaForCausalLM(config))
    with pytest.raises(Refusal, match=r"config\.json"):
        Target.load("/nonexistent")
