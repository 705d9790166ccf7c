"""Attention backends: masks and K/V layouts turned into kernel calls."""
