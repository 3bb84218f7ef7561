"""Kernel times and names as the profiler sees them, and the host time of a call.

`kernel_calls` runs all candidates in one interleaved, recorded run.  A fence before each call pushes
everything else out of L2 and marks where the call begins: it launches one kernel that no candidate
launches.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from perf.timing import FLUSH_BYTES, Timing, round_robin


class Event(NamedTuple):
    """Something that ran on the device, copies and fills too; start and duration in microseconds."""

    name: str
    start: float
    us: float


Call = tuple[Event, ...]
Recorder = Callable[[Callable[[], Any]], list[Event]]


class Fence:
    """Call it to push everything else out of L2, by a kernel of its own."""

    def __init__(self, size: int = FLUSH_BYTES, device: torch.device | str = "cuda"):
        self.buffer = torch.zeros(size, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        self.buffer.bitwise_not_()


def record(function: Callable[[], Any]) -> list[Event]:
    """What ran on the device on behalf of one call, in order of start."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    events = (
        Event(e.name, e.time_range.start, e.time_range.elapsed_us())
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    return sorted(events, key=lambda event: event.start)


def kernel_calls(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    fence: Callable[[], Any] | None = None,
    recorder: Recorder = record,
) -> dict[str, list[Call]]:
    """Candidate -> what each of its calls ran, on cold L2, all candidates interleaved.

    RuntimeError when the profiler shows no kernels, or so many that calls can't be told apart.
    """
    fence = Fence() if fence is None else fence
    marks = {event.name for event in recorder(fence)}
    if len(marks) != 1:
        raise RuntimeError(f"the profiler shows {sorted(marks)} for a fence of one kernel")
    (mark,) = marks
    order = [name for name, _ in round_robin(dict.fromkeys(candidates, repeats))]

    def run() -> None:
        for name in order:
            fence()
            candidates[name]()

    calls: list[list[Event]] = []
    for event in recorder(run):
        if event.name == mark:
            calls.append([])
        elif calls:
            calls[-1].append(event)
    if len(calls) != len(order):
        raise RuntimeError(f"the profiler shows {len(calls)} fences around {len(order)} calls")
    found: dict[str, list[Call]] = {name: [] for name in candidates}
    for name, call in zip(order, calls, strict=True):
        found[name].append(tuple(call))
    return found


def total(calls: Sequence[Call], part: str = "") -> Timing:
    """Sums of the durations of each call's events, those with `part` in their names."""
    return Timing(tuple(sum(e.us for e in call if part in e.name) for call in calls))


def host_time(
    function: Callable[[], Any],
    *,
    repeats: int = 100,
    synchronize: Callable[[], Any] | None = None,
) -> Timing:
    """How long a warm call keeps the host, in microseconds; the device is idle when it begins."""
    synchronize = torch.cuda.synchronize if synchronize is None else synchronize
    samples = []
    for _ in range(repeats):
        synchronize()
        started = time.perf_counter_ns()
        result = function()
        samples.append((time.perf_counter_ns() - started) / 1e3)
        del result
    synchronize()
    return Timing(tuple(samples))
