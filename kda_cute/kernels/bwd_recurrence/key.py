"""Key warps: dkd and dki, and the part of dgT that contracts over v.

Warp w owns columns k = 32 w .. of the outputs.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...device.sync import arrive
from ...device.warp_mma import (
    block_a,
    block_b,
    gather_columns,
    load_pair,
    pairs_along_columns,
    pairs_along_rows,
    quad_sum,
    store_column_sums,
    transposed_a,
    unpack_bf16,
)
from .operands import N, Operands
from .schedule import K_BLOCKS, Bar, Slot, Walk


class KeyRole(Operands):
    """Code of the key warps."""

    @cute.jit
    def run(self, walk: Walk, base, bars, warp: Int32):
        lane = cute.arch.lane_idx()
        for it in cutlass.range(walk.tiles, unroll=1):
            slot = Slot(it % self.stages, it // self.stages & 1, it & 1, it // 2 & 1)
            cute.arch.mbarrier_wait(bars + Bar.FULL + slot.stage, slot.turn)
            cute.arch.mbarrier_wait(bars + Bar.STATES_FULL, it & 1)
            cute.arch.mbarrier_wait(bars + Bar.DVC_FULL, it & 1)
            dkd, sums = self.contract_states(base, warp, lane)
            arrive(self.config, bars + Bar.HAND_EMPTY, bars + Bar.STATES_EMPTY)
            self.publish_sums(sums, base, slot, warp, lane)
            cute.arch.mbarrier_wait(bars + Bar.SMALL_FULL + slot.small, slot.lap)
            dki = self.mix(dkd, base, slot, warp, lane)
            arrive(self.config, bars + Bar.KEY_DONE + slot.small)
            cute.arch.mbarrier_wait(bars + Bar.UPDATED + slot.stage, slot.turn)
            self.stage_output("dkd", dkd, base, slot, warp, lane)
            self.stage_output("dki", dki, base, slot, warp, lane)
            self.arrive_stored(bars, slot)

    @cute.jit
    def contract_states(self, base, warp: Int32, lane: Int32):
        """dkd = -dvc S^T, so far, and this lane's part of rowsum_v(dS S) for each column tile."""
        dkd = self.mma.accumulators(1, N)
        sums = cute.make_rmem_tensor((N,), Float32)
        sums.fill(0.0)
        dvc, dS = self.handed_operand("dvc", base, lane), self.dS_values(base, warp, lane)
        states = self.state_columns("states", base, warp, lane)
        for kb in cutlass.range(K_BLOCKS, unroll=self.config.unroll):
            self.contract_states_step(dkd, sums, dvc, dS, states, kb)
        for i in cutlass.range_constexpr(cute.size(dkd)):
            dkd[i] = -dkd[i]
        return dkd, sums

    def contract_states_step(self, dkd, sums, dvc, dS, states, kb):
        a = dvc(kb)
        for j in range(N // 2):
            packed = states.load(16 * kb, 2 * j, transpose=True)
            state, ds = unpack_bf16(packed), dS(kb, j)
            for n, b in enumerate(self.mma.b_pair_from_ldmatrix(packed)):
                self.mma.step(dkd, 0, 2 * j + n, a, b)
                for i in range(4 * n, 4 * n + 4):
                    sums[2 * j + n] = sums[2 * j + n] + state[i] * ds[i]

    def dS_values(self, base, warp, lane):
        """(kb, j) -> 8 values of dS^T (rounded as an operand): two B operands, k = v 16 kb .., n =
        columns 16 j ..
        """
        if self.tf32:
            view = pairs_along_rows(self.plan["dS"].view(base), lane)
            return lambda kb, j: sum(
                (block_b(view, N * warp + 2 * j + n, 2 * kb, True) for n in range(2)), []
            )
        rows = self.state_columns("dS", base, warp, lane)
        return lambda kb, j: unpack_bf16(rows.load(16 * kb, 2 * j, transpose=True))

    def publish_sums(self, sums, base, slot, warp, lane):
        """rowsum_v(dS S) to shared memory."""
        line = self.plan["dgT_part"].view(base, slot.small)
        total = [quad_sum(sums[n]) for n in range(N)]
        for j in range(N // 2):
            both = gather_columns(total[2 * j], total[2 * j + 1], lane)
            store_column_sums(line, both, 0, 8 * N * warp + 16 * j, lane)

    def mix(self, dkd, base, slot, warp, lane):
        """dkd = b (dkd + dL ki), dki = dM^T qd + (b dL)^T kd; the diagonal of dM in fp32."""
        p, mma = self.plan, self.mma
        a_l = mma.operand_a(
            block_a(pairs_along_columns(p["dL"].view(base, slot.small), lane), 0, 0)
        )
        a_mt, a_lt = (
            mma.operand_a(transposed_a(pairs_along_rows(p[n].view(base, slot.small), lane)))
            for n in ("dM", "dLb")
        )
        rows = [pairs_along_rows(p[n].view(base, slot.stage), lane) for n in ("kd", "qd", "ki")]
        dki = mma.accumulators(1, N)
        for n in range(N):
            b_kd, b_qd, b_ki = (
                mma.operand_b_parts(block_b(x, N * warp + n, 0, True)) for x in rows
            )
            for acc, left, parts in ((dkd, a_l, b_ki), (dki, a_mt, b_qd), (dki, a_lt, b_kd)):
                for right in parts:
                    mma.step(acc, 0, n, left, right)
        columns = pairs_along_columns(p["qd"].view(base, slot.stage), lane)
        diagonal, b = p["dM_diag"].view(base, slot.small), p["beta"].view(base, slot.stage)
        for half in range(2):
            row = lane // 4 + 8 * half
            mii, bi = diagonal[0, row], b[0, row]
            for n in range(N):
                qd = load_pair(columns, half, N * warp + n)
                for e in range(2):
                    at = ((e, half), 0, n)
                    dki[at] = dki[at] + mii * qd[e]
                    dkd[at] = dkd[at] * bi
        return dki
