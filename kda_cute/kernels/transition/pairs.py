"""Products of all pairs of tokens inside a chunk, exact for any gate: the dyadic scheme.

Of a pair i > j, let s be the highest bit in which i and j differ, and a the multiple of s between
them (j < a <= i).  The decay from j to i is exp(gc_i - gc_a) exp(gc_a - gc_j): both factors are at
most 1 for every gate <= 0.  So the pairs of a level s are products of 32 left rows (bit s set) and
32 right rows (bit s clear): one wgmma of the left rows of k and of q with the right rows of k, of
whose results those inside a square of s x s count.

Operands are k and q times factors, all of them rounded to bf16; row p of an operand is the p-th left
(or right) token, whose number is p with the bit s inserted.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import warpgroup as wg
from ...device.matrix_rows import MatrixRows
from ...device.warp_mma import packed_bf16, select
from .columns import Columns, RowWords, falling, load_pair, rising, scaled
from .gate import Total
from .schedule import BLOCK, GROUP, LEVELS, C, Factor

HALF = C // 2  # left or right rows of a level


class Pairs:
    """Code of all warps: L (below the diagonal, fp32) and mqk (likewise, bf16) in shared memory."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan

    @cute.jit
    def run(self, base, own: Columns, warp: Int32, lane: Int32, tid: Int32):
        """Two levels at a time; a warpgroup multiplies one of them."""
        for n in cutlass.range_constexpr(0, len(LEVELS), 2):
            for i in cutlass.range_constexpr(2):
                self.operands(base, own, LEVELS[n + i], i)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            if warp < 4:
                self.multiply(base, LEVELS[n], 0, warp, lane, tid)
            else:
                self.multiply(base, LEVELS[n + 1], 1, warp - 4, lane, tid - GROUP)
            cute.arch.sync_threads()  # operands were read

    # ------------------------------------------------------------ operands
    def operands(self, base, own, s, buffer):
        """Left and right rows of level s to a buffer."""
        if s < BLOCK:
            self.inside(base, own, s, buffer)
        else:
            self.across(base, own, s, buffer)

    def inside(self, base, own, s, buffer):
        """A level whose pairs lie inside blocks."""
        left, right = self.rows(base, buffer, BLOCK // 2 * own.block, own.pair)
        for group in range(0, BLOCK, 2 * s):
            anchor = group + s
            for r, f in falling(own.e, anchor, anchor + s - 1).items():
                p = group // 2 + r - anchor
                left.store(p, scaled(own.k[r], f))
                left.store(p + HALF, scaled(own.q[r], f))
            start = [own.e[i, anchor] for i in range(2)]
            for r, f in rising(own.e, anchor - 1, group, start).items():
                right.store(group // 2 + r - group, scaled(own.k[r], f))

    @cute.jit
    def across(self, base, own: Columns, s: cutlass.Constexpr, buffer: cutlass.Constexpr):
        """A level whose squares are whole blocks: a block has left rows or right rows."""
        if (own.block & (s // BLOCK)) != 0:
            self.left_block(base, own, s, buffer)
        else:
            self.right_block(base, own, s, buffer)

    def left_block(self, base, own, s, buffer):
        start = None
        if s == 2 * BLOCK:  # block 3 decays through block 2
            rest = load_pair(self.plan["totals"].view(base), Total.REST + 2, own.pair)
            start = [select(own.block == 3, rest[i] * own.e[i, 0], Float32(1)) for i in range(2)]
        rows, _ = self.rows(base, buffer, self.first(own.block, s), own.pair)
        for r, f in falling(own.e, 0, BLOCK - 1, start).items():
            rows.store(r, scaled(own.k[r], f))
            rows.store(r + HALF, scaled(own.q[r], f))

    def right_block(self, base, own, s, buffer):
        totals = self.plan["totals"].view(base)
        anchor = 2 if s == 2 * BLOCK else own.block + 1
        start = load_pair(totals, Total.FIRST + anchor, own.pair)
        if s == 2 * BLOCK:  # block 0 decays through block 1
            whole = load_pair(totals, Total.WHOLE + 1, own.pair)
            start = [start[i] * select(own.block == 0, whole[i], Float32(1)) for i in range(2)]
        _, rows = self.rows(base, buffer, self.first(own.block, s), own.pair)
        for r, f in rising(own.e, BLOCK - 1, 0, start).items():
            rows.store(r, scaled(own.k[r], f))

    @staticmethod
    def first(block, s):
        """Operand row of a block's first token."""
        return BLOCK * (block // 2) if s == BLOCK else BLOCK * (block % 2)

    def rows(self, base, buffer, first, pair):
        """The thread's words in left rows (of k, and of q HALF further on) and in right rows."""
        tile = self.plan[f"rows{buffer}"]
        left = RowWords(tile, base, first, pair)
        return left, left.further(2 * HALF)

    # ------------------------------------------------------------ products
    def multiply(self, base, s, buffer, warp, lane, tid):
        """Left rows of k and of q times right rows^T: [64, 128] [32, 128]^T."""
        tile = self.plan[f"rows{buffer}"]
        mma = wg.tiled_mma("K", "K", HALF)
        acc = wg.accumulator(mma, 2 * HALF, HALF)
        a = wg.operand_a(mma, tid, tile.rows_view(base, 0, 2 * HALF))
        b = wg.operand_b(mma, tid, tile.rows_view(base, 2 * HALF, HALF))
        wg.gemm(mma, acc, a, b)
        warpgroup.wait_group(0)
        self.store(base, acc, s, warp, lane)

    @cute.jit
    def store(self, base, acc: cute.Tensor, s: cutlass.Constexpr, warp: Int32, lane: Int32):
        """Warps 0 and 1 hold products of k, warps 2 and 3 of q; two left blocks of 8 each."""
        upper = warp % 2
        r, c = lane // 4, lane % 4
        token = lambda p: ((p & -s) << 1) | (p & (s - 1))  # noqa: E731
        p = BLOCK * upper + r
        for half in cutlass.range_constexpr(2):
            row = token(p + 8 * half) + s
            for n in cutlass.range_constexpr(max(s // 8, 1)):
                values = [self.value(acc, s, upper, half, n, i) for i in range(2)]
                col = 2 * c + 8 * n
                if const_expr(s <= 8):
                    col = col + 8 * half
                if const_expr(s <= 16):
                    col = col + BLOCK * upper
                if const_expr(s >= 8):
                    self.store_two(base, warp, row, token(col), values)
                elif const_expr(s > 1):
                    if (r & -s) == (2 * c & -s):
                        self.store_two(base, warp, row, token(col), values)
                else:
                    if r // 2 == c:
                        self.store_one(
                            base, warp, row, row - 1, select(r % 2 == 1, values[1], values[0])
                        )

    def value(self, acc, s, upper, half, n, i):
        """Entry i + 2 half of the accumulator tile that belongs to n: where several warps differ,
        tile n of the lower or of the upper 16 columns.
        """
        entry = i + 2 * half
        if s == 2 * BLOCK:
            return acc[4 * n + entry]
        tile = n if s == BLOCK else half
        return select(upper == 1, acc[4 * (tile + 2) + entry], acc[4 * tile + entry])

    @cute.jit
    def store_two(self, base, warp: Int32, row: Int32, col: Int32, values):
        """Two neighbours: L = b kn_i . kn_j, mqk = scale qn_i . kn_j from raw products."""
        factors = self.plan["factors"].view(base)
        right = cute.make_rmem_tensor((2,), Float32)
        cute.autovec_copy(neighbours(factors, Factor.K, col), right)
        if warp < 2:
            left = factors[Factor.BK, row]
            two = cute.make_rmem_tensor((2,), Float32)
            for i in cutlass.range_constexpr(2):
                two[i] = values[i] * (left * right[i])
            cute.autovec_copy(two, neighbours(self.plan["L"].view(base), row, col))
        else:
            left = factors[Factor.Q, row]
            at = MatrixRows(self.plan["mqk"], base, 0, row, col // 8).piece_pointer()
            at = cute.make_tensor(at + cute.assume(col % 8, divby=2), cute.make_layout(2))
            cute.autovec_copy(packed_bf16([values[i] * (left * right[i]) for i in range(2)]), at)

    @cute.jit
    def store_one(self, base, warp: Int32, row: Int32, col: Int32, value: Float32):
        factors = self.plan["factors"].view(base)
        value = value * factors[Factor.K, col]
        L, mqk = self.plan["L"].view(base), self.plan["mqk"].view(base)
        if warp < 2:
            L[row, col] = value * factors[Factor.BK, row]
        else:
            mqk[row, col] = BFloat16(value * factors[Factor.Q, row])


def neighbours(tile, row, col):
    """Columns col and col + 1 of an fp32 tile's row; col is even."""
    offset = cute.assume(cute.crd2idx((row, col), tile.layout), divby=2)
    return cute.make_tensor(tile.iterator + offset, cute.make_layout(2))
