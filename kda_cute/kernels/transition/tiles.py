"""The rows that meet the state: kd = kn exp(gc), qd = scale qn exp(gc), kr = b kn exp(gT - gc);
backward b is in kd, not in kr.

b multiplies rows here, before they are rounded, and not the columns of INV: its unit diagonal is exact
in bf16, and an error of b would be common to a whole row.
"""

from cutlass import Float32

from ...device.warp_mma import packed_bf16, select, unpack_word, words
from .columns import Columns, RowWords, falling, load_four, load_pair, rising
from .gate import Total
from .schedule import BLOCK, BLOCKS, Factor


class Tiles:
    """Code of all warps."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan

    def run(self, base, own: Columns):
        """kd, qd and kr of the thread's columns, bf16, in shared memory."""
        before, after = self.around(base, own)
        start = [before[i] * own.e[i, 0] for i in range(2)]
        to_start, to_end = falling(own.e, 0, BLOCK - 1, start), rising(own.e, BLOCK - 1, 0, after)
        first = BLOCK * own.block
        kd = RowWords(self.plan["kd"], base, first, own.pair)
        qd, kr = (kd.in_tile(self.plan["kd"], self.plan[name]) for name in ("qd", "kr"))
        factors = self.plan["factors"].view(base)
        lines = (Factor.K, Factor.Q, Factor.BK)
        if self.config.backward:
            lines = lines[::-1]
        for four in range(0, BLOCK, 4):
            of_kd, of_qd, of_kr = (
                load_four(factors[line, None], 4 * own.block + four // 4) for line in lines
            )
            for j in range(4):
                r = four + j
                k, q = unpack_word(own.k[r]), unpack_word(own.q[r])
                for rows, values, row, column in (
                    (kd, k, of_kd[j], to_start[r]),
                    (qd, q, of_qd[j], to_start[r]),
                    (kr, k, of_kr[j], to_end[r]),
                ):
                    rows.store(r, rounded([values[i] * row * column[i] for i in range(2)]))

    def around(self, base, own):
        """Products of the decays of all blocks before the thread's, and of all after."""
        totals = self.plan["totals"].view(base)
        before, after = [Float32(1)] * 2, [Float32(1)] * 2
        for b in range(BLOCKS):
            whole = load_pair(totals, Total.WHOLE + b, own.pair)
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


def rounded(values):
    """Two fp32 values as a word of bf16."""
    return words(packed_bf16(values))[0]
