"""`kda-cute bench`: time the kernels, compare two runs, and report."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import click

from .common import Undone, perf, undone, words


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@click.group()
def bench() -> None:
    """Time the kernels, compare two runs, and report.

    \b
    kda-cute bench run --out new.json
    kda-cute bench compare h200 new.json
    """


@bench.command()
@click.argument("ops", nargs=-1, metavar="[OP]...")
@click.option("--shapes", callback=words, help="Names, or the groups all and scaling.")
@click.option("--providers", callback=words, help="kda_cute, cudnn, fla, scalar  [kda_cute,cudnn]")
@click.option("--forms", callback=words, help="Of level 2: A, B  [A,B]")
@click.option("--options", callback=words, help="Of level 2: states, nostates  [both]")
@click.option("--variants", callback=words, help="Of level 1: PRECISION/LAYOUT,...")
@click.option("--rounds", type=int, help="Timed calls; short ones get up to 8 times as many.  [60]")
@click.option("--out", type=click.Path(dir_okay=False), help="Results file to write.")
@click.option("--list", "only_list", is_flag=True, help="Say what there is, and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="The results on stdout, the rest on stderr.")
def run(ops, shapes, providers, forms, options, variants, rounds, out, only_list, as_json) -> None:
    """Check, then time each OP: bwd_recurrence, chunk_kda_fwd, chunk_kda_bwd; all of them if none
    is named.

    What fails its check against float64, or runs other kernels than its own, is never timed, and
    the exit code is 1.  Providers that are absent are skipped, with the reason.

    \b
    kda-cute bench run chunk_kda_fwd --shapes T8192_H96,var6_H64 --out new.json
    """
    benches = perf("bench")
    if only_list:
        found = benches.listing()
        click.echo(json.dumps(found) if as_json else benches.listing_text(found))
        return
    with undone(ValueError, benches.Impossible):
        jobs, left_out = benches.make_jobs(
            ops or benches.OPS,
            **_given(
                shapes=shapes, wanted=providers, forms=forms, options=options,
                variants=variants, rounds=rounds,
            ),
        )  # fmt: skip
        benches.need_gpu()
    from tqdm import tqdm

    runner, results = perf("run"), perf("results")
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        for reason in left_out:
            print(f"skipped: {reason}", file=sys.stderr)
        benches.compile_jobs(jobs)
        progress = tqdm(jobs, unit="shape", file=sys.stderr, disable=None)
        rows, passed = runner.measure(progress, out)
        runner.show(rows)
    timed = [r for r in rows if results.is_timing(r) and r["provider"] in benches.PROVIDERS]
    if not timed:
        raise Undone("none of the providers can run here; --list says why")
    if as_json:
        head = results.surroundings() if out is None else results.read(out)
        click.echo(json.dumps({**head, "rows": rows}))
    sys.exit(0 if passed else 1)


@bench.command()
@click.argument("base")
@click.argument("new")
@click.option("--tolerance", type=float, help="Relative, of a row's time.  [0.02]")
@click.option("--confidence", type=float, help="Of all rows together.  [0.99]")
@click.option("--providers", callback=words, help="Decide their rows only.  [all]")
@click.option("--json", "as_json", is_flag=True, help="The decision as JSON on stdout.")
def compare(base, new, tolerance, confidence, providers, as_json) -> None:
    """Decide for each row whether NEW is slower than BASE; exit code 1 if one is, or if one failed
    its check in NEW.

    BASE and NEW are results files of `bench run`, or names of committed baselines.  The decision is
    made from samples: docs/regressions.md says how.

    \b
    kda-cute bench compare h200 new.json
    """
    benches, regression, results = perf("bench"), perf("regression"), perf("results")
    with undone(ValueError, OSError, benches.Impossible):
        paths = [benches.find_results(name) for name in (base, new)]
        found = regression.compare(
            *(results.read(path) for path in paths),
            names=tuple(map(str, paths)),
            **_given(tolerance=tolerance, confidence=confidence, providers=providers),
        )
    for text in found.warnings:
        click.echo(f"warning: {text}", err=True)
    click.echo(json.dumps(regression.to_json(found)) if as_json else regression.to_markdown(found))
    sys.exit(regression.exit_code(found))


@bench.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--out", required=True, type=click.Path(file_okay=False), help="Folder to write to.")
@click.option(
    "--format", "kind", type=click.Choice(("svg", "png")), default="svg", show_default=True
)
@click.option("--json", "as_json", is_flag=True, help="The written files as JSON on stdout.")
def report(files, out, kind, as_json) -> None:
    """Write a page, bench.md, and its plots: times against peers, ratios, roofline, scaling.

    Each op is taken from the newest FILE that has it.

    \b
    kda-cute bench report perf/results/*.json --out docs/figures
    """
    benches, page = perf("bench"), perf("page")
    with undone(ValueError, OSError, ImportError, benches.Impossible):
        paths = [benches.find_results(name) for name in files]
        written = page.write(paths, Path(out), kind)
    click.echo(
        json.dumps([str(path) for path in written])
        if as_json
        else "\n".join(str(path) for path in written)
    )
