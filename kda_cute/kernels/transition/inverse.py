"""R = (I + L)^-1 of a 64 x 64 strictly lower L, by block doubling in tf32.

With R the inverse of the diagonal blocks of s rows, those of 2s follow from R -= R L_s R, where L_s
holds the lower left s x s corner of each.  Every power of L that a series would need can be huge
when keys are alike; nothing here is larger than the inverse itself.

Inside a block of 16 a warp holds R and R^T as operands, so that products feed each other without
leaving the registers: an accumulator is an A operand as it stands, and the B operand of a matrix is
the accumulator of its transpose.  The step between two blocks goes through shared memory, in place.
The last one leaves as INV, in bf16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...device.matrix_rows import MatrixRows
from ...device.sync import meet
from ...device.warp_mma import (
    WarpMma,
    block_a,
    block_values,
    packed_bf16,
    pairs_along_columns,
    pairs_along_rows,
    select,
    store_pair,
    transposed_a,
)
from .schedule import BLOCK, PAIR, NamedBar


class Inverse:
    """Code of warps 0 and 1 of each warpgroup, for its half of the tokens, then of warps 2 and 3."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan
        self.mma = WarpMma("tf32")

    @cute.jit
    def half(self, base, group: Int32, part: Int32, lane: Int32):
        """The inverse of a half's 32 x 32 block of I + L, in place of L, by warps `part` 0 and 1."""
        tile = self.plan["L"].view(base)
        low, high = 2 * group, 2 * group + 1
        block = self.diagonal(tile, low + part, lane)
        cute.arch.sync_warp()  # read before it is written
        self.store(tile, low + part, low + part, block, lane)
        meet(self.config, NamedBar.PAIR + group, PAIR)
        if part == 0:
            product = self.times(
                self.times(self.rows(tile, high, high, lane), self.columns(tile, high, low, lane)),
                self.columns(tile, low, low, lane),
            )
            cute.arch.sync_warp()
            self.store(tile, high, low, [-x for x in product], lane)

    @cute.jit
    def corner(self, base, i: Int32, j: Int32, lane: Int32):
        """Block (i, j) of INV below the halves: i is 2 or 3, j is 0 or 1."""
        tile = self.plan["L"].view(base)
        total = self.mma.accumulators(1, 2)
        for b in cutlass.range_constexpr(2):
            if b >= j:  # R is 0 above its diagonal
                self.add_column(total, tile, i, j, b, lane)
        values = block_values(total, 0, 0)
        r, c = lane // 4, lane % 4
        for s in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                e = 2 * half + 4 * s
                row = BLOCK * i + r + 8 * half
                at = MatrixRows(self.plan["INV"], base, 0, row, 2 * j + s).piece_pointer()
                at = cute.make_tensor(at + cute.assume(2 * c, divby=2), cute.make_layout(2))
                cute.autovec_copy(packed_bf16([-values[e + n] for n in range(2)]), at)

    @cute.jit
    def add_column(
        self, total: cute.Tensor, tile: cute.Tensor, i: Int32, j: Int32, b: cutlass.Constexpr,
        lane: Int32,
    ):  # fmt: skip
        """total += (sum_a R_ia L_ab) R_bj."""
        inner = self.mma.accumulators(1, 2)
        self.add(inner, self.rows(tile, i, 2, lane), self.columns(tile, 2, b, lane))
        if i == 3:
            self.add(inner, self.rows(tile, i, 3, lane), self.columns(tile, 3, b, lane))
        self.add(total, block_values(inner, 0, 0), self.columns(tile, b, j, lane))

    def diagonal(self, tile, block, lane):
        """The inverse of I + L for one block of 16; whatever L holds above its diagonal is ignored.

        Of a matrix's 8 values, 0, 1 and 6, 7 lie in its diagonal squares of 8, 2 and 3 below.  A 0 that is
        known while tracing is a number of Python's.
        """
        L, Lt = self.rows(tile, block, block, lane), self.columns(tile, block, block, lane)
        row, col = lane // 4, 2 * (lane % 4)
        zero, one = Float32(0), Float32(1)

        def corner(values, s, lower):
            """The entries of level s in the squares of 8 of L, or of L^T."""
            out = [0.0] * 8
            for i in range(2):
                differ = row ^ (col + i)
                side = row > col + i if lower else row < col + i
                keep = side & (differ >= s) & (differ < 2 * s)
                for e in (i, 6 + i):
                    out[e] = select(keep, values[e], zero)
            return out

        def first(values, lower):
            """I - L_1: the inverse of squares of 2."""
            unit = [select(row == col + i, one, zero) for i in range(2)]
            unit = [*unit, 0.0, 0.0, 0.0, 0.0, *unit]
            return [x - y for x, y in zip(unit, corner(values, 1, lower), strict=True)]

        R, Rt = first(L, True), first(Lt, False)
        for s in (2, 4):
            Ls, Lst = corner(L, s, True), corner(Lt, s, False)
            Y = self.in_squares(self.in_squares(R, Lst), Rt)  # R L_s R
            Yt = self.in_squares(self.in_squares(Rt, Ls), R)
            R = [x - y for x, y in zip(R, Y, strict=True)]
            Rt = [x - y for x, y in zip(Rt, Yt, strict=True)]
        # L_8 is the square below the diagonal ones
        part = self.mma.accumulators(1, 1)
        below = [0.0, 0.0, Lt[4], Lt[5]]
        self.mma.step(part, 0, 0, self.mma.operand_a(R), self.mma.operand_b(below), (1,))
        total = self.mma.accumulators(1, 1)
        left = [0.0, 0.0, part[2], part[3], 0.0, 0.0, 0.0, 0.0]
        right = self.mma.operand_b([Rt[0], Rt[1], 0.0, 0.0])
        self.mma.step(total, 0, 0, self.mma.operand_a(left), right, (0,))
        R[2], R[3] = -total[2], -total[3]
        return R

    def in_squares(self, a, bt):
        """A B of matrices that have only their two diagonal squares of 8."""
        acc = self.mma.accumulators(1, 2)
        left = self.mma.operand_a(a)
        for n in range(2):
            right = self.mma.operand_b([bt[e + 2 * n + 4 * s] for s in range(2) for e in range(2)])
            self.mma.step(acc, 0, n, left, right, (n,))
        values = block_values(acc, 0, 0)
        return [*values[:2], 0.0, 0.0, 0.0, 0.0, *values[6:]]

    # ------------------------------------------------------------ 16 x 16 matrices, 8 values a lane
    def times(self, a, bt):
        """A B from the values of A and of B^T, both in the order of an A operand."""
        acc = self.mma.accumulators(1, 2)
        self.add(acc, a, bt)
        return block_values(acc, 0, 0)

    def add(self, acc, a, bt):
        """acc += A B."""
        left = self.mma.operand_a(a)
        for n in range(2):
            right = self.mma.operand_b([bt[e + 2 * n + 4 * s] for s in range(2) for e in range(2)])
            self.mma.step(acc, 0, n, left, right)

    def rows(self, tile, i, j, lane):
        """Block (i, j)."""
        return block_a(pairs_along_columns(self.block(tile, i, j), lane), 0, 0)

    def columns(self, tile, i, j, lane):
        """Block (i, j), transposed."""
        return transposed_a(pairs_along_rows(self.block(tile, i, j), lane))

    def store(self, tile, i, j, values, lane):
        view = pairs_along_columns(self.block(tile, i, j), lane)
        for s in range(2):
            for half in range(2):
                store_pair(view, half, s, values[2 * half + 4 * s : 2 * half + 4 * s + 2])

    @staticmethod
    def block(tile, i, j):
        return cute.local_tile(tile, (BLOCK, BLOCK), (i, j))
