"""The user's cache: where prepared targets lie, written whole or not at all, checked by checksums."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.files import json_bytes, read_json_object

MANIFEST = "MANIFEST.json"
_CHUNK = 1 << 20


def root() -> Path:
    """Return ``$XDG_CACHE_HOME/sglang_ext``, or ``~/.cache/sglang_ext``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sglang_ext"


def say(message: str) -> None:
    """Report progress on stderr, so that stdout carries only results."""
    print(message, file=sys.stderr, flush=True)


def sha256(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def size_of(folder: Path) -> int:
    """Return the bytes of all files under ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def same_files(left: Path, right: Path) -> bool:
    """Return whether two folders hold the same files, byte for byte."""
    names = [{path.relative_to(side) for path in side.rglob("*") if path.is_file()} for side in (left, right)]
    return names[0] == names[1] and all(sha256(left / name) == sha256(right / name) for name in names[0])


def write_manifest(folder: Path, source: Mapping[str, Any]) -> None:
    """Record where a folder came from and the checksum of each of its files."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    (folder / MANIFEST).write_bytes(json_bytes({"source": dict(source), "files": files}))


def damage(folder: Path, source: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a folder that should hold ``source`` as its manifest says, or None if nothing is."""
    if not (folder / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        manifest = read_json_object(folder / MANIFEST)
    except Refusal as refusal:
        return refusal.given
    files = manifest.get("files")
    if manifest.get("source") != dict(source) or not isinstance(files, dict) or not files:
        return "it was built from another source"
    for name, entry in files.items():
        path = folder / name
        if not isinstance(entry, dict) or not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry.get("bytes") or sha256(path) != entry.get("sha256"):
            return f"{name} is not what was written"
    return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` (a file in the cache): of two processes preparing the same target, one waits."""
    locks = root() / "locks"
    with readable_errors(locks):
        locks.mkdir(parents=True, exist_ok=True)
        stream = (locks / hashlib.sha256(str(folder).encode()).hexdigest()[:16]).open("w")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is preparing {folder}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def staged(out: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder that takes the name ``out`` when the block ends well, and disappears when it does not.

    Leftovers of a killed run are removed first. ``out`` must not exist, or be the damaged folder to be replaced.

    Raises:
        Refusal: if the disk has fewer than ``needed_bytes`` free, or a write fails.
    """
    prefix = f".{out.name}.building-"
    with readable_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        for leftover in out.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover)
        refuse_full_disk(out.parent, needed_bytes)
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    try:
        with readable_errors(out):
            yield staging
            staging.chmod(0o755)
            if out.exists():
                shutil.rmtree(out)
            staging.rename(out)
    finally:
        if staging.exists():
            shutil.rmtree(staging)


def refuse_full_disk(folder: Path, needed_bytes: int) -> None:
    """Raise Refusal if the disk of ``folder`` has fewer than ``needed_bytes`` free."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise Refusal(
            f"{folder} has {free / 1e6:,.0f} MB free",
            f"{needed_bytes / 1e6:,.0f} MB are needed",
            "free some space, or name another disk with --output or XDG_CACHE_HOME",
        )


@contextlib.contextmanager
def readable_errors(where: Path) -> Iterator[None]:
    """Turn an operating-system error (disk full, no permission) into one line that names the folder and the fix."""
    try:
        yield
    except OSError as error:
        raise Refusal(
            f"writing {where} failed ({error.strerror or error})",
            "the folder must be writable with enough free space",
            "free some space, or name another folder with --output or XDG_CACHE_HOME",
        ) from error
