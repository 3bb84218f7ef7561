"""Every shared-memory layout of the package: tiles, plans, named variants, and their audit."""

from . import variants
from .plan import Plan
from .tile import Dense, GroupPadded, LayoutError, RowPadded, Swizzle128, Tile

__all__ = [
    "Dense",
    "GroupPadded",
    "LayoutError",
    "Plan",
    "RowPadded",
    "Swizzle128",
    "Tile",
    "variants",
]
