"""The fused pieces beside their torch twins, over one step's numbers.

Shape legend: B requests, W clean rows, G groups, K block size, R tokens that can be proposed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglang_ext.core.accept import Accepted
from sglang_ext.core.block import BlockLayout
from sglang_ext.core.mask_bits import Rows, fill_bits
from sglang_ext.kernels.draft_choice import draft_choice, draft_choice_fused
from sglang_ext.kernels.greedy_accept import greedy_accept, greedy_accept_fused
from sglang_ext.kernels.mask_bytes import MaskSizes, pack_fused
from sglang_ext.kernels.pool_slots import (
    PackedRows,
    Places,
    inline_places,
    inline_places_fused,
    packed_slots,
    packed_slots_fused,
)

Call = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Size:
    """How large a step is.

    Attributes:
        batch: B.
        context: most committed tokens of a request.
        width: W, and G.
        block: K.
        proposable: R.
    """

    batch: int
    context: int
    width: int
    block: int
    proposable: int


@dataclass(frozen=True)
class Piece:
    """One step in two ways; what is sent to the device beforehand is sent once for both."""

    name: str
    twin: Call
    fused: Call


def make_pieces(size: Size, device: str, seed: int, ragged: bool = True) -> list[Piece]:
    """Return every piece over random numbers.

    Args:
        size: of the step.
        device: of every tensor.
        seed: of the numbers.
        ragged: row counts differ, and the host knows them; else all requests carry the same rows and the device alone
            knows how many are real.
    """
    random = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int) -> list[int]:
        return torch.randint(low, high + 1, (size.batch,), generator=random).tolist()

    committed = numbers(size.context // 2, size.context)
    widths = numbers(1, size.width) if ragged else [size.width] * size.batch
    real = torch.tensor(widths if ragged else numbers(1, size.width))
    if ragged:
        layout = BlockLayout.ragged(committed, widths, widths, size.block, device=device)
    else:
        layout = BlockLayout.uniform(
            torch.tensor(committed).to(device), size.width, size.width, size.block, widths=real.to(device),
            host_committed=committed,
        )  # fmt: skip
    return [
        *_slots(layout, committed, device, random),
        _mask("mask over everything", layout),
        _mask("mask over rows in flight", layout.without_cache()),
        _accept(layout, real, device, random),
        _choice(size, device, random, listed=ragged),
    ]


def _slots(layout: BlockLayout, committed: list[int], device: str, random: torch.Generator) -> list[Piece]:
    lengths = [n + w for n, w in zip(committed, layout.clean.carried)]
    shape = (layout.batch + 2, max(lengths) + 7)
    table = torch.randint(0, 1 << 20, shape, dtype=torch.int32, generator=random).to(device)
    requests = (torch.randperm(shape[0], generator=random)[: layout.batch]).to(device)
    all_rows = PackedRows.of(committed, None, device)
    inline = PackedRows.of(layout.clean.carried, layout.mask.carried, device)

    def parts(places: Places) -> tuple[Tensor, ...]:
        return places.slots, places.pooled_at, places.own_at

    return [
        Piece(
            "slots of committed tokens",
            lambda: (packed_slots(table, requests, None, all_rows),),
            lambda: (packed_slots_fused(table, requests, None, all_rows),),
        ),
        Piece(
            "places of rows in flight",
            lambda: parts(inline_places(table, requests, layout.committed, inline)),
            lambda: parts(inline_places_fused(table, requests, layout.committed, inline)),
        ),
    ]


def _mask(name: str, layout: BlockLayout) -> Piece:
    sizes = MaskSizes.of(layout, Rows.MASK)
    lengths = sizes.sent[1:3, :-1].to(torch.int64)

    def twin() -> tuple[Tensor, ...]:
        bits = torch.empty(sizes.byte_ptr[-1], dtype=torch.uint8, device=lengths.device)
        # A step's layout is new, and what it computes on demand is part of the step.
        fill_bits(replace(layout), Rows.MASK, bits, sizes.sent[0], lengths)
        return (bits,)

    return Piece(name, twin, lambda: (pack_fused(layout, sizes).bits,))


def _accept(layout: BlockLayout, real: Tensor, device: str, random: torch.Generator) -> Piece:
    clean = layout.clean
    choices = torch.randint(0, 3, (clean.total,), generator=random).to(device)
    noise = torch.randint(0, 3, (clean.batch, clean.width), generator=random).to(device)
    keep = torch.rand(noise.shape, generator=random).to(device) < 0.8
    drafts = torch.where(keep, clean.pad(choices), noise)[:, : clean.width - 1]
    valid = (real - 1).to(device)

    def parts(found: Accepted) -> tuple[Tensor, ...]:
        return found.lengths, found.bonus, found.tokens

    return Piece(
        "greedy acceptance",
        lambda: parts(greedy_accept(choices, clean, drafts, valid)),
        lambda: parts(greedy_accept_fused(choices, clean, drafts, valid)),
    )


def _choice(size: Size, device: str, random: torch.Generator, listed: bool) -> Piece:
    shape = (size.batch, max(size.block - 1, 1), size.proposable)
    on_device = torch.Generator(device=device).manual_seed(int(torch.randint(1 << 30, (1,), generator=random)))
    logits = torch.randn(shape, generator=on_device, device=device) * 3
    if size.batch > 1:  # one row overflows
        logits[-1, 0, size.proposable // 2] = float("nan")
    ids = torch.randperm(size.proposable, generator=random).to(device) if listed else None
    return Piece("draft choice", lambda: draft_choice(logits, ids), lambda: draft_choice_fused(logits, ids))
