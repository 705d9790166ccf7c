"""What ``sglang-ext inspect`` shows of a target."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_ext.models.files import read_json_object
from sglang_ext.models.vocabulary import vocabulary_digest
from sglang_ext.targets import cache, folder


def describe_target(path: Path) -> dict[str, Any]:
    """Check a target's folder and return its facts as plain JSON values, the drafter shipped for it among them.

    Raises:
        Refusal: if the folder is incomplete or the family unsupported.
    """
    from sglang_ext.models.shipped import find_shipped

    shape = folder.check(path)
    facts: dict[str, Any] = {"kind": "target", "path": str(path)}
    facts.update(asdict(shape))
    has_tokenizer_json = (path / "tokenizer.json").is_file()
    facts["vocabulary_digest"] = vocabulary_digest(path) if has_tokenizer_json else None
    facts["weight_bytes"] = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if (path / cache.MANIFEST).is_file():
        facts["built_from"] = read_json_object(path / cache.MANIFEST).get("source")
    shipped = find_shipped(path)
    facts["shipped_drafter"] = str(shipped) if shipped is not None else None
    return facts
