"""Run the kernels on a small ragged batch, for compute-sanitizer.

    compute-sanitizer --tool memcheck --kernel-name kns=kda_cute python3 -m perf.sanitize
    compute-sanitizer --tool racecheck --kernel-name kns=kda_cute python3 -m perf.sanitize --every-lane

`--operator` runs one alone.  Inputs are prepared on the CPU, so that only this package's
kernels run under the tool.  Each run is also held against the float64 reference.  Exit code 1 when
one is wrong.
"""

import argparse
import dataclasses
import functools
import sys

import torch

from kda_cute import backward, forward, ops, reference
from kda_cute import compile as kernel_compile
from kda_cute.kernels import bwd_recurrence, gradients, scan, transition
from kda_cute.layouts import variants
from kda_cute.problem import Problem
from kda_cute.workspace import HEAD_DIM, RecurrenceGrads

DEVICE = "cuda"
LENGTHS, HEADS = (37, 0, 17, 64), 2
LIMITS = {
    "tf32": 3e-3,
    "bf16": 3e-2,
}  # relative Frobenius error of dkr, dgT, dbeta, dv, dinitial_state
CHECKED = ("dkr", "dgT", "dbeta", "dv", "dinitial_state")


def make_inputs() -> tuple[torch.Tensor, ...]:
    """do, v, beta, the workspace's tensors, dfinal_state, cu_seqlens, on the CPU."""
    rng = torch.Generator().manual_seed(0)
    T, N = sum(LENGTHS), len(LENGTHS)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=rng).to(dtype)

    q, k, v, g, do = (normal(T, HEADS, HEAD_DIM) for _ in range(5))
    beta = normal(T, HEADS)
    first, last = (normal(N, HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32) for _ in range(2))
    offsets = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    prepared = reference.prepare(
        q, k, v, g - 2, beta, gate="safe", initial_state=first, cu_seqlens=offsets
    )
    return do, v, beta, *prepared.workspace, last, offsets


def load(precision: str, layout: str, every_lane: bool):
    """The kernel for these inputs' dtypes."""
    config = ops.recurrence_spec(precision, layout, "bf16", "f32", True).config
    config = dataclasses.replace(config, every_lane=every_lane)
    trace = functools.partial(bwd_recurrence.trace, config)
    return kernel_compile.load(kernel_compile.KernelSpec("bwd_recurrence", config, trace))


def run_bwd_recurrence(every_lane: bool) -> int:
    """Every precision and layout of level 1; returns how many are wrong."""
    inputs = make_inputs()
    do, v, beta, *workspace, last, offsets = inputs
    expected = reference.bwd_recurrence(do, v, beta, ops.Workspace(*workspace), last, offsets)
    wrong = 0
    for precision in variants.precisions("bwd_recurrence"):
        for layout in variants.names("bwd_recurrence"):
            kernel = load(precision, layout, every_lane)
            on_device = [x.to(DEVICE) for x in inputs]
            arguments = ops.Arguments(*on_device, len(LENGTHS), precision, layout)
            out = arguments.outputs()
            kernel(*on_device, *out)
            grads = RecurrenceGrads(*(x.cpu().double() for x in out))
            limits = dict.fromkeys(CHECKED, LIMITS[precision])
            wrong += not within(
                f"{precision} {layout}", grads._asdict(), expected._asdict(), limits
            )
    return wrong


def run_chunk_kda(every_lane: bool) -> int:
    """Level 2, forward and backward, with one and two consumer warpgroups in the scans; returns how
    many runs are wrong.
    """
    problem = chunk_problem()
    rng = torch.Generator().manual_seed(2)
    do, dfinal = (torch.randn(x.shape, generator=rng) for x in (problem.q, problem.initial_state))
    do = do.bfloat16()
    expected = chunk_oracle(problem, do, dfinal)
    problem = Problem(*(x.to(DEVICE) if torch.is_tensor(x) else x for x in problem))
    wrong = 0
    for groups in (1, 2):
        specs = (
            forward.scan_spec(groups, True, "f32", True, True),
            backward.reverse_spec(groups, True, "f32", True),
        )
        scans = [load_scan(spec.config, every_lane) for spec in specs]
        transitions = [load_transition(form, every_lane) for form in (False, True)]
        o, final, saved = forward.run(problem, transitions[0], scans[0])
        grads = backward.run(
            problem,
            do.to(DEVICE),
            dfinal.to(DEVICE),
            saved,
            transition=transitions[1],
            reverse_scan=scans[1],
            gradients=load_gradients(every_lane),
        )
        got = {"o": o, "final_state": final, **grads._asdict()}
        got = {name: x.cpu().double().view(expected[name].shape) for name, x in got.items()}
        wrong += not within(f"groups {groups}", got, expected, dict.fromkeys(expected, 2e-2))
    return wrong


def load_scan(config, every_lane: bool):
    """A scan, either direction, of this config."""
    config = dataclasses.replace(config, every_lane=every_lane)
    trace = functools.partial(scan.trace, config)
    return kernel_compile.load(kernel_compile.KernelSpec("scan", config, trace))


def load_transition(of_backward: bool, every_thread: bool):
    """A transition, in either form, for `chunk_problem`."""
    spec = forward.transition_spec("bf16", "softplus", "bf16", True, backward=of_backward)
    config = dataclasses.replace(spec.config, every_thread=every_thread)
    trace = functools.partial(transition.trace, config)
    return kernel_compile.load(kernel_compile.KernelSpec("transition", config, trace))


def load_gradients(every_thread: bool):
    """The gradients of `chunk_problem`."""
    config = gradients.Config("bf16", "softplus", "bf16", True, every_thread=every_thread)
    trace = functools.partial(gradients.trace, config)
    return kernel_compile.load(kernel_compile.KernelSpec("gradients", config, trace))


def chunk_problem() -> Problem:
    """A ragged batch with states and an unbounded gate, on the CPU."""
    rng = torch.Generator().manual_seed(1)
    T, N, D = sum(LENGTHS), len(LENGTHS), HEAD_DIM
    sizes = ((D,), (D,), (D,), (D,), ())
    tokens = [torch.randn(1, T, HEADS, *size, generator=rng).bfloat16() for size in sizes]
    A_log, dt_bias = torch.rand(HEADS, generator=rng), torch.rand(HEADS, D, generator=rng)
    first = torch.randn(N, HEADS, D, D, generator=rng)
    offsets = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    flags = (D**-0.5, "softplus", 0.0, True, True, 1.0, True, True, True)
    return Problem(*tokens, A_log, dt_bias, first, offsets, *flags)


def chunk_oracle(problem: Problem, do: torch.Tensor, dfinal: torch.Tensor) -> dict:
    """o, the final state and the eight gradients in float64."""
    leaves = [x.double().requires_grad_() for x in problem[:8]]
    o, final = reference.chunk_kda(
        problem._replace(**dict(zip(problem._fields, leaves, strict=False)))
    )
    loss = (o.double() * do.double()).sum() + (final.double() * dfinal.double()).sum()
    grads = torch.autograd.grad(loss, leaves)
    names = backward.Gradients._fields
    return {"o": o.detach(), "final_state": final.detach(), **dict(zip(names, grads, strict=True))}


def within(title: str, got: dict, expected: dict, limits: dict) -> bool:
    """Print the relative errors of the tensors that have a limit; whether all keep it."""
    errors = {
        name: ((got[name] - expected[name]).norm() / expected[name].norm()).item()
        for name in limits
    }
    good = all(errors[name] <= limit for name, limit in limits.items())
    print(title, "ok" if good else "WRONG", errors, flush=True)
    return good


OPERATORS = {"bwd_recurrence": run_bwd_recurrence, "chunk_kda": run_chunk_kda}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="perf.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("--operator", choices=OPERATORS, help="this one alone")
    parser.add_argument("--every-lane", action="store_true", help="see a kernel's `Config`")
    args = parser.parse_args(argv)
    wrong = sum(
        OPERATORS[name](args.every_lane) for name in OPERATORS if args.operator in (None, name)
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
