"""What a thread of the transition keeps in registers, and the decays between its tokens.

A thread owns two neighbouring channels of a block of 16 tokens: 64 threads cover a block.  With e_t
the decay of token t, exp(gc_i - gc_a) for i >= a is the product of e_t over a < t <= i.  Every
factor is at most 1, so no product overflows, or vanishes before its value does, for any gate <= 0.
"""

import copy
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Int32

from ...device.matrix_rows import MatrixRows
from ...device.warp_mma import multiply_bf16x2, packed_bf16, words


class Columns(NamedTuple):
    """Two channels, 2 pair and 2 pair + 1, of a block's tokens."""

    block: Int32
    pair: Int32
    e: cute.Tensor  # [2, 16] fp32: exp(g); 1 past the end
    k: cute.Tensor  # [16] words of two bf16, as they came
    q: cute.Tensor


def falling(e, first, last, start=None):
    """{row: exp(gc_row - gc_first) start} for rows first .. last; None stands for 1."""
    factors = {first: start}
    for r in range(first + 1, last + 1):
        factors[r] = _times(factors[r - 1], e, r)
    return factors


def rising(e, last, first, start=None):
    """{row: exp(gc_last - gc_row) start} for rows last, last - 1, .. first; None stands for 1."""
    factors = {last: start}
    for r in range(last - 1, first - 1, -1):
        factors[r] = _times(factors[r + 1], e, r + 1)
    return factors


def _times(factor, e, r):
    return [e[i, r] if factor is None else factor[i] * e[i, r] for i in range(2)]


def scaled(word, factor):
    """A word of two bf16 times two fp32 factors, each rounded to bf16 once; None stands for 1."""
    return word if factor is None else multiply_bf16x2(word, words(packed_bf16(factor))[0])


class RowWords:
    """A thread's word (two columns) in each row of a bf16 tile, from row `row`, a multiple of 8, on.

    Rows 8 apart are immediate offsets of each other, and so are tiles of the same shape.
    """

    def __init__(self, tile, base, row, pair, stage=0):
        inside = cute.assume(2 * (pair % 4), divby=2)
        rows = MatrixRows(tile, base, stage, row, pair // 4)
        self.pitch = rows.row_pitch
        self.pointers = [rows.piece_pointer(0, r) + (inside + r * self.pitch) for r in range(8)]
        self.shift = 0

    def further(self, rows):
        """The same words `rows` (a multiple of 8) further on."""
        moved = copy.copy(self)
        moved.shift = self.shift + rows * self.pitch
        return moved

    def in_next_stage(self, tile):
        """The same words in the tile's next stage."""
        moved = copy.copy(self)
        moved.shift = self.shift + tile.stage_bytes // 2
        return moved

    def in_tile(self, old, new):
        """The same words in a tile of the same shape and layout."""
        moved = copy.copy(self)
        moved.shift = self.shift + (new.offset - old.offset) // 2
        return moved

    def at(self, row):
        """The word in a row (an int), as a tensor of two bf16."""
        pointer = self.pointers[row % 8] + (self.shift + row // 8 * 8 * self.pitch)
        return cute.make_tensor(pointer, cute.make_layout(2))

    def load(self, row):
        """The word of a row."""
        two = cute.make_rmem_tensor((2,), BFloat16)
        cute.autovec_copy(self.at(row), two)
        return words(two)[0]

    def store(self, row, word):
        """Store the word of a row."""
        two = cute.make_rmem_tensor((2,), BFloat16)
        cute.recast_tensor(two, Int32)[0] = word
        cute.autovec_copy(two, self.at(row))
