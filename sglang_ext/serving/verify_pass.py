"""The target pass of a decode step: ``[bonus, drafts]`` of every request, mask groups riding along.

The worker owns no KV slots: the host reserves K of them per request and step, and a row's slot follows from its
position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.kernels.pool_slots import slots_of
from sglang_ext.serving.device import CPU
from sglang_ext.serving.graphs.store import GraphStore
from sglang_ext.serving.pass_size import PassSize
from sglang_ext.serving.sampling import adjust_logits
from sglang_ext.serving.steps import DecodeStep, StepParts
from sglang_ext.serving.verify_input import ChainVerifyInput


class VerifyPass:
    """Runs the host's target over the rows of a step.

    Args:
        parts: the worker's parts.
        target_worker: the host's.
    """

    def __init__(self, parts: StepParts, target_worker: Any) -> None:
        self._parts = parts
        self._target_worker = target_worker
        self._vocabulary = parts.runner.model_config.vocab_size
        self._graphs: GraphStore | None = None

    def use_graphs(self, graphs: GraphStore) -> None:
        """Replay captured passes where there is one of the right size."""
        self._graphs = graphs

    def run(
        self, batch: Any, step: DecodeStep, grammar_barrier: Callable[[], None] | None
    ) -> tuple[ChainVerifyInput, Any]:
        """Return the verify input and the host's output with ``next_token_logits [N, V]`` adjusted in place."""
        candidates = self._candidates(batch, step)
        tree = GrammarTree.from_linear_chain(candidates) if batch.has_grammar else None
        size = None
        if self._graphs is not None:
            size = self._graphs.find(step.layout.batch, step.layout.clean.width, step.layout.groups.width)
        verify_input = self._input(batch, step.layout, candidates, size)
        output = self._forward(batch, verify_input) if size is None else self._replay(batch, verify_input, size)
        mask = None
        if tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=tree,
                sampling_info=batch.sampling_info,
                device=self._parts.device,
                barrier=grammar_barrier,
            )
        with self._parts.profile.section("sampling"):
            adjust_logits(output.next_token_logits, batch.sampling_info, step.layout, mask)
        return verify_input, output

    def _candidates(self, batch: Any, step: DecodeStep) -> Tensor:
        """``[B, W]`` int64: the bonus token, then drafts; a draft outside the vocabulary is replaced, not embedded."""
        drafts = step.drafted.tokens[:, : step.layout.clean.width - 1]
        known = torch.where((drafts >= 0) & (drafts < self._vocabulary), drafts, 0)
        return torch.cat([batch.spec_info.bonus_tokens.view(-1, 1).to(torch.int64), known], dim=1)

    def _input(
        self, batch: Any, layout: BlockLayout, candidates: Tensor, captured: PassSize | None
    ) -> ChainVerifyInput:
        """Lay out the pass."""
        positions = layout.clean_position
        verify_input = ChainVerifyInput(
            draft_token=layout.flatten(candidates),
            positions=positions,
            draft_token_num=layout.clean.width,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            verify_lens_cpu=list(layout.clean.carried),
            layout=layout,
            captured=captured,
        )
        if layout.groups.width and captured is None:
            longest = int(batch.seq_lens_cpu.max()) + layout.clean.width
            verify_input.mask = self._parts.drafter.mask_rows(batch.req_pool_indices, layout, longest)
        return verify_input

    def _forward(self, batch: Any, verify_input: ChainVerifyInput) -> Any:
        """Run the pass as the host runs one, and say in ``batch`` where its keys and values go."""
        on_cpu = self._parts.device == CPU
        layout = verify_input.layout
        assert layout is not None
        table = batch.req_to_token_pool.req_to_token
        batch.out_cache_loc = table[batch.req_pool_indices[layout.clean.request], verify_input.positions].long()
        with self._parts.profile.section("prepare"):
            if not on_cpu:
                # GPU planners want key lengths that already count the rows in flight; the host restores the batch.
                batch.seq_lens_cpu = batch.seq_lens_cpu + verify_input.draft_token_num
                batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
            # An eager GPU pass plans its attention itself; planning here would do it twice.
            forward_batch, _ = verify_input.prepare_for_verify(
                batch, self._target_worker, defer_metadata_init=not on_cpu
            )
        with self._parts.profile.section("target"):
            result = self._target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
            )
        return result.logits_output

    def _replay(self, batch: Any, verify_input: ChainVerifyInput, size: PassSize) -> Any:
        """Replay the captured pass of ``size``; the batch may be smaller."""
        layout = verify_input.layout
        assert self._graphs is not None and layout is not None and layout.host_committed is not None
        graph = self._graphs.target(size)
        table, requests, known = batch.req_to_token_pool.req_to_token, batch.req_pool_indices, layout.host_committed
        with self._parts.profile.section("prepare"):
            seen = [length + size.width for length in known]
            prefix = slots_of(table, requests, None, known) if size.groups else None
            graph.plan(known, slots_of(table, requests, None, seen), prefix)
        with self._parts.profile.section("target"):
            output = graph.replay(requests, layout.committed, verify_input.draft_token)
        real = layout.batch * size.width
        return replace(output.result, next_token_logits=output.result.next_token_logits[:real])
