"""`kda-cute layouts`: list, show, audit, draw and compare the shared-memory plans of a kernel."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..lab import catalogue, draw, stack
from ..layouts import audit as auditor
from ..layouts.plan import Plan, format_table
from ..layouts.tile import LayoutError
from .common import Undone, need_kernels, perf

_kernel = click.argument("kernel")
_layout = click.option(
    "--layout", default="default", show_default=True, help="A plan of the kernel, by name."
)
_precision = click.option(
    "--precision", help="tf32 or bf16, where a kernel has both; its first one by default."
)
_options = click.option(
    "-o",
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the plan, such as groups=1 of scan; `layouts list` shows them.",
)
_json = click.option("--json", "as_json", is_flag=True, help="JSON on stdout, and nothing else.")


@click.group()
def layouts() -> None:
    """Shared-memory plans: list, show, audit, draw and compare them.

    A plan is one entry in kda_cute/layouts/variants.py; docs/layouts.md has the whole experiment.
    All but `compare` work without a GPU.
    """


def _found(make: Callable[..., Any], *arguments: Any) -> Any:
    """What `make` returns; a bad name or an impossible plan ends the command."""
    try:
        return make(*arguments)
    except LayoutError as error:
        click.echo(f"this plan cannot be: {error}", err=True)
        sys.exit(1)
    except ValueError as error:
        raise Undone(str(error)) from error


def _plan(kernel: str, layout: str, precision: str | None, options: tuple[str, ...]) -> Plan:
    return _found(_found(catalogue.select, kernel, options).plan, layout, precision)


@layouts.command("list")
@click.argument("kernel", required=False)
@_options
@_json
def list_(kernel: str | None, options: tuple[str, ...], as_json: bool) -> None:
    """The plans of KERNEL, or of every kernel: bytes, CTAs per SM, predicted wavefronts per chunk.

    Exit code 1 when one of them cannot be or is not legal.

    \b
    Example:
      kda-cute layouts list gradients -o g=f32
    """
    names = catalogue.kernels() if kernel is None else (kernel,)
    selections = [_found(catalogue.select, name, options) for name in names]
    rows = [row for selection in selections for row in catalogue.rows(selection)]
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows], indent=1))
    else:
        head = (
            "kernel",
            "layout",
            "precision",
            "tiles",
            "bytes",
            "CTAs",
            "wavefronts",
            "conflicts",
        )
        lines = [
            tuple("" if x is None else str(x) for x in (*row[:-1], row.problem)) for row in rows
        ]
        click.echo(format_table((*head, "problem"), lines))
        for name in names:
            defaults = catalogue.option_defaults(name)
            if defaults:
                words = ", ".join(f"{n}={v}" for n, v in defaults.items())
                click.echo(f"options of {name}, with defaults: {words}")
    sys.exit(int(any(row.problem for row in rows)))


@layouts.command()
@_kernel
@_layout
@_precision
@_options
@_json
def show(kernel: str, layout: str, precision: str | None, options, as_json: bool) -> None:
    """The scratch stack of KERNEL over its steps: who lives where, and how much is live.

    \b
    Example:
      kda-cute layouts show transition
    """
    plan = _plan(kernel, layout, precision, options)
    if as_json:
        click.echo(json.dumps(stack.as_dict(plan), indent=1))
        return
    click.echo(plan.describe())
    click.echo()
    click.echo(stack.describe(plan).split("\n", 1)[1])


@layouts.command()
@_kernel
@_layout
@_precision
@_options
@click.option("--conflicts", is_flag=True, help="Only accesses with conflicts.")
@_json
def audit(kernel: str, layout: str, precision, options, conflicts: bool, as_json: bool) -> None:
    """Bank conflicts of every access pattern of KERNEL, and whether TMA and wgmma take its tiles.

    Wavefronts are cycles of shared memory: `ideal` without conflicts, `actual` in the plan, both of
    one instruction; `ways` is the worst number of words of one bank.  Exit code 1 when a tile or an
    access is not legal.

    \b
    Example:
      kda-cute layouts audit bwd_recurrence --layout padded --conflicts
    """
    plan = _plan(kernel, layout, precision, options)
    rows, problems = auditor.audit(plan), auditor.legality(plan)
    predicted = catalogue.wavefronts(plan)
    extra, ideal = predicted["conflicts"], predicted["all"] - predicted["conflicts"]
    shown = [row for row in rows if row.actual > row.ideal] if conflicts else rows
    if as_json:
        found = {
            "plan": plan.name,
            "ideal_wavefronts": ideal,
            "extra_wavefronts": extra,
            "problems": problems,
            "accesses": [row._asdict() for row in shown],
        }
        click.echo(json.dumps(found, indent=1))
    else:
        head = ("access", "tile", "kind", "ideal", "actual", "ways", "per chunk", "extra cycles")
        click.echo(f"{plan.name}: {ideal} wavefronts per chunk and {extra} extra by bank conflicts")
        click.echo(format_table(head, [tuple(map(str, row)) for row in shown]))
        for problem in problems:
            click.echo(f"not legal: {problem}")
        if not problems:
            click.echo("legal: copies, wgmma operands and accesses are aligned and contiguous")
    sys.exit(int(bool(problems)))


@layouts.command("draw")
@_kernel
@_layout
@_precision
@_options
@click.option("--tile", help="Draw this tile as banks instead of the stack; a name, or `list`.")
@click.option("--access", help="With the words that an access touches; a name of `audit`.")
@click.option("--rows", default=8, show_default=True, help="Rows of the tile that are drawn.")
@click.option("--out", "-O", type=click.Path(dir_okay=False), help="File; stdout by default.")
@click.option("--json", "as_json", is_flag=True, help="JSON about the file on stdout; with --out.")
def draw_(
    kernel, layout, precision, options, tile: str | None, access: str | None, rows, out, as_json
) -> None:
    """SVG of KERNEL's scratch stack over its steps, or of one tile as coloured cells of banks.

    \b
    Examples:
      kda-cute layouts draw gradients -O stack.svg
      kda-cute layouts draw bwd_recurrence --tile do -O do.svg
      kda-cute layouts draw bwd_recurrence --layout padded \\
          --access "value: kd as B, tokens strided" -O conflict.svg
    """
    if as_json and not out:
        raise click.UsageError("--json: give a file by --out, since the picture takes stdout")
    plan = _plan(kernel, layout, precision, options)
    text = _found(_picture, plan, tile, access, rows)
    if out is None:
        click.echo(text, nl=False)
        return
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(text)
    if as_json:
        found = {"file": out, "plan": plan.name, "tile": tile, "access": access, "bytes": len(text)}
        click.echo(json.dumps(found))
    else:
        click.echo(f"{out}: {plan.name}" + (f", {tile or access}" if tile or access else ""))


def _picture(plan: Plan, tile: str | None, access: str | None, rows: int) -> str:
    touched = None
    if access is not None:
        named = {a.name: a for a in auditor.accesses(plan)}
        if access not in named:
            raise ValueError(f"access={access!r} is not one of: {'; '.join(named)}")
        touched = named[access]
        if tile not in (None, touched.tile.name):
            raise ValueError(f"access={access!r} is of tile {touched.tile.name}, not {tile}")
        tile = touched.tile.name
    if tile is None:
        return draw.stack_picture(plan)
    if tile not in plan:
        raise ValueError(f"tile={tile!r} is not one of {', '.join(plan.names)}")
    return draw.tile_picture(plan[tile], rows=rows, access=touched)


@layouts.command()
@_kernel
@click.option("--layout", "chosen", multiple=True, help="A plan; several times; all by default.")
@_precision
@_options
@click.option("--shape", default="T8192_H96", show_default=True, help="A shape of the benchmarks.")
@click.option("--repeats", default=20, show_default=True, help="Timed launches of each plan.")
@_json
def compare(
    kernel: str,
    chosen: tuple[str, ...],
    precision,
    options,
    shape: str,
    repeats: int,
    as_json: bool,
) -> None:
    """Run KERNEL in each plan on the GPU: first against float64, then timed, interleaved.

    Ratios are to the first plan.  A plan whose results are wrong is not timed, and makes the exit
    code 1.  Without a Hopper GPU, or outside a checkout of the repository, exit code 2.

    \b
    Example:
      kda-cute layouts compare bwd_recurrence --layout default --layout wider
    """
    selection = _found(catalogue.select, kernel, options)
    chosen = chosen or selection.layouts
    for name in chosen:
        _found(selection.plan, name, precision)
    need_kernels("compare runs kernels")
    sys.exit(_compare(selection, chosen, precision, shape, repeats, as_json))


def _compare(selection, chosen, precision, shape: str, repeats: int, as_json: bool) -> int:
    measure, one_kernel, shapes = (perf(n) for n in ("layouts", "one_kernel", "shapes"))
    where = _found(shapes.find_shape, shape)
    from .. import compile as kernel_compile
    from .. import report

    specs = one_kernel.specs(selection, chosen, where, precision)
    say = functools.partial(click.echo, err=True)
    say(f"compiling {len(specs)} configurations, where the cache has none, 4 to 12 s each")
    for spec in specs:
        try:
            kernel_compile.object_file(spec)
        except Exception as error:  # the gate of this plan will say so; the others get their turn
            say(f"{report.label(spec.config)}: {type(error).__name__}: {error}")
    say(f"inputs and float64 results of {where.name}")
    subjects = one_kernel.subjects(selection, chosen, where, precision)
    rows = measure.compare(subjects, repeats=repeats, progress=say)
    if as_json:
        found = {
            "kernel": selection.kernel,
            "shape": where.name,
            "rows": [r._asdict() for r in rows],
        }
        click.echo(json.dumps(found, indent=1))
    else:
        click.echo(
            f"{selection.kernel} on {where.name}, in microseconds; wavefronts are predicted, per chunk"
        )
        click.echo(format_table(*measure.table(rows)))
    return int(any(row.failed for row in rows))
