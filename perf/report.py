"""Put the newest measurements into a Markdown file, between its perf markers.

    python3 -m perf.report README.md            the newest results file of each op
    python3 -m perf.report README.md --results perf/results/some.json
    python3 -m perf.report README.md --check    change nothing; exit code 1 if the file is not up to date

Needs no GPU.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kda_cute import machine
from kda_cute.lab import catalogue
from kda_cute.layouts.variants import plan
from kda_cute.workspace import CHUNK
from perf import compare, results, yardstick
from perf.shapes import SMS, find_shape


def ops_of(run: Mapping[str, Any]) -> list[str]:
    """Ops that a run measured, yardsticks left out."""
    return list(dict.fromkeys(r["op"] for r in run["rows"] if not yardstick.is_yardstick(r)))


def newest_by_op(paths: Iterable[Path]) -> list[tuple[Path, dict[str, Any], list[str]]]:
    """(path, results, ops to take from it): each op from the newest file that has it, newest file
    first.
    """
    found = [(path, results.read(path)) for path in paths]
    found.sort(key=lambda item: (item[1]["date"], item[0].name), reverse=True)
    taken: set[str] = set()
    chosen = []
    for path, run in found:
        ops = [op for op in ops_of(run) if op not in taken]
        if ops:
            taken.update(ops)
            chosen.append((path, run, ops))
    return chosen


def where(path: Path, run: Mapping[str, Any]) -> str:
    """Where and when a run was made."""
    return f"{machine.described(run)} (`{path.name}`)."


def tables(runs: Iterable[tuple[Path, dict[str, Any], list[str]]]) -> str:
    """The text between the markers: where and when each run was made, then its tables."""
    parts = []
    for path, run, ops in runs:
        rows = [row for row in run["rows"] if row["op"] in ops]
        level_2 = dict.fromkeys(compare.OPS, compare.to_markdown)
        parts += [
            f"{where(path, run)}\n\n{results.to_markdown(rows, level_2)}",
            layout_effects(rows),
        ]
    return "\n\n".join(part for part in parts if part)


def layout_effects(rows: Iterable[dict[str, Any]]) -> str:
    """What bank conflicts of a layout were predicted to cost a chunk of `bwd_recurrence`, and what
    was seen.

    Predicted: shared-memory cycles per chunk beyond the default layout's, by
    `kda_cute.layouts.audit`. Seen: kernel time beyond the default layout's, over the chunks that a
    CTA walks one after another; so only shapes of one wave count. Conflicts that hide behind other
    work are not seen.
    """
    timed = {}
    for row in rows:
        if row["op"] == "bwd_recurrence" and row["provider"] == "kda_cute" and row.get("median_us"):
            precision, layout = row["variant"].split("/")
            timed[row["shape"], precision, layout] = row["median_us"]
    lines = []
    for (name, precision, layout), us in timed.items():
        base, shape = timed.get((name, precision, "default")), find_shape(name)
        if layout == "default" or base is None or shape.N * shape.H > SMS:
            continue
        extra = _conflict_cycles(layout, precision) - _conflict_cycles("default", precision)
        seen = 1e3 * (us - base) / max(-(-n // CHUNK) for n in shape.lengths)
        effect = (f"{extra:,} cycles", f"{seen:.0f} ns", f"{us / base - 1:+.1%}")
        lines.append((name, precision, layout, *effect))
    if not lines:
        return ""
    head = ("shape", "precision", "layout", "predicted conflicts", "seen", "time")
    return f"Layouts against `default`, per chunk:\n\n{results.table(head, lines)}"


def _conflict_cycles(layout: str, precision: str) -> int:
    return catalogue.wavefronts(plan("bwd_recurrence", layout, precision))["conflicts"]


def filled(text: str, name: str, inside: str) -> str:
    """text with what lies between the markers `<!-- NAME:begin -->` and `<!-- NAME:end -->` replaced;
    ValueError unless both are there once, in order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ValueError(f"expected one {begin} and, after it, one {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{inside}\n{end}{rest.split(end)[1]}"


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="perf.report", description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="Markdown file with the markers")
    parser.add_argument("--results", type=Path, help="use this file only")
    parser.add_argument(
        "--check", action="store_true", help="change nothing, tell whether it would"
    )
    args = parser.parse_args(argv)

    if args.results:
        run = results.read(args.results)
        runs = [(args.results, run, ops_of(run))]
    else:
        runs = newest_by_op(results.FOLDER.glob("*.json"))
    if not runs:
        print(f"no results files in {results.FOLDER}", file=sys.stderr)
        return 1
    old = args.target.read_text()
    try:
        new = filled(old, "perf", tables(runs))
    except ValueError as error:
        print(f"{args.target}: {error}", file=sys.stderr)
        return 1
    if args.check:
        print(f"{args.target} is {'up to date' if new == old else 'out of date'}")
        return int(new != old)
    args.target.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
