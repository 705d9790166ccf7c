"""The speculative worker: draft, verify, adjust logits, accept, commit; five short steps for every algorithm of ours.

The worker owns no KV slots: the host reserves K of them per request and step, rejected rows are overwritten by the
next step, and finish conditions are applied by the host to the committed tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from torch import Tensor

from sglang_ext.core.accept import Accepted
from sglang_ext.core.block import BlockLayout
from sglang_ext.core.prune import verify_lengths
from sglang_ext.core.schedule import Mode
from sglang_ext.serving import server_info, slot_rows
from sglang_ext.serving.acceptance_watch import AcceptanceWatch
from sglang_ext.serving.algorithm import plan_from_args
from sglang_ext.serving.draft_state import DraftState
from sglang_ext.serving.drafters.base import Context, DraftBlock
from sglang_ext.serving.drafters.build import build_drafter
from sglang_ext.serving.parallel import agree, host_ranks, make_pace
from sglang_ext.serving.profile import StepProfile
from sglang_ext.serving.requests import RequestStep, drafts_after_prefill, read_requests, request_options
from sglang_ext.serving.sampling import accept_step, adjust_logits, sampling_params
from sglang_ext.serving.telemetry import DeviceRecords
from sglang_ext.serving.verify_input import ChainVerifyInput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeStep:
    """One decode step on its way through the worker; lists have one entry per request.

    Attributes:
        requests: what the host knows about each request.
        drafted: the stored drafts, ``[B, K-1]``.
        has_drafts: whether there were any; without, a step commits one token whatever its mode.
        verify: drafts verified per request.
        layout: rows of the target pass.
    """

    requests: list[RequestStep]
    drafted: DraftBlock
    has_drafts: list[bool]
    verify: list[int]
    layout: BlockLayout


class SpecWorker(BaseSpecWorker):
    """Host-facing worker (SGLang speculative schema V2)."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        args = resolving_view(server_args)
        self._target_worker = target_worker
        self.plan = plan_from_args(args.speculative_algorithm, args)
        self.device = target_worker.model_runner.device
        self._runner = target_worker.model_runner
        self._block = self.plan.block_size
        self._prune = self.plan.options.prune_config()
        self._rule = self.plan.options.accept_rule()
        self.profile = StepProfile(self.plan.options.profile, self.device)
        self.profile.watch(self._runner.model.logits_processor, "target head")
        self._ranks = host_ranks()
        self._drafter = build_drafter(self.plan, self._runner, self.profile, self._ranks)
        if self.device != "cpu":
            from sglang_ext.serving.attention.gpu import install_verification

            install_verification(self._runner)
        options = self.plan.options
        self.pace = make_pace(self._ranks, options.mode_policy(), self._drafter.can_join, options.adaptive)
        self._watch = AcceptanceWatch(self.plan, asleep=self._ranks.rank > 0)
        server_info.install()
        slot_rows.install()
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
        self._state = DraftState(slots, self._block, self.device, self.plan.options.draft_width, vocabulary)

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
                verify_lengths=[0] * size,
                groups=[0] * size,
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
        rows = [
            i
            for i, req in enumerate(batch.reqs)
            if req.inflight_middle_chunks <= 0 and drafts_after_prefill(req, self.pace)
        ]
        self._state.forget(batch.req_pool_indices)
        self._draft_alone(batch, bonus, batch.seq_lens, rows, batch.seq_lens_cpu.tolist())

    # ----------------------------------------------------------------- decode

    def _decode(
        self, batch: Any, on_publish: Callable[[Tensor], None] | None, grammar_barrier: Callable[[], None] | None
    ) -> GenerationBatchResult:
        started = time.perf_counter()
        with self.profile.section("plan"):
            step = self._plan_step(batch)
        self.profile.label([request.mode.value for request in step.requests])
        self.pace.started(started * 1000.0, [request.mode for request in step.requests])
        verify_input, output = self._verify(batch, step, grammar_barrier)
        verify = torch.tensor(step.verify).to(self.device, non_blocking=True)
        with self.profile.section("sampling"):
            accepted = accept_step(
                output.next_token_logits,
                batch.sampling_info,
                step.layout,
                step.drafted,
                verify,
                self._rule,
                self._generator,
            )
            accepted = agree(self._ranks, accepted)
        with self.profile.section("context"):
            self._drafter.observe_commit(step.layout, accepted.lengths)
        lengths = batch.seq_lens + (accepted.lengths + 1).to(batch.seq_lens.dtype)
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, accepted.tokens.reshape(-1), chain_stride=step.layout.clean.width)
        if on_publish is not None:
            on_publish(lengths)
        self._draft_next(batch, step, verify_input, accepted, lengths)
        output.hidden_states = None
        self._attach_records(output, step, accepted, started)
        self.pace.ended(time.perf_counter() * 1000.0)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=accepted.tokens.reshape(-1),
            accept_lens=(accepted.lengths + 1).to(torch.int32),
            cap_lens=verify.to(torch.int32),
            can_run_cuda_graph=False,
            next_draft_input=_next_input(accepted.bonus, lengths),
            speculative_num_draft_tokens=self._block,
            speculative_output_stride=step.layout.clean.width,
            new_seq_lens=lengths,
        )

    def _plan_step(self, batch: Any) -> DecodeStep:
        """Decide how many drafts of each request are verified and which mask groups join."""
        requests = read_requests(batch.reqs, self.pace)
        drafted = self._state.load(batch.req_pool_indices)
        pruned, has_drafts = self._pruned(requests, drafted.confidence)
        verify = [
            min(length, request.room) if has and request.mode is not Mode.PLAIN else 0
            for length, has, request in zip(pruned, has_drafts, requests, strict=True)
        ]
        widths = [1 + length for length in verify]
        if not self._may_be_ragged(batch):
            # Grammar masks, logprobs and non-CPU backends want the same number of rows for every request.
            widths = [max(widths)] * len(widths)
        groups = [
            1 + length if request.mode is Mode.PARALLEL and request.room > 0 and self._drafter.can_join else 0
            for length, request in zip(verify, requests, strict=True)
        ]
        # The host's mirror of the lengths is exact without overlapped scheduling; reading it costs a GPU no wait.
        lengths = (batch.seq_lens if self.device == "cpu" else batch.seq_lens_cpu).tolist()
        layout = BlockLayout.ragged(lengths, widths, groups, self._block, device=self.device)
        return DecodeStep(requests, drafted, has_drafts, verify, layout)

    def _pruned(self, requests: list[RequestStep], confidence: Tensor) -> tuple[list[int], list[bool]]:
        """Return how many drafts of each request are worth verifying, by the server's settings or its own, and
        whether it has any."""
        both = torch.stack([verify_lengths(confidence, self._prune), (confidence[:, 0] > 0).to(torch.int64)])
        lengths, has_drafts = both.tolist()
        for i, request in enumerate(requests):
            config = request.options.prune_config(self._prune)
            if config is not self._prune:
                lengths[i] = int(verify_lengths(confidence[i : i + 1], config))
        return lengths, [bool(has) for has in has_drafts]

    def _may_be_ragged(self, batch: Any) -> bool:
        return self.device == "cpu" and not batch.has_grammar and not batch.return_logprob

    def _verify(
        self, batch: Any, step: DecodeStep, grammar_barrier: Callable[[], None] | None
    ) -> tuple[ChainVerifyInput, Any]:
        """Run the target over ``[bonus, drafts]`` of every request, mask groups riding along, and adjust the logits."""
        layout = step.layout
        width = layout.clean.width
        vocabulary = self._runner.model_config.vocab_size
        drafts = step.drafted.tokens[:, : width - 1]
        known = torch.where((drafts >= 0) & (drafts < vocabulary), drafts, 0)
        candidates = torch.cat([batch.spec_info.bonus_tokens.view(-1, 1).to(torch.int64), known], dim=1)
        positions = layout.clean_position
        table = batch.req_to_token_pool.req_to_token
        batch.out_cache_loc = table[batch.req_pool_indices[layout.clean.request], positions].to(torch.int64)
        verify_input = ChainVerifyInput(
            draft_token=layout.flatten(candidates),
            positions=positions,
            draft_token_num=width,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            verify_lens_cpu=list(layout.clean.carried),
            layout=layout,
        )
        longest = int(batch.seq_lens_cpu.max()) + width
        if layout.groups.width:
            verify_input.mask = self._drafter.mask_rows(batch.req_pool_indices, layout, longest)
        tree = GrammarTree.from_linear_chain(candidates) if batch.has_grammar else None
        with self.profile.section("prepare"):
            if self.device != "cpu":
                # GPU planners want key lengths that already count the rows in flight; the host restores the batch.
                batch.seq_lens_cpu = batch.seq_lens_cpu + width
                batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
            # An eager GPU pass plans its attention itself; planning here would do it twice.
            forward_batch, _ = verify_input.prepare_for_verify(
                batch, self.target_worker, defer_metadata_init=self.device != "cpu"
            )
        with self.profile.section("target"):
            output = self.target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
            ).logits_output
        mask = None
        if tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=tree,
                sampling_info=batch.sampling_info,
                device=self.device,
                barrier=grammar_barrier,
            )
        with self.profile.section("sampling"):
            adjust_logits(output.next_token_logits, batch.sampling_info, layout, mask)
        return verify_input, output

    def _draft_next(
        self, batch: Any, step: DecodeStep, verify_input: ChainVerifyInput, accepted: Accepted, lengths: Tensor
    ) -> None:
        """Fill the draft table for the next step: from the group that survived, or by a pass of the drafter's own."""
        joined: list[int] = []
        alone: list[int] = []
        idle: list[int] = []
        groups = step.layout.groups.carried
        counts = accepted.lengths.tolist()
        for i, (request, count) in enumerate(zip(step.requests, counts, strict=True)):
            if request.mode is not Mode.PLAIN and step.has_drafts[i]:
                self.pace.committed(batch.reqs[i].rid, count + 1)
            if request.mode is Mode.PLAIN or request.room <= count:
                idle.append(i)  # plain, or finished by max_new_tokens in this very step
            elif count < groups[i]:
                joined.append(i)
            else:
                alone.append(i)
        if idle:
            self._state.forget(batch.req_pool_indices[idle])
        if joined:
            rows = torch.tensor(joined, device=self.device)
            context = self._context(batch, accepted.bonus, lengths).select(rows, joined)
            first = step.layout.mask.ptr[rows] + accepted.lengths[rows] * self._block
            index = first[:, None] + torch.arange(self._block, device=self.device)
            with self.profile.section("draft"):
                block = self._drafter.propose_joined(context, verify_input.mask.hidden[index])
            self._state.store(context.slots, block)
        assert step.layout.host_committed is not None
        known = [n + count + 1 for n, count in zip(step.layout.host_committed, counts, strict=True)]
        self._draft_alone(batch, accepted.bonus, lengths, alone, known)

    def _draft_alone(
        self, batch: Any, bonus: Tensor, lengths: Tensor, rows_list: list[int], host_lengths: list[int]
    ) -> None:
        """Draft for the requests ``rows_list`` of the batch; ``host_lengths`` are ``lengths`` of the whole batch."""
        if not rows_list:
            return
        context = self._context(batch, bonus, lengths, host_lengths)
        if len(rows_list) < len(batch.reqs):
            context = context.select(torch.tensor(rows_list, device=self.device), rows_list)
        with self.profile.section("draft"):
            block = self._drafter.propose(context)
        self._state.store(context.slots, block)

    def _context(self, batch: Any, bonus: Tensor, lengths: Tensor, host_lengths: list[int] | None = None) -> Context:
        info = batch.sampling_info
        # Seeded requests accept by exact match, which the likeliest drafts survive best.
        drawn = not info.is_all_greedy and info.sampling_seed is None
        sampled = drawn and self.plan.options.acceptance == "rejection"
        return Context(
            slots=batch.req_pool_indices,
            lengths=lengths.to(torch.int64),
            bonus=bonus,
            reqs=batch.reqs,
            # The lengths may count the rows in flight already; the slot table has no columns beyond the context.
            longest=min(int(batch.seq_lens_cpu.max()) + self._block, batch.req_to_token_pool.req_to_token.shape[1]),
            sampling=sampling_params(batch.sampling_info) if sampled else None,
            host_lengths=host_lengths,
        )

    def _attach_records(self, output: Any, step: DecodeStep, accepted: Accepted, started: float) -> None:
        self._watch.add(sum(step.verify), accepted.lengths)
        wanted = [request.options.records for request in step.requests]
        if not any(wanted):
            return
        output.auxiliary_device_output = DeviceRecords(
            wanted=wanted,
            modes=[request.mode.value for request in step.requests],
            verify_lengths=step.verify,
            groups=list(step.layout.groups.carried),
            step_ms=_milliseconds_since(started),
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
