"""Fused pieces against their torch twins, and the time of both inside a CUDA graph.

A dry run compares them on the CPU: ``check.py`` starts it with Triton's interpreter.
"""

from __future__ import annotations

import torch
from pieces import Piece, Size, make_pieces
from replay import replay_time
from setting import Rows, Setting

#: Confidences may differ by the twin's rounding, relative to 1; everything else must be equal.
CONFIDENCE = 5e-4


def run(setting: Setting, rows: Rows) -> None:
    """Compare all pieces, then time them."""
    sizes = [Size(batch, 4096, 16, 16, 151_936) for batch in (1, 4, 16)]
    if setting.dry:
        sizes = [Size(1, 30, 3, 4, 300), Size(2, 30, 3, 4, 300)]
    for size in sizes:
        for seed, ragged in ((0, True), (1, False)) if setting.dry else ((0, True), (1, False), (2, True)):
            for piece in make_pieces(size, setting.device, seed, ragged):
                _compare(rows, size, piece, "ragged" if ragged else "padded")
    if setting.dry:
        return
    for size in sizes:
        for piece in make_pieces(size, setting.device, 0, ragged=False):
            row = {"piece": piece.name, "batch": size.batch}
            try:
                rows.add(**row, twin_us=replay_time(piece.twin), fused_us=replay_time(piece.fused), ok=True)
            except Exception as problem:  # one piece that cannot be captured must not hide the others
                rows.add(**row, ok=False, error=f"{type(problem).__name__}: {problem}"[:300])


def _compare(rows: Rows, size: Size, piece: Piece, layout: str) -> None:
    row = {"piece": piece.name, "batch": size.batch, "layout": layout}
    try:
        error, equal = 0.0, True
        for expected, found in zip(piece.twin(), piece.fused(), strict=True):
            equal = equal and expected.dtype == found.dtype and expected.shape == found.shape
            if expected.dtype.is_floating_point:
                error = float((expected - found).abs().max())
            else:
                equal = equal and torch.equal(expected, found)
        rows.add(**row, ok=equal and error <= CONFIDENCE, max_error=error)
    except Exception as problem:  # whatever it is, the other pieces are still compared
        rows.add(**row, ok=False, error=f"{type(problem).__name__}: {problem}"[:300])
