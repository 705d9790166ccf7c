"""Training blocks are decode groups: one mask rule, the label convention, and the loss mask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sglang_ext.core.masks import CLEAN, visible
from sglang_ext.core.refusal import Refusal
from sglang_ext.models.flexdraft.config import FlexDraftConfig
from sglang_ext.models.flexdraft.model import FlexDraftModel
from sglang_ext.models.target import Target, apply_rope, rms_norm
from sglang_ext.training.data import Chunk, Record, Schedule, collate, epoch_chunks, labels_of, load_records
from sglang_ext.training.flexdraft import StateStore
from tests.training.tiny_targets import EOS, random_rows, write_rows

BLOCK = 4


def make_drafter(target: Target, calibrator: str = "hidden", depth: int = 2) -> FlexDraftModel:
    torch.manual_seed(7)
    rank = 0 if calibrator == "none" else 6
    config = FlexDraftConfig.for_target(
        target.hf_config, num_layers=depth, block_size=BLOCK, calibrator=calibrator, calibrator_rank=rank
    )
    model = FlexDraftModel(target, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def record_of(prompt: list[int], response: list[int]) -> Record:
    return Record("key", "test", (*prompt, *response), len(prompt), None)


def dense_reference(model: FlexDraftModel, record: Record, anchors: list[int]) -> torch.Tensor:
    """Clean rows and all blocks as one sequence under the dense mask of ``visible``: n_j ``[A, K-1, H]``."""
    target, config = model.target, model.config
    clean = len(record.token_ids) - 1
    position = torch.cat([torch.arange(clean), *(anchor + 1 + torch.arange(BLOCK) for anchor in anchors)])
    group = torch.cat([torch.full((clean,), CLEAN), *(torch.full((BLOCK,), index) for index in range(len(anchors)))])
    reach = torch.cat([torch.arange(clean), *(torch.full((BLOCK,), anchor) for anchor in anchors)])
    mask = visible(reach, group, position, group)
    hidden_at_split: list[torch.Tensor] = []
    target.prefill(
        torch.tensor([record.token_ids[:-1]]),
        lambda i, h, _k, _v: hidden_at_split.append(h[0]) if i == config.split else None,
    )
    hidden = torch.cat((hidden_at_split[0], model.mask_embedding.expand(len(anchors) * BLOCK, -1)))
    cos, sin = target.rope(position)
    for draft, layer in zip(model.layers, model.target_layers, strict=True):
        x = rms_norm(hidden, layer.input_norm, target.eps)
        q, k, v = (part[0] for part in target.project(layer, x[None], cos[None], sin[None]))
        attention = draft.self_attn
        shape = (-1, config.head_dim)
        own = [getattr(attention, f"{name}_proj")(x[clean:]).unflatten(-1, shape) for name in "qkv"]
        if config.qk_norm:
            own[0] = rms_norm(own[0], attention.q_norm.weight, target.eps)
            own[1] = rms_norm(own[1], attention.k_norm.weight, target.eps)
        own[:2] = [apply_rope(part, cos[clean:, None], sin[clean:, None]) for part in own[:2]]
        q, k, v = (torch.cat((a[:clean], b)).transpose(0, 1) for a, b in zip((q, k, v), own, strict=True))
        k, v = (part.repeat_interleave(target.group, dim=0) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).flatten(1)
        out = torch.cat((mixed[:clean] @ layer.o.t(), attention.o_proj(mixed[clean:])))
        hidden = target.feed_forward(layer, hidden + out)
    normed = rms_norm(hidden[clean:], target.final_norm, target.eps)
    return normed.view(len(anchors), BLOCK, -1)[:, 1:]


@torch.no_grad()
def test_blocks_equal_one_dense_masked_sequence(target: Target) -> None:
    model = make_drafter(target)
    record = record_of([5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, EOS])
    anchors = [3, 6, 9, 4]
    batch = collate(StateStore(target, 2), [record], [Chunk(0, tuple(anchors))], BLOCK)
    torch.testing.assert_close(model(batch.context)[0], dense_reference(model, record, anchors), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_blocks_do_not_depend_on_what_else_is_in_the_batch(target: Target) -> None:
    model = make_drafter(target)
    records = [record_of([5, 6, 7], [8, 9, 10, 11, 12, EOS]), record_of([20] * 9, [30, 31, 32, 33, 34, 35, 36, EOS])]
    store = StateStore(target, 2)
    together = collate(store, records, [Chunk(0, (2, 5)), Chunk(1, (8, 12))], BLOCK)
    for row, chunk in enumerate((Chunk(0, (2, 5)), Chunk(1, (8, 12)))):
        alone = collate(store, records, [chunk], BLOCK)
        torch.testing.assert_close(
            model.logits(alone.context)[0], model.logits(together.context)[row], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("calibrator", ["hidden", "vocabulary", "none"])
def test_calibrator_forms(target: Target, calibrator: str) -> None:
    """Logits are head(n_j) plus the calibrator of concat(E(bonus), n_j), in the form the configuration names."""
    model = make_drafter(target, calibrator)
    record = record_of([5, 6, 7], [8, 9, 10, 11, 12, EOS])
    batch = collate(StateStore(target, 2), [record], [Chunk(0, (2, 3))], BLOCK)
    normed = model(batch.context)
    if calibrator == "none":
        expected = normed @ target.head.t()
    else:
        bonus = target.embedding[torch.tensor([[8, 9]])][:, :, None].expand_as(normed)
        added = model.anchor_bias_mlp(torch.cat((bonus, normed), dim=-1))
        expected = (normed + added) @ target.head.t() if calibrator == "hidden" else normed @ target.head.t() + added
    torch.testing.assert_close(model.logits(batch.context), expected, rtol=1e-4, atol=1e-4)


def test_label_convention() -> None:
    """Bonus x[p+1] is a response token; slot j predicts x[p+1+j]; the end-of-turn token is the last label."""
    record = record_of([5, 6, 7], [10, 11, 12, EOS])
    assert list(record.anchors) == [2, 3, 4]
    labels, valid = labels_of(record, [2, 4], BLOCK)
    assert labels[0].tolist() == [11, 12, EOS] and valid[0].tolist() == [True, True, True]
    assert labels[1, 0] == EOS and valid[1].tolist() == [True, False, False]


def test_loss_covers_response_tokens_only(tmp_path: Path) -> None:
    """Every response token but the first is a label of some block, no prompt token ever is."""
    rows = random_rows(6)
    records = load_records([write_rows(tmp_path / "rows.jsonl", rows)])
    for record in records:
        covered = set()
        for anchor in record.anchors:
            _, valid = labels_of(record, [anchor], BLOCK)
            covered |= {anchor + 2 + j for j in range(BLOCK - 1) if valid[0, j]}
        assert covered == set(range(record.prompt_length + 1, len(record.token_ids)))


def test_a_loss_mask_of_nothing_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [([5, 6], [7]), ([], [8, 9, 10])])
    with pytest.raises(Refusal, match="no row has a response with a label"):
        load_records([path])
    path.write_text(json.dumps({"key": "a", "prompt_ids": [1]}) + "\n")
    with pytest.raises(Refusal, match=r"rows.jsonl:1"):
        load_records([path])


def test_every_anchor_is_visited_once_an_epoch() -> None:
    records = [record_of(prompt, response) for prompt, response in random_rows(7)]
    for epoch in (0, 1):
        chunks = epoch_chunks(records, 4, seed=3, epoch=epoch)
        assert chunks == epoch_chunks(records, 4, seed=3, epoch=epoch)
        for index, record in enumerate(records):
            visited = [anchor for chunk in chunks if chunk.record == index for anchor in chunk.anchors]
            assert set(visited) == set(record.anchors)
            assert len(visited) - len(record.anchors) < 4
    assert epoch_chunks(records, 4, 3, 0) != epoch_chunks(records, 4, 3, 1)


def test_schedule_is_a_function_of_the_step() -> None:
    records = [record_of(prompt, response) for prompt, response in random_rows(5)]
    forward = Schedule(records, 3, 4, seed=1)
    steps = [forward.at(step) for step in range(12)]
    assert [Schedule(records, 3, 4, seed=1).at(step) for step in reversed(range(12))] == steps[::-1]
    assert all(len(chunks) == 3 for chunks in steps)
