"""A stand-in for a GPU, for tests of the benchmarks: its kernels, its profiler, and a small shape."""

import functools

import torch

from perf import chunk_kda, forms, profiler, providers, results, run, yardstick
from perf.shapes import SHAPES, Shape

SMALL = Shape("small", (40, 0, 17), 2)
HEADER = dict(
    gpu="NVIDIA H200",
    driver="580.1",
    torch="2.11.0",
    cutlass_dsl="4.8.1",
    commit="0123456789abcdef",
    date="2030-01-02T03:04:05+00:00",
)
STICKS = ("copy", "matmul")


class Recorder:
    """A device whose kernels are what candidates and fence append to `ran`: 1, 2, .. us long."""

    def __init__(self):
        self.ran = []

    def launch(self, *names):
        self.ran += names

    def __call__(self, function):
        self.ran.clear()
        function()
        return [profiler.Event(n, float(i), i + 1.0) for i, n in enumerate(self.ran)]


class Provider:
    """Candidates that return float64's results times `factor`, and launch `kernels`."""

    def __init__(self, device, name, *variants, factor=1.0, kernels=("mine",), raises=None):
        self.device, self.name, self.variants = device, name, variants
        self.factor, self.kernels, self.raises = factor, kernels, raises
        self.calls = 0

    def __call__(self, op, shape, inputs, options):
        return [self.candidate(op, variant, inputs) for variant in self.variants]

    def candidate(self, op, variant, inputs):
        form = variant.split("/")[0]
        want = forms.expected(op, inputs[form], range(inputs[form].shape.H))

        def run():
            self.calls += 1
            if self.raises:
                raise self.raises
            self.device.launch(*self.kernels)
            return {name: t * self.factor for name, t in want.items()}

        return providers.Candidate(
            self.name, variant, run, lambda out: out, providers.Kernels(("mine",)),
            stages={"mine": (4_260_000, 0)} if self.name == "kda_cute" else {},
            host=self.name == "kda_cute",
        )  # fmt: skip


def seeming_gpu(monkeypatch, *shapes: Shape) -> Recorder:
    """Make level 2's benchmarks run on a machine that seems to have a GPU, on these shapes, too."""
    device, make_inputs = Recorder(), chunk_kda.make_inputs
    for shape in shapes:
        monkeypatch.setitem(SHAPES, shape.name, shape)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(results, "surroundings", lambda: HEADER)
    monkeypatch.setattr(run, "compile_forward", lambda *_: None)
    monkeypatch.setattr(chunk_kda, "make_inputs", lambda shape: make_inputs(shape, "cpu"))
    sticks = {name: functools.partial(device.launch, name) for name in STICKS}
    monkeypatch.setattr(yardstick, "make", lambda: sticks)
    fence = functools.partial(device.launch, "fence")
    seen = functools.partial(profiler.kernel_calls, fence=fence, recorder=device)
    monkeypatch.setattr(profiler, "kernel_calls", seen)
    return device
