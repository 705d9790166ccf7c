"""Compiles this package's Triton kernels for Hopper and Blackwell, as they are launched; no GPU is needed.

    python scripts/gpu/compile_triton.py --results triton-compile.json

Every piece is called on the CPU with its launch noted down instead of run, so what is compiled is what would be
launched: the same argument types and constants. Triton brings its own assembler.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compile_results import Progress, Results, describe

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

#: Compute capability -> the target its code is for.
TARGETS = {90: "sm_90a", 100: "sm_100a"}
PIECES = ("draft_choice", "greedy_accept", "mask_bytes", "pool_slots")

Launch = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """Note every launch of a piece: its name, kernel, arguments and constants."""
    launches: list[Launch] = []
    before = []
    for name in PIECES:
        module = importlib.import_module(f"sglang_ext.kernels.{name}")
        before.append((module, module.launch))

        def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, _name: str = name, **constants: Any) -> None:
            launches.append((_name, kernel, arguments, constants))

        module.launch = note
    try:
        yield launches
    finally:
        for module, launch in before:
            module.launch = launch


def launches() -> list[Launch]:
    """Return one launch of every specialisation of every kernel."""
    from pieces import Size, make_pieces

    from sglang_ext.core.block import BlockLayout
    from sglang_ext.core.mask_bits import Rows
    from sglang_ext.kernels import mask_bytes

    largest = mask_bytes.LARGEST_NARROW
    with noted() as found:
        for size in (Size(2, 300, 16, 16, 151_936), Size(1, 40, 1, 1, 50)):
            for ragged in (True, False):
                for piece in make_pieces(size, "cpu", 0, ragged):
                    piece.fused()
        layout = BlockLayout.ragged([9, 9], [3, 2], [3, 1], 4)
        for rows in Rows:
            for mask_bytes.LARGEST_NARROW in (largest, -1):
                mask_bytes.pack_fused(layout, mask_bytes.MaskSizes.of(layout, rows))
        mask_bytes.LARGEST_NARROW = largest
    unique = {(name, kernel.__name__, variant(kernel, arguments, constants)): (name, kernel, arguments, constants)
              for name, kernel, arguments, constants in found}  # fmt: skip
    return list(unique.values())


def variant(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> str:
    """Name a specialisation by its constants and by the types of what is passed."""
    types, _ = signature(kernel, arguments, constants)
    passed = [f"{name}={kind}" for name, kind in types.items() if kind != "constexpr"]
    ones = [f"{name}=1" for name, value in zip(kernel.arg_names, arguments) if type(value) is int and value == 1]
    return " ".join([*passed, *ones, *(f"{name}={value}" for name, value in constants.items())])


def signature(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[dict[str, str], dict]:
    """Return argument types and constants the way the compiler is given them when a kernel is launched."""
    from triton.runtime.jit import mangle_type

    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    given = dict(zip(kernel.arg_names, arguments)) | constants
    # Absent tensors are constants, and so are numbers that happen to be 1.
    fixed = constants | {
        name: value for name, value in given.items() if value is None or (type(value) is int and value == 1)
    }
    types = {name: "constexpr" if name in fixed else mangle_type(given[name]) for name in kernel.arg_names}
    return types, fixed


def compile_launch(launch: Launch, capability: int) -> tuple[bytes, str]:
    """Compile one launch; return the machine code and the assembly it was made from."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _, kernel, arguments, constants = launch
    types, fixed = signature(kernel, arguments, constants)
    options = {name: value for name, value in constants.items() if name not in kernel.arg_names}
    built = triton.compile(ASTSource(kernel, types, fixed), target=GPUTarget("cuda", capability, 32), options=options)
    return built.asm["cubin"], built.asm["ptx"]


def main(arguments: list[str] | None = None) -> int:
    """Compile all kernels; the exit status is 0 if all of them compile."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, help="keep a table here")
    args = parser.parse_args(arguments)
    results = Results(args.results, describe(None), again=True)
    todo = [(launch, capability) for capability in TARGETS for launch in launches()]
    progress = Progress(len(todo))
    for launch, capability in todo:
        target = TARGETS[capability]
        name = f"{launch[0]}.{launch[1].__name__}"
        row = {"arch": target, "variant": variant(*launch[1:]), "kernel": name}
        try:
            code, assembly = compile_launch(launch, capability)
            ok = code.startswith(b"\x7fELF") and f".target {target}" in assembly
            results.add(row | {"ok": ok, "bytes": len(code)})
        except Exception as problem:  # whatever the compiler says, the other kernels are still tried
            ok = False
            results.add(row | {"ok": False, "bytes": None, "error": f"{type(problem).__name__}: {problem}"[:300]})
        progress.say(f"{target} {name} {row['variant']}: {'ok' if ok else 'FAILED'}")
    return 0 if all(row["ok"] for row in results.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
