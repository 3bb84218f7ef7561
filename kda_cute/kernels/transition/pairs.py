"""Products of all pairs of tokens inside a chunk, exact for any gate: the dyadic scheme.

Of a pair i > j, let s be the highest bit in which i and j differ, and a the multiple of s between
them (j < a <= i).  The decay from j to i is exp(gc_i - gc_a) exp(gc_a - gc_j): both factors are at
most 1 for every gate <= 0.  So the pairs of a level s are products of left rows (bit s set) of k and
of q with right rows (bit s clear) of k; of the results those inside a square of s x s count.

Levels up to 16 stay inside a half of 32 tokens, which a warpgroup makes and multiplies alone: two
levels at a time, 16 left rows of k and 16 of q of each, by their right rows, 16 of each.  Level 32
goes with level 1: warpgroup 0 takes its left rows of k, warpgroup 1 those of q.  While a product
runs the results of the one before are stored.

Operands are k and q times factors, all of them rounded to bf16; row p of a level's operand is the
p-th left (or right) token of the half, whose number is p with the bit s inserted.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import warpgroup as wg
from ...device.matrix_rows import MatrixRows
from ...device.sync import meet
from ...device.vectors import load_two
from ...device.warp_mma import packed_bf16, select
from .columns import Columns, RowWords, falling, rising, scaled
from .gate import Total
from .schedule import BLOCK, GROUP, LEVELS, C, Factor, NamedBar

HALF = C // 2  # tokens of a warpgroup; left or right rows of level 32
LEFT = C  # left rows of an operand
ENTRIES = BLOCK  # of a lane's results: at most two of three 16 x 16 squares


class Pairs:
    """Code of all warps: L (below the diagonal, fp32) and mqk (likewise, bf16) in shared memory."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan

    @cute.jit
    def run(self, base, own: Columns, warp: Int32, lane: Int32, tid: Int32):
        """Two levels at a time.  At the end the operands were read, and a barrier of the warpgroup
        has passed for all results but those of level 32.
        """
        group = warp // 4
        values = cute.make_rmem_tensor((ENTRIES,), Float32)
        for n in cutlass.range_constexpr(len(LEVELS)):
            first, second = LEVELS[n]
            right = BLOCK + (HALF if const_expr(second == HALF) else BLOCK)
            self.operands(base, own, group, first, 0)
            if const_expr(second == HALF):
                self.half_operands(base, own)
            else:
                self.operands(base, own, group, second, 1)
            cute.arch.fence_view_async_shared()
            if const_expr(second == HALF):
                cute.arch.sync_threads()
            else:
                self.barrier(group)
            acc = self.multiply(base, group, tid, right)
            if const_expr(n > 0):
                self.results(base, values, LEVELS[n - 1], warp, lane)
            warpgroup.wait_group(0)
            for i in cutlass.range_constexpr(8 * (right // BLOCK - 1)):
                if const_expr(i < 8):
                    values[i] = select(warp % 4 >= 2, acc[8 + i], acc[i])
                else:
                    values[i] = acc[8 + i]
            if const_expr(n < len(LEVELS) - 1):
                self.barrier(group)  # operands were read
        cute.arch.sync_threads()  # by both warpgroups
        self.results(base, values, LEVELS[-1], warp, lane)
        self.barrier(group)

    def barrier(self, group):
        meet(self.config, NamedBar.GROUP + group, GROUP)

    # ------------------------------------------------------------ operands
    def operands(self, base, own, group, s, place):
        """Left and right rows of level s, as the first or second of two."""
        if s < BLOCK:
            self.inside(base, own, group, s, place)
        else:
            self.across(base, own, group, place)

    def inside(self, base, own, group, s, place):
        """A level whose pairs lie inside blocks."""
        left, right = self.rows(base, own, group, place, BLOCK // 2 * (own.block % 2))
        for anchored in range(0, BLOCK, 2 * s):
            anchor = anchored + s
            for r, f in falling(own.e, anchor, anchor + s - 1).items():
                p = anchored // 2 + r - anchor
                left.store(p, scaled(own.k[r], f))
                left.store(p + BLOCK, scaled(own.q[r], f))
            start = [own.e[i, anchor] for i in range(2)]
            for r, f in rising(own.e, anchor - 1, anchored, start).items():
                right.store(anchored // 2 + r - anchored, scaled(own.k[r], f))

    @cute.jit
    def across(self, base, own: Columns, group: Int32, place: cutlass.Constexpr):
        """Level 16: one block of the half has left rows, the other right rows."""
        if own.block % 2 == 1:
            left, _ = self.rows(base, own, group, place, 0)
            for r, f in falling(own.e, 0, BLOCK - 1).items():
                left.store(r, scaled(own.k[r], f))
                left.store(r + BLOCK, scaled(own.q[r], f))
        else:
            _, right = self.rows(base, own, group, place, 0)
            start = load_two(self.plan["totals"].view(base), Total.FIRST + own.block + 1, own.pair)
            for r, f in rising(own.e, BLOCK - 1, 0, start).items():
                right.store(r, scaled(own.k[r], f))

    @cute.jit
    def half_operands(self, base, own: Columns):
        """Level 32, to both warpgroups: left rows of k to one, of q to the other."""
        totals, tile = self.plan["totals"].view(base), self.plan["rows"]
        first = BLOCK * (own.block % 2)
        if own.block >= 2:
            rest = load_two(totals, Total.REST + 2, own.pair)  # block 3 decays through block 2
            start = [select(own.block == 3, rest[i] * own.e[i, 0], Float32(1)) for i in range(2)]
            of_k = RowWords(tile, base, HALF + first, own.pair)
            of_q = of_k.in_next_stage(tile)
            for r, f in falling(own.e, 0, BLOCK - 1, start).items():
                of_k.store(r, scaled(own.k[r], f))
                of_q.store(r, scaled(own.q[r], f))
        else:
            start = load_two(totals, Total.FIRST + 2, own.pair)
            whole = load_two(totals, Total.WHOLE + 1, own.pair)  # block 0 decays through block 1
            start = [start[i] * select(own.block == 0, whole[i], Float32(1)) for i in range(2)]
            rows = RowWords(tile, base, LEFT + BLOCK + first, own.pair)
            copies = rows, rows.in_next_stage(tile)
            for r, f in rising(own.e, BLOCK - 1, 0, start).items():
                word = scaled(own.k[r], f)
                for copy in copies:
                    copy.store(r, word)

    def rows(self, base, own, group, place, first):
        """The thread's words in left rows (of k, and of q BLOCK further on) and in right rows."""
        left = RowWords(self.plan["rows"], base, first, own.pair, group)
        left = left.further(2 * BLOCK * place)
        return left, left.further(LEFT - BLOCK * place)

    # ------------------------------------------------------------ products
    def multiply(self, base, group, tid, right):
        """Issue left rows times right rows^T: [64, 128] [right, 128]^T."""
        tile = self.plan["rows"]
        mma = wg.tiled_mma("K", "K", right)
        acc = wg.accumulator(mma, LEFT, right)
        a = wg.operand_a(mma, tid % GROUP, tile.rows_view(base, 0, LEFT, group))
        b = wg.operand_b(mma, tid % GROUP, tile.rows_view(base, LEFT, right, group))
        wg.gemm(mma, acc, a, b)
        return acc

    @cute.jit
    def results(
        self, base, values: cute.Tensor, levels: cutlass.Constexpr, warp: Int32, lane: Int32
    ):
        """Warps 0 and 1 hold products of k and of q of the first level, 2 and 3 of the second."""
        part, start = warp % 4, HALF * (warp // 4)
        if part < 2:
            self.either(base, values, levels[0], part == 0, start, lane)
        elif const_expr(levels[1] == HALF):
            self.either(base, values, HALF, warp < 4, BLOCK * (part - 2), lane)
        else:
            self.either(base, values, levels[1], part == 2, start, lane)

    @cute.jit
    def either(
        self, base, values: cute.Tensor, s: cutlass.Constexpr, of_k: cutlass.Boolean, start: Int32,
        lane: Int32,
    ):  # fmt: skip
        if of_k:
            self.level(base, values, s, True, start, lane)
        else:
            self.level(base, values, s, False, start, lane)

    @cute.jit
    def level(
        self, base, values: cute.Tensor, s: cutlass.Constexpr, of_k: cutlass.Constexpr,
        start: Int32, lane: Int32,
    ):  # fmt: skip
        """A 16-row tile's results of a level, in tokens from `start` on; of level 32, left tokens."""
        r, c = lane // 4, lane % 4
        if const_expr(s >= 8):
            self.entries(base, values, s, of_k, start, r, c)
        elif const_expr(s > 1):
            if (r & -s) == (2 * c & -s):
                self.entries(base, values, s, of_k, start, r, c)
        elif r // 2 == c:
            self.entries(base, values, s, of_k, start, r, c)

    def entries(self, base, values, s, of_k, start, r, c):
        """Pairs of neighbouring columns (of level 1, single ones) in the 8 x 8 squares that count:
        L = b_j kn_i . kn_j, or mqk = scale b_j qn_i . kn_j, from raw products.
        """
        token = lambda p: ((p & -s) << 1) | (p & (s - 1))  # noqa: E731
        to_half = 0 if s == HALF else start  # level 32 has all right tokens
        width, col = (1, 2 * r) if s == 1 else (2, token(2 * c))
        row = start + token(r) + s
        factors = self.plan["factors"].view(base)
        rows = Neighbours(factors, Factor.K if of_k else Factor.Q, row, 1)
        columns = Neighbours(factors, Factor.BK, to_half + col, width)
        if of_k:
            out = Neighbours(self.plan["L"].view(base), row, to_half + col, width)
        else:
            pieces = MatrixRows(self.plan["mqk"], base, 0, row, to_half // 8 + col // 8)
            inside = cute.assume(col % 8, divby=2)
        for half in range(2):
            down = token(8 * half)
            (left,) = rows.load(0, down)
            for tile in range(s // 8) if s > 8 else [half]:
                right, across = columns.load(0, token(8 * tile)), token(8 * tile)
                two = [values[4 * tile + 2 * half + i] for i in range(2)]
                if s == 1:
                    two = [select(r % 2 == 1, two[1], two[0])]
                two = [x * (left * y) for x, y in zip(two, right, strict=True)]
                if of_k:
                    out.store(down, across, two)
                else:
                    at = pieces.piece_pointer(down, across // 8) + inside
                    at = cute.make_tensor(at, cute.make_layout(width))
                    if s == 1:
                        at[0] = BFloat16(two[0])
                    else:
                        cute.autovec_copy(packed_bf16(two), at)


class Neighbours:
    """One or two neighbouring columns of an fp32 tile, from (row, col), and at steps from there."""

    def __init__(self, tile, row, col, width):
        offset = cute.assume(cute.crd2idx((row, col), tile.layout), divby=width)
        self.pointer, self.stride = tile.iterator + offset, tile.stride
        self.width = width

    def _at(self, row_step, col_step):
        step = row_step * self.stride[0] + col_step * self.stride[1]
        return cute.make_tensor(self.pointer + step, cute.make_layout(self.width))

    def load(self, row_step, col_step):
        """The values."""
        values = cute.make_rmem_tensor((self.width,), Float32)
        cute.autovec_copy(self._at(row_step, col_step), values)
        return [values[i] for i in range(self.width)]

    def store(self, row_step, col_step, values):
        """The reverse of `load`."""
        register = cute.make_rmem_tensor((self.width,), Float32)
        for i, value in enumerate(values):
            register[i] = value
        cute.autovec_copy(register, self._at(row_step, col_step))
