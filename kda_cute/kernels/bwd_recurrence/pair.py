"""Pair warps: the small matrices dM, dL and kd ki^T, dqd and dkr, and the gradients of beta and of
the chunk's decay.

Warp w owns columns k = 32 w .. of dqd, dkr and dgT; dM, dL and kd ki^T are made by one warp each.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from ...device.matrix_rows import LaneRows, MatrixRows
from ...device.sync import arrive
from ...device.warp_mma import (
    block_a,
    block_b,
    column_sums,
    load_pair,
    pairs_along_columns,
    pairs_along_rows,
    quad_sum,
    summed_column,
)
from .operands import N, Operands
from .schedule import (
    DL_WARP,
    DM_WARP,
    GRAM_WARP,
    K_BLOCKS,
    PAIR,
    WARPS,
    Bar,
    C,
    Gmem,
    Slot,
    Walk,
)


class PairRole(Operands):
    """Code of the pair warps."""

    @cute.jit
    def run(self, m: Gmem, walk: Walk, base, bars, warp: Int32):
        lane = cute.arch.lane_idx()
        for it in cutlass.range(walk.tiles, unroll=1):
            t = walk.tiles - 1 - it
            rows = walk.tail if it == 0 else Int32(C)
            slot = Slot(it % self.stages, it // self.stages & 1, it & 1, it // 2 & 1)
            cute.arch.mbarrier_wait(bars + Bar.FULL + slot.stage, slot.turn)
            F = self.mma.accumulators(1, 2)
            if warp == GRAM_WARP:
                self.gram(F, base, slot, lane)
                arrive(self.config, bars + Bar.SMALL_FULL + slot.small)
            cute.arch.mbarrier_wait(bars + Bar.STATES_FULL, it & 1)
            dqd = self.do_states(base, slot, warp, lane)
            arrive(self.config, bars + Bar.STATES_EMPTY)
            cute.arch.mbarrier_wait(bars + Bar.DVC_FULL, it & 1)
            self.store_dv(m, base, walk.token + t * C, walk.h, rows)
            cute.arch.mbarrier_wait(bars + Bar.U_FULL, it & 1)
            if warp == DM_WARP:
                self.make_dM(base, slot, lane)
                arrive(self.config, bars + Bar.SMALL_FULL + slot.small)
            if warp == DL_WARP:
                self.make_dL(base, slot, lane)
                arrive(self.config, bars + Bar.SMALL_FULL + slot.small)
            dkr = self.u_dS(base, warp, lane)
            arrive(self.config, bars + Bar.HAND_EMPTY)
            tile = Int64(walk.tile + t)
            cute.arch.mbarrier_wait(bars + Bar.SMALL_FULL + slot.small, slot.lap)
            if warp == GRAM_WARP:
                self.store_dbeta(m.dbeta, F, base, slot, walk.h, tile, lane)
            self.mix(dqd, base, slot, warp, lane)
            cute.arch.mbarrier_wait(bars + Bar.KEY_DONE + slot.small, slot.lap)
            self.store_dgT(m.dgT, dkr, base, slot, walk.h, tile, warp, lane)
            cute.arch.mbarrier_wait(bars + Bar.UPDATED + slot.stage, slot.turn)
            self.stage_output("dkr", dkr, base, slot, warp, lane)
            self.stage_output("dqd", dqd, base, slot, warp, lane)
            self.arrive_stored(bars, slot)

    # ------------------------------------------------------------ small matrices
    @cute.jit
    def gram(self, F, base, slot: Slot, lane: Int32):
        """F = kd ki^T."""
        kd, ki = (
            pairs_along_columns(self.plan[name].view(base, slot.stage), lane)
            for name in ("kd", "ki")
        )
        for kb in cutlass.range(K_BLOCKS, unroll=self.config.unroll):
            self.gram_step(F, kd, ki, kb)

    def gram_step(self, F, kd, ki, kb):
        a = self.mma.operand_a(block_a(kd, 0, 2 * kb))
        for n in range(2):
            self.mma.step(F, 0, n, a, self.mma.operand_b(block_b(ki, n, 2 * kb, False)))

    def make_dM(self, base, slot, lane):
        """dM = tril(do U^T): the strictly lower part for products, the diagonal apart."""
        acc = self.times_u(self.do_operand(base, slot, lane), base, lane)
        self.store_dM(acc, base, slot, lane)

    def make_dL(self, base, slot, lane):
        """dL = -tril(dvc U^T, -1), and b dL."""
        acc = self.times_u(self.handed_operand("dvc", base, lane), base, lane)
        self.store_dL(acc, base, slot, lane)

    @cute.jit
    def times_u(self, a, base, lane: Int32):
        """A U^T."""
        acc = self.mma.accumulators(1, 2)
        u = self.u_columns(base, lane)
        for kb in cutlass.range(K_BLOCKS, unroll=self.config.unroll):
            self.times_u_step(acc, a, u, kb)
        return acc

    def times_u_step(self, acc, a, u, kb):
        left = a(kb)
        for n, right in enumerate(u(kb)):
            self.mma.step(acc, 0, n, left, right)

    def u_columns(self, base, lane):
        """kb -> two B operands: k = v 16 kb .., n = tokens, of U."""
        if self.tf32:
            view = pairs_along_columns(self.plan["U"].view(base), lane)
            return lambda kb: [self.mma.exact_b(block_b(view, n, 2 * kb, False)) for n in range(2)]
        rows = MatrixRows(self.plan["U"], base, 0, *LaneRows(lane).columns_first())
        return lambda kb: self.mma.b_pair_from_ldmatrix(rows.load(chunk_step=2 * kb))

    @cute.jit
    def store_dM(self, acc, base, slot: Slot, lane: Int32):
        sM, sDiagonal = (self.plan[n].view(base, slot.small) for n in ("dM", "dM_diag"))
        for n in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    i, j = lane // 4 + 8 * half, 8 * n + 2 * (lane % 4) + e
                    x = acc[(e, half), 0, n]
                    sM[i, j] = x if j < i else Float32(0)
                    if i == j:
                        sDiagonal[0, i] = x

    @cute.jit
    def store_dL(self, acc, base, slot: Slot, lane: Int32):
        sL, sLb = (self.plan[n].view(base, slot.small) for n in ("dL", "dLb"))
        b = self.plan["beta"].view(base, slot.stage)
        for n in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    i, j = lane // 4 + 8 * half, 8 * n + 2 * (lane % 4) + e
                    x = -acc[(e, half), 0, n] if j < i else Float32(0)
                    sL[i, j] = x
                    sLb[i, j] = x * b[0, i]

    # ------------------------------------------------------------ products over v
    @cute.jit
    def do_states(self, base, slot: Slot, warp: Int32, lane: Int32):
        """dqd = do S^T, so far."""
        dqd = self.mma.accumulators(1, N)
        do, states = (
            self.do_operand(base, slot, lane),
            self.state_columns("states", base, warp, lane),
        )
        for kb in cutlass.range(K_BLOCKS, unroll=self.config.unroll):
            self.do_states_step(dqd, do, states, kb)
        return dqd

    def do_states_step(self, dqd, do, states, kb):
        a = do(kb)
        for j in range(N // 2):
            for n, b in enumerate(
                self.mma.b_pair_from_ldmatrix(states.load(16 * kb, 2 * j, transpose=True))
            ):
                self.mma.step(dqd, 0, 2 * j + n, a, b)

    @cute.jit
    def u_dS(self, base, warp: Int32, lane: Int32):
        """dkr = U dS^T."""
        dkr = self.mma.accumulators(1, N)
        u, dS = self.handed_operand("U", base, lane), self.dS_columns(base, warp, lane)
        for kb in cutlass.range(K_BLOCKS, unroll=self.config.unroll):
            self.u_dS_step(dkr, u, dS, kb)
        return dkr

    def u_dS_step(self, dkr, u, dS, kb):
        a = u(kb)
        for n, b in enumerate(dS(kb)):
            self.mma.step(dkr, 0, n, a, b)

    def dS_columns(self, base, warp, lane):
        """kb -> N B operands: k = v 16 kb .., n = columns of dS^T."""
        if self.tf32:
            view = pairs_along_rows(self.plan["dS"].view(base), lane)
            return lambda kb: [
                self.mma.exact_b(block_b(view, N * warp + n, 2 * kb, True)) for n in range(N)
            ]
        rows = self.state_columns("dS", base, warp, lane)

        def load(kb, j):
            return self.mma.b_pair_from_ldmatrix(rows.load(16 * kb, 2 * j, transpose=True))

        return lambda kb: [b for j in range(N // 2) for b in load(kb, j)]

    def mix(self, dqd, base, slot, warp, lane):
        """dqd += dM ki; the diagonal of dM in fp32."""
        p, mma = self.plan, self.mma
        a = mma.operand_a(block_a(pairs_along_columns(p["dM"].view(base, slot.small), lane), 0, 0))
        rows, columns = (
            view(p["ki"].view(base, slot.stage), lane)
            for view in (pairs_along_rows, pairs_along_columns)
        )
        for n in range(N):
            for b in mma.operand_b_parts(block_b(rows, N * warp + n, 0, True)):
                mma.step(dqd, 0, n, a, b)
        diagonal = p["dM_diag"].view(base, slot.small)
        for half in range(2):
            mii = diagonal[0, lane // 4 + 8 * half]
            for n in range(N):
                ki = load_pair(columns, half, N * warp + n)
                for e in range(2):
                    dqd[(e, half), 0, n] = dqd[(e, half), 0, n] + mii * ki[e]

    # ------------------------------------------------------------ outputs
    @cute.jit
    def store_dv(self, m: Gmem, base, token: Int32, h: Int32, rows: Int32):
        """dv rows of the chunk that belong to the sequence, in 16-byte vectors."""
        tid, _, _ = cute.arch.thread_idx()
        for j in cutlass.range_constexpr(2):
            i = tid - 32 * PAIR + 32 * WARPS * j
            row, col = i // 16, i % 16
            if row < rows:
                src = cute.local_tile(self.plan["dv"].view(base), (1, 8), (row, col))[0, None]
                values = cute.make_rmem_tensor((8,), BFloat16)
                cute.autovec_copy(src, values)
                cute.autovec_copy(
                    values, cute.local_tile(m.dv[Int64(token + row), h, None], (8,), (col,))
                )

    @cute.jit
    def store_dbeta(
        self, mDbeta: cute.Tensor, F, base, slot: Slot, h: Int32, tile: Int64, lane: Int32
    ):
        """dbeta = rowsum_v(dvc (v - kd S)), the sum of the value warps' parts, + rowsum(dL F); one
        warp.
        """
        dL = pairs_along_columns(self.plan["dL"].view(base, slot.small), lane)
        part = self.plan["dbeta_part"].view(base, slot.small)
        over_v = Float32(0)
        for w in cutlass.range_constexpr(WARPS):
            over_v = over_v + part[w, lane % C]
        for half in cutlass.range_constexpr(2):
            total = Float32(0)
            for n in cutlass.range_constexpr(2):
                pair = load_pair(dL, half, n)
                total = total + pair[0] * F[(0, half), 0, n] + pair[1] * F[(1, half), 0, n]
            row = lane // 4 + 8 * half
            total = quad_sum(total) + cute.arch.shuffle_sync(over_v, offset=row)
            if lane % 4 == 0:
                mDbeta[h, tile, row] = total

    @cute.jit
    def store_dgT(
        self,
        mDgT: cute.Tensor,
        dkr,
        base,
        slot: Slot,
        h: Int32,
        tile: Int64,
        warp: Int32,
        lane: Int32,
    ):
        """dgT = exp(gT) rowsum_v(dS S) + colsum(dkr kr)."""
        eg, over_v = (
            self.plan["g_total"].view(base, slot.stage),
            self.plan["dgT_part"].view(base, slot.small),
        )
        over_tokens = self.columns_times_kr(dkr, base, slot, warp, lane)
        if (lane & 4) == 0:
            for j in cutlass.range_constexpr(N // 2):
                k = 8 * N * warp + 16 * j + summed_column(lane)
                mDgT[h, tile, k] = eg[0, k] * over_v[0, k] + over_tokens[j]

    def columns_times_kr(self, dkr, base, slot, warp, lane):
        """colsum(dkr kr): one sum a lane and pair of column tiles."""
        kr = pairs_along_columns(self.plan["kr"].view(base, slot.stage), lane)
        sums = [Float32(0)] * (2 * N)
        for half in range(2):
            for n in range(N):
                pair = load_pair(kr, half, N * warp + n)
                for e in range(2):
                    sums[e + 2 * n] = sums[e + 2 * n] + dkr[(e, half), 0, n] * pair[e]
        return [column_sums(*sums[4 * j : 4 * j + 4], lane) for j in range(N // 2)]
