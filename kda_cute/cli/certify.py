"""`kda-cute certify`: the accuracy of kernels, reference and peers, against float64."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from tqdm import tqdm

from ..accuracy import certificate, document, peers
from ..lab import doctor
from .common import words


@click.command()
@click.option(
    "--quick/--full",
    default=True,
    help="One seed, regimes with states (default; under a minute on a GPU once kernels are "
    "compiled), or everything: all regimes, five seeds, every form of the call.",
)
@click.option(
    "--op", "ops", type=click.Choice(certificate.OPS), multiple=True, help="Default: both."
)
@click.option(
    "--backend",
    type=click.Choice(("kernels", "reference")),
    help="Default: kernels on a Hopper GPU, the float64 reference elsewhere.",
)
@click.option("--peers", "with_peers", is_flag=True, help="Measure FLA and cuDNN beside it.")
@click.option("--regimes", callback=words, help="Some regimes only, by name, with commas between.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("certificate"),
    show_default=True,
    help=f"Folder for {' and '.join(document.FILES)}.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the JSON instead of the table.")
def certify(quick, ops, backend, with_peers, regimes, out, as_json):
    """Measure the accuracy of every output and gradient in every regime, against float64.

    \b
    kda-cute certify                         quick form
    kda-cute certify --full --peers          everything, FLA and cuDNN beside it
    kda-cute certify --regimes strong+states,ub_burst --op chunk_kda

    Without a Hopper GPU it certifies the float64 reference, and says so. Exit code 1 when a tensor
    misses its tolerance (NaN always does), 2 when it could not be measured.
    """
    reason = doctor.why_not_here()
    if backend == "kernels" and reason:
        raise click.UsageError(f"--backend kernels: {reason}")
    backend = backend or ("reference" if reason else "kernels")
    ops = ops or certificate.OPS
    if regimes is not None:
        _check_regimes(regimes, ops)
    form = "quick" if quick else "full"
    total = sum(len(certificate.cases(op, form, backend, regimes)) for op in ops)
    found, skipped = [], {}
    if with_peers and "chunk_kda" in ops:
        if reason:
            skipped["peers"] = reason
        else:
            found, skipped = peers.find()
    with tqdm(total=total, desc="certifying", unit="case", file=sys.stderr) as bar:
        made = certificate.certify(
            form=form,
            ops=ops,
            backend=backend,
            device="cpu" if reason else "cuda",
            chosen=regimes,
            peers=found,
            progress=lambda case: bar.update(),
        )
    made.skipped = skipped | made.skipped
    if backend == "reference" and reason:
        made.notes.insert(0, f"No kernel ran: {reason}.")
    paths = document.write(made, out)
    if as_json:
        click.echo(json.dumps(json.loads(paths[0].read_text())))
    else:
        click.echo(document.table(made.lines))
        for note in document.notes(made):
            click.echo(note)
        click.echo(f"{document.summary(made)}; written to {', '.join(map(str, paths))}")
    sys.exit(int(bool(made.misses)))


def _check_regimes(chosen: Sequence[str], ops: Sequence[str]) -> None:
    """A usage error names a regime that no chosen op has."""
    known = dict.fromkeys(name for op in ops for name in certificate.regimes(op))
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise click.UsageError(
            f"--regimes: {', '.join(unknown) or 'nothing'} is not among {', '.join(known)}"
        )
