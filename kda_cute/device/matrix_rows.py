"""Addresses of 8 x 8 bf16 matrices for ldmatrix and stmatrix, cheap to step.

A lane names one 16-byte row piece: (row, chunk), chunk = column / 8.  Under the 128-byte swizzle
the chunk is XORed with row % 8, and CuTe recomputes that for every access; in an unrolled loop the
compiler then keeps dozens of addresses in registers.  Here the lane's part is XORed once, steps in
rows and in 64-column blocks are immediate offsets, and a step inside a block is one XOR with a
constant.
"""

import cutlass.cute as cute
from cutlass import BFloat16
from cutlass.cute.nvgpu import warp

from ..layouts.tile import Swizzle128

CHUNK = 8  # elements in 16 bytes
BLOCK = 8  # chunks in 128 bytes


class MatrixRows:
    """Rows of matrices in one stage of a bf16 tile, from the lane's (row, chunk).

    `row_step` (a multiple of 8) and `chunk_step` are ints, known while tracing or not.  The bits of
    `chunk` that vary and those of `chunk_step` must not meet, so that their sum is their XOR.
    """

    def __init__(self, tile, base, stage, row, chunk):
        pointer = cute.recast_ptr(tile.pointer(base, stage), dtype=BFloat16)
        self.swizzled = isinstance(tile.layout, Swizzle128)
        rows, cols = tile.shape
        if self.swizzled:
            self.row_pitch, self.block_pitch = BLOCK * CHUNK, rows * BLOCK * CHUNK
            pointer = pointer + _pieces(row * self.row_pitch + chunk // BLOCK * self.block_pitch)
            self.chunk = (chunk % BLOCK) ^ (row % BLOCK)
        else:
            self.row_pitch = cols
            pointer = pointer + _pieces(row * cols + chunk * CHUNK)
        self.pointer = pointer

    def _at(self, row_step, chunk_step):
        if self.swizzled:
            inside = self.chunk ^ (chunk_step % BLOCK)
            steps = row_step * self.row_pitch + chunk_step // BLOCK * self.block_pitch
            pointer = self.pointer + _pieces(inside * CHUNK) + _pieces(steps)
        else:
            pointer = self.pointer + _pieces(row_step * self.row_pitch + chunk_step * CHUNK)
        return cute.make_tensor(pointer, cute.make_layout(((8, 1), 1)))

    def shift(self, nbytes):
        """Move to a tile of the same shape and layout, nbytes (a multiple of 16) further on."""
        self.pointer = self.pointer + _pieces(nbytes // 2)

    def piece_pointer(self, row_step=0, chunk_step=0):
        """Pointer to the lane's 8 elements themselves."""
        return self._at(row_step, chunk_step).iterator

    def load_piece(self, chunk_step=0):
        """The lane's 8 elements, by an ordinary load."""
        piece = cute.make_rmem_tensor((CHUNK,), BFloat16)
        source = self.piece_pointer(0, chunk_step)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(CHUNK)), piece)
        return piece

    def store_piece(self, piece, chunk_step=0):
        """The reverse of `load_piece`."""
        target = self.piece_pointer(0, chunk_step)
        cute.autovec_copy(piece, cute.make_tensor(target, cute.make_layout(CHUNK)))

    def load(self, row_step=0, chunk_step=0, *, transpose=False):
        """ldmatrix.x4: 8 bf16 registers' worth, lane l naming row l % 8 of matrix l // 8."""
        fragment = cute.make_rmem_tensor((8,), BFloat16)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, 4), BFloat16)
        cute.copy(atom, self._at(row_step, chunk_step), _vector(fragment))
        return fragment

    def store(self, fragment, row_step=0, chunk_step=0, *, transpose=False):
        """stmatrix.x4 of 8 bf16 values."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose, 4), BFloat16)
        cute.copy(atom, _vector(fragment), self._at(row_step, chunk_step))


def _pieces(offset):
    """An offset known to be whole 16-byte pieces, so that the pointer keeps its alignment."""
    return offset if isinstance(offset, int) else cute.assume(offset, divby=CHUNK)


def _vector(fragment):
    return cute.make_tensor(fragment.iterator, cute.make_layout(((8, 1), 1)))


class LaneRows:
    """The four ways a lane l names a row of four 8 x 8 matrices, as (row, chunk) inside a 16 x 16
    block.

    rows_first: matrices (0, 0), (8, 0), (0, 8), (8, 8) in (row, column); columns_first: (0, 0), (0,
    8), (8, 0), (8, 8). An A operand stored [m, k], and accumulators stored as they are: rows_first.
    An A operand stored [k, m], two B operands stored [n, k], and accumulators stored transposed:
    columns_first.  Two B operands stored [k, n]: rows_first.
    """

    def __init__(self, lane):
        self.in_matrix, self.bit3, self.bit4 = lane % 8, lane // 8 % 2, lane // 16

    def rows_first(self):
        return self.in_matrix + 8 * self.bit3, self.bit4

    def columns_first(self):
        return self.in_matrix + 8 * self.bit4, self.bit3
