"""What an eager call of `chunk_kda` costs the host, and a training step in time and memory.

    python3 -m perf.eager                              every shape
    taskset -c 5 python3 -m perf.eager                 on one core
    python3 -m perf.eager --shapes T2048_H12 --peer    FLA beside it, after minutes of tuning

Host time is until the call returns, with the GPU idle before it. A step is forward and backward in
form B, with gradients of everything that has one; its wall time is that of steps without a pause.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

import torch

from kda_cute import chunk_kda
from kda_cute.accuracy.peers import Unavailable, fla_forward
from kda_cute.layouts.plan import format_table
from kda_cute.machine import surroundings
from perf import forms, profiler, providers
from perf.shapes import SHAPES, Shape, find_shape

MIB = 2**20
HEAD = (
    "shape", "provider", "forward B", "forward A", "with gradients", "step", "step, wall", "peak MiB"
)  # fmt: skip


def host_us(call: Callable[[], object], repeats: int, warm: int = 10) -> float:
    """Median microseconds until the call returns."""
    for _ in range(warm):
        call()
    return profiler.host_time(call, repeats=repeats, synchronize=_wait).median


def wall_us(call: Callable[[], object], repeats: int, warm: int = 5) -> float:
    """Microseconds of a call, of many one after another."""
    for _ in range(warm):
        call()
    _wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait()
    return 1e6 * (time.perf_counter() - start) / repeats


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that a call has allocated at a time, beyond what was before."""
    if not torch.cuda.is_available():
        return 0
    call()
    _wait()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def measure(shape: Shape, function: Callable, device: str, repeats: int) -> list[float]:
    """A row of the table, after its names."""
    inputs = forms.make_inputs(shape, device)
    calls = {form: providers.chunk_kda_call(x) for form, x in inputs.items()}
    forward = lambda form: lambda: function(**calls[form])  # noqa: E731
    with torch.no_grad():
        row = [host_us(forward(form), repeats) for form in ("B", "A")]
    call, leaves = providers.with_leaves(calls["B"])
    do = torch.randn(call["v"].shape, device=device).bfloat16()

    def step():
        o, _ = function(**call)
        return torch.autograd.grad(o, leaves, do)

    row += [host_us(lambda: function(**call), repeats), host_us(step, repeats)]
    return [*row, wall_us(step, repeats), peak_bytes(step) / MIB]


def _wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="perf.eager", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=lambda x: x.split(","), default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--peer", action="store_true", help="FLA as well")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("perf.eager needs a Hopper GPU: torch finds no CUDA device", file=sys.stderr)
        return 2
    found = [("kda_cute", chunk_kda)]
    if args.peer:
        try:
            found.append(("fla", fla_forward()))
        except Unavailable as error:
            print(f"fla is left out: {error}", file=sys.stderr)
    for key, value in surroundings().items():
        print(key, value)
    print(f"{len(os.sched_getaffinity(0))} cores; microseconds, medians of {args.repeats}\n")
    rows = []
    for name in args.shapes:
        for provider, function in found:
            row = measure(find_shape(name), function, "cuda", args.repeats)
            rows.append((name, provider, *(f"{x:.1f}" for x in row)))
            torch.cuda.empty_cache()
    print(format_table(HEAD, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
