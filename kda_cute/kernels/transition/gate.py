"""Gates, norms and b: the head of the transition.

A block of 16 tokens leaves three products of its decays for the other blocks: of all, of the first,
of all but the first.
"""

import enum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from ...device.chunk import Chunk, Options
from ...device.math import LOG2E, at_least, exp2, sigmoid, softplus
from ...device.matrix_rows import MatrixRows
from ...device.vectors import load_two, store_two
from ...device.warp_mma import WarpMma, select, unpack_word, words
from .columns import Columns, RowWords, falling
from .schedule import (
    BLOCK,
    BLOCKS,
    NORM_EPS,
    STEPS,
    C,
    Factor,
    Gmem,
)


class Total(enum.IntEnum):
    """First row of a product of decays in the tile `totals`; a row for each block."""

    WHOLE = 0
    FIRST = BLOCKS  # the first token's
    REST = 2 * BLOCKS  # all but the first token's


class Inputs(NamedTuple):
    """A thread's loads from global memory, as they came: its gates, the parameters of its channels
    (None for a gate that has none), and beta of token tid.
    """

    g: cute.Tensor  # [2, 16]
    rate: Float32
    bias: list[Float32]
    beta: Float32


class Gate:
    """Code of all warps, before the products."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan
        self.mma = WarpMma("bf16")

    # ------------------------------------------------------------ decays
    @cute.jit
    def decays(self, at: Chunk, base, own: Columns, raw: Inputs, lower_bound: Float32):
        """own.e, and the block's products to shared memory."""
        rate, bias = self.parameters(raw)
        for r in cutlass.range_constexpr(BLOCK):
            x = [raw.g[i, r] for i in range(2)]
            if const_expr(self.config.g == "bf16"):
                x = unpack_word(words(raw.g[None, r])[0])
            for i in cutlass.range_constexpr(2):
                own.e[i, r] = exp2(self.activate(x[i], rate, bias[i], lower_bound))
        if at.rows < C:
            for r in cutlass.range_constexpr(BLOCK):
                inside = BLOCK * own.block + r < at.rows
                for i in cutlass.range_constexpr(2):
                    own.e[i, r] = select(inside, own.e[i, r], Float32(1))
        rest = falling(own.e, 0, BLOCK - 1)[BLOCK - 1]
        first = [own.e[i, 0] for i in range(2)]
        totals = self.plan["totals"].view(base)
        store_two(totals, own.block + Total.REST, own.pair, rest)
        store_two(totals, own.block + Total.FIRST, own.pair, first)
        store_two(totals, own.block + Total.WHOLE, own.pair, [rest[i] * first[i] for i in range(2)])

    def read(self, m, at, own, tid) -> Inputs:
        """Issue all loads before anything waits for one; past the end, of the last token."""
        raw = cute.make_rmem_tensor((2, BLOCK), m.g.element_type)
        self.read_gates(m, at, own, raw)
        beta = m.beta[at.b, at.token + cutlass.min(tid, at.rows - 1), at.h]
        rate, bias = None, [None, None]
        if self.config.gate != "log":
            rate, bias = m.A_log[at.h], [m.dt_bias[at.h, 2 * own.pair + i] for i in range(2)]
        return Inputs(raw, rate, bias, beta)

    @cute.jit
    def read_gates(self, m: Gmem, at: Chunk, own: Columns, raw: cute.Tensor):
        """The thread's raw gates; rows past the end repeat the last one."""
        first = BLOCK * own.block
        if at.rows == C:
            line = cute.local_tile(m.g[at.b, at.token + first, at.h, None], (2,), (own.pair,))
            lines = cute.make_tensor(
                line.iterator, cute.make_layout((2, BLOCK), stride=(1, m.g.stride[1]))
            )
            for r in cutlass.range_constexpr(BLOCK):
                cute.autovec_copy(lines[None, r], raw[None, r])
        else:
            for r in cutlass.range_constexpr(BLOCK):
                row = cutlass.min(first + r, at.rows - 1)
                line = cute.local_tile(m.g[at.b, at.token + row, at.h, None], (2,), (own.pair,))
                cute.autovec_copy(line, raw[None, r])

    def parameters(self, raw):
        """(rate, bias of the thread's two channels), as `activate` wants them."""
        if self.config.gate == "log":
            return Float32(LOG2E), [Float32(0)] * 2
        rate = exp2(raw.rate * LOG2E)
        if self.config.gate == "safe":
            rate = -rate * LOG2E
            return rate, [x * rate for x in raw.bias]
        return -rate, [x * LOG2E for x in raw.bias]

    def activate(self, x, rate, bias, lower_bound):
        """log2 of the decay."""
        if const_expr(self.config.gate == "log"):
            return x * rate
        if const_expr(self.config.gate == "safe"):
            return lower_bound * LOG2E * cute.arch.rcp_approx(1.0 + exp2(x * rate + bias))
        return rate * softplus(x * LOG2E + bias)

    @cute.jit
    def store_total(self, m: Gmem, at: Chunk, base, own: Columns):
        """eg = exp(gT) to global memory."""
        if own.block == 0:
            totals = self.plan["totals"].view(base)
            decay = load_two(totals, Total.WHOLE, own.pair)
            for b in cutlass.range_constexpr(1, BLOCKS):
                part = load_two(totals, Total.WHOLE + b, own.pair)
                decay = [decay[i] * part[i] for i in range(2)]
            store_two(m.eg[at.slot, None, None], at.h, own.pair, decay)

    # ------------------------------------------------------------ keys, queries, b
    def take(self, base, own):
        """k and q to registers."""
        for name, line in (("k", own.k), ("q", own.q)):
            rows = RowWords(self.plan[name], base, BLOCK * own.block, own.pair)
            for r in range(BLOCK):
                line[r] = rows.load(r)

    @cute.jit
    def activate_beta(self, at: Chunk, base, raw: Inputs, tid: Int32, o: Options):
        """b of the chunk's tokens; 0 past the end."""
        line = self.plan["factors"].view(base)
        if tid < C:
            b = Float32(raw.beta)
            if o.beta_sigmoid != 0:
                b = sigmoid(b)
            else:
                if const_expr(self.config.backward):
                    b = at_least(b)
            b = b * o.beta_scale
            line[Factor.B, tid] = select(tid < at.rows, b, Float32(0))

    @cute.jit
    def norms(self, m: Gmem, at: Chunk, base, warp: Int32, lane: Int32, o: Options):
        """Factors of the rows of k and q (1 / norm, times scale for q), and the diagonal of mqk, from
        the diagonals of k k^T, q k^T and q q^T: eight rows a warp.
        """
        by_k, by_q = self.mma.accumulators(1, 1), self.mma.accumulators(1, 1)
        rows = MatrixRows(self.plan["k"], base, 0, 8 * warp + lane % 8, lane // 16)
        rows.shift(lane // 8 % 2 * (self.plan["q"].offset - self.plan["k"].offset))
        for step in cutlass.range_constexpr(STEPS):
            both = rows.load(0, 2 * step)  # rows of k, then of q
            a = self.mma.a_from_ldmatrix(both)
            k, q = self.mma.b_halves(both)
            self.mma.step(by_k, 0, 0, a, k)
            self.mma.step(by_q, 0, 0, a, q)
        r, c = lane // 4, lane % 4
        odd = r % 2 == 1
        kk = select(odd, by_k[(1, 0), 0, 0], by_k[(0, 0), 0, 0])
        qk = select(odd, by_k[(1, 1), 0, 0], by_k[(0, 1), 0, 0])
        qq = select(odd, by_q[(1, 1), 0, 0], by_q[(0, 1), 0, 0])
        if c == r // 2:
            row = 8 * warp + r
            fk, fq = Float32(1), Float32(1)
            if o.l2norm != 0:
                fk = cute.math.rsqrt(kk + NORM_EPS, fastmath=True)
                fq = cute.math.rsqrt(qq + NORM_EPS, fastmath=True)
            fq = fq * o.scale
            factors = self.plan["factors"].view(base)
            factors[Factor.K, row] = fk
            factors[Factor.Q, row] = fq
            bk = fk * factors[Factor.B, row]
            factors[Factor.BK, row] = bk
            diagonal = bk * fq * qk
            m.qk[at.slot, at.h, row] = diagonal
            mqk = self.plan["mqk"].view(base)
            mqk[row, row] = BFloat16(diagonal)
