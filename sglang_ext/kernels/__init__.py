"""Small steps of a pass as one launch each, every one beside its torch twin.

The twins are what runs. A fused piece is a candidate until a GPU has shown that it matters (``scripts/gpu``, part
``pieces``). Nothing outside this room imports Triton, and everything in it imports where Triton is missing.
"""
