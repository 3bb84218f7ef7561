"""What kernels with a CTA for each (chunk, head) have in common: which chunk, and the call's scalars."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from ..factors import CHUNK, HEAD_DIM
from .slots import packed_chunk


class Options(NamedTuple):
    """Scalars known at the call."""

    scale: Float32
    lower_bound: Float32
    beta_scale: Float32
    l2norm: Int32
    beta_sigmoid: Int32


class Chunk(NamedTuple):
    """Where a CTA works: batch row, first token, tokens (0: nothing to do), slot, head."""

    b: Int32
    token: Int32
    rows: Int32
    slot: Int32
    h: Int32


@cute.jit
def find_chunk(varlen: cutlass.Constexpr, m, grid):
    """This CTA's chunk.  grid: divisors `heads`, which come first, and `chunks` of a dense sequence.
    Offsets out of range or out of order never lead outside the tensors.
    """
    index, _, _ = cute.arch.block_idx()
    T = m.q.shape[1]
    slot, h = divmod(index, grid.heads)
    if const_expr(varlen):
        b = Int32(0)
        token, rows = packed_chunk(m.cu_seqlens, T, slot)
    else:
        b, chunk = divmod(slot, grid.chunks)
        token = chunk * CHUNK
        rows = cutlass.min(T - token, CHUNK)
    return Chunk(b, token, rows, slot, h)


@cute.jit
def zero_tail(
    tiles: cutlass.Constexpr, at: Chunk, base, tid: Int32, threads: cutlass.Constexpr
):  # fmt: skip
    """Zero the rows of these bf16 tiles [64, 128] past the sequence's end: they hold another
    sequence's tokens, or anything.
    """
    for i in cutlass.range(at.rows * HEAD_DIM + tid, CHUNK * HEAD_DIM, threads, unroll=1):
        zero(tiles, base, i // HEAD_DIM, i % HEAD_DIM)


def zero(tiles, base, row, col):
    """Zero one element of each tile."""
    for tile in tiles:
        tile.view(base)[row, col] = BFloat16(0)
