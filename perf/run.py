"""Check, then time, this package's ops side by side with their baselines.

    python3 -m perf.run bwd_recurrence --shapes T8192_H96 --variants tf32/default,bf16/padded --scalar --out FILE.json
    python3 -m perf.run chunk_kda_fwd --out FILE.json     all shapes, with cuDNN; --fla: with FLA, too

Level 1 is in this module, level 2 in perf.chunk_kda.  Every candidate must first agree with the
float64 reference on a few heads of the very tensors that are timed; one that doesn't is reported as
failed, is never timed, and makes the exit code 1.  The profiler tells which kernels ran.
"""

import argparse
import functools
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kda_cute import compile as kernels
from kda_cute import reference
from kda_cute.accuracy.errors import rel_error
from kda_cute.workspace import HEAD_DIM, RecurrenceGrads, Workspace
from perf import chunk_kda, compare, providers, results, yardstick
from perf.forms import TYPES, some_heads
from perf.shapes import (
    COPY_RATE,
    SHAPES,
    Shape,
    bwd_recurrence_bytes,
    bwd_recurrence_flops,
    find_shape,
    floor_us,
)
from perf.timing import COPY_BYTES, Timing, interleaved, measure_copy_bandwidth

OP = "bwd_recurrence"
REGIME = "typical"
LOWER_BOUND = -5.0
BF16_OUTPUTS = ("dv",)
# The factor that takes the exponential out of a gradient, so that its error isn't that of a few large elements.
PARTNER = {"dkd": "kd", "dqd": "qd", "dki": "ki", "dkr": "kr"}
TOLERANCE = {"tf32": 3e-3, "bf16": 3e-2}
SCALAR_TOLERANCE = {False: 1e-4, True: 4e-3}  # fp32 outputs, bf16 outputs


class Inputs(NamedTuple):
    """Arguments of level 1, in its order."""

    do: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    workspace: Workspace
    dfinal_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    num_seqs: int | None


@dataclass(frozen=True)
class Candidate:
    """A provider's variant.  run(*inputs) -> RecurrenceGrads; kernel: part of the name of the
    kernel it must launch.
    """

    provider: str
    variant: str
    run: Callable[..., RecurrenceGrads]
    kernel: str
    repeats: int

    @property
    def name(self) -> str:
        """provider/variant, unique in a run."""
        return f"{self.provider}/{self.variant}"

    def tolerance(self, tensor: str) -> float:
        """Largest relative Frobenius error allowed."""
        if self.provider == "scalar":
            return SCALAR_TOLERANCE[tensor in BF16_OUTPUTS]
        return TOLERANCE[self.variant.split("/")[0]]


# ---------------------------------------------------------------- inputs
def make_inputs(shape: Shape, device: str = "cuda", seed: int = 0) -> Inputs:
    """Random inputs of the typical regime, prepared by the reference in fp32, all drawn on the
    device.
    """
    rng = torch.Generator(device).manual_seed(seed)
    full = (shape.T, shape.H, HEAD_DIM)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=rng, device=device)

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=rng, device=device)

    q, k, v, do = (normal(*full).bfloat16() for _ in range(4))
    g_raw, beta = normal(*full).bfloat16(), normal(shape.T, shape.H)
    cu_seqlens = None
    if shape.varlen:
        cu_seqlens = torch.tensor(shape.offsets, dtype=torch.int32, device=device)
    num_seqs = None if shape.varlen else shape.N
    prepared = reference.prepare(
        q,
        k,
        v,
        g_raw,
        beta,
        gate="safe",
        A_log=uniform(shape.H),
        dt_bias=uniform(shape.H, HEAD_DIM),
        lower_bound=LOWER_BOUND,
        cu_seqlens=cu_seqlens,
        num_seqs=num_seqs,
    )
    workspace = Workspace(*(t.contiguous() for t in prepared.workspace))
    return Inputs(do, v, beta, workspace, None, cu_seqlens, num_seqs)


def head_inputs(inputs: Inputs, heads: Sequence[int]) -> Inputs:
    """The same problem on some of its heads."""
    at = list(heads)
    return inputs._replace(
        do=inputs.do[:, at],
        v=inputs.v[:, at],
        beta=inputs.beta[:, at],
        workspace=Workspace(*(t[at] for t in inputs.workspace)),
        dfinal_state=None if inputs.dfinal_state is None else inputs.dfinal_state[:, at],
    )


def head_grads(grads: RecurrenceGrads, heads: Sequence[int]) -> RecurrenceGrads:
    """The results of some heads."""
    second = ("dv", "dinitial_state")
    at = list(heads)
    return RecurrenceGrads(
        **{n: t[:, at] if n in second else t[at] for n, t in grads._asdict().items()}
    )


# ---------------------------------------------------------------- the correctness gate
def errors(
    grads: RecurrenceGrads, expected: RecurrenceGrads, workspace: Workspace
) -> dict[str, float]:
    """Relative Frobenius error of each result; dkd, dqd, dki, dkr times their partners, which
    undoes the decay.
    """
    found = {}
    for name, want in expected._asdict().items():
        got, want = getattr(grads, name).double(), want.double()
        if name in PARTNER:
            partner = getattr(workspace, PARTNER[name]).double()
            got, want = got * partner, want * partner
        found[name] = rel_error(got, want)
    return found


def check(
    candidate: Candidate,
    inputs: Inputs,
    expected: RecurrenceGrads,
    heads: Sequence[int],
    shape: Shape,
) -> tuple[list[results.Row], list[str]]:
    """Run a candidate once; its accuracy rows, and the tensors whose error is above the tolerance
    or not finite.
    """
    grads = head_grads(candidate.run(*inputs), heads)
    workspace = Workspace(*(t[list(heads)] for t in inputs.workspace))
    rows, failed = [], []
    for tensor, error in errors(grads, expected, workspace).items():
        limit = candidate.tolerance(tensor)
        if not error <= limit:
            failed.append(tensor)
        rows.append(
            results.accuracy_row(
                OP,
                REGIME,
                tensor,
                error,
                limit,
                candidate.provider,
                variant=candidate.variant,
                shape=shape.name,
            )
        )
    return rows, failed


def launched_kernels(function: Callable[[], object]) -> set[str]:
    """Names of the kernels that one call launches, as the profiler saw them."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    return {
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    }


# ---------------------------------------------------------------- candidates
def package_candidates(variants: Sequence[str], repeats: int) -> list[Candidate]:
    """This package's op, one candidate for each "precision/layout"."""
    import kda_cute

    made = []
    for variant in variants:
        precision, slash, layout = variant.partition("/")
        if not slash or not layout or precision not in TOLERANCE:
            raise ValueError(f"variant {variant!r}: expected PRECISION/LAYOUT, as in tf32/default")
        run = functools.partial(kda_cute.bwd_recurrence, precision=precision, layout=layout)
        made.append(Candidate("kda_cute", variant, run, "kda_cute", repeats))
    return made


def scalar_candidates(repeats: int) -> list[Candidate]:
    """The scalar loops, as their description has them (dvc computed anew) and with dvc stored."""
    from perf.scalar_recurrence import scalar_recurrence

    return [
        Candidate(
            "scalar",
            variant,
            functools.partial(scalar_recurrence, recompute=recompute),
            "scalar_recurrence",
            repeats,
        )
        for variant, recompute in (("recompute", True), ("stored", False))
    ]


# ---------------------------------------------------------------- one shape
def describe(
    shape: Shape, timings: Mapping[str, Timing], moved: int, flops: int, copy_rate: float
) -> str:
    """The printed table of one shape."""
    floor = floor_us(moved)
    scalar = [t.median for name, t in timings.items() if name.startswith("scalar/")]
    lines = [
        f"{shape.name}: {moved / 1e9:.3f} GB, floor {floor:.1f} us at {COPY_RATE / 1e12:.2f} TB/s "
        f"(copy in this run: {copy_rate / 1e12:.2f} TB/s)",
        f"{'':28}{'median us':>12}{'p20':>12}{'p80':>12}{'of floor':>10}{'TFLOP/s':>9}{'against scalar':>16}",
    ]
    for name, t in timings.items():
        against = f"{min(scalar) / t.median:.1f}x" if scalar else ""
        rate = flops / t.median * 1e-6
        lines.append(
            f"{name:28}{t.median:12.1f}{t.p20:12.1f}{t.p80:12.1f}"
            f"{t.median / floor:9.2f}x{rate:9.1f}{against:>16}"
        )
    return "\n".join(lines)


def gate(
    candidates: Sequence[Candidate],
    inputs: Inputs,
    expected: RecurrenceGrads,
    heads: Sequence[int],
    shape: Shape,
) -> tuple[list[results.Row], dict[str, list[str]]]:
    """Check every candidate; the accuracy rows, and name -> what is wrong with it for those that
    failed.
    """
    rows: list[results.Row] = []
    wrong: dict[str, list[str]] = {}
    for candidate in candidates:
        started = time.perf_counter()
        try:
            accuracy, failed = check(candidate, inputs, expected, heads, shape)
        except (
            Exception
        ) as error:  # it counts as a failure; the other candidates still get their turn
            traceback.print_exc()
            accuracy, failed = [], [type(error).__name__]
        rows += accuracy
        if failed:
            wrong[candidate.name] = failed
        worst = max(accuracy, key=lambda r: (r["error"] is None, r["error"] or 0.0), default=None)
        shown = "" if worst is None else f", largest error {worst['tensor']} {worst['error']}"
        verdict = f"FAILED: {' '.join(failed)}" if failed else "ok"
        seconds = time.perf_counter() - started
        print(f"  {candidate.name}: {verdict}{shown} ({seconds:.1f} s)", flush=True)
    return rows, wrong


def foreign_kernels(candidate: Candidate, inputs: Inputs) -> list[str]:
    """What to hold against a candidate that launches no kernel of its own; says so if nothing can
    be seen.
    """
    names = launched_kernels(functools.partial(candidate.run, *inputs))
    if not names:
        print(f"  {candidate.name}: the profiler shows no kernels, so what ran is unchecked")
    elif not any(candidate.kernel in name for name in names):
        print(f"  {candidate.name}: FAILED: no kernel like {candidate.kernel!r} among {names}")
        return ["kernel"]
    return []


def run_shape(
    shape: Shape, candidates: Sequence[Candidate], copy_rate: float
) -> tuple[list[results.Row], bool]:
    """Gate and time every candidate on one shape; its rows, and whether all passed."""
    started = time.perf_counter()
    inputs = make_inputs(shape)
    heads = some_heads(shape.H)
    expected = reference.bwd_recurrence(*head_inputs(inputs, heads), dtype=torch.float64)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    print(f"{shape.name}: inputs and reference in {seconds:.1f} s", flush=True)

    rows, wrong = gate(candidates, inputs, expected, heads, shape)
    passed = [c for c in candidates if c.name not in wrong]
    timings = {}
    if passed:
        sticks = yardstick.make()
        runs = {c.name: functools.partial(c.run, *inputs) for c in passed}
        repeats = {c.name: c.repeats for c in passed}
        for name, stick in sticks.items():
            runs[yardstick.name(name)] = stick
            repeats[yardstick.name(name)] = max(c.repeats for c in passed)
        timings = interleaved(runs, repeats=repeats, warmup=1)
        rows += yardstick.rows(OP, shape, {n: timings.pop(yardstick.name(n)) for n in sticks})
    for c in passed:  # after timing: a profiler that was on once may slow later launches
        foreign = foreign_kernels(c, inputs)
        if foreign:
            wrong[c.name] = foreign
            del timings[c.name]

    moved = bwd_recurrence_bytes(shape, beta_bytes=inputs.beta.element_size())
    flops = bwd_recurrence_flops(shape)
    print(describe(shape, timings, moved, flops, copy_rate), flush=True)
    for c in candidates:
        rows.append(
            results.timing_row(
                OP,
                shape.name,
                c.provider,
                c.variant,
                timings.get(c.name),
                moved=moved,
                flops=flops,
                failed=wrong.get(c.name, ()),
            )
        )
    return rows, not wrong


# ---------------------------------------------------------------- a run
class Job(NamedTuple):
    """An op on a shape.  how: candidates of level 1, else what `chunk_kda.run_shape` takes."""

    op: str
    shape: Shape
    how: Mapping[str, Any]


def measure(jobs: Iterable[Job], out: str | Path | None = None) -> tuple[list[results.Row], bool]:
    """Gate and time every job; all rows, and whether everything passed.  The results file is
    written after each job.
    """
    rows: list[results.Row] = []
    all_passed, copy_rate = True, None
    for job in jobs:
        if job.op == OP:
            if copy_rate is None:
                copy_rate, copy = measure_copy_bandwidth()
                rows.append(
                    results.timing_row(
                        "copy", "2GiB", "torch", "copy_", copy, moved=2 * COPY_BYTES, flops=0
                    )
                )
            more, passed = run_shape(job.shape, job.how["candidates"], copy_rate)
        else:
            more, passed = chunk_kda.run_shape(job.op, job.shape, **job.how)
        rows += more
        all_passed &= passed
        torch.cuda.empty_cache()
        if out:
            results.write(out, rows)
    return rows, all_passed


def show(rows: Sequence[results.Row]) -> None:
    """Print the tables of level 2."""
    for op in compare.OPS:
        mine = [row for row in rows if row["op"] == op]
        if mine:
            print(f"\n{op}\n\n{compare.to_markdown(mine)}", flush=True)


def check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """ValueError unless all names are known and there is one."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{what} {', '.join(map(repr, unknown))}: known are {', '.join(known)}")
    if not names:
        raise ValueError(f"{what}: none given; known are {', '.join(known)}")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="perf.run", description=__doc__.splitlines()[0])
    ops = parser.add_subparsers(dest="op", required=True, metavar="OP")

    def add(op: str, text: str, shapes: Sequence[str]) -> argparse.ArgumentParser:
        made = ops.add_parser(op, help=text, description=text)
        made.add_argument("--shapes", type=_words, default=list(shapes), help=", ".join(SHAPES))
        made.add_argument("--repeats", type=int, default=20)
        made.add_argument("--out", help="results file to write")
        return made

    one = add("bwd_recurrence", "the reverse recurrence of level 1", ["T8192_H96"])
    one.add_argument("--variants", type=_words, default=["tf32/default", "bf16/default"])
    one.add_argument("--scalar", action="store_true", help="with the scalar baseline")
    one.add_argument("--scalar-repeats", type=int, default=3)

    for op, text in (
        ("chunk_kda_fwd", "the forward of chunk_kda"),
        ("chunk_kda_bwd", "the backward of chunk_kda"),
    ):
        two = add(op, text, list(SHAPES))
        two.add_argument("--forms", type=_words, default=["A", "B"], help="A, B: see perf.forms")
        two.add_argument(
            "--options",
            type=_words,
            default=list(providers.OPTIONS),
            help="of this package: states kept for the backward, or nostates",
        )
        two.add_argument("--no-ours", action="store_true", help="peers only")
        two.add_argument("--no-cudnn", action="store_true", help="without cuDNN's front end")
        two.add_argument(
            "--fla",
            action="store_true",
            help=f"with FLA, which tunes itself for minutes, on {', '.join(providers.FLA_SHAPES)}",
        )
        two.add_argument(
            "--compile-only", action="store_true", help="compile what is missing; needs no GPU"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    level_2 = args.op != "bwd_recurrence"
    try:
        shapes = [find_shape(name) for name in args.shapes]
        if level_2:
            check_names("forms", args.forms, tuple(TYPES))
            check_names("options", args.options, providers.OPTIONS)
        else:
            candidates = package_candidates(args.variants, args.repeats)
    except ValueError as error:
        parser.error(str(error))
    if level_2 and not args.no_ours and args.op == "chunk_kda_fwd":
        compile_forward(args.forms, args.options, shapes)
    if level_2 and args.compile_only:
        return 0
    if not torch.cuda.is_available():
        print("perf.run needs a CUDA device", file=sys.stderr)
        return 2
    if level_2:
        without = {"kda_cute": args.no_ours, "cudnn": args.no_cudnn, "fla": not args.fla}
        how = dict(
            forms=args.forms,
            options=args.options,
            wanted=[name for name, left_out in without.items() if not left_out],
            repeats=args.repeats,
        )
    else:
        candidates += scalar_candidates(args.scalar_repeats) if args.scalar else []
        how = dict(candidates=candidates)
    rows, all_passed = measure([Job(args.op, shape, how) for shape in shapes], args.out)
    show(rows)
    return 0 if all_passed else 1


def compile_forward(forms: Sequence[str], options: Sequence[str], shapes: Sequence[Shape]) -> None:
    """Compile what the forward's kernels miss on these shapes, in parallel."""
    started = time.perf_counter()
    specs = providers.forward_specs(forms, options, shapes)
    kernels.object_files(specs)
    print(f"{len(specs)} kernels compiled or found in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
