"""Key warps: dqd, dki and dkd.

Warp w owns columns k = 32 w .. of the outputs.  do S^T and dvc S^T contract over v; what dM and dL add contracts over tokens.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...device.warp_mma import block_a, block_b, load_pair, pairs_along_columns, pairs_along_rows, transposed_a
from .operands import N, Operands
from .schedule import K_BLOCKS, UNROLL, Bar, Slot, Walk


class KeyRole(Operands):
    """Code of the key warps."""

    @cute.jit
    def run(self, walk: Walk, base, bars, warp: Int32):
        lane = cute.arch.lane_idx()
        for it in cutlass.range(walk.tiles, unroll=1):
            slot = Slot(it % self.stages, it // self.stages & 1, it & 1)
            cute.arch.mbarrier_wait(bars + Bar.FULL + slot.stage, slot.turn)
            cute.arch.mbarrier_wait(bars + Bar.STATES_FULL, it & 1)
            cute.arch.mbarrier_wait(bars + Bar.DVC_FULL, it & 1)
            dqd, dkd = self.contract_states(base, slot, warp, lane)
            self.release_hand(bars)
            cute.arch.mbarrier_wait(bars + Bar.PAIR_FULL, it & 1)
            dki = self.mix(dqd, dkd, base, slot, warp, lane)
            cute.arch.mbarrier_wait(bars + Bar.UPDATED + slot.stage, slot.turn)
            self.stage_output("kd", dkd, base, slot, warp, lane)
            self.stage_output("qd", dqd, base, slot, warp, lane)
            self.stage_output("ki", dki, base, slot, warp, lane)
            self.arrive_stored(bars, slot)

    @cute.jit
    def contract_states(self, base, slot: Slot, warp: Int32, lane: Int32):
        """dqd = do S^T and dkd = -dvc S^T, so far."""
        dqd, dkd = self.mma.accumulators(1, N), self.mma.accumulators(1, N)
        do, dvc = self.do_operand(base, slot, lane), self.handed_operand("dvc", base, lane)
        states = self.state_columns("states", base, warp, lane)
        for kb in cutlass.range(K_BLOCKS, unroll=UNROLL):
            self.contract_states_step(dqd, dkd, do, dvc, states, kb)
        for i in cutlass.range_constexpr(cute.size(dkd)):
            dkd[i] = -dkd[i]
        return dqd, dkd

    def contract_states_step(self, dqd, dkd, do, dvc, states, kb):
        a_do, a_dvc = do(kb), dvc(kb)
        for j in range(N // 2):
            for n, b in enumerate(self.mma.b_pair_from_ldmatrix(states.load(16 * kb, 2 * j, transpose=True))):
                self.mma.step(dqd, 0, 2 * j + n, a_do, b)
                self.mma.step(dkd, 0, 2 * j + n, a_dvc, b)

    def mix(self, dqd, dkd, base, slot, warp, lane):
        """dqd += dM ki, dkd = b (dkd + dL ki), dki = dM^T qd + (b dL)^T kd; the diagonal of dM in fp32."""
        p, mma = self.plan, self.mma
        dM, dL = (pairs_along_columns(p[n].view(base, slot.small), lane) for n in ("dM", "dL"))
        dM_t, dLb_t = (pairs_along_rows(p[n].view(base, slot.small), lane) for n in ("dM", "dLb"))
        a_m, a_l = (mma.operand_a(block_a(x, 0, 0)) for x in (dM, dL))
        a_mt, a_lt = (mma.operand_a(transposed_a(x)) for x in (dM_t, dLb_t))
        rows = [pairs_along_rows(p[n].view(base, slot.stage), lane) for n in ("kd", "qd", "ki")]
        dki = mma.accumulators(1, N)
        for n in range(N):
            b_kd, b_qd, b_ki = (mma.operand_b(block_b(x, N * warp + n, 0, True)) for x in rows)
            mma.step(dqd, 0, n, a_m, b_ki)
            mma.step(dkd, 0, n, a_l, b_ki)
            mma.step(dki, 0, n, a_mt, b_qd)
            mma.step(dki, 0, n, a_lt, b_kd)
        columns = [pairs_along_columns(p[n].view(base, slot.stage), lane) for n in ("qd", "ki")]
        diagonal, b = p["dM_diag"].view(base, slot.small), p["beta"].view(base, slot.stage)
        for half in range(2):
            row = lane // 4 + 8 * half
            mii, bi = diagonal[0, row], b[0, row]
            for n in range(N):
                qd, ki = (load_pair(x, half, N * warp + n) for x in columns)
                for e in range(2):
                    at = ((e, half), 0, n)
                    dqd[at] = dqd[at] + mii * ki[e]
                    dki[at] = dki[at] + mii * qd[e]
                    dkd[at] = dkd[at] * bi
        return dki
