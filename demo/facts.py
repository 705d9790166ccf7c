"""What the page must know of a server before the first request."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import PurePath

from demo.client import Client, ServerProblem
from sglang_ext.core.config import REQUEST_KEY

NAMES = {"FLEXDRAFT": "FlexDraft", "DFLARE": "DFlare", "SCRIPTED": "Scripted drafter"}


@dataclass(frozen=True)
class Facts:
    """One server, as ``/server_info`` describes it.

    Attributes:
        url: its address.
        model: the target's name.
        algorithm: ``FLEXDRAFT``, ``DFLARE``, ...; ``None`` without this package's speculative decoding.
        block_size: K; 0 without speculation.
        mode, pruning, prune_threshold: server-wide options; empty without speculation.
        request_pruning: whether a request may override the pruning options.
        seeds: whether the server honours ``sampling_seed``.
        dtype, device: where and in what precision the target runs.
    """

    url: str
    model: str
    algorithm: str | None = None
    block_size: int = 0
    mode: str = ""
    pruning: str = ""
    prune_threshold: float = 0.0
    request_pruning: bool = False
    seeds: bool = False
    dtype: str = ""
    device: str = ""

    @property
    def telemetry(self) -> bool:
        """Whether answers can carry step records."""
        return self.algorithm is not None

    @property
    def name(self) -> str:
        """The drafter's name, as the page shows it."""
        return NAMES.get(self.algorithm or "", self.algorithm or "no speculative decoding")


def ask_facts(client: Client, known: Facts | None = None) -> Facts:
    """Ask a server what it is.

    Args:
        client: the server.
        known: what it was when last asked; saves asking again what costs a request.

    Raises:
        ServerProblem: nobody answers, or not an SGLang server.
    """
    info = client.get("/server_info")
    try:
        state = info["internal_states"][0]
        model, dtype, device = str(info["model_path"]), str(info["dtype"]), str(info["device"])
        seeds = bool(info["enable_deterministic_inference"])
    except (TypeError, KeyError, IndexError) as error:
        raise ServerProblem(f"{client.url} answered, but not as an SGLang server does (no {error})") from error
    named = PurePath(model).name
    plan = state.get("speculative_plan")
    if plan is None:
        return Facts(client.url, named, seeds=seeds, dtype=dtype, device=device)
    options = plan["options"]
    return Facts(
        client.url,
        named,
        str(plan["algorithm"]),
        int(plan["block_size"]),
        str(options["mode"]),
        str(options["pruning"]),
        float(options["prune_threshold"]),
        known.request_pruning if known is not None and known.telemetry else _accepts_pruning(client, options),
        seeds,
        dtype,
        device,
    )


def _accepts_pruning(client: Client, options: dict[str, object]) -> bool:
    """Ask for one token with the server's own pruning options as overrides: an older server answers 400."""
    override = {key: options[key] for key in ("pruning", "prune_threshold")}
    params = {"max_new_tokens": 1, "temperature": 0, "custom_params": {REQUEST_KEY: override}}
    try:
        client.post("/generate", {"text": "a", "sampling_params": params, "rid": uuid.uuid4().hex}, timeout_s=60.0)
    except ServerProblem as problem:
        if "status 400" in str(problem):
            return False
        raise
    return True
