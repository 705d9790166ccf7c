"""What follows a target pass, captured: context of committed tokens, and drafts of the next step.

Shape legend: B requests, padded ones included; W clean rows, K block size, R tokens that can be proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.serving.attention.flashinfer_graph import GraphedRows
from sglang_ext.serving.drafters.base import DraftBlock
from sglang_ext.serving.graphs.target_graph import GraphTools, TargetGraph
from sglang_ext.serving.pass_size import PassSize


@dataclass(frozen=True, eq=False)
class DraftOutput:
    """Results of the last replay.

    Attributes:
        logits: ``[B, K-1, R]`` float32.
        greedy: the argmax drafts.
    """

    logits: Tensor
    greedy: DraftBlock


class _AfterTarget:
    """A captured pass behind a :class:`TargetGraph`, whose request and length buffers it reads."""

    def __init__(self, tools: GraphTools, target: TargetGraph) -> None:
        assert tools.drafter is not None
        self._tools = tools
        self._drafter = tools.drafter
        self._target = target
        self._accepted, self._bonus = tools.zeros(target.size.batch), tools.zeros(target.size.batch)

    def _fill(self, accepted: Tensor, bonus: Tensor) -> None:
        for buffer, values in ((self._accepted, accepted), (self._bonus, bonus)):
            buffer[: values.shape[0]] = values
            buffer[values.shape[0] :] = 0

    def _layout(self) -> BlockLayout:
        size = self._target.size
        nothing = (0,) * size.batch
        return BlockLayout.uniform(
            self._target.committed, size.width, 0, self._tools.block_size, host_committed=nothing
        )

    def _drafted(self, logits: Tensor) -> DraftOutput:
        return DraftOutput(self._tools.draft_logits.keep(logits), self._drafter.block(logits, None))


class CommitGraph(_AfterTarget):
    """Writes what the drafter keeps of the tokens that a target pass has just committed."""

    def __init__(self, tools: GraphTools, target: TargetGraph) -> None:
        super().__init__(tools, target)
        self._replay = tools.recorder.capture(self._run).replay

    def _run(self) -> None:
        taps = self._target.output.taps
        assert taps is not None
        with torch.no_grad():
            self._drafter.commit_taps(taps, self._layout(), self._accepted)

    def replay(self, accepted: Tensor) -> None:
        """Commit ``accepted [b]`` drafts and the token before them; a padded request's go where nobody reads."""
        self._fill(accepted, accepted)
        self._replay()


class AloneGraph(_AfterTarget):
    """Drafts in a pass of the drafter's own, behind the last accepted row (:meth:`BlockLayout.after`)."""

    def __init__(self, tools: GraphTools, target: TargetGraph) -> None:
        super().__init__(tools, target)
        size = PassSize(target.size.batch, target.size.width, 1)
        self._mask = GraphedRows(self._drafter.attention, tools.rooms, size, tools.block_size, behind=True)
        batch = target.size.batch
        self.plan([1] * batch, torch.zeros(batch, dtype=torch.int32, device=self._bonus.device))
        captured = tools.recorder.capture(self._run)
        self._output, self._replay = captured.output, captured.replay

    def _run(self) -> DraftOutput:
        layout = self._layout()
        slots = self._tools.table[self._target.requests[layout.clean.request], layout.clean_position].long()
        after = layout.after(self._accepted)
        mask = self._drafter.place(after, self._mask.meta(after, slots))
        with torch.no_grad():
            return self._drafted(self._drafter.logits_alone(self._bonus, mask))

    def plan(self, committed: Sequence[int], slots: Tensor) -> None:
        """Plan the next replay.

        Args:
            committed: committed tokens of each real request before the target pass.
            slots: ``[sum(committed)]`` int32, their slots.
        """
        self._mask.plan([*committed, *[0] * (self._target.size.batch - len(committed))], slots)

    def replay(self, accepted: Tensor, bonus: Tensor) -> DraftOutput:
        """Draft for ``accepted [b]`` and ``bonus [b]``."""
        self._fill(accepted, bonus)
        self._replay()
        return self._output


class JoinedGraph(_AfterTarget):
    """Drafts from the mask group of a target pass that hangs from the last accepted row."""

    def __init__(self, tools: GraphTools, target: TargetGraph) -> None:
        super().__init__(tools, target)
        captured = tools.recorder.capture(self._run)
        self._output, self._replay = captured.output, captured.replay

    def _run(self) -> DraftOutput:
        hidden = self._target.output.hidden
        assert hidden is not None
        with torch.no_grad():
            return self._drafted(self._drafter.logits_joined(self._bonus, surviving_group(hidden, self._accepted)))

    def replay(self, accepted: Tensor, bonus: Tensor) -> DraftOutput:
        """Draft for ``accepted [b]`` and ``bonus [b]``."""
        self._fill(accepted, bonus)
        self._replay()
        return self._output


def surviving_group(hidden: Tensor, accepted: Tensor) -> Tensor:
    """Return ``[B, K, H]``: of hidden states ``[B, G, K, H]`` those of the group behind row ``accepted [B]``."""
    index = accepted.view(-1, 1, 1, 1).expand(-1, 1, *hidden.shape[2:])
    return hidden.gather(1, index)[:, 0]
