"""Products of whole tiles by wgmma.

The products with a state come out transposed, [channel, token], each warp with 16 channels of 32
tokens, in the order of the fragments that `pairs` works on.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from ...device import warpgroup as wg
from ...device.matrix_rows import LaneRows, MatrixRows
from ...device.sync import meet
from ...device.warp_mma import WarpMma, packed_bf16, select
from .schedule import BLOCK, GROUP, C, D, NamedBar, Row


class Products:
    """Code of all warps, or of the warpgroups that a method names."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan

    # ------------------------------------------------------------ with a state
    def by_state(self, base, tid, state, tokens):
        """Issue state^T tokens^T, [128, 64]; all warps."""
        mma = wg.tiled_mma("MN", "K", 32, groups=(2, 2))
        acc = wg.accumulator(mma, D, C)
        a = wg.operand_a(mma, tid, self.plan[state].view(base, transposed=True))
        b = wg.operand_b(mma, tid, self.plan[tokens].view(base))
        wg.gemm(mma, acc, a, b)
        return acc

    def decay(self, base, lane, channels, half):
        """sum_v dS S of 16 channels over half of v, on the diagonal of dS^T S."""
        mma = WarpMma("bf16")
        acc = mma.accumulators(1, 2)
        names = LaneRows(lane)
        row, chunk = names.columns_first()
        dS = MatrixRows(self.plan["dS"], base, 0, C * half + row, 2 * channels + chunk)
        row, chunk = names.rows_first()
        S = MatrixRows(self.plan["S"], base, 0, C * half + row, 2 * channels + chunk)
        for step in range(C // BLOCK):
            a = mma.a_from_ldmatrix(dS.load(BLOCK * step, transpose=True))
            b = mma.b_pair_from_ldmatrix(S.load(BLOCK * step, transpose=True))
            for n in range(2):
                mma.step(acc, 0, n, a, b[n])
        r, c = lane // 4, lane % 4
        line = self.plan["dgT"].view(base)
        for n in range(2):
            for i in range(2):
                channel = BLOCK * channels + 8 * n + r
                self.keep_if(2 * c + i == r, line, half, channel, acc[(i, n), 0, n])

    # ------------------------------------------------------------ of values
    def write(self, base, tid):
        """U = INV X over X; warpgroups 0 and 1, half of v each."""
        mma = wg.tiled_mma("K", "MN", 64, groups=(1, 2))
        acc = wg.accumulator(mma, C, D)
        a = wg.operand_a(mma, tid, self.plan["INV"].view(base))
        b = wg.operand_b(mma, tid, self.plan["X"].view(base, transposed=True))
        wg.gemm(mma, acc, a, b)
        warpgroup.wait_group(0)
        meet(self.config, NamedBar.WRITTEN + tid // GROUP, GROUP)  # X was read
        wg.store_matrix(mma, tid, wg.rounded(acc), self.plan["X"].view(base))

    # ------------------------------------------------------------ of tokens
    def by_tokens(self, base, tid, left):
        """Issue left U^T, [64, 64]: a warpgroup has 16 columns."""
        mma = wg.tiled_mma("K", "K", BLOCK, groups=(1, 4))
        acc = wg.accumulator(mma, C, C)
        a = wg.operand_a(mma, tid, self.plan[left].view(base))
        b = wg.operand_b(mma, tid, self.plan["X"].view(base))
        wg.gemm(mma, acc, a, b)
        return acc

    @cute.jit
    def publish(
        self, base, tid: Int32, lane: Int32, acc: cute.Tensor, name: cutlass.Constexpr,
        sign: cutlass.Constexpr,
    ):  # fmt: skip
        """The strictly lower half of the product, times factors of rows and columns, to both triangles
        of the tile M or L; the pairs of neighbours, and what the diagonals hold, to `rows`.  A warp has a
        block of 16 by 16.
        """
        warp = cute.arch.make_warp_uniform(tid // 32)
        i, j = warp % 4, warp // 4
        if i > j:
            self.store_block(base, lane, name, i, j, self.scaled(base, lane, acc, name, sign, i, j))
        if i == j:
            values = self.scaled(base, lane, acc, name, sign, i, j)
            self.store_diagonal(base, lane, name, i, values, acc)

    def scaled(self, base, lane, acc, name, sign, i, j):
        """Values of a block times factors of their rows and columns, in the order i + 2 half + 4 s."""
        line, (r, c) = self.plan["rows"].view(base), (lane // 4, lane % 4)
        left = Row.FQ if name == "M" else Row.FK
        f = [line[left, BLOCK * i + r + 8 * half] * sign for half in range(2)]
        out = []
        for s in range(2):
            fk = cute.make_rmem_tensor((2,), Float32)
            row = line[Row.BK, None]
            cute.autovec_copy(cute.local_tile(row, (2,), (BLOCK // 2 * j + 4 * s + c,)), fk)
            out += [acc[4 * s + 2 * h + e] * (f[h] * fk[e]) for h in range(2) for e in range(2)]
        return out

    def store_block(self, base, lane, name, i, j, values):
        """A block below the diagonal, and transposed above it."""
        rounded, tile, names = packed_bf16(values), self.plan[name], LaneRows(lane)
        row, chunk = names.rows_first()
        MatrixRows(tile, base, 0, BLOCK * i + row, 2 * j + chunk).store(rounded)
        row, chunk = names.columns_first()
        MatrixRows(tile, base, 0, BLOCK * j + row, 2 * i + chunk).store(rounded, transpose=True)

    def store_diagonal(self, base, lane, name, i, values, acc):
        """A block on the diagonal: its lower half, and that transposed.  acc: without the factors."""
        line, (r, c) = self.plan["rows"].view(base), (lane // 4, lane % 4)
        rounded = packed_bf16(values)
        four = cute.recast_tensor(rounded, Int32)  # by half, then s
        below = select(r > 2 * c, Int32(0xFFFF), Int32(0)) | select(
            r > 2 * c + 1, Int32(-65536), Int32(0)
        )
        for w in (0, 3):
            four[w] = (four[w] & below) | (transposed(four[w]) & ~below)
        four[2] = transposed(four[1])
        row, chunk = LaneRows(lane).rows_first()
        MatrixRows(self.plan[name], base, 0, BLOCK * i + row, 2 * i + chunk).store(rounded)
        first = 0 if name == "M" else C // 2
        for half in range(2):
            even, odd = values[6 * half], values[6 * half + 1]
            at = BLOCK * i + 8 * half
            self.keep_if(r == 2 * c + 1, line, Row.PAIRS, first + at // 2 + c, even)
            own, row = (even, odd), Row.DIAGONAL
            if name == "L":
                own, row = (acc[6 * half], acc[6 * half + 1]), Row.DBETA
            self.keep_if(r // 2 == c, line, row, at + r, select(r % 2 == 0, *own))

    @cute.jit
    def keep_if(self, mine: Boolean, line: cute.Tensor, row, at: Int32, value: Float32):
        if mine:
            line[row, at] = value


@dsl_user_op
def transposed(word, *, loc=None, ip=None):
    """The lane's word of an 8 x 8 matrix of 16-bit values, transposed."""
    out = llvm.inline_asm(
        Int32.mlir_type,
        [Int32(word).ir_value(loc=loc, ip=ip)],
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return Int32(out)
