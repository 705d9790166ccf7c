"""Reading and writing small files so that every failure names the file and says what to do."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_ext.core.refusal import Refusal


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object stored in ``path``.

    Raises:
        Refusal: if the file is missing, unreadable, not JSON, or holds something other than an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Refusal(f"{path} does not exist", "a model folder holds that file", "check the folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{path} cannot be read ({error})", "it must be a UTF-8 text file", "copy it again") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}: {error.msg}"
        raise Refusal(f"{path} is not valid JSON ({where})", "it must hold one JSON object", "copy it again") from error
    except (ValueError, RecursionError) as error:  # numbers and nesting beyond what Python reads
        raise Refusal(f"{path} is not valid JSON ({error})", "it must hold one JSON object", "copy it again") from error
    if not isinstance(value, dict):
        raise Refusal(f"{path} holds a JSON {type(value).__name__}", "it must hold one JSON object", "copy it again")
    return value


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return the one serialised form this project writes: sorted keys, two-space indent, final newline."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode("utf-8")


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` so that ``path`` is either the old file or the whole new one, never a part of it.

    Raises:
        Refusal: if the folder cannot be written or the disk is full.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise Refusal(
            f"{path} cannot be written ({error.strerror})",
            f"{len(data):,} bytes are needed there",
            "free some space or choose another folder",
        ) from error
