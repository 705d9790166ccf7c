"""Passes captured once and replayed: the same code as the eager passes, over buffers that never move."""
