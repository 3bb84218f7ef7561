"""What consumer warpgroups do in both directions: 64 columns v of a state, S^T in registers.

A thread's accumulators [64 v, n]: row 16 warp + lane // 4 + 8 half, column 8 n + 2 (lane % 4) + i,
at index [(i, half, n), 0, 0].
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from ...device import tma
from ...device.warpgroup import load_matrix, store_matrix
from .schedule import GROUP, PIECES, ROWS, STAGING_BARRIER, C, D, Walk


class StateRole:
    """Moves and steps of a consumer warpgroup."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan
        self.stages = plan["kd"].stages

    # ------------------------------------------------------------ global memory
    def state_elements(self, state, walk, group, tid):
        """(accumulator index, element of a [V, K] state) for each element of S^T that a thread
        owns.
        """
        warp, lane = tid // 32, tid % 32
        row = ROWS * (walk.block + group) + 16 * warp + lane // 4
        column = 2 * (lane % 4)
        for n in range(D // 8):
            for half in range(2):
                for i in range(2):
                    yield i + 2 * half + 4 * n, (row + 8 * half, column + 8 * n + i)

    def load_state(self, state, S, walk, group, tid):
        for index, at in self.state_elements(state, walk, group, tid):
            S[index] = Float32(state[at])

    def store_state(self, state, S, walk, group, tid):
        for index, at in self.state_elements(state, walk, group, tid):
            state[at] = S[index]

    # ------------------------------------------------------------ steps
    def column_pairs(self, name, base, s, tid, columns):
        """(column block n, this thread's columns 8 n + 2 (lane % 4) + i of a line) for each n."""
        line = self.plan[name].view(base, s)[0, None]
        for n in range(columns // 8):
            pair = cute.make_rmem_tensor((2,), Float32)
            cute.autovec_copy(cute.local_tile(line, (2,), (4 * n + tid % 4,)), pair)
            yield n, pair

    def decay(self, S, base, s, tid):
        """S^T[v, k] *= eg[k]."""
        for n, eg in self.column_pairs("eg", base, s, tid, D):
            for i in range(4):
                S[4 * n + i] = S[4 * n + i] * eg[i % 2]

    def add_diagonal(self, acc, x, base, s, tid):
        """acc[v, i] += qk[i] x[v, i]."""
        for n, qk in self.column_pairs("qk", base, s, tid, C):
            for i in range(4):
                acc[4 * n + i] = acc[4 * n + i] + qk[i % 2] * x[4 * n + i]

    def load_columns(self, name, tiled, base, s, group, tid):
        """This warpgroup's columns of a tile [token, v], transposed: bf16 in an accumulator's order."""
        values = cute.make_rmem_tensor(tiled.partition_shape_C((ROWS, C)), BFloat16)
        tile = self.plan[name].view(base, s * self.config.groups + group)
        load_matrix(tiled, tid, values, tile, transposed=True)
        return values

    # ------------------------------------------------------------ staging
    def staging_barrier(self, group):
        cute.arch.barrier(barrier_id=STAGING_BARRIER + group, number_of_threads=GROUP)

    @cute.jit
    def free_staging(self, group: Int32, tid: Int32):
        """Wait until the copies out of this warpgroup's staging tiles have read them."""
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.staging_barrier(group)

    def stage(self, name, tiled, values, base, group, tid):
        """bf16 registers of S^T [v, k], or of [v, token], to a tile [v, k] or [token, v]."""
        tile = self.plan[name]
        transposed = tile.shape == (C, ROWS)
        shape = tiled.partition_shape_C((ROWS, C if transposed else D))
        values = cute.make_tensor(values.iterator, cute.make_layout(shape))
        store_matrix(tiled, tid, values, tile.view(base, group), transposed=transposed)

    @cute.jit
    def zero_tail(self, name: cutlass.Constexpr, walk: Walk, base, stage: Int32, tid: Int32):
        """Zero the rows of a loaded tile [token, v] past the sequence's end: they are another
        sequence's, or anything, and 0 times NaN is NaN.
        """
        tile = self.plan[name].view(base, stage)
        zeros = cute.make_rmem_tensor((8,), BFloat16)
        zeros.fill(0.0)
        for i in cutlass.range(walk.tail * PIECES + tid, C * PIECES, GROUP, unroll=1):
            cute.autovec_copy(zeros, cute.local_tile(tile[i // PIECES, None], (8,), (i % PIECES,)))

    def send(self, name, copy, walk, base, group, chunk):
        """What is staged, to the chunk's slot."""
        tile = self.plan[name]
        block = walk.block + group
        at = (0, block) if tile.shape == (C, ROWS) else (block, 0)
        slot = copy.tensor[None, None, walk.h, walk.slot + chunk]
        tma.store(copy, tile.view(base, group), cute.local_tile(slot, tile.shape, at))

    def send_tokens(self, name, copy, walk, base, group, chunk):
        """What is staged, to the chunk's tokens; all 64 of them are the sequence's."""
        rows = cute.domain_offset(
            (walk.token + C * chunk, 0), copy.tensor[None, None, walk.h, walk.batch]
        )
        block = cute.local_tile(rows, (C, ROWS), (0, walk.block + group))
        tma.store(copy, self.plan[name].view(base, group), block)

    @cute.jit
    def copy_rows(
        self, name: cutlass.Constexpr, out: cute.Tensor, walk: Walk, base, group: Int32, tid: Int32
    ):
        """The rows of a staged tile that the last chunk has, 16 bytes at a time."""
        tile, token = self.plan[name].view(base, group), walk.token + C * (walk.chunks - 1)
        for i in cutlass.range(tid, walk.tail * PIECES, GROUP, unroll=1):
            row, piece = i // PIECES, i % PIECES
            line = out[Int64(walk.batch), Int64(token + row), walk.h, None]
            values = cute.make_rmem_tensor((8,), BFloat16)
            cute.autovec_copy(cute.local_tile(tile[row, None], (8,), (piece,)), values)
            to = (walk.block + group) * PIECES + piece
            cute.autovec_copy(values, cute.local_tile(line, (8,), (to,)))
