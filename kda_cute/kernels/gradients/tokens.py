"""What is done by rows: beta and norms, forward and backward, and the gradients' way out.

Eight threads share a token; a thread has 16 of its 128 channels.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from ...device.math import LOG2E, exp2, sigmoid
from ...device.matrix_rows import MatrixRows
from ...device.warp_mma import packed_bf16, unpack_bf16
from .schedule import NORM_EPS, THREADS, C, Chunk, Gmem, Options, Row

PARTS = THREADS // C  # threads of a token


class Tokens:
    """Code of all warps."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan

    # ------------------------------------------------------------ before the products
    @cute.jit
    def activate_beta(self, m: Gmem, at: Chunk, base, tid: Int32, o: Options):
        """b of the chunk's tokens; 0 past the end."""
        line = self.plan["rows"].view(base)
        if tid < C:
            b, slope = Float32(0), o.beta_scale
            if tid < at.rows:
                b = Float32(m.beta[at.b, at.token + tid, at.h])
                if o.beta_sigmoid != 0:
                    z = exp2(-cute.math.absf(b) * LOG2E)
                    s = cute.arch.rcp_approx(1.0 + z)
                    slope = slope * (z * s * s)  # s (1 - s), without 1 - s
                    b = sigmoid(b)
                b = b * o.beta_scale
            line[Row.B, tid] = b
            line[Row.SLOPE, tid] = slope

    @cute.jit
    def norms(self, base, tid: Int32, o: Options):
        """Factors of the rows of k and q."""
        row, part = tid // PARTS, tid % PARTS
        line = self.plan["rows"].view(base)
        fk, nk = self.norm("k", base, row, part, o)
        fq, nq = self.norm("q", base, row, part, o)
        if part == 0:
            line[Row.FK, row] = fk
            line[Row.NK, row] = nk
            line[Row.FQ, row] = fq * o.scale
            line[Row.NQ, row] = nq

    @cute.jit
    def norm(self, name: cutlass.Constexpr, base, row: Int32, part: Int32, o: Options):
        """(1 / norm, its square or 0) of a row of the tile `name`."""
        piece = MatrixRows(self.plan[name], base, 0, row, part)
        total = Float32(0)
        for j in cutlass.range_constexpr(2):
            for x in unpack_bf16(piece.load_piece(8 * j)):
                total = total + x * x
        total = token_sum(total)
        f, square = Float32(1), Float32(0)
        if o.l2norm != 0:
            f = cute.math.rsqrt(total + NORM_EPS, fastmath=True)
            square = f * f
        return f, square

    # ------------------------------------------------------------ after them
    def finish(self, m, at, base, tid):
        """dq and dk from x, the gradient of the normalised row over the norm:
        x - row (row . x) / norm^2.
        """
        self.finish_one("q", m.dq, Row.NQ, at, base, tid)
        self.finish_one("k", m.dk, Row.NK, at, base, tid)

    def finish_one(self, name, out, square, at, base, tid):
        row, part = tid // PARTS, tid % PARTS
        inputs = MatrixRows(self.plan[name], base, 0, row, part // 2)
        x = self.plan["d" + name].view(base)[row, None]
        xs, rows, dot = [], [], Float32(0)
        for j in range(4):  # 4 channels of each 32
            four = cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(cute.local_tile(x, (4,), (part + 8 * j,)), four)
            source = inputs.piece_pointer(0, 4 * j) + cute.assume(4 * (part % 2), divby=4)
            raw = cute.make_rmem_tensor((4,), BFloat16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), raw)
            xs.append([four[i] for i in range(4)])
            rows.append(unpack_bf16(raw))
            for a, b in zip(xs[-1], rows[-1], strict=True):
                dot = dot + a * b
        dot = token_sum(dot) * self.plan["rows"].view(base)[square, row]
        for j in range(4):
            values = [a - b * dot for a, b in zip(xs[j], rows[j], strict=True)]
            self.store_four(out, at, row, part + 8 * j, packed_bf16(values))

    @cute.jit
    def store_four(
        self, out: cute.Tensor, at: Chunk, row: Int32, piece: Int32, values: cute.Tensor
    ):
        if row < at.rows:
            line = out[at.b, at.token + row, at.h, None]
            cute.autovec_copy(values, cute.local_tile(line, (4,), (piece,)))

    def store_dv(self, m, at, base, tid):
        """dv, which took the place of dU, to global memory; two pieces of 8 a thread."""
        row, part = tid // PARTS, tid % PARTS
        tile = MatrixRows(self.plan["dU"], base, 0, row, part)
        for j in range(2):
            self.store_piece(m.dv, at, row, part + 8 * j, tile.load_piece(8 * j))

    @cute.jit
    def store_piece(
        self, out: cute.Tensor, at: Chunk, row: Int32, piece: Int32, values: cute.Tensor
    ):
        if row < at.rows:
            line = out[at.b, at.token + row, at.h, None]
            cute.autovec_copy(values, cute.local_tile(line, (8,), (piece,)))

    @cute.jit
    def store_dbeta(self, m: Gmem, at: Chunk, base, tid: Int32):
        """dbeta with respect to the raw beta."""
        line = self.plan["rows"].view(base)
        if tid < at.rows:
            db = (line[Row.DBETA, tid] + line[Row.DBETA + 1, tid]) * line[Row.SLOPE, tid]
            m.dbeta[at.b, at.token + tid, at.h] = db.to(m.dbeta.element_type)


def token_sum(x):
    """Sum over the threads of a token."""
    for offset in (1, 2, 4):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
    return x
