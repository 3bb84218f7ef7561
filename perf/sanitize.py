"""Run the level-1 kernel on a small ragged batch, for compute-sanitizer.

    compute-sanitizer --tool memcheck --kernel-name kns=kda_cute python3 -m perf.sanitize
    compute-sanitizer --tool racecheck --kernel-name kns=kda_cute python3 -m perf.sanitize --every-lane

Inputs are prepared on the CPU, so that only this package's kernels run under the tool. Each run is
also held against the float64 reference. Exit code 1 when one is wrong.
"""

import argparse
import dataclasses
import functools
import sys

import torch

from kda_cute import compile as kernel_compile
from kda_cute import ops, reference
from kda_cute.kernels import bwd_recurrence
from kda_cute.layouts import variants
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


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="perf.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("--every-lane", action="store_true", help="see `schedule.Config`")
    args = parser.parse_args(argv)

    inputs = make_inputs()
    do, v, beta, *workspace, last, offsets = inputs
    expected = reference.bwd_recurrence(do, v, beta, ops.Workspace(*workspace), last, offsets)
    wrong = 0
    for precision in variants.precisions("bwd_recurrence"):
        for layout in variants.names("bwd_recurrence"):
            kernel = load(precision, layout, args.every_lane)
            on_device = [x.to(DEVICE) for x in inputs]
            arguments = ops.Arguments(*on_device, len(LENGTHS), precision, layout)
            out = arguments.outputs()
            kernel(*on_device, *out)
            grads = RecurrenceGrads(*(x.cpu().double() for x in out))
            errors = {
                name: ((getattr(grads, name) - want).norm() / want.norm()).item()
                for name, want in expected._asdict().items()
                if name in CHECKED
            }
            good = all(error <= LIMITS[precision] for error in errors.values())
            wrong += not good
            print(precision, layout, "ok" if good else "WRONG", errors, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
