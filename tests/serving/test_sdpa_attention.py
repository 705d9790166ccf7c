"""Laws of the CPU attention backend, against a straight-line reference in float64 that shares no code with it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.serving.attention.dense import split_by_length
from sglang_ext.serving.attention.gather import padded_columns
from sglang_ext.serving.attention.harness import AttentionShape, Harness
from sglang_ext.serving.attention.sdpa import SdpaBackend

GQA = AttentionShape(heads=6, kv_heads=2, head_dim=16, dtype=torch.float32)
MHA = AttentionShape(heads=4, kv_heads=4, head_dim=8, dtype=torch.float32)
MQA = AttentionShape(heads=5, kv_heads=1, head_dim=32, dtype=torch.float32)
SHAPES = st.sampled_from([GQA, MHA, MQA])
LAWS = settings(max_examples=30, deadline=None, print_blob=True)
TOLERANCE = 2e-6


def reference(harness, query, query_lens, sees, sinks=None):
    """Softmax attention, one query row and one head at a time; ``sees(request, query position, key position)``."""
    shape = harness.shape
    query = query.double().view(-1, shape.heads, shape.head_dim)
    out = torch.zeros_like(query)
    row = 0
    for index, (request, length, rows) in enumerate(zip(harness.requests, harness.kv_lens, query_lens)):
        slots = harness.table[request, :length].long()
        keys, values = harness.pool.keys[slots].double(), harness.pool.values[slots].double()
        for position in range(length - rows, length):
            seen = [key for key in range(length) if sees(index, position, key)]
            for head in range(shape.heads):
                shared = head * shape.kv_heads // shape.heads
                scores = [float(query[row, head] @ keys[key, shared]) / math.sqrt(shape.head_dim) for key in seen]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                total = sum(weights) + (math.exp(float(sinks[head]) - top) if sinks is not None else 0.0)
                for key, weight in zip(seen, weights):
                    out[row, head] += weight / total * values[key, shared]
            row += 1
    return out.view(row, -1)


def causal(request, query, key):
    return key <= query


def run(harness, mode, query, query_lens, spec_info=None, sinks=None, **layer):
    backend = SdpaBackend(harness.runner)
    batch = harness.batch(mode, query_lens, spec_info)
    backend.init_forward_metadata(batch)
    k, v = harness.new_rows(query_lens)
    forward = backend.forward_decode if mode == "decode" else backend.forward_extend
    keywords = {} if sinks is None else {"sinks": sinks}
    return forward(query, k, v, harness.layer(**layer), batch, **keywords)


def verify_input(rows, *, ragged=False, custom_mask=None):
    """A verify input as ours (row counts per request) or as a foreign algorithm's (one count, perhaps a mask)."""
    if ragged:
        return SimpleNamespace(verify_lens_cpu=list(rows), draft_token_num=max(rows), custom_mask=None)
    return SimpleNamespace(draft_token_num=max(rows), custom_mask=custom_mask)


@st.composite
def batches(draw, most_rows=9, longest=90, most=4):
    """Key lengths and query row counts of a batch."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most))
    return lengths, [draw(st.integers(1, min(most_rows, length))) for length in lengths]


@LAWS
@given(shape=SHAPES, lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5), page=st.sampled_from([1, 4, 16]),
       window=st.sampled_from([-1, 3, 40]), seed=st.integers(0, 999))  # fmt: skip
def test_decode_is_causal_attention(shape, lengths, page, window, seed):
    harness = Harness(shape, lengths, page_size=page, seed=seed)
    rows = [1] * len(lengths)
    query = harness.queries(rows)
    expected = reference(harness, query, rows, lambda _, q, k: k <= q and (window < 0 or k >= q - window))
    torch.testing.assert_close(
        run(harness, "decode", query, rows, window=window).double(), expected, atol=TOLERANCE, rtol=1e-5
    )


@LAWS
@given(shape=SHAPES, batch=batches(), page=st.sampled_from([1, 16]), window=st.sampled_from([-1, 5]),
       seed=st.integers(0, 999))  # fmt: skip
def test_ragged_verify_is_causal_attention(shape, batch, page, window, seed):
    lengths, rows = batch
    harness = Harness(shape, lengths, page_size=page, seed=seed)
    query = harness.queries(rows)
    expected = reference(harness, query, rows, lambda _, q, k: k <= q and (window < 0 or k >= q - window))
    found = run(harness, "verify", query, rows, verify_input(rows, ragged=True), window=window)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE, rtol=1e-5)


@LAWS
@given(shape=SHAPES, batch=batches(most_rows=60), mode=st.sampled_from(["extend", "mixed"]),
       window=st.sampled_from([-1, 7]), seed=st.integers(0, 999))  # fmt: skip
def test_extend_is_causal_attention_with_any_prefix(shape, batch, mode, window, seed):
    lengths, rows = batch
    harness = Harness(shape, lengths, seed=seed)
    query = harness.queries(rows)
    expected = reference(harness, query, rows, lambda _, q, k: k <= q and (window < 0 or k >= q - window))
    found = run(harness, mode, query, rows, window=window)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE, rtol=1e-5)


@LAWS
@given(shape=SHAPES, batch=batches(most_rows=40, longest=60), seed=st.integers(0, 999))
def test_bidirectional_layers_see_the_whole_request(shape, batch, seed):
    lengths, rows = batch
    harness = Harness(shape, lengths, seed=seed)
    query = harness.queries(rows)
    expected = reference(harness, query, rows, lambda *_: True)
    found = run(harness, "extend", query, rows, bidirectional=True)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE, rtol=1e-5)


@LAWS
@given(shape=SHAPES, batch=batches(most_rows=30, longest=60), window=st.sampled_from([-1, 6]), seed=st.integers(0, 999))
def test_sinks_take_probability_and_give_nothing(shape, batch, window, seed):
    lengths, rows = batch
    harness = Harness(shape, lengths, seed=seed)
    sinks = torch.randn(shape.heads, generator=harness.random)
    query = harness.queries(rows)
    expected = reference(
        harness, query, rows, lambda _, q, k: k <= q and (window < 0 or k >= q - window), sinks=sinks
    )  # fmt: skip
    found = run(harness, "extend", query, rows, sinks=sinks, window=window)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE, rtol=1e-5)


@LAWS
@given(shape=SHAPES, prefixes=st.lists(st.integers(0, 50), min_size=1, max_size=3), rows=st.integers(1, 20),
       seed=st.integers(0, 999))  # fmt: skip
def test_a_foreign_tree_mask_is_obeyed(shape, prefixes, rows, seed):
    lengths = [prefix + rows for prefix in prefixes]
    harness = Harness(shape, lengths, seed=seed)
    query = harness.queries([rows] * len(lengths))
    masks = []
    for prefix, length in zip(prefixes, lengths):
        mask = torch.rand(rows, length, generator=harness.random) < 0.6
        mask[torch.arange(rows), prefix + torch.arange(rows)] = True
        masks.append(mask)
    flat = torch.cat([mask.view(-1) for mask in masks])
    expected = reference(
        harness, query, [rows] * len(lengths), lambda r, q, k: bool(masks[r][q - prefixes[r], k])
    )  # fmt: skip
    found = run(harness, "verify", query, [rows] * len(lengths), verify_input([rows], custom_mask=flat))
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE, rtol=1e-5)


@LAWS
@given(shape=SHAPES, prefix=st.integers(0, 150), rows=st.integers(1, 9), seed=st.integers(0, 999))
def test_verification_rows_equal_decoding_them_one_by_one(shape, prefix, rows, seed):
    harness = Harness(shape, [prefix + rows], seed=seed)
    query = harness.queries([rows])
    together = run(harness, "verify", query, [rows], verify_input([rows], ragged=True))
    for row in range(rows):
        harness.kv_lens = [prefix + row + 1]
        alone = run(harness, "decode", query[row : row + 1], [1])
        torch.testing.assert_close(alone, together[row : row + 1], atol=1e-6, rtol=1e-6)


@LAWS
@given(shape=SHAPES, batch=batches(longest=700), seed=st.integers(0, 999))
def test_a_request_does_not_depend_on_its_batch(shape, batch, seed):
    lengths, rows = batch
    harness = Harness(shape, lengths, seed=seed)
    query = harness.queries(rows)
    together = run(harness, "verify", query, rows, verify_input(rows, ragged=True)).split(rows)
    requests = harness.requests
    for index, own in enumerate(query.split(rows)):
        harness.requests, harness.kv_lens = requests[index : index + 1], lengths[index : index + 1]
        alone = run(harness, "verify", own, rows[index : index + 1], verify_input(rows[index : index + 1], ragged=True))
        torch.testing.assert_close(alone, together[index], atol=1e-6, rtol=1e-6)


def test_a_request_full_of_nan_harms_nobody_else():
    harness = Harness(GQA, [40, 7], seed=1)
    rows = [1, 1]
    query = harness.queries(rows)
    clean = run(harness, "decode", query, rows)
    slots = harness.table[harness.requests[0], :40].long()
    harness.pool.keys[slots] = float("nan")
    harness.pool.values[slots] = float("nan")
    found = run(harness, "decode", query, rows)
    assert found[0].isnan().all()
    assert torch.equal(found[1], clean[1])


def test_a_long_prompt_is_attended_in_chunks_over_its_prefix():
    harness = Harness(MQA, [700], seed=2)
    query = harness.queries([600])
    found = run(harness, "extend", query, [600])
    for rows in (slice(0, 3), slice(511, 514), slice(597, 600)):
        harness.kv_lens = [100 + rows.stop]
        expected = reference(harness, query[rows], [3], causal)
        torch.testing.assert_close(found[rows].double(), expected, atol=TOLERANCE, rtol=1e-5)


def test_bfloat16_stays_within_its_rounding():
    shape = AttentionShape(heads=9, kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    harness = Harness(shape, [150, 33], seed=3)
    rows = [8, 2]
    query = harness.queries(rows)
    found = run(harness, "verify", query, rows, verify_input(rows, ragged=True))
    expected = reference(harness, query, rows, causal)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)


def test_rows_are_written_before_they_are_read():
    harness = Harness(GQA, [12], seed=4)
    rows = [3]
    query = harness.queries(rows)
    k, v = (torch.randn(3, GQA.kv_heads, GQA.head_dim, generator=harness.random) for _ in range(2))
    backend = SdpaBackend(harness.runner)
    batch = harness.batch("verify", rows, verify_input(rows, ragged=True))
    backend.init_forward_metadata(batch)
    found = backend.forward_extend(query, k, v, harness.layer(), batch)
    assert torch.equal(harness.pool.keys[harness.own_slots(rows)], k)
    torch.testing.assert_close(found.double(), reference(harness, query, rows, causal), atol=TOLERANCE, rtol=1e-5)


@LAWS
@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=48))
def test_buckets_partition_the_batch_and_never_cost_more(lengths):
    buckets = split_by_length(lengths)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    cost = sum(padded_columns(max(lengths[index] for index in bucket)) * len(bucket) for bucket in buckets)
    assert cost <= padded_columns(max(lengths)) * len(lengths)


def test_a_logit_cap_is_refused():
    harness = Harness(GQA, [5])
    layer = harness.layer()
    layer.logit_cap = 30.0
    backend = SdpaBackend(harness.runner)
    batch = harness.batch("decode", [1])
    backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match="logit"):
        backend.forward_decode(harness.queries([1]), None, None, layer, batch)
