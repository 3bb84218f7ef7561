"""Key warps: what contracts over v, and everything that is then local in k.

Warp w of W owns columns k = 8 N w .. of every [16, 128] output, N = 16 / W column tiles of 8.  dM, dL and kd ki^T are small;
single warps make them, and all read them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from ...device.matrix_rows import LaneRows, MatrixRows
from ...device.warp_mma import (
    block_a,
    block_b,
    column_sums,
    gather_columns,
    load_pair,
    pairs_along_columns,
    pairs_along_rows,
    quad_sum,
    select_half,
    store_pair,
    summed_column,
    transposed_a,
    unpack_bf16,
)
from .schedule import K_BLOCKS, UNROLL, Bar, C, Gmem, Slot, Sync, Walk


class KeyRole:
    """Code of the key warps."""

    def __init__(self, config, plan, mma):
        self.plan, self.mma, self.tf32 = plan, mma, mma.tf32
        self.value_warps, self.warps = config.value_warps, 12 - config.value_warps
        self.N = 16 // self.warps
        self.gram_warp = self.warps - 1
        self.stages = plan["kd"].stages

    @cute.jit
    def run(self, m: Gmem, walk: Walk, base, bars, warp: Int32):
        lane = cute.arch.lane_idx()
        for it in cutlass.range(walk.tiles, unroll=1):
            t = walk.tiles - 1 - it
            rows = walk.tail if it == 0 else Int32(C)
            tile = Int64(walk.tile + t)
            slot = Slot(it % self.stages, it // self.stages & 1, it & 1)
            cute.arch.mbarrier_wait(bars + Bar.FULL + slot.stage, slot.turn)
            F = self.mma.accumulators(1, 2)
            if warp == self.gram_warp:
                self.gram(F, base, slot, lane)
            cute.arch.mbarrier_wait(bars + Bar.STATES_FULL, it & 1)
            cute.arch.mbarrier_wait(bars + Bar.DVC_FULL, it & 1)
            self.store_dv(m, base, walk.token + t * C, walk.h, rows)
            dqd, dkd = self.contract_states(base, slot, warp, lane)
            cute.arch.mbarrier_wait(bars + Bar.U_FULL, it & 1)
            self.triangles(base, slot, warp, lane)
            dkr, dgT = self.contract_dS(base, warp, lane)
            dbeta = self.dbeta_over_v(base, slot, lane)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars + Bar.HAND_EMPTY)
                cute.arch.mbarrier_arrive(bars + Bar.STATES_EMPTY)
            cute.arch.barrier(barrier_id=Sync.KEYS, number_of_threads=32 * self.warps)
            if warp == self.gram_warp:
                self.store_dbeta(m.dbeta, F, dbeta, base, slot, walk.h, tile, lane)
            dki, sums = self.mix(dkr, dqd, dkd, base, slot, warp, lane)
            self.store_dgT(m.dgT, dgT, sums, base, slot, walk.h, tile, warp, lane)
            cute.arch.mbarrier_wait(bars + Bar.UPDATED + slot.stage, slot.turn)
            self.stage_outputs(dkd, dqd, dki, dkr, base, slot, warp, lane)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars + Bar.STORED + slot.stage)

    # ------------------------------------------------------------ operands
    def do_operand(self, base, slot, lane):
        """kb -> A operand: rows of tokens, k = v 16 kb .., of do."""
        rows = MatrixRows(self.plan["do"], base, slot.stage, *LaneRows(lane).rows_first())
        return lambda kb: self.mma.a_from_ldmatrix(rows.load(chunk_step=2 * kb))

    def handed_operand(self, name, base, lane):
        """kb -> A operand: rows of tokens, k = v 16 kb .., of U or dvc."""
        if self.tf32:
            view = pairs_along_columns(self.plan[name].view(base), lane)
            return lambda kb: self.mma.exact_a(block_a(view, 0, 2 * kb))
        rows = MatrixRows(self.plan[name], base, 0, *LaneRows(lane).rows_first())
        return lambda kb: self.mma.a_from_ldmatrix(rows.load(chunk_step=2 * kb))

    def u_columns(self, base, lane):
        """(half, kb) -> B operand: k = v 16 kb .., n = tokens 8 half .. of U."""
        if self.tf32:
            view = pairs_along_columns(self.plan["U"].view(base), lane)
            return lambda half, kb: self.mma.exact_b(block_b(view, half, 2 * kb, False))
        rows = MatrixRows(self.plan["U"], base, 0, *LaneRows(lane).columns_first())
        return lambda half, kb: select_half(self.mma.b_pair_from_ldmatrix(rows.load(chunk_step=2 * kb)), half)

    def state_columns(self, name, base, warp, lane):
        """Rows of v, this warp's columns k, of the states tile or of a bf16 dS tile: B operands with k = v."""
        row, chunk = LaneRows(lane).rows_first()
        return MatrixRows(self.plan[name], base, 0, row, self.N * warp + chunk)

    # ------------------------------------------------------------ small products
    @cute.jit
    def gram(self, F, base, slot: Slot, lane: Int32):
        """F = kd ki^T."""
        kd, ki = (pairs_along_columns(self.plan[name].view(base, slot.stage), lane) for name in ("kd", "ki"))
        for kb in cutlass.range(K_BLOCKS, unroll=UNROLL):
            self.gram_step(F, kd, ki, kb)

    def gram_step(self, F, kd, ki, kb):
        a = self.mma.operand_a(block_a(kd, 0, 2 * kb))
        for n in range(2):
            self.mma.step(F, 0, n, a, self.mma.operand_b(block_b(ki, n, 2 * kb, False)))

    @cute.jit
    def triangles(self, base, slot: Slot, warp: Int32, lane: Int32):
        """Warps 0, 1: columns of dM = do U^T; warps 2, 3: of -dL = dvc U^T.  Strictly lower parts and dM's diagonal."""
        if warp < 4:
            acc = self.mma.accumulators(1, 1)
            if warp < 2:
                self.times_u(acc, self.do_operand(base, slot, lane), base, warp % 2, lane)
            else:
                self.times_u(acc, self.handed_operand("dvc", base, lane), base, warp % 2, lane)
            self.store_triangle(acc, base, slot, warp % 2, warp < 2, lane)

    @cute.jit
    def times_u(self, acc, a, base, half_n: Int32, lane: Int32):
        """acc += A U^T, tokens 8 half_n .. of U."""
        u = self.u_columns(base, lane)
        for kb in cutlass.range(K_BLOCKS, unroll=UNROLL):
            self.mma.step(acc, 0, 0, a(kb), u(half_n, kb))

    @cute.jit
    def store_triangle(self, acc, base, slot: Slot, half_n: Int32, is_dM: cutlass.Boolean, lane: Int32):
        """The strictly lower part of half the columns of dM or -dL."""
        sM, sDiagonal, sL, sLb = (self.plan[n].view(base, slot.small) for n in ("dM", "dM_diag", "dL", "dLb"))
        b = self.plan["beta"].view(base, slot.stage)
        for half in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(2):
                i, j = lane // 4 + 8 * half, 8 * half_n + 2 * (lane % 4) + e
                x = acc[(e, half), 0, 0]
                lower = x if j < i else Float32(0)
                if is_dM:
                    sM[i, j] = lower
                    if i == j:
                        sDiagonal[0, i] = x
                else:
                    sL[i, j] = -lower
                    sLb[i, j] = -lower * b[0, i]

    # ------------------------------------------------------------ products over v
    @cute.jit
    def contract_states(self, base, slot: Slot, warp: Int32, lane: Int32):
        """dqd = do S^T and dkd = -dvc S^T, so far."""
        dqd, dkd = self.mma.accumulators(1, self.N), self.mma.accumulators(1, self.N)
        do, dvc = self.do_operand(base, slot, lane), self.handed_operand("dvc", base, lane)
        states = self.state_columns("states", base, warp, lane)
        for kb in cutlass.range(K_BLOCKS, unroll=UNROLL):
            self.contract_states_step(dqd, dkd, do, dvc, states, kb)
        for i in cutlass.range_constexpr(cute.size(dkd)):
            dkd[i] = -dkd[i]
        return dqd, dkd

    def contract_states_step(self, dqd, dkd, do, dvc, states, kb):
        a_do, a_dvc = do(kb), dvc(kb)
        for j in range(self.N // 2):
            for n, b in enumerate(self.mma.b_pair_from_ldmatrix(states.load(16 * kb, 2 * j, transpose=True))):
                self.mma.step(dqd, 0, 2 * j + n, a_do, b)
                self.mma.step(dkd, 0, 2 * j + n, a_dvc, b)

    @cute.jit
    def contract_dS(self, base, warp: Int32, lane: Int32):
        """dkr = U dS^T, and rowsum_v(dS S): one sum a lane and pair of column tiles."""
        dkr = self.mma.accumulators(1, self.N)
        sums = cute.make_rmem_tensor((self.N,), Float32)
        sums.fill(0.0)
        u, dS = self.handed_operand("U", base, lane), self.dS_columns(base, warp, lane)
        states = self.state_columns("states", base, warp, lane)
        for kb in cutlass.range(K_BLOCKS, unroll=UNROLL):
            self.contract_dS_step(dkr, sums, u, dS, states, kb)
        return dkr, self.gather_sums(sums, lane)

    def contract_dS_step(self, dkr, sums, u, dS, states, kb):
        a = u(kb)
        for j in range(self.N // 2):
            state, (b, ds) = unpack_bf16(states.load(16 * kb, 2 * j, transpose=True)), dS(kb, j)
            for n in range(2):
                self.mma.step(dkr, 0, 2 * j + n, a, b[n])
                for i in range(4 * n, 4 * n + 4):
                    sums[2 * j + n] = sums[2 * j + n] + state[i] * ds[i]

    def gather_sums(self, sums, lane):
        total = [quad_sum(sums[n]) for n in range(self.N)]
        return [gather_columns(total[2 * j], total[2 * j + 1], lane) for j in range(self.N // 2)]

    def dS_columns(self, base, warp, lane):
        """(kb, j) -> two B operands and their values: k = v 16 kb .., n = columns of dS^T."""
        if self.tf32:
            view = pairs_along_rows(self.plan["dS"].view(base), lane)

            def load(kb, j):
                blocks = [block_b(view, self.N * warp + 2 * j + n, 2 * kb, True) for n in range(2)]
                return [self.mma.exact_b(x) for x in blocks], blocks[0] + blocks[1]

            return load
        rows = self.state_columns("dS", base, warp, lane)

        def load_packed(kb, j):
            packed = rows.load(16 * kb, 2 * j, transpose=True)
            return self.mma.b_pair_from_ldmatrix(packed), unpack_bf16(packed)

        return load_packed

    def dbeta_over_v(self, base, slot, lane):
        """rowsum_v(dvc (v - kd S)), token lane % 16: the value warps' parts."""
        part = self.plan["dbeta_part"].view(base, slot.small)
        total = Float32(0)
        for w in range(self.value_warps):
            total = total + part[w, lane % C]
        return total

    # ------------------------------------------------------------ products over tokens
    def mix(self, dkr, dqd, dkd, base, slot, warp, lane):
        """dqd += dM ki, dkd = b (dkd + dL ki), dki = dM^T qd + (b dL)^T kd; the diagonal of dM in fp32; colsum(dkr kr)."""
        p, mma = self.plan, self.mma
        dM, dL = (pairs_along_columns(p[n].view(base, slot.small), lane) for n in ("dM", "dL"))
        dM_t, dLb_t = (pairs_along_rows(p[n].view(base, slot.small), lane) for n in ("dM", "dLb"))
        a_m, a_l = (mma.operand_a(block_a(x, 0, 0)) for x in (dM, dL))
        a_mt, a_lt = (mma.operand_a(transposed_a(x)) for x in (dM_t, dLb_t))
        rows = [pairs_along_rows(p[n].view(base, slot.stage), lane) for n in ("kd", "qd", "ki")]
        dki = mma.accumulators(1, self.N)
        for n in range(self.N):
            b_kd, b_qd, b_ki = (mma.operand_b(block_b(x, self.N * warp + n, 0, True)) for x in rows)
            mma.step(dqd, 0, n, a_m, b_ki)
            mma.step(dkd, 0, n, a_l, b_ki)
            mma.step(dki, 0, n, a_mt, b_qd)
            mma.step(dki, 0, n, a_lt, b_kd)
        columns = [pairs_along_columns(p[n].view(base, slot.stage), lane) for n in ("kr", "qd", "ki")]
        diagonal, b = p["dM_diag"].view(base, slot.small), p["beta"].view(base, slot.stage)
        sums = [Float32(0)] * (2 * self.N)
        for half in range(2):
            row = lane // 4 + 8 * half
            mii, bi = diagonal[0, row], b[0, row]
            for n in range(self.N):
                kr, qd, ki = (load_pair(x, half, self.N * warp + n) for x in columns)
                for e in range(2):
                    at = ((e, half), 0, n)
                    dqd[at] = dqd[at] + mii * ki[e]
                    dki[at] = dki[at] + mii * qd[e]
                    dkd[at] = dkd[at] * bi
                    sums[e + 2 * n] = sums[e + 2 * n] + dkr[at] * kr[e]
        return dki, [column_sums(*sums[4 * j : 4 * j + 4], lane) for j in range(self.N // 2)]

    # ------------------------------------------------------------ outputs
    @cute.jit
    def store_dv(self, m: Gmem, base, token: Int32, h: Int32, rows: Int32):
        """dv rows of the chunk that belong to the sequence, in 16-byte vectors."""
        tid, _, _ = cute.arch.thread_idx()
        for j in cutlass.range_constexpr(8 // self.warps):
            i = tid - 32 * self.value_warps + 32 * self.warps * j
            row, col = i // 16, i % 16
            if row < rows:
                src = cute.local_tile(self.plan["dv"].view(base), (1, 8), (row, col))[0, None]
                values = cute.make_rmem_tensor((8,), BFloat16)
                cute.autovec_copy(src, values)
                cute.autovec_copy(values, cute.local_tile(m.dv[Int64(token + row), h, None], (8,), (col,)))

    @cute.jit
    def store_dbeta(
        self, mDbeta: cute.Tensor, F, over_v: Float32, base, slot: Slot, h: Int32, tile: Int64, lane: Int32
    ):
        """dbeta = its part over v + rowsum(dL F); one warp."""
        dL = pairs_along_columns(self.plan["dL"].view(base, slot.small), lane)
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
        self, mDgT: cute.Tensor, over_v, over_tokens, base, slot: Slot, h: Int32, tile: Int64, warp: Int32, lane: Int32
    ):
        """dgT = exp(gT) rowsum_v(dS S) + colsum(dkr kr)."""
        eg = self.plan["g_total"].view(base, slot.stage)
        if (lane & 4) == 0:
            for j in cutlass.range_constexpr(self.N // 2):
                k = 8 * self.N * warp + 16 * j + summed_column(lane)
                mDgT[h, tile, k] = eg[0, k] * over_v[j] + over_tokens[j]

    def stage_outputs(self, dkd, dqd, dki, dkr, base, slot, warp, lane):
        """This warp's columns of the outputs, into the bytes of the tiles that they are gradients of."""
        for name, acc in (("kd", dkd), ("qd", dqd), ("ki", dki), ("kr", dkr)):
            view = pairs_along_columns(self.plan[name].view(base, slot.stage), lane)
            for n in range(self.N):
                for half in range(2):
                    store_pair(view, half, self.N * warp + n, [acc[(e, half), 0, n] for e in range(2)])
