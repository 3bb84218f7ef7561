"""Errors relative to a float64 reference, as Frobenius norms: of a tensor, and of each sequence."""

import math
from typing import NamedTuple

import torch

GONE = 1e-30  # norm of what has decayed out of fp32's range: only 0 is near it
SHARE = 0.1  # rows smaller than this part of an average row's norm are judged as if they had it


class Compared(NamedTuple):
    """One tensor's relative error and the tolerance it is judged by; `ok` is False for NaN."""

    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


def failures(compared: dict[str, Compared]) -> dict[str, Compared]:
    """The entries that miss their tolerance; a NaN always does."""
    return {name: c for name, c in compared.items() if not c.ok}


def rel_error(x: torch.Tensor, ref: torch.Tensor, scale: torch.Tensor | float = 0.0) -> float:
    """norm(x - ref) / max(norm(ref), scale) in float64; NaN if x is not finite, 0 for two zeros."""
    x, ref = x.double(), ref.double()
    if x.shape != ref.shape:
        raise ValueError(f"shapes differ: {list(x.shape)} and {list(ref.shape)}")
    if not torch.isfinite(x).all():
        return math.nan
    diff = torch.linalg.vector_norm(x - ref).item()
    size = max(torch.linalg.vector_norm(ref).item(), float(scale))
    return 0.0 if diff == 0 else diff / size if size > 0 else math.inf
