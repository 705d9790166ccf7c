"""From the target's logits to accepted tokens, with every request's own sampling rules.

Shape legend: B requests, W clean rows, N flat clean rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import (
    apply_custom_logit_processor,
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from torch import Tensor

from sglang_ext.core.accept import Accepted, AcceptRule, accept
from sglang_ext.core.block import BlockLayout
from sglang_ext.core.sampling import SamplingParams, target_probs
from sglang_ext.serving.drafters.base import DraftBlock


def sampling_params(info: Any) -> SamplingParams:
    """Translate the host's batched sampling parameters (one row per request)."""
    return SamplingParams(
        temperature=info.temperatures.view(-1),
        top_k=info.top_ks,
        top_p=info.top_ps,
        min_p=info.min_ps,
        any_greedy=info.is_any_greedy,
        any_top_k=info.need_top_k_sampling,
        any_top_p=info.need_top_p_sampling,
        any_min_p=info.need_min_p_sampling,
        max_top_k=info.max_top_k,
    )


def adjust_logits(logits: Tensor, info: Any, layout: BlockLayout, grammar_mask: Any) -> None:
    """Apply the host's logit rules to ``logits [N, V]`` in place, in the host's order.

    Penalties and custom processors concern requests that verify no drafts, hence only each request's first row.
    ``grammar_mask`` covers every row and needs a uniform layout.
    """
    first = layout.clean_ptr[:-1]
    if _has_penalties(info):
        rows = logits[first]
        info._apply_pre_grammar_logits_transforms(rows)
        logits[first] = rows
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias[layout.clean.request])
    if info.has_custom_logit_processor:
        rows = logits[first]
        apply_custom_logit_processor(rows, info)
        logits[first] = rows


def accept_step(
    logits: Tensor,
    info: Any,
    layout: BlockLayout,
    block: DraftBlock,
    verify: Tensor,
    rule: AcceptRule,
    generator: torch.Generator,
) -> Accepted:
    """Judge the drafts of a step.

    Args:
        logits: ``[N, V]`` adjusted target logits of the flat clean rows.
        info: the host's sampling info of the batch.
        layout: rows of the pass.
        block: drafts ``[B, K-1]``; the first W - 1 columns were in the pass.
        verify: ``[B]`` drafts verified per request.
        rule: acceptance rule of sampled requests.
        generator: randomness of unseeded requests.
    """
    width = layout.clean.width
    drafts = block.tokens[:, : width - 1]
    if info.is_all_greedy:
        choice = layout.pad(logits.argmax(-1))
        return accept(AcceptRule.GREEDY, drafts, verify, target_choice=choice)
    if info.sampling_seed is not None:
        choice = layout.pad(_seeded_choice(logits, info, layout))
        return accept(AcceptRule.EXACT_MATCH, drafts, verify, target_choice=choice)
    probs = target_probs(logits, sampling_params(info).rows(layout.clean.request))
    rejection = rule is AcceptRule.REJECTION
    return accept(
        rule,
        drafts,
        verify,
        target_probs=probs,
        rows=layout.clean.flat_index,
        draft_probs=block.q_probs if rejection else None,
        draft_support=block.q_ids if rejection else None,
        generator=generator,
    )


def _has_penalties(info: Any) -> bool:
    if info.acc_additive_penalties is not None or info.acc_scaling_penalties is not None:
        return True
    return info.penalizer_orchestrator is not None and bool(info.penalizer_orchestrator.is_required)


def _seeded_choice(logits: Tensor, info: Any, layout: BlockLayout) -> Tensor:
    """Draw ``[N]`` tokens exactly as the host's deterministic sampler does: keyed by request seed and row position."""
    request, positions = layout.clean.request, layout.clean_position
    probs = torch.softmax(logits.div(info.temperatures[request]), dim=-1)
    seed = info.sampling_seed[request]
    if not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling):
        return sampling_from_probs_torch(probs, sampling_seed=seed, positions=positions).long()
    drawn = top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        info.top_ks[request],
        info.top_ps[request],
        info.min_ps[request],
        info.need_min_p_sampling,
        seed,
        positions,
        max_top_k=info.max_top_k,
    )
    return drawn.long()
