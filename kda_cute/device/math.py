"""Scalar functions of a thread."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

LOG2E = 1.4426950408889634


def exp2(x):
    """2^x by the hardware's approximation, 0 far below."""
    return cute.math.exp2(x, fastmath=True)


def sigmoid(x):
    """1 / (1 + exp(-x)) by ex2 and rcp; 0 for very negative x."""
    return cute.arch.rcp_approx(1.0 + exp2(x * -LOG2E))


def clamp(x, top):
    """x as Int32 within [0, top]."""
    return cutlass.max(cutlass.min(Int32(x), top), 0)
