"""What is done by rows: beta and norms, forward and backward, and the gradients' way out.

Forward, eight threads share a token; a thread has 16 of its 128 channels.  Backward, a lane has the
positions of `pairs`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from ...device.chunk import Chunk, Options
from ...device.math import LOG2E, at_least, exp2, sigmoid
from ...device.matrix_rows import MatrixRows
from ...device.warp_mma import packed_bf16, select, unpack_bf16
from ...factors import LEAST_B
from .schedule import BLOCK, NORM_EPS, THREADS, C, D, Gmem, Row

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
            b, slope = Float32(0), Float32(0)
            if tid < at.rows:
                b = Float32(m.beta[at.b, at.token + tid, at.h])
                slope = cute.arch.rcp_approx(at_least(b))
                if o.beta_sigmoid != 0:
                    z = exp2(-cute.math.absf(b) * LOG2E)
                    s = cute.arch.rcp_approx(1.0 + z)
                    slope = select(b > 0.0, z * s, s)  # 1 - sigmoid, without the difference
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
            line[Row.BK, row] = fk * line[Row.B, row]
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
    def dot_parts(self, base, place, lane):
        """Of each token, the sums of q dq and k dk over the warp's channels, to `dots`."""
        dots = self.plan["dots"].view(base)
        for n, (rows, gradient) in enumerate(((lane.rows_q, lane.dq), (lane.rows_k, lane.dk))):
            parts = []
            for block in range(2):
                x = unpack_bf16(rows.load(BLOCK * block, 0, transpose=True))
                for j in (0, 1, 4, 5):  # i + 4 s
                    e = 8 * block + j
                    parts.append(x[j] * gradient[e] + x[j + 2] * gradient[e + 2])
            # the lanes that share c: bit 4 keeps the block, bit 3 s, bit 2 i
            for bit in (4, 2, 1):
                parts = halved(parts, (place.r & bit) != 0, 4 * bit)
            token = 2 * place.c + place.r % 2 + 8 * (place.r // 2)
            dots[8 * n + place.channels, 32 * place.half + token] = parts[0]

    def finish(self, base, place, lane):
        """dq and dk from x, the gradient of the normalised row over the norm, over q and k:
        x - row (row . x) / norm^2.
        """
        dots, line = (self.plan[name].view(base) for name in ("dots", "rows"))
        own = self.plan["exchange"].pointer(base)  # as `Pairs.slot` divides it
        own = cute.recast_ptr(own, dtype=Float32) + cute.assume(512 * place.warp, divby=512)
        token = 32 * place.half + place.lane
        for n, square in enumerate((Row.NQ, Row.NK)):
            total = Float32(0)
            for channels in range(D // BLOCK):
                total = total + dots[8 * n + channels, token]
            cute.make_tensor(own + 32 * n + place.lane, cute.make_layout(1))[0] = (
                total * line[square, token]
            )
        cute.arch.sync_warp()
        own = own + cute.assume(2 * place.c, divby=2)
        for n, (rows, gradient) in enumerate(((lane.rows_q, lane.dq), (lane.rows_k, lane.dk))):
            for block in range(2):
                x = unpack_bf16(rows.load(BLOCK * block, 0, transpose=True))
                values = [None] * 8
                for s in range(2):
                    two = cute.make_rmem_tensor((2,), Float32)
                    source = own + (32 * n + BLOCK * block + 8 * s)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), two)
                    for half in range(2):
                        for i in range(2):
                            j = i + 2 * half + 4 * s
                            values[j] = gradient[8 * block + j] - x[j] * two[i]
                rows.store(packed_bf16(values), BLOCK * block, 0, transpose=True)

    # ------------------------------------------------------------ tails
    def store_rows(self, out, name, at, base, tid):
        """The rows of a bf16 tile that the chunk has to global memory; two pieces of 8 a thread."""
        row, part = tid // PARTS, tid % PARTS
        tile = MatrixRows(self.plan[name], base, 0, row, part)
        for j in range(2):
            self.store_piece(out, at, row, part + 8 * j, tile.load_piece(8 * j))

    @cute.jit
    def store_values(self, out: cute.Tensor, name: cutlass.Constexpr, at: Chunk, base, tid: Int32):
        """The same, of a tile of any dtype, value by value."""
        tile = self.plan[name].view(base)
        for i in cutlass.range(tid, at.rows * D, THREADS, unroll=1):
            out[at.b, at.token + i // D, at.h, i % D] = tile[i // D, i % D]

    @cute.jit
    def store_piece(
        self, out: cute.Tensor, at: Chunk, row: Int32, piece: Int32, values: cute.Tensor
    ):
        if row < at.rows:
            line = out[at.b, at.token + row, at.h, None]
            cute.autovec_copy(values, cute.local_tile(line, (8,), (piece,)))

    @cute.jit
    def store_dbeta(self, m: Gmem, at: Chunk, base, tid: Int32):
        """dbeta with respect to the raw beta, by the first threads from tid = 0 on."""
        line = self.plan["rows"].view(base)
        if (tid >= 0) & (tid < at.rows):
            db = line[Row.DBETA, tid] * line[Row.SLOPE, tid]
            m.dbeta[at.b, at.token + tid, at.h] = db.to(m.dbeta.element_type)

    @cute.jit
    def mend_dv(self, m: Gmem, at: Chunk, base, tid: Int32, o: Options):
        """dv of tokens whose b is below LEAST_B, which stood for it until here."""
        row, part = tid // PARTS, tid % PARTS
        least = cute.math.absf(o.beta_scale) * LEAST_B
        b = self.plan["rows"].view(base)[Row.B, row]
        if (o.beta_sigmoid == 0) & (row < at.rows) & (cute.math.absf(b) < least):
            line = m.dv[at.b, at.token + row, at.h, None]
            for j in cutlass.range_constexpr(2):
                piece = cute.local_tile(line, (8,), (part + 8 * j,))
                values = cute.make_rmem_tensor((8,), BFloat16)
                cute.autovec_copy(piece, values)
                values.store(
                    (values.load().to(Float32) * (b / (o.beta_scale * LEAST_B))).to(BFloat16)
                )
                cute.autovec_copy(values, piece)


def halved(values, upper, offset):
    """Of the sums of two lanes' lists, the half that this lane keeps: the upper one or the lower."""
    n = len(values) // 2
    out = []
    for low, high in zip(values[:n], values[n:], strict=True):
        keep, give = select(upper, high, low), select(upper, low, high)
        out.append(keep + cute.arch.shuffle_sync_bfly(give, offset=offset))
    return out


def token_sum(x):
    """Sum over the threads of a token."""
    for offset in (1, 2, 4):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
    return x
