"""Products of all pairs of tokens inside a chunk, exact for any gate: the dyadic scheme.

Of a pair i > j, let s be the highest bit in which i and j differ, and a the multiple of s between
them (j < a <= i).  The decay from j to i is exp(gc_i - gc_a) exp(gc_a - gc_j): both factors are at
most 1 for every gate <= 0.  So the pairs of a level s are products of left rows (bit s set) and
right rows (bit s clear).

    level       products
    32          rows 32-63 x 0-31, as 2 x 2 rectangles of 16 x 16
    16          rows 16-31 x 0-15 and 48-63 x 32-47
    8, 4, 2, 1  in each block of 16: its 8 left rows x its 8 right rows, of which 8/s squares count

The left rows of k and of q share their exponents, and the rows of one mma.sync.  Operands are made
in registers, in the order of the MMA's fragments.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from ...device.matrix_rows import LaneRows, MatrixRows
from ...device.warp_mma import WarpMma, unpack_bf16
from .gate import exp2
from .schedule import BLOCK, LEVELS, STEPS


class Pairs:
    """Code of all warps: L (strictly lower, fp32) and mqk (strictly lower, bf16) in shared memory."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan
        self.mma = WarpMma("bf16")

    @cute.jit
    def run(self, base, warp: Int32, lane: Int32):
        """6 rectangles to warps 0-5; of 16 (block, level) units two to warps 0-3, one to 4 and 5,
        three to 6 and 7.
        """
        if warp < 6:
            # 0-3: level 32; 4, 5: level 16
            inner = warp - 4
            left = 32 + 16 * (warp // 2) if warp < 4 else 16 + 32 * inner
            right = 16 * (warp % 2) if warp < 4 else 32 * inner
            anchor = Int32(32) if warp < 4 else left
            self.rectangle(base, left, right, anchor, lane)
        first, count = 2 * warp, Int32(2)
        if warp >= 4:
            first = warp + 4
            count = Int32(1)
        if warp >= 6:
            first = 3 * warp - 8
            count = Int32(3)
        for unit in cutlass.range(first, first + count, unroll=1):
            self.level(base, unit // LEVELS, Int32(BLOCK // 2) >> (unit % LEVELS), lane)

    # ------------------------------------------------------------ off-diagonal blocks
    @cute.jit
    def rectangle(self, base, left: Int32, right: Int32, anchor: Int32, lane: Int32):
        """Tokens left .. left + 15 against right .. right + 15."""
        k_acc, q_acc = self.mma.accumulators(1, 2), self.mma.accumulators(1, 2)
        names, r, c = LaneRows(lane), lane // 4, lane % 4
        row, chunk = names.rows_first()
        k = MatrixRows(self.plan["k"], base, 0, left + row, chunk)
        q = MatrixRows(self.plan["q"], base, 0, left + row, chunk)
        row, chunk = names.columns_first()
        kr = MatrixRows(self.plan["k"], base, 0, right + row, chunk)
        g = self.plan["gc"].view(base)
        gl = [row_pairs(g, left + r + 8 * half, c) for half in range(2)]
        gr = [row_pairs(g, right + r + 8 * n, c) for n in range(2)]
        ga = row_pairs(g, anchor, c)
        for step in cutlass.range(STEPS, unroll=2):
            self.rectangle_step(k_acc, q_acc, k, q, kr, gl, gr, ga, step)
        self.store_rectangle(k_acc, q_acc, base, left, right, lane)

    def rectangle_step(self, k_acc, q_acc, k, q, kr, gl, gr, ga, step):
        anchor = [load_two(ga, 2 * step + s) for s in range(2)]
        down = [
            [exp2(x - a) for x, a in zip(load_two(gl[half], 2 * step + s), anchor[s], strict=True)]
            for s in range(2)
            for half in range(2)
        ]
        down = sum(down, [])  # index i + 2 half + 4 s
        a_k, a_q = (
            self.mma.operand_a(
                [x * f for x, f in zip(unpack_bf16(t.load(0, 2 * step)), down, strict=True)]
            )
            for t in (k, q)
        )
        values = unpack_bf16(kr.load(0, 2 * step))  # index i + 2 s + 4 n
        for n in range(2):
            up = [
                exp2(a - x)
                for s in range(2)
                for x, a in zip(load_two(gr[n], 2 * step + s), anchor[s], strict=True)
            ]
            b = self.mma.operand_b(
                [x * f for x, f in zip(values[4 * n : 4 * n + 4], up, strict=True)]
            )
            self.mma.step(k_acc, 0, n, a_k, b)
            self.mma.step(q_acc, 0, n, a_q, b)

    def store_rectangle(self, k_acc, q_acc, base, left, right, lane):
        for half in range(2):
            row = left + lane // 4 + 8 * half
            for n in range(2):
                for i in range(2):
                    col = right + 2 * (lane % 4) + i + 8 * n
                    self.store_pair(
                        base, row, col, k_acc[(i, half), 0, n], q_acc[(i, half), 0, n]
                    )

    # ------------------------------------------------------------ inside a block
    @cute.jit
    def level(self, base, block: Int32, s: Int32, lane: Int32):
        """Pairs of a block whose highest differing bit is s."""
        acc = self.mma.accumulators(1, 1)
        r, c = lane // 4, lane % 4
        token = lambda x: BLOCK * block + (((x & -s) << 1) | (x & (s - 1)))  # noqa: E731
        in_matrix, bit3, bit4 = lane % 8, lane // 8 % 2, lane // 16
        left = MatrixRows(self.plan["k"], base, 0, token(in_matrix) + s, bit4)
        left.shift(bit3 * (self.plan["q"].offset - self.plan["k"].offset))
        right = MatrixRows(self.plan["k"], base, 0, token(in_matrix), lane // 8)
        g = self.plan["gc"].view(base)
        gl, gr = row_pairs(g, token(r) + s, c), row_pairs(g, token(r), c)
        ga = row_pairs(g, BLOCK * block + ((r & -s) << 1) + s, c)
        for two in cutlass.range(STEPS // 2, unroll=1):
            self.level_steps(acc, left, right, gl, gr, ga, two)
        self.store_level(acc, base, token, s, r, c)

    def level_steps(self, acc, left, right, gl, gr, ga, two):
        right_values = unpack_bf16(right.load(0, 4 * two))  # index i + 2 s, of two steps
        for n in range(2):
            step = 2 * two + n
            down, up = [], []
            for s in range(2):
                low, high, anchor = (load_two(x, 2 * step + s) for x in (gl, gr, ga))
                down += [exp2(x - a) for x, a in zip(low, anchor, strict=True)]
                up += [exp2(a - x) for x, a in zip(high, anchor, strict=True)]
            values = unpack_bf16(left.load(0, 2 * step))  # index i + 2 (k, q) + 4 s
            a = [values[e] * down[e % 2 + e // 4 * 2] for e in range(8)]
            b = [x * f for x, f in zip(right_values[4 * n : 4 * n + 4], up, strict=True)]
            self.mma.step(acc, 0, 0, self.mma.operand_a(a), self.mma.operand_b(b))

    def store_level(self, acc, base, token, s, r, c):
        row = token(r) + s
        for i in range(2):
            x = 2 * c + i
            self.store_if((r & -s) == (x & -s), base, row, token(x), acc[(i, 0), 0, 0], acc[(i, 1), 0, 0])

    @cute.jit
    def store_if(self, same, base, row: Int32, col: Int32, kk, qk):
        if same:
            self.store_pair(base, row, col, kk, qk)

    # ------------------------------------------------------------ results
    def store_pair(self, base, row, col, kk, qk):
        """L = b kn_i . kn_j, mqk = scale qn_i . kn_j, from raw products."""
        factors = self.plan["rows"].view(base)
        right = factors[0, col]
        self.plan["L"].view(base)[row, col] = factors[2, row] * factors[0, row] * right * kk
        self.plan["mqk"].view(base)[row, col] = BFloat16(factors[1, row] * right * qk)


def row_pairs(tile, row, c):
    """View of a row of an fp32 tile for this lane: [i, block of 8 columns] is column 2c + i + 8 block."""
    offset = cute.assume(cute.crd2idx((row, 2 * c), tile.layout), divby=2)
    blocks = cute.size(tile, mode=[1]) // 8
    return cute.make_tensor(tile.iterator + offset, cute.make_layout((2, blocks), stride=(1, 8)))


def load_two(view, block):
    two = cute.make_rmem_tensor((2,), view.element_type)
    cute.autovec_copy(view[None, block], two)
    return [two[0], two[1]]
