"""A consumer warpgroup of the forward scan: 64 columns v of the state and of the outputs."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device.sync import arrive
from ...device.warpgroup import accumulator, gemm, operand_b, rounded_a, tiled_mma
from .schedule import GROUP, ROWS, Bar, C, D, Gmem, Walk
from .state import StateRole, rounded


class ConsumerRole(StateRole):
    """Code of the consumer warpgroups."""

    @cute.jit
    def run(self, m: Gmem, walk: Walk, base, bars, group: Int32):
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
        rounded_U = cute.make_rmem_tensor(by_tokens.partition_shape_A((ROWS, C)), BFloat16)
        o.fill(0.0)
        outputs = rounded(o)
        for it in cutlass.range(walk.chunks, unroll=1):
            s = it % self.stages
            cute.arch.mbarrier_wait(bars + Bar.FULL * self.stages + s, it // self.stages & 1)
            # Nothing is in flight; said here, ptxas knows it of S when the decay runs under MMAs.
            warpgroup.wait_group(0)
            # U^T = u^T - S^T w^T; o^T = S^T qd^T
            U = accumulator(by_tokens, ROWS, C)
            gemm(by_tokens, U, state, w[None, None, None, s])
            gemm(by_tokens, o, state, qd[None, None, None, s])
            self.free_staging(bars, group, it)
            self.stage("o", by_tokens, outputs, base, group, it, tid)
            self.decay(S, base, s, tid)
            u = self.load_columns("u", by_tokens, base, s, group, tid)
            warpgroup.wait_group(1)
            U.store(u.load().to(Float32) - U.load())
            # S^T += U^T kr
            rounded_U.store(rounded_a(by_tokens, U, ROWS, C).load())
            gemm(by_keys, S, rounded_U, kr[None, None, None, s], accumulate=True)
            if const_expr(self.config.save):
                self.stage("states", by_keys, state, base, group, it, tid)
                self.stage("U", by_tokens, rounded_U, base, group, it, tid)
            self.publish(bars, group, it)
            warpgroup.wait_group(1)
            # o^T += diag(qk) U^T + U^T mqk^T
            self.add_diagonal(o, U, base, s, tid)
            gemm(by_tokens, o, rounded_U, mqk[None, None, None, s], accumulate=True)
            warpgroup.wait_group(1)
            state.store(rounded_a(by_tokens, S, ROWS, D).load())
            warpgroup.wait_group(0)
            arrive(self.config, bars + Bar.EMPTY * self.stages + s)
            outputs.store(rounded(o).load())
        if const_expr(self.config.final):
            self.store_state(m.final[walk.n, walk.h, None, None], S, walk, group, tid)
        if walk.chunks > 0:
            self.free_staging(bars, group, walk.chunks)
            self.stage("o", by_tokens, outputs, base, group, walk.chunks, tid)
            self.publish_last(m, walk, base, bars, group, tid)

    # ------------------------------------------------------------ staging
    @cute.jit
    def publish_last(self, m: Gmem, walk: Walk, base, bars, group: Int32, tid: Int32):
        """o of the last chunk: by the storer, or by rows where the chunk is not full."""
        if walk.tail < C:
            self.staging_barrier(group)
            self.copy_rows(m, walk, base, group, tid, walk.token + C * (walk.chunks - 1))
        else:
            self.publish(bars, group, walk.chunks)

    @cute.jit
    def copy_rows(self, m: Gmem, walk: Walk, base, group: Int32, tid: Int32, token: Int32):
        """The first `tail` rows of the staged o, 16 bytes at a time."""
        tile = self.plan["o"].view(base, self.buffers.index(group, walk.chunks))
        pieces = ROWS // 8
        for i in cutlass.range(tid, walk.tail * pieces, GROUP, unroll=1):
            row, piece = i // pieces, i % pieces
            line = m.o[Int64(walk.batch), Int64(token + row), walk.h, None]
            values = cute.make_rmem_tensor((8,), BFloat16)
            cute.autovec_copy(cute.local_tile(tile[row, None], (8,), (piece,)), values)
            to = (walk.block + group) * pieces + piece
            cute.autovec_copy(values, cute.local_tile(line, (8,), (to,)))
