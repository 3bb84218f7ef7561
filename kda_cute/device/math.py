"""Scalar functions of a thread."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..factors import LEAST_B
from .warp_mma import select

LOG2E = 1.4426950408889634


def exp2(x):
    """2^x by the hardware's approximation, 0 far below."""
    return cute.math.exp2(x, fastmath=True)


def sigmoid(x):
    """1 / (1 + exp(-x)) by ex2 and rcp; 0 for very negative x."""
    return cute.arch.rcp_approx(1.0 + exp2(x * -LOG2E))


def at_least(b):
    """b, or LEAST_B for a smaller |b|."""
    return select(cute.math.absf(b) < Float32(LEAST_B), Float32(LEAST_B), b)


def clamp(x, top):
    """x as Int32 within [0, top]."""
    return cutlass.max(cutlass.min(Int32(x), top), 0)


def softplus(y):
    """log2(1 + 2^y), accurate also where 2^y is small."""
    z = exp2(-cute.math.absf(y))
    small = z * LOG2E * (1.0 - z * (0.5 - z * (1.0 / 3.0)))
    large = cute.math.log2(1.0 + z, fastmath=True)
    return cutlass.max(y, Float32(0)) + select(z < Float32(2.0**-8), small, large)
