"""The accuracy certificate: which cases are measured, and what becomes of their errors.

A line of the certificate is one tensor of one regime and shape: the worst error over the cases that
share them (seeds, forms of the call), the median, and what each is held to.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import reference
from . import recurrence, tolerances
from .calls import FORMS
from .errors import Compared
from .measure import (
    TENSORS,
    Case,
    measure,
    measure_recurrence,
    measure_recurrence_reference,
    measure_reference,
    worst,
)
from .peers import Peer, Unavailable

OPS = ("chunk_kda", "bwd_recurrence")
PACKAGE = "kda_cute"
PRECISIONS = ("tf32", "bf16")
MEDIAN_FORM, MEDIAN_SEEDS = "B", 5  # whose median peers' figures bound, as in the tests


class Sizes(NamedTuple):
    """Of the cases: tokens and heads of the regimes; of a dense sequence with a tail; of packed ones,
    with tails of every kind and an empty one, for level 2 and for level 1's tiles of 16.
    """

    T: int
    H: int
    dense: int
    ragged: tuple[int, ...]
    ragged_tiles: tuple[int, ...]
    ragged_H: int


KERNELS = Sizes(512, 2, 209, (1, 15, 64, 65, 0, 300, 128, 200), (1, 15, 16, 17, 31, 63, 300, 0), 3)
# The token recurrence is slow: one step of Python a token.
REFERENCE = Sizes(200, 2, 81, (1, 15, 0, 65, 17), (1, 0, 17, 31), 1)
REFERENCE_QUICK = REFERENCE._replace(T=70, H=1)


class Line(NamedTuple):
    """One line: the worst error of its cases, and the median over seeds of those of MEDIAN_FORM;
    tolerances are inf for what isn't judged.
    """

    op: str
    regime: str
    shape: str
    tensor: str
    provider: str
    variant: str
    cases: int
    error: float
    tolerance: float
    median: float
    median_tolerance: float

    @property
    def ok(self) -> bool:
        """Whether both errors are within; not for NaN."""
        return self.error <= self.tolerance and self.median <= self.median_tolerance


@dataclass
class Certificate:
    """Lines, and what was not measured: name -> why.  notes: what a reader has to know."""

    backend: str
    form: str
    lines: list[Line] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def misses(self) -> list[Line]:
        """This package's lines that miss; peers' are shown and don't count."""
        return [line for line in self.lines if line.provider == PACKAGE and not line.ok]


# ---------------------------------------------------------------- which cases
def regimes(op: str) -> tuple[str, ...]:
    """Those that an op is certified in."""
    return tolerances.REGIMES if op == "chunk_kda" else recurrence.REGIMES


def cases(op: str, form: str, backend: str, chosen: Sequence[str] | None = None) -> list[Case]:
    """What is measured.  form: "quick", one seed and form of the call, regimes with states and those
    that peers have figures for; "full", everything.  chosen: these regimes only, with all that their
    names select.
    """
    quick = form == "quick"
    names = regimes(op)
    if chosen is not None:
        names = tuple(name for name in names if name in chosen)
    elif quick:
        names = tuple(n for n in names if n.endswith("+states") or n in tolerances.PEERS)
    size = KERNELS
    if backend == "reference":
        size = REFERENCE_QUICK if quick else REFERENCE
    square = dict(T=size.T, H=size.H)
    seeds = range(1) if quick else range(5 if backend == "kernels" else 2)
    if op == "bwd_recurrence":
        made = [Case(n, seed=seed, **square) for n in names for seed in seeds[:3]]
        ragged = dict(lengths=size.ragged_tiles, H=size.ragged_H)
        return made + [Case(n, **ragged) for n in ("mixed+states",) if n in names]
    forms = ("B",) if quick or backend == "reference" else FORMS
    made = [
        Case(name, form, seed, v_first=seed % 2 == 0, **square)
        for name in names
        for seed in seeds
        for form in forms
    ]
    other = dict(T=size.dense, H=size.ragged_H)
    for name in ("mixed+states", "ub_typ+states"):
        if name in names:
            both = ((True, size.ragged), (False, size.ragged), (False, None))
            made += [
                Case(name, form, v_first=v_first, lengths=lengths, **other)
                for form in forms
                for v_first, lengths in both
            ]
    if "typical" in names:
        made += [Case("typical", form, state=False, **other) for form in forms]
    return made


# ---------------------------------------------------------------- measuring
Found = dict[tuple[str, str, str, str, str], list[tuple[Case, Compared]]]


def certify(
    *,
    form: str = "quick",
    ops: Iterable[str] = OPS,
    backend: str,
    device: torch.device | str,
    chosen: Sequence[str] | None = None,
    peers: Sequence[Peer] = (),
    chunk_kda: Callable[..., tuple] | None = None,
    bwd_recurrence: Callable[..., Any] | None = None,
    plan: Callable[..., list[Case]] = cases,
    progress: Callable[[str], None] = lambda case: None,
) -> Certificate:
    """Measure everything.

    backend "kernels" needs a Hopper GPU; "reference" runs anywhere and says nothing of the kernels.
    chunk_kda, bwd_recurrence: what is certified, the package's own by default.  A case that raises
    counts as a miss; a peer's is left out, with the reason.  progress: called after each case.
    """
    made = Certificate(backend, form)
    if backend == "reference":
        made.notes.append(
            "The kernels were not certified: this is the float64 reference, against the "
            "token-by-token recurrence."
        )
    for op in ops:
        found: Found = {}
        runs = runners(op, backend, chunk_kda, bwd_recurrence)
        for case in plan(op, form, backend, chosen):
            for variant, run in runs.items():
                try:
                    compared = run(case, device)
                except Exception as error:  # a miss like any other; the rest gets its turn
                    compared = {"": {type(error).__name__: Compared(math.nan, 0.0)}}
                    made.notes.append(f"{op}, {case.regime}, {case.shape}: {error}")
                for part, tensors in compared.items():
                    _keep(found, case, PACKAGE, " ".join(filter(None, (variant, part))), tensors)
            if op == "chunk_kda":
                for peer in peers:
                    _measure_peer(found, made.skipped, peer, case, device)
            progress(f"{op} {case.regime}")
        made.lines += lines(op, found)
    return made


def runners(op, backend, chunk_kda=None, bwd_recurrence=None) -> dict[str, Callable]:
    """Variant -> (case, device) -> {part of what was compared: errors by tensor}."""
    if op == "chunk_kda":
        function = chunk_kda or _chunk_kda(backend)
        if backend == "reference":
            return {"": lambda case, device: measure_reference(function, case, device)}
        return {"": lambda case, device: {"": measure(function, case, device)}}
    if backend == "reference":
        function = bwd_recurrence or reference.bwd_recurrence
        return {
            "reference": lambda case, device: {
                "": measure_recurrence_reference(function, case, device)
            }
        }
    from .. import bwd_recurrence as kernel

    function = bwd_recurrence or kernel
    return {
        precision: lambda case, device, precision=precision: {
            "": measure_recurrence(function, case, device, precision)
        }
        for precision in PRECISIONS
    }


def _chunk_kda(backend: str) -> Callable[..., tuple]:
    from .. import chunk_kda

    return lambda **call: chunk_kda(**call, backend=backend)


def _measure_peer(found: Found, skipped: dict[str, str], peer: Peer, case: Case, device):
    try:
        tensors = peer.measure(case, device)
    except Unavailable as reason:
        skipped.setdefault(f"{peer.name}, some regimes", str(reason))
    except Exception as error:  # its own affair
        skipped[f"{peer.name}, {case.regime}"] = f"{type(error).__name__}: {error}"
    else:
        _keep(found, case, peer.name, "", tensors)


def _keep(found: Found, case: Case, provider: str, variant: str, tensors: dict[str, Compared]):
    for tensor, compared in tensors.items():
        key = case.regime, case.shape, tensor, provider, variant
        found.setdefault(key, []).append((case, compared))


def lines(op: str, found: Found) -> list[Line]:
    """One line for each tensor, regime, shape, provider and variant."""
    leaf = {tensor: name for name, tensor in TENSORS.items()}
    out = []
    for (regime, shape, tensor, provider, variant), runs in found.items():
        errors = [c.error for _, c in runs]
        seeds = [c.error for case, c in runs if case.form == MEDIAN_FORM] or errors
        medians = {}
        if op == "chunk_kda" and not variant and len(seeds) >= MEDIAN_SEEDS:
            medians = tolerances.medians(regime)
        out.append(
            Line(
                op=op,
                regime=regime,
                shape=shape,
                tensor=tensor,
                provider=provider,
                variant=variant,
                cases=len(runs),
                error=worst(errors),
                tolerance=min(c.tolerance for _, c in runs),
                median=math.nan if math.isnan(worst(seeds)) else statistics.median(seeds),
                median_tolerance=medians.get(leaf.get(tensor, tensor), math.inf),
            )
        )
    return out
