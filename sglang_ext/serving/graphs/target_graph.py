"""The target pass of a decode step, captured for one number of requests, clean rows and mask groups.

Shape legend: B requests, padded ones included; W clean rows, G mask groups, K block size, V vocabulary, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.serving.attention.flashinfer_graph import GraphedRows, GraphRooms
from sglang_ext.serving.drafters.base import Drafter, LogitsDrafter
from sglang_ext.serving.graphs.recorder import Recorder
from sglang_ext.serving.pass_size import PassSize
from sglang_ext.serving.taps import Taps
from sglang_ext.serving.verify_input import ChainVerifyInput


class SharedResults:
    """One buffer for the same result of every captured pass, which is read before the next pass is replayed.

    Otherwise each pass would keep its own for ever, and logits over a vocabulary are large.
    """

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def room(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a place for a result of this ``shape``, of the dtype and device of ``like``.

        Ask for the largest first: what does not fit is given a new buffer. Ask before a pass is recorded (the runs
        that warm it up do), so that the buffer is not the recording's own.
        """
        count = math.prod(shape)
        if self._held is None or self._held.numel() < count:
            self._held = torch.empty(count, dtype=like.dtype, device=like.device)
        return self._held[:count].view(*shape)

    def keep(self, result: Tensor) -> Tensor:
        """Copy a result to its place and return it there."""
        return self.room(result.shape, result).copy_(result)


@dataclass(frozen=True)
class GraphTools:
    """What captured passes are made with.

    Attributes:
        runner: the host's target runner, its attention backend a :class:`~..attention.flashinfer_verify.ChainVerify`.
        drafter: whose passes are captured; None for one that cannot be.
        observer: the same drafter or another, which may want taps.
        rooms: shared buffers.
        recorder: captures.
        block_size: K.
        target_logits, draft_logits: where all passes leave theirs.
    """

    runner: Any
    drafter: LogitsDrafter | None
    observer: Drafter
    rooms: GraphRooms
    recorder: Recorder
    block_size: int
    target_logits: SharedResults = field(default_factory=SharedResults)
    draft_logits: SharedResults = field(default_factory=SharedResults)

    @property
    def table(self) -> Tensor:
        """The host's slot table; its row 0 leads to the slot that no token is given."""
        table: Tensor = self.runner.req_to_token_pool.req_to_token
        return table

    def fits(self, size: PassSize) -> bool:
        """Return whether the kernels' scratch is large enough for a pass and for the drafting pass behind it."""
        kernels = self.rooms.kernels
        clean = kernels.holds(self.runner.attn_backend.verify_shape, size.batch, size.width)
        if self.drafter is None:
            return clean
        return clean and kernels.holds(self.drafter.attention.shape, size.batch, max(size.groups, 1) * self.block_size)

    def zeros(self, count: int) -> Tensor:
        """Return ``[count]`` int64 zeros: what padded requests consist of."""
        return torch.zeros(count, dtype=torch.int64, device=self.table.device)


@dataclass(frozen=True, eq=False)
class TargetOutput:
    """Results of the last replay.

    Attributes:
        result: the host's output, ``next_token_logits [B * W, V]``.
        hidden: ``[B, G, K, H]`` final hidden states of mask rows; None without groups.
        taps: of the clean rows, where the drafter wants them.
    """

    result: Any
    hidden: Tensor | None
    taps: Taps | None


class TargetGraph:
    """One captured target pass.

    Args:
        tools: shared by all passes.
        size: rows of this one.
    """

    def __init__(self, tools: GraphTools, size: PassSize) -> None:
        self._tools = tools
        self.size = size
        rows = size.batch * size.width
        self.requests, self.committed = tools.zeros(size.batch), tools.zeros(size.batch)
        self._ids, self._positions, self._cache_loc = tools.zeros(rows), tools.zeros(rows), tools.zeros(rows)
        backend = tools.runner.attn_backend
        self._clean = tools.rooms.clean(backend.verify_shape, size.batch, size.width)
        self._mask: GraphedRows | None = None
        if size.groups:
            assert tools.drafter is not None
            self._mask = GraphedRows(tools.drafter.attention, tools.rooms, size, tools.block_size, behind=False)
        self._batch = self._forward_batch()
        self._plan_capture()
        self.output, self._replay = self._captured()

    def _captured(self) -> tuple[TargetOutput, Any]:
        captured = self._tools.recorder.capture(self._run)
        return captured.output, captured.replay

    def _forward_batch(self) -> ForwardBatch:
        """The host's description of the pass, over this graph's buffers."""
        size, runner = self.size, self._tools.runner
        lengths = torch.zeros(size.batch, dtype=torch.int64)
        logits = (size.batch * size.width, runner.model_config.vocab_size)
        float32 = torch.empty(0, dtype=torch.float32, device=self._ids.device)
        verify_input = ChainVerifyInput(
            draft_token=self._ids,
            positions=self._positions,
            draft_token_num=size.width,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            verify_lens_cpu=[size.width] * size.batch,
        )
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=size.batch,
            input_ids=self._ids,
            req_pool_indices=self.requests,
            seq_lens=self.committed,
            seq_lens_cpu=lengths,
            orig_seq_lens=self.committed,
            out_cache_loc=self._cache_loc,
            seq_lens_sum=0,
            positions=self._positions,
            next_token_logits_buffer=self._tools.target_logits.room(logits, float32),
            spec_algorithm=runner.spec_algorithm,
            spec_info=verify_input,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_logprob=False,
        )
        runner.kv_index_translator.bind_runner_slots(batch)
        return batch

    def _run(self) -> TargetOutput:
        """The pass itself: everything that is captured."""
        tools, size = self._tools, self.size
        nothing = (0,) * size.batch
        layout = BlockLayout.uniform(self.committed, size.width, size.groups, tools.block_size, host_committed=nothing)
        self._positions.copy_(layout.clean_position)
        slots = tools.table[self.requests[layout.clean.request], layout.clean_position]
        self._cache_loc.copy_(slots)
        verify_input = self._batch.spec_info
        verify_input.mask = None
        if self._mask is not None:
            assert tools.drafter is not None
            verify_input.mask = tools.drafter.place(layout, self._mask.meta(layout, self._cache_loc))
        backend = tools.runner.attn_backend
        context = forward_context(ForwardContext(attn_backend=backend), forward_batch=self._batch)
        with torch.no_grad(), backend.verifying(self._clean), context:
            result = tools.runner.model.forward(self._ids, self._positions, self._batch)
        hidden = None
        if verify_input.mask is not None:
            hidden = verify_input.mask.hidden.view(size.batch, size.groups, tools.block_size, -1)
        return TargetOutput(result, hidden, tools.observer.take_taps())

    def _plan_capture(self) -> None:
        """Plan for one committed token per request: what a plan decides for good, the size decides."""
        batch = self.size.batch
        slots = torch.zeros(batch * (1 + self.size.width), dtype=torch.int32, device=self._cache_loc.device)
        self.plan([1] * batch, slots, slots[:batch])

    def plan(self, committed: Sequence[int], clean_slots: Tensor, prefix_slots: Tensor | None) -> None:
        """Plan attention of the next replay.

        Args:
            committed: committed tokens of each real request.
            clean_slots: ``[sum(committed + W)]`` int32 slots that clean rows see.
            prefix_slots: ``[sum(committed)]`` int32 slots that mask rows see; not needed without groups.
        """
        width, padded = self.size.width, self.size.batch - len(committed)
        lengths = [*committed, *[0] * padded]
        # A padded request's rows see one another, all in the slot that no token is given.
        nothing = torch.zeros(padded * width, dtype=torch.int32, device=clean_slots.device)
        self._clean.plan(
            [width] * self.size.batch, [length + width for length in lengths], torch.cat([clean_slots, nothing])
        )
        if self._mask is not None:
            assert prefix_slots is not None
            self._mask.plan(lengths, prefix_slots)

    def replay(self, requests: Tensor, committed: Tensor, ids: Tensor) -> TargetOutput:
        """Run the pass for real requests; the results of padded ones follow theirs.

        Args:
            requests: ``[b]`` rows of the slot table, b at most B.
            committed: ``[b]`` committed tokens, as planned.
            ids: ``[b * W]`` bonus token and drafts of each request.
        """
        for buffer, values in ((self.requests, requests), (self.committed, committed), (self._ids, ids)):
            buffer[: values.shape[0]] = values
            buffer[values.shape[0] :] = 0
        self._replay()
        return self.output
