"""How a block of drafts comes about: one small interface (``base``), one file per drafter."""
