"""A consumer warpgroup of the reverse scan: 64 columns v of dS and of dU."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device.sync import arrive
from ...device.warpgroup import accumulator, gemm, operand_a, operand_b, rounded_a, tiled_mma
from .schedule import GROUP, ROWS, Bar, C, D, Gmem, Walk
from .state import StateRole, rounded


class ReverseConsumerRole(StateRole):
    """Code of the consumer warpgroups."""

    @cute.jit
    def run(self, m: Gmem, walk: Walk, base, bars, group: Int32):
        tid = cute.arch.thread_idx()[0] % GROUP
        # do^T lies in shared memory, and dS^T and dU^T in registers.
        do_by_tokens, do_by_keys = (tiled_mma("MN", "MN", n) for n in (C, D))
        by_tokens = tiled_mma("K", "K", C, a_in_registers=True)
        by_keys = tiled_mma("K", "MN", D, a_in_registers=True)
        view = lambda name: self.plan[name].staged_view(base, transposed=name != "kr")  # noqa: E731
        do = operand_a(do_by_tokens, tid, view("do"))
        mqk = operand_b(do_by_tokens, tid, view("mqk"))
        kr = operand_b(by_tokens, tid, view("kr"))
        qd = operand_b(do_by_keys, tid, view("qd"))
        w = operand_b(by_keys, tid, view("w"))
        dS, dU = accumulator(by_keys, ROWS, D), accumulator(by_tokens, ROWS, C)
        if const_expr(self.config.initial != "none"):
            self.load_state(m.initial[walk.n, walk.h, None, None], dS, walk, group, tid)
        else:
            dS.fill(0.0)
        if walk.chunks > 0 and walk.tail < C:
            self.zero_tail(walk, base, bars, group, tid)
        for it in cutlass.range(walk.chunks, unroll=1):
            s = it % self.stages
            do_s = do[None, None, None, s * self.config.groups + group]
            cute.arch.mbarrier_wait(bars + Bar.FULL * self.stages + s, it // self.stages & 1)
            # Nothing is in flight; said here, ptxas knows it of dS when the decay runs under MMAs.
            warpgroup.wait_group(0)
            # dU^T = do^T mqk + dS^T kr^T
            gemm(do_by_tokens, dU, do_s, mqk[None, None, None, s])
            state = rounded_a(by_tokens, dS, ROWS, D)
            gemm(by_tokens, dU, state, kr[None, None, None, s], accumulate=True)
            # dS^T <- diag(eg) dS^T + do^T qd
            self.decay(dS, base, s, tid)
            gemm(do_by_keys, dS, do_s, qd[None, None, None, s], accumulate=True)
            # dU^T += diag(qk) do^T
            columns = self.load_columns("do", by_tokens, base, s, group, tid)
            wide = cute.make_rmem_tensor(dU.shape, Float32)
            wide.store(columns.load().to(Float32))
            warpgroup.wait_group(1)
            self.add_diagonal(dU, wide, base, s, tid)
            # dS^T -= dU^T w
            minus = cute.make_rmem_tensor(by_keys.partition_shape_A((ROWS, C)), BFloat16)
            cute.make_tensor(minus.iterator, dU.layout).store((-dU.load()).to(BFloat16))
            gemm(by_keys, dS, minus, w[None, None, None, s], accumulate=True)
            self.free_staging(bars, group, it)
            self.stage("dstates", by_keys, state, base, group, it, tid)
            self.stage("dU", by_tokens, rounded(dU), base, group, it, tid)
            self.publish(bars, group, it)
            warpgroup.wait_group(0)
            arrive(self.config, bars + Bar.EMPTY * self.stages + s)
        if const_expr(self.config.final):
            self.store_state(m.final[walk.n, walk.h, None, None], dS, walk, group, tid)

    @cute.jit
    def zero_tail(self, walk: Walk, base, bars, group: Int32, tid: Int32):
        """Zero the rows of do past the sequence's end, in the first stage: they are another
        sequence's, or anything, and 0 times NaN is NaN.
        """
        cute.arch.mbarrier_wait(bars + Bar.FULL * self.stages, 0)
        tile = self.plan["do"].view(base, group)
        pieces = ROWS // 8
        zeros = cute.make_rmem_tensor((8,), BFloat16)
        zeros.fill(0.0)
        for i in cutlass.range(walk.tail * pieces + tid, C * pieces, GROUP, unroll=1):
            row, piece = i // pieces, i % pieces
            cute.autovec_copy(zeros, cute.local_tile(tile[row, None], (8,), (piece,)))
        cute.arch.fence_view_async_shared()
        self.staging_barrier(group)
