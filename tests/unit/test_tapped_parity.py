"""The DFlare and DFlash modules against a straight-line fp64 computation written from the papers' formulas alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_ext.models.tapped.build import new_model
from sglang_ext.models.tapped.checkpoint import METHODS, expected_shapes
from sglang_ext.models.tapped.config import TappedConfig
from sglang_ext.models.tapped.model import TapContext, TappedModel
from sglang_ext.models.target import Target
from tests.unit.tiny import VOCABULARY, hf_model, target_config

BLOCK = 5


def build(method: str, seed: int, **changes: Any) -> TappedModel:
    torch.manual_seed(seed)
    raw = target_config("llama, gqa, tied, head_dim derived", num_hidden_layers=9, rope_theta=5000.0)
    config = METHODS[method].for_target(raw, num_layers=3, num_taps=4, block_size=BLOCK, **changes)
    model = new_model(Target(hf_model(raw)), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * spread if "norm" in name else spread / math.sqrt(parameter.shape[-1]))
    return model


def straight_line(
    weights: dict[str, Tensor], embedding: Tensor, config: TappedConfig, taps: Tensor, bonus: int
) -> Tensor:
    """States ``[K-1, H]`` of one block after ``n`` committed tokens with taps ``[n, T, H]``; no batching, fp64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    n, size, theta = taps.shape[0], config.head_dim, float(dict(config.rope)["rope_theta"])

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * scale

    def heads(x: Tensor, matrix: Tensor) -> Tensor:
        return (x @ matrix.T).view(x.shape[0], -1, size)

    def rotate(x: Tensor, first: int) -> Tensor:
        pairs = torch.arange(size // 2, dtype=torch.float64)
        angle = torch.arange(first, first + x.shape[0], dtype=torch.float64)[:, None] / theta ** (2 * pairs / size)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    mask = w["mask_embedding"] if config.mask_token_id is None else embedding[config.mask_token_id].double()
    h = torch.stack([embedding[bonus].double()] + [mask] * (BLOCK - 1))
    for d in range(config.num_layers):
        if "fc.weight" in w:
            mixed = taps.double().flatten(1) @ w["fc.weight"].T
        else:
            share = torch.exp(w["layer_fusion_weights"][d])
            mixed = sum(share[t] / share.sum() * taps[:, t].double() for t in range(taps.shape[1]))
        context = norm(mixed, w["hidden_norm.weight"])
        at = f"layers.{d}.self_attn."
        own = "_target" if f"{at}k_proj_target.weight" in w else ""
        x = norm(h, w[f"layers.{d}.input_layernorm.weight"])
        q = rotate(norm(heads(x, w[f"{at}q_proj.weight"]), w[f"{at}q_norm.weight"]), n)
        past = rotate(norm(heads(context, w[f"{at}k_proj{own}.weight"]), w[f"{at}k_norm.weight"]), 0)
        now = rotate(norm(heads(x, w[f"{at}k_proj.weight"]), w[f"{at}k_norm.weight"]), n)
        k = torch.cat((past, now))
        v = torch.cat((heads(context, w[f"{at}v_proj{own}.weight"]), heads(x, w[f"{at}v_proj.weight"])))
        out = torch.zeros_like(q)
        group = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(size)
            out[:, head] = scores.softmax(-1) @ v[:, head // group]
        h = h + out.flatten(1) @ w[f"{at}o_proj.weight"].T
        x = norm(h, w[f"layers.{d}.post_attention_layernorm.weight"])
        gate = x @ w[f"layers.{d}.mlp.gate_proj.weight"].T
        h = (
            h
            + (gate * torch.sigmoid(gate) * (x @ w[f"layers.{d}.mlp.up_proj.weight"].T))
            @ w[f"layers.{d}.mlp.down_proj.weight"].T
        )
    return norm(h, w["norm.weight"])[1:]


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("mask_token_id", [None, 7])
def test_module_equals_the_formulas_at_every_prefix_length(
    method: str, separate: bool, mask_token_id: int | None
) -> None:
    """Every prefix length 1..200 in one batch of blocks, and three of them alone."""
    seed = torch.seed() % 10_000
    print(f"seed {seed}")
    model = build(method, seed, separate_context_projections=separate, mask_token_id=mask_token_id)
    lengths = list(range(1, 201))
    # Magnitudes of real taps span orders of magnitude.
    taps = torch.randn(1, 200, 4, model.config.hidden_size) * torch.tensor([1.0, 5.0, 20.0, 60.0])[:, None]
    bonus = torch.randint(VOCABULARY, (1, 200))
    with torch.no_grad():
        found = model(TapContext(taps, torch.tensor([lengths]) - 1, bonus))[0]
        weights, embedding = model.state_dict(), model.target.embedding
        for i, length in enumerate(lengths):
            expected = straight_line(weights, embedding, model.config, taps[0, :length], int(bonus[0, i]))
            torch.testing.assert_close(found[i].double(), expected, rtol=2e-4, atol=2e-4)
        for length in (1, 2, 200):
            alone = TapContext(taps[:, :length], torch.tensor([[length - 1]]), bonus[:, length - 1 : length])
            torch.testing.assert_close(model(alone)[0, 0], found[length - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_flat_rows_give_what_the_padded_batch_gives(method: str) -> None:
    """``fuse`` and ``context_kv`` on flat rows ``[N, T, H]`` in any order: a token's keys depend on nothing else."""
    model = build(method, seed=3)
    taps, order = torch.randn(12, 4, model.config.hidden_size), torch.randperm(12)
    with torch.no_grad():
        fused = model.fuse(taps)
        assert fused.shape == (3, 12, model.config.hidden_size)
        for layer in range(3):
            keys, values = model.context_kv(layer, fused[layer], torch.arange(12))
            again = model.context_kv(layer, model.fuse(taps[order])[layer], order)
            torch.testing.assert_close(again[0], keys[order])
            torch.testing.assert_close(again[1], values[order])


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("separate", [True, False])
def test_state_dict_names_are_those_of_a_checkpoint(method: str, separate: bool) -> None:
    model = build(method, seed=0, separate_context_projections=separate)
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert found == expected_shapes(model.config)


def test_fusion_starts_at_each_layers_own_depth() -> None:
    raw = target_config("qwen3, gqa, untied, head_dim given", num_hidden_layers=36, layer_types=None, rope_theta=1e6)
    config = METHODS["dflare"].for_target(raw, num_layers=7, num_taps=9, block_size=16)
    torch.manual_seed(0)
    weights = new_model(Target(hf_model(raw)), config).state_dict()["layer_fusion_weights"]
    assert config.target_layer_ids == (1, 5, 9, 13, 17, 21, 25, 29, 33)
    assert weights.sum(1).tolist() == [2.0] * 7
    assert weights.argmax(1).tolist() == [d * 9 // 7 for d in range(7)]
