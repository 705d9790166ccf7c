"""Seeded sampling on a CPU: one key, one token; over many keys, the law asked for."""

from __future__ import annotations

import struct

import torch

from sglang_ext.serving.platform.seeded_sampling import hash32, multinomial_with_seed


def murmur3(data: bytes) -> int:
    """Textbook MurmurHash3 (x86, 32 bit, seed 0) for lengths that are multiples of four."""
    mask, state = 0xFFFFFFFF, 0

    def rotate(word: int, bits: int) -> int:
        return ((word << bits) | (word >> (32 - bits))) & mask

    for (word,) in struct.iter_unpack("<I", data):
        state ^= (rotate((word * 0xCC9E2D51) & mask, 15) * 0x1B873593) & mask
        state = (rotate(state, 13) * 5 + 0xE6546B64) & mask
    state ^= len(data)
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & mask
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & mask
    return state ^ (state >> 16)


def test_the_hash_is_murmur3() -> None:
    assert murmur3(b"test") == 0xBA6BD213, "published test vector"
    seeds = [0, 1, 42, 2**31, 2**40 + 7, 2**62 + 3]
    positions = [0, 1, 17, 2047, 5, 99]
    got = hash32(torch.tensor(seeds), torch.tensor(positions), torch.arange(64))
    expected = [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in range(64)]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert got.tolist() == expected


def test_a_row_depends_on_its_own_key_only() -> None:
    logprobs = torch.randn(8, 100, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    seeds, positions = torch.arange(8), torch.arange(8) * 11
    together = multinomial_with_seed(logprobs, seeds, positions)
    for i in range(8):
        alone = multinomial_with_seed(logprobs[i : i + 1], seeds[i : i + 1], positions[i : i + 1])
        assert torch.equal(alone, together[i : i + 1])


def test_many_keys_follow_the_law() -> None:
    """20,000 keys: chi-square with 3 degrees of freedom below 16.3 (p > 0.001); what has probability 0 never comes."""
    probs = torch.tensor([0.5, 0.25, 0.2, 0.05, 0.0])
    count = 20_000
    drawn = multinomial_with_seed(probs.log().expand(count, -1), torch.arange(count) % 200, torch.arange(count) // 200)
    seen = torch.bincount(drawn.view(-1), minlength=5).double()
    assert seen[4] == 0
    expected = probs[:4].double() * count
    assert float(((seen[:4] - expected) ** 2 / expected).sum()) < 16.3
