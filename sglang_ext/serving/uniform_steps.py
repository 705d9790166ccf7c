"""Steps decided on the device: every request brings the same number of rows, and nothing is read back.

What the host must know to plan kernels are committed lengths, which it knows when a step starts, and numbers of rows,
which it picks. Verify lengths, accepts and the group that survives stay on the device: rows past a request's verify
length are carried along and seen by none of its real rows (:meth:`BlockLayout.uniform`), and a drafting pass is laid
out behind a row whose number only the device knows (:meth:`BlockLayout.after`).

Row counts come from a few sizes, so that a captured graph can be replayed for them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.accept import Accepted
from sglang_ext.core.block import BlockLayout
from sglang_ext.core.pass_sizes import RowForecast, row_sizes, smallest_at_least
from sglang_ext.core.prune import PruneConfig, verify_lengths
from sglang_ext.core.schedule import Mode
from sglang_ext.kernels.pool_slots import slots_of
from sglang_ext.serving.drafters.base import Context, DraftBlock, LogitsDrafter
from sglang_ext.serving.graphs.draft_graph import DraftOutput, surviving_group
from sglang_ext.serving.graphs.store import GraphStore
from sglang_ext.serving.pass_size import PassSize
from sglang_ext.serving.requests import RequestStep, read_requests
from sglang_ext.serving.steps import DecodeStep, StepParts, Steps
from sglang_ext.serving.verify_input import ChainVerifyInput


class UniformSteps(Steps):
    """Plans and drafts for the whole batch at once."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self.sizes = row_sizes(parts.block_size)
        self._forecast = RowForecast(parts.block_size)
        self._wanted: _Wanted | None = None
        #: Request slots that have drafts.
        self._drafted: set[int] = set()
        #: Committed length of each request when the last step started, and whether it verified drafts.
        self._before: dict[Hashable, tuple[int, bool]] = {}
        self._graphs: GraphStore | None = None

    def use_graphs(self, graphs: GraphStore) -> None:
        """Replay captured passes where there is one of the right size."""
        self._graphs = graphs

    def commit(self, step: DecodeStep, verify_input: ChainVerifyInput, accepted: Accepted) -> None:
        """See :meth:`Steps.commit`."""
        graph = None
        if self._graphs is not None and verify_input.captured is not None:
            graph = self._graphs.commit(verify_input.captured)
        if graph is None:
            super().commit(step, verify_input, accepted)
            return
        with self.parts.profile.section("context"):
            graph.replay(accepted.lengths)

    def plan(self, batch: Any) -> DecodeStep:
        """See :meth:`Steps.plan`."""
        parts = self.parts
        host, slots = batch.seq_lens_cpu.tolist(), batch.req_pool_indices_cpu.tolist()
        self._note_commits(batch, host)
        requests = self._one_mode(read_requests(batch.reqs, parts.pace))
        drafted = parts.state.load(batch.req_pool_indices)
        wanted = self._pruned(requests, drafted.confidence)
        most = [
            min(request.room, parts.block_size - 1) if request.mode is not Mode.PLAIN and slot in self._drafted else 0
            for request, slot in zip(requests, slots, strict=True)
        ]
        verify = torch.minimum(wanted, _to(most, parts.device))
        newcomers = any(rows and req.rid not in self._before for rows, req in zip(most, batch.reqs, strict=True))
        width = smallest_at_least(self.sizes, 1 + self._rows(verify, max(most), newcomers))
        verify = verify.clamp_max(width - 1)
        joins = any(request.mode is Mode.PARALLEL and request.room > 0 for request in requests)
        groups = width if joins else 0
        layout = BlockLayout.uniform(
            batch.seq_lens, width, groups, parts.block_size, widths=1 + verify, host_committed=host
        )
        self._before = {req.rid: (length, rows > 0) for req, length, rows in zip(batch.reqs, host, most, strict=True)}
        return DecodeStep(requests, drafted, verify, layout.groups.counts, layout)

    def _rows(self, verify: Tensor, most: int, newcomers: bool) -> int:
        """Return how many drafts per request to make room for, at most ``most``.

        Where the host may not ask, the last few steps tell; of a request that was in none of them they tell nothing.
        """
        if not most or not self.parts.overlapped:
            # The device has nothing to do before this step starts: asking it costs no more than the answer.
            return int(verify.max()) if most else 0
        if self._wanted is not None:
            self._forecast.note(self._wanted.value())
        self._wanted = _Wanted(verify.max())
        return most if newcomers else min(self._forecast.rows(), most)

    def _one_mode(self, requests: list[RequestStep]) -> list[RequestStep]:
        """Let all requests that draft do it in one way: drafts are the same either way, and a pass has one shape."""
        modes = {request.mode for request in requests if request.mode is not Mode.PLAIN}
        joins = self.parts.drafter.can_join and Mode.SEQUENTIAL not in modes
        chosen = Mode.PARALLEL if joins else Mode.SEQUENTIAL
        return [
            request if request.mode in (Mode.PLAIN, chosen) else replace(request, mode=chosen) for request in requests
        ]

    def _pruned(self, requests: list[RequestStep], confidence: Tensor) -> Tensor:
        """Return ``[B]`` drafts worth verifying, by the server's settings or the request's own; 0 without drafts."""
        configs: dict[PruneConfig, list[int]] = {}
        for i, request in enumerate(requests):
            configs.setdefault(request.options.prune_config(self.prune), []).append(i)
        lengths: Tensor | None = None
        for config, rows in configs.items():
            found = verify_lengths(confidence, config)
            if lengths is None:
                lengths = found
            else:
                chosen = torch.zeros(len(requests), dtype=torch.bool)
                chosen[rows] = True
                lengths = torch.where(chosen.to(found.device, non_blocking=True), found, lengths)
        assert lengths is not None
        return torch.where(confidence[:, 0] > 0, lengths, 0)

    def _note_commits(self, batch: Any, host: list[int]) -> None:
        """Tell the pace what the last step committed: the host's own lengths say it, one step later."""
        for req, length in zip(batch.reqs, host, strict=True):
            before, verified = self._before.get(req.rid, (length, False))
            if verified and length > before:
                self.parts.pace.committed(req.rid, length - before)

    def _note_drafted(self, batch: Any, rows: list[int]) -> None:
        """Remember which requests of the batch have drafts now."""
        slots = batch.req_pool_indices_cpu.tolist()
        self._drafted.difference_update(slots)
        self._drafted.update(slots[row] for row in rows)

    def draft_after_prefill(self, batch: Any, bonus: Tensor, rows: list[int]) -> None:
        """See :meth:`Steps.draft_after_prefill`."""
        super().draft_after_prefill(batch, bonus, rows)
        self._note_drafted(batch, rows)

    def draft(
        self, batch: Any, step: DecodeStep, verify_input: ChainVerifyInput, accepted: Accepted, lengths: Tensor
    ) -> None:
        """Draft for the whole batch; what it gives requests that do not draft is dropped."""
        parts = self.parts
        rows = [i for i, request in enumerate(step.requests) if request.mode is not Mode.PLAIN and request.room > 0]
        idle = sorted(set(range(len(step.requests))) - set(rows))
        self._note_drafted(batch, rows)
        if idle:
            parts.state.forget(batch.req_pool_indices[_to(idle, parts.device)])
        if not rows:
            return
        with parts.profile.section("draft"):
            block = self._block(batch, step, verify_input, accepted, lengths)
        if not idle:
            parts.state.store(batch.req_pool_indices, block)
        else:
            index = _to(rows, parts.device)
            kept = DraftBlock(*(None if part is None else part[index] for part in block))
            parts.state.store(batch.req_pool_indices[index], kept)

    def _block(
        self, batch: Any, step: DecodeStep, verify_input: ChainVerifyInput, accepted: Accepted, lengths: Tensor
    ) -> DraftBlock:
        parts = self.parts
        if self._graphs is not None and verify_input.captured is not None:
            replayed = self._replayed(self._graphs, verify_input.captured, batch, step, accepted)
            if replayed is not None:
                return self._finished(replayed, self.context(batch, accepted.bonus, lengths))
        if not step.layout.groups.width:
            layout = step.layout.after(accepted.lengths)
            return parts.drafter.propose(self.context(batch, accepted.bonus, lengths, layout=layout))
        assert verify_input.mask is not None and verify_input.mask.hidden is not None
        hidden = verify_input.mask.hidden.view(len(step.requests), step.layout.groups.width, parts.block_size, -1)
        context = self.context(batch, accepted.bonus, lengths)
        return parts.drafter.propose_joined(context, surviving_group(hidden, accepted.lengths))

    def _replayed(
        self, graphs: GraphStore, size: PassSize, batch: Any, step: DecodeStep, accepted: Accepted
    ) -> DraftOutput | None:
        """Replay the drafting pass behind a replayed target pass; None if none was captured."""
        joined = graphs.joined(size)
        if joined is not None:
            return joined.replay(accepted.lengths, accepted.bonus)
        alone = graphs.alone(size)
        if alone is None:
            return None
        assert step.layout.host_committed is not None
        known = step.layout.host_committed
        table = batch.req_to_token_pool.req_to_token
        alone.plan(known, slots_of(table, batch.req_pool_indices, None, known))
        return alone.replay(accepted.lengths, accepted.bonus)

    def _finished(self, output: DraftOutput, context: Context) -> DraftBlock:
        """Return the drafts of the real requests of a replay."""
        real = context.slots.shape[0]
        if context.sampling is None:
            return DraftBlock(output.greedy.tokens[:real], output.greedy.confidence[:real])
        drafter = self.parts.drafter
        assert isinstance(drafter, LogitsDrafter)
        return drafter.block(output.logits[:real], context)


class _Wanted:
    """A number on its way from the device; it is asked for a step later, when it has long arrived."""

    def __init__(self, value: Tensor) -> None:
        self._device = value  # kept until the copy is done
        self._host = value if value.device.type == "cpu" else value.to("cpu", non_blocking=True)
        self._copied: Any = None
        if value.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def value(self) -> int:
        """Return it; its step has ended, so that this does not wait for work of the step in flight."""
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._host)


def _to(values: list[int], device: str) -> Tensor:
    return torch.tensor(values).to(device, non_blocking=True)
