"""Two fixed kernels that are timed in the same rounds as everything else.

Two runs of the same code at different times differ by the machine's state.  `copy` follows the
memory's rate, `matmul` the clock of the SMs; between two runs, their own times tell how far each
moved.  Neither depends on this package.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from perf import results
from perf.shapes import Shape
from perf.timing import Timing

PREFIX = "yardstick/"  # of the op's name in their rows
PROVIDER = "torch"
COPY_ELEMENTS = 1 << 25  # fp32 in and out: 256 MiB, several times L2
M, N, K = 4096, 4096, 2048  # of matmul: four waves of tiles, 69 GFLOP


def make(device: torch.device | str = "cuda") -> dict[str, Callable[[], Any]]:
    """Variant -> a call without arguments, on buffers of its own; each has run once.

    The copy is a kernel (a negation), since a plain copy may go to the copy engine; it must not be
    the profiler's fence (`perf.profiler.Fence`).
    """
    source = torch.zeros(COPY_ELEMENTS, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    rng = torch.Generator(device).manual_seed(0)  # zeros would run at a higher clock
    a, b = (
        torch.randn(*size, generator=rng, device=device).bfloat16() for size in ((M, K), (K, N))
    )
    c = torch.empty(M, N, dtype=torch.bfloat16, device=device)
    made = {
        "copy": lambda: torch.neg(source, out=target),
        "matmul": lambda: torch.matmul(a, b, out=c),
    }
    for run in made.values():
        run()
    return made


def name(variant: str) -> str:
    """Of a yardstick among a run's candidates."""
    return PREFIX + variant


def op(measured: str) -> str:
    """The op of the rows of yardsticks that ran beside an op."""
    return PREFIX + measured


def rows(measured: str, shape: Shape, timings: Mapping[str, Timing]) -> list[results.Row]:
    """Timing rows of the yardsticks that ran beside an op on a shape."""
    moved = {"copy": 2 * 4 * COPY_ELEMENTS, "matmul": 2 * (M * K + K * N + M * N)}
    flops = {"copy": 0, "matmul": 2 * M * N * K}
    return [
        results.timing_row(
            op(measured), shape.name, PROVIDER, variant, timing,
            moved=moved[variant], flops=flops[variant],
        )
        for variant, timing in timings.items()
    ]  # fmt: skip


def is_yardstick(row: dict[str, Any]) -> bool:
    """Whether it is a row of a yardstick."""
    return row["op"].startswith(PREFIX)
