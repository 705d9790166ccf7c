"""When the CPU platform is active, what it reports, and the torch bodies of the host's Triton helpers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import psutil
import sglang  # noqa: F401  the host decides on its platform while it is imported; our class must not come first
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.serving.platform import activation, cpu, shims

LAWS = settings(max_examples=50, deadline=None, print_blob=True)


@pytest.mark.parametrize(
    ("asked", "accelerator", "others", "active"),
    [
        (None, False, [], True),
        ("", False, [], True),
        (None, True, [], False),
        (None, False, ["vendor"], False),
        ("sglang_ext_cpu", True, ["vendor"], True),
        ("vendor", False, ["vendor"], False),
    ],
)
def test_active_without_an_accelerator_or_when_asked_for(asked, accelerator, others, active):
    assert activation.should_activate(asked, accelerator, others) is active


def test_the_platform_class_path_is_the_class():
    module, _, name = activation.PLATFORM_CLASS.partition(":")
    assert (cpu.SglangExtCpuPlatform.__module__, cpu.SglangExtCpuPlatform.__qualname__) == (module, name)


def test_memory_is_the_machines_or_the_containers(tmp_path):
    total = psutil.virtual_memory().total
    limit, unlimited = tmp_path / "memory.max", tmp_path / "none"
    limit.write_text("1000000\n")
    unlimited.write_text("max\n")
    assert cpu.memory_limit([limit]) == 1000000
    assert cpu.memory_limit([unlimited]) == cpu.memory_limit([tmp_path / "absent"]) == total
    limit.write_text(str(total * 2))
    assert cpu.memory_limit([limit]) == total


def test_free_memory_is_what_the_machine_has_available():
    platform = cpu.SglangExtCpuPlatform()
    total = platform.get_device_total_memory()
    free = total - platform.get_current_memory_usage()
    assert 0 <= free <= total
    assert platform.get_available_memory()[1] == total


def defaults(**given):
    unset = {"enable_deterministic_inference": False}
    for field in ("mem_fraction_static", "max_total_tokens", "chunked_prefill_size", "max_running_requests"):
        unset[field] = None
    args = SimpleNamespace(**(unset | {"attention_backend": None} | given))
    cpu.SglangExtCpuPlatform().apply_server_args_defaults(args)
    return args


def test_the_default_pool_is_bounded_and_flags_win():
    assert defaults().max_total_tokens == cpu.DEFAULT_POOL_TOKENS
    assert defaults().mem_fraction_static == cpu.DEFAULT_MEM_FRACTION
    assert defaults(mem_fraction_static=0.8).max_total_tokens is None
    assert defaults(max_total_tokens=123).max_total_tokens == 123
    assert defaults(chunked_prefill_size=77, max_running_requests=3).chunked_prefill_size == 77
    assert defaults(chunked_prefill_size=77, max_running_requests=3).max_running_requests == 3


@LAWS
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=6), seed=st.integers(0, 999))
def test_new_slots_go_to_their_requests_columns(counts, seed):
    random = torch.Generator().manual_seed(seed)
    requests = torch.randperm(8, generator=random)[: len(counts)]
    start = torch.randint(0, 20, (len(counts),), generator=random)
    slots = torch.randperm(1000, generator=random)[: sum(counts)]
    table = torch.zeros(8, 40, dtype=torch.int32)
    expected = table.clone()
    taken = 0
    for request, first, count in zip(requests, start, counts, strict=True):
        expected[request, first : first + count] = slots[taken : taken + count].to(torch.int32)
        taken += count
    shims.write_request_slots(requests, table, start, start + torch.tensor(counts), slots, len(counts))
    assert torch.equal(table, expected)


@LAWS
@given(batch=st.integers(1, 6), width=st.integers(1, 9), seed=st.integers(0, 999))
def test_block_slots_are_read_in_request_order(batch, width, seed):
    random = torch.Generator().manual_seed(seed)
    requests = torch.randperm(8, generator=random)[:batch]
    start = torch.randint(0, 30, (batch,), generator=random)
    table = torch.randint(0, 10**6, (8, 40), generator=random, dtype=torch.int32)
    found = shims.block_cache_locs(
        req_pool_indices=requests,
        req_to_token=table,
        start_offset=start,
        end_offset=start + width,
        batch_size=batch,
        draft_token_num=width,
        device="cpu",
    )
    expected = [table[request, first : first + width] for request, first in zip(requests, start, strict=True)]
    assert found.dtype == torch.int64
    assert torch.equal(found, torch.cat(expected).long())


def test_deterministic_inference_takes_our_backend_unless_told_otherwise():
    assert defaults(enable_deterministic_inference=True).attention_backend == activation.BACKEND_NAME
    assert defaults(enable_deterministic_inference=True, attention_backend="triton").attention_backend == "triton"
    assert defaults().attention_backend is None
