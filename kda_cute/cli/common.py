"""What the commands share: how they end when something could not be done, and lists of words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

import click


class Undone(click.ClickException):
    """It could not be done, and why: exit code 2."""

    exit_code = 2


@contextlib.contextmanager
def undone(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds as Undone."""
    try:
        yield
    except kinds as error:
        raise Undone(str(error)) from error


def words(_: click.Context, __: click.Parameter, text: str | None) -> list[str] | None:
    """Callback of an option: "a, b" as a list; None where it isn't given."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def perf(module: str) -> ModuleType:
    """The module perf.`module`; Undone outside a checkout."""
    from ..lab import checkout

    with undone(FileNotFoundError):
        return checkout.perf(module)


def need_kernels(what: str) -> None:
    """Undone, with `what` and the reason, where no kernel runs on this machine."""
    from ..lab import doctor

    why = doctor.why_not_here()
    if why:
        raise Undone(f"{what}: {why}")
