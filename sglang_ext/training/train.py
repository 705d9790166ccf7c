"""Training a drafter, whatever its method: the loop, its checkpoints and its log (FlexDraft section 6).

Every random choice is a function of (seed, step), and the fraction of the schedule done at each step is written to the
log, so a run that is killed and resumed gives the same weights to the bit as one that was not.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.loss import candidate_cross_entropy, draw_candidates, leading_matches, slot_weights
from sglang_ext.models.target import Target
from sglang_ext.training.config import CONFIGS, TrainConfig
from sglang_ext.training.data import Batch, Record, Schedule, collate, is_held_out, load_records, refuse_foreign_tokens
from sglang_ext.training.methods import load_drafter, method_for
from sglang_ext.training.optimizer import Optimizer, learning_scale
from sglang_ext.training.state import read_state, refusal_of_a_worker

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
STATUS = "STATUS.txt"
_TAPPED_SIZES = "--num-layers, --num-taps, --intermediate-size, --context-projections"
_SIZES = {
    "flexdraft": "--num-layers, --calibrator, --calibrator-rank",
    "dflare": _TAPPED_SIZES,
    "dflash": _TAPPED_SIZES,
}


@dataclass(frozen=True)
class StepResult:
    """What one step measured: the loss, the accept length at its anchors, the share of correct slots by position."""

    loss: float
    accept_length: float
    slot_accuracy: tuple[float, ...]
    grad_norm: float


def build_model(target: Target, config: TrainConfig) -> Any:
    """A new drafter of the run's method, the same for the same seed."""
    torch.manual_seed(config.seed)
    return method_for(config).new_model(target, config)


def start_from(model: Any, folder: str) -> None:
    """Begin with the weights of an exported drafter.

    Raises:
        Refusal: if the folder is no drafter, or one of another method or other sizes.
    """
    saved = load_drafter(folder, model.target)
    if saved.config.METHOD != model.config.METHOD:
        raise Refusal(
            f"--start-from {folder} holds a {saved.config.METHOD} drafter",
            f"a {model.config.METHOD} drafter is being trained",
            f"train it with `sglang-ext train {saved.config.METHOD}`",
        )
    found = saved.state_dict()
    for name, wanted in sorted(model.state_dict().items()):
        shape = tuple(found[name].shape) if name in found else None
        if shape != tuple(wanted.shape):
            raise Refusal(
                f"--start-from {folder} has {name} of shape {shape}",
                f"the drafter to train has {tuple(wanted.shape)}",
                f"give the sizes it was trained with ({_SIZES[model.config.METHOD]})",
            )
    model.load_state_dict({name: found[name] for name in model.state_dict()})


def frequent_tokens(records: Sequence[Record], count: int, vocab_size: int) -> Tensor:
    """The ``count`` most frequent response tokens (ties by id), sorted by id; 0 means the whole vocabulary."""
    if count == 0 or count >= vocab_size:
        return torch.arange(vocab_size)
    counts: Counter[int] = Counter()
    for record in records:
        counts.update(record.token_ids[record.prompt_length :])
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:count]))


class Trainer:
    """One process of a run. ``rank`` of ``config.workers`` takes its share of every step's chunks."""

    def __init__(self, config: TrainConfig, target: Target, records: Sequence[Record], rank: int = 0) -> None:
        self.config, self.target, self.rank = config, target, rank
        self.records = [record for record in records if not is_held_out(record, config.held_out_percent)]
        self.held_out = [record for record in records if is_held_out(record, config.held_out_percent)]
        refuse_foreign_tokens(records, target.shape.vocab_size)
        if not self.records:
            raise Refusal(f"{len(records)} rows, all held out", "at least one row to train on", "add rows to --data")
        self.method = method_for(config)
        self.model = build_model(target, config)
        self.store = self.method.store(self.model, config)
        self.optimizer = Optimizer(self.model, config.optimizer, config.lr, config.lr_other)
        self.chunks_per_step = config.blocks_per_step // config.anchors_per_sequence
        self.schedule = Schedule(self.records, self.chunks_per_step, config.anchors_per_sequence, config.seed)
        self.frequent = frequent_tokens(self.records, config.frequent, target.shape.vocab_size)
        self.frequent_head = target.head[self.frequent]
        self.step_number, self.progress = 0, 0.0

    @property
    def records_digest(self) -> str:
        return hashlib.sha256("\n".join(record.key for record in self.records).encode()).hexdigest()

    def slot_weights(self, progress: float) -> Tensor:
        """``[K-1]`` at schedule fraction ``progress``."""
        return slot_weights(self.config.block_size, self.method.gamma(self.config, progress), self.target.device)

    def batch(self, step: int, weights: Tensor) -> tuple[Batch, float]:
        """This process's blocks of a step, and the sum of slot weights over the blocks of all processes."""
        chunks = self.schedule.at(step)
        total = 0.0
        for chunk in chunks:
            room = torch.tensor([len(self.records[chunk.record].token_ids) - anchor - 2 for anchor in chunk.anchors])
            total += float((weights * (torch.arange(len(weights)) < room[:, None])).sum())
        mine = chunks[self.rank :: self.config.workers]
        return collate(self.store, self.records, mine, self.config.block_size), total

    def loss(self, batch: Batch, weights: Tensor, total: float, seed: int) -> tuple[Tensor, Tensor]:
        """The step's loss (this process's part) and which slots ``[N, A, K-1]`` were right."""
        model, valid = self.model, batch.valid
        hidden, low = model.head_inputs(model(batch.context), batch.context.bonus_ids)
        labels = batch.labels[valid]
        pool = 0 if len(self.frequent) == self.target.shape.vocab_size else self.config.drawn
        candidates = draw_candidates(self.frequent, pool, labels, self.target.shape.vocab_size, seed)
        extra = candidates.ids[len(self.frequent) :]
        head = torch.cat((self.frequent_head, self.target.head[extra])) if len(extra) else self.frequent_head
        bias, low_weight = candidates.correction, None
        if low is not None:
            last = model.anchor_bias_mlp[2]
            low, low_weight = low[valid], last.weight.to(self.target.dtype)[candidates.ids]
            bias = bias + last.bias[candidates.ids]
        loss, _, correct = candidate_cross_entropy(
            hidden[valid],
            head,
            bias,
            candidates.index(labels),
            weights.expand_as(valid)[valid] / total,
            low,
            low_weight,
        )
        right = torch.zeros_like(valid)
        right[valid] = correct
        return loss, right

    def step(self, progress: float) -> StepResult:
        """One optimizer step at schedule fraction ``progress``."""
        weights = self.slot_weights(progress)
        batch, total = self.batch(self.step_number, weights)
        self.model.zero_grad(set_to_none=True)
        loss, right = self.loss(batch, weights, total, self.config.seed * 1_000_003 + self.step_number * 64 + self.rank)
        loss.backward()
        measured = torch.stack(
            [loss.detach(), (1 + leading_matches(right, batch.valid)).float().mean()]
            + [(right[..., j].sum() / batch.valid[..., j].sum().clamp_min(1)) for j in range(right.shape[-1])]
        )
        if self.config.workers > 1:
            self._share_gradients()
            dist.all_reduce(measured)
            measured[1:] /= self.config.workers
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizer.step(learning_scale(progress, self.config.warmup))
        self.step_number, self.progress = self.step_number + 1, progress
        values = measured.tolist()
        return StepResult(values[0], values[1], tuple(values[2:]), float(norm))

    def _share_gradients(self) -> None:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step_number,
            "progress": self.progress,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "method": self.config.METHOD,
            "config": asdict(self.config),
            "records": self.records_digest,
        }

    def load_state_dict(self, state: dict[str, Any], where: Path) -> None:
        """Continue from a checkpoint; refuses one made from other rows or another drafter."""
        if state["records"] != self.records_digest:
            raise Refusal(
                f"{where} was made from other rows", "the same --data files", "restore them or use a new --out"
            )
        made_by = saved_config(state, str(where))
        if made_by.METHOD != self.config.METHOD:
            raise Refusal(f"{where} is a {made_by.METHOD} run", f"not one of {self.config.METHOD}", "use a new --out")
        for name, value in asdict(self.config).items():
            before = vars(made_by)[name]
            if name not in self.config.CHANGEABLE and before != value:
                raise Refusal(f"--{name.replace('_', '-')} {value}", f"{where} has {before}", "use a new --out")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step_number, self.progress = state["step"], state["progress"]


def saved_config(state: Mapping[str, Any], where: str) -> TrainConfig:
    """The configuration inside a checkpoint; one that names no method is FlexDraft's, which was the first."""
    return CONFIGS[state.get("method", "flexdraft")].from_dict(state["config"], where)


def save_atomically(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that a crash leaves the old or the new one, never a part."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_log(path: Path) -> dict[int, dict[str, Any]]:
    """Logged steps by number; a line cut off by a crash is removed from the file."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return {row["step"]: row for row in map(json.loads, whole.splitlines())}


def next_progress(config: TrainConfig, step: int, progress: float, step_seconds: float, now: float) -> float:
    """The schedule fraction of the next step: step / steps, or the share of the time left that a step takes."""
    if config.steps:
        return (step + 1) / config.steps
    left = config.stop_at - now
    if left <= 0:
        return 1.0
    return progress + (1 - progress) * min(1.0, step_seconds / max(left, step_seconds))


class Run:
    """The loop around a :class:`Trainer`: schedule, log, status, checkpoints, exports."""

    def __init__(self, trainer: Trainer, out: Path, export: Callable[[Trainer], None] | None) -> None:
        self.trainer, self.out, self.export = trainer, out, export
        self.config = trainer.config
        self.main = trainer.rank == 0
        self.recent: list[StepResult] = []

    def execute(self) -> None:
        trainer, config = self.trainer, self.config
        logged = read_log(self.out / LOG) if self.main else {}
        started = saved = exported = shown = time.monotonic()
        seconds, first = 1.0, trainer.step_number
        parent = torch.multiprocessing.parent_process() if config.workers > 1 else None
        while trainer.progress < 1.0:
            if parent is not None and not parent.is_alive():
                raise SystemExit("the process that started this worker is gone")
            began = time.monotonic()
            step = trainer.step_number
            known = logged[step]["progress"] if step in logged else None
            progress = self._agree(
                known if known is not None else next_progress(config, step, trainer.progress, seconds, time.time())
            )
            result = trainer.step(progress)
            took = time.monotonic() - began
            seconds = took if step == first else 0.9 * seconds + 0.1 * took
            if not self.main:
                continue
            self.recent = [*self.recent[-49:], result]
            if known is None:
                self._log(step, progress, result, took)
            now = time.monotonic()
            if now - shown >= 10 or progress >= 1.0:
                shown = now
                self._report(seconds, now - started)
            if now - saved >= config.checkpoint_seconds or progress >= 1.0:
                saved = now
                save_atomically(self.out / CHECKPOINT, trainer.state_dict())
            first_export = exported == started and now - started >= min(240.0, config.export_seconds)
            if self.export and (first_export or now - exported >= config.export_seconds or progress >= 1.0):
                exported = now
                self.export(trainer)

    def _agree(self, progress: float) -> float:
        """All processes follow the first one's clock and log."""
        if self.config.workers == 1:
            return progress
        shared = torch.tensor([progress], dtype=torch.float64)
        dist.broadcast(shared, 0)
        return float(shared[0])

    def _log(self, step: int, progress: float, result: StepResult, took: float) -> None:
        row = {"step": step, "progress": progress, **asdict(result), "seconds": round(took, 3)}
        with (self.out / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _report(self, seconds: float, elapsed: float) -> None:
        trainer, config, count = self.trainer, self.config, len(self.recent)
        mean = sum(result.accept_length for result in self.recent) / count
        loss = sum(result.loss for result in self.recent) / count
        slots = [sum(column) / count for column in zip(*(result.slot_accuracy for result in self.recent), strict=True)]
        left = (
            (config.steps - trainer.step_number) * seconds if config.steps else max(0.0, config.stop_at - time.time())
        )
        line = (
            f"step {trainer.step_number}, {trainer.progress:.1%}, loss {loss:.3f}, accept length {mean:.3f}, slots "
            f"{' '.join(f'{slot:.2f}' for slot in slots)}, {config.blocks_per_step / seconds:.0f} blocks/s, "
            f"{elapsed / 60:.1f} min done, {left / 60:.1f} min left"
        )
        print(line, file=sys.stderr, flush=True)
        stamp = time.strftime("%H:%M:%S", time.gmtime())
        (self.out / STATUS).write_text(f"{stamp} UTC {line}\n", encoding="utf-8")


def _worker(rank: int, config: TrainConfig, export: Callable[[Trainer], None] | None, rendezvous: str) -> None:
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.workers > 1:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=config.workers)
    out = Path(config.out)
    trainer = Trainer(config, Target.load(config.target), load_records(config.data), rank)
    checkpoint = out / CHECKPOINT
    if checkpoint.exists():
        trainer.load_state_dict(read_state(checkpoint), checkpoint)
    elif config.start_from:
        start_from(trainer.model, config.start_from)
    else:
        trainer.method.begin(trainer.model, config, trainer.records)
    Run(trainer, out, export).execute()
    if config.workers > 1:
        dist.barrier()
        dist.destroy_process_group()


def train(config: TrainConfig, export: Callable[[Trainer], None] | None = None) -> None:
    """Run to the end of the schedule; a checkpoint in ``config.out`` is continued.

    Raises:
        Refusal: bad data, target or checkpoint, or an ``out`` that cannot be written.
    """
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise Refusal(f"--out {out} cannot be written ({error.strerror})", "a writable folder", "name one") from error
    if config.workers == 1:
        _worker(0, config, export, "")
        return
    rendezvous = out / f"rendezvous.{os.getpid()}"
    try:
        torch.multiprocessing.spawn(_worker, (config, export, f"file://{rendezvous}"), config.workers, join=True)
    except torch.multiprocessing.ProcessRaisedException as error:
        raise refusal_of_a_worker(str(error)) or error from error
    finally:
        rendezvous.unlink(missing_ok=True)


def dry_run(config: TrainConfig) -> str:
    """The bytes a run will need, by what for; reads the data and the target's sizes, trains nothing."""
    target, records = Target.load(config.target), load_records(config.data)
    model = build_model(target, config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    row = method_for(config).state_bytes(target, config)
    tokens = sum(len(record.token_ids) - 1 for record in records)
    kept = method_for(config).kept(config, records)
    longest = max(len(record.token_ids) for record in records)
    lines = (
        ("drafter, exported in bf16", 2 * parameters),
        ("drafter, gradients and optimizer state (fp32)", 16 * parameters),
        (f"target states of {len(records)} responses ({kept} already on disk)", row * tokens),
        ("target states of one step, at most", row * longest * config.blocks_per_step // config.anchors_per_sequence),
    )
    return "\n".join(f"{label}: {count / 1e6:.1f} MB" for label, count in lines)
