"""Compiles FlashInfer's kernels for the variants this package plans, on any machine with nvcc; no GPU is needed.

    python scripts/gpu/compile_kernels.py --out build             # one file per variant and mask mode: do they compile?
    python scripts/gpu/compile_kernels.py --out build --modules   # whole modules, for make_bundle.py --prebuilt build

A module takes minutes on one core; a single file about twenty seconds. ``--results FILE`` keeps a table of what
compiled and leaves out what it already holds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compile_results import Progress, Results, architectures, describe

#: Name -> type of queries and outputs, type of the pool if it is another, head size: all that start-up lets through.
VARIANTS = {
    f"{query}{pool and '-'}{pool}-{head}": (
        {"bf16": "bfloat16", "fp16": "float16"}[query],
        {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}.get(pool),
        head,
    )
    for query, pool, head in itertools.product(("bf16", "fp16"), ("", "e4m3", "e5m2"), (128, 64, 256))
}
#: File -> what it is for: committed tokens, chains and trees over pages; rows in flight as packed keys.
UNITS = {
    "paged_kernel_mask_2": "custom mask over pages",
    "paged_kernel_mask_0": "no mask over pages",
    "paged_kernel_mask_1": "causal over pages",
    "ragged_kernel_mask_2": "custom mask over packed keys",
    "ragged_kernel_mask_0": "no mask over packed keys",
}
#: Variants to compile the candidate form in, whose mask is a variant of its own; ``check.py`` loads the first alone.
INTERVALS, INTERVALS_UNIT = ("bf16-128", "bf16-64", "fp16-128", "bf16-e4m3-128"), "paged_kernel_mask_2"
ARCHITECTURES = ("9.0a", "10.0a")
"""Hopper and Blackwell."""


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


def compile_unit(spec: Any, unit: str) -> tuple[Path, str | None]:
    """Compile one file of a module; return the object, and what went wrong if it does not compile."""
    spec.write_ninja()
    ninja = ["ninja", "-f", str(spec.ninja_path)]
    listed = subprocess.run([*ninja, "-t", "targets", "all"], capture_output=True, text=True, check=True).stdout
    (target,) = [
        name
        for name in (line.split(": ")[0] for line in listed.splitlines())
        if name.endswith((f"{unit}.cuda.o", f"{unit}.o"))
    ]
    run = subprocess.run([*ninja, target], capture_output=True, text=True)
    return Path(target), (run.stdout[-4000:] + run.stderr[-2000:]) if run.returncode else None


def variant_types(name: str) -> tuple[tuple[Any, Any, Any], int]:
    """Return the torch types of queries, pool and outputs, and the head size."""
    import torch

    query, pool, head = VARIANTS[name]
    types = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if type(dtype) is torch.dtype}
    return (types[query], types[pool or query], types[query]), head


def served_spec(name: str) -> Any:
    """Return the module the served forms load."""
    import torch
    from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module

    types, head = variant_types(name)
    return _gen_batch_prefill_primary_module("fa2", *types, torch.int32, head, head, 0, False, False, False)


def intervals_spec(name: str) -> Any:
    """Return the module of the candidate form."""
    from flashinfer.jit.attention.modules import gen_customize_batch_prefill_module
    from row_intervals import JIT_KEYWORDS, jit_arguments

    from sglang_ext.serving.attention.flashinfer_calls import HeadShape

    types, head = variant_types(name)
    arguments = jit_arguments(HeadShape(8, 2, head, head**-0.5, types[0], types[1]))
    return gen_customize_batch_prefill_module("fa2", *arguments, **JIT_KEYWORDS)


def merge_spec() -> Any:
    """Return the module that merges two calls."""
    from flashinfer.jit.cascade import gen_cascade_module

    return gen_cascade_module()


def jobs(variants: list[str], units: list[str]) -> list[tuple[Any, str, dict[str, str]]]:
    """Return what is to be compiled, a mask mode at a time: a function that makes the module, its file, its row."""
    wanted: list[tuple[Any, str, dict[str, str]]] = []
    for unit in units:
        wanted += [
            (lambda name=name: served_spec(name), unit, {"variant": name, "kernel": unit, "does": UNITS[unit]})
            for name in variants
            # Rows in flight have the queries' type, whatever the pool's.
            if unit.startswith("paged") or VARIANTS[name][1] is None
        ]
        if unit == INTERVALS_UNIT:
            row = {"kernel": f"intervals {unit}", "does": "key intervals over pages (candidate)"}
            wanted += [
                (lambda name=name: intervals_spec(name), unit, {"variant": name, **row})
                for name in variants
                if name in INTERVALS
            ]
            wanted.append((merge_spec, "cascade", {"variant": "all", "kernel": "merge", "does": "merges two calls"}))
    return wanted


def compile_files(arch: str, variants: list[str], units: list[str], results: Results) -> bool:
    """Compile single files and keep a row for each; return whether all of them are sound."""
    wanted = [(make, unit, {"arch": f"sm_{arch.replace('.', '')}", **row}) for make, unit, row in jobs(variants, units)]
    wanted = [job for job in wanted if not results.has(job[2])]
    progress, sound = Progress(len(wanted)), True
    for make, unit, row in wanted:
        target, problem = compile_unit(make(), unit)
        found = None if problem else architectures(target)
        # Where nothing can list what an object holds, that it was made has to do.
        ok = problem is None and (found is None or found == [row["arch"]])
        results.add(row | {"ok": ok, "bytes": None if problem else target.stat().st_size, "holds": found})
        progress.say(f"{row['arch']} {row['variant']} {row['kernel']}: {'ok' if ok else 'FAILED'} {problem or ''}")
        target.unlink(missing_ok=True)
        sound = sound and ok
    return sound


def module_specs(variants: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield whole modules by name: the variants', the candidate ``check.py`` loads, and the one that merges."""
    for name in variants:
        yield name, served_spec(name)
    if INTERVALS[0] in variants:
        yield f"intervals {INTERVALS[0]}", intervals_spec(INTERVALS[0])
    yield "merge", merge_spec()


def compile_modules(variants: list[str]) -> None:
    """Build whole modules."""
    specs = list(module_specs(variants))
    progress = Progress(len(specs))
    for name, spec in specs:
        spec.build()
        progress.say(f"{name} {spec.get_library_path()}")


def main(arguments: list[str] | None = None) -> int:
    """Compile what was asked for; the exit status is 0 if all of it compiles."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder for everything that is built")
    parser.add_argument(
        "--arch",
        nargs="+",
        choices=ARCHITECTURES,
        default=["9.0a"],
        help="targets, 9.0a (Hopper) and 10.0a (Blackwell); modules are built for all of them (default: 9.0a)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        metavar="VARIANT",
        help=f"of {', '.join(VARIANTS)} (default: all)",
    )
    parser.add_argument(
        "--units",
        nargs="+",
        choices=UNITS,
        default=list(UNITS),
        metavar="FILE",
        help=f"of {', '.join(UNITS)} (default: all)",
    )
    parser.add_argument("--modules", action="store_true", help="build whole modules, all that check.py loads")
    parser.add_argument("--results", type=Path, help="keep a table of single files here, and add to the one that is")
    parser.add_argument("--again", action="store_true", help="compile also what the table already holds")
    args = parser.parse_args(arguments)
    cuda = find_cuda()
    if len(args.arch) > 1 and not args.modules:
        # FlashInfer fixes its folders to the targets when it is imported: a process for each.
        command = [sys.executable, str(Path(__file__).resolve())]
        given = list(sys.argv[1:] if arguments is None else arguments)
        at = given.index("--arch")
        rest = given[:at] + given[at + 1 + len(args.arch) :]
        return max(subprocess.run([*command, *rest, "--arch", arch]).returncode for arch in args.arch)
    prepare(args.out, " ".join(args.arch), cuda)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    if args.modules:
        compile_modules(args.only)
        return 0
    results = Results(args.results, describe(cuda / "bin" / "nvcc"), args.again)
    return 0 if compile_files(args.arch[0], args.only, args.units, results) else 1


if __name__ == "__main__":
    sys.exit(main())
