"""Value warps: the recurrence itself, dS^T in registers.

Warp w owns 16 M = 32 rows v of dS^T, from 32 w on, and all of K: X[(i, half), m, n] is row 16 (M w
+ m) + 8 half + r, column 8 n + 2c + i (r = lane // 4, c = lane % 4).  All products here contract
over tokens or over K, and an accumulator is an operand of the next product as it stands, so a chunk
needs no exchange between value warps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device.matrix_rows import LaneRows, MatrixRows
from ...device.sync import arrive
from ...device.warp_mma import (
    block_b,
    block_values,
    column_sums,
    load_pair,
    packed_bf16,
    pairs_along_columns,
    pairs_along_rows,
    rounded_tf32,
    store_column_sums,
    store_pair,
    unpack_bf16,
)
from .schedule import K_BLOCKS, WARPS, Bar, D, Gmem, Slot, Walk


class ValueRole:
    """Code of the value warps."""

    def __init__(self, config, plan, mma):
        self.config, self.plan, self.mma, self.tf32 = config, plan, mma, mma.tf32
        self.M = D // 16 // WARPS
        self.stages = plan["kd"].stages

    @cute.jit
    def run(self, m: Gmem, walk: Walk, base, bars, warp: Int32):
        lane = cute.arch.lane_idx()
        X = self.mma.accumulators(self.M, 2 * K_BLOCKS)
        if const_expr(self.config.state_grad != "none"):
            self.load_state_grad(m.dfinal[walk.n, walk.h, None, None], X, warp, lane)
        for it in cutlass.range(walk.tiles, unroll=1):
            slot = Slot(it % self.stages, it // self.stages & 1, it & 1, it // 2 & 1)
            cute.arch.mbarrier_wait(bars + Bar.FULL + slot.stage, slot.turn)
            # The state comes late, for its only buffer was in use: let the key warps start without U.
            cute.arch.mbarrier_wait(bars + Bar.HAND_EMPTY, (it & 1) ^ 1)
            dvc = self.make_dvc(X, base, slot, warp, lane)
            self.publish_dvc(dvc, base, slot, warp, lane)
            arrive(self.config, bars + Bar.DVC_FULL)
            cute.arch.mbarrier_wait(bars + Bar.STATES_FULL, it & 1)
            kdS = self.times_states(base, slot, warp, lane)
            arrive(self.config, bars + Bar.STATES_EMPTY)
            vs = self.minus_kd_states(kdS, base, slot, warp, lane)
            U = self.make_u(vs, base, slot, lane)
            self.publish_columns("U", U, base, warp, lane)
            self.publish_dbeta(dvc, vs, base, slot, warp, lane)
            arrive(self.config, bars + Bar.U_FULL)
            self.update(X, dvc, base, slot, warp, lane)
            arrive(self.config, bars + Bar.UPDATED + slot.stage)
        self.store_state_grad(m.dinitial[walk.n, walk.h, None, None], X, warp, lane)

    # ------------------------------------------------------------ global memory
    def state_pairs(self, state, warp, lane):
        """((half, m, n), this lane's pair of a [V, K] state) for each pair of X."""
        for i in range(self.M):
            for n in range(2 * K_BLOCKS):
                for half in range(2):
                    line = state[16 * (self.M * warp + i) + 8 * half + lane // 4, None]
                    yield (half, i, n), cute.local_tile(line, (2,), (4 * n + lane % 4,))

    def load_state_grad(self, state, X, warp, lane):
        for (half, i, n), src in self.state_pairs(state, warp, lane):
            pair = cute.make_rmem_tensor((2,), state.element_type)
            cute.autovec_copy(src, pair)
            for e in range(2):
                X[(e, half), i, n] = Float32(pair[e])

    def store_state_grad(self, state, X, warp, lane):
        for (half, i, n), dst in self.state_pairs(state, warp, lane):
            pair = cute.make_rmem_tensor((2,), state.element_type)
            for e in range(2):
                pair[e] = X[(e, half), i, n].to(state.element_type)
            cute.autovec_copy(pair, dst)

    # ------------------------------------------------------------ steps
    def betas(self, base, slot, lane):
        """b of this lane's tokens 8 n + 2c + i, at index i + 2 n."""
        line = self.plan["beta"].view(base, slot.stage)
        return [line[0, 8 * n + 2 * (lane % 4) + i] for n in range(2) for i in range(2)]

    def columns(self, name, base, stage, warp, lane):
        """This warp's columns v of a [16, 128] tile, transposed: A operands, or accumulators [v,
        token].
        """
        row, chunk = LaneRows(lane).columns_first()
        return MatrixRows(self.plan[name], base, stage, row, 2 * self.M * warp + chunk)

    def do_operands(self, base, slot, warp, lane):
        """A operands do^T, for each 16 rows of v."""
        do = self.columns("do", base, slot.stage, warp, lane)
        return [
            self.mma.a_from_ldmatrix(do.load(chunk_step=2 * i, transpose=True))
            for i in range(self.M)
        ]

    def make_dvc(self, X, base, slot, warp, lane):
        """dU^T = do^T Mqk + dS^T kr^T, dvc^T = dU^T INV.  Returns the accumulators of dvc^T.

        dS goes to shared memory as it is rounded: a rounded copy kept for later would cost as many
        registers again.
        """
        p, mma = self.plan, self.mma
        kr = pairs_along_columns(p["kr"].view(base, slot.stage), lane)
        do_t = self.do_operands(base, slot, warp, lane)
        mqk, inv = (
            MatrixRows(p[name], base, slot.stage, *LaneRows(lane).rows_first())
            for name in ("mqk", "inv")
        )
        b_mqk = mma.b_pair_from_ldmatrix(mqk.load(transpose=True))
        dU = mma.accumulators(self.M, 2)
        for i in range(self.M):
            for n in range(2):
                mma.step(dU, i, n, do_t[i], b_mqk[n])
        store_dS = self.store_dS(base, warp, lane)
        for kb in range(K_BLOCKS):
            b_kr = [mma.operand_b(block_b(kr, n, 2 * kb, False)) for n in range(2)]
            for i in range(self.M):
                a = mma.operand_a(block_values(X, i, 2 * kb))
                store_dS(i, kb, a)
                for n in range(2):
                    mma.step(dU, i, n, a, b_kr[n])
        b_inv = mma.b_pair_from_ldmatrix(inv.load(transpose=True))
        dvc = mma.accumulators(self.M, 2)
        for i in range(self.M):
            a = mma.operand_a(block_values(dU, i, 0))
            for n in range(2):
                mma.step(dvc, i, n, a, b_inv[n])
        return dvc

    def store_dS(self, base, warp, lane):
        """(i, kb, operand) -> None: 16 rows and 16 columns of dS^T to shared memory, from their A
        operand.
        """
        tile = self.plan["dS"]
        if self.tf32:
            view = pairs_along_columns(tile.view(base), lane)

            def store(i, kb, a):
                values = self.mma.values_a(a)
                for at in range(0, 8, 2):
                    row_block = 2 * (self.M * warp + i) + at // 2 % 2
                    store_pair(view, row_block, 2 * kb + at // 4, values[at : at + 2])

            return store
        row, chunk = LaneRows(lane).rows_first()
        rows = MatrixRows(tile, base, 0, 16 * self.M * warp + row, chunk)
        return lambda i, kb, a: rows.store(a, 16 * i, 2 * kb)

    @cute.jit
    def times_states(self, base, slot: Slot, warp: Int32, lane: Int32):
        """(kd S)^T."""
        kdS = self.mma.accumulators(self.M, 2)
        row, chunk = LaneRows(lane).rows_first()
        states = MatrixRows(self.plan["states"], base, 0, 16 * self.M * warp + row, chunk)
        kd = pairs_along_columns(self.plan["kd"].view(base, slot.stage), lane)
        for kb in cutlass.range(K_BLOCKS, unroll=self.config.unroll):
            self.times_states_step(kdS, states, kd, kb)
        return kdS

    def times_states_step(self, kdS, states, kd, kb):
        b_kd = [self.mma.operand_b(block_b(kd, n, 2 * kb, False)) for n in range(2)]
        for i in range(self.M):
            a = self.mma.a_from_ldmatrix(states.load(16 * i, 2 * kb))
            for n in range(2):
                self.mma.step(kdS, i, n, a, b_kd[n])

    def minus_kd_states(self, kdS, base, slot, warp, lane):
        """(v - kd S)^T: 8 values for each 16 rows of v."""
        v = self.columns("v", base, slot.stage, warp, lane)
        vs = []
        for i in range(self.M):
            values = unpack_bf16(v.load(chunk_step=2 * i, transpose=True))
            vs.append([x - y for x, y in zip(values, block_values(kdS, i, 0), strict=True)])
        return vs

    def make_u(self, vs, base, slot, lane):
        """U^T = (b (v - kd S))^T INV^T."""
        inv = MatrixRows(self.plan["inv"], base, slot.stage, *LaneRows(lane).columns_first())
        b_inv = self.mma.b_pair_from_ldmatrix(inv.load())
        U, b = self.mma.accumulators(self.M, 2), self.betas(base, slot, lane)
        for i in range(self.M):
            a = self.mma.operand_a(scaled(vs[i], b))
            for n in range(2):
                self.mma.step(U, i, n, a, b_inv[n])
        return U

    def publish_columns(self, name, acc, base, warp, lane):
        """This warp's columns v of U or dvc, rounded to the key warps' operand: accumulators [v,
        token] to rows of tokens.
        """
        rows = self.columns(name, base, 0, warp, lane)
        view = pairs_along_rows(self.plan[name].view(base), lane)
        for i in range(self.M):
            values = block_values(acc, i, 0)
            if self.tf32:
                for at in range(0, 8, 2):
                    pair = [rounded_tf32(x) for x in values[at : at + 2]]
                    store_pair(view, at // 4, 2 * (self.M * warp + i) + at // 2 % 2, pair)
            else:
                rows.store(packed_bf16(values), chunk_step=2 * i, transpose=True)

    def publish_dvc(self, dvc, base, slot, warp, lane):
        """dvc and dv = b dvc."""
        self.publish_columns("dvc", dvc, base, warp, lane)
        dv, b = self.columns("dv", base, 0, warp, lane), self.betas(base, slot, lane)
        for i in range(self.M):
            dv.store(
                packed_bf16(scaled(block_values(dvc, i, 0), b)), chunk_step=2 * i, transpose=True
            )

    def publish_dbeta(self, dvc, vs, base, slot, warp, lane):
        """This warp's part of rowsum_v(dvc (v - kd S))."""
        sums = [Float32(0)] * 4
        for i in range(self.M):
            for j, (x, y) in enumerate(zip(block_values(dvc, i, 0), vs[i], strict=True)):
                at = j % 2 + 2 * (j // 4)
                sums[at] = sums[at] + x * y
        part = self.plan["dbeta_part"].view(base, slot.small)
        store_column_sums(part, column_sums(*sums, lane), warp, 0, lane)

    def update(self, X, dvc, base, slot, warp, lane):
        """dS^T <- dS^T exp(gT) + do^T qd - (b dvc)^T kd."""
        p, mma = self.plan, self.mma
        eg = pairs_along_columns(p["g_total"].view(base, slot.stage), lane % 4)
        qd, kd = (pairs_along_rows(p[name].view(base, slot.stage), lane) for name in ("qd", "kd"))
        do_t, b = self.do_operands(base, slot, warp, lane), self.betas(base, slot, lane)
        minus = [
            mma.operand_a([-x for x in scaled(block_values(dvc, i, 0), b)]) for i in range(self.M)
        ]
        for n in range(2 * K_BLOCKS):
            scale = load_pair(eg, 0, n)
            b_qd = mma.operand_b(block_b(qd, n, 0, True))
            b_kd = mma.operand_b(block_b(kd, n, 0, True))
            for i in range(self.M):
                for half in range(2):
                    for e in range(2):
                        X[(e, half), i, n] = X[(e, half), i, n] * scale[e]
                mma.step(X, i, n, do_t[i], b_qd)
                mma.step(X, i, n, minus[i], b_kd)


def scaled(values, b):
    """Rows [v, token] of 8 values times b of their token."""
    return [x * b[j % 2 + 2 * (j // 4)] for j, x in enumerate(values)]
