"""Builds the drafter a plan names, once the target's weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.models.tapped import checkpoint as tapped
from sglang_ext.serving.drafters.base import Drafter
from sglang_ext.serving.parallel import Ranks
from sglang_ext.serving.plan import DRAFTER_FLAG, SpecPlan, check_tapped_target, check_taps
from sglang_ext.serving.profile import StepProfile

if TYPE_CHECKING:
    from sglang_ext.serving.attention.mask_rows import MaskAttention
    from sglang_ext.serving.device import DeviceWays
    from sglang_ext.serving.drafter_pool import DrafterPool
    from sglang_ext.serving.drafters.sharding import HeadShard

SUPPORTED_TARGETS = ("LlamaForCausalLM", "Qwen3ForCausalLM")


def build_drafter(plan: SpecPlan, model_runner: Any, profile: StepProfile, ways: DeviceWays, ranks: Ranks) -> Drafter:
    """Return the drafter of ``plan`` for the loaded target, or this rank's part of it.

    Raises:
        Refusal: the drafter does not fit the target, or the target's family is not supported.
    """
    architecture = type(model_runner.model).__name__
    if plan.algorithm == "DFLARE":
        check_tapped_target(architecture)
        return _build_dflare(plan, model_runner, profile, ways, ranks)
    if architecture not in SUPPORTED_TARGETS:
        raise Refusal(
            f"the target's architecture is {architecture}",
            f"--speculative-algorithm {plan.algorithm.lower()} supports {', '.join(SUPPORTED_TARGETS)}",
            "serve a supported target or drop the flag",
        )
    if plan.drafter_path is None:
        from sglang_ext.serving.drafters.scripted import ScriptedDrafter

        return ScriptedDrafter(plan.block_size, model_runner.model_config.vocab_size, model_runner.device)
    return _build_flexdraft(plan, model_runner, profile, ways, ranks)


def _build_flexdraft(
    plan: SpecPlan, model_runner: Any, profile: StepProfile, ways: DeviceWays, ranks: Ranks
) -> Drafter:
    from sglang_ext.serving.attention.inline import SdpaMaskRows
    from sglang_ext.serving.drafters.flexdraft import FlexDraftDrafter
    from sglang_ext.serving.drafters.flexdraft_weights import FlexDraftWeights

    assert plan.drafter_path is not None
    loaded = checkpoint.load(Path(plan.drafter_path))
    hf_config = model_runner.model_config.hf_config
    checkpoint.validate_against_target(loaded.config, hf_config.to_dict(), None, DRAFTER_FLAG)
    weights = FlexDraftWeights(loaded, model_runner.dtype, model_runner.device, hf_config.rms_norm_eps, ranks)
    attention: MaskAttention
    if ways.torch_attends:
        attention = SdpaMaskRows(model_runner)
    else:
        from sglang_ext.serving.attention.gpu import backend_name, check_layers, gpu_mask_attention

        check_layers(model_runner.model.model.layers[loaded.config.split :])
        attention = gpu_mask_attention(
            model_runner,
            kernels=ways.kernels_of(model_runner),
            backend=backend_name(model_runner),
            form=plan.options.gpu_attention,
            heads=weights.heads.own_heads,
            kv_heads=weights.heads.own_kv_heads,
            head_dim=loaded.config.head_dim,
            dtype=model_runner.dtype,
            kv_dtype=model_runner.kv_cache_dtype,
        )
    return FlexDraftDrafter(model_runner, weights, attention, plan.block_size, plan.options.draft_width, profile)


def _build_dflare(plan: SpecPlan, model_runner: Any, profile: StepProfile, ways: DeviceWays, ranks: Ranks) -> Drafter:
    from sglang_ext.models.tapped.rope import rope_tables
    from sglang_ext.serving import drafter_pool
    from sglang_ext.serving.drafters.dflare import DFlareDrafter
    from sglang_ext.serving.drafters.dflare_weights import DFlareWeights
    from sglang_ext.serving.taps import TapRecorder

    assert plan.drafter_path is not None
    loaded = tapped.load(Path(plan.drafter_path))
    config = loaded.config
    tapped.validate_against_target(config, model_runner.model_config.hf_config.to_dict(), None, DRAFTER_FLAG)
    check_taps(config)
    if "weight" not in model_runner.model.lm_head._parameters:
        raise Refusal(
            f"the target {type(model_runner.model).__name__} has a quantised LM head",
            "a drafter shares it and needs it unquantised",
            "serve a checkpoint whose head is not quantised",
        )
    dtype, device = model_runner.dtype, model_runner.device
    rope = rope_tables(config, model_runner.model_config.context_len)
    weights = DFlareWeights(config, loaded.tensors, dtype, device, rope, ranks)
    heads = weights.heads
    pool = drafter_pool.DrafterPool(config.num_layers, heads.own_kv_heads, heads.head_dim, dtype, device)
    drafter_pool.charge(pool.bytes_per_token)
    if config.mask_token_id is None:
        mask = loaded.tensors["mask_embedding"].to(device=device, dtype=dtype)
    else:
        mask = model_runner.model.model.embed_tokens(torch.tensor([config.mask_token_id], device=device))[0]
    return DFlareDrafter(
        model_runner,
        weights,
        TapRecorder(model_runner.model, config.target_layer_ids, DRAFTER_FLAG),
        pool,
        _block_attention(plan, model_runner, pool, heads, ways),
        mask.detach().clone(),
        plan.block_size,
        plan.options.draft_width,
        profile,
        drop_rejected=ways.reads_back,
    )


def _block_attention(
    plan: SpecPlan, model_runner: Any, pool: DrafterPool, heads: HeadShard, ways: DeviceWays
) -> MaskAttention:
    """Attention of a drafter's blocks over its own pool."""
    from sglang_ext.serving.attention.gpu import backend_name, gpu_mask_attention
    from sglang_ext.serving.drafters.dflare_attention import block_attention

    def on_gpu(source: Any) -> MaskAttention:
        return gpu_mask_attention(
            source,
            kernels=ways.kernels_of(model_runner),
            backend=backend_name(model_runner),
            form=plan.options.gpu_attention,
            heads=heads.own_heads,
            kv_heads=heads.own_kv_heads,
            head_dim=heads.head_dim,
            dtype=model_runner.dtype,
            kv_dtype=model_runner.dtype,
        )

    return block_attention(model_runner, pool, None if ways.torch_attends else on_gpu)
