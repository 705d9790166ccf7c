"""What one decode step does for each request, and how drafts of the next one are made.

There are two ways to decide it, alike in what they emit: :mod:`.ragged_steps` reads confidences and accepts on the host
and gives every request exactly the rows it needs, the way of a CPU; :mod:`.uniform_steps` gives every request the same
number of rows and leaves the rest to the device, so that nothing has to be read back, the way of a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.accept import Accepted
from sglang_ext.core.block import BlockLayout
from sglang_ext.core.pace import Pace
from sglang_ext.serving.acceptance_watch import AcceptanceWatch
from sglang_ext.serving.draft_state import DraftState
from sglang_ext.serving.drafters.base import Context, DraftBlock, Drafter
from sglang_ext.serving.plan import SpecPlan
from sglang_ext.serving.profile import StepProfile
from sglang_ext.serving.requests import RequestStep
from sglang_ext.serving.sampling import sampling_params
from sglang_ext.serving.verify_input import ChainVerifyInput


@dataclass(frozen=True)
class DecodeStep:
    """One decode step on its way through the worker.

    Attributes:
        requests: what the host knows about each request.
        drafted: the stored drafts, ``[B, K-1]``.
        verify: ``[B]`` int64 drafts verified per request.
        groups: ``[B]`` int64 mask groups of each request that may be drafted from.
        layout: rows of the target pass.
    """

    requests: list[RequestStep]
    drafted: DraftBlock
    verify: Tensor
    groups: Tensor
    layout: BlockLayout


@dataclass(frozen=True)
class StepParts:
    """What steps are made of; one object per worker.

    Attributes:
        runner: the host's target runner.
        plan: what was asked for at start.
        drafter: makes drafts.
        state: keeps them until they are verified.
        pace: chooses modes.
        watch: warns about a drafter that never helps.
        profile: where time is charged.
        overlapped: whether the host starts a step before it has read what the one before committed.
    """

    runner: Any
    plan: SpecPlan
    drafter: Drafter
    state: DraftState
    pace: Pace
    watch: AcceptanceWatch
    profile: StepProfile
    overlapped: bool

    @property
    def block_size(self) -> int:
        """K."""
        return self.plan.block_size

    @property
    def device(self) -> str:
        """Where tensors live."""
        return str(self.runner.device)


class Steps(ABC):
    """Plans decode steps and fills the draft table after them."""

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts
        self.prune = parts.plan.options.prune_config()

    @abstractmethod
    def plan(self, batch: Any) -> DecodeStep:
        """Decide how many drafts of each request are verified and which mask groups join."""

    @abstractmethod
    def draft(
        self, batch: Any, step: DecodeStep, verify_input: ChainVerifyInput, accepted: Accepted, lengths: Tensor
    ) -> None:
        """Fill the draft table for the next step.

        Args:
            batch: the host's batch.
            step: the step that was just verified.
            verify_input: of its target pass.
            accepted: what it commits.
            lengths: ``[B]`` committed lengths after it.
        """

    def commit(self, step: DecodeStep, verify_input: ChainVerifyInput, accepted: Accepted) -> None:
        """Let the drafter look at the target pass that has just verified drafts."""
        with self.parts.profile.section("context"):
            self.parts.drafter.observe_commit(step.layout, accepted.lengths)

    def draft_after_prefill(self, batch: Any, bonus: Tensor, rows: list[int]) -> None:
        """Draft for the requests ``rows`` of a batch whose prompts were just read."""
        self.parts.state.forget(batch.req_pool_indices)
        self.draft_alone(batch, bonus, batch.seq_lens, rows, batch.seq_lens_cpu.tolist())

    def draft_alone(
        self, batch: Any, bonus: Tensor, lengths: Tensor, rows_list: list[int], host_lengths: list[int]
    ) -> None:
        """Draft for the requests ``rows_list`` of the batch in a pass of the drafter's own.

        Args:
            batch: the host's batch.
            bonus: ``[B]``.
            lengths: ``[B]`` committed lengths.
            rows_list: requests to draft for.
            host_lengths: ``lengths`` of the whole batch.
        """
        if not rows_list:
            return
        context = self.context(batch, bonus, lengths, host_lengths)
        if len(rows_list) < len(batch.reqs):
            # Made on the host and sent: made on a GPU it would wait for the prefill that has just been started.
            rows = torch.tensor(rows_list).to(self.parts.device, non_blocking=True)
            context = context.select(rows, rows_list)
        with self.parts.profile.section("draft"):
            block = self.parts.drafter.propose(context)
        self.parts.state.store(context.slots, block)

    def context(
        self,
        batch: Any,
        bonus: Tensor,
        lengths: Tensor,
        host_lengths: Sequence[int] | None = None,
        layout: BlockLayout | None = None,
    ) -> Context:
        """Return what the drafter may know about the whole batch."""
        info = batch.sampling_info
        # Seeded requests accept by exact match, which the likeliest drafts survive best.
        drawn = not info.is_all_greedy and info.sampling_seed is None
        sampled = drawn and self.parts.plan.options.acceptance == "rejection"
        widest = batch.req_to_token_pool.req_to_token.shape[1]
        return Context(
            slots=batch.req_pool_indices,
            lengths=lengths.to(torch.int64),
            bonus=bonus,
            reqs=batch.reqs,
            # The lengths may count the rows in flight already; the slot table has no columns beyond the context.
            longest=min(int(batch.seq_lens_cpu.max()) + self.parts.block_size, widest),
            sampling=sampling_params(batch.sampling_info) if sampled else None,
            host_lengths=None if host_lengths is None else list(host_lengths),
            layout=layout,
        )
