"""Gates, their running sum, norms: the elementwise head of the transition.

A thread owns two neighbouring channels and 16 tokens; 64 threads cover a token's channels.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from ...device.matrix_rows import MatrixRows
from ...device.warp_mma import packed_bf16, select, unpack_bf16
from .schedule import (
    BLOCK,
    DEEPEST,
    GROUP,
    LOG2E,
    NORM_EPS,
    C,
    Chunk,
    D,
    Gmem,
    NamedBar,
    Options,
)


class Gate:
    """Code of all warps, before the products."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan

    # ------------------------------------------------------------ gate
    @cute.jit
    def accumulate(self, m: Gmem, at: Chunk, base, tid: Int32, lower_bound: Float32):
        """gc = cumsum of the gate, in log2, to shared memory; eg = exp(gT) to global memory."""
        pair, quarter = tid % (D // 2), tid // (D // 2)
        rate, bias = self.parameters(m, at, pair)
        raw = self.read(m, at, pair, quarter)
        sums, total = [], [Float32(0), Float32(0)]
        for r in cutlass.range_constexpr(BLOCK):
            inside = BLOCK * quarter + r < at.rows
            for i in cutlass.range_constexpr(2):
                g = self.activate(raw[r][i], rate, bias[i], lower_bound)
                g = cutlass.max(g, Float32(DEEPEST))
                total[i] = total[i] + (g if inside else Float32(0))
            sums.append(list(total))
        totals = self.plan["totals"].view(base)
        self.store_row(totals, quarter, pair, total)
        cute.arch.sync_threads()
        before, whole = self.totals_before(totals, quarter, pair)
        gc = self.plan["gc"].view(base)
        for r in cutlass.range_constexpr(BLOCK):
            self.store_row(
                gc, BLOCK * quarter + r, pair, [sums[r][i] + before[i] for i in range(2)]
            )
        if quarter == 0:
            out = cute.local_tile(m.eg[at.slot, at.h, None], (2,), (pair,))
            decay = cute.make_rmem_tensor((2,), Float32)
            decay[0] = exp2(whole[0])
            decay[1] = exp2(whole[1])
            cute.autovec_copy(decay, out)

    def parameters(self, m, at, pair):
        """exp(A_log) log2(e), and dt_bias of the thread's two channels."""
        if const_expr(self.config.gate == "log"):
            return Float32(LOG2E), [Float32(0)] * 2
        bias = [m.dt_bias[at.h, 2 * pair + i] for i in range(2)]
        return exp2(m.A_log[at.h] * LOG2E) * LOG2E, bias

    def read(self, m, at, pair, quarter):
        """The thread's raw gates, [16][2]; rows past the end repeat the last one."""
        values = []
        for r in range(BLOCK):
            row = cutlass.min(BLOCK * quarter + r, at.rows - 1)
            line = cute.local_tile(m.g[at.b, at.token + row, at.h, None], (2,), (pair,))
            two = cute.make_rmem_tensor((2,), line.element_type)
            cute.autovec_copy(line, two)
            if const_expr(self.config.g == "bf16"):
                values.append(two)
            else:
                values.append([two[0], two[1]])
        if const_expr(self.config.g == "bf16"):
            values = [unpack_bf16(two) for two in values]
        return values

    def activate(self, x, rate, bias, lower_bound):
        """The gate in log2 of the decay; `rate` holds a factor log2(e)."""
        if const_expr(self.config.gate == "log"):
            return x * rate
        y = (x + bias) * rate
        if const_expr(self.config.gate == "safe"):
            return lower_bound * LOG2E * cute.arch.rcp_approx(1.0 + exp2(-y))
        return -(rate * softplus((x + bias) * LOG2E)) * (1.0 / LOG2E)

    def totals_before(self, totals, quarter, pair):
        """(sums of the quarters before this one, of all) for the thread's two channels."""
        before, whole = [Float32(0)] * 2, [Float32(0)] * 2
        for q in range(C // BLOCK):
            part = cute.make_rmem_tensor((2,), Float32)
            cute.autovec_copy(cute.local_tile(totals[q, None], (2,), (pair,)), part)
            for i in range(2):
                whole[i] = whole[i] + part[i]
                before[i] = before[i] + select(quarter > q, part[i], Float32(0))
        return before, whole

    @staticmethod
    def store_row(tile, row, pair, values):
        two = cute.make_rmem_tensor((2,), Float32)
        two[0] = values[0]
        two[1] = values[1]
        cute.autovec_copy(two, cute.local_tile(tile[row, None], (2,), (pair,)))

    # ------------------------------------------------------------ beta, norms
    @cute.jit
    def activate_beta(self, m: Gmem, at: Chunk, base, tid: Int32, o: Options):
        """b of the chunk's tokens; 0 past the end."""
        line = self.plan["rows"].view(base)
        if tid < C:
            b = Float32(0)
            if tid < at.rows:
                b = Float32(m.beta[at.b, at.token + tid, at.h])
                if o.beta_sigmoid != 0:
                    b = cute.arch.rcp_approx(1.0 + exp2(b * -LOG2E))
                b = b * o.beta_scale
            line[2, tid] = b

    @cute.jit
    def norms(self, m: Gmem, at: Chunk, base, tid: Int32, o: Options):
        """Factors of the rows of k and q (1 / norm, times scale for q), and the diagonal of q k^T.

        A thread sums a quarter of a row; the order of its pieces keeps 8 lanes on 8 banks' worth.
        """
        row, part = tid // 4, tid % 4
        k, q = (
            MatrixRows(self.plan[name], base, 0, row, 8 * (part // 2) + 4 * (part % 2))
            for name in ("k", "q")
        )
        sums = [Float32(0)] * 3
        for j in cutlass.range_constexpr(4):
            step = Int32(j) ^ (part // 2 * 2)
            a, b = (unpack_bf16(x.load_piece(step)) for x in (k, q))
            for i in cutlass.range_constexpr(8):
                sums[0] = sums[0] + a[i] * a[i]
                sums[1] = sums[1] + b[i] * b[i]
                sums[2] = sums[2] + a[i] * b[i]
        for offset in cutlass.range_constexpr(1, 3):
            sums = [x + cute.arch.shuffle_sync_bfly(x, offset=offset) for x in sums]
        fk, fq = Float32(1), Float32(1)
        if o.l2norm != 0:
            fk = cute.math.rsqrt(sums[0] + NORM_EPS, fastmath=True)
            fq = cute.math.rsqrt(sums[1] + NORM_EPS, fastmath=True)
        fq = fq * o.scale
        line = self.plan["rows"].view(base)
        if part == 0:
            line[0, row] = fk
            line[1, row] = fq
            m.qk[at.slot, at.h, row] = fk * fq * sums[2]

    # ------------------------------------------------------------ tiles
    @cute.jit
    def make_tiles(self, base, t: Int32):
        """kd over k, qd over q, and kr over gc; 128 threads, two channels and 32 tokens each."""
        pair, half = t % (D // 2), t // (D // 2)
        gc = self.plan["gc"].view(base)
        rows = C // 2
        sums = [self.load_row(gc, rows * half + r, pair) for r in range(rows)]
        last = self.load_row(gc, C - 1, pair)
        cute.arch.barrier(barrier_id=NamedBar.TILES, number_of_threads=GROUP)
        factors = self.plan["rows"].view(base)
        pieces = [
            [PairColumn(self.plan[name], base, rows * half, pair, r) for r in range(8)]
            for name in ("k", "q", "kr")
        ]
        for r in cutlass.range_constexpr(rows):
            row = rows * half + r
            fk, fq = factors[0, row], factors[1, row]
            at_k, at_q, at_kr = (x[r % 8].at(r // 8 * 8) for x in pieces)
            k, q = load_two(at_k), load_two(at_q)
            start = [exp2(sums[r][i]) for i in range(2)]
            end = [exp2(last[i] - sums[r][i]) for i in range(2)]
            store_two(at_k, [k[i] * (start[i] * fk) for i in range(2)])
            store_two(at_q, [q[i] * (start[i] * fq) for i in range(2)])
            store_two(at_kr, [k[i] * (end[i] * fk) for i in range(2)])

    @staticmethod
    def load_row(tile, row, pair):
        two = cute.make_rmem_tensor((2,), Float32)
        cute.autovec_copy(cute.local_tile(tile[row, None], (2,), (pair,)), two)
        return [two[0], two[1]]


class PairColumn:
    """Two neighbouring columns of a bf16 tile, seen from row `row` + r: rows 8 apart are immediate
    offsets.
    """

    def __init__(self, tile, base, row, pair, r):
        self.rows = MatrixRows(tile, base, 0, row + r, pair // 4)
        self.inside = 2 * (pair % 4)

    def at(self, row_step):
        pointer = self.rows.piece_pointer(row_step) + cute.assume(self.inside, divby=2)
        return cute.make_tensor(pointer, cute.make_layout(2))


def load_two(at):
    two = cute.make_rmem_tensor((2,), BFloat16)
    cute.autovec_copy(at, two)
    return unpack_bf16(two)


def store_two(at, values):
    cute.autovec_copy(packed_bf16(values), at)


def exp2(x):
    """2^x by the hardware's approximation, 0 far below."""
    return cute.math.exp2(x, fastmath=True)


def softplus(y):
    """log2(1 + 2^y), accurate also where 2^y is small."""
    z = exp2(-cute.math.absf(y))
    small = z * LOG2E * (1.0 - z * (0.5 - z * (1.0 / 3.0)))
    large = cute.math.log2(1.0 + z, fastmath=True)
    return cutlass.max(y, Float32(0)) + select(z < Float32(2.0**-8), small, large)
