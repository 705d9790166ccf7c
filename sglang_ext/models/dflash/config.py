"""The typed form of a DFlash drafter's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.models.tapped.config import TappedConfig

FUSION_MATRIX = "fc.weight"


@dataclass(frozen=True)
class DFlashConfig(TappedConfig):
    """Sizes of a DFlash drafter: one matrix ``fc [H, T * H]`` and the block's own projections (DFlash section 4)."""

    METHOD = "dflash"
    TITLE = "DFlash"
    ARCHITECTURE = "DFlashDraftModel"
    SEPARATE_PROJECTIONS = False

    def fusion_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the fusion matrix, ``[H, T * H]``."""
        return {FUSION_MATRIX: (self.hidden_size, len(self.target_layer_ids) * self.hidden_size)}
