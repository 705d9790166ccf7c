"""Compiles FlashInfer's kernels for the variants this package plans, on any machine with nvcc; no GPU is needed.

    python scripts/gpu/compile_kernels.py --out build             # one file per variant and mask mode: do they compile?
    python scripts/gpu/compile_kernels.py --out build --modules   # whole modules, for make_bundle.py --prebuilt build

A module takes minutes on one core; a single file about twenty seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

#: Name -> head size, query type, pool type. Together with fp16 these are all that start-up lets through.
VARIANTS = {
    "bf16-64": (64, "bfloat16", "bfloat16"),
    "bf16-128": (128, "bfloat16", "bfloat16"),
    "fp16-128": (128, "float16", "float16"),
    "bf16-fp8-64": (64, "bfloat16", "float8_e4m3fn"),
    "bf16-fp8-128": (128, "bfloat16", "float8_e4m3fn"),
}
#: What each call is compiled from: committed tokens (0), chains (1) and trees (2) over pages; rows in flight (0, 2).
UNITS = ("paged_kernel_mask_0", "paged_kernel_mask_1", "paged_kernel_mask_2", "ragged_kernel_mask_0",
         "ragged_kernel_mask_2")  # fmt: skip


def find_cuda() -> Path:
    """Return a toolkit folder: CUDA_HOME, the system's, or the one installed as Python packages.

    Raises:
        SystemExit: there is no nvcc.
    """
    packages = Path(sysconfig.get_paths()["purelib"])
    candidates = [Path(os.environ["CUDA_HOME"])] if "CUDA_HOME" in os.environ else []
    candidates += [*sorted(Path("/usr/local").glob("cuda*"), reverse=True), *sorted(packages.glob("nvidia/cu1*"))]
    for folder in candidates:
        if (folder / "bin" / "nvcc").exists():
            return folder
    raise SystemExit("no nvcc was found; a CUDA toolkit is needed: set CUDA_HOME to its folder")


def prepare(out: Path, arch: str, cuda: Path) -> None:
    """Point FlashInfer at the toolkit, the target GPU and the output folder, before it is imported."""
    stubs = out / "stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    if not (stubs / "libcuda.so").exists():  # the driver's library is not there without a driver
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(stubs / "libcuda.so"), "-Wl,-soname,libcuda.so.1"],
            input="", text=True, check=True,
        )  # fmt: skip
    libraries = [folder for folder in (cuda / "lib64", cuda / "lib") if folder.exists()]
    for folder in libraries:  # a toolkit made of Python packages has no name without a version to link against
        for versioned in folder.glob("libcudart.so.*"):
            link = stubs / "libcudart.so"
            if not link.exists() and not (folder / "libcudart.so").exists():
                link.symlink_to(versioned)
    os.environ["CUDA_HOME"] = str(cuda)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arch
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(out.resolve())
    os.environ["FLASHINFER_EXTRA_LDFLAGS"] = " ".join(f"-L{folder.resolve()}" for folder in (*libraries, stubs))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def compile_units(spec: object, units: tuple[str, ...]) -> list[tuple[str, float]]:
    """Compile single files of a module; return object names and seconds."""
    spec.write_ninja()  # type: ignore[attr-defined]
    ninja = ["ninja", "-f", str(spec.ninja_path)]  # type: ignore[attr-defined]
    listed = subprocess.run([*ninja, "-t", "targets", "all"], capture_output=True, text=True, check=True).stdout
    objects = [line.split(":")[0] for line in listed.splitlines()]
    found = []
    for unit in units:
        (target,) = [name for name in objects if unit in name and name.endswith(".o")]
        started = time.perf_counter()
        run = subprocess.run([*ninja, target], capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"{unit} does not compile:\n{run.stdout[-4000:]}{run.stderr[-2000:]}")
        found.append((Path(target).name, time.perf_counter() - started))
    return found


def interval_arguments(head_dim: int, types: tuple) -> list:
    """What the candidate form's variant is compiled from."""
    from row_intervals import jit_arguments

    from sglang_ext.serving.attention.flashinfer_calls import HeadShape

    return jit_arguments(HeadShape(8, 2, head_dim, head_dim**-0.5, types[0], types[1]))


def main(arguments: list[str] | None = None) -> int:
    """Compile what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for everything that is built")
    parser.add_argument(
        "--arch", default="9.0a", help="target, 9.0a (Hopper) or 10.0a (Blackwell) (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants (default: all)")
    parser.add_argument("--units", nargs="+", choices=UNITS, default=list(UNITS), help="files (default: all)")
    parser.add_argument("--modules", action="store_true", help="build whole modules, and the one that merges")
    args = parser.parse_args(arguments)
    prepare(args.out, args.arch, find_cuda())
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

    import torch
    from flashinfer.jit.attention.modules import (
        _gen_batch_prefill_primary_module,
        gen_customize_batch_prefill_module,
    )
    from flashinfer.jit.cascade import gen_cascade_module
    from row_intervals import JIT_KEYWORDS

    for name in args.only:
        head_dim, query, pool = VARIANTS[name]
        types = getattr(torch, query), getattr(torch, pool), getattr(torch, query)
        spec = _gen_batch_prefill_primary_module("fa2", *types, torch.int32, head_dim, head_dim, 0, False, False, False)
        if args.modules:
            spec.build()
            print(name, spec.get_library_path(), flush=True)
            continue
        for target, seconds in compile_units(spec, tuple(args.units)):
            print(f"{name} {target} {seconds:.1f} s", flush=True)
        candidate = gen_customize_batch_prefill_module("fa2", *interval_arguments(head_dim, types), **JIT_KEYWORDS)
        for target, seconds in compile_units(candidate, ("paged_kernel_mask_2",)):
            print(f"{name} intervals {target} {seconds:.1f} s", flush=True)
    if args.modules:
        cascade = gen_cascade_module()
        cascade.build()
        print("merge", cascade.get_library_path())
    return 0


if __name__ == "__main__":
    sys.exit(main())
