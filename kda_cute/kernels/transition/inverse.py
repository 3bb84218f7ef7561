"""X = (I + L)^-1 of a 64 x 64 strictly lower L, by block doubling in tf32.

With X the inverse of the diagonal blocks of s rows, those of 2s follow from X -= X L_s X, where L_s
holds the lower left s x s corner of each.  Every power of L that a series would need can be huge
when keys are alike; nothing here is larger than the inverse itself.

Inside a block of 16 a warp holds X and X^T as operands, so that products feed each other without
leaving the registers: an accumulator is an A operand as it stands, and the B operand of a matrix is
the accumulator of its transpose.  The two steps between blocks go through shared memory, in place.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...device.warp_mma import (
    WarpMma,
    block_a,
    block_values,
    pairs_along_columns,
    pairs_along_rows,
    select,
    store_pair,
    transposed_a,
)
from .schedule import BLOCK, GROUP, NamedBar


class Inverse:
    """Code of four warps; the tile `L` becomes X."""

    def __init__(self, config, plan):
        self.plan = plan
        self.mma = WarpMma("tf32")

    @cute.jit
    def run(self, base, warp: Int32, lane: Int32):
        """L -> X in place."""
        tile = self.plan["L"].view(base)
        self.store(tile, warp, warp, self.diagonal(tile, warp, lane), lane)
        self.barrier()
        if warp < 2:
            low, high = 2 * warp, 2 * warp + 1
            product = self.times(
                self.times(self.rows(tile, high, high, lane), self.columns(tile, high, low, lane)),
                self.columns(tile, low, low, lane),
            )
            self.store(tile, high, low, [-x for x in product], lane)
        self.barrier()
        i, j = 2 + warp // 2, warp % 2
        total = self.mma.accumulators(1, 2)
        for b in cutlass.range_constexpr(2):
            part = self.mma.accumulators(1, 2)
            for a in cutlass.range_constexpr(2, 4):
                self.add(part, self.rows(tile, i, a, lane), self.columns(tile, a, b, lane))
            self.add(total, block_values(part, 0, 0), self.columns(tile, b, j, lane))
        self.barrier()  # everyone has read L
        self.store(tile, i, j, [-x for x in block_values(total, 0, 0)], lane)

    def diagonal(self, tile, block, lane):
        """The inverse of I + L for one block of 16."""
        L, Lt = self.rows(tile, block, block, lane), self.columns(tile, block, block, lane)
        differ = [
            (lane // 4 + 8 * half) ^ (2 * (lane % 4) + i + 8 * s)
            for s in range(2)
            for half in range(2)
            for i in range(2)
        ]
        zero, one = Float32(0), Float32(1)

        def corner(values, s):
            return [
                select((d >= s) & (d < 2 * s), x, zero) for x, d in zip(values, differ, strict=True)
            ]

        def first(values):
            return [
                select(d == 0, one, zero) - x
                for x, d in zip(corner(values, 1), differ, strict=True)
            ]

        X, Xt = first(L), first(Lt)
        for s in (2, 4, 8):
            Ls, Lst = corner(L, s), corner(Lt, s)
            Y = self.times(self.times(X, Lst), Xt)  # X L_s X
            Yt = self.times(self.times(Xt, Ls), X)
            X = [x - y for x, y in zip(X, Y, strict=True)]
            Xt = [x - y for x, y in zip(Xt, Yt, strict=True)]
        return X

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

    @staticmethod
    def barrier():
        cute.arch.barrier(barrier_id=NamedBar.INVERT, number_of_threads=GROUP)
