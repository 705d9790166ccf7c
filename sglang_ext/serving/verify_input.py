"""The verify input: which rows of a target pass belong to which request, and the mask rows that ride along."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor

from sglang_ext.core.block import BlockLayout
from sglang_ext.serving.pass_size import PassSize


@dataclass
class MaskRows:
    """Mask rows of one pass.

    Attributes:
        positions: ``[N]`` absolute position of every row (RoPE), N = B * G * K.
        meta: who sees whom, built once and used by every deep layer.
        hidden: ``[N, H]`` final hidden states, written by the walk.
    """

    positions: Tensor
    meta: Any
    hidden: Tensor | None = None


@dataclass
class ChainVerifyInput(DFlashVerifyInput):
    """A chain of ``1 + v_i`` clean rows per request, flat and possibly ragged.

    ``verify_lens_cpu[i]`` is request i's row count; the inherited ``draft_token_num`` is the largest of them.
    ``mask`` is set when mask groups join the pass at the split layer (parallel mode); ``layout`` is what both come
    from. ``captured`` is the size of the captured pass that was replayed, None for an eager one.
    """

    verify_lens_cpu: list[int] = field(default_factory=list)
    layout: BlockLayout | None = None
    mask: MaskRows | None = None
    captured: PassSize | None = None
