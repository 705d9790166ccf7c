"""Does a server sample from the law it should? Two-sample tests over the first tokens of many answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from sglang_ext.testing.server import Request, Server

SAMPLES = 320
POSITIONS = 4
SIGNIFICANCE = 0.001


def assert_same_law(plain: Server, server: Server, expected: Request, got: Request) -> None:
    """Hold the marginal of each of the first positions to plain's; one chance result is allowed a second sample."""
    p_values = []
    for _ in range(2):
        left, right = (_samples(s, r) for s, r in ((plain, expected), (server, got)))
        assert len({tuple(ids) for ids in right}) > SAMPLES // 20, "temperature 1 gives next to one text: not sampling"
        p_values = [chi_square_p([ids[i] for ids in left], [ids[i] for ids in right]) for i in range(POSITIONS)]
        if min(p_values) > SIGNIFICANCE:
            return
    raise AssertionError(f"two samples of {SAMPLES} differ from plain: p values {p_values}")


def _samples(server: Server, request: Request) -> list[list[int]]:
    body = request.body()
    body["text"] = [body["text"]] * SAMPLES
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text[:500]
    return [reply["output_ids"] for reply in response.json()]


def chi_square_p(left: Sequence[int], right: Sequence[int], least: int = 10) -> float:
    """Return the p value of two samples being drawn from one law; values seen fewer than ``least`` times are pooled."""
    both = Counter(left) + Counter(right)
    kept = [value for value, count in both.items() if count >= least]
    cells = []
    for sample in (Counter(left), Counter(right)):
        row = [sample[value] for value in kept]
        cells.append([*row, sum(sample.values()) - sum(row)])
    columns = [pair for pair in zip(*cells, strict=True) if sum(pair)]
    sizes = [sum(row) for row in cells]
    total = sum(sizes)
    statistic = sum(
        (count - sum(pair) * size / total) ** 2 / (sum(pair) * size / total)
        for pair in columns
        for count, size in zip(pair, sizes, strict=True)
    )
    return chi_square_tail(statistic, len(columns) - 1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Survival function of the chi-square law, by the series of the regularised incomplete gamma function."""
    if freedom < 1 or statistic <= 0:
        return 1.0
    shape, x = freedom / 2, statistic / 2
    term = total = 1.0 / shape
    n = 0
    while term > total * 1e-12:
        n += 1
        term *= x / (shape + n)
        total += term
    return max(0.0, 1.0 - total * math.exp(-x + shape * math.log(x) - math.lgamma(shape)))
