"""Results files: one JSON object per run, and the Markdown tables made from its rows.

    {"gpu", "driver", "torch", "cutlass_dsl", "commit", "date", "rows": [...]}

A timing row has `op`, `shape`, `provider`, `variant`, `median_us`, `p20_us`, `p80_us`, `bytes`,
`flops`; a row that failed its correctness gate has no times (null) and `failed`, the tensors that
were wrong.  Where its times are sums over the kernels of a call, it may have `wall_us` (between
events around the call) and `host_us` (until the call returns), both medians of eager calls.
`samples_us`, which `perf.regression` decides from, has what the median is of, in the order in which
it was measured: single calls, or medians over equal groups of consecutive ones.  An accuracy row has
`op`, `regime`, `tensor`, `error` (null: not finite), `tolerance`, `provider`, and may have `variant`
and `shape`.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kda_cute.machine import HEADER, surroundings
from kda_cute.tables import markdown as table
from perf.shapes import floor_us
from perf.timing import Timing

Row = dict[str, Any]

FOLDER = Path(__file__).resolve().parent / "results"
TIMING = ("op", "shape", "provider", "variant", "median_us", "p20_us", "p80_us", "bytes", "flops")
ACCURACY = ("op", "regime", "tensor", "error", "tolerance", "provider")
OPTIONAL = {
    TIMING: ("failed", "wall_us", "host_us", "samples_us"),
    ACCURACY: ("variant", "shape"),
}
MAX_SAMPLES = 60  # of a row


# ---------------------------------------------------------------- rows
def timing_row(
    op: str,
    shape: str,
    provider: str,
    variant: str,
    timing: Timing | None,
    *,
    moved: int,
    flops: int,
    failed: Iterable[str] = (),
    wall: Timing | None = None,
    host: Timing | None = None,
) -> Row:
    """A timing row; without a timing it must say which tensors failed the gate."""
    failed = list(failed)
    if (timing is None) != bool(failed):
        raise ValueError("a timing row has times or failed tensors, and never both")
    values = (None,) * 3 if timing is None else (timing.median, timing.p20, timing.p80)
    rounded = (None if x is None else round(x, 3) for x in values)
    row = dict(zip(TIMING, (op, shape, provider, variant, *rounded, moved, flops), strict=True))
    if failed:
        return row | {"failed": failed}
    more = {"wall_us": wall, "host_us": host}
    row |= {name: round(t.median, 3) for name, t in more.items() if t is not None}
    samples = () if timing is None else timing.condensed(MAX_SAMPLES)
    return row | {"samples_us": [round(us, 2) for us in samples]}


def accuracy_row(
    op: str, regime: str, tensor: str, error: float, tolerance: float, provider: str, **more: str
) -> Row:
    """An accuracy row; an error that isn't finite is kept as None."""
    finite = float(f"{error:.4g}") if math.isfinite(error) else None
    values = (op, regime, tensor, finite, tolerance, provider)
    return dict(zip(ACCURACY, values, strict=True)) | more


def is_timing(row: Mapping[str, Any]) -> bool:
    """Whether it is a timing row; ValueError for a row that is neither kind."""
    for keys in (TIMING, ACCURACY):
        if set(keys) <= set(row):
            unknown = set(row) - set(keys) - set(OPTIONAL[keys])
            if unknown:
                raise ValueError(f"unknown keys in a row: {sorted(unknown)}")
            return keys is TIMING
    raise ValueError(f"a row with keys {sorted(row)} is neither a timing nor an accuracy row")


# ---------------------------------------------------------------- files
def write(path: Path | str, rows: Iterable[Row], header: Mapping[str, str] | None = None) -> Path:
    """Write a results file; ValueError for a row of neither kind or a header that lacks a key."""
    rows = list(rows)
    for row in rows:
        is_timing(row)
    header = surroundings() if header is None else dict(header)
    if set(header) != set(HEADER):
        raise ValueError(f"the header must have the keys {', '.join(HEADER)}, not {sorted(header)}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(row, allow_nan=False) for row in rows)
    head = ",\n ".join(f"{json.dumps(key)}: {json.dumps(header[key])}" for key in HEADER)
    path.write_text(f'{{{head},\n "rows": [\n  {lines}\n ]}}\n')
    return path


def read(path: Path | str) -> dict[str, Any]:
    """Read and check a results file."""
    found = json.loads(Path(path).read_text())
    missing = {*HEADER, "rows"} - set(found)
    if missing:
        raise ValueError(f"{path}: no {', '.join(sorted(missing))}")
    for row in found["rows"]:
        is_timing(row)
    return found


# ---------------------------------------------------------------- tables
def fastest_scalar(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """(op, shape) -> the least median of provider "scalar"."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if is_timing(row) and row["provider"] == "scalar" and row["median_us"] is not None:
            key = row["op"], row["shape"]
            best[key] = min(best.get(key, math.inf), row["median_us"])
    return best


def us(value: float) -> str:
    """Microseconds as the tables show them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _timing_table(rows: list[Row]) -> str:
    scalar = fastest_scalar(rows)
    head = ["shape", "provider", "variant", "median us", "p20 to p80", "GB", "floor us", "of floor"]
    head += ["against scalar"] if scalar else []
    body = []
    for row in rows:
        floor = floor_us(row["bytes"])
        line = [row["shape"], row["provider"], row["variant"]]
        if row["median_us"] is None:
            line += [f"gate failed: {' '.join(row['failed'])}", ""]
        else:
            line += [us(row["median_us"]), f"{us(row['p20_us'])} to {us(row['p80_us'])}"]
        line += [f"{row['bytes'] / 1e9:.3f}", us(floor)]
        line.append("" if row["median_us"] is None else f"{row['median_us'] / floor:.2f}x")
        if scalar:
            base = scalar.get((row["op"], row["shape"]))
            known = base is not None and row["median_us"] is not None
            line.append(f"{base / row['median_us']:.1f}x" if known else "")
        body.append(line)
    return table(head, body)


def _accuracy_table(rows: list[Row]) -> str:
    tensors = list(dict.fromkeys(row["tensor"] for row in rows))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        key = tuple(row.get(k, "") for k in ("regime", "shape", "provider", "variant"))
        error = "not finite" if row["error"] is None else f"{row['error']:.1e}"
        wrong = row["error"] is None or row["error"] > row["tolerance"]
        cell = f"**{error}** of {row['tolerance']:g}" if wrong else error
        lines.setdefault(key, {})[row["tensor"]] = cell
    body = ([*key, *(cells.get(t, "") for t in tensors)] for key, cells in lines.items())
    return table(["regime", "shape", "provider", "variant", *tensors], body)


def to_markdown(
    rows: Iterable[Row], timing_tables: Mapping[str, Callable[[list[Row]], str]] | None = None
) -> str:
    """A timing and an accuracy table for each op, in the order in which the rows come.

    timing_tables: op -> what makes the table of its timing rows, for ops with one of their own.
    """
    make = timing_tables or {}
    rows = list(rows)
    parts = []
    for op in dict.fromkeys(row["op"] for row in rows):
        mine = [row for row in rows if row["op"] == op]
        timed = [row for row in mine if is_timing(row)]
        checked = [row for row in mine if not is_timing(row)]
        if timed:
            parts.append(f"`{op}`, kernel time:\n\n{make.get(op, _timing_table)(timed)}")
        if checked:
            parts.append(f"`{op}`, relative error against float64:\n\n{_accuracy_table(checked)}")
    return "\n\n".join(parts)
