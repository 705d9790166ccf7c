"""DFlare: every drafter layer weighs the target's taps for itself (arXiv 2606.02091)."""
