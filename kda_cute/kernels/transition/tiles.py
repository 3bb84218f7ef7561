"""The rows that meet the state: kd = kn exp(gc), qd = scale qn exp(gc), kr = kn exp(gT - gc)."""

from cutlass import Float32

from ...device.warp_mma import packed_bf16, select, unpack_word, words
from .columns import Columns, RowWords, falling, load_four, load_pair, rising
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
        qd, kr = (kd.in_tile(self.plan["kd"], self.plan[name]) for name in ("qd", "kr"))
        factors = self.plan["factors"].view(base)
        for four in range(0, BLOCK, 4):
            fk, fq = (
                load_four(factors[line, None], 4 * own.block + four // 4)
                for line in (Factor.K, Factor.Q)
            )
            for j in range(4):
                r = four + j
                k = [x * fk[j] for x in unpack_word(own.k[r])]
                q = [x * fq[j] for x in unpack_word(own.q[r])]
                for rows, values, factor in (
                    (kd, k, to_start[r]),
                    (qd, q, to_start[r]),
                    (kr, k, to_end[r]),
                ):
                    rows.store(r, words(packed_bf16([values[i] * factor[i] for i in range(2)]))[0])

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
