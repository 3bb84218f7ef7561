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


def norms_by_sequence(x: torch.Tensor, at: list[int], last: int | None = None) -> torch.Tensor:
    """[N] norms of the rows of each sequence, of the last `last` ones only; x [B, T, ...]."""
    ends = torch.tensor(at[1:], device=x.device)
    lengths = ends - torch.tensor(at[:-1], device=x.device)
    of = torch.arange(len(lengths), device=x.device).repeat_interleave(lengths)
    rows = x.flatten(0, 1)[: at[-1]].double().flatten(1).square().sum(1)
    if last is not None:
        rows = torch.where(torch.arange(at[-1], device=x.device) >= ends[of] - last, rows, 0.0)
    return rows.new_zeros(len(lengths)).index_add_(0, of, rows).sqrt()


def errors_by_sequence(x, ref, at, last=None, terms=None) -> torch.Tensor:
    """[N] relative errors of the rows of each sequence, of the last `last` ones only; see SHARE.

    x, ref [B, T, ...]; at: token offsets of the sequences in [B * T]; terms [B, T, ...]: errors are
    relative to these where they are larger than ref.
    """
    lengths = torch.tensor([b - a for a, b in zip(at, at[1:], strict=False)], device=x.device)
    rows = lengths if last is None else lengths.clamp(max=last)
    average = norms_by_sequence(ref, [0, at[-1]])[0] * (rows / max(at[-1], 1)).sqrt()
    size = torch.maximum(norms_by_sequence(ref, at, last), SHARE * average).clamp(min=GONE)
    if terms is not None:
        size = torch.maximum(size, norms_by_sequence(terms, at, last))
    return norms_by_sequence(x.double() - ref, at, last) / size
