"""Time GPU callables with CUDA events, interleaved, on cold L2; the statistics are plain Python.

All candidates run within one round-robin, so that clock and thermal drift hit them alike.  Before
each timed call a buffer several times the size of L2 is written: no call finds its inputs, or what
its predecessor wrote, in L2.  That write also takes longer on the device than the host needs to
enqueue the next call, so host time stays out of the figures.  A candidate may instead be a list of
callables on different input sets, which are rotated.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 512 << 20
COPY_BYTES = 2 << 30


@dataclass(frozen=True)
class Timing:
    """Raw samples of one candidate in microseconds, in the order in which they were taken."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median in microseconds."""
        return statistics.median(self.samples)

    @property
    def p20(self) -> float:
        """20th percentile in microseconds."""
        return percentile(self.samples, 20)

    @property
    def p80(self) -> float:
        """80th percentile in microseconds."""
        return percentile(self.samples, 80)

    def condensed(self, most: int) -> tuple[float, ...]:
        """At most so many samples: medians over equal groups of consecutive ones."""
        if most < 1:
            raise ValueError(f"most must be at least 1, not {most}")
        group = -(-len(self.samples) // most)
        starts = range(0, len(self.samples), group)
        return tuple(statistics.median(self.samples[at : at + group]) for at in starts)


def percentile(samples: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation between order statistics."""
    if not samples:
        raise ValueError("no samples")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must lie in [0, 100], not {percent}")
    ordered = sorted(samples)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def round_robin(repeats: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """(name, how often it ran before) in interleaved order.

    As many rounds as the largest count; a smaller one is spread evenly over them.  Each round
    starts at another candidate, so that none always follows the same neighbour.
    """
    names, rounds = list(repeats), max(repeats.values(), default=0)
    done = dict.fromkeys(names, 0)
    for r in range(rounds):
        first = r % len(names)
        for name in names[first:] + names[:first]:
            if (r + 1) * repeats[name] // rounds > done[name]:
                yield name, done[name]
                done[name] += 1


class CudaClock:
    """Pairs of CUDA events on the current stream; read after one synchronisation at the end."""

    def measure(self, function: Callable[[], Any]) -> Any:
        """Run function between two events; what is returned goes to `read`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        return start, end

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def read(self, taken: Any) -> float:
        """Microseconds of one measurement."""
        start, end = taken
        return start.elapsed_time(end) * 1e3


class L2Flush:
    """Call it to push everything else out of L2."""

    def __init__(self, size: int = FLUSH_BYTES, device: torch.device | str = "cuda"):
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        self.buffer.zero_()


def _per_candidate(
    value: int | Mapping[str, int], names: Sequence[str], what: str
) -> dict[str, int]:
    counts = dict.fromkeys(names, value) if isinstance(value, int) else {n: value[n] for n in names}
    if any(count < 0 for count in counts.values()):
        raise ValueError(f"{what} must not be negative: {counts}")
    return counts


def interleaved(
    candidates: Mapping[str, Callable | Sequence[Callable]],
    *,
    repeats: int | Mapping[str, int] = 20,
    warmup: int | Mapping[str, int] = 2,
    flush: Callable[[], Any] | None = None,
    clock: Any = None,
) -> dict[str, Timing]:
    """Time every candidate in one interleaved run.

    candidates: name -> a callable without arguments, or a list of them on different inputs, used in
    turn. repeats, warmup: for all, or by name; repeats at least 1.  flush: called before each timed
    call; None makes an `L2Flush`.  clock: a `CudaClock`, or something with its three methods.
    """
    names = list(candidates)
    counts = _per_candidate(repeats, names, "repeats")
    if any(count < 1 for count in counts.values()):
        raise ValueError(f"repeats must be at least 1: {counts}")
    inputs = {n: [c] if callable(c) else list(c) for n, c in candidates.items()}
    clock = CudaClock() if clock is None else clock
    flush = L2Flush() if flush is None else flush

    for name, turn in round_robin(_per_candidate(warmup, names, "warmup")):
        inputs[name][turn % len(inputs[name])]()
    clock.synchronize()
    taken: dict[str, list[Any]] = {name: [] for name in names}
    for name, turn in round_robin(counts):
        flush()
        taken[name].append(clock.measure(inputs[name][turn % len(inputs[name])]))
    clock.synchronize()
    return {name: Timing(tuple(clock.read(t) for t in taken[name])) for name in names}


def measure_copy_bandwidth(size: int = COPY_BYTES, repeats: int = 10) -> tuple[float, Timing]:
    """Bytes per second, read + written, of a device-to-device copy of `size` bytes, and its timing."""
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timing = interleaved({"copy": lambda: target.copy_(source)}, repeats=repeats, warmup=2)["copy"]
    return 2 * size / (timing.median * 1e-6), timing
