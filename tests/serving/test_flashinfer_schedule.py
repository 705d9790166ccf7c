"""How FlashInfer cuts our calls into tiles: a mirror of its rule, held against the library's own code.

The rule decides how much of a tile's tensor-core work is wasted, which no result shows. The mirror covers what this
package plans (heads of 64, 128 and 256, pages of one token, no window). The library's scheduler is host code: where
there is nvcc it is compiled, told that the GPU is an H200, and asked the same questions.
"""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("flashinfer")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "gpu"
DATA = Path(importlib.util.find_spec("flashinfer").submodule_search_locations[0]) / "data"
PROCESSORS, PER_PROCESSOR = 132, 2
"""Of an H200, and blocks that the plan counts on for each."""
SMALLEST_CHUNK = 128


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads, head size."""

    queries: int
    shared: int
    size: int


@dataclass(frozen=True)
class Cut:
    """How a call is cut.

    Attributes:
        tile: rows of a tile; a row is one query head's of one token, all heads that share keys side by side.
        chunk: keys that one block of threads attends.
        split: whether partial results are merged afterwards.
        blocks: blocks of threads with work, per key/value head.
        grid: blocks launched, per key/value head.
    """

    tile: int
    chunk: int
    split: bool
    blocks: int
    grid: int


def up(number: int, step: int) -> int:
    return -(-number // step)


def tile_rows(rows: int, head_size: int) -> int:
    if rows > 64 and head_size < 256:
        return 128
    return 64 if rows > 16 else 16


def cut(queries: Sequence[int], keys: Sequence[int], heads: Heads, graph: bool = False, uniform: int = 0) -> Cut:
    """Mirror the plan of query and key lengths; ``uniform`` promises that all requests have that many rows."""
    group, batch, total = heads.queries // heads.shared, len(queries), sum(queries)
    rows = [count * group for count in queries]
    if not graph:
        tile = tile_rows(sum(rows) // batch, heads.size)
        tiles = sum(up(count, tile) for count in rows)
    elif uniform:
        tile = tile_rows(uniform * group, heads.size)
        tiles = batch * up(uniform * group, tile)
    else:  # the longest request a graph of this many rows could ever hold
        tile = tile_rows((total - batch + 1) * group, heads.size)
        tiles = up(total * group, tile) + batch - 1
    most = PROCESSORS * PER_PROCESSOR // heads.shared
    longest = max(1, *keys)
    low, high = SMALLEST_CHUNK, longest
    while low < high:
        middle = (low + high) // 2
        if sum(up(r, tile) * up(max(k, 1), middle) for r, k in zip(rows, keys)) > most:
            low = middle + 1
        else:
            high = middle
    blocks = sum(up(r, tile) * up(max(k, 1), low) for r, k in zip(rows, keys))
    return Cut(tile, low, graph or low < longest, blocks, max(most, tiles) if graph else blocks)


def efficiency(queries: Sequence[int], heads: Heads, found: Cut) -> float:
    """Share of the tiles' rows that are real."""
    group = heads.queries // heads.shared
    return sum(queries) * group / sum(up(count * group, found.tile) * found.tile for count in queries)


DEVICE = r"""
#include <driver_types.h>
extern "C" cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9
         : attribute == cudaDevAttrMultiProcessorCount ? PROCESSORS
         : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 232448 : 0;
  return cudaSuccess;
}
"""
PROGRAM = r"""
#include <cstdio>
#include <flashinfer/attention/scheduler.cuh>
int main() {
  int batch, heads, shared, size, graph, uniform, most, bytes;
  while (std::scanf("%d %d %d %d %d %d %d %d", &batch, &heads, &shared, &size, &graph, &uniform, &most, &bytes) == 8) {
    std::vector<int32_t> qo(batch + 1), kv(batch + 1);
    for (auto* pointer : {&qo, &kv})
      for (int i = 0; i <= batch; ++i) std::scanf("%d", &(*pointer)[i]);
    auto plan = flashinfer::PrefillSplitQOKVIndptr<int32_t>(
        qo.data(), kv.data(), qo[batch], batch, heads, shared, size, 1, most, graph, -1, -1, false, uniform, size,
        bytes);
    std::printf("%u %lld %d %u %zu\n", std::get<3>(plan), (long long)std::get<4>(plan), int(std::get<0>(plan)),
                std::get<1>(plan), size_t(std::get<2>(plan)));
  }
}
"""


@pytest.mark.slow
def test_the_mirror_is_what_the_librarys_own_scheduler_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    try:
        cuda = importlib.import_module("compile_kernels").find_cuda()
    except SystemExit as reason:
        pytest.skip(str(reason))
    finally:
        for name in {file.stem for file in SCRIPTS.glob("*.py")} & set(sys.modules):
            del sys.modules[name]
    picked = random.Random(0)
    cases = []
    for _ in range(400):
        batch = picked.randint(1, 20)
        shared = picked.choice([1, 2, 4, 8])
        heads = Heads(shared * picked.choice([1, 2, 4, 8]), shared, picked.choice([64, 128, 256]))
        graph, even = picked.random() < 0.5, picked.choice([0, 1, 5, 16, 40])
        uniform = even if graph else 0
        queries = [even or picked.randint(0, 300) for _ in range(batch)]
        queries[0] = max(queries[0], 1)
        keys = [picked.choice([0, 1, picked.randint(1, 500), picked.randint(1, 40_000)]) for _ in range(batch)]
        cases.append((queries, keys, heads, graph, uniform, picked.choice([1, 2])))
    lines = []
    for queries, keys, heads, graph, uniform, size in cases:
        most = PROCESSORS * PER_PROCESSOR // heads.shared
        pointers = [sum(part[:i]) for part in (queries, keys) for i in range(len(part) + 1)]
        lines.append(f"{len(queries)} {heads.queries} {heads.shared} {heads.size} {int(graph)} {uniform} {most} {size}")
        lines.append(" ".join(map(str, pointers)))
    (tmp_path / "ask.cu").write_text(PROGRAM)
    (tmp_path / "device.cpp").write_text(DEVICE)
    subprocess.run(
        [cuda / "bin" / "nvcc", "-std=c++17", "-O0", "--cudart", "shared", f"-DPROCESSORS={PROCESSORS}",
         *(f"-I{folder}" for folder in (DATA / "cccl" / "cub", DATA / "cccl" / "libcudacxx" / "include",
                                        DATA / "cccl" / "thrust", DATA / "include", DATA / "csrc",
                                        DATA / "cutlass" / "include", DATA / "spdlog" / "include")),
         f"-L{cuda / 'lib64'}", f"-L{cuda / 'lib'}", "-o", tmp_path / "ask", tmp_path / "ask.cu",
         tmp_path / "device.cpp"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    environ = {"LD_LIBRARY_PATH": f"{cuda / 'lib64'}:{cuda / 'lib'}"}
    told = subprocess.run(
        [tmp_path / "ask"], input="\n".join(lines), capture_output=True, text=True, check=True, env=environ
    )
    answers = [[int(word) for word in line.split()] for line in told.stdout.splitlines()]
    assert len(answers) == len(cases)
    for case, (tile, chunk, split, blocks, grid) in zip(cases, answers):
        assert cut(*case[:5]) == Cut(tile, chunk, bool(split), blocks, grid), case


def test_the_rule_stands_in_the_installed_source() -> None:
    """Without nvcc: the lines the mirror restates are still there."""
    include = DATA / "include" / "flashinfer"
    words = " ".join((include / "utils.cuh").read_text().split())
    rule = words[words.index("inline uint32_t FA2DetermineCtaTileQ") :]
    assert re.search(r"if \(avg_packed_qo_len > 64 && head_dim < 256\) \{ return 128; \}", rule)
    assert re.search(r"if \(avg_packed_qo_len > 16\) \{ .*? return 64; \}", rule)
    plan = " ".join((include / "attention" / "scheduler.cuh").read_text().split())
    for line in (
        "const uint64_t max_seq_len = total_num_rows - batch_size + 1;",
        "total_num_tiles_q = batch_size * ceil_div(packed_uniform_len, cta_tile_q);",
        "int num_blocks_per_sm = 2;",
        "const uint32_t min_kv_chunk_size = std::max((128 / page_size), 1U);",
    ):
        assert line in plan, line


QWEN = Heads(32, 8, 128)


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("groups", [1, 4, 8, 16])
def test_mask_rows_of_the_served_form_fill_their_tiles(batch: int, groups: int) -> None:
    """16 rows a group, four query heads to a key head: all groups of a request are one entry, and nothing is wasted."""
    queries = [groups * 16] * batch
    found = cut(queries, [4096] * batch, QWEN)
    assert found.tile == (64 if groups == 1 else 128)
    assert efficiency(queries, QWEN, found) == 1.0


@pytest.mark.parametrize("batch", [2, 4, 16])
def test_a_graph_wastes_half_of_short_entries_unless_their_length_is_promised(batch: int) -> None:
    """In a graph the plan sizes tiles for the longest request the rows could make up."""
    queries, keys = [16] * batch, [4096] * batch
    guessed, promised = cut(queries, keys, QWEN, graph=True), cut(queries, keys, QWEN, graph=True, uniform=16)
    assert (guessed.tile, efficiency(queries, QWEN, guessed)) == (128, 0.5)
    assert (promised.tile, efficiency(queries, QWEN, promised)) == (64, 1.0)
    # Eight query heads to a key head fill 128 rows anyway.
    wide = Heads(64, 8, 64)
    assert efficiency(queries, wide, cut(queries, keys, wide, graph=True)) == 1.0
