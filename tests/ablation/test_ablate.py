"""Ablations: equal budgets, arms found again, time respected, intervals as they should be."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_ext import cli
from sglang_ext.ablation import report
from sglang_ext.ablation.arms import STUDIES, Arm, chosen_studies, parse_settings
from sglang_ext.ablation.runner import Measured, Runner
from sglang_ext.core.refusal import Refusal
from sglang_ext.models.tapped.checkpoint import expected_shapes
from sglang_ext.models.target import Target
from sglang_ext.training.evaluate import Acceptance
from sglang_ext.training.methods import METHODS
from sglang_ext.training.train import LOG
from tests.training.tiny_targets import random_rows, write_rows, write_target

SETTINGS = {
    "block_size": 4,
    "num_layers": 2,
    "num_taps": 1,
    "calibrator_rank": 8,
    "blocks_per_step": 8,
    "anchors_per_sequence": 4,
    "frequent": 0,
    "threads": 1,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("ablation")
    return {
        "target": str(write_target(folder / "target")),
        "data": str(write_rows(folder / "rows.jsonl", random_rows(12))),
        "held": str(write_rows(folder / "held.jsonl", random_rows(5, seed=7), domain="held")),
    }


def make_runner(files: dict[str, str], out: Path, steps: int = 3, **more: Any) -> Runner:
    out.mkdir(exist_ok=True)
    return Runner(files["target"], [files["data"]], [files["held"]], out, steps, {**SETTINGS, **more})


@pytest.mark.parametrize("study", ["method", "calibration", "projections", "fusion"])
def test_arms_of_a_study_differ_only_in_what_it_is_about(files: dict[str, str], tmp_path: Path, study: str) -> None:
    """Same rows, steps, blocks and seed; DFlash has DFlare's number of parameters to within one column."""
    runner = make_runner(files, tmp_path)
    configs = [runner.config(arm) for arm in STUDIES[study]]
    for name in ("data", "steps", "blocks_per_step", "anchors_per_sequence", "seed", "frequent", "lr"):
        assert len({vars(config)[name] for config in configs}) == 1, name
    assert len({config.out for config in configs}) == len(configs)
    if study == "method":
        target = Target.load(files["target"])
        drafters = [METHODS[config.METHOD].new_model(target, config).config for config in configs]
        sizes = [sum(math.prod(shape) for shape in expected_shapes(drafter).values()) for drafter in drafters]
        assert abs(sizes[0] - sizes[1]) <= 3 * 2 * 32


def test_a_finished_arm_is_found_and_measured_once(files: dict[str, str], tmp_path: Path) -> None:
    runner = make_runner(files, tmp_path)
    arm = STUDIES["method"][1]
    first = runner.run(arm, math.inf)
    assert first is not None and first.steps == 3 and len(first.found) == 5
    log = Path(runner.config(arm).out) / LOG
    before = log.read_bytes()
    # No time left: what is done is still there.
    assert make_runner(files, tmp_path).run(arm, 0.0) == first
    assert log.read_bytes() == before
    with pytest.raises(Refusal, match="use a new --out"):
        make_runner(files, tmp_path, lr=0.5).run(arm, math.inf)


def test_arms_that_the_time_does_not_reach_are_left(files: dict[str, str], tmp_path: Path) -> None:
    runner = make_runner(files, tmp_path)
    assert runner.run(STUDIES["method"][0], time.time() - 1) is None
    assert not (tmp_path / "arms").exists()


def test_selective_arms_share_one_training(files: dict[str, str], tmp_path: Path) -> None:
    """Verifying fewer drafts never raises accept length, and is counted."""
    runner = make_runner(files, tmp_path)
    arms = (*STUDIES["selective"], Arm("at most one", "flexdraft", prune=1.0))
    assert len({runner.config(arm).out for arm in arms}) == 1
    measured = [runner.run(arm, math.inf) for arm in arms]
    totals = []
    for one in measured:
        assert one is not None
        total = Acceptance(4)
        for found in one.found.values():
            total.merge(found)
        totals.append(total)
    assert totals[0].verified == 3 * totals[0].steps
    assert totals[-1].verified == totals[-1].steps
    for less in totals[1:]:
        assert less.accept_length <= totals[0].accept_length and less.verified / less.steps <= 3
        assert less.tokens == totals[0].tokens


def test_a_part_of_the_data_is_a_fixed_part(files: dict[str, str], tmp_path: Path) -> None:
    runner = make_runner(files, tmp_path)
    config = runner.config(STUDIES["data"][0])
    rows = [json.loads(line) for line in Path(config.data[0]).read_text().splitlines()]
    everything = [json.loads(line) for line in Path(files["data"]).read_text().splitlines()]
    assert 0 < len(rows) < len(everything) and all(row in everything for row in rows)


def test_the_command_writes_a_report_and_says_what_is_missing(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["ablate", "--target", files["target"], "--data", files["data"], "--held-out", files["held"]]
    given += ["--out", str(tmp_path), "--steps", "2", "--threads", "1", "--study", "method", "gamma"]
    for name, value in SETTINGS.items():
        given += ["--set", f"{name}={value}"]
    assert cli.main(given) == 0
    text = (tmp_path / "ablation.md").read_text()
    assert text.count("| DFlare |") == 1 and text.count("| progressive gamma |") == 1
    assert "2 steps each; 5 responses." in text
    assert cli.main([*given, "--study", "method", "calibration", "--minutes", "0.000001"]) == 3
    out = capsys.readouterr().out
    assert "Not finished in the time given: attention only, + calibration." in out and "| DFlare |" in out
    assert cli.main([*given, "--set", "blocks_per_stp=4"]) == 1
    assert cli.main([*given, "--study", "gama"]) == 1


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Ratio of sums over simulated responses: 95 % intervals hold the true ratio in about 95 % of the draws."""
    seed = random.randrange(10_000)
    print(f"seed {seed}")
    chooser = random.Random(seed)
    held = 0
    for _ in range(400):
        found = []
        for _ in range(40):
            steps = chooser.randint(10, 60)
            tokens = sum(1 + (chooser.random() < 0.6) + (chooser.random() < 0.4) for _ in range(steps))
            found.append(Acceptance(4, prompts=1, steps=steps, tokens=tokens))
        interval = report.mean_interval(found)
        assert interval.low is not None and interval.high is not None
        held += interval.low <= 2.0 <= interval.high
    assert 360 <= held <= 396


def test_the_first_arm_is_the_reference() -> None:
    def measured(label: str, tokens: int) -> Measured:
        found = {str(i): Acceptance(4, 1, 10, tokens + i) for i in range(5)}
        return Measured(Arm(label, "dflare"), 10, 3, 1.0, found)

    lines = report.lines_of([measured("a", 20), measured("b", 20), measured("c", 40)])
    assert lines[0].against is None
    assert lines[1].against is not None and lines[1].against.estimate == pytest.approx(1.0)
    assert lines[2].against is not None and lines[2].against.low is not None and lines[2].against.low > 1.5


def test_names_and_settings_are_strict() -> None:
    assert parse_settings(["lr=0.5", "optimizer=muon", "num-taps=3"]) == {"lr": 0.5, "optimizer": "muon", "num_taps": 3}
    assert list(chosen_studies(["gamma", "method"])) == ["gamma", "method"]
    with pytest.raises(Refusal, match="OPTION=VALUE"):
        parse_settings(["lr"])
    with pytest.raises(Refusal, match="did you mean 'gamma'"):
        chosen_studies(["gama"])
