"""Steps decided on the host: every request brings exactly the rows it needs.

Confidences are read before a step and accepts after it. On a CPU that costs nothing; a GPU would wait for both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.accept import Accepted
from sglang_ext.core.block import BlockLayout
from sglang_ext.core.prune import verify_lengths
from sglang_ext.core.schedule import Mode
from sglang_ext.serving.requests import RequestStep, read_requests
from sglang_ext.serving.steps import DecodeStep, StepParts, Steps
from sglang_ext.serving.verify_input import ChainVerifyInput


class RaggedSteps(Steps):
    """Plans and drafts request by request."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        #: Whether each request of the open step had drafts; without, it commits one token whatever its mode.
        self._has_drafts: list[bool] = []

    def plan(self, batch: Any) -> DecodeStep:
        """See :meth:`Steps.plan`."""
        parts = self.parts
        requests = read_requests(batch.reqs, parts.pace)
        drafted = parts.state.load(batch.req_pool_indices)
        pruned = self._pruned(requests, drafted.confidence)
        verify = [
            min(length, request.room) if has and request.mode is not Mode.PLAIN else 0
            for length, has, request in zip(pruned, self._has_drafts, requests, strict=True)
        ]
        widths = [1 + length for length in verify]
        if batch.has_grammar or batch.return_logprob:
            # Grammar masks and logprobs want the same number of rows for every request.
            widths = [max(widths)] * len(widths)
        groups = [
            1 + length if request.mode is Mode.PARALLEL and request.room > 0 and parts.drafter.can_join else 0
            for length, request in zip(verify, requests, strict=True)
        ]
        layout = BlockLayout.ragged(batch.seq_lens.tolist(), widths, groups, parts.block_size, device=parts.device)
        counts = torch.tensor([verify, groups]).to(parts.device)
        return DecodeStep(requests, drafted, counts[0], counts[1], layout)

    def _pruned(self, requests: list[RequestStep], confidence: Tensor) -> list[int]:
        """Return how many drafts of each request are worth verifying, by the server's settings or its own, and note
        whether it has any."""
        both = torch.stack([verify_lengths(confidence, self.prune), (confidence[:, 0] > 0).to(torch.int64)])
        lengths, has_drafts = both.tolist()
        for i, request in enumerate(requests):
            config = request.options.prune_config(self.prune)
            if config is not self.prune:
                lengths[i] = int(verify_lengths(confidence[i : i + 1], config))
        self._has_drafts = [bool(has) for has in has_drafts]
        return [int(length) for length in lengths]

    def draft(
        self, batch: Any, step: DecodeStep, verify_input: ChainVerifyInput, accepted: Accepted, lengths: Tensor
    ) -> None:
        """Draft from the group that survived, or by a pass of the drafter's own."""
        parts = self.parts
        joined: list[int] = []
        alone: list[int] = []
        idle: list[int] = []
        groups = step.layout.groups.carried
        counts = accepted.lengths.tolist()
        for i, (request, count) in enumerate(zip(step.requests, counts, strict=True)):
            if request.mode is not Mode.PLAIN and self._has_drafts[i]:
                parts.pace.committed(batch.reqs[i].rid, count + 1)
            if request.mode is Mode.PLAIN or request.room <= count:
                idle.append(i)  # plain, or finished by max_new_tokens in this very step
            elif count < groups[i]:
                joined.append(i)
            else:
                alone.append(i)
        if idle:
            parts.state.forget(batch.req_pool_indices[idle])
        if joined:
            self._draft_joined(batch, step, verify_input, accepted, lengths, joined)
        assert step.layout.host_committed is not None
        known = [n + count + 1 for n, count in zip(step.layout.host_committed, counts, strict=True)]
        self.draft_alone(batch, accepted.bonus, lengths, alone, known)

    def _draft_joined(
        self,
        batch: Any,
        step: DecodeStep,
        verify_input: ChainVerifyInput,
        accepted: Accepted,
        lengths: Tensor,
        joined: list[int],
    ) -> None:
        parts = self.parts
        assert verify_input.mask is not None and verify_input.mask.hidden is not None
        rows = torch.tensor(joined, device=parts.device)
        context = self.context(batch, accepted.bonus, lengths).select(rows, joined)
        first = step.layout.mask.ptr[rows] + accepted.lengths[rows] * parts.block_size
        index = first[:, None] + torch.arange(parts.block_size, device=parts.device)
        with parts.profile.section("draft"):
            block = parts.drafter.propose_joined(context, verify_input.mask.hidden[index])
        parts.state.store(context.slots, block)
