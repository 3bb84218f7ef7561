"""Check, then time, `chunk_kda` and its peers side by side; `perf.run` has the command line.

Every candidate must first agree with float64 on a few heads of the very tensors that are timed.
Then, all candidates interleaved and on cold L2: events around calls, the host time of this
package's calls, and last, under the profiler, the kernels of each call.  A candidate that is wrong,
raises, or ran other kernels than its own has no times, and makes the exit code 1.
"""

import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from perf import compare, profiler, providers, results
from perf.forms import REGIME, Inputs, expected, make_inputs, some_heads
from perf.profiler import Call
from perf.providers import Candidate, Unavailable
from perf.shapes import Shape, chunk_kda_bytes, chunk_kda_flops
from perf.timing import interleaved


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
    """Relative Frobenius error of each expected tensor on some heads; absolute where it is all 0."""
    found = {}
    for name, right in want.items():
        difference = got[name][:, list(heads)].double() - right
        error, size = (torch.linalg.vector_norm(x).item() for x in (difference, right))
        found[name] = error / size if size else error
    return found


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
def time_all(
    candidates: Sequence[Candidate], repeats: int
) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Name -> wall and host timings and the calls' kernels, and name -> what is wrong with it.

    The profiler comes last: once it was on, later launches may be slower.
    """
    runs = {c.name: c.run for c in candidates}
    if not runs:
        return {}, {}
    wall = interleaved(runs, repeats=repeats, warmup=2)
    host = {c.name: profiler.host_time(c.run) for c in candidates if c.host}
    try:
        calls = profiler.kernel_calls(runs, repeats=repeats)
    except RuntimeError as error:
        print(f"  FAILED: {error}", flush=True)
        return {}, {name: ["profiler"] for name in runs}
    wrong = {c.name: ["kernels"] for c in candidates if foreign_kernels(c, calls[c.name])}
    timed = {
        name: {"wall": wall[name], "host": host.get(name), "calls": calls[name]}
        for name in runs
        if name not in wrong
    }
    return timed, wrong


def rows_of(
    op: str, shape: Shape, c: Candidate, timed: Mapping[str, Any] | None, failed: Sequence[str]
) -> list[results.Row]:
    """The timing row of a candidate, and one for each of its kernels that are timed apart."""
    moved = chunk_kda_bytes(op, shape, c.form, states=c.states)
    cost = dict(moved=moved, flops=chunk_kda_flops(op, shape))
    if timed is None:
        return [
            results.timing_row(op, shape.name, c.provider, c.variant, None, failed=failed, **cost)
        ]
    calls = timed["calls"]
    rows = [
        results.timing_row(
            op, shape.name, c.provider, c.variant, profiler.total(calls),
            wall=timed["wall"], host=timed["host"], **cost,
        )
    ]  # fmt: skip
    for part, (moved, flops) in c.stages.items():
        name = f"{c.variant}/{part.removeprefix('kernels')}"
        timing = profiler.total(calls, part)
        rows.append(
            results.timing_row(op, shape.name, c.provider, name, timing, moved=moved, flops=flops)
        )
    return rows


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
    inputs = {n: x for n, x in make_inputs(shape).items() if n in (*forms, compare.PREPARED)}
    candidates = make_candidates(op, shape, inputs, options, wanted)
    rows, wrong = gate(op, candidates, inputs)
    passed = [c for c in candidates if c.name not in wrong]
    timed, foreign = time_all(passed, repeats)
    wrong |= foreign
    for c in candidates:
        rows += rows_of(op, shape, c, timed.get(c.name), wrong.get(c.name, ()))
    print(f"  {time.perf_counter() - started:.1f} s", flush=True)
    return rows, not wrong


def run(
    op: str,
    shapes: Sequence[Shape],
    *,
    forms: Sequence[str],
    options: Sequence[str],
    wanted: Sequence[str],
    repeats: int,
    out: str | None = None,
) -> int:
    """All shapes, the tables, the results file; returns the exit code."""
    rows: list[results.Row] = []
    all_passed = True
    for shape in shapes:
        more, passed = run_shape(
            op, shape, forms=forms, options=options, wanted=wanted, repeats=repeats
        )
        rows += more
        all_passed &= passed
        torch.cuda.empty_cache()
        if out:
            results.write(out, rows)
    print(f"\n{compare.to_markdown(rows)}", flush=True)
    return 0 if all_passed else 1
