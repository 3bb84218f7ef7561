"""Check, then time, `chunk_kda` and its peers side by side; `perf.run` has the command line.

Every candidate must first agree with float64 on a few heads of the very tensors that are timed.
Then, all candidates interleaved and on cold L2: events around calls, the host time of this
package's calls, and last, under the profiler and beside the yardsticks, the kernels of each call.  A
candidate that is wrong, raises, or ran other kernels than its own has no times, and makes the exit
code 1.
"""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kda_cute.accuracy.errors import rel_error
from perf import compare, profiler, providers, results, yardstick
from perf.forms import REGIME, Inputs, expected, make_inputs, some_heads
from perf.profiler import Call
from perf.providers import Candidate, Unavailable
from perf.shapes import Shape, chunk_kda_bytes, chunk_kda_flops
from perf.timing import Timing, interleaved

MOST_WALL = 60  # calls between events: no more, however short they are


def make_candidates(
    op: str,
    shape: Shape,
    inputs: Mapping[str, Inputs],
    options: Sequence[str],
    wanted: Sequence[str],
) -> list[Candidate]:
    """Those of the wanted providers that can run; says why the others can't."""
    made = []
    for provider in wanted:
        try:
            made += providers.make(provider, op, shape, inputs, options)
        except Unavailable as reason:
            print(f"  {provider}: skipped: {reason}", flush=True)
    return made


# ---------------------------------------------------------------- the correctness gate
def errors(
    got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], heads: Sequence[int]
) -> dict[str, float]:
    """Relative Frobenius error of each expected tensor on some heads; NaN where one is not finite."""
    return {name: rel_error(got[name][:, list(heads)], right) for name, right in want.items()}


def gate(
    op: str, candidates: Sequence[Candidate], inputs: Mapping[str, Inputs]
) -> tuple[list[results.Row], dict[str, list[str]]]:
    """Run every candidate once: accuracy rows, and name -> what is wrong with it."""
    rows: list[results.Row] = []
    wrong: dict[str, list[str]] = {}
    right: dict[str, dict[str, torch.Tensor]] = {}
    for c in candidates:
        x = inputs[c.form]
        heads = some_heads(x.shape.H)
        if c.form not in right:
            right[c.form] = expected(op, x, heads)
        started = time.perf_counter()
        try:
            found = errors(c.results(c.run()), right[c.form], heads)
            failed = [name for name, error in found.items() if not error <= c.tolerance(name)]
        except Exception as error:  # it counts as a failure; the others still get their turn
            traceback.print_exc()
            found, failed = {}, [type(error).__name__]
        if failed:
            wrong[c.name] = failed
        rows += [
            results.accuracy_row(
                op, REGIME, name, error, c.tolerance(name), c.provider,
                variant=c.variant, shape=x.shape.name,
            )
            for name, error in found.items()
        ]  # fmt: skip
        verdict = f"FAILED: {' '.join(failed)}" if failed else "ok"
        shown = "".join(f", {name} {error:.1e}" for name, error in found.items())
        seconds = time.perf_counter() - started
        print(f"  {c.name}: {verdict}{shown} ({seconds:.1f} s)", flush=True)
    return rows, wrong


def foreign_kernels(c: Candidate, calls: Sequence[Call]) -> bool:
    """Whether a call ran what it should not have; says so, and what ran beside the kernels asked
    for.
    """
    others: dict[str, None] = {}
    for call in calls:
        names = [event.name for event in call]
        complaint = c.kernels.complaint(names)
        if complaint:
            print(f"  {c.name}: FAILED: {complaint}", flush=True)
            return True
        others |= dict.fromkeys(c.kernels.others(names))
    if others:
        shown = ", ".join(name[:60] for name in others)
        print(f"  {c.name} also ran: {shown}", flush=True)
    return False


# ---------------------------------------------------------------- one shape
def kernel_calls(
    candidates: Sequence[Candidate], repeats: int
) -> tuple[dict[str, list[Call]], dict[str, Timing], dict[str, list[str]]]:
    """What the kernels of every call took, the yardsticks' among them.

    Name -> calls of the candidates that ran what they should, yardstick -> timing, and name -> what
    is wrong with it.
    """
    runs: dict[str, Callable[[], Any]] = {c.name: c.run for c in candidates}
    sticks = yardstick.make()
    runs |= {yardstick.name(n): run for n, run in sticks.items()}
    try:
        calls = profiler.kernel_calls(runs, repeats=repeats)
    except RuntimeError as error:
        print(f"  FAILED: {error}", flush=True)
        return {}, {}, {c.name: ["profiler"] for c in candidates}
    wrong = {c.name: ["kernels"] for c in candidates if foreign_kernels(c, calls[c.name])}
    right = {c.name: calls[c.name] for c in candidates if c.name not in wrong}
    return right, {n: profiler.total(calls[yardstick.name(n)]) for n in sticks}, wrong


def time_all(
    op: str, shape: Shape, candidates: Sequence[Candidate], repeats: int
) -> tuple[list[results.Row], dict[str, list[str]]]:
    """The timing rows of candidates that passed the gate and of the yardsticks, and name -> what is
    wrong with it.

    The profiler comes last: once it was on, later launches may be slower.
    """
    if not candidates:
        return [], {}
    runs = {c.name: c.run for c in candidates}
    wall = interleaved(runs, repeats=min(repeats, MOST_WALL), warmup=2)
    host = {c.name: profiler.host_time(c.run) for c in candidates if c.host}
    calls, sticks, wrong = kernel_calls(candidates, repeats)
    rows = yardstick.rows(op, shape, sticks)
    for c in candidates:
        if c.name in calls:
            rows += rows_of(op, shape, c, calls[c.name], wall[c.name], host.get(c.name))
    return rows, wrong


def _cost(op: str, shape: Shape, c: Candidate) -> dict[str, int]:
    return dict(
        moved=chunk_kda_bytes(op, shape, c.form, states=c.states), flops=chunk_kda_flops(op, shape)
    )


def rows_of(
    op: str,
    shape: Shape,
    c: Candidate,
    calls: Sequence[Call],
    wall: Timing | None = None,
    host: Timing | None = None,
) -> list[results.Row]:
    """The timing row of a candidate, and one for each of its kernels that are timed apart."""
    rows = [
        results.timing_row(
            op, shape.name, c.provider, c.variant, profiler.total(calls),
            wall=wall, host=host, **_cost(op, shape, c),
        )
    ]  # fmt: skip
    for part, (moved, flops) in c.stages.items():
        name = f"{c.variant}/{part.removeprefix('kernels')}"
        timing = profiler.total(calls, part)
        rows.append(
            results.timing_row(op, shape.name, c.provider, name, timing, moved=moved, flops=flops)
        )
    return rows


def prepare(
    op: str,
    shape: Shape,
    *,
    forms: Sequence[str],
    options: Sequence[str],
    wanted: Sequence[str],
) -> tuple[list[Candidate], list[results.Row], dict[str, list[str]]]:
    """The candidates on one shape, gated: all of them, accuracy rows, and name -> what is wrong."""
    inputs = {n: x for n, x in make_inputs(shape).items() if n in (*forms, compare.PREPARED)}
    candidates = make_candidates(op, shape, inputs, options, wanted)
    rows, wrong = gate(op, candidates, inputs)
    return candidates, rows, wrong


def run_shape(
    op: str,
    shape: Shape,
    *,
    forms: Sequence[str],
    options: Sequence[str],
    wanted: Sequence[str],
    repeats: int,
) -> tuple[list[results.Row], bool]:
    """Gate and time every candidate on one shape; its rows, and whether all passed."""
    started = time.perf_counter()
    print(f"{shape.name}:", flush=True)
    candidates, rows, wrong = prepare(op, shape, forms=forms, options=options, wanted=wanted)
    timed, foreign = time_all(op, shape, [c for c in candidates if c.name not in wrong], repeats)
    wrong |= foreign
    rows += timed
    rows += [
        results.timing_row(
            op, shape.name, c.provider, c.variant, None,
            failed=wrong[c.name], **_cost(op, shape, c),
        )
        for c in candidates
        if c.name in wrong
    ]  # fmt: skip
    print(f"  {time.perf_counter() - started:.1f} s", flush=True)
    return rows, not wrong
