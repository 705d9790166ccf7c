"""The rows of one target pass: clean rows and mask groups of a whole batch (FlexDraft section 3).

A request with n committed tokens (cache positions ``0 .. n-1``) brings w clean rows at positions ``n .. n+w-1`` (the
bonus token, then the drafts to verify) and g mask groups. Group k hangs from clean row k: it assumes that rows
``0 .. k`` are accepted, so its anchor is the position of row k, and its K mask rows sit at the K positions after it.
The sequential pass is the same thing without clean rows: one group whose anchor is the last committed position.

Rows exist in two orders: *flat* (requests one after another, no gaps, N rows) and *padded* (``[B, width]``). All index
arithmetic between them is here and nowhere else; who sees whom is asked of :mod:`sglang_ext.core.masks` and of nobody
else.

Shape legend: B requests, W most clean rows of a request, G most mask groups of a request, K block size, S clean keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sglang_ext.core.masks import CLEAN, tree_ancestors, visible


@dataclass(frozen=True, eq=False)
class RowMap:
    """Index maps between flat rows ``[N]`` and padded rows ``[B, width]``.

    Attributes:
        counts: ``[B]`` int64, real rows per request.
        width: columns of the padded form.
        total: N, rows of the flat form.
        dense: True if the flat form is the padded one, ``N = B * width``; columns past ``counts`` are then carried
            along and only ``valid`` tells them apart (no data-dependent shape, hence no synchronisation under CUDA).
        ptr: ``[B+1]`` int64, where each request starts in the flat form.
        request: ``[N]`` int64, request of each flat row.
        column: ``[N]`` int64, column of each flat row within its request.
        carried: rows each request takes up in the flat form, known on the host.
    """

    counts: Tensor
    width: int
    total: int
    dense: bool
    ptr: Tensor
    request: Tensor
    column: Tensor
    carried: tuple[int, ...]

    @classmethod
    def ragged(cls, counts: Sequence[int], device: torch.device | str = "cpu") -> RowMap:
        """Build from row counts known on the host."""
        count = torch.tensor(counts, dtype=torch.int64)
        width, total = max(counts, default=0), sum(counts)
        ptr = torch.nn.functional.pad(count.cumsum(0), (1, 0))
        request = torch.arange(len(counts)).repeat_interleave(count, output_size=total)
        column = torch.arange(total) - ptr[request]
        tensors = [tensor.to(device, non_blocking=True) for tensor in (count, ptr, request, column)]
        dense = total == len(counts) * width
        return cls(tensors[0], width, total, dense, tensors[1], tensors[2], tensors[3], tuple(counts))

    @classmethod
    def padded(cls, counts: Tensor, width: int) -> RowMap:
        """Build from row counts on the device: every request carries ``width`` rows, the first ``counts`` real."""
        batch, device = counts.shape[0], counts.device
        flat = torch.arange(batch * width, device=device)
        ptr = torch.arange(batch + 1, device=device) * width
        step = max(width, 1)
        carried = (width,) * batch
        return cls(counts.to(torch.int64), width, batch * width, True, ptr, flat // step, flat % step, carried)

    @property
    def batch(self) -> int:
        """B."""
        return self.counts.shape[0]

    @cached_property
    def valid(self) -> Tensor:
        """``[B, width]`` bool: padded entries that are real rows."""
        return torch.arange(self.width, device=self.counts.device) < self.counts.unsqueeze(-1)

    @cached_property
    def padded_index(self) -> Tensor:
        """``[N]`` int64: where each flat row lies in the padded form, ``request * width + column``."""
        return self.request * self.width + self.column

    @cached_property
    def flat_index(self) -> Tensor:
        """``[B, width]`` int64: flat row of each padded entry; an entry without a row repeats its request's last
        row (or row 0), so that indexing with it is always safe."""
        column = torch.arange(self.width, device=self.counts.device)
        if self.dense:
            return self.ptr[:-1].unsqueeze(-1) + column
        last = (self.counts - 1).unsqueeze(-1)
        return (self.ptr[:-1].unsqueeze(-1) + torch.minimum(column, last)).clamp_min(0)

    def pad(self, flat: Tensor) -> Tensor:
        """``[N, ...] -> [B, width, ...]``; entries without a row are zero."""
        shape = (self.batch, self.width, *flat.shape[1:])
        if self.dense:
            return flat.reshape(shape)
        out = flat.new_zeros((self.batch * self.width, *flat.shape[1:]))
        return out.index_copy_(0, self.padded_index, flat).view(shape)

    def flatten(self, padded: Tensor) -> Tensor:
        """``[B, width, ...] -> [N, ...]``; the inverse of :meth:`pad`."""
        flat = padded.reshape(self.batch * self.width, *padded.shape[2:])
        return flat if self.dense else flat.index_select(0, self.padded_index)


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Clean rows and mask groups of one target pass.

    Build it with :meth:`ragged` (row counts known on the host), :meth:`uniform` (one width for all, counts optionally
    on the device) or :meth:`sequential`.

    Attributes:
        block_size: K, mask rows per group.
        committed: ``[B]`` int64, n: tokens in the cache.
        clean: row map of the clean rows, ``width`` = W.
        groups: row map of the groups, ``width`` = G.
        mask: row map of the mask rows, ``width`` = G * K.
        first_anchor: ``[B]`` int64, anchor of group 0: n when it hangs from clean row 0, n - 1 in a sequential pass.
        parent: ``[B, W]`` int64, clean row each clean row follows, -1 for the first; None for a chain.
        host_committed: ``committed`` as the host knows it, None where only the device does. Kernels that are planned
            on the host need it.
        behind: ``[B]`` int64, clean row that group 0 hangs from (:meth:`after`); None where group k hangs from row k.
    """

    block_size: int
    committed: Tensor
    clean: RowMap
    groups: RowMap
    mask: RowMap
    first_anchor: Tensor
    parent: Tensor | None = None
    host_committed: tuple[int, ...] | None = None
    behind: Tensor | None = None

    @classmethod
    def ragged(
        cls,
        committed: Sequence[int],
        widths: Sequence[int],
        groups: Sequence[int],
        block_size: int,
        *,
        parent: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> BlockLayout:
        """Lay out requests whose row counts are known on the host; nothing is padded in the flat form.

        Args:
            committed: n per request.
            widths: w per request, verify length + 1; 0 for a request that only drafts.
            groups: g per request; at most w where w > 0, at most 1 where w is 0.
            block_size: K.
            parent: ``[B, W]`` int token tree, parents before children; None for a chain.
            device: where the tensors go.

        Raises:
            ValueError: if the sequences differ in length or a request has a group without a row to hang from.
        """
        if not len(committed) == len(widths) == len(groups):
            raise ValueError(
                f"{len(committed)} committed lengths, {len(widths)} widths and {len(groups)} group counts were given; "
                "one of each per request is allowed: pass lists of one length"
            )
        if any(g > max(w, 1) for g, w in zip(groups, widths, strict=True)):
            raise ValueError(
                f"groups {list(groups)} exceed clean rows {list(widths)}; a group hangs from a clean row (or from the "
                "last committed token when there are none): lower the group counts"
            )
        clean = RowMap.ragged(widths, device)
        return cls._build(
            torch.tensor(committed, dtype=torch.int64).to(device, non_blocking=True),
            clean,
            RowMap.ragged(groups, device),
            RowMap.ragged([g * block_size for g in groups], device),
            block_size,
            parent,
            tuple(committed),
        )

    @classmethod
    def uniform(
        cls,
        committed: Tensor,
        width: int,
        groups: int,
        block_size: int,
        *,
        widths: Tensor | None = None,
        group_counts: Tensor | None = None,
        parent: Tensor | None = None,
        host_committed: Sequence[int] | None = None,
    ) -> BlockLayout:
        """Lay out ``width`` clean rows and ``groups`` groups for every request; all shapes are known on the host.

        Args:
            committed: ``[B]`` int, n per request, on any device.
            width: W rows carried per request.
            groups: G groups carried per request; at most ``max(width, 1)``.
            block_size: K.
            widths: ``[B]`` int real rows per request (verify length + 1), None for all W. Rows past it are carried but
                seen by no real row.
            group_counts: ``[B]`` int real groups per request, None for all G (bounded by ``widths`` if given).
            parent: ``[B, W]`` int token tree, None for a chain.
            host_committed: ``committed`` where the host knows it.

        Raises:
            ValueError: if there are more groups than rows to hang from.
        """
        if groups > max(width, 1):
            raise ValueError(
                f"{groups} groups with {width} clean rows; a group hangs from a clean row (or from the last committed "
                "token when there are none): lower the group count"
            )
        committed = committed.to(torch.int64)
        full = torch.full_like(committed, width) if widths is None else widths
        if group_counts is None:
            group_counts = torch.full_like(committed, groups)
            if widths is not None:
                group_counts = torch.minimum(group_counts, widths)
        return cls._build(
            committed,
            RowMap.padded(full, width),
            RowMap.padded(group_counts, groups),
            RowMap.padded(group_counts * block_size, groups * block_size),
            block_size,
            parent,
            None if host_committed is None else tuple(host_committed),
        )

    @classmethod
    def sequential(cls, lengths: Tensor, block_size: int, host_lengths: Sequence[int] | None = None) -> BlockLayout:
        """Lay out the sequential pass: no clean rows, one group after each request's last committed token.

        Args:
            lengths: ``[B]`` int, committed length n after the step's tokens went into the cache, at least 1.
            block_size: K.
            host_lengths: ``lengths`` where the host knows them.
        """
        return cls.uniform(lengths, 0, 1, block_size, host_committed=host_lengths)

    @classmethod
    def _build(
        cls,
        committed: Tensor,
        clean: RowMap,
        groups: RowMap,
        mask: RowMap,
        block_size: int,
        parent: Tensor | None,
        host_committed: tuple[int, ...] | None,
    ) -> BlockLayout:
        first_anchor = torch.where(clean.counts > 0, committed, committed - 1)
        return cls(block_size, committed, clean, groups, mask, first_anchor, parent, host_committed)

    def after(self, accepted: Tensor) -> BlockLayout:
        """Lay out the drafting pass that follows this one: one group per request, behind its last accepted clean row.

        The clean rows are keys of that pass and no queries; a group sees rows ``0 .. accepted``. It is the sequential
        pass over ``committed + accepted + 1`` tokens, said in lengths that the host knew before anything was accepted.

        Args:
            accepted: ``[B]`` int64 accepted drafts, at most the real clean rows less one.

        Raises:
            ValueError: the clean rows form a tree.
        """
        if self.parent is not None:
            raise ValueError("a token tree has no last accepted row by count; lay out a chain")
        one = torch.ones_like(self.committed)
        return replace(
            self,
            groups=RowMap.padded(one, 1),
            mask=RowMap.padded(one * self.block_size, self.block_size),
            first_anchor=self.committed + accepted,
            behind=accepted,
        )

    def without_cache(self) -> BlockLayout:
        """Return the same rows over an empty cache: what is left of the pass once the committed tokens are attended
        elsewhere. Positions count from the first row in flight, and the masks no longer depend on the context."""
        shift = self.committed
        return replace(
            self,
            committed=torch.zeros_like(shift),
            first_anchor=self.first_anchor - shift,
            host_committed=(0,) * self.batch,
        )

    @property
    def batch(self) -> int:
        """B."""
        return self.committed.shape[0]

    @cached_property
    def clean_ptr(self) -> Tensor:
        """``[B+1]`` int64: where each request's clean rows start in the flat form."""
        return self.clean.ptr

    @cached_property
    def clean_parent(self) -> Tensor:
        """``[Nc]`` int64: column of the row each flat clean row follows; -1 for a request's first row."""
        return self.clean.column - 1 if self.parent is None else self.clean.flatten(self.parent)

    @cached_property
    def row_positions(self) -> Tensor:
        """``[B, W]`` int64 position of every padded clean row: n plus its depth in the chain or tree."""
        if self.parent is None:
            depth = torch.arange(self.clean.width, device=self.committed.device)
            return self.committed.unsqueeze(-1) + depth
        return self.committed.unsqueeze(-1) + self.ancestors.sum(-1) - 1

    @cached_property
    def ancestors(self) -> Tensor:
        """``[B, W, W]`` bool, of a token tree."""
        if self.parent is None:
            raise ValueError("a chain has no ancestor matrix; positions already say what it would: use clean_mask")
        return tree_ancestors(self.parent)

    @cached_property
    def clean_position(self) -> Tensor:
        """``[Nc]`` int64: absolute position of each flat clean row."""
        return self.clean.flatten(self.row_positions)

    @cached_property
    def anchors(self) -> Tensor:
        """``[B, G]`` int64: last position group k assumes accepted, that of clean row k; -1 where there is no group."""
        depth = torch.arange(self.groups.width, device=self.committed.device)
        if self.parent is not None and self.clean.width:
            depth = (self.row_positions - self.committed.unsqueeze(-1))[:, : self.groups.width]
        anchor = self.first_anchor.unsqueeze(-1) + depth
        return torch.where(self.groups.valid, anchor, -1)

    @cached_property
    def mask_positions(self) -> Tensor:
        """``[B, G*K]`` int64: positions ``anchor + 1 .. anchor + K`` of each group's rows (``0 .. K-1`` where there is
        no group, so that a rotary table lookup is always in range)."""
        slot = torch.arange(self.block_size, device=self.committed.device)
        return (self.anchors.unsqueeze(-1) + 1 + slot).flatten(1)

    @cached_property
    def mask_groups(self) -> Tensor:
        """``[B, G*K]`` int64: group id of each padded mask row, also where the group is absent."""
        row = torch.arange(self.groups.width * self.block_size, device=self.committed.device)
        return (row // self.block_size).expand(self.batch, -1)

    @cached_property
    def mask_position_flat(self) -> Tensor:
        """``[Nm]`` int64: absolute position of each flat mask row."""
        return self.mask.flatten(self.mask_positions)

    def pad(self, flat: Tensor) -> Tensor:
        """Clean rows ``[Nc, ...] -> [B, W, ...]``, zero where there is no row."""
        return self.clean.pad(flat)

    def flatten(self, padded: Tensor) -> Tensor:
        """Clean rows ``[B, W, ...] -> [Nc, ...]``."""
        return self.clean.flatten(padded)


def _key_positions(layout: BlockLayout, keys: int) -> Tensor:
    """``[B, S]``: position held by each cache slot. Slot s holds position s, except that a token tree's rows in flight
    (slots n .. n+W-1) sit at the position of their depth."""
    slot = torch.arange(keys, device=layout.committed.device).expand(layout.batch, -1)
    if layout.parent is None or layout.clean.width == 0:
        return slot
    row, in_flight = _slot_rows(layout, keys)
    return torch.where(in_flight, layout.row_positions.gather(1, row), slot)


def _slot_rows(layout: BlockLayout, keys: int) -> tuple[Tensor, Tensor]:
    """``[B, S]``: clean row of each cache slot (clamped), and whether the slot holds a row in flight."""
    row = torch.arange(keys, device=layout.committed.device) - layout.committed.unsqueeze(-1)
    in_flight = (row >= 0) & (row < layout.clean.counts.unsqueeze(-1))
    return row.clamp(0, max(layout.clean.width - 1, 0)), in_flight


def _tree_restriction(layout: BlockLayout, query_row: Tensor, keys: int) -> Tensor:
    """``[B, Q, S]`` bool: slots a query hanging from clean row ``query_row [B, Q]`` may see by descent; committed
    slots always, rows in flight only its ancestors and itself."""
    row, in_flight = _slot_rows(layout, keys)
    width = layout.clean.width
    own = layout.ancestors.gather(1, query_row.unsqueeze(-1).expand(-1, -1, width))
    related = own.gather(2, row.unsqueeze(1).expand(-1, query_row.shape[1], -1))
    return related | ~in_flight.unsqueeze(1)


def clean_mask(layout: BlockLayout, keys: int) -> Tensor:
    """Return ``[B, W, S]`` bool: what each padded clean row sees of its request's cache slots ``0 .. S-1``.

    Slots ``0 .. n-1`` hold the committed tokens, slots ``n .. n+w-1`` the clean rows in flight; later slots are seen by
    nobody. Padded rows see what their request's last row sees, so that no softmax is empty.

    Args:
        layout: the pass.
        keys: S, at least the largest ``n + w``.
    """
    last = (layout.clean.counts - 1).clamp_min(0).unsqueeze(-1)
    column = torch.minimum(torch.arange(layout.clean.width, device=layout.committed.device), last)
    anchor = layout.row_positions.gather(1, column)
    group = torch.full_like(anchor, CLEAN)
    key_position = _key_positions(layout, keys)
    seen = visible(anchor, group, key_position, torch.full_like(key_position, CLEAN))
    if layout.parent is not None:
        seen &= _tree_restriction(layout, column, keys)
    return seen


def mask_rows_mask(layout: BlockLayout, keys: int) -> Tensor:
    """Return ``[B, G*K, S + G*K]`` bool: what each padded mask row sees.

    The first S columns are the request's cache slots as in :func:`clean_mask`, the others the mask rows themselves. A
    row of an absent group sees only its own group, so that no softmax is empty and no real row depends on it.

    Args:
        layout: the pass.
        keys: S, at least the largest ``n + w``.
    """
    anchor = layout.anchors.repeat_interleave(layout.block_size, dim=1)
    key_position = _key_positions(layout, keys)
    key_group = torch.full_like(key_position, CLEAN)
    seen = visible(
        anchor,
        layout.mask_groups,
        torch.cat([key_position, layout.mask_positions], dim=1),
        torch.cat([key_group, layout.mask_groups], dim=1),
    )
    if layout.parent is not None and layout.clean.width:
        seen[..., :keys] &= _tree_restriction(layout, layout.mask_groups, keys)
    return seen
