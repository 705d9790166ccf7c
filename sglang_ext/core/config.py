"""What a user may set: server options (one JSON object) and per-request overrides (one JSON object in the request).

Server options travel in ``--speculative-adaptive-config``, a stock string flag that reaches every process; its value is
a file name or the JSON object itself. Request overrides travel in ``sampling_params.custom_params["speculative"]``
(``custom_params`` on the OpenAI routes). Every key of both is listed here; an unknown one is an error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_ext.core.accept import AcceptRule
from sglang_ext.core.prune import PruneConfig, PruneStrategy
from sglang_ext.core.refusal import Refusal, nearest, refuse_unknown
from sglang_ext.core.schedule import MODE_NAMES, ModePolicy

PRUNING = tuple(strategy.value for strategy in PruneStrategy)
ACCEPTANCE = tuple(rule.value for rule in AcceptRule if rule is not AcceptRule.GREEDY)
GPU_ATTENTION = ("merged", "masked")
OPTIONS_FLAG = "--speculative-adaptive-config"
REQUEST_KEY = "speculative"


@dataclass(frozen=True)
class SpecOptions:
    """Server-wide options of the ``flexdraft`` algorithm.

    Attributes:
        mode: ``auto`` picks the fastest; ``parallel``, ``sequential`` and ``plain`` force one mode.
        adaptive: ``auto`` goes by measured step times and accept lengths, and decodes plainly where that is faster;
            false leaves it to the two batch sizes below alone (FlexDraft section 4).
        parallel_max_batch: largest decode batch for which ``auto`` may draft in parallel.
        plain_min_batch: batch size from which ``auto`` never drafts; ``null`` sets no limit.
        pruning: selective verification strategy (FlexDraft section 4).
        prune_threshold: its threshold, a probability in (0, 1). The paper's 0.01 verifies more drafts for hardly longer
            accepts: free where passes are bound by memory, dear on a CPU and in large batches.
        acceptance: rule for sampled requests (FlexDraft section 5); greedy requests always match exactly.
        draft_top_m: width of the truncated draft distribution stored per slot under ``rejection``.
        profile: time the parts of every step; ``/server_info`` shows the sums (``sglang-ext bench steps`` reads them).
        gpu_attention: how mask rows are attended on a GPU with FlashInfer: ``merged`` (committed tokens without a mask,
            the rest with a small one) or ``masked`` (one call with one custom mask); the CPU has one form.
    """

    mode: str = "auto"
    adaptive: bool = True
    parallel_max_batch: int = 2
    plain_min_batch: int | None = None
    pruning: str = "cumulative_product"
    prune_threshold: float = 0.1
    acceptance: str = "rejection"
    draft_top_m: int = 64
    profile: bool = False
    gpu_attention: str = "merged"

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, MODE_NAMES)
        _one_of("pruning", self.pruning, PRUNING)
        _one_of("acceptance", self.acceptance, ACCEPTANCE)
        _one_of("gpu_attention", self.gpu_attention, GPU_ATTENTION)
        _integer("parallel_max_batch", self.parallel_max_batch, minimum=0)
        _integer("draft_top_m", self.draft_top_m, minimum=1)
        if self.plain_min_batch is not None:
            _integer("plain_min_batch", self.plain_min_batch, minimum=1)
        if not _is_threshold(self.prune_threshold):
            raise Refusal(
                f"{OPTIONS_FLAG}: prune_threshold is {self.prune_threshold!r}",
                "a number strictly between 0 and 1 is allowed",
                "the default is 0.1, the paper's 0.01",
            )
        for key, given in (("adaptive", self.adaptive), ("profile", self.profile)):
            if not isinstance(given, bool):
                raise Refusal(f"{OPTIONS_FLAG}: {key} is {given!r}", "true or false is allowed", "correct the value")

    def mode_policy(self) -> ModePolicy:
        """Return the mode by name or by batch size."""
        return ModePolicy(self.mode, self.parallel_max_batch, self.plain_min_batch)

    @property
    def draft_width(self) -> int | None:
        """Tokens of each draft distribution that are stored; None where drafts are greedy."""
        return self.draft_top_m if self.acceptance == "rejection" else None

    def prune_config(self) -> PruneConfig:
        """Return the selective-verification settings."""
        return PruneConfig(PruneStrategy(self.pruning), float(self.prune_threshold))

    def accept_rule(self) -> AcceptRule:
        """Return the acceptance rule of sampled requests."""
        return AcceptRule(self.acceptance)


@dataclass(frozen=True)
class RequestOptions:
    """Per-request overrides: ``custom_params={"speculative": {"mode": "plain", "records": true}}``.

    Attributes:
        mode: force one mode for this request only; ``None`` follows the server.
        pruning, prune_threshold: selective verification of this request only; ``None`` follows the server.
        records: return one ``StepRecord`` per decoding step in ``meta_info["speculative"]``.
        script: which scripted drafter answers this request (``scripted`` algorithm only).
    """

    mode: str | None = None
    pruning: str | None = None
    prune_threshold: float | None = None
    records: bool = False
    script: str | None = None

    def prune_config(self, server: PruneConfig) -> PruneConfig:
        """Return the server's settings with this request's own in their place."""
        if self.pruning is None and self.prune_threshold is None:
            return server
        return replace(
            server,
            strategy=server.strategy if self.pruning is None else PruneStrategy(self.pruning),
            threshold=server.threshold if self.prune_threshold is None else float(self.prune_threshold),
        )


def load_options(value: str | None) -> SpecOptions:
    """Read :class:`SpecOptions` from the flag's value: a file name, a JSON object, or ``None`` for the defaults.

    Raises:
        Refusal: unreadable file, malformed JSON, unknown key or bad value; the message names the flag.
    """
    if value is None:
        return SpecOptions()
    if not isinstance(value, str):  # from Python, where the host does not check it
        raise Refusal(
            f"{OPTIONS_FLAG} (speculative_adaptive_config) is a {type(value).__name__}",
            "a string is allowed: a file name or a JSON object",
            "pass json.dumps(...) of it",
        )
    text, where = _read(value)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers and nesting beyond what Python reads
        raise Refusal(
            f"{OPTIONS_FLAG} {where} is not JSON ({error})", "a JSON object is allowed", "correct it"
        ) from error
    if not isinstance(data, dict):
        raise Refusal(f"{OPTIONS_FLAG} {where} holds a {type(data).__name__}", "a JSON object is allowed", "correct it")
    refuse_unknown(f"{OPTIONS_FLAG} {where}", data, [field.name for field in dataclasses.fields(SpecOptions)])
    return SpecOptions(**data)


def parse_request_options(custom_params: Mapping[str, Any] | None) -> RequestOptions:
    """Read a request's overrides.

    Raises:
        ValueError: unknown key, unknown mode, or wrong type; the server answers 400 with this message.
    """
    if custom_params is None:
        return RequestOptions()
    if not isinstance(custom_params, Mapping):  # the host's own routes do not all check it
        raise ValueError(f"custom_params is a {type(custom_params).__name__}; an object is allowed")
    given = custom_params.get(REQUEST_KEY)
    if given is None:
        return RequestOptions()
    where = f"custom_params[{REQUEST_KEY!r}]"
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is a {type(given).__name__}; an object such as {{'mode': 'plain'}} is allowed")
    allowed = [field.name for field in dataclasses.fields(RequestOptions)]
    for key in given:
        if key not in allowed:
            raise ValueError(
                f"{where} has unknown key {key!r}{nearest(key, allowed)}; known keys: {', '.join(allowed)}"
            )
    options = RequestOptions(**given)
    if options.mode is not None and options.mode not in MODE_NAMES:
        raise ValueError(f"{where}.mode is {options.mode!r}; allowed: {', '.join(MODE_NAMES)}")
    if options.pruning is not None and options.pruning not in PRUNING:
        raise ValueError(f"{where}.pruning is {options.pruning!r}; allowed: {', '.join(PRUNING)}")
    if options.prune_threshold is not None and not _is_threshold(options.prune_threshold):
        raise ValueError(
            f"{where}.prune_threshold is {options.prune_threshold!r}; a number strictly between 0 and 1 is allowed"
        )
    if not isinstance(options.records, bool):
        raise ValueError(f"{where}.records is {options.records!r}; true or false is allowed")
    if options.script is not None and not isinstance(options.script, str):
        raise ValueError(f"{where}.script is {options.script!r}; a string is allowed")
    return options


def _read(value: str) -> tuple[str, str]:
    if value.lstrip().startswith("{"):
        return value, "(inline)"
    try:
        return Path(value).read_text(encoding="utf-8"), value
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(
            f"{OPTIONS_FLAG} {value!r} cannot be read ({error})",
            "a readable JSON file or an inline JSON object is allowed",
            """for example --speculative-adaptive-config '{"mode": "sequential"}'""",
        ) from error


def _one_of(key: str, given: object, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        hint = nearest(given, allowed) if isinstance(given, str) else ""
        raise Refusal(
            f"{OPTIONS_FLAG}: {key} is {given!r}{hint}", f"allowed: {', '.join(allowed)}", "correct the value"
        )


def _is_threshold(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and 0.0 < given < 1.0


def _integer(key: str, given: object, minimum: int) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < minimum:
        raise Refusal(f"{OPTIONS_FLAG}: {key} is {given!r}", f"an integer >= {minimum} is allowed", "correct the value")
