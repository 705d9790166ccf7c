"""DFlash: one fusion of the target's taps for all drafter layers (arXiv 2602.06036)."""
