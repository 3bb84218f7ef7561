"""A consumer warpgroup: 64 columns v of the state and of the outputs, S^T in registers.

A thread's accumulators [64 v, n]: row 16 warp + lane // 4 + 8 half, column 8 n + 2 (lane % 4) + i,
at index [(i, half, n), 0, 0].
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import tma
from ...device.warpgroup import (
    accumulator,
    gemm,
    load_matrix,
    operand_b,
    rounded_a,
    store_matrix,
    tiled_mma,
)
from .schedule import GROUP, ROWS, STAGING_BARRIER, Bar, C, Copies, D, Gmem, Walk, arrive


class ConsumerRole:
    """Code of the consumer warpgroups."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan
        self.stages = plan["w"].stages

    @cute.jit
    def run(self, m: Gmem, walk: Walk, base, bars, copies: Copies, group: Int32):
        tid = cute.arch.thread_idx()[0] % GROUP
        by_tokens = tiled_mma("K", "K", C, a_in_registers=True)
        by_keys = tiled_mma("K", "MN", D, a_in_registers=True)
        w, qd, mqk = (
            operand_b(by_tokens, tid, self.plan[name].staged_view(base))
            for name in ("w", "qd", "mqk")
        )
        kr = operand_b(by_keys, tid, self.plan["kr"].staged_view(base, transposed=True))
        S, o = accumulator(by_keys, ROWS, D), accumulator(by_tokens, ROWS, C)
        if const_expr(self.config.initial != "none"):
            self.load_state(m.initial[walk.n, walk.h, None, None], S, walk, group, tid)
        else:
            S.fill(0.0)
        state = rounded_a(by_tokens, S, ROWS, D)
        self.stage_state(by_keys, state, base, group, tid)
        for it in cutlass.range(walk.chunks, unroll=1):
            s = it % self.stages
            cute.arch.mbarrier_wait(bars + Bar.FULL * self.stages + s, it // self.stages & 1)
            # Nothing is in flight; said here, ptxas knows it of S when the decay runs under MMAs.
            warpgroup.wait_group(0)
            # U^T = u^T - S^T w^T; o^T = S^T qd^T
            U = accumulator(by_tokens, ROWS, C)
            gemm(by_tokens, U, state, w[None, None, None, s])
            gemm(by_tokens, o, state, qd[None, None, None, s])
            self.publish(walk, base, copies, group, tid, it)
            self.decay(S, base, s, tid)
            u = self.load_u(by_tokens, base, s, group, tid)
            warpgroup.wait_group(1)
            U.store(u.load().to(Float32) - U.load())
            # S^T += U^T kr
            rounded_U = rounded_a(by_tokens, U, ROWS, C)
            gemm(by_keys, S, rounded_U, kr[None, None, None, s], accumulate=True)
            warpgroup.wait_group(1)
            # o^T += diag(qk) U^T + U^T mqk^T
            self.add_diagonal(o, U, base, s, tid)
            gemm(by_tokens, o, rounded_U, mqk[None, None, None, s], accumulate=True)
            warpgroup.wait_group(1)
            state.store(rounded_a(by_tokens, S, ROWS, D).load())
            self.free_staging(group, tid)
            self.stage_state(by_keys, state, base, group, tid)
            warpgroup.wait_group(0)
            arrive(self.config, bars + Bar.EMPTY * self.stages + s)
            self.stage_outputs(by_tokens, o, base, group, tid)
        if const_expr(self.config.final):
            self.store_state(m.final[walk.n, walk.h, None, None], S, walk, group, tid)
        if walk.chunks > 0:
            self.publish_last(m, walk, base, copies, group, tid)

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

    def add_diagonal(self, o, U, base, s, tid):
        """o^T[v, i] += qk[i] U^T[v, i]."""
        for n, qk in self.column_pairs("qk", base, s, tid, C):
            for i in range(4):
                o[4 * n + i] = o[4 * n + i] + qk[i % 2] * U[4 * n + i]

    def load_u(self, tiled, base, s, group, tid):
        """u^T in an accumulator's order, bf16."""
        u = cute.make_rmem_tensor(tiled.partition_shape_C((ROWS, C)), BFloat16)
        tile = self.plan["u"].view(base, s * self.config.groups + group)
        load_matrix(tiled, tid, u, tile, transposed=True)
        return u

    # ------------------------------------------------------------ staging
    def staging_barrier(self, group):
        cute.arch.barrier(barrier_id=STAGING_BARRIER + group, number_of_threads=GROUP)

    @cute.jit
    def free_staging(self, group: Int32, tid: Int32):
        """Wait until the copies out of this warpgroup's staging tiles have read them."""
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.staging_barrier(group)

    def stage_state(self, tiled, state, base, group, tid):
        """The rounded state on entering a chunk, [v, k]."""
        if self.config.save:
            shape = tiled.partition_shape_C((ROWS, D))
            values = cute.make_tensor(state.iterator, cute.make_layout(shape))
            store_matrix(tiled, tid, values, self.plan["states"].view(base, group))

    def stage_outputs(self, tiled, o, base, group, tid):
        """o of a chunk, [token, v]."""
        values = cute.make_rmem_tensor(o.shape, BFloat16)
        values.store(o.load().to(BFloat16))
        store_matrix(tiled, tid, values, self.plan["o"].view(base, group), transposed=True)

    @cute.jit
    def publish(self, walk: Walk, base, copies: Copies, group: Int32, tid: Int32, it: Int32):
        """Send what is staged: the state on entering chunk `it`, o of the one before."""
        cute.arch.fence_view_async_shared()
        self.staging_barrier(group)
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            if const_expr(self.config.save):
                self.send_state(walk, base, copies.states, group, walk.chunk(it))
            if it > 0:
                self.send_outputs(walk, base, copies.o, group, walk.chunk(it - 1))
            cute.arch.cp_async_bulk_commit_group()

    def send_state(self, walk, base, copy, group, chunk):
        block = cute.local_tile(
            copy.tensor[None, None, walk.h, walk.slot + chunk], (ROWS, D), (walk.block + group, 0)
        )
        tma.store(copy, self.plan["states"].view(base, group), block)

    def send_outputs(self, walk, base, copy, group, chunk):
        rows = cute.domain_offset(
            (walk.token + C * chunk, 0), copy.tensor[None, None, walk.h, walk.batch]
        )
        block = cute.local_tile(rows, (C, ROWS), (0, walk.block + group))
        tma.store(copy, self.plan["o"].view(base, group), block)

    @cute.jit
    def publish_last(self, m: Gmem, walk: Walk, base, copies: Copies, group: Int32, tid: Int32):
        """Send o of the last chunk; by rows where the chunk is not full, for what follows belongs
        to another sequence.
        """
        last = walk.chunk(walk.chunks - 1)
        cute.arch.fence_view_async_shared()
        self.staging_barrier(group)
        if walk.tail < C:
            self.copy_rows(m, walk, base, group, tid, walk.token + C * last)
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            if walk.tail == C:
                self.send_outputs(walk, base, copies.o, group, last)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def copy_rows(self, m: Gmem, walk: Walk, base, group: Int32, tid: Int32, token: Int32):
        """The first `tail` rows of the staged o, 16 bytes at a time."""
        tile = self.plan["o"].view(base, group)
        pieces = ROWS // 8
        for i in cutlass.range(tid, walk.tail * pieces, GROUP, unroll=1):
            row, piece = i // pieces, i % pieces
            line = m.o[Int64(walk.batch), Int64(token + row), walk.h, None]
            values = cute.make_rmem_tensor((8,), BFloat16)
            cute.autovec_copy(cute.local_tile(tile[row, None], (8,), (piece,)), values)
            to = (walk.block + group) * pieces + piece
            cute.autovec_copy(values, cute.local_tile(line, (8,), (to,)))
