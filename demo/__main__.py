"""``python -m demo``: the same as ``sglang-ext demo``."""

from __future__ import annotations

import sys

from sglang_ext.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
