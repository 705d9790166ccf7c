"""The DFlare drafter: every layer weighs the taps for itself (DFlare section 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang_ext.models.tapped.model import TappedModel
from sglang_ext.models.target import rms_norm

#: Initial weight, before the softmax, of the tap at a layer's own relative depth; the others start at 0.
OWN_TAP = 2.0


class DFlareModel(TappedModel):
    """A drafter with ``layer_fusion_weights [D, T]``."""

    def _add_fusion(self) -> None:
        weights = torch.zeros(self.config.num_layers, len(self.config.target_layer_ids))
        weights[torch.arange(len(weights)), torch.tensor(self.layer_taps)] = OWN_TAP
        self.layer_fusion_weights = nn.Parameter(weights)

    def fuse(self, taps: Tensor) -> Tensor:
        """Return ``[D, ..., H]``: hidden_norm(sum over t of softmax(w)[d, t] * tap t), mixed and normed in fp32.

        The norm is one and the same for all layers and follows the sum. Magnitudes of the taps span orders of
        magnitude, hence the precision.
        """
        shares = self.layer_fusion_weights.softmax(dim=1)
        mixed = torch.einsum("...th,dt->d...h", taps.float(), shares)
        return rms_norm(mixed, self.hidden_norm.weight, self.config.rms_norm_eps).to(self.target.dtype)
