"""Scripted drafters behind the ordinary drafter interface (see ``sglang_ext.testing.scripts``)."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.serving.drafters.base import Context, DraftBlock, Drafter
from sglang_ext.serving.requests import request_options
from sglang_ext.testing.scripts import TRANSCRIPT_KEY, draft

DEFAULT_SCRIPT = "noise"


class ScriptedDrafter(Drafter):
    """Drafts by the script each request names; requests that name none get random ids."""

    def __init__(self, block_size: int, vocabulary: int, device: torch.device | str) -> None:
        self._width = block_size - 1
        self._vocabulary = vocabulary
        self._device = device

    @property
    def weight_bytes(self) -> int:
        """No weights."""
        return 0

    def propose(self, context: Context) -> DraftBlock:
        """Draft what each request's script says at its position."""
        rows = [self._draft(req, length) for req, length in zip(context.reqs, context.lengths.tolist(), strict=True)]
        tokens = torch.tensor([tokens for tokens, _ in rows], dtype=torch.int64, device=self._device)
        confidence = torch.tensor([confidence for _, confidence in rows], dtype=torch.float32, device=self._device)
        return DraftBlock(tokens, confidence)

    def _draft(self, req: Any, length: int) -> tuple[list[int], list[float]]:
        params = req.sampling_params.custom_params or {}
        stops = req.sampling_params.stop_token_ids or req.eos_token_ids
        # The bonus token sits at position `length`; drafts follow it.
        start = length - len(req.origin_input_ids) + 1
        return draft(
            request_options(req).script or DEFAULT_SCRIPT,
            transcript=params.get(TRANSCRIPT_KEY) or [],
            start=start,
            width=self._width,
            vocabulary=self._vocabulary,
            eos=min(stops) if stops else 0,
        )
