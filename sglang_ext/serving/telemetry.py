"""Carries :class:`StepRecord` objects from the worker to the client, only for requests that asked.

The host slices ``req.customized_info[key]`` by output token, so each step appends exactly as many elements as it
committed tokens: its record first, then ``None``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext.core.config import REQUEST_KEY
from sglang_ext.core.records import StepRecord


@dataclass(frozen=True)
class DeviceRecords:
    """One step's telemetry on the worker's side; tensors are ``[B]`` or ``[B, K-1]`` and owned by this object.

    ``wanted[i]`` says whether request i asked for records; ``modes`` is known on the host. ``step_ms`` is milliseconds.
    """

    wanted: list[bool]
    modes: list[str]
    step_ms: float
    verify_lengths: torch.Tensor
    groups: torch.Tensor
    drafts: torch.Tensor
    confidence: torch.Tensor
    accepted: torch.Tensor
    bonus: torch.Tensor

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> HostRecords:
        """Start the device-to-host copies (host protocol ``DeviceAuxiliaryOutput``)."""
        return HostRecords(
            self,
            copy_tensor(self.verify_lengths),
            copy_tensor(self.groups),
            copy_tensor(self.drafts),
            copy_tensor(self.confidence),
            copy_tensor(self.accepted),
            copy_tensor(self.bonus),
        )


@dataclass(frozen=True)
class HostRecords:
    """The same step after the copy; ``consume`` runs when its tokens have been committed."""

    step: DeviceRecords
    verify_lengths: torch.Tensor
    groups: torch.Tensor
    drafts: torch.Tensor
    confidence: torch.Tensor
    accepted: torch.Tensor
    bonus: torch.Tensor

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Append one record (and padding) to every request that asked and committed tokens."""
        for index, (req, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
            if commit is None or not self.step.wanted[index]:
                continue
            if req.customized_info is None:
                req.customized_info = {}
            elements = req.customized_info.setdefault(REQUEST_KEY, [])
            elements.extend([None] * (commit.output_index - len(elements)))
            elements.append(self._record(index, len(batch.reqs)).to_dict())
            elements.extend([None] * (len(commit.token_ids) - 1))

    def _record(self, index: int, batch_size: int) -> StepRecord:
        verify_length = int(self.verify_lengths[index])
        return StepRecord(
            mode=self.step.modes[index],
            verify_length=verify_length,
            draft_ids=tuple(self.drafts[index, :verify_length].tolist()),
            accepted=int(self.accepted[index]),
            bonus=int(self.bonus[index]),
            groups=int(self.groups[index]),
            confidence=tuple(round(value, 4) for value in self.confidence[index, :verify_length].tolist()),
            step_ms=round(self.step.step_ms, 3),
            batch_size=batch_size,
        )
