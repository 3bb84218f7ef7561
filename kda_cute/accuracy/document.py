"""A certificate as text: the table, Markdown, and JSON in the format of results files.

    {"gpu", "driver", "torch", "cutlass_dsl", "commit", "date",
     "backend", "form", "passed", "notes", "skipped", "rows": [...]}

A row is `op`, `regime`, `tensor`, `error` (null: not finite), `tolerance`, `provider`, `variant`,
`shape`; what isn't judged has no row.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import machine, tables
from ..layouts.plan import format_table
from .certificate import PACKAGE, Certificate, Line

FILES = ("certificate.json", "certificate.md")


# ---------------------------------------------------------------- tables
def thousandths(error: float) -> str:
    """An error x 1e-3, in three digits; "-" for a tolerance that isn't judged."""
    if math.isinf(error):
        return "-"
    return "NaN" if math.isnan(error) else f"{1e3 * error:.3g}"


def verdict(line: Line) -> str:
    """ok, MISS, or that it isn't judged."""
    if math.isinf(line.tolerance) and math.isinf(line.median_tolerance) and line.ok:
        return "not judged"
    return "ok" if line.ok else "MISS"


def table_rows(lines: Sequence[Line]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(head, rows): the package's lines, with the peers' worst errors beside them."""
    own = [line for line in lines if line.provider == PACKAGE]
    peers = list(dict.fromkeys(line.provider for line in lines if line.provider != PACKAGE))
    theirs = {(x.provider, x.op, x.regime, x.shape, x.tensor): x for x in lines}
    judged = any(not math.isinf(line.median_tolerance) for line in own)
    head = ["op", "regime", "shape", "tensor", "variant", "error x1e-3", "tolerance"]
    head += ["median x1e-3", "tolerance of it"] * judged + ["ok", *(f"{p} x1e-3" for p in peers)]
    rows = []
    for x in own:
        row = [x.op, x.regime, x.shape, x.tensor, x.variant or "kernels"]
        row += [thousandths(x.error), thousandths(x.tolerance)]
        row += [thousandths(x.median), thousandths(x.median_tolerance)] * judged
        row.append(verdict(x))
        for peer in peers:
            other = theirs.get((peer, x.op, x.regime, x.shape, x.tensor))
            row.append("" if other is None else thousandths(other.error))
        rows.append(tuple(row))
    return tuple(head), rows


def table(lines: Sequence[Line]) -> str:
    """Text for a terminal."""
    head, rows = table_rows(lines)
    return format_table(head, rows)


def summary(certificate: Certificate) -> str:
    """What was certified, and whether."""
    lines = [line for line in certificate.lines if line.provider == PACKAGE]
    count, misses = len(lines), len(certificate.misses)
    what = "kernels" if certificate.backend == "kernels" else "reference"
    if misses:
        return f"{misses} of {count} tensors miss their tolerance ({what}, {certificate.form} form)"
    return f"all {count} tensors within tolerance ({what}, {certificate.form} form)"


def notes(certificate: Certificate) -> list[str]:
    """Everything that a reader has to know beside the table, a line each."""
    skipped = [f"{name}: skipped: {why}" for name, why in certificate.skipped.items()]
    return [*certificate.notes, *skipped]


def markdown(certificate: Certificate, head: Mapping[str, str]) -> str:
    """The whole certificate."""
    gpu = f"no GPU ({platform.machine()})" if head["gpu"] == machine.NO_GPU else head["gpu"]
    parts = [
        "# Accuracy certificate",
        f"**{summary(certificate)}**",
        f"{machine.described({**head, 'gpu': gpu})}.",
        *(f"- {note}" for note in notes(certificate)),
        "Errors are relative Frobenius norms against a float64 oracle, the worst of all seeds and "
        "forms of the call; those of dA_log and ddt_bias are relative to the larger of the sum and "
        "its terms. Peers are measured in the same run, and not judged.",
    ]
    head_row, rows = table_rows(certificate.lines)
    for op in dict.fromkeys(row[0] for row in rows):
        body = [row[1:] for row in rows if row[0] == op]
        parts += [f"## `{op}`", tables.markdown(head_row[1:], body)]
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------- JSON
def rows(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Accuracy rows: the worst errors, and the medians that are judged."""
    out = []
    for line in lines:
        kinds = (
            ("worst", line.error, line.tolerance),
            ("median", line.median, line.median_tolerance),
        )
        for kind, error, tolerance in kinds:
            if math.isinf(tolerance) and math.isfinite(error):
                continue
            variant = f"{line.variant or 'kernels'}, {kind} of {line.cases}"
            out.append(
                {
                    "op": line.op,
                    "regime": line.regime,
                    "tensor": line.tensor,
                    "error": float(f"{error:.4g}") if math.isfinite(error) else None,
                    "tolerance": tolerance if math.isfinite(tolerance) else 0.0,
                    "provider": line.provider,
                    "variant": variant if line.provider == PACKAGE else f"{kind} of {line.cases}",
                    "shape": line.shape,
                }
            )
    return out


def as_object(certificate: Certificate, head: Mapping[str, str]) -> dict[str, Any]:
    """What the JSON file holds."""
    return {
        **head,
        "backend": certificate.backend,
        "form": certificate.form,
        "passed": not certificate.misses,
        "notes": certificate.notes,
        "skipped": certificate.skipped,
        "rows": rows(certificate.lines),
    }


def write(certificate: Certificate, folder: Path) -> list[Path]:
    """Write FILES into a folder, which is made; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    head = machine.surroundings()
    texts = (
        json.dumps(as_object(certificate, head), indent=1, allow_nan=False) + "\n",
        markdown(certificate, head),
    )
    paths = [folder / name for name in FILES]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths
