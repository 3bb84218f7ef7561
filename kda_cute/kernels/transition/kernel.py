"""What each chunk of 64 tokens does to the state, as factors (see `kda_cute.factors`), K = V = 128.

One CTA makes the factors of one (chunk, head), in steps:

    load      TMA: k, q; the gate by ordinary loads
    gate      e = exp(g) in registers, products over blocks, eg = exp(gT), b
    gather    k and q to registers; norms of k and q
    pairs     L = tril(kn_i . kn_j e^(gc_i - gc_j), -1) diag(b) and mqk: wgmma, dyadic factors
    tiles     kd = kn e^gc, qd = scale qn e^gc, kr = b kn e^(gT - gc) in two words
    invert    R = (I + L)^-1 in tf32: half the tokens by warps 0 and 1 of each warpgroup, before their
              tiles; what joins the halves by warps 2 and 3, after theirs
    publish   INV = R in bf16
    multiply  wgmma: z = INV^T kr, half of its columns a warpgroup; p = mqk INV by both
    store     TMA: kd and qd as soon as they are there, then z, p and, for a backward pass, INV

Two CTAs fit an SM, so that one computes while the other waits.  A CTA that has issued its loads asks
L2 for those of a CTA that starts later, of the same head some chunks on: a guess, which never
matters for the results.  Tiles change their meaning in place: kr becomes z, mqk becomes p, L becomes
R.  Rows past the sequence's end are zeroed in shared memory as they arrive.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import fakes, records, tma
from ...device import warpgroup as wg
from ...device.chunk import Chunk, Options, find_chunk, zero_tail
from ...device.matrix_rows import MatrixRows
from ...device.vectors import load_four
from ...device.warp_mma import packed_bf16, select
from .columns import Columns
from .gate import Gate
from .inverse import Inverse
from .pairs import Pairs
from .schedule import (
    AHEAD,
    BLOCK,
    CTAS,
    GROUP,
    L2_LINE,
    STORING,
    THREADS,
    Bar,
    C,
    Config,
    D,
    Gmem,
    NamedBar,
    shared_memory,
)
from .tiles import Tiles

STORED = {"kd": "kd", "qd": "qd", "z": "kr", "p": "mqk", "INV": "INV"}  # tensor -> its tile


class Copies(NamedTuple):
    """Tensor copies, by the tensor at their other end."""

    k: tma.Tma
    q: tma.Tma
    kd: tma.Tma
    qd: tma.Tma
    z: tma.Tma
    p: tma.Tma
    INV: tma.Tma  # or None


class Grid(NamedTuple):
    """What the host knows of the grid: a CTA is (slot, head), heads first.

    heads: divisor; chunks: of a dense sequence, divisor; ahead: tokens between a CTA's chunk and the
    one of the same head that it prefetches.
    """

    heads: cute.FastDivmodDivisor
    chunks: cute.FastDivmodDivisor
    ahead: Int32


class Transition:
    """The kernel for one `Config`."""

    def __init__(self, config: Config):
        self.config = config
        self.plan = shared_memory(config)
        self.gate = Gate(config, self.plan)
        self.pairs, self.tiles = Pairs(config, self.plan), Tiles(self.plan)
        self.inverse = Inverse(config, self.plan)

    # ------------------------------------------------------------ launch
    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, g: cute.Tensor, beta: cute.Tensor,
        A_log, dt_bias, cu_seqlens,
        factors: cute.Tensor,  # records [slots, H, rows, 128] bf16, see `kda_cute.factors`
        scale: Float32, lower_bound: Float32, beta_scale: Float32, l2norm: Int32, beta_sigmoid: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        parts = records.parts(self.config.record, factors)
        m = Gmem(q, k, g, beta, A_log, dt_bias, cu_seqlens, **parts)
        options = Options(scale, lower_bound, beta_scale, l2norm, beta_sigmoid)
        tokens = lambda t: tma.permuted(t, [1, 3, 2, 0])  # noqa: E731  (t, d, h, b)
        chunks = lambda t: tma.permuted(t, [2, 3, 1, 0])  # noqa: E731  (row, d, h, slot)
        copies = Copies(
            *(tma.make_load(tokens(getattr(m, name)), self.plan[name]) for name in ("k", "q")),
            *(
                None
                if const_expr(getattr(m, name) is None)
                else tma.make_store(chunks(getattr(m, name)), self.plan[tile])
                for name, tile in STORED.items()
            ),
        )
        T, H = q.shape[1], q.shape[2]
        grid = Grid(
            cute.FastDivmodDivisor(H),
            cute.FastDivmodDivisor(cutlass.max((T + C - 1) // C, 1)),
            (AHEAD + H - 1) // H * C,
        )
        self.kernel(m, copies, options, grid).launch(
            grid=(factors.shape[0] * H, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=CTAS,
            preferred_smem_carveout=100,  # percent; the default asks a driver while compiling
        )

    @cute.kernel
    def kernel(self, m: Gmem, copies: Copies, options: Options, grid: Grid):
        base = cutlass.memory.SmemAllocator().allocate(self.plan.total_bytes, 1024)
        bars = self.plan["barriers"].view(base).iterator
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        at = find_chunk(self.config.varlen, m, grid)
        if at.rows > 0:
            if warp == 0:
                with cute.arch.elect_one():
                    for bar in Bar:
                        cute.arch.mbarrier_init(bars + bar, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.sync_warp()
                self.load(copies, at, base, bars)
            self.run(m, copies, options, grid, at, base, bars, warp)

    def load(self, copies, at, base, bars):
        """Issue the copies of k and q."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                bars + Bar.QK, sum(self.plan[name].copy_bytes for name in ("k", "q"))
            )
        for name in ("k", "q"):
            copy = getattr(copies, name)
            block = self.block(copy, at, at.token)
            tma.load(copy, block, self.plan[name].view(base), bars + Bar.QK)

    @staticmethod
    def block(copy, at, token):
        """The [64, 128] block of q or k that starts at a token."""
        tokens = cute.domain_offset((token, 0), copy.tensor[None, None, at.h, at.b])
        return cute.local_tile(tokens, (C, D), (0, 0))

    @cute.jit
    def prefetch(
        self, m: Gmem, copies: Copies, grid: Grid, at: Chunk, base, warp: Int32, tid: Int32
    ):
        """What a later CTA will load, to L2."""
        token = at.token + grid.ahead
        if token < m.q.shape[1]:
            if warp == 1:
                for name in ("k", "q"):
                    copy = getattr(copies, name)
                    tma.prefetch(copy, self.block(copy, at, token), self.plan[name].view(base))
            lines = D * m.g.element_type.width // (8 * L2_LINE)  # of a token's gates
            row = token + tid // lines
            if (tid < C * lines) & (row < m.q.shape[1]):
                tma.prefetch_line(m.g[at.b, row, at.h, None].iterator + tid % lines * (D // lines))

    @cute.jit
    def run(
        self, m: Gmem, copies: Copies, o: Options, grid: Grid, at: Chunk, base, bars, warp: Int32
    ):
        """The steps."""
        tid, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        own = Columns(
            tid // (D // 2),
            tid % (D // 2),
            cute.make_rmem_tensor((2, BLOCK), Float32),
            cute.make_rmem_tensor((BLOCK,), Int32),
            cute.make_rmem_tensor((BLOCK,), Int32),
        )
        raw = self.gate.read(m, at, own, tid)
        self.prefetch(m, copies, grid, at, base, warp, tid)
        self.clear(base, tid)
        self.gate.decays(at, base, own, raw, o.lower_bound)
        self.gate.activate_beta(at, base, raw, tid, o)
        cute.arch.sync_threads()  # totals, b, mbarriers
        cute.arch.mbarrier_wait(bars + Bar.QK, 0)
        if at.rows < C:
            tails = [self.plan[name] for name in ("k", "q")]
            zero_tail(tails, at, base, tid, THREADS)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
        self.gate.take(base, own)
        self.gate.norms(m, at, base, warp, lane, o)
        self.gate.store_total(m, at, base, own)
        cute.arch.sync_threads()  # factors; k and q were read
        self.pairs.run(base, own, warp, lane, tid)
        group, part = warp // 4, warp % 4
        if part < 2:
            self.inverse.half(base, group, part, lane)
            if const_expr(not self.config.every_thread):
                cute.arch.barrier_arrive(barrier_id=NamedBar.HALVES, number_of_threads=THREADS)
        elif const_expr(self.config.every_thread):
            cute.arch.sync_threads()  # the pairs' barrier
        if const_expr(self.config.every_thread):
            cute.arch.sync_threads()
        self.tiles.run(base, own)
        cute.arch.fence_view_async_shared()  # kd, qd, kr
        if const_expr(self.config.every_thread):
            cute.arch.sync_threads()
        if warp == STORING:
            if const_expr(not self.config.every_thread):
                cute.arch.barrier(barrier_id=NamedBar.TILES, number_of_threads=THREADS)
            self.store(copies, ("kd", "qd"), at, base)
        elif const_expr(not self.config.every_thread):
            cute.arch.barrier_arrive(barrier_id=NamedBar.TILES, number_of_threads=THREADS)
        if part < 2:
            self.publish(base, group, part, lane)
        else:
            if const_expr(not self.config.every_thread):
                cute.arch.barrier(barrier_id=NamedBar.HALVES, number_of_threads=THREADS)
            self.inverse.corner(base, 2 + group, part - 2, lane)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()  # INV
        self.multiply(base, tid, lane)
        if warp == 0:
            self.store(copies, ("z", "p", "INV") if self.config.backward else ("z", "p"), at, base)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    # ------------------------------------------------------------ steps
    def clear(self, base, tid):
        """Zero mqk: only what lies below its diagonal is written."""
        tile = self.plan["mqk"]
        vectors = tile.nbytes // 16
        flat = cute.make_tensor(
            cute.recast_ptr(tile.pointer(base), dtype=Float32),
            cute.make_layout((4, vectors), stride=(1, 4)),
        )
        zero = cute.make_rmem_tensor((4,), Float32)
        zero.fill(0.0)
        for i in range(vectors // THREADS):
            cute.autovec_copy(zero, flat[None, tid + i * THREADS])

    @cute.jit
    def publish(self, base, group: Int32, part: Int32, lane: Int32):
        """INV = R in bf16, inside a half: a lane has a row's 16 columns of one block.  Warp 0 takes the
        lower block row, which it made; R above the diagonal blocks was never written.
        """
        cute.arch.sync_warp()
        i, j = 1 - part, lane // BLOCK
        row, block = C // 2 * group + BLOCK * i + lane % BLOCK, 2 * group + j
        line = self.plan["L"].view(base)[row, None]
        for n in cutlass.range_constexpr(2):
            x = load_four(line, 4 * block + 2 * n) + load_four(line, 4 * block + 2 * n + 1)
            values = [select(j <= i, y, Float32(0)) for y in x]
            MatrixRows(self.plan["INV"], base, 0, row, 2 * block).store_piece(
                packed_bf16(values), n
            )
        if group == 0:
            for n in cutlass.range_constexpr(2):
                above = MatrixRows(self.plan["INV"], base, 0, row, C // 16 + 2 * j)
                above.store_piece(packed_bf16([Float32(0)] * 8), n)

    @cute.jit
    def multiply(self, base, tid: Int32, lane: Int32):
        """z = INV^T kr over kr, half of the columns by each warpgroup, and p, the strictly lower
        part of mqk INV, over mqk: by both, since half of its columns is too narrow an operand.
        """
        view = lambda name, transposed=False: self.plan[name].view(base, transposed=transposed)  # noqa: E731
        group, within = tid // GROUP, tid % GROUP
        by_keys = wg.tiled_mma("MN", "MN", D // 2, groups=(1, 2))
        z = wg.accumulator(by_keys, C, D)
        inverse = wg.operand_a(by_keys, tid, view("INV", transposed=True))
        for name in ("kr", "kr_low"):
            rows = wg.operand_b(by_keys, tid, view(name, transposed=True))
            wg.gemm(by_keys, z, inverse, rows, accumulate=name == "kr_low")
        by_tokens = wg.tiled_mma("K", "MN", C)
        p = wg.accumulator(by_tokens, C, C)
        mqk = wg.operand_a(by_tokens, within, view("mqk"))
        wg.gemm(by_tokens, p, mqk, wg.operand_b(by_tokens, within, view("INV", transposed=True)))
        warpgroup.wait_group(0)
        cute.arch.sync_threads()  # all products ended
        wg.store_matrix(by_keys, tid, wg.rounded(z), view("kr"))
        if group == 0:
            # The squares of 8 on p's diagonal are 2 row and 2 row + 1.
            row = within // 32  # of blocks
            for n in cutlass.range_constexpr(C // 8):
                for i in cutlass.range_constexpr(2):
                    e, diagonal = i + 2 * (n % 2) + 4 * n, lane // 4 == 2 * (lane % 4) + i
                    p[e] = select((row == n // 2) & diagonal, Float32(0), p[e])
            wg.store_matrix(by_tokens, within, wg.rounded(p), view("mqk"))
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

    def store(self, copies, names, at, base):
        """Copy tiles to global memory; one warp."""
        for name in names:
            copy, tile = getattr(copies, name), self.plan[STORED[name]]
            block = cute.local_tile(copy.tensor[None, None, at.h, at.slot], tile.shape, (0, 0))
            tma.store(copy, tile.view(base), block)
        cute.arch.cp_async_bulk_commit_group()


# ---------------------------------------------------------------- compile
def trace(config: Config):
    """(jit callable, fake arguments) for `compile.KernelSpec`: B, T, H, N, slots and the strides of
    the callers' tensors are dynamic.
    """
    B, T, H, slots = (cute.sym_int() for _ in range(4))
    compact, strided = fakes.compact, fakes.strided
    beta = fakes.scattered(fakes.TYPES[config.beta], B, T, H)
    A_log = dt_bias = cu = None
    if config.gate != "log":
        A_log, dt_bias = compact(Float32, H), compact(Float32, H, D)
    if config.varlen:
        cu = fakes.offsets()
    arguments = (
        *(strided(dtype, B, T, H, D) for dtype in (BFloat16, BFloat16, fakes.TYPES[config.g])),
        beta, A_log, dt_bias, cu,
        records.fake(config.record, slots, H),
        *(Float32(0),) * 3, Int32(0), Int32(0),
    )  # fmt: skip
    return Transition(config), arguments
