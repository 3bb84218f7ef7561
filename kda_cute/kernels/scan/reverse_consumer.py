"""A consumer warpgroup of the reverse scan: 64 columns v of dS and of dv."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device.sync import arrive
from ...device.warpgroup import (
    accumulator,
    gemm,
    operand_a,
    operand_b,
    rounded,
    rounded_a,
    tiled_mma,
)
from .schedule import GROUP, ROWS, Bar, C, D, Gmem, ReverseCopies, Walk
from .state import StateRole


class ReverseConsumerRole(StateRole):
    """Code of the consumer warpgroups."""

    @cute.jit
    def run(self, m: Gmem, walk: Walk, base, bars, copies: ReverseCopies, group: Int32):
        tid = cute.arch.thread_idx()[0] % GROUP
        # do^T lies in shared memory, and dS^T and dv^T in registers.
        do_by_tokens, do_by_keys = (tiled_mma("MN", "MN", n) for n in (C, D))
        by_tokens = tiled_mma("K", "K", C, a_in_registers=True)
        by_keys = tiled_mma("K", "MN", D, a_in_registers=True)
        view = lambda name: self.plan[name].staged_view(base, transposed=name != "z")  # noqa: E731
        do = operand_a(do_by_tokens, tid, view("do"))
        p = operand_b(do_by_tokens, tid, view("p"))
        z = operand_b(by_tokens, tid, view("z"))
        qd = operand_b(do_by_keys, tid, view("qd"))
        kd = operand_b(by_keys, tid, view("kd"))
        dS, dv = accumulator(by_keys, ROWS, D), accumulator(by_tokens, ROWS, C)
        if const_expr(self.config.initial != "none"):
            self.load_state(m.initial[walk.n, walk.h, None, None], dS, walk, group, tid)
        else:
            dS.fill(0.0)
        if walk.chunks > 0 and walk.tail < C:  # the walk starts with the last chunk
            cute.arch.mbarrier_wait(bars + Bar.FULL * self.stages, 0)
            self.zero_tail("do", walk, base, group, tid)
            cute.arch.fence_view_async_shared()
            self.staging_barrier(group)
        for it in cutlass.range(walk.chunks, unroll=1):
            s = it % self.stages
            do_s = do[None, None, None, s * self.config.groups + group]
            cute.arch.mbarrier_wait(bars + Bar.FULL * self.stages + s, it // self.stages & 1)
            # Nothing is in flight; said here, ptxas knows it of dS when the decay runs under MMAs.
            warpgroup.wait_group(0)
            # dv^T = do^T p + dS^T z^T
            gemm(do_by_tokens, dv, do_s, p[None, None, None, s])
            state = rounded_a(by_tokens, dS, ROWS, D)
            self.stage("dstates", by_keys, state, base, group, tid)
            gemm(by_tokens, dv, state, z[None, None, None, s], accumulate=True)
            self.publish(m, walk, base, copies, group, tid, it)
            # dS^T <- diag(eg) dS^T + do^T qd
            self.decay(dS, base, s, tid)
            gemm(do_by_keys, dS, do_s, qd[None, None, None, s], accumulate=True)
            # dv^T += diag(qk) do^T
            columns = self.load_columns("do", by_tokens, base, s, group, tid)
            wide = cute.make_rmem_tensor(dv.shape, Float32)
            wide.store(columns.load().to(Float32))
            warpgroup.wait_group(1)
            self.add_diagonal(dv, wide, base, s, tid)
            # dS^T -= dv^T kd
            minus = cute.make_rmem_tensor(by_keys.partition_shape_A((ROWS, C)), BFloat16)
            cute.make_tensor(minus.iterator, dv.layout).store((-dv.load()).to(BFloat16))
            gemm(by_keys, dS, minus, kd[None, None, None, s], accumulate=True)
            self.free_staging(group, tid)
            self.stage("dv", by_tokens, rounded(dv), base, group, tid)
            warpgroup.wait_group(0)
            arrive(self.config, bars + Bar.EMPTY * self.stages + s)
        if const_expr(self.config.final):
            self.store_state(m.final[walk.n, walk.h, None, None], dS, walk, group, tid)
        if walk.chunks > 0:
            self.publish_last(m, walk, base, copies, group, tid)

    # ------------------------------------------------------------ staging
    @cute.jit
    def publish(
        self, m: Gmem, walk: Walk, base, copies: ReverseCopies, group: Int32, tid: Int32, it: Int32
    ):
        """Send what is staged: dS of the state leaving the chunk, and dv of the chunk before it in
        the walk.
        """
        cute.arch.fence_view_async_shared()
        self.staging_barrier(group)
        if (it == 1) & (walk.tail < C):
            self.copy_rows("dv", m.out, walk, base, group, tid)
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            self.send("dstates", copies.dstates, walk, base, group, walk.backward(it))
            if (it > 1) | ((it == 1) & (walk.tail == C)):
                self.send_tokens("dv", copies.dv, walk, base, group, walk.backward(it - 1))
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def publish_last(
        self, m: Gmem, walk: Walk, base, copies: ReverseCopies, group: Int32, tid: Int32
    ):
        """Send dv of the sequence's first chunk, by rows where it is the last one too and not full."""
        cute.arch.fence_view_async_shared()
        self.staging_barrier(group)
        if (walk.chunks == 1) & (walk.tail < C):
            self.copy_rows("dv", m.out, walk, base, group, tid)
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            if (walk.chunks > 1) | (walk.tail == C):
                self.send_tokens("dv", copies.dv, walk, base, group, Int32(0))
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
