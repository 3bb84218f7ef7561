"""What consumer warpgroups do in both directions: 64 columns v of a state, S^T in registers.

A thread's accumulators [64 v, n]: row 16 warp + lane // 4 + 8 half, column 8 n + 2 (lane % 4) + i,
at index [(i, half, n), 0, 0].
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float32

from ...device.sync import arrive
from ...device.warpgroup import load_matrix, store_matrix
from .schedule import GROUP, ROWS, STAGING_BARRIER, Bar, Buffers, C, D


class StateRole:
    """Moves and steps of a consumer warpgroup."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan
        self.stages = plan["w"].stages
        self.buffers = Buffers(config, plan)

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

    def free_staging(self, bars, group, it):
        """Wait until what was staged where chunk `it` goes has been read."""
        free = self.buffers.bar(bars, Bar.FREE, group, it)
        cute.arch.mbarrier_wait(free, self.buffers.parity(it) ^ 1)

    def publish(self, bars, group, it):
        """Tell the storer that chunk `it` is staged."""
        cute.arch.fence_view_async_shared()
        arrive(self.config, self.buffers.bar(bars, Bar.STAGED, group, it))

    def stage(self, name, tiled, values, base, group, it, tid):
        """bf16 registers of S^T [v, k], or of [v, token], to a tile [v, k] or [token, v]."""
        tile = self.plan[name]
        transposed = tile.shape == (C, ROWS)
        shape = tiled.partition_shape_C((ROWS, C if transposed else D))
        values = cute.make_tensor(values.iterator, cute.make_layout(shape))
        to = tile.view(base, self.buffers.index(group, it))
        store_matrix(tiled, tid, values, to, transposed=transposed)


def rounded(acc):
    """An accumulator's values in bf16."""
    values = cute.make_rmem_tensor(acc.shape, BFloat16)
    values.store(acc.load().to(BFloat16))
    return values
