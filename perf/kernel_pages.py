"""Fill the tables of the kernels' pages in docs/kernels from plans, schedules and results files.

    python3 -m perf.kernel_pages                 write the tables
    python3 -m perf.kernel_pages --check         change nothing; exit code 1 if a page is out of date

A table stands between the markers `<!-- NAME:begin -->` and `<!-- NAME:end -->`: `plan` (shared
memory), `products` (tensor-core instructions), `bytes` (what a chunk and head must move), `roofline`
(measured times; the newest results file of the op).  Needs no GPU.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from kda_cute import backward, forward, ops, report
from kda_cute.compile import KernelSpec
from perf import results
from perf.forms import TYPES
from perf.report import filled, newest_by_op, where
from perf.shapes import (
    COPY_RATE,
    MATRIX_RATE,
    Shape,
    backward_stages,
    bwd_recurrence_bytes,
    bwd_recurrence_flops,
    floor_us,
    forward_stages,
)

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "kernels"
SHAPES = ("T8192_H96", "T32768_H32", "T2048_H12")  # many heads, a long sequence, a small batch
MEASURED = ("roofline",)  # tables that change with every run


class Kernel(NamedTuple):
    """A page's kernel: title -> compile spec of the plans and schedules shown; title -> (bytes, flops)
    of one chunk and head; the op whose results hold it, and which rows.
    """

    specs: dict[str, KernelSpec]
    cost: dict[str, tuple[int, int]]
    rows: dict[str, Callable[[str], bool]]  # op -> whether a row of that variant is this kernel's
    precision: Callable[[str], str]  # of a row's variant


def _stage(name: str) -> Callable[[str], bool]:
    return lambda variant: variant.endswith(f"/{name}")


def kernels() -> dict[str, Kernel]:
    """Page -> its kernel."""
    chunk = Shape("one chunk", (64,), 1)
    transition, scan, reverse, gradients = ({} for _ in range(4))
    for form in TYPES:
        fwd = forward_stages(chunk, form, states=True)
        bwd = backward_stages(chunk, form)
        transition[f"forward, form {form}"] = fwd["transition"]
        transition[f"backward, form {form}"] = bwd["transition"]
        gradients[f"form {form}"] = bwd["gradients"]
        scan["states and X kept"], reverse["reverse"] = fwd["scan"], bwd["scan"]
    scan["nothing kept"] = forward_stages(chunk, "A", states=False)["scan"]
    tile = Shape("one tile", (16,), 1)
    level_1 = bwd_recurrence_bytes(tile, dinitial_bytes=0), bwd_recurrence_flops(tile)
    bf16 = lambda variant: "bf16"  # noqa: E731
    return {
        "transition": Kernel(
            {
                "forward": forward.transition_spec(*TYPES["B"], False),
                "backward": forward.transition_spec(*TYPES["B"], False, backward=True),
            },
            transition,
            dict.fromkeys(("chunk_kda_fwd", "chunk_kda_bwd"), _stage("states/transition")),
            bf16,
        ),
        "scan": Kernel(
            {
                "two warpgroups": forward.scan_spec(2, False, "none", False, True),
                "one warpgroup": forward.scan_spec(1, False, "none", False, True),
            },
            scan,
            {"chunk_kda_fwd": _stage("scan")},
            bf16,
        ),
        "reverse_scan": Kernel(
            {
                "two warpgroups": backward.reverse_spec(2, False, "none", False),
                "one warpgroup": backward.reverse_spec(1, False, "none", False),
            },
            reverse,
            {"chunk_kda_bwd": _stage("scan")},
            bf16,
        ),
        "gradients": Kernel(
            {
                f"g in {g}": backward.gradients_spec(g, "safe", "bf16", False)
                for g in ("bf16", "f32")
            },
            gradients,
            {"chunk_kda_bwd": _stage("gradients")},
            bf16,
        ),
        "bwd_recurrence": Kernel(
            {p: ops.recurrence_spec(p, "default", "bf16", "none", False) for p in MATRIX_RATE},
            {"fp32 beta": level_1},
            {"bwd_recurrence": lambda variant: variant.endswith("/default")},
            lambda variant: variant.split("/")[0],
        ),
    }


# ---------------------------------------------------------------- tables
def _titled(texts: dict[str, str]) -> str:
    """Texts under their titles; equal ones once, under all of theirs."""
    titles: dict[str, list[str]] = {}
    for title, text in texts.items():
        titles.setdefault(text, []).append(title)
    return "\n\n".join(f"{'; '.join(of)}:\n\n{text}" for text, of in titles.items())


def plan_table(kernel: Kernel) -> str:
    """The plans as `kda_cute.layouts` describes them."""
    plans = {title: report.budget(spec).plan for title, spec in kernel.specs.items()}
    return _titled({title: f"```text\n{plan.describe()}\n```" for title, plan in plans.items()})


def products_table(kernel: Kernel) -> str:
    """Tensor-core instructions of a CTA's chunk."""
    texts = {}
    for title, spec in kernel.specs.items():
        body = [
            (f"`{r.product}`", r.opcode, str(r.issuers), f"{r.issuers * r.static * r.trips:,}")
            for r in report.budget(spec).mma
        ]
        head = ("product", "instruction", "warps or warpgroups", "a chunk")
        texts[title] = results.table(head, body)
    return _titled(texts)


def bytes_table(kernel: Kernel) -> str:
    """What one chunk and head must move and multiply, and what bounds it."""
    body = []
    for title, (moved, flops) in kernel.cost.items():
        copy_ns = 1e9 * moved / COPY_RATE
        precisions = MATRIX_RATE if "fp32 beta" in kernel.cost else ("bf16",)
        for precision in precisions:
            ns = 1e9 * flops / MATRIX_RATE[precision]
            bound = "memory" if copy_ns > ns else "products"
            body.append(
                (
                    title,
                    f"{moved:,}",
                    f"{flops / 1e6:.1f}",
                    precision,
                    f"{flops / moved:.0f}",
                    f"{copy_ns:.1f}",
                    f"{ns:.1f}",
                    bound,
                )
            )
    head = ("", "bytes", "MFLOP", "operands", "FLOP per byte", "bytes take, ns")
    head += ("products take, ns", "bound by")
    return results.table(head, body)


def roofline_table(kernel: Kernel, folder: Path = results.FOLDER) -> str:
    """Measured times beside both roofs; a paragraph for each results file."""
    parts = []
    for path, run, taken in sorted(newest_by_op(folder.glob("*.json")), key=lambda item: item[2]):
        body = []
        for row in run["rows"]:
            mine = kernel.rows.get(row["op"])
            wanted = mine and row["op"] in taken and results.is_timing(row)
            if not wanted or row["provider"] != "kda_cute" or row["shape"] not in SHAPES:
                continue
            if row["median_us"] is None or not mine(row["variant"]):
                continue
            floor = floor_us(row["bytes"])
            products = 1e6 * row["flops"] / MATRIX_RATE[kernel.precision(row["variant"])]
            line = (row["op"], row["shape"], row["variant"], f"{row['bytes'] / 1e9:.3f}")
            line += (results.us(floor), f"{row['flops'] / 1e9:.1f}", results.us(products))
            roof = row["median_us"] / max(floor, products)
            body.append((*line, results.us(row["median_us"]), f"{roof:.2f}x"))
        if body:
            head = ("op", "shape", "variant", "GB", "bytes take, us", "GFLOP", "products take, us")
            head += ("measured us", "over the higher")
            parts.append(f"{where(path, run)}\n\n{results.table(head, body)}")
    return "\n\n".join(parts) or "Not measured yet."


TABLES: dict[str, Callable[[Kernel], str]] = {
    "plan": plan_table,
    "products": products_table,
    "bytes": bytes_table,
    "roofline": roofline_table,
}


# ---------------------------------------------------------------- pages
def updated(text: str, kernel: Kernel, tables: Iterable[str] = TABLES) -> str:
    """A page with these tables made anew."""
    return functools.reduce(lambda t, name: filled(t, name, TABLES[name](kernel)), tables, text)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="perf.kernel_pages", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing, tell whether it would"
    )
    args = parser.parse_args(argv)
    stale = 0
    for page, kernel in kernels().items():
        path = FOLDER / f"{page}.md"
        old = path.read_text()
        try:
            new = updated(old, kernel)
        except ValueError as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
        stale += new != old
        if args.check:
            print(f"{path.name} is {'up to date' if new == old else 'out of date'}")
        else:
            path.write_text(new)
    return int(args.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
