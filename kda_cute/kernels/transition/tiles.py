"""The rows that meet the state, or INV before they do: kd = kn exp(gc), qd = scale qn exp(gc), and
kr = b kn exp(gT - gc) as the sum of two bf16 tiles.
"""

from cutlass import Float32

from ...device.vectors import load_four, load_two
from ...device.warp_mma import packed_bf16, select, unpack_word, words
from .columns import Columns, RowWords, falling, rising
from .gate import Total
from .schedule import BLOCK, BLOCKS, Factor


class Tiles:
    """Code of all warps."""

    def __init__(self, plan):
        self.plan = plan

    def run(self, base, own: Columns):
        """kd, qd and kr of the thread's columns, bf16, in shared memory."""
        before, after = self.around(base, own)
        start = [before[i] * own.e[i, 0] for i in range(2)]
        to_start, to_end = falling(own.e, 0, BLOCK - 1, start), rising(own.e, BLOCK - 1, 0, after)
        first = BLOCK * own.block
        kd = RowWords(self.plan["kd"], base, first, own.pair)
        qd, kr, kr_low = (
            kd.in_tile(self.plan["kd"], self.plan[name]) for name in ("qd", "kr", "kr_low")
        )
        factors = self.plan["factors"].view(base)
        for four in range(0, BLOCK, 4):
            fk, fq, bk = (
                load_four(factors[line, None], 4 * own.block + four // 4)
                for line in (Factor.K, Factor.Q, Factor.BK)
            )
            for j in range(4):
                r = four + j
                k, q = unpack_word(own.k[r]), unpack_word(own.q[r])
                kd.store(r, rounded(product(k, fk[j], to_start[r])))
                qd.store(r, rounded(product(q, fq[j], to_start[r])))
                exact = product(k, bk[j], to_end[r])
                high = rounded(exact)
                kr.store(r, high)
                rest = [x - y for x, y in zip(exact, unpack_word(high), strict=True)]
                kr_low.store(r, rounded(rest))

    def around(self, base, own):
        """Products of the decays of all blocks before the thread's, and of all after."""
        totals = self.plan["totals"].view(base)
        before, after = [Float32(1)] * 2, [Float32(1)] * 2
        for b in range(BLOCKS):
            whole = load_two(totals, Total.WHOLE + b, own.pair)
            if b < BLOCKS - 1:
                before = [
                    x * select(own.block > b, y, Float32(1))
                    for x, y in zip(before, whole, strict=True)
                ]
            if b > 0:
                after = [
                    x * select(own.block < b, y, Float32(1))
                    for x, y in zip(after, whole, strict=True)
                ]
        return before, after


def product(values, row, columns):
    """Two values of a row times its factor and those of their columns."""
    return [value * row * column for value, column in zip(values, columns, strict=True)]


def rounded(values):
    """Two fp32 values as a word of bf16."""
    return words(packed_bf16(values))[0]
