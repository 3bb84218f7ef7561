"""One kernel of the package at a time, in any of its shared-memory plans: checked, then launched alone.

A stage of `chunk_kda` runs inside the whole pass first, in the plan that is asked for, and what the
pass returns is held against float64.  Its arguments are kept, so that later launches are of that
kernel and of nothing else.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kda_cute import backward, forward, ops, reference, report
from kda_cute import compile as kernels
from kda_cute.lab.catalogue import Selection, option_defaults
from kda_cute.layouts.plan import Plan
from kda_cute.problem import Problem
from perf import chunk_kda, forms, providers, run
from perf.forms import some_heads
from perf.shapes import SMS, Shape


@dataclass(frozen=True)
class Subject:
    """A kernel in one plan, on one problem.

    check: runs what the kernel is part of, and returns the relative error of each result over its
    tolerance (at most 1 is fine, not a number is not); launch: the kernel alone, once checked.
    """

    layout: str
    precision: str
    plan: Plan
    check: Callable[[], dict[str, float]]
    launch: Callable[[], Any]


def subjects(
    selection: Selection,
    layouts: Sequence[str],
    shape: Shape,
    precision: str | None = None,
    device: str = "cuda",
) -> list[Subject]:
    """The kernel in each of the layouts, all on the same tensors."""
    if selection.family == "bwd_recurrence":
        precision = precision or selection.precisions[0]
        return _recurrences(layouts, shape, precision, device)
    return Stage(selection, shape, device).subjects(layouts)


def specs(
    selection: Selection, layouts: Sequence[str], shape: Shape, precision: str | None = None
) -> list[kernels.KernelSpec]:
    """What those subjects compile; a scan's warpgroups are those of an H200."""
    if selection.family == "bwd_recurrence":
        precision = precision or selection.precisions[0]
        return [_recurrence_spec(layout, shape, precision) for layout in layouts]
    return [with_layout(_stage_spec(selection, shape, None), layout) for layout in layouts]


# ---------------------------------------------------------------- level 1
def _recurrence_spec(layout: str, shape: Shape, precision: str) -> kernels.KernelSpec:
    return ops.recurrence_spec(precision, layout, "f32", "none", shape.varlen)


def _recurrences(
    layouts: Sequence[str], shape: Shape, precision: str, device: str
) -> list[Subject]:
    inputs, heads = run.make_inputs(shape, device), some_heads(shape.H)
    expected = reference.bwd_recurrence(*run.head_inputs(inputs, heads), dtype=torch.float64)
    made = []
    for layout in layouts:
        (candidate,) = run.package_candidates([f"{precision}/{layout}"], 1)
        check = functools.partial(_check_recurrence, candidate, inputs, expected, heads, shape)
        launch = functools.partial(candidate.run, *inputs)
        plan = report.budget(_recurrence_spec(layout, shape, precision)).plan
        made.append(Subject(layout, precision, plan, check, launch))
    return made


def _check_recurrence(candidate, inputs, expected, heads, shape) -> dict[str, float]:
    rows, _ = run.check(candidate, inputs, expected, heads, shape)
    not_finite = float("nan")
    return {
        row["tensor"]: not_finite if row["error"] is None else row["error"] / row["tolerance"]
        for row in rows
    }


# ---------------------------------------------------------------- level 2
# Kernel -> (operation that it is part of, its name among the arguments of that pass).
STAGES = {
    "transition": ("chunk_kda_fwd", "transition"),
    "scan": ("chunk_kda_fwd", "scan"),
    "reverse_scan": ("chunk_kda_bwd", "reverse_scan"),
    "gradients": ("chunk_kda_bwd", "gradients"),
}


def form_of(selection: Selection) -> str:
    """The form of the inputs (perf.forms): the one with gates of the plan's dtype, else A."""
    default = option_defaults(selection.kernel).get("g", "f32")
    gates = selection.options.get("g", default)
    return next(form for form, types in forms.TYPES.items() if types[0] == gates)


def _stage_spec(selection: Selection, shape: Shape, groups: int | None) -> kernels.KernelSpec:
    """In its default layout."""
    types = forms.TYPES[form_of(selection)]
    if groups is None:
        groups = 1 if 2 * shape.N * shape.H <= SMS else 2
    groups = selection.options.get("groups", groups)
    kernel, varlen = selection.kernel, shape.varlen
    if kernel == "transition":
        return forward.transition_spec(*types, varlen)
    if kernel == "scan":
        return forward.scan_spec(groups, varlen, "none", False, selection.options.get("save", True))
    if kernel == "reverse_scan":
        return backward.reverse_spec(groups, varlen, "none", False)
    return backward.gradients_spec(*types, varlen)


def with_layout(spec: kernels.KernelSpec, layout: str) -> kernels.KernelSpec:
    """The spec of the same kernel in another plan."""
    config = dataclasses.replace(spec.config, layout=layout)
    module = importlib.import_module(f"kda_cute.kernels.{spec.name}")
    return kernels.KernelSpec(spec.name, config, functools.partial(module.trace, config))


class Stage:
    """A stage of `chunk_kda` on one problem."""

    def __init__(self, selection: Selection, shape: Shape, device: str = "cuda"):
        self.selection = selection
        self.op, self.name = STAGES[selection.kernel]
        self.inputs = forms.make_inputs(shape, device)[form_of(selection)]
        self.heads = some_heads(shape.H)
        self.problem = problem(self.inputs, save=selection.options.get("save", True))
        self.expected: Mapping[str, torch.Tensor] | None = None
        self.saved: torch.Tensor | None = None

    def subjects(
        self,
        layouts: Sequence[str],
        load: Callable[[kernels.KernelSpec], Callable] = kernels.load,
    ) -> list[Subject]:
        """One for each of the layouts."""
        groups = forward.groups(self.problem) if self.problem.q.is_cuda else None
        base = _stage_spec(self.selection, self.inputs.shape, groups)
        made = []
        for layout in layouts:
            spec = with_layout(base, layout)
            kept: list[Any] = []
            kernel = functools.partial(_load_and_run, load, spec)
            made.append(
                Subject(
                    layout,
                    self.selection.precisions[0],
                    report.budget(spec).plan,
                    functools.partial(self.check, kernel, kept),
                    functools.partial(_launch_again, kernel, kept),
                )
            )
        return made

    def check(self, kernel: Callable, kept: list[Any]) -> dict[str, float]:
        """Errors over tolerances of the pass with this kernel in it, whose arguments are kept."""

        def keep(*arguments):
            kept[:] = arguments
            return kernel(*arguments)

        results = self.results(keep)
        if self.expected is None:
            self.expected = forms.expected(self.op, self.inputs, self.heads)
        found = chunk_kda.errors(results, self.expected, self.heads)
        limit = providers.TOLERANCE["kda_cute"]
        return {
            name: error / providers.LOOSER.get(("kda_cute", name), limit)
            for name, error in found.items()
        }

    def results(self, kernel: Callable) -> dict[str, torch.Tensor]:
        """What the pass returns with this kernel in it, [T, H, ...] by name."""
        p = self.problem
        if self.op == "chunk_kda_fwd":
            return {"o": forward.run(p, **{self.name: kernel}).o.flatten(0, 1)}
        if self.saved is None:
            self.saved = forward.run(p).saved
        do = self.inputs.do.view(p.v.shape)
        grads = backward.run(p, do, None, self.saved, **{self.name: kernel})
        return {f"d{name}": getattr(grads, f"d{name}").flatten(0, 1) for name in forms.LEAVES}


def _load_and_run(load: Callable, spec: kernels.KernelSpec, *arguments):
    return load(spec)(*arguments)


def _launch_again(kernel: Callable, kept: Sequence[Any]):
    if not kept:
        raise RuntimeError("a kernel is launched alone only after it was checked")
    return kernel(*kept)


def problem(x: forms.Inputs, *, save: bool = True) -> Problem:
    """A form's inputs as the stages take them."""
    B = 1 if x.shape.varlen else x.shape.N
    q, k, v, g, beta = (getattr(x, name).unflatten(0, (B, -1)) for name in forms.LEAVES)
    return Problem(
        q, k, v, g, beta, x.A_log, x.dt_bias, None,
        x.cu_seqlens if x.shape.varlen else None,
        forms.SCALE, "safe" if x.raw else "log", forms.LOWER_BOUND, x.l2norm, x.raw, 1.0,
        False, False, save,
    ).for_kernels()  # fmt: skip
