"""Products of whole tiles by wgmma.

The products with a state come out transposed, [channel, token], each warp with 16 channels of 32
tokens, in the order of the fragments that `pairs` works on.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ...device import warpgroup as wg
from ...device.math import exp2
from ...device.matrix_rows import LaneRows, MatrixRows
from ...device.warp_mma import WarpMma, packed_bf16, quad_sum, select
from ...factors import LEAST_B
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
        """sum_v dS S of 16 channels over half of v, on the diagonal of dS^T S, times exp(gT)."""
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
        for n in range(2):
            for i in range(2):
                self.keep_decay(
                    base, 2 * c + i == r, half, BLOCK * channels + 8 * n + r, acc[(i, n), 0, n]
                )

    @cute.jit
    def keep_decay(self, base, mine: Boolean, half: Int32, channel: Int32, total: Float32):
        gc, dgT = (self.plan[name].view(base) for name in ("gc", "dgT"))
        if mine:
            dgT[half, channel] = total * exp2(gc[C - 1, channel])

    # ------------------------------------------------------------ of values
    def values(self, base, tid, lane):
        """dvc = INV^T dU; dv = b dvc over dU, and sum_v dvc U / b, the gradient of b; warpgroups 0 and
        1, half of v each.
        """
        mma = wg.tiled_mma("MN", "MN", 64, groups=(1, 2))
        acc = wg.accumulator(mma, C, D)
        a = wg.operand_a(mma, tid, self.plan["INV"].view(base, transposed=True))
        b = wg.operand_b(mma, tid, self.plan["dU"].view(base, transposed=True))
        wg.gemm(mma, acc, a, b)
        U = cute.make_rmem_tensor(acc.shape, BFloat16)
        wg.load_matrix(mma, tid, U, self.plan["U"].view(base))
        warpgroup.wait_group(0)
        line = self.plan["rows"].view(base)
        group, row = tid // GROUP, tid % GROUP // 32 * 16 + lane // 4
        rounded = cute.make_rmem_tensor(acc.shape, BFloat16)
        wide = U.load().to(Float32)
        u = cute.make_rmem_tensor(acc.shape, Float32)
        u.store(wide)
        for half in range(2):
            b = line[Row.B, row + 8 * half]
            inverse = cute.arch.rcp_approx(select(b == Float32(0), Float32(LEAST_B), b))
            total = Float32(0)
            for n in range(cute.size(acc) // 4):
                for i in range(2):
                    e = i + 2 * half + 4 * n
                    total = total + acc[e] * u[e]
                    acc[e] = acc[e] * b
            self.keep_row(line, Row.DBETA + group, row + 8 * half, lane, quad_sum(total) * inverse)
        rounded.store(acc.load().to(BFloat16))
        bar = NamedBar.DV + group
        cute.arch.barrier(barrier_id=bar, number_of_threads=GROUP)  # dU was read
        wg.store_matrix(mma, tid, rounded, self.plan["dU"].view(base))

    @cute.jit
    def keep_row(self, line: cute.Tensor, row, token: Int32, lane: Int32, total: Float32):
        if lane % 4 == 0:
            line[row, token] = total

    # ------------------------------------------------------------ of tokens
    def by_tokens(self, base, tid, groups, left):
        """Issue left U^T, [64, 64], by that many warpgroups; tid counts from their first thread."""
        mma = wg.tiled_mma("K", "K", C // groups, groups=(1, groups))
        acc = wg.accumulator(mma, C, C)
        a = wg.operand_a(mma, tid, self.plan[left].view(base))
        b = wg.operand_b(mma, tid, self.plan["U"].view(base))
        wg.gemm(mma, acc, a, b)
        return acc

    def publish(self, base, tid, lane, acc, name, sign):
        """The strictly lower half of the product, times the rows' factors, to both triangles of the
        tile M or L; the pairs of neighbours, and M's diagonal, to `rows`.
        """
        line, tile = self.plan["rows"].view(base), self.plan[name]
        r, c, warp = lane // 4, lane % 4, tid % GROUP // 32
        blocks = cute.size(acc) // 4  # of 8 columns
        first = tid // GROUP * blocks
        row, col = BLOCK * warp + r, 8 * first + 2 * c
        lower = MatrixRows(tile, base, 0, row, first)
        upper = [MatrixRows(tile, base, 0, col + i, 2 * warp) for i in range(2)]
        left = Row.FQ if name == "M" else Row.FK
        f = [line[left, row + 8 * half] * sign for half in range(2)]
        for n in range(blocks):
            fk = cute.make_rmem_tensor((2,), Float32)
            cute.autovec_copy(cute.local_tile(line[Row.FK, None], (2,), (4 * (first + n) + c,)), fk)
            for half in range(2):
                x = [acc[i + 2 * half + 4 * n] * (f[half] * fk[i]) for i in range(2)]
                i, j = row + 8 * half, col + 8 * n
                to = [
                    lower.piece_pointer(8 * half, n) + cute.assume(2 * c, divby=2),
                    *(rows.piece_pointer(8 * n, half) + r for rows in upper),
                ]
                self.keep_pair(to, line, i, j, x, 0 if name == "M" else C // 2)
                if name == "M":
                    self.keep_diagonal(line, i, j, x)

    @cute.jit
    def keep_pair(self, to, line: cute.Tensor, row: Int32, col: Int32, x, first: cutlass.Constexpr):
        """x at (row, col) and (row, col + 1), and where those are lower, transposed; also on the
        diagonal, which nobody reads.
        """
        rounded = packed_bf16(x)
        if row > col:
            cute.autovec_copy(rounded, cute.make_tensor(to[0], cute.make_layout(2)))
            cute.make_tensor(to[1], cute.make_layout(1))[0] = rounded[0]
            if row > col + 1:
                cute.make_tensor(to[2], cute.make_layout(1))[0] = rounded[1]
            else:
                line[Row.PAIRS, first + col // 2] = x[0]

    @cute.jit
    def keep_diagonal(self, line: cute.Tensor, row: Int32, col: Int32, x):
        if row == col:
            line[Row.DIAGONAL, row] = x[0]
        if row == col + 1:
            line[Row.DIAGONAL, row] = x[1]
