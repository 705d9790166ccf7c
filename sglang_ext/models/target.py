"""A frozen dense target (Llama, Qwen3) as plain tensors: the forward used to generate data and to train drafters.

The walk over the layers is written out so that a caller can keep a preallocated K/V cache, stop at any layer, read the
hidden state there, and run its own rows through a layer's feed-forward part (FlexDraft section 1). It gives the same
numbers as the Hugging Face model it was built from; ``tests/training/test_target.py`` compares the two.

Shape legend: B requests, Q new rows per request, S keys, H hidden, L target layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.families import TargetShape, target_shape


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; the q/k/v and gate/up matrices are stored fused along their output dimension."""

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in fp32 and returned in the dtype of ``x``."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [..., D]`` by ``cos``/``sin`` that broadcast against it (half-split convention of Llama and Qwen3)."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class _FrozenRMSNorm(torch.autograd.Function):
    """RMS norm with a weight that is not trained: fewer passes over the rows than the recorded operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        return _norm_gradient(gradient, x, weight, scale), None, None


def _norm_gradient(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The gradient of an RMS norm by its input: scale * (wg - y * mean(wg * y)) with y = x * scale."""
    wide = (gradient * weight).float()
    unit = x.float() * scale
    inner = (wide * unit).mean(-1, keepdim=True)
    return torch.addcmul(wide, unit, inner, value=-1).mul_(scale).to(x.dtype)


class _FrozenFeedForward(torch.autograd.Function):
    """A layer's norm, gated feed-forward part and residual for training rows; no weight receives a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float) -> Tensor:
        rows = hidden.flatten(0, -2)
        wide = rows.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        both = F.linear(norm * (wide * scale).to(rows.dtype), gate_up)
        gate, up = both.chunk(2, dim=-1)
        ctx.save_for_backward(rows, norm, gate_up, down, scale, both)
        return torch.addmm(rows, F.silu(gate).mul_(up), down.t()).view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, norm, gate_up, down, scale, both = ctx.saved_tensors
        out = gradient.reshape(rows.shape)
        gate, up = both.chunk(2, dim=-1)
        inner = out @ down
        both_gradient = torch.empty_like(both)
        width = gate.shape[-1]
        torch.mul(inner, F.silu(gate), out=both_gradient[:, width:])
        torch.ops.aten.silu_backward.grad_input(inner.mul_(up), gate, grad_input=both_gradient[:, :width])
        normed = _norm_gradient(both_gradient @ gate_up, rows, norm, scale)
        return (normed.add_(out)).view_as(gradient), None, None, None, None


def frozen_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`rms_norm` for training: gradient to ``x`` only."""
    result: Tensor = _FrozenRMSNorm.apply(x, weight, eps)
    return result


class KVCache:
    """Preallocated keys and values, ``[L][B, Hkv, capacity, D]`` each."""

    def __init__(self, shape: TargetShape, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        size = (rows, shape.num_key_value_heads, capacity, shape.head_dim)
        self.rows, self.capacity = rows, capacity
        self.keys = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        self.values = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]

    @staticmethod
    def bytes_needed(shape: TargetShape, rows: int, capacity: int, itemsize: int) -> int:
        return 2 * shape.num_layers * rows * shape.num_key_value_heads * capacity * shape.head_dim * itemsize


class Target:
    """The frozen target. ``embedding``, ``layers``, ``final_norm`` and ``head`` are tensors without gradient."""

    def __init__(self, model: Any, where: str = "the target") -> None:
        self.hf_config: dict[str, Any] = model.config.to_dict()
        self.shape = target_shape(self.hf_config, where)
        self.eps = float(self.hf_config["rms_norm_eps"])
        self.query_width = self.shape.num_attention_heads * self.shape.head_dim
        self.key_width = self.shape.num_key_value_heads * self.shape.head_dim
        self.group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        if any(name.endswith("proj.bias") for name, _ in model.named_parameters()):
            raise Refusal(f"{where} has projection biases", "targets without them", "choose another target")
        self.embedding = model.model.embed_tokens.weight.detach()
        self.final_norm = model.model.norm.weight.detach()
        self.head = model.lm_head.weight.detach()
        self.layers = [self._layer(layer) for layer in model.model.layers]
        self._rotary = model.model.rotary_emb

    def _layer(self, layer: Any) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        norms = (attention.q_norm.weight, attention.k_norm.weight) if self.shape.qk_norm else (None, None)
        return LayerWeights(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).detach(),
            q_norm=None if norms[0] is None else norms[0].detach(),
            k_norm=None if norms[1] is None else norms[1].detach(),
            o=attention.o_proj.weight.detach(),
            post_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach(),
            down=mlp.down_proj.weight.detach(),
        )

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Target:
        """Read a Hugging Face folder from disk (never from a hub)."""
        from transformers import AutoModelForCausalLM

        if not (Path(path) / "config.json").is_file():
            raise Refusal(f"--target {path}", "a folder with config.json and weights", "run: sglang-ext prepare")
        try:
            model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise Refusal(
                f"--target {path} cannot be loaded ({reason})",
                "a folder with the whole model is needed",
                "`sglang-ext inspect` says more; copy or prepare it again",
            ) from error
        return cls(model.to(device).eval(), where=str(path))

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``cos, sin [*positions.shape, D]`` of absolute positions, in the target's dtype."""
        flat = positions.reshape(1, -1)
        cos, sin = self._rotary(self.embedding[:1, None, :], flat)
        return cos.view(*positions.shape, -1), sin.view(*positions.shape, -1)

    def project(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[B, Q, Hq, D]``, k and v ``[B, Q, Hkv, D]`` of normed rows ``x [B, Q, H]``, q and k rotated."""
        shape = self.shape
        widths = (self.query_width, self.key_width, self.key_width)
        q, k, v = (part.unflatten(-1, (-1, shape.head_dim)) for part in F.linear(x, layer.qkv).split(widths, dim=-1))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, self.eps), rms_norm(k, layer.k_norm, self.eps)
        return (
            apply_rope(q, cos[..., None, :], sin[..., None, :]),
            apply_rope(k, cos[..., None, :], sin[..., None, :]),
            v,
        )

    def feed_forward(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """``hidden`` plus the layer's feed-forward part, for rows of any shape ``[..., H]``; gradient to the rows."""
        if hidden.requires_grad:
            result: Tensor = _FrozenFeedForward.apply(hidden, layer.post_norm, layer.gate_up, layer.down, self.eps)
            return result
        gate, up = F.linear(rms_norm(hidden, layer.post_norm, self.eps), layer.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, layer.down)

    @torch.no_grad()
    def prefill(
        self, token_ids: Tensor, on_layer: Callable[[int, Tensor, Tensor, Tensor], None] | None = None
    ) -> Tensor:
        """Run right-padded sequences ``[B, Q]`` from position 0; returns the final hidden states ``[B, Q, H]``.

        ``on_layer(index, hidden, keys, values)`` receives each layer's input ``[B, Q, H]`` and its rotated keys and
        values ``[B, Q, Hkv, D]``. Rows are causal, so padding on the right changes nothing before it. The result is
        before the final norm.
        """
        hidden = F.embedding(token_ids, self.embedding)
        cos, sin = self.rope(torch.arange(token_ids.shape[1], device=token_ids.device)[None])
        for index, layer in enumerate(self.layers):
            q, k, v = self.project(layer, rms_norm(hidden, layer.input_norm, self.eps), cos, sin)
            if on_layer is not None:
                on_layer(index, hidden, k, v)
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=self.group > 1
            )
            hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), layer.o)
            hidden = self.feed_forward(layer, hidden)
        return hidden

    @torch.no_grad()
    def decode(self, token_ids: Tensor, lengths: Tensor, cache: KVCache, span: int) -> Tensor:
        """One new token per request: ``token_ids [B]`` at positions ``lengths [B]``; returns hidden ``[B, H]``.

        Requests are rows 0..B-1 of ``cache``, which must hold ``lengths[i]`` rows of request i; ``span`` is
        ``max(lengths) + 1``. The query heads of one key/value head are batched as query rows of one attention call,
        so keys and values are neither repeated nor copied.
        """
        shape, count = self.shape, token_ids.shape[0]
        rows = torch.arange(count, device=token_ids.device)
        mask = torch.where(torch.arange(span, device=token_ids.device)[None] <= lengths[:, None], 0.0, float("-inf"))
        mask = mask.to(self.dtype)[:, None, None, :]
        cos, sin = self.rope(lengths[:, None])
        hidden = F.embedding(token_ids, self.embedding)
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            normed = rms_norm(hidden, layer.input_norm, self.eps)
            q, k, v = self.project(layer, normed[:, None], cos, sin)
            keys[rows, :, lengths] = k[:, 0]
            values[rows, :, lengths] = v[:, 0]
            grouped = q.view(count, shape.num_key_value_heads, self.group, shape.head_dim)
            mixed = F.scaled_dot_product_attention(
                grouped, keys[:count, :, :span], values[:count, :, :span], attn_mask=mask
            )
            hidden = self.feed_forward(layer, hidden + F.linear(mixed.reshape(count, -1), layer.o))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and LM head of rows ``[..., H]``."""
        return F.linear(rms_norm(hidden, self.final_norm, self.eps), self.head)
