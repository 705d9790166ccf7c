"""The speculative worker: draft, verify, adjust logits, accept, commit; five short steps for every algorithm of ours.

The worker owns no KV slots: the host reserves K of them per request and step, rejected rows are overwritten by the
next step, and finish conditions are applied by the host to the committed tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from torch import Tensor

from sglang_ext.core.accept import Accepted
from sglang_ext.serving import server_info, slot_rows
from sglang_ext.serving.acceptance_watch import AcceptanceWatch
from sglang_ext.serving.algorithm import plan_from_args
from sglang_ext.serving.attention.gpu import backend_name
from sglang_ext.serving.device import ways_of
from sglang_ext.serving.draft_state import DraftState
from sglang_ext.serving.drafters.build import build_drafter
from sglang_ext.serving.gpu_plan import graph_batches
from sglang_ext.serving.graphs.store import capture_passes
from sglang_ext.serving.parallel import agree, host_ranks, make_pace
from sglang_ext.serving.profile import StepProfile
from sglang_ext.serving.ragged_steps import RaggedSteps
from sglang_ext.serving.requests import drafts_after_prefill, request_options
from sglang_ext.serving.sampling import accept_step
from sglang_ext.serving.steps import DecodeStep, StepParts, Steps
from sglang_ext.serving.telemetry import DeviceRecords
from sglang_ext.serving.uniform_steps import UniformSteps
from sglang_ext.serving.verify_pass import VerifyPass

logger = logging.getLogger(__name__)


class SpecWorker(BaseSpecWorker):
    """Host-facing worker (SGLang speculative schema V2)."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        args = resolving_view(server_args)
        self._target_worker = target_worker
        self.plan = plan_from_args(args.speculative_algorithm, args)
        self.device = target_worker.model_runner.device
        self._runner = target_worker.model_runner
        self._ways = ways_of(self.device, backend_name(self._runner))
        self._graph_batches = graph_batches(args)
        self._overlapped = not args.disable_overlap_schedule
        self._block = self.plan.block_size
        self._rule = self.plan.options.accept_rule()
        self.profile = StepProfile(self.plan.options.profile, self.device)
        self.profile.watch(self._runner.model.logits_processor, "target head")
        self._ranks = host_ranks()
        self._drafter = build_drafter(self.plan, self._runner, self.profile, self._ways, self._ranks)
        if self._ways.kernels is not None:
            from sglang_ext.serving.attention import flashinfer_verify

            flashinfer_verify.install(self._ways.kernels(self._runner))
        options = self.plan.options
        self.pace = make_pace(self._ranks, options.mode_policy(), self._drafter.can_join, options.adaptive)
        self._watch = AcceptanceWatch(self.plan, asleep=self._ranks.rank > 0)
        server_info.install()
        slot_rows.install()
        self._started = time.perf_counter()
        self._generator = torch.Generator(device=self.device).manual_seed(args.random_seed)
        logger.info(
            "Speculative plan: %s; drafter weights %.1f MB, drafter KV %d bytes per token",
            self.plan,
            self._drafter.weight_bytes / 1e6,
            self._drafter.kv_bytes_per_token,
        )

    @property
    def drafter_bytes(self) -> int:
        """Bytes of weights the drafter holds beside the target's."""
        return self._drafter.weight_bytes

    @property
    def drafter_kv_bytes_per_token(self) -> int:
        """Bytes of drafter keys and values that each token of the target's pool costs."""
        return self._drafter.kv_bytes_per_token

    @property
    def draft_worker(self) -> None:
        """There is no drafter model of the host's kind."""
        return None

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        """Allocate the draft tables once the request pool exists."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        self._drafter.allocate(memory_pool_config.max_total_num_tokens + self._runner.page_size)
        slots, vocabulary = req_to_token_pool.req_to_token.shape[0], self._runner.model_config.vocab_size
        state = DraftState(slots, self._block, self.device, self.plan.options.draft_width, vocabulary)
        parts = StepParts(
            self._runner, self.plan, self._drafter, state, self.pace, self._watch, self.profile, self._overlapped
        )
        self._parts = parts
        self._steps: Steps = RaggedSteps(parts) if self._ways.reads_back else UniformSteps(parts)
        self._verify_pass = VerifyPass(parts, self.target_worker)

    def init_cuda_graphs(self) -> None:
        """Capture decode passes, where the device has graphs and the attention backend can be planned for them."""
        super().init_cuda_graphs()
        graphs = capture_passes(self._parts, self._ways, self._graph_batches)
        if graphs is not None:
            assert isinstance(self._steps, UniformSteps)
            self._steps.use_graphs(graphs)
            self._verify_pass.use_graphs(graphs)

    @torch.no_grad()
    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Run one step of the batch: a prefill with drafting after it, or draft verification."""
        with self.profile.step():
            if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
                return self._prefill(batch, on_publish)
            return self._decode(batch, on_publish, grammar_barrier)

    # ---------------------------------------------------------------- prefill

    def _prefill(self, batch: Any, on_publish: Callable[[Tensor], None] | None) -> GenerationBatchResult:
        started = time.perf_counter()
        self.pace.interrupted()
        self.profile.label(["prefill"] * len(batch.reqs))
        with self.profile.section("target"):
            result = self.target_worker.forward_batch_generation(batch)
        with self.profile.section("context"):
            self._drafter.observe_prefill()
        if on_publish is not None:
            on_publish(batch.seq_lens)
        bonus = result.next_token_ids.to(torch.int64)
        if not batch.is_prefill_only:
            self._draft_after_prefill(batch, bonus)
        wanted = [request_options(req).records for req in batch.reqs]
        if any(wanted):
            size = len(batch.reqs)
            result.logits_output.auxiliary_device_output = DeviceRecords(
                wanted=wanted,
                modes=["prefill"] * size,
                verify_lengths=torch.zeros_like(bonus),
                groups=torch.zeros_like(bonus),
                step_ms=_milliseconds_since(started),
                drafts=bonus.new_zeros((size, 0)),
                confidence=bonus.new_zeros((size, 0)),
                accepted=bonus.new_zeros(size),
                bonus=bonus.clone(),
            )
        result.next_draft_input = _next_input(bonus, batch.seq_lens)
        result.new_seq_lens = batch.seq_lens
        return result

    def _draft_after_prefill(self, batch: Any, bonus: Tensor) -> None:
        """Draft for every request whose prompt is now complete; drafts of a half-read prompt would be thrown away."""
        # Under overlapped scheduling the host's count of parts in flight still holds the part before.
        rows = [
            i
            for i, req in enumerate(batch.reqs)
            if req is not batch.chunked_req and drafts_after_prefill(req, self.pace)
        ]
        self._steps.draft_after_prefill(batch, bonus, rows)

    # ----------------------------------------------------------------- decode

    def _decode(
        self, batch: Any, on_publish: Callable[[Tensor], None] | None, grammar_barrier: Callable[[], None] | None
    ) -> GenerationBatchResult:
        started = time.perf_counter()
        with self.profile.section("plan"):
            step = self._steps.plan(batch)
        self.profile.label([request.mode.value for request in step.requests])
        self.pace.started(started * 1000.0, [request.mode for request in step.requests])
        verify_input, output = self._verify_pass.run(batch, step, grammar_barrier)
        with self.profile.section("sampling"):
            accepted = accept_step(
                output.next_token_logits,
                batch.sampling_info,
                step.layout,
                step.drafted,
                step.verify,
                self._rule,
                self._generator,
            )
            accepted = agree(self._ranks, accepted)
        self._steps.commit(step, verify_input, accepted)
        lengths = batch.seq_lens + (accepted.lengths + 1).to(batch.seq_lens.dtype)
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, accepted.tokens.reshape(-1), chain_stride=step.layout.clean.width)
        if on_publish is not None:
            on_publish(lengths)
        self._steps.draft(batch, step, verify_input, accepted, lengths)
        output.hidden_states = None
        self._watch.add(step.verify, accepted.lengths)
        self._attach_records(output, step, accepted, self._step_ms(started))
        if not self._overlapped:
            # Under overlapped scheduling the device is still at work when the worker is done.
            self.pace.ended(time.perf_counter() * 1000.0)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=accepted.tokens.reshape(-1),
            accept_lens=(accepted.lengths + 1).to(torch.int32),
            cap_lens=step.verify.to(torch.int32),
            can_run_cuda_graph=verify_input.captured is not None,
            next_draft_input=_next_input(accepted.bonus, lengths),
            speculative_num_draft_tokens=self._block,
            speculative_output_stride=step.layout.clean.width,
            new_seq_lens=lengths,
        )

    def _step_ms(self, started: float) -> float:
        """Return how long this step took, or under overlapped scheduling the one before, start to start."""
        before, self._started = self._started, started
        return (started - before) * 1000.0 if self._overlapped else _milliseconds_since(started)

    def _attach_records(self, output: Any, step: DecodeStep, accepted: Accepted, step_ms: float) -> None:
        wanted = [request.options.records for request in step.requests]
        if not any(wanted):
            return
        output.auxiliary_device_output = DeviceRecords(
            wanted=wanted,
            modes=[request.mode.value for request in step.requests],
            verify_lengths=step.verify,
            groups=step.groups,
            step_ms=step_ms,
            drafts=step.drafted.tokens.clone(),
            confidence=step.drafted.confidence.clone(),
            accepted=accepted.lengths,
            bonus=accepted.bonus,
        )


def _next_input(bonus: Tensor, lengths: Tensor) -> DFlashDraftInputV2:
    """What the host carries to the next step; drafts stay in the worker's own table."""
    size, device = bonus.numel(), bonus.device
    return DFlashDraftInputV2(
        topk_p=torch.empty((size, 0), device=device),
        topk_index=torch.empty((size, 0), dtype=torch.int64, device=device),
        hidden_states=torch.empty((size, 0), device=device),
        bonus_tokens=bonus,
        new_seq_lens=lengths,
    )


def _milliseconds_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000.0
