"""Data generation: which prompts are read, what is written, and that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.target import Target
from sglang_ext.training.data import load_records
from sglang_ext.training.flexdraft import StateStore
from sglang_ext.training.prompts import PromptSource, interleave, read_source
from sglang_ext.training.regenerate import RegenerateConfig, regenerate
from tests.training.tiny_targets import write_target


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def questions(tmp_path: Path) -> PromptSource:
    rows = [{"id": i, "question": f"w{i} w{i + 1}"} for i in range(14)]
    return PromptSource("q", str(write_lines(tmp_path / "q.jsonl", rows)), "question", max_new_tokens=12)


def test_sources_select_exclude_and_deduplicate(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"id": i, "text": f"  w{i % 7} (v{i:03d})"} for i in range(20)])
    source = PromptSource.parse(rf"domain=a,path={path},field=text,exclude=id:10-19,strip=\s*\(v\d+\)$")
    texts = [prompt.messages[0]["content"] for prompt in read_source(source)]
    assert sorted(texts) == [f"w{i}" for i in range(7)]
    limited = PromptSource.parse(f"domain=a,path={path},field=text,limit=5,max_new_tokens=9")
    assert [prompt.max_new_tokens for prompt in read_source(limited)] == [9] * 5
    assert read_source(limited, 1) == read_source(limited, 1) != read_source(limited, 2)


def test_each_user_turn_of_a_conversation_is_a_prompt(tmp_path: Path) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    path = write_lines(tmp_path / "m.jsonl", [{"messages": turns}])
    found = sorted(len(prompt.messages) for prompt in read_source(PromptSource("m", str(path), "messages")))
    assert found == [1, 3]


def test_every_prefix_holds_the_domains_in_proportion(tmp_path: Path) -> None:
    groups = []
    for name, count in (("big", 90), ("small", 30)):
        path = write_lines(tmp_path / f"{name}.jsonl", [{"t": f"{name} {i}"} for i in range(count)])
        groups.append(read_source(PromptSource(name, str(path), "t")))
    mixed = interleave(groups)
    for length in (20, 40, 80, 120):
        share = sum(prompt.domain == "small" for prompt in mixed[:length]) / length
        assert abs(share - 0.25) < 0.1


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    for text, message in (
        (f"domain=a,path={path},feild=text", "field"),
        (f"domain=a,path={path}", "no field"),
        (f"domain=a,path={path},field=text,limit=many", "limit=many"),
    ):
        with pytest.raises(Refusal, match=message):
            PromptSource.parse(text)
    for source, message in (
        (PromptSource("a", "/nonexistent", "text"), "existing"),
        (PromptSource("a", str(path), "txet"), "txet"),
        (PromptSource("a", str(path), "text", exclude="id"), "exclude=id"),
    ):
        with pytest.raises(Refusal, match=message):
            read_source(source)


def test_interrupted_generation_resumes(tmp_path: Path, questions: PromptSource) -> None:
    """Cut the files in the middle of a row: the second run completes them and repeats no finished prompt."""
    target = write_target(tmp_path / "target")

    def config(name: str) -> RegenerateConfig:
        return RegenerateConfig(
            str(target), str(tmp_path / name), (questions,), self_written=3, slots=4, capacity=48, state_layers=2
        )

    total = regenerate(config("whole.jsonl"))
    whole = {row["key"]: row for row in map(json.loads, (tmp_path / "whole.jsonl").read_text().splitlines())}
    assert total == len(whole) >= 14
    assert not any(row["prompt_ids"] == [] or row["response_ids"] == [] for row in whole.values())
    regenerate(config("part.jsonl"))
    path = tmp_path / "part.jsonl"
    kept = path.read_bytes().split(b"\n")[:5]
    path.write_bytes(b"\n".join(kept) + b'\n{"key": "cut')
    assert regenerate(config("part.jsonl")) == total
    part = [json.loads(line) for line in path.read_text().splitlines()]
    assert [json.dumps(row, ensure_ascii=False).encode() for row in part[:5]] == kept
    assert {row["key"]: row["response_ids"] for row in part} == {k: row["response_ids"] for k, row in whole.items()}


def test_kept_states_are_those_of_a_prefill(tmp_path: Path, questions: PromptSource) -> None:
    target_dir = write_target(tmp_path / "target", "qwen3-gqa-untied")
    out = tmp_path / "rows.jsonl"
    regenerate(RegenerateConfig(str(target_dir), str(out), (questions,), slots=4, capacity=48, state_layers=3))
    store = StateStore(Target.load(target_dir), num_layers=2)
    for record in load_records([out]):
        assert record.states is not None
        kept = store.read(record).float()
        fresh = store.read(
            type(record)(record.key, record.domain, record.token_ids, record.prompt_length, None)
        ).float()
        # bf16 states of one-row steps against one prefill: equal up to rounding
        torch.testing.assert_close(kept, fresh, rtol=0.1, atol=0.1)


def test_shards_partition_the_prompts(tmp_path: Path, questions: PromptSource) -> None:
    target = write_target(tmp_path / "target")
    keys: list[str] = []
    for shard in range(3):
        out = tmp_path / f"{shard}.jsonl"
        regenerate(RegenerateConfig(str(target), str(out), (questions,), slots=4, capacity=48, shard=shard, shards=3))
        keys += [json.loads(line)["key"] for line in out.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 14


def test_dry_run_generates_nothing(tmp_path: Path, questions: PromptSource, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_target(tmp_path / "target")
    out = tmp_path / "rows.jsonl"
    regenerate(RegenerateConfig(str(target), str(out), (questions,), slots=4, capacity=1000), dry_run=True)
    # 4 layers, keys and values, 4 rows, 2 heads of 8, 1000 positions, 2 bytes
    assert f"{4 * 2 * 4 * 2 * 8 * 1000 * 2 / 1e6:.0f} MB" in capsys.readouterr().err
    assert not out.exists()
