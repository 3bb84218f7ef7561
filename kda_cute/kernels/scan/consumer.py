"""A consumer warpgroup of the forward scan: 64 columns v of the state and of the outputs."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device.sync import arrive
from ...device.warpgroup import accumulator, gemm, operand_b, rounded, rounded_a, tiled_mma
from .schedule import GROUP, ROWS, Bar, C, Copies, D, Gmem, Walk
from .state import StateRole


class ConsumerRole(StateRole):
    """Code of the consumer warpgroups."""

    @cute.jit
    def run(self, m: Gmem, walk: Walk, base, bars, copies: Copies, group: Int32):
        tid = cute.arch.thread_idx()[0] % GROUP
        by_tokens = tiled_mma("K", "K", C, a_in_registers=True)
        by_keys = tiled_mma("K", "MN", D, a_in_registers=True)
        kd, qd, p = (
            operand_b(by_tokens, tid, self.plan[name].staged_view(base))
            for name in ("kd", "qd", "p")
        )
        z = operand_b(by_keys, tid, self.plan["z"].staged_view(base, transposed=True))
        S, o = accumulator(by_keys, ROWS, D), accumulator(by_tokens, ROWS, C)
        if const_expr(self.config.initial != "none"):
            self.load_state(m.initial[walk.n, walk.h, None, None], S, walk, group, tid)
        else:
            S.fill(0.0)
        state = rounded_a(by_tokens, S, ROWS, D)
        rounded_X = cute.make_rmem_tensor(by_tokens.partition_shape_A((ROWS, C)), BFloat16)
        rounded_X.fill(0.0)
        self.stage_state(by_keys, state, base, group, tid)
        for it in cutlass.range(walk.chunks, unroll=1):
            s = it % self.stages
            cute.arch.mbarrier_wait(bars + Bar.FULL * self.stages + s, it // self.stages & 1)
            if const_expr(self.config.varlen):
                if (it == walk.chunks - 1) & (walk.tail < C):
                    self.zero_tail("v", walk, base, s * self.config.groups + group, tid)
                    self.staging_barrier(group)
            # Nothing is in flight; said here, ptxas knows it of S when the decay runs under MMAs.
            warpgroup.wait_group(0)
            # X^T = v^T - S^T kd^T; o^T = S^T qd^T
            X = accumulator(by_tokens, ROWS, C)
            gemm(by_tokens, X, state, kd[None, None, None, s])
            gemm(by_tokens, o, state, qd[None, None, None, s])
            self.stage_X(by_tokens, rounded_X, base, group, tid)
            self.publish(walk, base, copies, group, tid, it)
            self.decay(S, base, s, tid)
            v = self.load_columns("v", by_tokens, base, s, group, tid)
            warpgroup.wait_group(1)
            X.store(v.load().to(Float32) - X.load())
            # S^T += X^T z
            rounded_X.store(rounded_a(by_tokens, X, ROWS, C).load())
            gemm(by_keys, S, rounded_X, z[None, None, None, s], accumulate=True)
            warpgroup.wait_group(1)
            # o^T += diag(qk) X^T + X^T p^T
            self.add_diagonal(o, X, base, s, tid)
            gemm(by_tokens, o, rounded_X, p[None, None, None, s], accumulate=True)
            warpgroup.wait_group(1)
            state.store(rounded_a(by_tokens, S, ROWS, D).load())
            self.free_staging(group, tid)
            self.stage_state(by_keys, state, base, group, tid)
            warpgroup.wait_group(0)
            arrive(self.config, bars + Bar.EMPTY * self.stages + s)
            self.stage("o", by_tokens, rounded(o), base, group, tid)
        if const_expr(self.config.final):
            self.store_state(m.final[walk.n, walk.h, None, None], S, walk, group, tid)
        if walk.chunks > 0:
            self.stage_X(by_tokens, rounded_X, base, group, tid)
            self.publish_last(m, walk, base, copies, group, tid)

    # ------------------------------------------------------------ staging
    def stage_state(self, tiled, state, base, group, tid):
        """The rounded state on entering a chunk."""
        if self.config.save:
            self.stage("states", tiled, state, base, group, tid)

    def stage_X(self, tiled, rounded_X, base, group, tid):
        """X of the chunk before, while this one's first products run."""
        if self.config.save:
            self.stage("X", tiled, rounded_X, base, group, tid)

    @cute.jit
    def publish(self, walk: Walk, base, copies: Copies, group: Int32, tid: Int32, it: Int32):
        """Send what is staged: the state on entering chunk `it`, o and X of the one before."""
        cute.arch.fence_view_async_shared()
        self.staging_barrier(group)
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            if const_expr(self.config.save):
                self.send("states", copies.states, walk, base, group, it)
            if it > 0:
                self.send_tokens("o", copies.o, walk, base, group, it - 1)
                self.send_X(walk, base, copies.X, group, it - 1)
            cute.arch.cp_async_bulk_commit_group()

    def send_X(self, walk, base, copy, group, chunk):
        if self.config.save:
            self.send("X", copy, walk, base, group, chunk)

    @cute.jit
    def publish_last(self, m: Gmem, walk: Walk, base, copies: Copies, group: Int32, tid: Int32):
        """Send X and o of the last chunk; o by rows where the chunk is not full, for what follows
        belongs to another sequence.
        """
        last = walk.chunks - 1
        cute.arch.fence_view_async_shared()
        self.staging_barrier(group)
        if walk.tail < C:
            self.copy_rows("o", m.out, walk, base, group, tid)
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            self.send_X(walk, base, copies.X, group, last)
            if walk.tail == C:
                self.send_tokens("o", copies.o, walk, base, group, last)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
