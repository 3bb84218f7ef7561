"""Neighbouring fp32 values of a row of a tile, in one access."""

import cutlass.cute as cute
from cutlass import Float32


def load_two(tile, row, pair):
    """Two values of a row, from 2 pair on."""
    two = cute.make_rmem_tensor((2,), Float32)
    cute.autovec_copy(cute.local_tile(tile[row, None], (2,), (pair,)), two)
    return [two[0], two[1]]


def store_two(tile, row, pair, values):
    """The reverse of `load_two`."""
    two = cute.make_rmem_tensor((2,), Float32)
    two[0] = values[0]
    two[1] = values[1]
    cute.autovec_copy(two, cute.local_tile(tile[row, None], (2,), (pair,)))


def load_four(line, index):
    """Four values of a line, from 4 index on."""
    four = cute.make_rmem_tensor((4,), Float32)
    cute.autovec_copy(cute.local_tile(line, (4,), (index,)), four)
    return [four[i] for i in range(4)]
