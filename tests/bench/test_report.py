"""Rows, tables and files made from measurements whose numbers are known."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from sglang_ext.bench import plot, report
from sglang_ext.bench.client import Completion
from sglang_ext.bench.datasets import Prompt
from sglang_ext.bench.interleave import Block
from sglang_ext.bench.runner import OVERRIDE, PLAIN, Measurement, Progress, format_seconds
from sglang_ext.core.records import StepRecord

SPECULATIVE = "flexdraft"
ENVIRONMENT = {
    "hardware": {"gpus": [], "cpu": "Some CPU", "usable_cpus": 2, "omp_num_threads": None},
    "versions": {"sglang": "1.2.3", "torch": None},
    "git": "abc123",
}


def measurement(
    arm: str, decode_s: Sequence[float], outputs: Sequence[Sequence[int]], round_index: int = 0, verify: int = 0
) -> Measurement:
    """One block: request i reads its prompt for 1 s, then decodes for ``decode_s[i]`` seconds."""
    prompts = tuple(Prompt("gsm8k", f"gsm8k/{index}", "q", (1, 2)) for index in range(len(outputs)))
    spec = {"spec_verify_ct": verify} if verify else {}
    completions = tuple(
        Completion(tuple(ids), "", 10.0, 11.0, 11.0 + seconds, "length", spec)
        for ids, seconds in zip(outputs, decode_s, strict=True)
    )
    return Measurement(Block("gsm8k", len(outputs), round_index, arm, prompts), completions)


def never(ids: Sequence[int], candidates: Sequence[int]) -> list[float]:
    raise AssertionError("equal texts need no scores")


def test_speed_counts_tokens_after_the_first_over_time_after_the_first() -> None:
    single = measurement(PLAIN, [2.0], [range(11)])
    assert single.decode_tok_s == pytest.approx(5.0)
    assert single.total_tok_s == pytest.approx(11 / 3)


def test_a_request_that_ends_early_does_not_slow_the_batch_down() -> None:
    full = measurement(PLAIN, [2.0, 2.0], [range(11), range(11)])
    short = measurement(PLAIN, [2.0, 1.0], [range(11), range(6)])
    assert full.decode_tok_s == pytest.approx(10.0)
    assert short.decode_tok_s == pytest.approx(10.0)


def test_the_others_prompts_are_not_decoding_time() -> None:
    """A server that delivers first tokens one by one decodes as fast as one that delivers them together."""
    together = measurement(PLAIN, [2.0, 2.0], [range(11), range(11)])
    early, late = together.completions
    one_by_one = Measurement(together.block, (dataclasses.replace(early, first_s=10.5), late))
    assert one_by_one.decode_tok_s == together.decode_tok_s == pytest.approx(10.0)


def test_a_request_that_ends_before_the_last_prompt_is_read_does_not_count() -> None:
    both = measurement(PLAIN, [2.0, 2.0], [range(11), range(3)])
    done = dataclasses.replace(both.completions[1], first_s=10.2, last_s=10.6)
    assert Measurement(both.block, (both.completions[0], done)).decode_tok_s == pytest.approx(5.0)


def test_a_batch_that_is_no_batch_is_not_counted_as_one() -> None:
    """Queued one behind the other, ten tokens a second each: ten in all, not twenty."""
    both = measurement(PLAIN, [2.0, 4.0], [range(21), range(21)])
    first, second = both.completions
    later = dataclasses.replace(second, first_s=13.0, last_s=15.0)
    assert Measurement(both.block, (first, later)).decode_tok_s == pytest.approx(10.0)
    overlapping = dataclasses.replace(second, first_s=12.0, last_s=14.0)
    half = Measurement(both.block, (first, overlapping)).decode_tok_s
    assert half == pytest.approx(20.0)


def test_one_token_says_nothing_about_decoding() -> None:
    assert measurement(PLAIN, [0.0], [range(1)]).decode_tok_s is None


def three_arms() -> list[Measurement]:
    ids = list(range(21))
    return [
        item
        for index in range(3)
        for item in (
            measurement(SPECULATIVE, [1.0], [ids], index, verify=10),
            measurement(OVERRIDE, [2.2], [ids], index),
            measurement(PLAIN, [2.0], [ids], index),
        )
    ]


def test_a_row_pairs_rounds_and_counts_texts() -> None:
    (row,) = report.rows(three_arms(), never, 0.02)
    assert row.decode_ratio[PLAIN].estimate == pytest.approx(2.0)
    assert row.decode_ratio[OVERRIDE].estimate == pytest.approx(2.2)
    assert row.accept_length == pytest.approx(2.1)
    assert (row.texts[PLAIN].pairs, row.texts[PLAIN].equal) == (3, 3)
    assert row.decode_tok_s[SPECULATIVE] == pytest.approx(20.0)


def two_methods() -> list[Measurement]:
    ids = list(range(21))
    return [
        *[item for item in three_arms() if item.block.arm != OVERRIDE],
        *[measurement("dflare", [0.5], [[*ids[:-1], 99]], index, verify=5) for index in range(3)],
    ]


def test_every_method_has_a_row_beside_the_same_plain_server() -> None:
    one, two = report.rows(two_methods(), lambda ids, candidates: [0.0, -5.0], 0.02)
    assert (one.arm, two.arm) == (SPECULATIVE, "dflare")
    assert one.decode_tok_s[PLAIN] == two.decode_tok_s[PLAIN] and "dflare" not in one.decode_tok_s
    assert (one.decode_ratio[PLAIN].estimate, two.decode_ratio[PLAIN].estimate) == pytest.approx((2.0, 4.0))
    assert (one.texts[PLAIN].different, two.texts[PLAIN].different) == (0, 3)
    assert two.accept_length == pytest.approx(4.2)
    lines = report.summary_table([one, two])
    assert len({line.count("|") for line in lines}) == 1 and "dflare" in lines[-1]


@pytest.mark.parametrize(("gap", "ties"), [(0.001, 1), (0.5, 0)])
def test_a_difference_is_a_near_tie_only_below_the_tolerance(gap: float, ties: int) -> None:
    asked = []

    def score(ids: Sequence[int], candidates: Sequence[int]) -> list[float]:
        asked.append((list(ids), list(candidates)))
        return [-1.0, -1.0 - gap]

    pair = [measurement(SPECULATIVE, [1.0], [[5, 6, 7]], verify=2), measurement(PLAIN, [1.0], [[5, 9, 7]])]
    (row,) = report.rows(pair, score, 0.02)
    assert asked == [([1, 2, 5], [6, 9])]
    assert (row.texts[PLAIN].near_ties, row.texts[PLAIN].different) == (ties, 1 - ties)


def test_an_output_that_ends_early_is_a_difference() -> None:
    pair = [measurement(SPECULATIVE, [1.0], [[5, 6]], verify=2), measurement(PLAIN, [1.0], [[5, 6, 7]])]
    (row,) = report.rows(pair, never, 0.02)
    assert row.texts[PLAIN].different == 1
    assert row.texts[PLAIN].gaps[0]["gap"] is None


def test_sampled_runs_compare_no_texts() -> None:
    (row,) = report.rows(three_arms(), None, 0.02)
    assert row.texts == {}
    assert "sampled" in "\n".join(report.summary_table([row]))


RECORDS = [
    StepRecord("prefill", 0, (), 0, 1, 0, (), 9.0, 1),
    StepRecord("parallel", 3, (1, 2, 3), 2, 4, 4, (0.9, 0.8, 0.7), 30.0, 1),
    StepRecord("sequential", 1, (1,), 1, 4, 0, (0.9,), 30.0, 1),
]


def test_step_records_are_summed_without_the_prefill() -> None:
    (item,) = report.acceptance({("gsm8k", SPECULATIVE): RECORDS})
    assert (item.steps, item.modes) == (2, {"parallel": 1, "sequential": 1})
    assert (item.mean_verify_length, item.mean_accepted) == (2.0, 1.5)
    assert [rate.accepted for rate in item.positions] == [2, 1, 0]


def test_tables_are_rectangular_and_the_report_names_the_machine() -> None:
    table = report.rows(three_arms(), never, 0.02)
    accepted = report.acceptance({("gsm8k", SPECULATIVE): RECORDS})
    text = report.markdown(table, accepted, ENVIRONMENT)
    assert "Some CPU, 2 CPUs, OMP_NUM_THREADS default; sglang 1.2.3; revision abc123" in text
    for block in text.split("\n\n"):
        columns = {line.count("|") for line in block.splitlines() if line.startswith("|")}
        assert len(columns) <= 1


def test_the_json_file_holds_every_raw_measurement_and_no_nan(tmp_path: Path) -> None:
    measurements = three_arms()
    table = report.rows(measurements, never, 0.02)
    accepted = report.acceptance(
        {("gsm8k", SPECULATIVE): [StepRecord("parallel", 2, (1, 2), 0, 4, 3, (0.5, 0.5), 1.0, 1)]}
    )
    report.write(tmp_path, "text", measurements, table, accepted, ENVIRONMENT, {"batches": [1]})

    def no_constants(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    data = json.loads((tmp_path / "results.json").read_text(), parse_constant=no_constants)
    assert len(data["measurements"]) == 9
    assert data["measurements"][0]["requests"][0]["output_ids"] == list(range(21))
    assert data["rows"][0]["decode_ratio"][PLAIN]["pairs"] == 3


@pytest.mark.skipif(not plot.is_available(), reason="matplotlib is not installed")
def test_the_plot_is_a_png(tmp_path: Path) -> None:
    records = {("gsm8k", SPECULATIVE): RECORDS, ("gsm8k", "dflare"): RECORDS}
    table = report.rows(two_methods(), lambda ids, candidates: [0.0, -5.0], 0.02)
    plot.draw(tmp_path / "two.png", table, report.acceptance(records), "sub")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    plot.draw(
        tmp_path / "p.png",
        report.rows(three_arms(), never, 0.02),
        report.acceptance({("gsm8k", SPECULATIVE): RECORDS}),
        "sub",
    )
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_time_left_shrinks_to_nothing() -> None:
    measurements = three_arms()
    progress = Progress([item.block for item in measurements])
    left = []
    for item in measurements:
        progress.done(item)
        left.append(progress.remaining_s())
    assert left[-1] == 0.0
    assert all(math.isfinite(seconds) for seconds in left)


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (185, "3m 05s")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
