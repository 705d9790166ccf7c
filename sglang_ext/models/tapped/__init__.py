"""Drafters of their own layers that read taps of the target: what DFlare and DFlash have in common."""
