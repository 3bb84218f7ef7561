"""Whether a run is slower than another, row by row, decided from samples; needs no GPU.

The ratio of a row is the Hodges-Lehmann estimate of NEW / BASE: the median of all pairwise ratios of
a sample of NEW and one of BASE.  Its interval comes from the ranks of those ratios (Mann-Whitney), so
it supposes no distribution, and outliers and two-peaked times do little harm.  The confidence is
shared by all rows (Bonferroni): with 0.99, in one comparison of a hundred some interval is wrong.

Drift of the machine between the runs is taken out with the yardsticks (`perf.yardstick`) that were
timed in the same rounds.  Of a row's time, the share that its bytes take at the rate of the copy
moves with `copy`, the rest with `matmul`.  A yardstick whose interval holds 1 counts as unmoved; one
that moved by more than DRIFT_LIMIT makes the runs incomparable.

A row is a regression if its whole interval lies above 1 + tolerance, an improvement if it lies below
1 / (1 + tolerance).  It is unclear if the interval leaves the band between and is wider than the
band, or has its estimate outside.  Otherwise it is unchanged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from perf import yardstick
from perf.results import Row, is_timing, table, us

TOLERANCE = 0.02
CONFIDENCE = 0.99
DRIFT_LIMIT = 0.10
# Ops of rows that say something of the machine, not of a provider.
MACHINE_OPS = ("copy",)
REGRESSION, IMPROVEMENT, UNCHANGED, UNCLEAR, FAILED = (
    "regression",
    "improvement",
    "unchanged",
    "unclear",
    "gate failed",
)
Key = tuple[str, str, str, str]  # op, shape, provider, variant


class Incomparable(ValueError):
    """Two runs that can't be compared, and why."""


@dataclass(frozen=True)
class Interval:
    """A ratio of times, NEW / BASE, and its confidence interval; (0, inf) where there are too few
    samples for the confidence.
    """

    estimate: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Decision:
    """A row's verdict.

    ratio, low, high: NEW / BASE with its interval, drift taken out; drift: what was divided by.
    Medians in microseconds.  All None where the gate failed.
    """

    op: str
    shape: str
    provider: str
    variant: str
    verdict: str
    base_us: float | None = None
    new_us: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    drift: float | None = None
    failed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """op shape provider/variant."""
        return f"{self.op} {self.shape} {self.provider}/{self.variant}"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    drifts: (op, shape, yardstick) -> its interval; only_base, only_new, undecided: rows of one run
    alone, and rows without samples or whose gate failed in BASE.
    """

    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    drifts: Mapping[tuple[str, str, str], Interval]
    only_base: tuple[str, ...]
    only_new: tuple[str, ...]
    undecided: tuple[str, ...]
    tolerance: float
    confidence: float

    @property
    def bad(self) -> tuple[Decision, ...]:
        """Regressions and failed gates."""
        return tuple(d for d in self.decisions if d.verdict in (REGRESSION, FAILED))

    def count(self, verdict: str) -> int:
        """How many rows have the verdict."""
        return sum(d.verdict == verdict for d in self.decisions)


# ---------------------------------------------------------------- one row
def ratio(base: Sequence[float], new: Sequence[float], confidence: float) -> Interval:
    """NEW / BASE by Hodges and Lehmann, with the interval of a two-sided rank test.

    base, new: times above 0, in any order.  ValueError if there are none.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
    if not len(base) or not len(new):
        raise ValueError("no samples")
    times = [np.asarray(x, dtype=np.float64) for x in (base, new)]
    if not all((np.isfinite(x) & (x > 0)).all() for x in times):
        raise ValueError("times must be above 0 and finite")
    logs = [np.log(x) for x in times]
    pairs = np.sort(np.subtract.outer(logs[1], logs[0]), axis=None)
    m, n = len(base), len(new)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    # The normal limit of the rank sum; a half, since it takes whole numbers.
    cut = math.floor(m * n / 2 - z * math.sqrt(m * n * (m + n + 1) / 12) - 0.5)
    estimate = math.exp(float(np.median(pairs)))
    if cut < 1:
        return Interval(estimate, 0.0, math.inf)
    return Interval(estimate, math.exp(pairs[cut - 1]), math.exp(pairs[-cut]))


def verdict(interval: Interval, tolerance: float) -> str:
    """What the interval of a ratio means."""
    top, bottom = 1 + tolerance, 1 / (1 + tolerance)
    if interval.low > top:
        return REGRESSION
    if interval.high < bottom:
        return IMPROVEMENT
    inside = bottom <= interval.low and interval.high <= top
    wide = interval.high - interval.low > top - bottom
    if not inside and (wide or not bottom <= interval.estimate <= top):
        return UNCLEAR
    return UNCHANGED


def divided(interval: Interval, by: Interval) -> Interval:
    """The quotient; the widths add as those of independent errors do, in the logarithm."""
    estimate = interval.estimate / by.estimate
    if interval.low == 0 or math.isinf(interval.high):
        return Interval(estimate, 0.0, math.inf)
    down = math.hypot(math.log(interval.estimate / interval.low), math.log(by.high / by.estimate))
    up = math.hypot(math.log(interval.high / interval.estimate), math.log(by.estimate / by.low))
    return Interval(estimate, estimate * math.exp(-down), estimate * math.exp(up))


# ---------------------------------------------------------------- drift
NO_DRIFT = Interval(1.0, 1.0, 1.0)


def drift_of(row: Row, copy_row: Row, copy: Interval, matmul: Interval) -> Interval:
    """How much of a row's ratio the machine explains.

    row, copy_row: of BASE; copy, matmul: intervals of the yardsticks.
    """
    at_copy_rate = row["bytes"] / copy_row["bytes"] * copy_row["median_us"]
    share = min(1.0, at_copy_rate / row["median_us"])
    moved = [
        (weight, NO_DRIFT if 1.0 in interval else interval)
        for weight, interval in ((share, copy), (1 - share, matmul))
    ]

    def log(part: str) -> float:
        return sum(weight * math.log(getattr(interval, part)) for weight, interval in moved)

    middle = log("estimate")
    down = math.hypot(*(w * math.log(i.estimate / i.low) for w, i in moved))
    up = math.hypot(*(w * math.log(i.high / i.estimate) for w, i in moved))
    return Interval(math.exp(middle), math.exp(middle - down), math.exp(middle + up))


def _drifts(
    base: Mapping[Key, Row], new: Mapping[Key, Row], confidence: float
) -> dict[tuple[str, str, str], Interval]:
    """(op, shape, yardstick) -> its interval."""
    both = [k for k in base if k in new and yardstick.is_yardstick(base[k])]
    both = [k for k in both if _has_samples(base[k]) and _has_samples(new[k])]
    each = _shared(confidence, len(both))
    return {
        (key[0].removeprefix(yardstick.PREFIX), key[1], key[3]): ratio(
            base[key]["samples_us"], new[key]["samples_us"], each
        )
        for key in both
    }


# ---------------------------------------------------------------- two runs
def _key(row: Row) -> Key:
    return row["op"], row["shape"], row["provider"], row["variant"]


def _name(key: Key) -> str:
    op, shape, provider, variant = key
    return f"{op} {shape} {provider}/{variant}"


def _has_samples(row: Row) -> bool:
    return bool(row.get("samples_us"))


def _shared(confidence: float, among: int) -> float:
    """The confidence that each of so many intervals needs for that of all together."""
    return 1 - (1 - confidence) / max(among, 1)


def _timed(run: Mapping[str, Any]) -> dict[Key, Row]:
    return {_key(row): row for row in run["rows"] if is_timing(row)}


def _warnings(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    texts = {"driver": "driver", "torch": "torch", "cutlass_dsl": "CuTe DSL"}
    found = [
        f"{text}: {base[key]} in BASE, {new[key]} in NEW"
        for key, text in texts.items()
        if base[key] != new[key]
    ]
    for name, run in (("BASE", base), ("NEW", new)):
        if run["commit"].endswith("-dirty"):
            found.append(f"{name} was measured with changes that are in no commit")
    return found


def compare(
    base: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    tolerance: float = TOLERANCE,
    confidence: float = CONFIDENCE,
    providers: Sequence[str] = (),
    names: tuple[str, str] = ("BASE", "NEW"),
) -> Comparison:
    """Decide every row that both runs have.

    base, new: contents of results files.  tolerance: relative; confidence: of all rows together.
    providers: only their rows; none, all.  names: of the runs, for errors.  Incomparable for runs of
    different GPUs, with no common rows or no samples, or of a machine in too different states;
    ValueError for arguments out of range.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie between 0 and 1, not {tolerance}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
    if base["gpu"] != new["gpu"]:
        raise Incomparable(
            f"different GPUs: {names[0]} is of {base['gpu']}, {names[1]} of {new['gpu']}"
        )
    old_rows, new_rows = _timed(base), _timed(new)
    wanted = [
        key
        for key, row in {**old_rows, **new_rows}.items()
        if not yardstick.is_yardstick(row)
        and key[0] not in MACHINE_OPS
        and (not providers or key[2] in providers)
    ]
    common = [key for key in wanted if key in old_rows and key in new_rows]
    if not common:
        raise Incomparable(f"{names[0]} and {names[1]} have no row in common{_what(base, new)}")
    failed = [k for k in wanted if k in new_rows and new_rows[k].get("failed")]
    decided = [k for k in common if _has_samples(old_rows[k]) and _has_samples(new_rows[k])]
    if not decided and not failed:
        without = [
            name
            for name, rows in zip(names, (old_rows, new_rows), strict=True)
            if not any(_has_samples(rows[k]) for k in common)
        ]
        raise Incomparable(
            f"no samples to decide from in {' and '.join(without or names)}: "
            "measure again with `kda-cute bench run`"
        )
    warnings = _warnings(base, new)
    drifts = _drifts(old_rows, new_rows, confidence)
    _check_drift(drifts, names)
    each = _shared(confidence, len(decided))
    decisions, uncorrected = [], set()
    for key in wanted:
        if key in failed:
            wrong = tuple(new_rows[key]["failed"])
            decisions.append(Decision(*key, FAILED, failed=wrong))
        elif key in decided:
            old, measured = old_rows[key], new_rows[key]
            drift = _drift_of_row(key, old_rows, drifts)
            if drift is None:
                uncorrected.add(key[:2])
            found = ratio(old["samples_us"], measured["samples_us"], each)
            found = found if drift is None else divided(found, drift)
            decisions.append(
                Decision(
                    *key, verdict(found, tolerance), old["median_us"], measured["median_us"],
                    found.estimate, found.low, found.high, 1.0 if drift is None else drift.estimate,
                )
            )  # fmt: skip
    warnings += [
        f"{op} {shape}: no yardsticks in both runs, so drift is not taken out"
        for op, shape in sorted(uncorrected)
    ]
    return Comparison(
        decisions=tuple(decisions),
        warnings=tuple(warnings),
        drifts=drifts,
        only_base=tuple(_name(k) for k in wanted if k not in new_rows),
        only_new=tuple(_name(k) for k in wanted if k not in old_rows and k not in failed),
        undecided=tuple(_name(k) for k in common if k not in decided and k not in failed),
        tolerance=tolerance,
        confidence=confidence,
    )


def _what(base: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    ops = [sorted({row["op"] for row in run["rows"]}) for run in (base, new)]
    return f" (ops {', '.join(ops[0]) or 'none'}; {', '.join(ops[1]) or 'none'})"


def _check_drift(drifts: Mapping[tuple[str, str, str], Interval], names: tuple[str, str]) -> None:
    for (op, shape, which), interval in drifts.items():
        if abs(math.log(interval.estimate)) > math.log1p(DRIFT_LIMIT):
            raise Incomparable(
                f"the machine was in different states: {which}, the same kernel in both runs, took "
                f"{interval.estimate:.2f}x as long in {names[1]} as in {names[0]} ({op} {shape})"
            )


def _drift_of_row(
    key: Key,
    old_rows: Mapping[Key, Row],
    drifts: Mapping[tuple[str, str, str], Interval],
) -> Interval | None:
    copy, matmul = (drifts.get((*key[:2], which)) for which in ("copy", "matmul"))
    if copy is None or matmul is None:
        return None
    copy_row = old_rows[yardstick.op(key[0]), key[1], yardstick.PROVIDER, "copy"]
    return drift_of(old_rows[key], copy_row, copy, matmul)


# ---------------------------------------------------------------- how it is shown
def _shown(interval: tuple[float | None, float | None]) -> str:
    low, high = interval
    if low is None or high is None:
        return ""
    return "too few samples" if math.isinf(high) else f"{low:.3f} to {high:.3f}"


def to_markdown(found: Comparison) -> str:
    """The table of all rows, worst first, and what else is to be said."""
    order = (FAILED, REGRESSION, UNCLEAR, IMPROVEMENT, UNCHANGED)
    ranked = sorted(found.decisions, key=lambda d: (order.index(d.verdict), -(d.ratio or 0)))
    body = [
        [
            d.op,
            d.shape,
            f"{d.provider} {d.variant}",
            "" if d.base_us is None else us(d.base_us),
            "" if d.new_us is None else us(d.new_us),
            "" if d.ratio is None else f"{d.ratio:.3f}x",
            _shown((d.low, d.high)),
            "" if d.drift is None else f"{d.drift:.3f}x",
            f"**{d.verdict}**: {' '.join(d.failed)}" if d.failed else _emphasis(d.verdict),
        ]
        for d in ranked
    ]
    head = ["op", "shape", "row", "BASE us", "NEW us", "ratio", "interval", "drift", "verdict"]
    lines = [table(head, body), ""]
    for title, names in (
        ("Only in BASE", found.only_base),
        ("Only in NEW", found.only_new),
        ("Not decided (no samples, or the gate failed in BASE)", found.undecided),
    ):
        if names:
            lines += [f"{title}: {', '.join(names)}", ""]
    counts = [f"{found.count(v)} {v}" for v in order if found.count(v)]
    lines.append(
        f"{len(found.decisions)} rows: {', '.join(counts)} "
        f"(tolerance {found.tolerance:.1%}, confidence {found.confidence:.1%} of all rows together)"
    )
    if found.count(UNCLEAR):
        lines.append("Unclear rows need more rounds, or a quieter machine.")
    return "\n".join(lines)


def _emphasis(text: str) -> str:
    return f"**{text}**" if text == REGRESSION else text


def to_json(found: Comparison) -> dict[str, Any]:
    """The same for machines; an interval without bounds has null."""

    def clean(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 6) if math.isfinite(value) else None
        return list(value) if isinstance(value, tuple) else value

    def record(x: Any) -> dict[str, Any]:
        return {name: clean(value) for name, value in asdict(x).items()}

    return {
        "ok": not found.bad,
        "tolerance": found.tolerance,
        "confidence": found.confidence,
        "warnings": list(found.warnings),
        "drift": [
            {"op": op, "shape": shape, "yardstick": which, **record(interval)}
            for (op, shape, which), interval in found.drifts.items()
        ],
        "rows": [record(d) for d in found.decisions],
        "only_base": list(found.only_base),
        "only_new": list(found.only_new),
        "undecided": list(found.undecided),
    }


def exit_code(found: Comparison) -> int:
    """1 if a row regressed or failed its gate, else 0."""
    return int(bool(found.bad))
