"""Put the newest measurements into a Markdown file, between its perf markers.

    python3 -m perf.report README.md            the newest results file of each op
    python3 -m perf.report README.md --results perf/results/some.json
    python3 -m perf.report README.md --check    change nothing; exit code 1 if the file is not up to date

Needs no GPU.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perf import results

BEGIN, END = "<!-- perf:begin -->", "<!-- perf:end -->"


def newest_by_op(folder: Path) -> list[tuple[Path, dict[str, Any], list[str]]]:
    """(path, results, ops to take from it): each op from the newest file that has it, newest file first."""
    found = [(path, results.read(path)) for path in folder.glob("*.json")]
    found.sort(key=lambda item: (item[1]["date"], item[0].name), reverse=True)
    taken: set[str] = set()
    chosen = []
    for path, run in found:
        ops = [op for op in dict.fromkeys(row["op"] for row in run["rows"]) if op not in taken]
        if ops:
            taken.update(ops)
            chosen.append((path, run, ops))
    return chosen


def tables(runs: Iterable[tuple[Path, dict[str, Any], list[str]]]) -> str:
    """The text between the markers: where and when each run was made, then its tables."""
    parts = []
    for path, run, ops in runs:
        commit, _, dirty = run["commit"].partition("-")
        made = f"{commit[:12]}-{dirty}" if dirty else commit[:12]
        where = (
            f"{run['gpu']}, driver {run['driver']}, torch {run['torch']}, CuTe-DSL {run['cutlass_dsl']}, "
            f"commit {made}, {run['date'][:10]} (`{path.name}`)."
        )
        rows = [row for row in run["rows"] if row["op"] in ops]
        parts.append(f"{where}\n\n{results.to_markdown(rows)}")
    return "\n\n".join(parts)


def replace_between_markers(text: str, inside: str) -> str:
    """text with what lies between the markers replaced; ValueError unless both are there once, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(f"expected one {BEGIN} and, after it, one {END}")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{inside}\n{END}{after}"


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
        runs = [(args.results, run, list(dict.fromkeys(row["op"] for row in run["rows"])))]
    else:
        runs = newest_by_op(results.FOLDER)
    if not runs:
        print(f"no results files in {results.FOLDER}", file=sys.stderr)
        return 1
    old = args.target.read_text()
    try:
        new = replace_between_markers(old, tables(runs))
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
