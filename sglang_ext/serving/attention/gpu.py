"""Which attention serves mask rows on a GPU, decided once at start-up from the host's own attention backend."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from sglang_ext.core.refusal import Refusal
from sglang_ext.serving.attention.flashinfer import FORMS
from sglang_ext.serving.attention.flashinfer_calls import HeadShape, Kernels, load_library
from sglang_ext.serving.attention.mask_rows import MaskAttention, MaskRowAttention

BACKEND_FLAG = "--attention-backend"


def backend_name(model_runner: Any) -> str:
    """Return the name of the backend that verifies drafts on this runner."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of
    from sglang.srt.arg_groups.overrides import resolving_view

    _, decode = attention_backends_of(resolving_view(model_runner.server_args))
    return str(decode)


def gpu_mask_attention(
    source: Any,
    *,
    kernels: Kernels | None,
    backend: str,
    form: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> MaskAttention:
    """Return the attention of mask rows over the pools of ``source``.

    Args:
        source: has ``req_to_token_pool`` and ``token_to_kv_pool``; both may be allocated later.
        kernels: FlashInfer's calls; None for torch's fused attention over gathered keys.
        backend: the host's attention backend.
        form: see :data:`~.flashinfer.FORMS`.
        heads, kv_heads, head_dim: of the layers, in this process.
        dtype: of queries.
        kv_dtype: of the pool.

    Raises:
        Refusal: the kernels cannot serve these heads or dtypes, or the library is missing.
    """
    if kernels is None:
        if kv_dtype != dtype:
            raise Refusal(
                f"keys and values are kept in {kv_dtype}",
                f"{BACKEND_FLAG} {backend} allows the target's own type, {dtype}",
                f"use --kv-cache-dtype auto, or {BACKEND_FLAG} flashinfer",
            )
        return MaskRowAttention(source, heads // kv_heads)
    shape = HeadShape(heads, kv_heads, head_dim, head_dim**-0.5, dtype, kv_dtype)
    shape.check()
    kernels.warm_up(shape)
    return FORMS[form](source, kernels, shape)


@functools.cache
def shared_kernels(device: str) -> Kernels:
    """Return the process's calls on a device; all of them run on one stream, over one scratch buffer."""
    return Kernels(load_library(), device)


def check_layers(layers: Iterable[Any]) -> None:
    """Refuse target layers whose mask rows would be attended by another rule than the target's own rows.

    Args:
        layers: decoder layers that mask rows run through.

    Raises:
        Refusal: a layer has a sliding window or caps its attention scores.
    """
    for layer in layers:
        attention = layer.self_attn.attn
        for what, is_set in (
            ("a sliding window", attention.sliding_window_size > -1),
            ("capped attention scores", attention.logit_cap > 0),
        ):
            if is_set:
                raise Refusal(
                    f"target layer {attention.layer_id} has {what}",
                    "--speculative-algorithm flexdraft supports targets without on a GPU",
                    "serve another target, or this one with --speculative-algorithm dflare",
                )
