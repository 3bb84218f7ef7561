"""Fake tensors that kernels are traced with."""

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

TYPES = {"bf16": BFloat16, "f32": Float32}


def compact(dtype, *shape):
    """Contiguous, last mode innermost, from a multiple of 16 bytes on."""
    order = tuple(reversed(range(len(shape))))
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)


def strided(dtype, *shape):
    """Any strides that are multiples of 16 bytes, but for the last, which is 1."""
    stride = tuple(cute.sym_int64(divisibility=128 // dtype.width) for _ in shape[:-1])
    return cute.runtime.make_fake_tensor(dtype, shape, (*stride, 1), assumed_align=16)


def scattered(dtype, *shape):
    """Any strides at all."""
    stride = tuple(cute.sym_int64() for _ in shape)
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=dtype.width // 8)


def offsets():
    """cu_seqlens: int32, or the low words of int64."""
    shape, stride = (cute.sym_int(),), (cute.sym_int(),)
    return cute.runtime.make_fake_tensor(Int32, shape, stride, assumed_align=4)
