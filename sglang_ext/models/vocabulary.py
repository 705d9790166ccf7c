"""A fingerprint of a tokenizer's vocabulary: two targets with the same one can share a drafter's token ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.files import read_json_object


def vocabulary_digest(tokenizer_dir: str | Path) -> str:
    """Return the sha256, in hex, of the sorted (token, id) pairs of ``tokenizer.json``, added tokens included.

    The file is read as JSON: no tokenizer library is loaded. Merges, normalisers and chat templates do not count.

    Raises:
        Refusal: if the file is missing, malformed, or gives one token two ids.
    """
    path = Path(tokenizer_dir) / "tokenizer.json"
    content = read_json_object(path)
    ids: dict[str, int] = {}
    for token, token_id in _model_pairs(content, path) + _added_pairs(content, path):
        if ids.setdefault(token, token_id) != token_id:
            raise Refusal(
                f"{path} gives token {token!r} the ids {ids[token]} and {token_id}",
                "a token has one id",
                "copy the tokenizer again",
            )
    pairs = json.dumps(sorted(ids.items()), ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(pairs.encode("ascii")).hexdigest()


def _model_pairs(content: dict[str, Any], path: Path) -> list[tuple[str, int]]:
    """Vocabulary of the tokenizer model: an object token -> id, or (Unigram) a list of [token, score] in id order."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict) and all(isinstance(value, int) for value in vocabulary.values()):
        return list(vocabulary.items())
    if isinstance(vocabulary, list) and all(isinstance(entry, list) and entry for entry in vocabulary):
        return [(str(entry[0]), index) for index, entry in enumerate(vocabulary)]
    raise Refusal(f"{path} has no readable model.vocab", "it maps tokens to ids", "copy the tokenizer again")


def _added_pairs(content: dict[str, Any], path: Path) -> list[tuple[str, int]]:
    """Tokens added beside the model's vocabulary (chat markers and the like)."""
    try:
        return [(str(token["content"]), int(token["id"])) for token in content.get("added_tokens") or []]
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(
            f"{path} has a malformed added_tokens entry ({error!r})",
            "each has content and id",
            "copy the tokenizer again",
        ) from error
