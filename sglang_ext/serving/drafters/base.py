"""The drafter interface: what the worker calls, and the block of drafts that comes back.

Shape legend: B requests, K block size, V vocabulary, H hidden, M stored width of a truncated draft distribution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.core.sampling import SamplingParams
from sglang_ext.serving.taps import Taps
from sglang_ext.serving.verify_input import MaskRows


class DraftBlock(NamedTuple):
    """Drafts for the K - 1 positions after the bonus token.

    Attributes:
        tokens: ``[B, K-1]`` int64 draft ids; an id outside the vocabulary is never accepted.
        confidence: ``[B, K-1]`` float32 in [0, 1]; a NaN ends selective verification there.
        q_ids, q_probs: ``[B, K-1, M]`` support and probabilities of the distribution each draft was drawn from, or
            ``None`` when drafts are argmaxes.
    """

    tokens: Tensor
    confidence: Tensor
    q_ids: Tensor | None = None
    q_probs: Tensor | None = None


@dataclass(frozen=True)
class Context:
    """What a drafter may know about the requests it drafts for; all tensors are ``[B]``.

    Attributes:
        longest: an upper bound on ``lengths``, known on the host.
        slots: request slots (``req_pool_indices``).
        lengths: committed tokens in the target's cache; the bonus token sits at this position.
        bonus: the committed token that is not yet in the cache.
        reqs: the host's request objects, in the same order.
        sampling: how each request samples; ``None`` when drafts are argmaxes.
        host_lengths: ``lengths`` as the host knows them, for kernels that are planned on the host.
        layout: rows of the drafting pass where the host does not know ``lengths`` yet (:meth:`BlockLayout.after`).
    """

    slots: Tensor
    lengths: Tensor
    bonus: Tensor
    reqs: list[Any]
    longest: int
    sampling: SamplingParams | None = None
    host_lengths: list[int] | None = None
    layout: BlockLayout | None = None

    def block_layout(self, block_size: int) -> BlockLayout:
        """Return the rows of a pass that drafts one block per request."""
        if self.layout is not None:
            return self.layout
        return BlockLayout.sequential(self.lengths, block_size, self.host_lengths)

    def select(self, rows: Tensor, rows_list: list[int]) -> Context:
        """Return the context of a subset of the requests.

        Raises:
            ValueError: the context has a layout of its own, which is of the whole batch.
        """
        if self.layout is not None:
            raise ValueError("the rows of this pass are laid out for the whole batch; draft for all of it")
        return Context(
            slots=self.slots[rows],
            lengths=self.lengths[rows],
            bonus=self.bonus[rows],
            reqs=[self.reqs[i] for i in rows_list],
            longest=self.longest,
            sampling=None if self.sampling is None else self.sampling.rows(rows),
            host_lengths=None if self.host_lengths is None else [self.host_lengths[i] for i in rows_list],
        )


class Drafter(ABC):
    """Makes drafts. Holds no request state: the worker keeps every block until it is verified."""

    #: Whether this drafter can add mask rows to the target pass (parallel mode).
    can_join: bool = False

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of weights this drafter holds beside the target's."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of drafter keys and values that every token of the target's pool costs; 0 without a pool."""
        return 0

    def allocate(self, slots: int) -> None:  # noqa: B027
        """Allocate what is kept per token; the target's pool has just got ``slots`` slots."""

    def observe_prefill(self) -> None:  # noqa: B027
        """Look at the target pass that has just read prompt tokens; all its rows are committed."""

    def take_taps(self) -> Taps | None:
        """Return what the drafter wants to know of the target pass that has just run; None if nothing."""
        return None

    def commit_taps(self, taps: Taps, layout: BlockLayout, accepted: Tensor) -> None:  # noqa: B027
        """Look at the taps of a pass that verified drafts.

        Args:
            taps: of its clean rows.
            layout: rows of the pass.
            accepted: ``[B]`` accepted drafts; clean rows ``0 .. accepted`` of a request are committed.
        """

    def observe_commit(self, layout: BlockLayout, accepted: Tensor) -> None:
        """Look at the target pass that has just verified drafts; arguments as :meth:`commit_taps`."""
        taps = self.take_taps()
        if taps is not None:
            self.commit_taps(taps, layout, accepted)

    @abstractmethod
    def propose(self, context: Context) -> DraftBlock:
        """Draft after ``context.lengths`` committed tokens in a pass of the drafter's own (sequential mode)."""

    def propose_joined(self, context: Context, mask_hidden: Tensor) -> DraftBlock:
        """Draft from ``mask_hidden [B, K, H]``, the final hidden states of the chosen group's rows (parallel mode)."""
        raise NotImplementedError(f"{type(self).__name__} never joins the target pass")


class LogitsDrafter(Drafter):
    """A drafter whose passes can be captured: logits by tensor operations alone, drafts from logits."""

    @property
    @abstractmethod
    def attention(self) -> Any:
        """The :class:`~..attention.mask_rows.MaskAttention` of its mask rows."""

    @abstractmethod
    def place(self, layout: BlockLayout, meta: Any) -> MaskRows:
        """Return the mask rows of ``layout``, attended as ``meta`` says."""

    @abstractmethod
    def logits_alone(self, bonus: Tensor, mask: MaskRows) -> Tensor:
        """Return float32 draft logits ``[B, K-1, R]`` of one group per request, in a pass of the drafter's own."""

    def logits_joined(self, bonus: Tensor, mask_hidden: Tensor) -> Tensor:
        """Return float32 draft logits ``[B, K-1, R]`` from hidden states ``[B, K, H]`` of groups that rode along."""
        raise NotImplementedError(f"{type(self).__name__} never joins the target pass")

    @abstractmethod
    def block(self, logits: Tensor, context: Context | None) -> DraftBlock:
        """Return drafts from ``logits``; argmaxes where ``context`` is None or says that requests are greedy."""
