"""Gradients of the inputs of `chunk_kda` from the states and their gradients, K = V = 128.

One CTA works on one (chunk, head); chunks don't depend on each other.  gc is the running sum of the
gate in the chunk, gT its last value, kn and qn the normalised keys and queries, and S [V, K] the
state on entering the chunk, dS the gradient of the state on leaving it; dv = b INV^T dU.

    dM = do U^T            dL = -dv U^T            of pairs i > j, and dM of i = j
    dqn = scale e^gc do S + what pairs add
    dkn = -e^gc dv S + e^(gT - gc) U dS + what pairs add
    dgc = qn scale e^gc do S - kn e^gc dv S + what pairs add
    dg_t = sum of dgc from t on + e^gT sum_v dS S + sum of kn e^(gT - gc) U dS before t

then the backward of norms, gate and beta.  Steps:

    load      TMA: S, dS, do, U, dU, INV, q, k; the gate by ordinary loads
    gate      do S^T and U dS^T start; gc, b, norms
    first     warpgroups 0, 1: dv, over dU, and dbeta; warpgroups 2, 3: M = dM times norms
    multiply  L = dL times norms; dv S^T; sum_v dS S; dv to global memory
    pairs     see `pairs`: registers hold dq, dk, dgc of 16 channels and 32 tokens of a warp
    columns   sums over tokens, gate, norms, out

M and L have the norms' factors in them, so that dq and dk grow as gradients over the norm.  Rows
past the sequence's end are zeroed in shared memory.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import fakes, tma
from ...device.math import exp2
from ...device.slots import packed_chunk
from ...layouts.variants import plan
from .gate import Gate
from .pairs import COUNT, Lane, Pairs, Place, again, unpack
from .products import Products
from .schedule import (
    GROUP,
    THREADS,
    Bar,
    C,
    Chunk,
    Config,
    Copies,
    D,
    Gmem,
    Options,
    Row,
)
from .tokens import Tokens

TOKEN_TILES = ("q", "k", "do")


class Gradients:
    """The kernel for one `Config`."""

    def __init__(self, config: Config):
        self.config = config
        self.plan = plan("gradients", config.layout, "bf16")
        self.gate, self.tokens = Gate(config, self.plan), Tokens(config, self.plan)
        self.products, self.pairs = Products(config, self.plan), Pairs(config, self.plan)

    # ------------------------------------------------------------ launch
    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, do: cute.Tensor, g: cute.Tensor, beta: cute.Tensor,
        A_log, dt_bias, cu_seqlens,
        S: cute.Tensor, dS: cute.Tensor, U: cute.Tensor, dU: cute.Tensor, INV: cute.Tensor,
        dq: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, dg: cute.Tensor, dbeta: cute.Tensor,
        dA_part, ddt_part,
        scale: Float32, lower_bound: Float32, beta_scale: Float32, l2norm: Int32, beta_sigmoid: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        m = Gmem(
            q, k, do, g, beta, A_log, dt_bias, cu_seqlens, S, dS, U, dU, INV,
            dq, dk, dv, dg, dbeta, dA_part, ddt_part,
        )  # fmt: skip
        options = Options(scale, lower_bound, beta_scale, l2norm, beta_sigmoid)
        modes = lambda name: [1, 3, 2, 0] if name in TOKEN_TILES else [2, 3, 1, 0]  # noqa: E731
        copies = Copies(
            *(
                tma.make_load(tma.permuted(getattr(m, name), modes(name)), self.plan[name])
                for name in Copies._fields
            )
        )
        self.kernel(m, copies, options).launch(
            grid=(S.shape[0] * q.shape[2], 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent; the default asks a driver while compiling
        )

    @cute.kernel
    def kernel(self, m: Gmem, copies: Copies, options: Options):
        base = cutlass.memory.SmemAllocator().allocate(self.plan.total_bytes, 1024)
        bars = self.plan["barriers"].view(base).iterator
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tid, _, _ = cute.arch.thread_idx()
        at = self.find_chunk(m)
        if at.rows > 0:
            if warp == 0:
                self.remember(m, at, base)
                with cute.arch.elect_one():
                    for bar in Bar:
                        cute.arch.mbarrier_init(bars + bar, 1)
                cute.arch.mbarrier_init_fence()
                self.load(copies, at, base, bars)
            self.run(m, options, at, base, bars, warp, tid)
        else:
            self.gate.clear_parameters(m, at, tid)

    def load(self, copies, at, base, bars):
        """Issue all copies."""
        by_bar = {
            Bar.STATES: ("do", "S", "U", "dS"),
            Bar.INVERSE: ("dU", "INV"),
            Bar.ROWS: ("k", "q"),
        }
        for bar, names in by_bar.items():
            nbytes = sum(self.plan[name].copy_bytes for name in names)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars + bar, nbytes)
            for name in names:
                copy, tile = getattr(copies, name), self.plan[name]
                if name in TOKEN_TILES:
                    rows = cute.domain_offset((at.token, 0), copy.tensor[None, None, at.h, at.b])
                else:
                    rows = copy.tensor[None, None, at.h, at.slot]
                tma.load(
                    copy, cute.local_tile(rows, tile.shape, (0, 0)), tile.view(base), bars + bar
                )

    # ------------------------------------------------------------ steps
    @cute.jit
    def run(self, m: Gmem, o: Options, at: Chunk, base, bars, warp: Int32, tid: Int32):
        """The steps."""
        lane = cute.arch.lane_idx()
        raw = self.gate.read(self.gates(m, *self.where(m, at)), at.rows, tid)
        self.tokens.activate_beta(m, at, base, tid, o)
        cute.arch.sync_threads()  # the barriers are ready
        cute.arch.mbarrier_wait(bars + Bar.STATES, 0)
        if at.rows < C:
            cute.arch.mbarrier_wait(bars + Bar.ROWS, 0)
            self.zero_tail(at, base, tid)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
        acc_q = self.products.by_state(base, tid, "S", "do")
        acc_kr = self.products.by_state(base, tid, "dS", "U")
        sums = self.gate.accumulate(m, at, base, tid, raw, o.lower_bound)
        cute.arch.mbarrier_wait(bars + Bar.ROWS, 0)
        self.tokens.norms(base, tid, o)
        cute.arch.sync_threads()  # gate totals, b, norms
        self.gate.publish(base, tid, sums)
        cute.arch.mbarrier_wait(bars + Bar.INVERSE, 0)
        if warp < 8:
            self.products.values(base, tid, lane)
        else:
            acc = self.products.by_tokens(base, tid - 2 * GROUP, 2, "do")
            warpgroup.wait_group(0)
            self.products.publish(base, tid - 2 * GROUP, lane, acc, "M", 1.0)
        cute.arch.fence_view_async_shared()  # dv is an operand
        cute.arch.sync_threads()  # gc, dv, M
        acc_L = self.products.by_tokens(base, tid, 4, "dU")
        acc_k = self.products.by_state(base, tid, "S", "dU")
        self.products.decay(base, lane, warp % 8, warp // 8)
        self.tokens.store_dv(m, at, base, tid)
        warpgroup.wait_group(1)
        self.products.publish(base, tid, lane, acc_L, "L", -1.0)
        warpgroup.wait_group(0)
        cute.arch.sync_threads()  # L; the states are free
        place = Place(again(warp), again(lane))
        registers = self.combine(base, place, acc_q, acc_k, acc_kr)
        self.pairs.run(base, place, registers)
        cute.arch.sync_threads()  # gc, M, L are free
        self.keep(base, place, "dq", registers.dq)
        self.keep(base, place, "dk", registers.dk)
        self.keep(base, place, "dgc", registers.dgc)
        (at, place_of_g), tid = self.recall(base), again(tid)
        raw = self.gate.read(self.gates(m, *place_of_g), at.rows, tid)
        cute.arch.sync_threads()
        columns = self.gate.sum_columns(base, tid)
        self.tokens.finish(m, at, base, tid)
        self.tokens.store_dbeta(m, at, base, tid)
        cute.arch.sync_threads()  # sums of the spans of tokens
        columns = self.gate.finish_columns(base, tid, columns)
        dA = self.gate.backward(m, at, base, tid, raw, columns, o.lower_bound)
        if const_expr(self.config.gate != "log"):
            self.gate.keep_dA(base, tid, dA)
            cute.arch.sync_threads()
            self.gate.store_parameters(m, at, base, tid)

    @cute.jit
    def zero_tail(self, at: Chunk, base, tid: Int32):
        """Rows past the sequence's end hold another sequence's tokens, or anything."""
        for i in cutlass.range(at.rows * D + tid, C * D, THREADS, unroll=1):
            self.zero(base, i // D, i % D)

    def zero(self, base, row, col):
        for name in TOKEN_TILES:
            self.plan[name].view(base)[row, col] = BFloat16(0)

    def combine(self, base, place, acc_q, acc_k, acc_kr):
        """What the products with states give, and pairs of equal or neighbouring tokens: registers
        for `pairs`; kr dkr goes to its tile.
        """
        lane = Lane(*(place.rows(self.plan[name], base) for name in ("k", "q")))
        tile = self.plan["gc"].view(base)
        gc, rows = place.view(tile), self.plan["rows"].view(base)
        fk, fq = (place.tokens(rows[row, None]) for row in (Row.FK, Row.FQ))
        last = [tile[C - 1, 16 * place.channels + place.r + 8 * half] for half in range(2)]
        krdkr = place.view(self.plan["krdkr"].view(base))
        for block in range(2):
            k, q = lane.words(block)
            for w in range(4):
                half, s = w % 2, w // 2
                factors = cute.make_rmem_tensor((2, 2), Float32)
                cute.autovec_copy(fk[None, s, block], factors[None, 0])
                cute.autovec_copy(fq[None, s, block], factors[None, 1])
                kw, qw = unpack(k[w]), unpack(q[w])
                sums = [gc[i, half, s, block] for i in range(2)]
                lane.step[4 * block + w] = exp2(sums[1] - sums[0])
                for i in range(2):
                    e = 8 * block + 2 * w + i
                    start, end = exp2(sums[i]), exp2(last[half] - sums[i])
                    from_q = acc_q[e] * (start * factors[i, 1])
                    from_k = acc_k[e] * (start * factors[i, 0])  # minus the gradient
                    from_end = acc_kr[e] * (end * factors[i, 0])
                    krdkr[i, half, s, block] = kw[i] * from_end
                    lane.dq[e] = from_q
                    lane.dk[e] = from_end - from_k
                    lane.dgc[e] = qw[i] * from_q - kw[i] * from_k
            self.pairs.same_token(base, place, lane, block, k, q)
            self.pairs.neighbours(base, place, lane, block, k, q)
            cute.arch.sync_warp()
        return lane

    def keep(self, base, place, name, values):
        """A lane's values to an fp32 tile."""
        view = place.view(self.plan[name].view(base))
        for e in range(COUNT):
            view[e % 2, e // 2 % 2, e // 4 % 2, e // 8] = values[e]

    # ------------------------------------------------------------ which chunk
    def where(self, m, at):
        """Address of the chunk's first gate, and elements from token to token."""
        offset = cute.assume(cute.crd2idx((at.b, at.token, at.h, 0), m.g.layout), divby=2)
        return (m.g.iterator + offset).toint(), m.g.stride[1]

    def gates(self, m, address, stride):
        """The chunk's raw gates [token, channel]."""
        dtype = m.g.element_type
        start = cute.make_ptr(
            dtype, address, cute.AddressSpace.gmem, assumed_align=2 * dtype.width // 8
        )
        layout = cute.make_layout((C, D), stride=(cute.assume(stride, divby=2), 1))
        return cute.make_tensor(start, layout)

    def remember(self, m, at, base):
        """The chunk to shared memory, so that it takes no registers while `pairs` wants them all."""
        words = self.plan["chunk"].view(base)
        values = (*at, *self.where(m, at))
        for i in range(len(values)):
            words[0, i] = Int64(values[i])

    def recall(self, base):
        """(chunk, `where` its gates are)."""
        words = self.plan["chunk"].view(base)
        count = len(Chunk._fields)
        at = Chunk(*(Int32(words[0, i]) for i in range(count)))
        return at, (words[0, count], words[0, count + 1])

    @cute.jit
    def find_chunk(self, m: Gmem):
        """This CTA's chunk.  Offsets out of range or out of order never lead outside the tensors."""
        index, _, _ = cute.arch.block_idx()
        T, H = m.q.shape[1], m.q.shape[2]
        slot, h = index // H, index % H
        if const_expr(self.config.varlen):
            b = Int32(0)
            token, rows = packed_chunk(m.cu_seqlens, T, slot)
        else:
            chunks = (T + C - 1) // C
            b, token = slot // chunks, slot % chunks * C
            rows = cutlass.min(T - token, C)
        return Chunk(b, token, rows, slot, h)


# ---------------------------------------------------------------- compile
def trace(config: Config):
    """(jit callable, fake arguments) for `compile.KernelSpec`: B, T, H, N, slots and the strides of
    the callers' tensors are dynamic.
    """
    B, T, H, slots = (cute.sym_int() for _ in range(4))
    g, beta = fakes.TYPES[config.g], fakes.TYPES[config.beta]
    compact, strided, scalars = fakes.compact, fakes.strided, fakes.scattered
    A_log = dt_bias = cu = dA = ddt = None
    if config.gate != "log":
        A_log, dt_bias = compact(Float32, H), compact(Float32, H, D)
        dA, ddt = compact(Float32, slots, H), compact(Float32, slots, H, D)
    if config.varlen:
        cu = fakes.offsets()
    tokens = lambda dtype: strided(dtype, B, T, H, D)  # noqa: E731
    arguments = (
        tokens(BFloat16), tokens(BFloat16), tokens(BFloat16), tokens(g), scalars(beta, B, T, H),
        A_log, dt_bias, cu,
        *(compact(BFloat16, slots, H, D, D) for _ in range(2)),
        *(compact(BFloat16, slots, H, C, D) for _ in range(2)),
        compact(BFloat16, slots, H, C, C),
        *(tokens(BFloat16) for _ in range(3)), tokens(g), scalars(beta, B, T, H), dA, ddt,
        Float32(0), Float32(0), Float32(0), Int32(0), Int32(0),
    )  # fmt: skip
    return Gradients(config), arguments
