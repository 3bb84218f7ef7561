"""Kernels by name, and their plans with the options that a builder of tiles takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..layouts import audit, variants
from ..layouts.plan import Plan
from ..layouts.tile import LayoutError

# Kernels that share a family with another one: name -> (family, options that make it this one).
FORMS: dict[str, tuple[str, dict[str, Any]]] = {"reverse_scan": ("scan", {"reverse": True})}
# Options that mean nothing in such a form.
WITHOUT = {"reverse_scan": ("save",)}


class Selection(NamedTuple):
    """A kernel, and the options of its builder of tiles that differ from the defaults."""

    kernel: str
    family: str
    options: dict[str, Any]

    def plan(self, layout: str = "default", precision: str | None = None) -> Plan:
        """The plan; the first precision of the family unless one is named.  ValueError (LayoutError
        for a plan that cannot be) says what is wrong.
        """
        precision = precision or variants.precisions(self.family)[0]
        return variants.plan(self.family, layout, precision, **self.options)

    @property
    def layouts(self) -> tuple[str, ...]:
        """Names of its layouts."""
        return variants.names(self.family)

    @property
    def precisions(self) -> tuple[str, ...]:
        """Names of its precisions."""
        return variants.precisions(self.family)


class Row(NamedTuple):
    """One plan in a list; sizes in bytes, wavefronts of shared memory per chunk.  A plan that cannot
    be has `problem` alone.
    """

    kernel: str
    layout: str
    precision: str
    tiles: str
    bytes: int | None
    ctas_per_sm: int | None
    wavefronts: int | None
    conflicts: int | None
    problem: str


def kernels() -> tuple[str, ...]:
    """Every kernel of the package that has plans."""
    return (*variants.kernels(), *FORMS)


def option_defaults(kernel: str) -> dict[str, Any]:
    """Options of a kernel's builder of tiles, with their defaults."""
    family, _ = FORMS.get(kernel, (kernel, {}))
    hidden = {name for other, given in FORMS.values() if other == family for name in given}
    hidden |= set(WITHOUT.get(kernel, ()))
    parameters = inspect.signature(variants.FAMILIES[family].tiles).parameters.values()
    found = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {name: value for name, value in found.items() if name not in hidden}


def select(kernel: str, options: Sequence[str] = ()) -> Selection:
    """The kernel of that name, options as "NAME=VALUE".  ValueError lists what there is."""
    if kernel not in kernels():
        raise ValueError(f"kernel={kernel!r} is not one of {', '.join(kernels())}")
    family, fixed = FORMS.get(kernel, (kernel, {}))
    return Selection(kernel, family, fixed | parse_options(kernel, options))


def parse_options(kernel: str, options: Sequence[str]) -> dict[str, Any]:
    """{"groups": 1} of ["groups=1"]: each value in the type of its default."""
    defaults, found = option_defaults(kernel), {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or name not in defaults:
            known = ", ".join(f"{n}={v}" for n, v in defaults.items()) or "none"
            raise ValueError(f"option={option!r}: {kernel} has these, with defaults: {known}")
        found[name] = _value(option, text, type(defaults[name]))
    return found


def _value(option: str, text: str, kind: type) -> Any:
    if kind is bool:
        words = {"true": True, "false": False}
        if text.lower() not in words:
            raise ValueError(f"option={option!r}: expected true or false")
        return words[text.lower()]
    if kind is int:
        if not text.isdigit():
            raise ValueError(f"option={option!r}: expected a whole number")
        return int(text)
    return text


def rows(selection: Selection) -> list[Row]:
    """Every plan of a kernel."""
    return [
        _row(selection, layout, precision)
        for layout in selection.layouts
        for precision in selection.precisions
    ]


def _row(selection: Selection, layout: str, precision: str) -> Row:
    wide = str(variants.FAMILIES[selection.family].layouts[layout])
    names = (selection.kernel, layout, precision, wide)
    try:
        plan = selection.plan(layout, precision)
        predicted, problems = wavefronts(plan), audit.legality(plan)
    except LayoutError as error:
        return Row(*names, None, None, None, None, str(error))
    return Row(
        *names,
        plan.total_bytes,
        plan.ctas_per_sm,
        predicted["all"],
        predicted["conflicts"],
        problems[0] if problems else "",
    )


def wavefronts(plan: Plan) -> Mapping[str, int]:
    """Wavefronts of shared memory per chunk that the audit predicts: all, and those by conflicts."""
    found = audit.audit(plan)
    extra = sum(row.extra_cycles for row in found)
    return {"all": extra + sum(row.ideal * row.count for row in found), "conflicts": extra}
