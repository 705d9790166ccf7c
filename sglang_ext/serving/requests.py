"""What the host knows about each request of a decode batch, read once per step.

Some requests cannot be verified several tokens at a time without changing their output: penalties and
``min_new_tokens`` depend on every token that came before, and custom logit processors may do anything. Such a request
is decoded one token at a time, by the host's own rules, in the same batch as everybody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_ext.core.config import RequestOptions, parse_request_options
from sglang_ext.core.pace import Pace
from sglang_ext.core.schedule import Mode, parse_mode


@dataclass(frozen=True)
class RequestStep:
    """One request's part in one step.

    Attributes:
        mode: how this step drafts for the request.
        room: drafts that may be verified before ``max_new_tokens`` is reached, at least 0.
        options: the request's own overrides.
    """

    mode: Mode
    room: int
    options: RequestOptions


def request_options(req: Any) -> RequestOptions:
    """Return the overrides a request carries; they were validated when the request was accepted."""
    params = req.sampling_params.custom_params
    return RequestOptions() if params is None else parse_request_options(params)


def needs_plain_decoding(req: Any) -> bool:
    """Return whether a request's next-token rule depends on each token decoded before it."""
    params = req.sampling_params
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or len(req.output_ids) < params.min_new_tokens
        or req.custom_logit_processor is not None
        or bool(req.return_sampling_mask)
    )


def read_requests(reqs: list[Any], pace: Pace) -> list[RequestStep]:
    """Return every request's :class:`RequestStep` for a decode step of the whole batch."""
    options = [request_options(req) for req in reqs]
    forced = [_forced_mode(req, own) for req, own in zip(reqs, options, strict=True)]
    free = [req.rid for req, mode in zip(reqs, forced, strict=True) if mode is None]
    chosen = pace.choose(free, len(reqs)) if free else Mode.PLAIN
    return [
        RequestStep(chosen if mode is None else mode, room(req), own)
        for req, mode, own in zip(reqs, forced, options, strict=True)
    ]


def drafts_after_prefill(req: Any, pace: Pace) -> bool:
    """Return whether to draft for a request whose prompt was just read."""
    forced = _forced_mode(req, request_options(req))
    drafts = pace.drafts_after_prefill() if forced is None else forced is not Mode.PLAIN
    return drafts and room(req) > 0


def room(req: Any) -> int:
    """Return how many drafts may be verified before ``max_new_tokens`` is reached."""
    # The output list lags one step under overlapped scheduling, so this bound is never too tight.
    return max(req.sampling_params.max_new_tokens - len(req.output_ids) - 1, 0)


def _forced_mode(req: Any, options: RequestOptions) -> Mode | None:
    if needs_plain_decoding(req):
        return Mode.PLAIN
    return None if options.mode is None else parse_mode(options.mode)
