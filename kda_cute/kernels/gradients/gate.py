"""The gate, forward and backward.

Forward, a thread owns two neighbouring channels and 8 consecutive tokens; 64 threads cover a token's
channels.  Lists of its values are [channel][token].  Backward, a lane has the positions of `pairs`.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device.chunk import Chunk
from ...device.math import LOG2E, exp2, softplus
from ...device.matrix_rows import LaneRows, MatrixRows
from ...device.vectors import load_two, store_two
from ...device.warp_mma import packed_bf16, quad_sum, select, unpack_bf16, unpack_word, words
from .schedule import BLOCK, DEEPEST, PAIRS, SPAN, THREADS, WARPS, C, D, Gmem, Row, Sum

SPANS = C // SPAN
GROUPS = 4  # of 8 tokens, of a warp


class Gate:
    """Code of all warps, at the two ends of the kernel."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan
        self.wide = config.g == "f32"

    def parameters(self, m, at, first, step):
        """exp(A_log), and dt_bias of two channels."""
        if self.config.gate == "log":
            return Float32(1), [Float32(0)] * 2
        bias = [m.dt_bias[at.h, first + i * step] for i in range(2)]
        return exp2(m.A_log[at.h] * LOG2E), bias

    # ------------------------------------------------------------ raw gates in shared memory
    def pieces(self, name, base, row, chunk):
        """Rows of a tile of raw gates, from the 16 bytes number `chunk` of a row on."""
        tile = self.plan[name]
        if self.wide:  # the same bytes
            tile = replace(tile, shape=(C, 2 * D), dtype="bf16")
        return MatrixRows(tile, base, 0, row, chunk)

    def read(self, base, tid):
        """The thread's raw gates, in fp32."""
        pair, span = tid % PAIRS, tid // PAIRS
        share = 2 if self.wide else 4  # threads of 16 bytes
        pieces = self.pieces("g", base, SPAN * span, pair // share)
        inside = cute.assume(8 // share * (pair % share), divby=8 // share)
        out = [[], []]
        for r in range(SPAN):
            pointer = pieces.piece_pointer(0, r) + (inside + r * pieces.row_pitch)
            two = cute.make_rmem_tensor((2,), self.plan["g"].cute_dtype())
            source = cute.recast_ptr(pointer, dtype=two.element_type)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), two)
            values = [two[0], two[1]] if self.wide else unpack_bf16(two)
            for i in range(2):
                out[i].append(values[i])
        return out

    # ------------------------------------------------------------ forward
    def accumulate(self, at, base, tid, raw, parameters, lower_bound):
        """The running sums of the thread's tokens; their total goes to `gate_sums`."""
        pair, span = tid % PAIRS, tid // PAIRS
        rate, bias = parameters
        sums = []
        for x, shift in zip(raw, bias, strict=True):
            total, column = Float32(0), []
            for r in range(SPAN):
                g = cutlass.max(self.activate(x[r], rate, shift, lower_bound), Float32(DEEPEST))
                total = total + select(SPAN * span + r < at.rows, g, Float32(0))
                column.append(total)
            sums.append(column)
        store_two(self.plan["gate_sums"].view(base), span, pair, [x[-1] for x in sums])
        return sums

    def publish(self, base, tid, sums):
        """gc = cumsum of the gate in log2, once every thread's total is there; exp(gT) to `dgT`."""
        pair, span = tid % PAIRS, tid // PAIRS
        totals, gc = (self.plan[name].view(base) for name in ("gate_sums", "gc"))
        before = [Float32(0)] * 2
        for other in range(SPANS - 1):
            part = load_two(totals, other, pair)
            before = [before[i] + select(span > other, part[i], Float32(0)) for i in range(2)]
        for r in range(SPAN):
            store_two(
                gc, SPAN * span + r, pair, [x[r] + y for x, y in zip(sums, before, strict=True)]
            )
        self.publish_last(base, pair, span, [x[-1] + y for x, y in zip(sums, before, strict=True)])

    @cute.jit
    def publish_last(self, base, pair: Int32, span: Int32, total):
        if span == SPANS - 1:
            store_two(self.plan["dgT"].view(base), 2, pair, [exp2(x) for x in total])

    def activate(self, x, rate, bias, lower_bound):
        """The gate in log2 of the decay."""
        if self.config.gate == "log":
            return x * LOG2E
        y = (x + bias) * LOG2E
        if self.config.gate == "safe":
            return lower_bound * LOG2E * cute.arch.rcp_approx(1.0 + exp2(-(y * rate)))
        return -(rate * softplus(y))

    # ------------------------------------------------------------ backward
    def sum_tokens(self, base, place, dgc, krdkr):
        """Of the warp's tokens: the suffix sums of dgc plus the exclusive prefix sums of kr dkr, and
        to `sums` what the tokens' other half needs of their totals.  Lists have the order of a lane's
        values; a lane's tokens lie in four groups of 8, two neighbours in each.
        """
        odd, upper = place.c % 2 == 1, place.c >= 2
        out, zero = [None] * len(krdkr), Float32(0)
        sums = self.plan["sums"].view(base)
        for half in range(2):
            e = [2 * half + 4 * g for g in range(GROUPS)]
            after = before = zero
            for g in reversed(range(GROUPS)):
                first, last = dgc[e[g]], dgc[e[g] + 1]
                both = first + last
                one, two, total = quad_parts(both)
                rest = after + (select(odd, zero, one) + select(upper, zero, two))
                out[e[g]], out[e[g] + 1] = both + rest, last + rest
                after = after + total
            for g in range(GROUPS):
                first, last = krdkr[e[g]], krdkr[e[g] + 1]
                one, two, total = quad_parts(first + last)
                rest = before + (select(odd, one, zero) + select(upper, two, zero))
                out[e[g]], out[e[g] + 1] = out[e[g]] + rest, out[e[g] + 1] + (rest + first)
                before = before + total
            self.give(
                sums, Sum.LOWER + (1 - place.half), place, half,
                select(place.half == 1, after, before),
            )  # fmt: skip
        return out

    @cute.jit
    def give(
        self, sums: cute.Tensor, row, place: cutlass.Constexpr, half: cutlass.Constexpr, total
    ):
        if place.c == 0:
            sums[row, BLOCK * place.channels + place.r + 8 * half] = total

    def backward(self, at, base, place, columns, parameters, lower_bound):
        """dg of the raw gate, over the raw gates in shared memory, and the warp's parts of ddt_bias
        and dA_log.
        """
        rate, bias = parameters
        sums, dgT = (self.plan[name].view(base) for name in ("sums", "dgT"))
        dA = Float32(0)
        channel = [BLOCK * place.channels + place.r + 8 * half for half in range(2)]
        rest = [
            sums[Sum.LOWER + place.half, c] + (dgT[0, c] + dgT[1, c]) * dgT[2, c] for c in channel
        ]
        ddt = [Float32(0)] * 2
        token = 32 * place.half + 2 * place.c
        for block in range(2):
            raw, out = self.take(base, place, block), []
            for j in range(8):  # i + 2 half + 4 s
                i, half, s = j % 2, j // 2 % 2, j // 4
                inside = token + i + 8 * s + BLOCK * block < at.rows
                dg = columns[8 * block + j] + rest[half]
                dx, dA_term = self.chain(dg, raw[j], rate, bias[half], lower_bound)
                out.append(dx)
                if self.config.gate != "log":
                    ddt[half] = ddt[half] + select(inside, dx, Float32(0))
                    dA = dA + select(inside, dA_term, Float32(0))
            self.put(base, place, block, out)
        if self.config.gate != "log":
            for half in range(2):
                self.give(sums, Sum.DDT + place.half, place, half, quad_sum(ddt[half]))
            for offset in (1, 2, 4, 8, 16):
                dA = dA + cute.arch.shuffle_sync_bfly(dA, offset=offset)
            self.keep_dA(base, place.warp, place.lane, dA)

    def chain(self, dg, x, rate, bias, lower_bound):
        """(d raw, term of dA_log) from the gradient of the gate."""
        if self.config.gate == "log":
            return dg, None
        x = x + bias
        y = x * LOG2E
        if self.config.gate == "safe":
            z = exp2(-cute.math.absf(y * rate))
            s = cute.arch.rcp_approx(1.0 + z)
            dx = dg * (lower_bound * rate) * (z * s * s)  # s (1 - s), without 1 - s
            return dx, dx * x
        slope = -(dg * rate)
        return slope * cute.arch.rcp_approx(1.0 + exp2(-y)), slope * (softplus(y) * (1.0 / LOG2E))

    # ------------------------------------------------------------ a lane's raw gates
    def lane_rows(self, base, place):
        if self.wide:
            row, chunk = 32 * place.half + 2 * place.c, 4 * place.channels + place.r // 4
            return self.pieces("raw", base, row, chunk)
        row, chunk = LaneRows(place.lane).columns_first()
        return self.pieces("raw", base, 32 * place.half + row, 2 * place.channels + chunk)

    def take(self, base, place, block):
        """Of a block, in the order of the lane's values, in fp32."""
        rows = self.lane_rows(base, place)
        if self.wide:
            return [self.single(rows, place, block, j)[0] for j in range(8)]
        four = words(rows.load(BLOCK * block, 0, transpose=True))
        return [x for word in four for x in unpack_word(word)]

    def put(self, base, place, block, values):
        """The reverse of `take`."""
        rows = self.lane_rows(base, place)
        if self.wide:
            for j in range(8):
                self.single(rows, place, block, j)[0] = values[j]
        else:
            rows.store(packed_bf16(values), BLOCK * block, 0, transpose=True)

    def single(self, rows, place, block, j):
        """The fp32 value number j, as a tensor."""
        i, half, s = j % 2, j // 2 % 2, j // 4
        pointer = rows.piece_pointer(8 * s + BLOCK * block, 2 * half + i) + i * rows.row_pitch
        pointer = cute.recast_ptr(pointer, dtype=Float32) + place.r % 4
        return cute.make_tensor(pointer, cute.make_layout(1))

    # ------------------------------------------------------------ parameters
    @cute.jit
    def keep_dA(self, base, warp: Int32, lane: Int32, dA: Float32):
        """The warp's part of dA_log."""
        line = self.plan["rows"].view(base)
        if lane == 0:
            line[Row.DA, warp] = dA

    @cute.jit
    def store_parameters(self, m: Gmem, at: Chunk, base, tid: Int32):
        """The chunk's parts of ddt_bias and dA_log, summed in a fixed order."""
        if const_expr(self.config.gate != "log"):
            sums = self.plan["sums"].view(base)
            pair = tid - (THREADS - PAIRS)
            if pair >= 0:
                halves = [load_two(sums, Sum.DDT + half, pair) for half in range(2)]
                self.store_ddt(m, at, pair, [halves[0][i] + halves[1][i] for i in range(2)])
            if tid == THREADS // 2:
                dA = Float32(0)
                for warp in cutlass.range_constexpr(WARPS):
                    dA = dA + self.plan["rows"].view(base)[Row.DA, warp]
                m.dA_part[at.slot, at.h] = dA

    @cute.jit
    def clear_parameters(self, m: Gmem, at: Chunk, tid: Int32):
        """0 for a slot without a chunk."""
        if const_expr(self.config.gate != "log"):
            if tid < PAIRS:
                self.store_ddt(m, at, tid, [Float32(0)] * 2)
            if tid == THREADS - 1:
                m.dA_part[at.slot, at.h] = Float32(0)

    def store_ddt(self, m, at, pair, values):
        two = cute.make_rmem_tensor((2,), Float32)
        two[0] = values[0]
        two[1] = values[1]
        cute.autovec_copy(two, cute.local_tile(m.ddt_part[at.slot, at.h, None], (2,), (pair,)))


def quad_parts(x):
    """(x of the lane next to this one, sum of the quad's other two lanes, sum of the quad)."""
    one = cute.arch.shuffle_sync_bfly(x, offset=1)
    both = x + one
    two = cute.arch.shuffle_sync_bfly(both, offset=2)
    return one, two, both + two
