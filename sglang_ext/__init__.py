"""Block-diffusion speculative decoders (FlexDraft, DFlare) for unmodified SGLang.

Importing this package is cheap: no torch, no CUDA, no SGLang.
"""

__version__ = "0.1.0"
