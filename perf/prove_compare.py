"""Prove on a GPU that `kda-cute bench compare` catches a kernel slowed by 5 % and passes one that isn't.

    python3 -m perf.prove_compare --op chunk_kda_fwd --shapes T8192_H96,T2048_H12 --out FILE.json

Per shape, a candidate of this package is measured in `--pairs` triples of runs: base, new, slowed.
A run has all of the package's candidates and the yardsticks, as `bench run` times them.  In the slowed
ones the candidate launches one more kernel after its own, which reads its result; its size is found
beforehand so that it takes about 5 % of the candidate's time, and the proof is void where it doesn't.
Each new run is compared with its base and must pass; each slowed one must be caught, by that
candidate's row alone.  Exit code 1 unless all are, 2 where it can't be done.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from perf import bench, chunk_kda, compare, profiler, regression, results, run
from perf.providers import Candidate
from perf.shapes import Shape, find_shapes, repeats_of

WANTED, LEAST, MOST = 0.05, 0.04, 0.07  # of the candidate's own time
VARIANT = "A/states"
PAIRS, ROUNDS, CALIBRATION = 10, 60, 30
SMALLEST, LARGEST = 1 << 10, 1 << 28  # elements that the further kernel may add


class Void(RuntimeError):
    """The proof can't be made, and why."""


# ---------------------------------------------------------------- the slowed candidate
def further_step(c: Candidate, elements: int) -> Callable[[], Any]:
    """A call of the candidate and then one elementwise kernel that reads its result."""
    first = next(iter(c.results(c.run()).values()))
    source = torch.zeros(elements, dtype=first.dtype, device=first.device)
    target = torch.empty_like(source)

    def run() -> Any:
        returned = c.run()
        with torch.no_grad():
            result = next(iter(c.results(returned).values()))
            # One element, so that the kernel waits for the result; a view, so that it is one kernel.
            torch.add(source, result[(0,) * result.ndim], out=target)
        return returned

    return run


def slowed(c: Candidate, run: Callable[[], Any]) -> Candidate:
    """The candidate with a call that launches more than its own kernels."""
    return dataclasses.replace(c, run=run, kernels=dataclasses.replace(c.kernels, only=False))


def overhead(c: Candidate, run: Callable[[], Any], repeats: int = CALIBRATION) -> float:
    """Time of the further kernel, the last of a call of `run`, over that of the candidate's own."""
    calls = profiler.kernel_calls({"own": c.run, "more": run}, repeats=repeats)
    if any(len(more) != len(own) + 1 for own, more in zip(*calls.values(), strict=True)):
        raise Void(f"{c.name}: the slowed call doesn't run just one more kernel")
    last = profiler.total([call[-1:] for call in calls["more"]])
    return last.median / profiler.total(calls["own"]).median


def calibrate(
    c: Candidate,
    *,
    step: Callable[[Candidate, int], Callable[[], Any]] = further_step,
    measure: Callable[[Candidate, Callable[[], Any]], float] = overhead,
) -> tuple[Candidate, float]:
    """The candidate slowed by WANTED, and by how much it is; Void outside LEAST to MOST."""
    low, high = SMALLEST, LARGEST
    elements, best = 1 << 20, None
    for _ in range(12):
        run = step(c, elements)
        found = measure(c, run)
        if best is None or abs(found - WANTED) < abs(best[1] - WANTED):
            best = run, found
        if abs(found - WANTED) < 0.003:
            break
        low, high = (elements, high) if found < WANTED else (low, elements)
        guess = int(elements * min(max(WANTED / max(found, 1e-6), 0.25), 4.0))
        elements = guess if low < guess < high else (low + high) // 2
    assert best is not None
    if not LEAST <= best[1] <= MOST:
        raise Void(
            f"{c.name}: the nearest that a further kernel comes to {WANTED:.0%} is {best[1]:.1%}"
        )
    return slowed(c, best[0]), best[1]


# ---------------------------------------------------------------- the runs
def run_once(
    op: str, shape: Shape, candidates: Sequence[Candidate], repeats: int
) -> list[results.Row]:
    """The timing rows of one run by the profiler; Void if a candidate ran what it should not have."""
    calls, sticks, wrong = chunk_kda.kernel_calls(candidates, repeats)
    if wrong:
        raise Void(f"{shape.name}: {wrong}")
    rows = chunk_kda.yardstick.rows(op, shape, sticks)
    for c in candidates:
        rows += chunk_kda.rows_of(op, shape, c, calls[c.name])
    return rows


def judge(
    header: Mapping[str, str],
    base: Sequence[results.Row],
    new: Sequence[results.Row],
    slower: Sequence[results.Row],
    variant: str,
) -> dict[str, Any]:
    """Whether compare passed `new` and caught `slower`, both against `base`."""
    unchanged, caught = (
        regression.compare({**header, "rows": list(base)}, {**header, "rows": list(rows)})
        for rows in (new, slower)
    )
    bad = [d.variant for d in caught.bad]
    (row,) = (d for d in caught.decisions if d.variant == variant)
    (same,) = (d for d in unchanged.decisions if d.variant == variant)
    return {
        "passed": not unchanged.bad,
        "caught": bad == [variant],
        "unchanged": _ratio(same),
        "slowed": _ratio(row),
        "false": [d.name for d in unchanged.bad] + [d.name for d in caught.bad if d != row],
        "unclear": [d.name for d in unchanged.decisions if d.verdict == regression.UNCLEAR],
    }


def _ratio(d: regression.Decision) -> dict[str, Any]:
    found = {name: round(getattr(d, name), 5) for name in ("ratio", "low", "high", "drift")}
    return {"verdict": d.verdict, **found}


def prove(op: str, shape: Shape, variant: str, pairs: int, rounds: int) -> dict[str, Any]:
    """The proof for one shape; Void if it can't be made."""
    form, option = variant.split("/")
    candidates, _, wrong = chunk_kda.prepare(
        op, shape, forms=[form], options=["states", "nostates"], wanted=["kda_cute"]
    )
    if wrong:
        raise Void(f"{shape.name}: wrong, so not timed: {wrong}")
    (chosen,) = (c for c in candidates if c.variant == f"{form}/{option}")
    slow, by = calibrate(chosen)
    print(f"{shape.name}: {chosen.name} slowed by {by:.1%}", flush=True)
    slower = [slow if c is chosen else c for c in candidates]
    header, repeats = results.surroundings(), repeats_of(shape, rounds)
    outcomes = []
    for i in range(pairs):
        base, new, late = (
            run_once(op, shape, which, repeats) for which in (candidates, candidates, slower)
        )
        outcomes.append(judge(header, base, new, late, variant))
        one = outcomes[-1]
        print(
            f"  {i + 1}: unchanged {one['unchanged']['ratio']:.4f}x, slowed "
            f"{one['slowed']['ratio']:.4f}x {'' if one['caught'] and one['passed'] else one}",
            flush=True,
        )
    return {
        "shape": shape.name,
        "variant": variant,
        "slowed_by": round(by, 4),
        "repeats": repeats,
        "pairs": pairs,
        "passed": sum(one["passed"] for one in outcomes),
        "caught": sum(one["caught"] for one in outcomes),
        "runs": outcomes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="perf.prove_compare", description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=compare.OPS, default="chunk_kda_fwd")
    parser.add_argument("--shapes", default="T8192_H96,T2048_H12", help="names, with commas")
    parser.add_argument("--variant", default=VARIANT, help="FORM/option of this package")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    try:
        shapes = find_shapes(args.shapes.split(","))
        form, _, option = args.variant.partition("/")
        run.check_names("variant", [form], bench.FORMS)
        run.check_names("variant", [option], chunk_kda.providers.OPTIONS)
        if args.pairs < 1 or args.rounds < 1:
            raise ValueError("pairs and rounds must be at least 1")
    except ValueError as error:
        parser.error(str(error))
    try:
        bench.need_gpu()
        found = []
        for shape in shapes:
            found.append(prove(args.op, shape, args.variant, args.pairs, args.rounds))
            torch.cuda.empty_cache()
    except (bench.Impossible, Void, regression.Incomparable) as error:
        print(f"perf.prove_compare: {error}", file=sys.stderr)
        return 2
    passed, caught, pairs = (sum(one[k] for one in found) for k in ("passed", "caught", "pairs"))
    print(f"caught {caught}/{pairs}, passed {passed}/{pairs}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        proof = {**results.surroundings(), "op": args.op, "shapes": found}
        args.out.write_text(json.dumps(proof, indent=1) + "\n")
    return 0 if passed == caught == pairs else 1


if __name__ == "__main__":
    sys.exit(main())
