"""The tensors inside records of chunks; which there are is in `kda_cute.factors`."""

import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32

from ..factors import RECORDS, ROW_BYTES, record_rows
from . import fakes

DTYPES = {torch.bfloat16: BFloat16, torch.float32: Float32}


def parts(kind: str, records: cute.Tensor) -> dict[str, cute.Tensor]:
    """Name -> tensor [slots, H, ...] inside records [slots, H, rows, 128] bf16.  Host functions."""
    return {name: _part(records, *part) for name, part in RECORDS[kind].items()}


def fake(kind: str, slots, H):
    """The records of a kind, to trace with."""
    return fakes.compact(BFloat16, slots, H, record_rows(kind), ROW_BYTES // 2)


def _part(records, row, shape, dtype):
    dtype = DTYPES[dtype]
    bf16s = dtype.width // BFloat16.width  # in an element
    unit = ROW_BYTES * 8 // dtype.width  # elements of a row
    start = cute.recast_ptr(records.iterator + row * (ROW_BYTES // 2), dtype=dtype)
    slot, head = (stride // bf16s for stride in records.stride[:2])
    stride = (cute.assume(slot, divby=unit), head, *_compact(shape))
    return cute.make_tensor(start, cute.make_layout((*records.shape[:2], *shape), stride=stride))


def _compact(shape):
    """Strides of a contiguous tensor, last mode innermost."""
    strides = [1]
    for n in shape[:0:-1]:
        strides.insert(0, n * strides[0])
    return strides
