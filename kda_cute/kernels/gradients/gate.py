"""The gate, forward and backward.

A thread owns two neighbouring channels and 8 consecutive tokens; 64 threads cover a token's
channels.  Lists of its values are [channel][token].
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device.math import LOG2E, exp2, softplus
from ...device.warp_mma import select, unpack_bf16
from .schedule import DEEPEST, PAIRS, SPAN, THREADS, WARPS, C, Chunk, Gmem, Row

SPANS = C // SPAN


class Gate:
    """Code of all warps, at the two ends of the kernel."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan

    def parameters(self, m, at, pair):
        """exp(A_log), and dt_bias of the thread's two channels."""
        if self.config.gate == "log":
            return Float32(1), [Float32(0)] * 2
        bias = [m.dt_bias[at.h, 2 * pair + i] for i in range(2)]
        return exp2(m.A_log[at.h] * LOG2E), bias

    def read(self, rows, count, tid):
        """The thread's raw gates, of a tensor [token, channel] of the chunk; rows past the end repeat
        the last one.
        """
        pair, first = tid % PAIRS, tid // PAIRS * SPAN
        raw = cute.make_rmem_tensor((2, SPAN), rows.element_type)
        for r in range(SPAN):
            line = rows[cutlass.min(first + r, count - 1), None]
            cute.autovec_copy(cute.local_tile(line, (2,), (pair,)), raw[None, r])
        return raw

    def values(self, raw):
        """Those of `read` in fp32."""
        if self.config.g == "bf16":
            flat = unpack_bf16(raw)
        else:
            flat = [raw[i, r] for r in range(SPAN) for i in range(2)]
        return [flat[i::2] for i in range(2)]

    # ------------------------------------------------------------ forward
    def accumulate(self, m, at, base, tid, raw, lower_bound):
        """The running sums of the thread's tokens; their total goes to `gate_sums`."""
        pair, span = tid % PAIRS, tid // PAIRS
        rate, bias = self.parameters(m, at, pair)
        sums = []
        for x, shift in zip(self.values(raw), bias, strict=True):
            total, column = Float32(0), []
            for r in range(SPAN):
                g = cutlass.max(self.activate(x[r], rate, shift, lower_bound), Float32(DEEPEST))
                total = total + select(SPAN * span + r < at.rows, g, Float32(0))
                column.append(total)
            sums.append(column)
        store_two(self.plan["gate_sums"].view(base), span, pair, [x[-1] for x in sums])
        return sums

    def publish(self, base, tid, sums):
        """gc = cumsum of the gate in log2, once every thread's total is there."""
        pair, span = tid % PAIRS, tid // PAIRS
        totals, gc = (self.plan[name].view(base) for name in ("gate_sums", "gc"))
        before, _ = around(totals, 0, span, pair)
        for r in range(SPAN):
            store_two(
                gc, SPAN * span + r, pair, [x[r] + y for x, y in zip(sums, before, strict=True)]
            )

    def activate(self, x, rate, bias, lower_bound):
        """The gate in log2 of the decay."""
        if self.config.gate == "log":
            return x * LOG2E
        y = (x + bias) * LOG2E
        if self.config.gate == "safe":
            return lower_bound * LOG2E * cute.arch.rcp_approx(1.0 + exp2(-(y * rate)))
        return -(rate * softplus(y))

    # ------------------------------------------------------------ backward
    def sum_columns(self, base, tid):
        """Of the thread's tokens: the suffix sums of dgc plus the exclusive prefix sums of
        kr dkr.  The totals of both go to `column_sums`.
        """
        pair, span = tid % PAIRS, tid // PAIRS
        dgc, krdkr, sums = (self.plan[n].view(base) for n in ("dgc", "krdkr", "column_sums"))
        suffix, prefix = [Float32(0)] * 2, [Float32(0)] * 2
        out = [[None] * SPAN for _ in range(2)]
        for r in reversed(range(SPAN)):
            two = load_two(dgc, SPAN * span + r, pair)
            suffix = [x + y for x, y in zip(suffix, two, strict=True)]
            for i in range(2):
                out[i][r] = suffix[i]
        for r in range(SPAN):
            two = load_two(krdkr, SPAN * span + r, pair)
            for i in range(2):
                out[i][r] = out[i][r] + prefix[i]
            prefix = [x + y for x, y in zip(prefix, two, strict=True)]
        store_two(sums, span, pair, suffix)
        store_two(sums, SPANS + span, pair, prefix)
        return out

    def finish_columns(self, base, tid, columns):
        """dg with respect to the gate itself."""
        pair, span = tid % PAIRS, tid // PAIRS
        sums, dgT = (self.plan[name].view(base) for name in ("column_sums", "dgT"))
        _, after = around(sums, 0, span, pair)
        before, _ = around(sums, SPANS, span, pair)
        ends = [load_two(dgT, half, pair) for half in range(2)]
        rest = [after[i] + before[i] + (ends[0][i] + ends[1][i]) for i in range(2)]
        return [[x + y for x in column] for column, y in zip(columns, rest, strict=True)]

    def backward(self, m, at, base, tid, raw, columns, lower_bound):
        """dg of the raw gate to global memory, and the thread's parts of ddt_bias and dA_log."""
        pair, first = tid % PAIRS, tid // PAIRS * SPAN
        rate, bias = self.parameters(m, at, pair)
        values = self.values(raw)
        ddt, dA = [Float32(0)] * 2, Float32(0)
        for r in range(SPAN):
            inside = first + r < at.rows
            two = []
            for i in range(2):
                dx, dA_term = self.chain(columns[i][r], values[i][r], rate, bias[i], lower_bound)
                two.append(dx)
                if self.config.gate != "log":
                    ddt[i] = ddt[i] + select(inside, dx, Float32(0))
                    dA = dA + select(inside, dA_term, Float32(0))
            self.store_dg(m, at, first + r, pair, two[0], two[1])
        if self.config.gate != "log":
            sums = self.plan["column_sums"].view(base)
            store_two(sums, 2 * SPANS + tid // PAIRS, pair, ddt)
            for offset in (1, 2, 4, 8, 16):
                dA = dA + cute.arch.shuffle_sync_bfly(dA, offset=offset)
        return dA

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

    @cute.jit
    def store_dg(self, m: Gmem, at: Chunk, row: Int32, pair: Int32, a: Float32, b: Float32):
        if row < at.rows:
            two = cute.make_rmem_tensor((2,), Float32)
            two[0] = a
            two[1] = b
            line = cute.local_tile(m.dg[at.b, at.token + row, at.h, None], (2,), (pair,))
            out = cute.make_rmem_tensor((2,), m.dg.element_type)
            out.store(two.load().to(m.dg.element_type))
            cute.autovec_copy(out, line)

    @cute.jit
    def keep_dA(self, base, tid: Int32, dA: Float32):
        """The warp's part of dA_log."""
        line = self.plan["rows"].view(base)
        if tid % 32 == 0:
            line[Row.DA, tid // 32] = dA

    @cute.jit
    def store_parameters(self, m: Gmem, at: Chunk, base, tid: Int32):
        """The chunk's parts of ddt_bias and dA_log, summed in a fixed order."""
        sums = self.plan["column_sums"].view(base)
        if tid < PAIRS:
            total = [Float32(0)] * 2
            for span in cutlass.range_constexpr(SPANS):
                two = load_two(sums, 2 * SPANS + span, tid)
                total = [total[0] + two[0], total[1] + two[1]]
            self.store_ddt(m, at, tid, total)
        if tid == THREADS - 1:
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


def around(sums, row, span, pair):
    """(totals of the spans before this one, of those after it), rows row .. row + 7 of `sums`."""
    before, after = [Float32(0)] * 2, [Float32(0)] * 2
    for other in range(SPANS):
        part = load_two(sums, row + other, pair)
        for i in range(2):
            before[i] = before[i] + select(span > other, part[i], Float32(0))
            after[i] = after[i] + select(span < other, part[i], Float32(0))
    return before, after


def load_two(tile, row, pair):
    """Two neighbouring fp32 values of a row."""
    two = cute.make_rmem_tensor((2,), Float32)
    cute.autovec_copy(cute.local_tile(tile[row, None], (2,), (pair,)), two)
    return [two[0], two[1]]


def store_two(tile, row, pair, values):
    """The reverse of `load_two`."""
    two = cute.make_rmem_tensor((2,), Float32)
    two[0] = values[0]
    two[1] = values[1]
    cute.autovec_copy(two, cute.local_tile(tile[row, None], (2,), (pair,)))
