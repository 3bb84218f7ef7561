"""Gradients of the inputs of `chunk_kda` from the states and their gradients, K = V = 128.

One CTA works on one (chunk, head); chunks don't depend on each other.  gc is the running sum of the
gate in the chunk, gT its last value, kn and qn the normalised keys and queries, and S [K, V] the
state on entering the chunk, dS the gradient of the state on leaving it, both stored [V, K]; X is that
of `factors`, and U = INV X what the tokens write, over b.

    dM = do U^T diag(b)    dL = -dv U^T diag(b)    of pairs i > j, and dM of i = j
    b db = sum_v dv U, the diagonal of dv U^T; where dv was made with LEAST_B for b, it is mended here
    dqn = scale e^gc do S^T + what pairs add
    dkn = -e^gc dv S^T + b e^(gT - gc) U dS^T + what pairs add
    dgc = qn scale e^gc do S^T - kn e^gc dv S^T + what pairs add
    dg_t = sum of dgc from t on + e^gT sum_v dS S + sum of b kn e^(gT - gc) U dS^T before t

then the backward of norms, gate and beta.  Steps:

    load      TMA, in the order of need: g, X, INV, k, q, do, S, dS, dv
    sum       b, sums of the gate over spans of tokens
    write     U over X, by warpgroups 0 and 1; norms
    multiply  gc; do S^T, U dS^T, dv S^T; M = dM and L = dL, times norms; sum_v dS S
    pairs     see `pairs`: registers hold dq, dk, dgc of 16 channels and 32 tokens of a warp; TMA
              brings g again
    columns   sums over tokens and over channels, norms, gate; TMA takes dq, dk, dg out

A CTA asks L2 for the inputs of one that starts later.
M and L have the norms' factors in them, so that dq and dk grow as gradients over the norm.  Rows
past the sequence's end are zeroed in shared memory.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import fakes, records, tma
from ...device.chunk import Chunk, Options, find_chunk, zero_tail
from ...device.math import exp2
from ...device.registers import again
from ...device.warp_mma import unpack_word
from .gate import Gate
from .pairs import Lane, Pairs, Place
from .products import Products
from .schedule import (
    AHEAD,
    BLOCK,
    GROUP,
    PAIRS,
    PREFETCHING,
    THREADS,
    Bar,
    C,
    Config,
    Copies,
    D,
    Gmem,
    Grid,
    Row,
    Stores,
    shared_memory,
)
from .tokens import Tokens

TOKEN_TILES = ("g", "k", "q", "do", "dv")
STORED = {"dq": "q", "dk": "k", "dg": "raw"}  # tiles that are copied out


class Gradients:
    """The kernel for one `Config`."""

    def __init__(self, config: Config):
        self.config = config
        self.plan = shared_memory(config)
        self.gate, self.tokens = Gate(config, self.plan), Tokens(config, self.plan)
        self.products, self.pairs = Products(config, self.plan), Pairs(config, self.plan)

    # ------------------------------------------------------------ launch
    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, do: cute.Tensor, g: cute.Tensor, beta: cute.Tensor,
        A_log, dt_bias, cu_seqlens,
        dv: cute.Tensor,
        # records [slots, H, rows, 128] bf16, see `kda_cute.factors`
        chunk: cute.Tensor, dchunk: cute.Tensor, factors: cute.Tensor,
        dq: cute.Tensor, dk: cute.Tensor, dg: cute.Tensor, dbeta: cute.Tensor, parameters,
        scale: Float32, lower_bound: Float32, beta_scale: Float32, l2norm: Int32, beta_sigmoid: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        c, dS = records.parts("chunk", chunk), records.parts("dchunk", dchunk)["dS"]
        INV = records.parts("backward factors", factors)["INV"]
        m = Gmem(
            q, k, do, g, beta, A_log, dt_bias, cu_seqlens, dv, c["S"], dS, c["X"], INV,
            dq, dk, dg, dbeta, *self.split(parameters, q.shape[2]),
        )  # fmt: skip
        options = Options(scale, lower_bound, beta_scale, l2norm, beta_sigmoid)
        modes = lambda name: [1, 3, 2, 0] if name in TOKEN_TILES else [2, 3, 1, 0]  # noqa: E731
        copies = Copies(
            *(
                tma.make_load(tma.permuted(getattr(m, name), modes(name)), self.plan[name])
                for name in Copies._fields
            )
        )
        stores = Stores(
            *(
                tma.make_store(tma.permuted(getattr(m, name), [1, 3, 2, 0]), self.plan[tile])
                for name, tile in STORED.items()
            )
        )
        T, H = q.shape[1], q.shape[2]
        grid = Grid(
            cute.FastDivmodDivisor(H), cute.FastDivmodDivisor(cutlass.max((T + C - 1) // C, 1))
        )
        self.kernel(m, copies, stores, options, grid).launch(
            grid=(chunk.shape[0] * H, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent; the default asks a driver while compiling
        )

    @staticmethod
    def split(parameters, H):
        """A slot's part of dA_log, and of ddt_bias, in one row; (None, None) without parameters."""
        if const_expr(parameters is None):
            return None, None
        slots, row = parameters.shape[0], parameters.stride[0]
        dA = cute.make_layout((slots, H), stride=(row, 1))
        ddt = cute.make_layout((slots, H, D), stride=(row, D, 1))
        return (
            cute.make_tensor(parameters.iterator + H * D, dA),
            cute.make_tensor(parameters.iterator, ddt),
        )

    @cute.kernel
    def kernel(self, m: Gmem, copies: Copies, stores: Stores, options: Options, grid: Grid):
        base = cutlass.memory.SmemAllocator().allocate(self.plan.total_bytes, 1024)
        bars = self.plan["barriers"].view(base).iterator
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tid, _, _ = cute.arch.thread_idx()
        at = find_chunk(self.config.varlen, m, grid)
        if at.rows > 0:
            if warp == 0:
                with cute.arch.elect_one():
                    for bar in Bar:
                        cute.arch.mbarrier_init(bars + bar, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.sync_warp()
                self.load(copies, at, base, bars)
                self.remember(at, base)
            self.run(m, copies, stores, options, grid, at, base, bars, warp, tid)
        else:
            self.gate.clear_parameters(m, at, tid)

    def load(self, copies, at, base, bars):
        """Issue all copies, in the order in which they are wanted."""
        by_bar = {
            Bar.GATE: ("g",),
            Bar.INVERSE: ("X", "INV"),
            Bar.ROWS: ("k", "q"),
            Bar.START: ("do", "S"),
            Bar.END: ("dS",),
            Bar.VALUES: ("dv",),
        }
        for bar, names in by_bar.items():
            self.expect(bars + bar, names)
            for name in names:
                block = self.block(getattr(copies, name), name, at)
                tma.load(getattr(copies, name), block, self.plan[name].view(base), bars + bar)

    def expect(self, bar, names):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                bar, sum(self.plan[name].copy_bytes for name in names)
            )

    def block(self, copy, name, at):
        """A chunk's block of the tensor `name`."""
        if name in TOKEN_TILES:
            rows = cute.domain_offset((at.token, 0), copy.tensor[None, None, at.h, at.b])
        else:
            rows = copy.tensor[None, None, at.h, at.slot]
        return cute.local_tile(rows, self.plan[name].shape, (0, 0))

    @cute.jit
    def load_again(self, copy: tma.Tma, at: Chunk, base, bars, warp: Int32):
        """The raw gates, for the backward."""
        if warp == 0:
            self.expect(bars + Bar.AGAIN, ("raw",))
            tma.load(copy, self.block(copy, "g", at), self.plan["raw"].view(base), bars + Bar.AGAIN)

    @cute.jit
    def prefetch(self, m: Gmem, copies: Copies, grid: Grid, at: Chunk, base, warp: Int32):
        """What a later CTA will load, to L2; the tokens of packed sequences are a guess, which never
        matters for the results.
        """
        if warp == PREFETCHING:
            index, _, _ = cute.arch.block_idx()
            slot, h = divmod(index + AHEAD, grid.heads)
            if slot < m.S.shape[0]:
                b, token = Int32(0), at.token + (slot - at.slot) * C
                if const_expr(not self.config.varlen):
                    b, chunk = divmod(slot, grid.chunks)
                    token = chunk * C
                later = Chunk(b, token, Int32(C), slot, h)
                if token < m.q.shape[1]:
                    for name in TOKEN_TILES:
                        self.prefetch_one(copies, name, later, base)
                for name in Copies._fields:
                    if const_expr(name not in TOKEN_TILES):
                        self.prefetch_one(copies, name, later, base)

    def prefetch_one(self, copies, name, at, base):
        copy = getattr(copies, name)
        tma.prefetch(copy, self.block(copy, name, at), self.plan[name].view(base))

    # ------------------------------------------------------------ steps
    @cute.jit
    def run(
        self, m: Gmem, copies: Copies, stores: Stores, o: Options, grid: Grid, at: Chunk, base, bars,
        warp: Int32, tid: Int32,
    ):  # fmt: skip
        """The steps."""
        lane = cute.arch.lane_idx()
        parameters = self.gate.parameters(m, at, 2 * (tid % PAIRS), 1)
        self.tokens.activate_beta(m, at, base, tid, o)
        cute.arch.sync_threads()  # the barriers are ready
        cute.arch.mbarrier_wait(bars + Bar.GATE, 0)
        raw = self.gate.read(base, tid)
        sums = self.gate.accumulate(at, base, tid, raw, parameters, o.lower_bound)
        cute.arch.mbarrier_wait(bars + Bar.ROWS, 0)
        if at.rows < C:
            cute.arch.mbarrier_wait(bars + Bar.START, 0)
            cute.arch.mbarrier_wait(bars + Bar.VALUES, 0)
            tails = [self.plan[name] for name in ("q", "k", "do", "dv")]
            zero_tail(tails, at, base, tid, THREADS)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
        if warp < 8:
            cute.arch.mbarrier_wait(bars + Bar.INVERSE, 0)
            self.products.write(base, tid)
            cute.arch.fence_view_async_shared()  # U is an operand
        elif const_expr(self.config.every_thread):
            cute.arch.sync_threads()  # in `write`, that of the others
        self.tokens.norms(base, tid, o)
        cute.arch.sync_threads()  # gate totals, b, norms, U
        cute.arch.mbarrier_wait(bars + Bar.START, 0)
        acc_q = self.products.by_state(base, tid, "S", "do")  # (do S^T)^T
        self.gate.publish(base, tid, sums)
        cute.arch.mbarrier_wait(bars + Bar.END, 0)
        acc_kr = self.products.by_state(base, tid, "dS", "X")  # (U dS^T)^T: X holds U now
        self.prefetch(m, copies, grid, at, base, warp)
        acc_M = self.products.by_tokens(base, tid, "do")  # do U^T
        cute.arch.mbarrier_wait(bars + Bar.VALUES, 0)
        acc_L = self.products.by_tokens(base, tid, "dv")  # dv U^T
        acc_k = self.products.by_state(base, tid, "S", "dv")  # (dv S^T)^T
        self.products.decay(base, lane, warp % 8, warp // 8)
        warpgroup.wait_group(1)
        self.products.publish(base, tid, lane, acc_M, "M", 1.0)
        self.products.publish(base, tid, lane, acc_L, "L", -1.0)
        warpgroup.wait_group(0)
        cute.arch.sync_threads()  # gc, M, L; the states are free
        self.load_again(copies.g, at, base, bars, warp)
        place = Place(again(warp), again(lane))
        registers = self.combine(base, place, acc_q, acc_k, acc_kr)
        self.pairs.run(base, place, registers)
        at, place = self.recall(base), Place(again(warp), again(lane))
        columns = self.gate.sum_tokens(base, place, registers.dgc, self.krdkr(base, place))
        parameters = self.gate.parameters(m, at, BLOCK * place.channels + place.r, 8)
        self.tokens.dot_parts(base, place, registers)
        cute.arch.sync_threads()  # parts of sums over channels; totals of tokens
        self.tokens.finish(base, place, registers)
        cute.arch.mbarrier_wait(bars + Bar.AGAIN, 0)
        self.gate.backward(at, base, place, columns, parameters, o.lower_bound)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()  # dq, dk, dg, parts of ddt_bias and dA_log
        self.finish(m, stores, o, self.recall(base), base, warp, 32 * place.warp + place.lane)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def finish(self, m: Gmem, stores: Stores, o: Options, at: Chunk, base, warp: Int32, tid: Int32):
        """Everything to global memory."""
        if at.rows == C:
            self.store(stores, ("dq", "dk", "dg"), at, base, warp)
        else:
            self.tokens.store_rows(m.dq, "q", at, base, tid)
            self.tokens.store_rows(m.dk, "k", at, base, tid)
            if const_expr(self.config.g == "bf16"):
                self.tokens.store_rows(m.dg, "raw", at, base, tid)
            else:
                self.tokens.store_values(m.dg, "raw", at, base, tid)
        self.tokens.store_dbeta(m, at, base, tid - GROUP)
        self.tokens.mend_dv(m, at, base, tid, o)
        self.gate.store_parameters(m, at, base, tid)

    @cute.jit
    def store(self, stores: Stores, names: cutlass.Constexpr, at: Chunk, base, warp: Int32):
        """Copy whole tiles to global memory."""
        if warp == 0:
            for name in names:
                copy, tile = getattr(stores, name), self.plan[STORED[name]]
                rows = cute.domain_offset((at.token, 0), copy.tensor[None, None, at.h, at.b])
                tma.store(copy, tile.view(base), cute.local_tile(rows, tile.shape, (0, 0)))
            cute.arch.cp_async_bulk_commit_group()

    def combine(self, base, place, acc_q, acc_k, acc_kr):
        """What the products with states give, and pairs of equal or neighbouring tokens: registers
        for `pairs`; kr dkr goes to its tile.
        """
        lane = Lane(*(place.rows(self.plan[name], base) for name in ("k", "q")))
        tile = self.plan["gc"].view(base)
        gc, rows = place.view(tile), self.plan["rows"].view(base)
        lines = [place.tokens(rows[row, None]) for row in (Row.FK, Row.FQ, Row.BK)]
        last = [tile[C - 1, 16 * place.channels + place.r + 8 * half] for half in range(2)]
        for block in range(2):
            k, q = lane.words(block)
            krdkr = cute.make_rmem_tensor((4, 2), Float32)
            for w in range(4):
                half, s = w % 2, w // 2
                factors = cute.make_rmem_tensor((2, 3), Float32)
                for n, line in enumerate(lines):
                    cute.autovec_copy(line[None, s, block], factors[None, n])
                kw, qw = unpack_word(k[w]), unpack_word(q[w])
                sums = [gc[i, half, s, block] for i in range(2)]
                lane.step[4 * block + w] = exp2(sums[1] - sums[0])
                for i in range(2):
                    e = 8 * block + 2 * w + i
                    start, end = exp2(sums[i]), exp2(last[half] - sums[i])
                    from_q = acc_q[e] * (start * factors[i, 1])
                    from_k = acc_k[e] * (start * factors[i, 0])  # minus the gradient
                    from_end = acc_kr[e] * (end * factors[i, 2])
                    krdkr[2 * w % 4 + i, w // 2] = kw[i] * from_end
                    lane.dq[e] = from_q
                    lane.dk[e] = from_end - from_k
                    lane.dgc[e] = qw[i] * from_q - kw[i] * from_k
            cute.autovec_copy(krdkr, self.own(base, place, block))
            self.pairs.same_token(base, place, lane, block, k, q)
            self.pairs.neighbours(base, place, lane, block, k, q)
            cute.arch.sync_warp()
        return lane

    def own(self, base, place, block):
        """The lane's 8 values of a block in the tile krdkr: two by two vectors of 4, those of a warp
        side by side.
        """
        pointer = cute.recast_ptr(self.plan["krdkr"].pointer(base), dtype=Float32)
        offset = cute.assume(((4 * place.warp + 2 * block) * 32 + place.lane) * 4, divby=4)
        return cute.make_tensor(pointer + offset, cute.make_layout((4, 2), stride=(1, 128)))

    def krdkr(self, base, place):
        """The lane's values."""
        values = []
        for block in range(2):
            eight = cute.make_rmem_tensor((4, 2), Float32)
            cute.autovec_copy(self.own(base, place, block), eight)
            values += [eight[i, j] for j in range(2) for i in range(4)]
        return values

    # ------------------------------------------------------------ which chunk
    def remember(self, at, base):
        """The chunk to shared memory, so that it takes no registers while `pairs` wants them all."""
        line = self.plan["chunk"].view(base)
        for i in range(len(at)):
            line[0, i] = Int64(at[i])

    def recall(self, base):
        """The chunk."""
        line = self.plan["chunk"].view(base)
        return Chunk(*(Int32(line[0, i]) for i in range(len(Chunk._fields))))


# ---------------------------------------------------------------- compile
def trace(config: Config):
    """(jit callable, fake arguments) for `compile.KernelSpec`: B, T, H, N, slots and the strides of
    the callers' tensors are dynamic.
    """
    B, T, H, slots = (cute.sym_int() for _ in range(4))
    g, beta = fakes.TYPES[config.g], fakes.TYPES[config.beta]
    compact, strided, scalars = fakes.compact, fakes.strided, fakes.scattered
    A_log = dt_bias = cu = parameters = None
    if config.gate != "log":
        A_log, dt_bias = compact(Float32, H), compact(Float32, H, D)
        parameters = compact(Float32, slots, cute.sym_int())
    if config.varlen:
        cu = fakes.offsets()
    tokens = lambda dtype: strided(dtype, B, T, H, D)  # noqa: E731
    arguments = (
        tokens(BFloat16), tokens(BFloat16), tokens(BFloat16), tokens(g), scalars(beta, B, T, H),
        A_log, dt_bias, cu, tokens(BFloat16),
        *(records.fake(kind, slots, H) for kind in ("chunk", "dchunk", "backward factors")),
        tokens(BFloat16), tokens(BFloat16), tokens(g), scalars(beta, B, T, H), parameters,
        Float32(0), Float32(0), Float32(0), Int32(0), Int32(0),
    )  # fmt: skip
    return Gradients(config), arguments
