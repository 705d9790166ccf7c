"""The DFlash drafter: one matrix fuses the taps for all layers (DFlash section 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_ext.models.tapped.model import TappedModel
from sglang_ext.models.target import rms_norm


class DFlashModel(TappedModel):
    """A drafter with ``fc [H, T * H]``, which starts as the mean of the taps."""

    def _add_fusion(self) -> None:
        count, width = len(self.config.target_layer_ids), self.config.hidden_size
        self.fc = nn.Linear(count * width, width, bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(width).repeat(1, count) / count)

    def fuse(self, taps: Tensor) -> Tensor:
        """Return ``[D, ..., H]``, the same for every layer: hidden_norm(fc(concatenated taps))."""
        dtype = self.target.dtype
        shared = F.linear(taps.to(dtype).flatten(-2), self.fc.weight.to(dtype))
        normed = rms_norm(shared, self.hidden_norm.weight.to(dtype), self.config.rms_norm_eps)
        return normed.expand(self.config.num_layers, *normed.shape)
