"""A kernel's plans side by side on the GPU: a correctness gate, then interleaved timing.

`kda-cute layouts compare KERNEL` is the command.
"""

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kda_cute.lab import catalogue
from perf.one_kernel import Subject
from perf.timing import Timing, interleaved


class Row(NamedTuple):
    """One plan: bytes of shared memory, predicted wavefronts per chunk, the result that is furthest
    out as a fraction of its tolerance, and microseconds.  Without times it failed, in `failed`.
    """

    layout: str
    precision: str
    bytes: int
    ctas_per_sm: int
    wavefronts: int
    conflicts: int
    worst: str
    worst_of_tolerance: float | None
    failed: tuple[str, ...]
    median_us: float | None
    p20_us: float | None
    p80_us: float | None
    ratio: float | None  # to the first plan that passed


def gate(subject: Subject) -> tuple[dict[str, float], tuple[str, ...]]:
    """Errors over tolerances, and the results that are out; what was raised counts as one."""
    try:
        found = subject.check()
    except Exception as error:  # the other plans still get their turn
        traceback.print_exc()
        return {}, (type(error).__name__,)
    return found, tuple(name for name, part in found.items() if not part <= 1)


def compare(
    subjects: Sequence[Subject],
    *,
    repeats: int = 20,
    timer: Callable[..., Mapping[str, Timing]] | None = None,
    progress: Callable[[str], Any] = lambda words: None,
) -> list[Row]:
    """Check every subject, then time those that passed, interleaved.  progress is called with what
    begins; timer: `perf.timing.interleaved`, or one that is called like it.
    """
    timer = timer or interleaved
    checked = []
    for subject in subjects:
        progress(f"checking {subject.layout}")
        checked.append((subject, *gate(subject)))
    passed = {s.layout: s.launch for s, _, failed in checked if not failed}
    progress(f"timing {', '.join(passed) or 'nothing'}")
    times = timer(passed, repeats=repeats) if passed else {}
    base = next(iter(times.values())).median if times else math.nan
    return [_row(s, found, failed, times.get(s.layout), base) for s, found, failed in checked]


def _row(
    s: Subject, found: Mapping[str, float], failed: tuple[str, ...], t: Timing | None, base: float
) -> Row:
    worst = max(found, key=lambda name: (math.isnan(found[name]), found[name]), default="")
    part = found.get(worst, math.nan)
    predicted = catalogue.wavefronts(s.plan)
    times = (None,) * 4 if t is None else (t.median, t.p20, t.p80, t.median / base)
    return Row(
        s.layout,
        s.precision,
        s.plan.total_bytes,
        s.plan.ctas_per_sm,
        predicted["all"],
        predicted["conflicts"],
        worst,
        part if math.isfinite(part) else None,
        failed,
        *times,
    )


def table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and lines of a text table."""
    head = (
        *("layout", "precision", "bytes", "CTAs", "wavefronts", "conflicts", "gate"),
        *("median us", "p20 to p80", "ratio"),
    )
    lines = []
    for r in rows:
        if r.failed:
            verdict, timed = f"FAILED: {' '.join(r.failed)}", ("", "", "")
        else:
            verdict = f"{r.worst} {r.worst_of_tolerance:.2f} of tolerance"
            timed = (
                f"{r.median_us:.1f}",
                f"{r.p20_us:.1f} to {r.p80_us:.1f}",
                f"{r.ratio:.3f}",
            )
        numbers = (r.bytes, r.ctas_per_sm, r.wavefronts, r.conflicts)
        lines.append((r.layout, r.precision, *map(str, numbers), verdict, *timed))
    return head, lines
