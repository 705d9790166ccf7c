"""Packs everything that check.py needs into one archive for a GPU host without a network.

    python scripts/gpu/make_bundle.py --set kernels --out bundle.tar.xz --wheel DIR
    python scripts/gpu/make_bundle.py --set engine --out bundle.tar.xz --wheel DIR --prebuilt DIR

The host is expected to have torch, triton and transformers, and nvcc unless the kernels are prebuilt. On it:

    tar -xf bundle.tar.xz && PYTHONPATH=$PWD/bundle python bundle/scripts/gpu/check.py --out results

Files are taken from the environment this script runs in. A package with compiled parts is only right there if the host
runs the same Python; otherwise give its wheel for the host's Python with --wheel, which takes precedence. What is
missing is listed with the command that gets it, and the exit status is then 1. docs/gpu.md has the whole sequence.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MIB = 64
TOP = "bundle"
LARGE_SOURCE = 200_000
"""Python files above this are left out unless importing the package loads them: tables of other kernels."""

HOST = ("torch", "triton", "transformers", "accelerate")
"""Distributions a host has, with all they require."""


@dataclass(frozen=True)
class HostBound:
    """A distribution that depends on more of the host than its Python, so it is only ever taken from a wheel."""

    version: str
    why: str


HOST_BOUND = {"sglang-kernel": HostBound("0.4.5", "the one built for torch 2.11; another torch needs another one")}

TOGETHER = frozenset({"pydantic", "pydantic-core", "annotated-types", "typing-inspection", "annotated-doc"})
"""Distributions that go along even where a host's packages seem to require them: their versions must fit each other."""

NOT_NEEDED = frozenset({
    "brotli", "cffi", "cuda-core", "cuda-tile", "cython", "deepseek-recipe", "grpcio",
    "mistral-common", "nvidia-cudnn-frontend", "openai-harmony", "outlines", "outlines-core", "playwright", "pycountry",
    "pycryptodomex", "pyximport", "sgl-deep-ep", "sgl-deep-gemm", "sgl-flash-mla", "soundfile", "torchcodec",
    "watchfiles", "zstandard",
})  # fmt: skip
"""Distributions that are imported where they are installed and done without where they are not."""

SETS = {
    "kernels": ["flashinfer", "tvm_ffi"],
    "engine": ["flashinfer", "tvm_ffi", "sglang", "sglang.srt.entrypoints.engine", "sglang.srt.managers.scheduler",
               "sglang.srt.layers.attention.flashinfer_backend", "sglang.srt.models.qwen3"],
}  # fmt: skip
ON_GPU: dict[str, set[str]] = {"kernels": set(), "engine": {"sglang-kernel"}}
"""Distributions of a set that are only imported where there is a GPU."""
LEFT_OUT = (
    "flashinfer/data/", "flashinfer/experimental/", "flashinfer/moe_ep/", "sglang/multimodal_gen/", "sglang/test/",
    "sglang/benchmark/",
)  # fmt: skip
FLASHINFER_DATA = ("flashinfer/data/include/", "flashinfer/data/cccl/cub/cub/", "flashinfer/data/cccl/thrust/thrust/",
                   "flashinfer/data/cccl/libcudacxx/include/", "flashinfer/data/csrc/batch_prefill",
                   "flashinfer/data/csrc/cascade", "flashinfer/data/csrc/flashinfer_cascade",
                   "flashinfer/data/csrc/tvm_ffi_utils.h",
                   "flashinfer/data/csrc/batch_attention_paged")  # fmt: skip
SOURCES = (".py", ".json", ".cu", ".cuh", ".h", ".hpp", ".jinja", ".toml", ".txt", ".yaml", ".typed")
TAGGED = re.compile(r"\.(cpython|pypy)[^/]*\.so$")
TRACE = """
import importlib, json, sys
for name in {names!r}:
    importlib.import_module(name)
print(json.dumps([[name, module.__file__] for name, module in list(sys.modules.items())
                  if isinstance(getattr(module, "__file__", None), str)]))
"""


@dataclass
class Bundle:
    """Files by their name in the archive.

    Attributes:
        files: archive name -> file here.
        missing: ``NAME==VERSION`` -> why it must come from a wheel and does not.
    """

    files: dict[str, Path] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, file: Path) -> None:
        """Take a file; the first of a name stays."""
        self.files.setdefault(name, file)


def host_distributions(names: Iterable[str] = HOST) -> set[str]:
    """Return the normalised names of distributions a host has: these and everything they require."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = normal(waiting.pop())
        if name in found:
            continue
        found.add(name)
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        waiting += [re.split(r"[^\w.-]", text)[0] for text in required if "extra ==" not in text]
    return found


def normal(name: str) -> str:
    """Return a distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def traced(modules: list[str]) -> dict[str, str]:
    """Import modules in a fresh process and return every module it has loaded: name -> file."""
    run = subprocess.run(
        [sys.executable, "-c", TRACE.format(names=modules)], capture_output=True, text=True, check=True, cwd="/"
    )
    return dict(json.loads(run.stdout.splitlines()[-1]))


def add_project(bundle: Bundle) -> None:
    """Add this package, its entry points and the check."""
    for folder in ("sglang_ext", "scripts/gpu"):
        for file in sorted((ROOT / folder).rglob("*")):
            name = file.relative_to(ROOT).as_posix()
            if file.is_file() and "__pycache__" not in name and not name.startswith("sglang_ext/assets/"):
                bundle.add(name, file)


def revision() -> str:
    """Return the commit this is built from, with a mark if the working tree differs from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    run = subprocess.run(command, capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def metadata_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Write what makes the host find our plugin without an installation."""
    sys.path.insert(0, str(ROOT))
    from sglang_ext import __version__

    info = folder / f"sglang_flexdraft-{__version__}.dist-info"
    info.mkdir()
    (info / "SOURCE").write_text(revision())
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang-flexdraft\nVersion: {__version__}\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nsglang_ext = sglang_ext.plugin:register\n\n"
        "[sglang.srt.platforms]\nsglang_ext_cpu = sglang_ext.plugin:activate_platform\n"
    )
    for file in info.iterdir():
        yield f"{info.name}/{file.name}", file


def add_wheel(bundle: Bundle, wheel: Path, folder: Path) -> str:
    """Add a wheel's files; return the distribution's normalised name."""
    target = folder / wheel.stem
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith("/") and _wanted_of_wheel(name):
                # What a wheel keeps under NAME.data/purelib or platlib belongs beside its packages.
                placed = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", name)
                if ".data/" not in placed.split("/")[0] + "/":
                    bundle.add(placed, Path(archive.extract(name, target)))
    return normal(wheel.name.split("-")[0])


def _wanted_of_wheel(name: str) -> bool:
    """Of the kernel package only what Hopper loads; of every other wheel all but what only builds need."""
    if name.startswith("sgl_kernel/") and name.endswith(".so"):
        return name == "sgl_kernel/sm90/common_ops.abi3.so"
    return not name.endswith((".pyx", ".pyi", ".pxd", ".a"))


def add_distribution(bundle: Bundle, dist: Distribution, loaded: set[str]) -> None:
    """Add an installed distribution's Python files, metadata and libraries that do not depend on the Python version."""
    for entry in dist.files or []:
        name, file = entry.as_posix(), Path(str(entry.locate()))
        if name.startswith("..") or "__pycache__" in name or not file.is_file():
            continue
        if TAGGED.search(name):
            if str(file) in loaded:
                bundle.missing[f"{dist.name}=={dist.version}"] = f"the one for the host's Python (here: {file.name})"
            continue
        if str(file) in loaded or _wanted(name, file):
            bundle.add(name, file)


def _wanted(name: str, file: Path) -> bool:
    if name.startswith(FLASHINFER_DATA):
        return True
    if name.startswith(LEFT_OUT):
        return False
    if ".so" in name.rsplit("/", 1)[-1]:
        return file.stat().st_size < 30_000_000
    if ".dist-info/" in name:  # RECORD is how tvm_ffi finds a package's library
        return name.endswith(("/METADATA", "/RECORD", "/entry_points.txt")) or "licens" in name.lower()
    return name.endswith(SOURCES) and file.stat().st_size <= LARGE_SOURCE


def add_prebuilt(bundle: Bundle, folder: Path) -> None:
    """Add compiled FlashInfer modules where it looks for them before it compiles anything."""
    for library in sorted(folder.rglob("*.so")):
        if library.name.startswith("lib"):
            continue  # compile_kernels.py leaves what it links against beside its modules
        bundle.add(f"flashinfer/data/aot/{library.stem}/{library.name}", library)


def collect(chosen: str, wheels: list[Path], prebuilt: Path | None, scratch: Path, host: Iterable[str] = ()) -> Bundle:
    """Decide which files go into the archive.

    Args:
        chosen: key of SETS.
        wheels: for the host's Python.
        prebuilt: folder with compiled FlashInfer modules.
        scratch: folder for what is unpacked on the way.
        host: distributions the host has besides HOST.
    """
    bundle = Bundle()
    add_project(bundle)
    for name, file in metadata_files(scratch):
        bundle.add(name, file)
    packed = {add_wheel(bundle, wheel, scratch) for wheel in wheels}
    have = packed | (host_distributions() - TOGETHER) | {normal(name) for name in host} | NOT_NEEDED
    if prebuilt is not None:
        add_prebuilt(bundle, prebuilt)
    modules = traced(SETS[chosen])
    loaded = set(modules.values())
    owners = packages_distributions()
    wanted = {normal(owner) for name in modules for owner in owners.get(name.split(".")[0], [])}
    for name in sorted((wanted | ON_GPU[chosen]) - have - {"sglang-flexdraft"}):
        dist = distribution(name)
        if name in HOST_BOUND:
            bundle.missing[f"{dist.name}=={HOST_BOUND[name].version}"] = HOST_BOUND[name].why
        else:
            add_distribution(bundle, dist, loaded)
    return bundle


def write(bundle: Bundle, out: Path, preset: int) -> float:
    """Write the archive and return its size in MiB."""
    with tarfile.open(out, "w:xz", preset=preset) as archive:
        for name in sorted(bundle.files, key=lambda name: (Path(name).suffix, name)):  # alike beside alike packs better
            archive.add(bundle.files[name].resolve(), f"{TOP}/{name}", recursive=False)
    return out.stat().st_size / 2**20


def largest(bundle: Bundle, count: int = 8) -> list[str]:
    """Name the packages with the most bytes, before compression."""
    sizes: dict[str, int] = {}
    for name, file in bundle.files.items():
        top = name.split("/")[0]
        sizes[top] = sizes.get(top, 0) + file.stat().st_size
    ranked = sorted(sizes.items(), key=lambda entry: -entry[1])[:count]
    return [f"{name} {size / 2**20:.1f}" for name, size in ranked]


def wheels_in(paths: list[Path]) -> list[Path]:
    """Return the wheels named, and those of the folders named.

    Raises:
        SystemExit: a path has no wheel.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.whl")) if path.is_dir() else [path] if path.suffix == ".whl" else []
        if not inside or not all(wheel.exists() for wheel in inside):
            raise SystemExit(f"--wheel {path}: not a wheel, nor a folder with wheels; get them with `pip download`")
        found += inside
    return found


def download_command(missing: Iterable[str]) -> str:
    """Say how to get wheels for Python 3.12 on x86-64 Linux; pip takes the platforms literally."""
    platforms = [f"--platform manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 26, 24, 17)]
    platforms += [f"--platform manylinux{year}_x86_64" for year in (2014, 1)]
    return (
        "pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "
        + " ".join(platforms) + " -d wheels " + " ".join(sorted(missing))
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Build the archive; the exit status is 1 if it lacks something or is too large."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--set", choices=SETS, default="kernels", help="what to run on the host (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="archive to write (.tar.xz)")
    parser.add_argument(
        "--wheel", type=Path, action="append", default=[], help="wheel for the host, or a folder of them (repeatable)"
    )
    parser.add_argument("--prebuilt", type=Path, help="folder with compiled FlashInfer modules (*.so)")
    parser.add_argument(
        "--host-has", nargs="+", default=[], metavar="NAME", help=f"distributions on the host beside {', '.join(HOST)}"
    )
    parser.add_argument("--preset", type=int, default=6, help="0 (fast) to 9 (small) (default: %(default)s)")
    args = parser.parse_args(arguments)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        bundle = collect(args.set, wheels_in(args.wheel), args.prebuilt, Path(scratch), args.host_has)
        size = write(bundle, args.out, args.preset)
        print(f"{args.out}: {len(bundle.files)} files, {size:.1f} MiB (limit {LIMIT_MIB})")
        if size > LIMIT_MIB:
            print("too large; most of it, in MiB before compression:", *largest(bundle), sep="\n  ")
    for name, why in bundle.missing.items():
        print(f"missing: {name} as a wheel, {why}")
    if bundle.missing:
        print("give them with --wheel wheels, after:", download_command(bundle.missing), sep="\n  ")
    return 1 if bundle.missing or size > LIMIT_MIB else 0


if __name__ == "__main__":
    sys.exit(main())
