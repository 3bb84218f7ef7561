"""The fused reverse recurrence over a prepared workspace (level 1), chunks of C = 16 tokens, K = V = 128.

Per (sequence, head), from the last chunk to the first, with dS the gradient of the state after the chunk:

    dU  = Mqk^T do + kr dS       dvc = INV^T dU          U = INV vc,  vc = b (v - kd S)      dv = b dvc
    dkr = U dS^T                 dM  = tril(do U^T)      dL = -tril(dvc U^T, -1)
    dqd = do S^T + dM ki         dki = dM^T qd + (b dL)^T kd         dkd = b (dL ki - dvc S^T)
    dgT = exp(gT) rowsum_v(dS S) + colsum(dkr kr)        dbeta = rowsum(dvc (v - kd S)) + rowsum(dL kd ki^T)
    dS <- exp(gT) dS + qd^T do - kd^T (b dvc)

One CTA walks one (sequence, head).  The recurrence acts on each column v of dS alone, and every product that it needs
contracts over tokens or over K.  So four value warps hold dS^T in registers, 32 rows v and all K each, as accumulators; they
are their own operands, and the serial chain dS -> dU -> dvc -> dS crosses neither a barrier nor shared memory.  Products that
contract over v go to eight key warps, 16 columns k each, one chunk behind.

    role          warps   registers   work of a chunk                                   MMA steps (m16n8k16) of the role
    value         0-3     232         dU, dvc, kd S, U; dS, U, dvc to shared memory;    560
                                      dgT and dbeta over v; dS update
    key           4-11    120         dkr, do S^T, dvc S^T, dM, dL, kd ki^T; dqd dki    496
                                      dkd; dgT, dbeta, dv; all outputs
    producer      12      40          TMA and bulk copies of the next chunk, sigmoid

    barrier       full -> empty: tiles of a stage            states_full -> states_empty: the state tile
                  hand_full -> hand_empty: what the value warps make for the key warps

Rows past a sequence's end exist in its last chunk only, the first one walked: its tiles are zeroed in shared memory once, and
everything after that is a full chunk.  The diagonal of dM multiplies unrounded fp32 values outside the tensor cores, so that
the pair (i, i) cancels in dg.  No atomics.  Shared-memory layouts come from `kda_cute.layouts`.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ..device.matrix_rows import LaneRows, MatrixRows
from ..device.warp_mma import (
    WarpMma,
    block_a,
    block_b,
    block_values,
    column_sums,
    from_bits,
    load_pair,
    packed_bf16,
    pairs_along_columns,
    pairs_along_rows,
    quad_sum,
    round_tf32,
    store_pair,
    unpack_bf16,
)
from ..layouts.variants import plan

C, D = 16, 128
VALUE_WARPS, KEY_WARPS, PRODUCER_WARP = 4, 8, 12
CONSUMER_WARPS = VALUE_WARPS + KEY_WARPS
THREADS = 512  # 16 warps: warps 13-15 only complete the producer's warpgroup for setmaxnreg
VALUE_REGISTERS, KEY_REGISTERS, PRODUCER_REGISTERS = 232, 120, 40
K_BLOCKS = D // 16


@dataclass(frozen=True)
class Config:
    """precision: "tf32" or "bf16"; layout: a plan's name; beta, state_grad: "bf16", "f32" (state_grad also "none")."""

    precision: str = "tf32"
    layout: str = "default"
    beta: str = "bf16"
    state_grad: str = "none"
    varlen: bool = False


class Bar(enum.IntEnum):
    """Indices of mbarriers; each name covers two stages."""

    FULL = 0
    EMPTY = 2
    STATES_FULL = 4
    STATES_EMPTY = 6
    HAND_FULL = 8
    HAND_EMPTY = 9


class Sync(enum.IntEnum):
    """Named barriers."""

    KEYS = 1
    CONSUMERS = 2


class Gmem(NamedTuple):
    """Global tensors, in the order of the compiled function's arguments."""

    do: cute.Tensor  # [T, H, 128] bf16
    v: cute.Tensor  # [T, H, 128] bf16
    beta: cute.Tensor  # [T, H]
    kd: cute.Tensor  # [H, tiles, 16, 128] f32
    qd: cute.Tensor
    kr: cute.Tensor
    ki: cute.Tensor
    g_total: cute.Tensor  # [H, tiles, 128] f32
    inv: cute.Tensor  # [H, tiles, 16, 16] bf16
    mqk: cute.Tensor
    states: cute.Tensor  # [H, tiles, 128 (V), 128 (K)] bf16
    dfinal: cute.Tensor  # [N, H, 128 (V), 128 (K)], or None
    cu_seqlens: cute.Tensor  # [N + 1] int32, or None
    dkd: cute.Tensor  # [H, tiles, 16, 128] f32
    dqd: cute.Tensor
    dki: cute.Tensor
    dkr: cute.Tensor
    dgT: cute.Tensor  # [H, tiles, 128] f32
    dv: cute.Tensor  # [T, H, 128] bf16
    dbeta: cute.Tensor  # [H, tiles, 16] f32
    dinitial: cute.Tensor  # [N, H, 128 (V), 128 (K)]


class Tma(NamedTuple):
    """A tensor copy: its atom and the coordinate tensor of global memory."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Walk(NamedTuple):
    """Where a CTA works: head, first token, first tile, tiles, valid rows of the last tile."""

    n: Int32
    h: Int32
    token: Int32
    tile: Int32
    tiles: Int32
    tail: Int32


class BwdRecurrence:
    """The kernel for one `Config`."""

    def __init__(self, config: Config):
        self.config = config
        self.plan = plan("bwd_recurrence", config.layout, config.precision)
        self.mma = WarpMma(config.precision)
        self.tf32 = self.mma.tf32
        self.stages = self.plan["kd"].stages
        self.state_stages = self.plan["states"].stages

    # ------------------------------------------------------------ launch
    @cute.jit
    def __call__(
        self, do: cute.Tensor, v: cute.Tensor, beta: cute.Tensor,
        kd: cute.Tensor, qd: cute.Tensor, kr: cute.Tensor, ki: cute.Tensor, g_total: cute.Tensor,
        inv: cute.Tensor, mqk: cute.Tensor, states: cute.Tensor, dfinal, cu_seqlens,
        dkd: cute.Tensor, dqd: cute.Tensor, dki: cute.Tensor, dkr: cute.Tensor, dgT: cute.Tensor,
        dv: cute.Tensor, dbeta: cute.Tensor, dinitial: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        m = Gmem(do, v, beta, kd, qd, kr, ki, g_total, inv, mqk, states, dfinal, cu_seqlens,
                 dkd, dqd, dki, dkr, dgT, dv, dbeta, dinitial)  # fmt: skip
        load = cpasync.CopyBulkTensorTileG2SOp()
        tokens = self.plan["do"].cute_layout()
        square = self.plan["states"].cute_layout()
        by_head = lambda t: cute.make_tensor(t.iterator, cute.select(t.layout, mode=[0, 2, 1]))  # noqa: E731
        by_tile = cute.make_tensor(states.iterator, cute.select(states.layout, mode=[2, 3, 1, 0]))
        tma_do = Tma(*cpasync.make_tiled_tma_atom(load, by_head(do), tokens, (C, D)))
        tma_v = Tma(*cpasync.make_tiled_tma_atom(load, by_head(v), tokens, (C, D)))
        tma_s = Tma(*cpasync.make_tiled_tma_atom(load, by_tile, square, (D, D)))
        sequences, heads = dinitial.shape[0], dinitial.shape[1]
        self.kernel(m, tma_do, tma_v, tma_s).launch(
            grid=(heads, sequences, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, m: Gmem, tma_do: Tma, tma_v: Tma, tma_s: Tma):
        base = cutlass.memory.SmemAllocator().allocate(self.plan.total_bytes, 1024)
        bars = self.plan["barriers"].view(base).iterator
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(bars + Bar.FULL + s, 2)
                    cute.arch.mbarrier_init(bars + Bar.EMPTY + s, CONSUMER_WARPS)
                    cute.arch.mbarrier_init(bars + Bar.STATES_FULL + s, 1)
                    cute.arch.mbarrier_init(bars + Bar.STATES_EMPTY + s, CONSUMER_WARPS)
                cute.arch.mbarrier_init(bars + Bar.HAND_FULL, VALUE_WARPS)
                cute.arch.mbarrier_init(bars + Bar.HAND_EMPTY, KEY_WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Each role finds its sequence: a value shared by three register budgets would be spilled.
        if warp >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == PRODUCER_WARP:
                self.produce(m, self.find_sequence(m), base, bars, tma_do, tma_v, tma_s)
        elif warp >= VALUE_WARPS:
            cute.arch.setmaxregister_decrease(KEY_REGISTERS)
            self.key_role(m, self.find_sequence(m), base, bars, warp - VALUE_WARPS)
        else:
            cute.arch.setmaxregister_increase(VALUE_REGISTERS)
            self.value_role(m, self.find_sequence(m), base, bars, warp)

    @cute.jit
    def find_sequence(self, m: Gmem):
        """This CTA's walk.  Offsets out of range or out of order never lead outside the tensors."""
        h, n, _ = cute.arch.block_idx()
        T, all_tiles = m.do.shape[0], m.kd.shape[1]
        first, last, tile = Int32(0), Int32(0), Int32(0)
        if const_expr(self.config.varlen):
            first = clamp(m.cu_seqlens[n], T)
            last = clamp(m.cu_seqlens[n + 1], T)
            before = Int32(0)
            for i in cutlass.range(cute.arch.lane_idx(), n, 32, unroll=1):
                length = clamp(m.cu_seqlens[i + 1], T) - clamp(m.cu_seqlens[i], T)
                before = before + (cutlass.max(length, 0) + C - 1) // C
            tile = cute.arch.warp_reduction(before, lambda a, b: a + b)
        else:
            length = T // m.dinitial.shape[0]
            first = n * length
            last = first + length
            tile = n * ((length + C - 1) // C)
        length = cutlass.max(last - first, 0)
        tiles = cutlass.max(cutlass.min((length + C - 1) // C, all_tiles - tile), 0)
        tail = cutlass.min(length - (tiles - 1) * C, C)
        return Walk(n, h, first, tile, tiles, tail)

    # ------------------------------------------------------------ producer
    @cute.jit
    def produce(self, m: Gmem, walk: Walk, base, bars, tma_do: Tma, tma_v: Tma, tma_s: Tma):
        """Copy the tiles of each chunk to shared memory, and the sigmoid of its beta."""
        for it in cutlass.range(walk.tiles, unroll=1):
            t = walk.tiles - 1 - it
            s, turn = it % self.stages, it // self.stages
            cute.arch.mbarrier_wait(bars + Bar.EMPTY + s, (turn & 1) ^ 1)
            self.copy_chunk(m, walk, base, bars + Bar.FULL + s, s, t, tma_do, tma_v)
            self.write_beta(m, walk, base, s, t)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars + Bar.FULL + s)
            ss, state_turn = it % self.state_stages, it // self.state_stages
            cute.arch.mbarrier_wait(bars + Bar.STATES_EMPTY + ss, (state_turn & 1) ^ 1)
            self.copy_states(walk, base, bars + Bar.STATES_FULL + ss, ss, t, tma_s)

    def copy_chunk(self, m, walk, base, full, s, t, tma_do, tma_v):
        """Issue the copies of one chunk's stage; they complete on `full`."""
        p, h = self.plan, walk.h
        tile, token = Int64(walk.tile + t), walk.token + t * C
        f32_row = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        bf16_row = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BFloat16)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * C * D * 4 + 2 * C * D * 2 + 2 * C * C * 2 + D * 4)
        copy_tokens(tma_do, p["do"].view(base, s), token, h, full)
        copy_tokens(tma_v, p["v"].view(base, s), token, h, full)
        with cute.arch.elect_one():
            for src, name in ((m.kr, "kr"), (m.kd, "kd"), (m.qd, "qd"), (m.ki, "ki")):
                dst = p[name].view(base, s)
                for row in range(C):
                    cute.copy(f32_row, src[h, tile, row, None], dst[row, None], mbar_ptr=full)
            for src, name in ((m.inv, "inv"), (m.mqk, "mqk")):
                flat = cute.make_layout(C * C)
                row = cute.make_tensor(src[h, tile, None, None].iterator, flat)
                cute.copy(bf16_row, row, cute.make_tensor(p[name].view(base, s).iterator, flat), mbar_ptr=full)
            cute.copy(f32_row, m.g_total[h, tile, None], p["g_total"].view(base, s)[0, None], mbar_ptr=full)

    @cute.jit
    def write_beta(self, m: Gmem, walk: Walk, base, s: Int32, t: Int32):
        """b = sigmoid(beta) of the chunk's tokens; 0 past the sequence's end."""
        lane = cute.arch.lane_idx()
        line = self.plan["beta"].view(base, s)
        if lane < C:
            b = Float32(0)
            if t * C + lane < (walk.tiles - 1) * C + walk.tail:
                b = sigmoid(Float32(m.beta[walk.token + t * C + lane, walk.h]))
            line[0, lane] = b

    def copy_states(self, walk, base, full, ss, t, tma_s):
        """Issue the copy of one chunk's state."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, D * D * 2)
        tile = cute.local_tile(tma_s.tensor[None, None, walk.tile + t, walk.h], (D, D), (0, 0))
        copy_tile(tma_s.atom, tile, self.plan["states"].view(base, ss), full)

    @cute.jit
    def zero_tail(self, walk: Walk, base, bars):
        """Zero the rows past the sequence's end in the first stage; all value and key warps."""
        cute.arch.mbarrier_wait(bars + Bar.FULL, 0)
        tid, _, _ = cute.arch.thread_idx()
        threads = 32 * CONSUMER_WARPS
        for i in cutlass.range(walk.tail * D + tid, C * D, threads, unroll=1):
            self.zero(("kd", "qd", "kr", "ki", "do", "v"), base, i // D, i % D)
        for i in cutlass.range(walk.tail * C + tid, C * C, threads, unroll=1):
            self.zero(("inv", "mqk"), base, i // C, i % C)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=Sync.CONSUMERS, number_of_threads=threads)

    def zero(self, names, base, row, col):
        for name in names:
            tile = self.plan[name].view(base)
            tile[row, col] = tile.element_type(0)

    # ------------------------------------------------------------ value warps
    @cute.jit
    def value_role(self, m: Gmem, walk: Walk, base, bars, warp: Int32):
        """dS^T rows 32 warp .. 32 warp + 31: X[(i, half), m, n] is row 32 warp + 16 m + 8 half + r, column 8 n + 2c + i."""
        lane = cute.arch.lane_idx()
        X = self.mma.accumulators(2, K_BLOCKS * 2)
        if const_expr(self.config.state_grad != "none"):
            self.load_state_grad(m.dfinal[walk.n, walk.h, None, None], X, warp, lane)
        if walk.tiles > 0:
            if walk.tail < C:
                self.zero_tail(walk, base, bars)
        for it in cutlass.range(walk.tiles, unroll=1):
            s, ss = it % self.stages, it % self.state_stages
            cute.arch.mbarrier_wait(bars + Bar.FULL + s, (it // self.stages) & 1)
            cute.arch.mbarrier_wait(bars + Bar.STATES_FULL + ss, (it // self.state_stages) & 1)
            b, vs = self.value_states(X, base, s, ss, it % 2, warp, lane)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars + Bar.STATES_EMPTY + ss)
            U = self.value_u(vs, b, base, s, lane)
            cute.arch.mbarrier_wait(bars + Bar.HAND_EMPTY, (it & 1) ^ 1)
            self.publish_columns("U", U, base, warp, lane)
            do_t, dvc = self.value_dvc(X, base, s, warp, lane)
            bdvc = self.publish_dvc(dvc, vs, b, base, it % 2, warp, lane)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars + Bar.HAND_FULL)
            self.value_update(X, do_t, bdvc, base, s, lane)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars + Bar.EMPTY + s)
        self.store_state_grad(m.dinitial[walk.n, walk.h, None, None], X, warp, lane)

    def state_pairs(self, state, warp, lane):
        """((half, m, n), this lane's pair of a [V, K] state) for each pair of X."""
        for i in range(2):
            for n in range(2 * K_BLOCKS):
                for half in range(2):
                    line = state[32 * warp + 16 * i + 8 * half + lane // 4, None]
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

    def value_columns(self, name, base, s, warp, lanes):
        """Rows of tokens, columns v = 32 warp + 16 i of a [16, 128] tile, transposed: A operands or accumulators [v, token]."""
        row, chunk = lanes.columns_first()
        return MatrixRows(self.plan[name], base, s, row, 4 * warp + chunk)

    def value_dvc(self, X, base, s, warp, lane):
        """dU^T = do^T Mqk + dS^T kr^T, dvc^T = dU^T INV.  Returns the operand do^T and the accumulators of dvc^T.

        dS goes to shared memory as it is rounded: a rounded copy kept for later would cost 64 or 128 registers.
        """
        p, lanes = self.plan, LaneRows(lane)
        kr = pairs_along_columns(p["kr"].view(base, s), lane)
        do = self.value_columns("do", base, s, warp, lanes)
        do_t = [self.mma.a_from_ldmatrix(do.load(chunk_step=2 * i, transpose=True)) for i in range(2)]
        mqk, inv = (MatrixRows(p[name], base, s, *lanes.rows_first()) for name in ("mqk", "inv"))
        b_mqk = self.mma.b_pair_from_ldmatrix(mqk.load(transpose=True))
        dU = self.mma.accumulators(2, 2)
        for i in range(2):
            for n in range(2):
                self.mma.step(dU, i, n, do_t[i], b_mqk[n])
        store_dS = self.store_dS(base, warp, lane)
        for kb in range(K_BLOCKS):
            b_kr = [self.mma.operand_b(block_b(kr, n, 2 * kb, False)) for n in range(2)]
            for i in range(2):
                a = self.mma.operand_a(block_values(X, i, 2 * kb))
                store_dS(i, kb, a)
                for n in range(2):
                    self.mma.step(dU, i, n, a, b_kr[n])
        b_inv = self.mma.b_pair_from_ldmatrix(inv.load(transpose=True))
        dvc = self.mma.accumulators(2, 2)
        for i in range(2):
            a = self.mma.operand_a(block_values(dU, i, 0))
            for n in range(2):
                self.mma.step(dvc, i, n, a, b_inv[n])
        return do_t, dvc

    def value_states(self, X, base, s, ss, small, warp, lane):
        """b, vs = (v - kd S)^T, and this warp's part of rowsum_v(dS S): one sum a lane and 16 columns of K."""
        p, lanes = self.plan, LaneRows(lane)
        row, chunk = lanes.rows_first()
        states = MatrixRows(p["states"], base, ss, 32 * warp + row, chunk)
        v_columns = self.value_columns("v", base, s, warp, lanes)
        kd = pairs_along_columns(p["kd"].view(base, s), lane)
        kdS = self.mma.accumulators(2, 2)
        dgT_part = p["dgT_part"].view(base, small)
        for kb in range(K_BLOCKS):
            b_kd = [self.mma.operand_b(block_b(kd, n, 2 * kb, False)) for n in range(2)]
            sums = [Float32(0)] * 4
            for i in range(2):
                packed = states.load(16 * i, 2 * kb)
                a = self.mma.a_from_ldmatrix(packed)
                for n in range(2):
                    self.mma.step(kdS, i, n, a, b_kd[n])
                for j, (x, state) in enumerate(zip(block_values(X, i, 2 * kb), unpack_bf16(packed), strict=True)):
                    at = j % 2 + 2 * (j // 4)
                    sums[at] = sums[at] + x * state
            store_column_sums(dgT_part, column_sums(*sums, lane), warp, 16 * kb, lane)
        line = p["beta"].view(base, s)
        b = [line[0, 8 * n + 2 * (lane % 4) + i] for n in range(2) for i in range(2)]
        vs = []
        for i in range(2):
            v = unpack_bf16(v_columns.load(chunk_step=2 * i, transpose=True))
            vs.append([a - x for a, x in zip(v, block_values(kdS, i, 0), strict=True)])
        return b, vs

    def store_dS(self, base, warp, lane):
        """(i, kb, operand) -> None: rows 32 warp + 16 i, columns 16 kb of dS^T to shared memory, from its A operand."""
        tile = self.plan["dS"]
        if self.tf32:
            view = pairs_along_columns(tile.view(base), lane)

            def store(i, kb, a):
                values = self.mma.values_a(a)
                for at in range(0, 8, 2):
                    store_pair(view, 4 * warp + 2 * i + at // 2 % 2, 2 * kb + at // 4, values[at : at + 2])

            return store
        row, chunk = LaneRows(lane).rows_first()
        rows = MatrixRows(tile, base, 0, 32 * warp + row, chunk)
        return lambda i, kb, a: rows.store(a, 16 * i, 2 * kb)

    def value_u(self, vs, b, base, s, lane):
        """U^T = (b (v - kd S))^T INV^T."""
        inv = MatrixRows(self.plan["inv"], base, s, *LaneRows(lane).columns_first())
        b_inv = self.mma.b_pair_from_ldmatrix(inv.load())
        U = self.mma.accumulators(2, 2)
        for i in range(2):
            a = self.mma.operand_a([x * b[j % 2 + 2 * (j // 4)] for j, x in enumerate(vs[i])])
            for n in range(2):
                self.mma.step(U, i, n, a, b_inv[n])
        return U

    def publish_dvc(self, dvc, vs, b, base, small, warp, lane):
        """dvc, dv and this warp's part of rowsum_v(dvc (v - kd S)).  Returns b dvc, 8 values for each 16 rows of v."""
        self.publish_columns("dvc", dvc, base, warp, lane)
        dv = self.value_columns("dv", base, 0, warp, LaneRows(lane))
        bdvc, sums = [], [Float32(0)] * 4
        for i in range(2):
            values = block_values(dvc, i, 0)
            bdvc.append([x * b[j % 2 + 2 * (j // 4)] for j, x in enumerate(values)])
            dv.store(packed_bf16(bdvc[i]), chunk_step=2 * i, transpose=True)
            for j, (x, y) in enumerate(zip(values, vs[i], strict=True)):
                at = j % 2 + 2 * (j // 4)
                sums[at] = sums[at] + x * y
        store_column_sums(self.plan["dbeta_part"].view(base, small), column_sums(*sums, lane), warp, 0, lane)
        return bdvc

    def publish_columns(self, name, acc, base, warp, lane):
        """This warp's columns v of U or dvc, rounded to the key warps' operand: accumulators [v, token] to rows of tokens."""
        rows = self.value_columns(name, base, 0, warp, LaneRows(lane))
        view = pairs_along_rows(self.plan[name].view(base), lane)
        for i in range(2):
            values = block_values(acc, i, 0)
            if self.tf32:
                for at in range(0, 8, 2):
                    pair = [from_bits(round_tf32(x)) for x in values[at : at + 2]]
                    store_pair(view, at // 4, 4 * warp + 2 * i + at // 2 % 2, pair)
            else:
                rows.store(packed_bf16(values), chunk_step=2 * i, transpose=True)

    def value_update(self, X, do_t, bdvc, base, s, lane):
        """dS^T <- dS^T exp(gT) + do^T qd - (b dvc)^T kd."""
        p = self.plan
        eg = pairs_along_columns(p["g_total"].view(base, s), lane % 4)
        qd = pairs_along_rows(p["qd"].view(base, s), lane)
        kd = pairs_along_rows(p["kd"].view(base, s), lane)
        minus = [self.mma.operand_a([-x for x in values]) for values in bdvc]
        for n in range(2 * K_BLOCKS):
            scale = load_pair(eg, 0, n)
            b_qd = self.mma.operand_b(block_b(qd, n, 0, True))
            b_kd = self.mma.operand_b(block_b(kd, n, 0, True))
            for i in range(2):
                for half in range(2):
                    for e in range(2):
                        X[(e, half), i, n] = X[(e, half), i, n] * scale[e]
                self.mma.step(X, i, n, do_t[i], b_qd)
                self.mma.step(X, i, n, minus[i], b_kd)

    # ------------------------------------------------------------ key warps
    @cute.jit
    def key_role(self, m: Gmem, walk: Walk, base, bars, warp: Int32):
        """Columns k = 16 warp .. 16 warp + 15 of every output tile."""
        lane = cute.arch.lane_idx()
        if walk.tiles > 0:
            if walk.tail < C:
                self.zero_tail(walk, base, bars)
        for it in cutlass.range(walk.tiles, unroll=1):
            t = walk.tiles - 1 - it
            rows = walk.tail if it == 0 else Int32(C)
            s, ss, small = it % self.stages, it % self.state_stages, it % 2
            cute.arch.mbarrier_wait(bars + Bar.FULL + s, (it // self.stages) & 1)
            cute.arch.mbarrier_wait(bars + Bar.STATES_FULL + ss, (it // self.state_stages) & 1)
            cute.arch.mbarrier_wait(bars + Bar.HAND_FULL, it & 1)
            self.key_triangles(base, s, small, warp, lane)
            F = self.mma.accumulators(1, 2)
            if warp == 4:
                self.key_gram(F, base, s, lane)
            dkr, dqd, dkd = self.key_contract(base, s, ss, warp, lane)
            dgT, dbeta = self.key_partials(base, small, warp, lane)
            self.store_dv(m, base, walk.token + t * C, walk.h, rows)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars + Bar.HAND_EMPTY)
                cute.arch.mbarrier_arrive(bars + Bar.STATES_EMPTY + ss)
            cute.arch.barrier(barrier_id=Sync.KEYS, number_of_threads=32 * KEY_WARPS)
            tile = Int64(walk.tile + t)
            if warp == 4:
                self.store_dbeta(m.dbeta, F, dbeta, base, small, walk.h, tile, lane)
            dki, dgT = self.key_mix(dkr, dqd, dkd, dgT, base, s, small, warp, lane)
            self.store_dgT(m.dgT, dgT, walk.h, tile, warp, lane)
            self.store_slice(m.dkd[walk.h, tile, None, None], dkd, warp, lane)
            self.store_slice(m.dqd[walk.h, tile, None, None], dqd, warp, lane)
            self.store_slice(m.dki[walk.h, tile, None, None], dki, warp, lane)
            self.store_slice(m.dkr[walk.h, tile, None, None], dkr, warp, lane)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars + Bar.EMPTY + s)

    @cute.jit
    def key_triangles(self, base, s: Int32, small: Int32, warp: Int32, lane: Int32):
        """Warps 0, 1: columns of dM = do U^T; warps 2, 3: of -dL = dvc U^T.  Strictly lower parts and dM's diagonal."""
        half_n = warp % 2
        if warp < 4:
            acc = self.mma.accumulators(1, 1)
            if warp < 2:
                self.triangle(acc, "do", base, s, half_n, lane)
            else:
                self.triangle(acc, "dvc", base, s, half_n, lane)
            self.store_triangle(acc, base, s, small, half_n, warp < 2, lane)

    @cute.jit
    def store_triangle(self, acc, base, s: Int32, small: Int32, half_n: Int32, is_dM: cutlass.Boolean, lane: Int32):
        """The strictly lower part of half the columns of dM or -dL."""
        sM, sDiagonal, sL, sLb = (self.plan[n].view(base, small) for n in ("dM", "dM_diag", "dL", "dLb"))
        b = self.plan["beta"].view(base, s)
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

    def triangle(self, acc, name, base, s, half_n, lane):
        """acc += X U^T for X = do or dvc."""
        a, u = self.do_operand(base, s, lane) if name == "do" else self.operand_rows(name, base, lane), self.u_columns(base, lane)
        for kb in range(K_BLOCKS):
            self.mma.step(acc, 0, 0, a(kb), u(half_n, kb))

    def do_operand(self, base, s, lane):
        """kb -> A operand: rows of tokens, k = v 16 kb .., of do."""
        rows = MatrixRows(self.plan["do"], base, s, *LaneRows(lane).rows_first())
        return lambda kb: self.mma.a_from_ldmatrix(rows.load(chunk_step=2 * kb))

    def operand_rows(self, name, base, lane):
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

    def key_gram(self, F, base, s, lane):
        """F = kd ki^T."""
        kd = pairs_along_columns(self.plan["kd"].view(base, s), lane)
        ki = pairs_along_columns(self.plan["ki"].view(base, s), lane)
        for kb in range(K_BLOCKS):
            a = self.mma.operand_a(block_a(kd, 0, 2 * kb))
            for n in range(2):
                self.mma.step(F, 0, n, a, self.mma.operand_b(block_b(ki, n, 2 * kb, False)))

    def key_contract(self, base, s, ss, warp, lane):
        """dkr = U dS^T, do S^T, dvc S^T: columns of this warp, contracted over v."""
        dkr, dqd, dkd = (self.mma.accumulators(1, 2) for _ in range(3))
        do, dvc, u = self.do_operand(base, s, lane), self.operand_rows("dvc", base, lane), self.operand_rows("U", base, lane)
        row, chunk = LaneRows(lane).rows_first()
        states = MatrixRows(self.plan["states"], base, ss, row, 2 * warp + chunk)
        if self.tf32:
            view = pairs_along_rows(self.plan["dS"].view(base), lane)
        else:
            dS = MatrixRows(self.plan["dS"], base, 0, row, 2 * warp + chunk)
        for kb in range(K_BLOCKS):
            b_s = self.mma.b_pair_from_ldmatrix(states.load(16 * kb, transpose=True))
            if self.tf32:
                b_ds = [self.mma.exact_b(block_b(view, 2 * warp + n, 2 * kb, True)) for n in range(2)]
            else:
                b_ds = self.mma.b_pair_from_ldmatrix(dS.load(16 * kb, transpose=True))
            a_do, a_dvc, a_u = do(kb), dvc(kb), u(kb)
            for n in range(2):
                self.mma.step(dqd, 0, n, a_do, b_s[n])
                self.mma.step(dkd, 0, n, a_dvc, b_s[n])
                self.mma.step(dkr, 0, n, a_u, b_ds[n])
        for n in range(2):
            for half in range(2):
                for e in range(2):
                    dkd[(e, half), 0, n] = -dkd[(e, half), 0, n]
        return dkr, dqd, dkd

    @cute.jit
    def key_partials(self, base, small: Int32, warp: Int32, lane: Int32):
        """Sums over the value warps of rowsum_v(dS S), in the lanes' order of `column_sums`, and of dbeta, one token a lane."""
        sDgT, sDbeta = self.plan["dgT_part"].view(base, small), self.plan["dbeta_part"].view(base, small)
        at = summed_column(lane)
        dgT, dbeta = Float32(0), Float32(0)
        for w in cutlass.range_constexpr(VALUE_WARPS):
            dgT = dgT + sDgT[w, 16 * warp + at]
            dbeta = dbeta + sDbeta[w, lane % C]
        return dgT, dbeta

    @cute.jit
    def store_dv(self, m: Gmem, base, token: Int32, h: Int32, rows: Int32):
        """dv rows of the chunk that belong to the sequence; one 16-byte vector a thread."""
        tid, _, _ = cute.arch.thread_idx()
        i = tid - 32 * VALUE_WARPS
        row, col = i // 16, i % 16
        if row < rows:
            src = cute.local_tile(self.plan["dv"].view(base), (1, 8), (row, col))[0, None]
            values = cute.make_rmem_tensor((8,), BFloat16)
            cute.autovec_copy(src, values)
            cute.autovec_copy(values, cute.local_tile(m.dv[Int64(token + row), h, None], (8,), (col,)))

    @cute.jit
    def store_dbeta(self, mDbeta: cute.Tensor, F, dbeta: Float32, base, small: Int32, h: Int32, tile: Int64, lane: Int32):
        """dbeta = its part over v + rowsum(dL F); one warp."""
        dL = pairs_along_columns(self.plan["dL"].view(base, small), lane)
        for half in cutlass.range_constexpr(2):
            total = Float32(0)
            for n in cutlass.range_constexpr(2):
                pair = load_pair(dL, half, n)
                total = total + pair[0] * F[(0, half), 0, n] + pair[1] * F[(1, half), 0, n]
            total = quad_sum(total)
            row = lane // 4 + 8 * half
            over_v = cute.arch.shuffle_sync(dbeta, offset=row)
            if lane % 4 == 0:
                mDbeta[h, tile, row] = total + over_v

    def key_mix(self, dkr, dqd, dkd, dgT, base, s, small, warp, lane):
        """dqd += dM ki, dkd = b (dkd + dL ki), dki = dM^T qd + (b dL)^T kd, diagonal of dM in fp32; dgT of this warp."""
        p = self.plan
        dM, dL = (pairs_along_columns(p[n].view(base, small), lane) for n in ("dM", "dL"))
        dM_t, dLb_t = (pairs_along_rows(p[n].view(base, small), lane) for n in ("dM", "dLb"))
        a_m, a_l = self.mma.operand_a(block_a(dM, 0, 0)), self.mma.operand_a(block_a(dL, 0, 0))
        a_mt, a_lt = self.mma.operand_a(transposed_a(dM_t)), self.mma.operand_a(transposed_a(dLb_t))
        rows = {n: pairs_along_rows(p[n].view(base, s), lane) for n in ("kd", "qd", "ki")}
        cols = {n: pairs_along_columns(p[n].view(base, s), lane) for n in ("kr", "qd", "ki")}
        dki = self.mma.accumulators(1, 2)
        for n in range(2):
            b_kd, b_qd, b_ki = (self.mma.operand_b(block_b(rows[x], 2 * warp + n, 0, True)) for x in ("kd", "qd", "ki"))
            self.mma.step(dqd, 0, n, a_m, b_ki)
            self.mma.step(dkd, 0, n, a_l, b_ki)
            self.mma.step(dki, 0, n, a_mt, b_qd)
            self.mma.step(dki, 0, n, a_lt, b_kd)
        diagonal, b = p["dM_diag"].view(base, small), p["beta"].view(base, s)
        sums = [Float32(0)] * 4
        for half in range(2):
            row = lane // 4 + 8 * half
            mii, bi = diagonal[0, row], b[0, row]
            for n in range(2):
                kr, qd, ki = (load_pair(cols[x], half, 2 * warp + n) for x in ("kr", "qd", "ki"))
                for e in range(2):
                    at = (e, half)
                    dqd[at, 0, n] = dqd[at, 0, n] + mii * ki[e]
                    dki[at, 0, n] = dki[at, 0, n] + mii * qd[e]
                    dkd[at, 0, n] = dkd[at, 0, n] * bi
                    sums[e + 2 * n] = sums[e + 2 * n] + dkr[at, 0, n] * kr[e]
        eg = p["g_total"].view(base, s)[0, 16 * warp + summed_column(lane)]
        return dki, eg * dgT + column_sums(*sums, lane)

    @cute.jit
    def store_dgT(self, mDgT: cute.Tensor, dgT: Float32, h: Int32, tile: Int64, warp: Int32, lane: Int32):
        if (lane & 4) == 0:
            mDgT[h, tile, 16 * warp + summed_column(lane)] = dgT

    def store_slice(self, out, acc, warp, lane):
        """This warp's 16 columns of a [16, 128] output tile."""
        r, c = lane // 4, lane % 4
        for n in range(2):
            for half in range(2):
                pair = cute.make_rmem_tensor((2,), Float32)
                for e in range(2):
                    pair[e] = acc[(e, half), 0, n]
                line = out[r + 8 * half, None]
                cute.autovec_copy(pair, cute.local_tile(line, (2,), (8 * warp + 4 * n + c,)))


# ---------------------------------------------------------------- small parts
def clamp(x, top):
    """x as Int32 within [0, top]."""
    return cutlass.max(cutlass.min(Int32(x), top), 0)


def sigmoid(x):
    """1 / (1 + exp(-x)) by ex2 and rcp; 0 for very negative x."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -1.4426950408889634, fastmath=True))


def summed_column(lane):
    """The column, of 16, whose sum `column_sums` leaves in this lane."""
    return 8 * (lane // 16) + 2 * (lane % 4) + lane // 8 % 2


@cute.jit
def store_column_sums(line: cute.Tensor, total: Float32, row: Int32, col: Int32, lane: Int32):
    """Store the 16 sums of a block's columns at line[row, col ..]."""
    if (lane & 4) == 0:
        line[row, col + summed_column(lane)] = total


def transposed_a(view):
    """A operand's 8 values of a stored [k, m] 16 x 16 tile seen by pairs along rows."""
    out = []
    for s in range(2):
        for half in range(2):
            out += load_pair(view, s, half)
    return out


@cute.jit
def select_half(pair, which: Int32):
    """pair[which] of two B operands."""
    out = cute.make_rmem_tensor(((2, 2), 1), BFloat16)
    a, b, o = (cute.recast_tensor(cute.make_tensor(x.iterator, cute.make_layout(4)), Int32) for x in (pair[0], pair[1], out))
    for i in cutlass.range_constexpr(2):
        o[i] = b[i] if which == 1 else a[i]
    return out


def copy_tokens(tma, tile, token, h, bar):
    """16 rows from `token` on, of head h, to a tile."""
    rows = cute.local_tile(cute.domain_offset((token, 0), tma.tensor[None, None, h]), (C, D), (0, 0))
    copy_tile(tma.atom, rows, tile, bar)


def copy_tile(atom, src, dst, bar):
    """One tensor copy, completing on bar."""
    dst, src = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(dst, 0, 2), cute.group_modes(src, 0, 2)
    )
    cute.copy(atom, src, dst, tma_bar_ptr=bar)


# ---------------------------------------------------------------- compile
def trace(config: Config):
    """(jit callable, fake arguments) for `compile.KernelSpec`: T, H, N and tiles dynamic."""
    sym = cute.sym_int
    T, H, N, tiles = sym(), sym(), sym(), sym()

    def fake(dtype, *shape, align=16):
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    types = {"bf16": BFloat16, "f32": Float32}
    wide = lambda: fake(Float32, H, tiles, C, D)  # noqa: E731
    square = lambda: fake(BFloat16, H, tiles, C, C)  # noqa: E731
    tokens = lambda: fake(BFloat16, T, H, D)  # noqa: E731
    state_type = types.get(config.state_grad, Float32)
    dfinal = fake(state_type, N, H, D, D) if config.state_grad != "none" else None
    cu = None
    if config.varlen:
        cu = cute.runtime.make_fake_tensor(Int32, (sym(),), stride=(sym(),), assumed_align=4)
    arguments = (
        tokens(), tokens(), fake(types[config.beta], T, H, align=2 if config.beta == "bf16" else 4),
        wide(), wide(), wide(), wide(), fake(Float32, H, tiles, D), square(), square(), fake(BFloat16, H, tiles, D, D),
        dfinal, cu,
        wide(), wide(), wide(), wide(), fake(Float32, H, tiles, D), tokens(), fake(Float32, H, tiles, C),
        fake(state_type, N, H, D, D),
    )  # fmt: skip
    return BwdRecurrence(config), arguments
