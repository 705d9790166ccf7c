"""The typed form of a DFlare drafter's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.models.tapped.config import TappedConfig

FUSION_WEIGHTS = "layer_fusion_weights"


@dataclass(frozen=True)
class DFlareConfig(TappedConfig):
    """Sizes of a DFlare drafter: fusion weights ``[D, T]``, separate projections for context (DFlare section 3)."""

    METHOD = "dflare"
    TITLE = "DFlare"
    ARCHITECTURE = "QwenDFlareDraftModel"
    SEPARATE_PROJECTIONS = True

    def fusion_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the fusion weights, ``[D, T]``."""
        return {FUSION_WEIGHTS: (self.num_layers, len(self.target_layer_ids))}
