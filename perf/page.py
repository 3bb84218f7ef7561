"""The page that `kda-cute bench report` writes: where the figures come from, pictures, tables."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf import compare, plots, report, results
from perf.results import is_timing

PAGE = "bench.md"


def write(paths: Sequence[Path], folder: Path, kind: str = "svg") -> list[Path]:
    """Write PAGE and its pictures into a folder; the files written.

    paths: results files, each op from the newest that has it.  kind: svg or png.  ValueError for
    files of different GPUs or without a timed row; ImportError without matplotlib.
    """
    if kind not in ("svg", "png"):
        raise ValueError(f"kind must be svg or png, not {kind!r}")
    runs = report.newest_by_op(paths)
    gpus = {run["gpu"] for _, run, _ in runs}
    if len(gpus) > 1:
        raise ValueError(f"files of different GPUs: {', '.join(sorted(gpus))}")
    folder.mkdir(parents=True, exist_ok=True)
    written, parts = [], []
    for path, run, ops in sorted(runs, key=lambda one: one[2]):
        for op in ops:
            rows = [row for row in run["rows"] if row["op"] == op]
            if any(is_timing(r) and r["median_us"] is not None and r["flops"] for r in rows):
                more, text = _section(op, rows, path, run, folder, kind)
                written += more
                parts.append(text)
    if not parts:
        raise ValueError(f"no timed rows in {', '.join(map(str, paths))}")
    page = folder / PAGE
    page.write_text("\n\n".join([_head(runs, folder, kind), *parts]) + "\n")
    return [page, *written]


def _head(runs: Sequence[tuple[Path, Any, Any]], folder: Path, kind: str) -> str:
    files = " ".join(_shown(path) for path, _, _ in sorted(runs, key=lambda one: one[0].name))
    more = "" if kind == "svg" else f" --format {kind}"
    return (
        "# Benchmarks\n\nWritten by\n\n```bash\n"
        f"kda-cute bench report {files} --out {_shown(folder)}{more}\n```\n\n"
        "from runs in which every timed row had first agreed with float64. Times are medians on cold "
        "L2: of `chunk_kda` sums over the kernels of a call, of `bwd_recurrence` between events. "
        "`perf/shapes.py` counts bytes and floating-point operations, and has the H200's rates."
    )


def _shown(path: Path) -> str:
    """A path as it is named from the current folder."""
    relative = os.path.relpath(path)
    return path.name if relative.startswith("..") else relative


def _section(
    op: str, rows: list[results.Row], path: Path, run: Any, folder: Path, kind: str
) -> tuple[list[Path], str]:
    written, parts = [], [f"## {op}", f"{report.where(path, run)}"]
    for name, (draw, title) in plots.PICTURES.items():
        picture = folder / f"bench_{op}_{name}.{kind}"
        if plots.save(draw, picture, op, rows) is None:
            picture.unlink(missing_ok=True)  # of an earlier run
            continue
        written.append(picture)
        parts.append(f"![{title}: {op}]({picture.name})")
    parts.append(results.to_markdown(
        [row for row in rows if is_timing(row)], dict.fromkeys(compare.OPS, compare.to_markdown)
    ))  # fmt: skip
    return written, "\n\n".join(parts)
