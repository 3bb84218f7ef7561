"""Pictures of results files: times against peers, ratios, roofline, scaling in T and H.

Each picture is a white card with dark text, so it reads the same on light and dark pages.  Needs
matplotlib, imported when the first picture is drawn; no display, no pyplot state.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from perf import compare
from perf.results import Row, is_timing
from perf.shapes import COPY_RATE, MATRIX_RATE, SCALING, find_shape, floor_us

# Colour-blind safe (after Okabe and Ito); ours in blues and greens, peers in warm colours.
OURS = ("#0072B2", "#56B4E9", "#009E73", "#94D6BE")
PEERS = ("#D55E00", "#E69F00", "#CC79A7")
KERNELS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, FAINT = "#222222", "#CCCCCC"
STYLE = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "kda_cute",  # the same bytes from the same rows
}


class NoPlots(ImportError):
    """matplotlib is missing."""


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """A figure and its grid of axes, [rows][columns]."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoPlots("plots need matplotlib: pip install -e '.[plots]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(draw: Any, path: Path, *arguments: Any) -> Path | None:
    """Draw into a file, SVG or PNG by its suffix; None when there is nothing to draw."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoPlots("plots need matplotlib: pip install -e '.[plots]'") from error
    with matplotlib.rc_context(STYLE):
        figure = draw(*arguments)
        if figure is None:
            return None
        # No date in the file: the same rows give the same bytes.
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=130, metadata=metadata)
    return path


# ---------------------------------------------------------------- what is drawn
def calls_of(rows: Iterable[Row]) -> list[Row]:
    """Timed rows of whole calls."""
    timed = [r for r in rows if is_timing(r) and r["median_us"] is not None]
    return [r for r in timed if not compare.is_kernel(r)]


def without_scaling(rows: Iterable[Row]) -> list[Row]:
    """Timing rows of shapes that aren't of the scaling series; all if those are all."""
    rows = [r for r in rows if is_timing(r)]
    return [r for r in rows if r["shape"] not in SCALING] or rows


def panels_of(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, Row]]]:
    """Panel -> series -> shape -> row.

    Level 2 has a panel for each form, with peers of that form and on prepared inputs; level 1 has
    one, without name.
    """
    calls = calls_of(rows)
    forms = [r["variant"].split("/")[0] for r in calls if r["provider"] == compare.OURS]
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for form in dict.fromkeys(forms) if calls and calls[0]["op"] in compare.OPS else ("",):
        for row in calls:
            theirs = row["variant"].split("/")[0]
            if form and theirs != form and theirs != compare.PREPARED:
                continue
            name = f"{row['provider']} {row['variant']}"
            found.setdefault(form, {}).setdefault(name, {})[row["shape"]] = row
    return found


def _colours(series: Iterable[str]) -> dict[str, str]:
    ours, peers = itertools.cycle(OURS), itertools.cycle(PEERS)
    return {n: next(ours if n.startswith(compare.OURS) else peers) for n in series}


def _title(op: str, form: str) -> str:
    return f"{op}, form {form}" if form else op


# ---------------------------------------------------------------- times
def times(op: str, rows: Sequence[Row]) -> Any:
    """Grouped bars: microseconds per shape, with the floor of each bar's bytes as a line."""
    panels = panels_of(without_scaling(rows))
    if not panels:
        return None
    most = max(len({s for one in p.values() for s in one}) for p in panels.values())
    figure, axes = _figure(max(8.8, 1.9 + 1.25 * most), 3.9 * len(panels), len(panels))
    for (form, series), axis in zip(panels.items(), axes[:, 0], strict=True):
        shapes = list(dict.fromkeys(shape for one in series.values() for shape in one))
        width = 0.84 / len(series)
        colours, last = _colours(series), list(series)[-1]
        for i, (name, one) in enumerate(series.items()):
            at = [shapes.index(s) - 0.42 + (i + 0.5) * width for s in one]
            axis.bar(
                at,
                [row["median_us"] for row in one.values()],
                width * 0.92,
                color=colours[name],
                label=name,
            )
            floors = [floor_us(row["bytes"]) for row in one.values()]
            left = [x - width * 0.46 for x in at]
            right = [x + width * 0.46 for x in at]
            axis.hlines(
                floors,
                left,
                right,
                color="black",
                linewidth=1.6,
                label=f"floor: bytes at {COPY_RATE / 1e12:.2f} TB/s" if name == last else None,
            )
        axis.set_yscale("log")
        least = min(floor_us(row["bytes"]) for one in series.values() for row in one.values())
        axis.set_ylim(bottom=least / 1.5)
        _plain_ticks(axis.yaxis, *axis.get_ylim())
        axis.set_xticks(range(len(shapes)), shapes)
        axis.set_xlim(-0.6, len(shapes) - 0.4)
        axis.set_ylabel("us, kernel time")
        axis.grid(axis="y", which="major", color=FAINT, linewidth=0.7)
        axis.set_axisbelow(True)
        axis.set_title(_title(op, form), loc="left", fontweight="bold")
        handles, names = axis.get_legend_handles_labels()
        order = sorted(range(len(names)), key=lambda i, names=names: names[i].startswith("floor"))
        axis.legend(
            [handles[i] for i in order], [names[i] for i in order],
            ncols=3, fontsize=9.5, loc="lower left", bbox_to_anchor=(0, 1.08), borderpad=0,
        )  # fmt: skip
    return figure


# ---------------------------------------------------------------- ratios
def ratios(op: str, rows: Sequence[Row]) -> Any:
    """Dots: this package's time over a peer's, a row for each shape and one for the mean."""
    found = compare.peer_ratios(without_scaling(rows))
    by_form: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for (mine, peer), one in found.items():
        by_form.setdefault(mine.split("/")[0], {})[mine, peer] = one
    if not by_form:
        return None
    most = max(len({s for one in p.values() for s in one}) for p in by_form.values())
    height = 1.7 + 0.42 * (most + 1) + 0.28 * max(len(p) for p in by_form.values())
    figure, axes = _figure(5.2 * len(by_form) + 1.2, height, 1, len(by_form))
    values = [v for p in by_form.values() for one in p.values() for v in one.values()]
    low, high = min(*values, 0.9) / 1.15, max(*values, 1.1) * 1.15
    for (form, pairs), axis in zip(by_form.items(), axes[0], strict=True):
        shapes = list(dict.fromkeys(shape for one in pairs.values() for shape in one))
        lines = [*shapes, "geometric mean"]
        peers = list(dict.fromkeys(peer for _, peer in pairs))
        mines = list(dict.fromkeys(mine for mine, _ in pairs))
        for k, ((mine, peer), one) in enumerate(pairs.items()):
            points = {**one, "geometric mean": compare.geomean(one.values())}
            shift = (k - (len(pairs) - 1) / 2) * min(0.16, 0.72 / len(pairs))
            axis.plot(
                list(points.values()),
                [lines.index(s) + shift for s in points],
                linestyle="none",
                marker=MARKERS[mines.index(mine)],
                markersize=7,
                color=PEERS[peers.index(peer) % len(PEERS)],
                markerfacecolor=PEERS[peers.index(peer) % len(PEERS)]
                if mines.index(mine) == 0
                else "white",
                label=f"{mine} over {peer.replace('/', ' ')}",
            )
        axis.axvspan(low, 1, color="#E8F3EC", zorder=0)
        axis.axvline(1, color=INK, linewidth=1)
        axis.axhline(len(shapes) - 0.5, color=FAINT, linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xlim(low, high)
        ticks = [t for t in (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8) if low <= t <= high]
        axis.set_xticks(ticks, [f"{t:g}x" for t in ticks])
        axis.set_yticks(range(len(lines)), lines)
        axis.set_ylim(len(lines) - 0.4, -0.6)
        axis.grid(axis="x", color=FAINT, linewidth=0.7)
        axis.set_axisbelow(True)
        axis.set_xlabel("time over the peer's; shaded: faster than the peer")
        axis.set_title(_title(op, form), loc="left", fontweight="bold")
        axis.legend(
            fontsize=9.5, loc="upper center", bbox_to_anchor=(0.45, -0.55 / (0.42 * len(lines)))
        )
    return figure


# ---------------------------------------------------------------- roofline
def _precision(row: Row) -> str:
    """Of its products: level 2's are in bf16, level 1's variants begin with theirs."""
    return "bf16" if row["op"] in compare.OPS else row["variant"].split("/")[0]


def roofline(op: str, rows: Sequence[Row]) -> Any:
    """TFLOP/s over FLOP per byte, under the H200's copy rate and its matrix rates for the operands.

    Kernels of calls where there are such rows, else whole calls.  The height under the roof is the
    time over the floor.
    """
    timed = [r for r in without_scaling(rows) if r["median_us"] is not None and r["flops"]]
    mine = [r for r in timed if r["provider"] == compare.OURS]
    parts = [r for r in mine if compare.is_kernel(r)] or mine
    if not parts:
        return None
    # One form and option for each kernel, since all lie close together.
    by_name: dict[str, list[Row]] = {}
    for row in parts:
        first, _, kernel = row["variant"].rpartition("/")
        if not compare.is_kernel(row):
            kernel = row["variant"]
        elif first != parts[0]["variant"].rpartition("/")[0]:
            continue
        by_name.setdefault(kernel, []).append(row)
    figure, axes = _figure(8.4, 5.4)
    axis = axes[0, 0]
    roofs = {_precision(r): MATRIX_RATE[_precision(r)] for r in parts}
    highest = max(roofs.values())
    ridge = highest / COPY_RATE
    intensities = [r["flops"] / r["bytes"] for r in parts]
    low, high = min(*intensities, ridge) / 2.2, max(*intensities, ridge) * 2.2
    axis.plot([low, ridge], [low * COPY_RATE / 1e12, highest / 1e12], color=INK)
    for kind, roof in roofs.items():
        axis.plot([roof / COPY_RATE, high], [roof / 1e12, roof / 1e12], color=INK)
        above = roof == highest  # below the lower one, where the slope doesn't cross the words
        axis.text(
            high, roof / 1e12 * (1.05 if above else 0.95),
            f"{kind} products: {roof / 1e12:.0f} TFLOP/s", ha="right",
            va="bottom" if above else "top",
        )  # fmt: skip
    slope = ridge / 2  # beside the slope, where no point can be
    axis.text(
        slope, slope * COPY_RATE / 1e12, f"bytes: {COPY_RATE / 1e12:.2f} TB/s  ", ha="right",
        va="bottom",
    )  # fmt: skip
    shapes = list(dict.fromkeys(r["shape"] for one in by_name.values() for r in one))
    for i, (kernel, one) in enumerate(by_name.items()):
        for row in one:
            axis.plot(
                row["flops"] / row["bytes"],
                row["flops"] / row["median_us"] * 1e-6,
                marker=MARKERS[shapes.index(row["shape"]) % len(MARKERS)],
                color=KERNELS[i % len(KERNELS)],
                markersize=8,
                alpha=0.85,
                linestyle="none",
            )
        over = [
            r["median_us"] / max(floor_us(r["bytes"]), r["flops"] / roofs[_precision(r)] * 1e6)
            for r in one
        ]
        axis.plot(
            [], [], marker="o", linestyle="none", color=KERNELS[i % len(KERNELS)],
            label=f"{kernel}: {_span(over)} of its floor",
        )  # fmt: skip
    for i, shape in enumerate(shapes):
        axis.plot(
            [], [], marker=MARKERS[i % len(MARKERS)], linestyle="none", color="#888888", label=shape
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    axis.set_ylim(top=highest / 1e12 * 1.5)
    _plain_ticks(axis.xaxis, low, high)
    _plain_ticks(axis.yaxis, *axis.get_ylim())
    axis.set_xlabel("FLOP per byte")
    axis.set_ylabel("TFLOP/s")
    axis.grid(which="major", color=FAINT, linewidth=0.7)
    axis.set_axisbelow(True)
    what = parts[0]["variant"].rpartition("/")[0] if compare.is_kernel(parts[0]) else ""
    axis.set_title(f"{op} {what}".strip(), loc="left", fontweight="bold")
    figure.legend(fontsize=9.5, loc="outside right upper")
    return figure


# ---------------------------------------------------------------- scaling
def scaling_series(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, list[tuple[int, float]]]]]:
    """ "T" or "H" -> what is fixed -> series -> (size, us) by size.

    Of equal sequences: along H with lengths fixed, along T (tokens of one sequence) with H fixed.
    Only lines of two points or more, and along each the fixed size that has most.
    """
    found: dict[str, dict[str, dict[str, list[tuple[int, float]]]]] = {"T": {}, "H": {}}
    for row in calls_of(rows):
        shape = find_shape(row["shape"])
        if shape.varlen or shape.N != 1:
            continue
        name = f"{row['provider']} {row['variant']}"
        for axis, size, fixed in (
            ("T", shape.T, f"H = {shape.H}"),
            ("H", shape.H, f"T = {shape.T}"),
        ):
            line = found[axis].setdefault(fixed, {}).setdefault(name, [])
            line.append((size, row["median_us"]))
    kept: dict[str, dict[str, dict[str, list[tuple[int, float]]]]] = {}
    for axis, groups in found.items():
        long = {
            fixed: {name: sorted(line) for name, line in series.items() if len(line) > 1}
            for fixed, series in groups.items()
        }
        points = {fixed: sum(map(len, series.values())) for fixed, series in long.items()}
        best = max(points, key=points.__getitem__, default=None)
        if best is not None and points[best]:
            kept[axis] = {best: long[best]}
    return kept


def scaling(op: str, rows: Sequence[Row]) -> Any:
    """Lines: time along T and along H, the other fixed, with a grey line of proportional time."""
    first = list(panels_of(rows))[:1]
    rows = [r for r in rows if is_timing(r) and _in_form(r, first)]
    found = [(a, f, s) for a, groups in scaling_series(rows).items() for f, s in groups.items()]
    if not found:
        return None
    figure, axes = _figure(5.3 * len(found) + 0.6, 4.6, 1, len(found))
    for (along, fixed, series), axis in zip(found, axes[0], strict=True):
        colours = _colours(series)
        for i, (name, line) in enumerate(series.items()):
            axis.plot(
                *zip(*line, strict=True),
                marker=MARKERS[i % len(MARKERS)],
                color=colours[name],
                label=name,
            )
        sizes = sorted({size for line in series.values() for size, _ in line})
        last = max(line[-1][1] for line in series.values()) * 1.35
        axis.plot(
            sizes, [last * s / sizes[-1] for s in sizes], color="#999999", linestyle="--",
            label="proportional",
        )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [str(s) for s in sizes])
        times_us = [us for line in series.values() for _, us in line]
        axis.set_ylim(min(times_us) / 1.5, max(times_us) * 2)
        axis.minorticks_off()
        _plain_ticks(axis.yaxis, *axis.get_ylim())
        axis.set_xlabel(f"{along}, at {fixed}")
        axis.set_ylabel("us, kernel time")
        axis.grid(color=FAINT, linewidth=0.7)
        axis.set_axisbelow(True)
        axis.set_title(f"{op} along {along}", loc="left", fontweight="bold")
    handles: dict[str, Any] = {}
    for axis in axes[0]:
        handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)) | handles
    figure.legend(handles.values(), handles.keys(), fontsize=9.5, ncols=3, loc="outside lower left")
    return figure


def _in_form(row: Row, forms: Sequence[str]) -> bool:
    """Whether a row belongs to the form drawn: it, or prepared inputs; all of level 1."""
    return forms in ([], [""]) or row["variant"].split("/")[0] in (*forms, compare.PREPARED)


def _plain_ticks(axis: Any, low: float, high: float) -> None:
    """1, 2, 5 times powers of ten as plain numbers on a logarithmic axis; 1 alone where that is
    enough.
    """
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if high / low > 300 else (1, 2, 5)
    ticks = [m * 10.0**e for e in exponents for m in steps if low <= m * 10.0**e <= high]
    axis.set_ticks(ticks, [f"{t:,g}" if t < 1e6 else f"{t:,.0f}" for t in ticks])
    axis.set_ticks([], minor=True)


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}x", f"{max(values):.2f}x"
    return low if low == high else f"{low} to {high}"


PICTURES = {
    "times": (times, "Time of a call, by shape, against peers"),
    "ratios": (ratios, "Time over a peer's"),
    "roofline": (roofline, "Roofline of the kernels"),
    "scaling": (scaling, "Time along T and H"),
}
