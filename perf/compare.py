"""Tables of a level-2 op: times by provider, ratios to peers, kernels over their byte floors.

Rows of this package have the variant FORM/option, or FORM/option/kernel for one of its kernels;
peers' have FORM.  Needs no GPU.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from perf.results import Row, is_timing, table, us
from perf.shapes import floor_us

OPS = ("chunk_kda_fwd", "chunk_kda_bwd")
OURS = "kda_cute"
# Peers' variants are compared with the same form, this one with every form: less work, same result.
PREPARED = "prepared"


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; ValueError for none."""
    logs = [math.log(value) for value in values]
    if not logs:
        raise ValueError("the geometric mean of nothing")
    return math.exp(math.fsum(logs) / len(logs))


def is_kernel(row: Row) -> bool:
    """Whether it is the row of one kernel of a call."""
    return row["provider"] == OURS and row["variant"].count("/") == 2


def _split(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Rows of whole calls, and those of single kernels."""
    rows = list(rows)
    kernels = [r for r in rows if is_kernel(r)]
    return [r for r in rows if r not in kernels], kernels


def _by_shape(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """(provider, variant) -> shape -> row, in order of appearance."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["provider"], row["variant"]), {})[row["shape"]] = row
    return found


def peer_ratios(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, float]]:
    """(our variant, "peer/variant") -> shape -> our median over the peer's, where both were timed."""
    calls = _by_shape(row for row in _split(rows)[0] if row["median_us"] is not None)
    found = {}
    for (provider, mine), our_rows in calls.items():
        if provider != OURS:
            continue
        for (peer, theirs), peer_rows in calls.items():
            if peer == OURS or theirs not in (PREPARED, mine.split("/")[0]):
                continue
            both = [shape for shape in our_rows if shape in peer_rows]
            ratios = {s: our_rows[s]["median_us"] / peer_rows[s]["median_us"] for s in both}
            if ratios:
                found[mine, f"{peer}/{theirs}"] = ratios
    return found


def kernel_ratios(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, float]]:
    """(our variant, kernel) -> shape -> the kernel's median over the time its bytes take."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in _split(rows)[1]:
        variant, _, kernel = row["variant"].rpartition("/")
        ratio = row["median_us"] / floor_us(row["bytes"])
        found.setdefault((variant, kernel), {})[row["shape"]] = ratio
    return found


def _ratio_table(head: list[str], ratios: Mapping[Any, Mapping[str, float]]) -> str:
    shapes = list(dict.fromkeys(shape for row in ratios.values() for shape in row))
    body = []
    for key, row in ratios.items():
        cells = [f"{row[shape]:.2f}x" if shape in row else "" for shape in shapes]
        body.append([*key, *cells, f"**{geomean(row.values()):.2f}x** of {len(row)}"])
    return table([*head, *shapes, "geometric mean"], body)


def _time_table(calls: Iterable[Row], what: str) -> str:
    columns = _by_shape(calls)
    shapes = list(dict.fromkeys(shape for column in columns.values() for shape in column))

    def cell(row: Row | None) -> str:
        if row is None:
            return ""
        if "failed" in row:
            return f"gate failed: {' '.join(row['failed'])}"
        return us(row[what]) if what in row else ""

    body = [[shape, *(cell(column.get(shape)) for column in columns.values())] for shape in shapes]
    return table(["shape", *(f"{provider} {variant}" for provider, variant in columns)], body)


def to_markdown(rows: Iterable[Row]) -> str:
    """All tables of one op's timing rows."""
    rows = [row for row in rows if is_timing(row)]
    calls = _split(rows)[0]
    parts = ["Median us of a call, the sum over its kernels:\n", _time_table(calls, "median_us")]
    for key, title in (
        ("wall_us", "Median us of an eager call between two events:"),
        ("host_us", "Median us until an eager call returns:"),
    ):
        timed = [row for row in calls if key in row]
        if timed:
            parts += [f"\n{title}\n", _time_table(timed, key)]
    ratios = peer_ratios(rows)
    if ratios:
        parts += ["\nTime over a peer's:\n", _ratio_table(["variant", "peer"], ratios)]
    kernels = kernel_ratios(rows)
    if kernels:
        parts += [
            "\nTime of a kernel over its bytes':\n",
            _ratio_table(["variant", "kernel"], kernels),
        ]
    return "\n".join(parts)
