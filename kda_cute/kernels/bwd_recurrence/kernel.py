"""The fused reverse recurrence over a prepared workspace (level 1), chunks of C = 16 tokens, K = V
= 128.

Per (sequence, head), from the last chunk to the first, with dS the gradient of the state after the
chunk:

    dU  = Mqk^T do + kr dS       dvc = INV^T dU          U = INV vc,  vc = b (v - kd S)      dv = b dvc
    dkr = U dS^T                 dM  = tril(do U^T)      dL = -tril(dvc U^T, -1)
    dqd = do S^T + dM ki         dki = dM^T qd + (b dL)^T kd         dkd = b (dL ki - dvc S^T)
    dgT = exp(gT) rowsum_v(dS S) + colsum(dkr kr)        dbeta = rowsum(dvc (v - kd S)) + rowsum(dL kd ki^T)
    dS <- exp(gT) dS + qd^T do - kd^T (b dvc)

One CTA walks one (sequence, head).  The recurrence acts on each column v of dS alone, and every
product that it needs contracts over tokens or over K.  So the value warps hold dS^T in registers,
32 rows v and all K each, as accumulators; they are their own operands, and the serial chain dS ->
dU -> dvc -> dS crosses neither a barrier nor shared memory.  Products that contract over v go to
key and pair warps, 32 columns k each, most of a chunk behind.

    role      warps   registers   work of a chunk                                      MMA steps (m16n8k16)
    value     0-3     248         dU, dvc, kd S, U; dS, U, dvc to shared memory; dS    560
    key       4-7     112         dvc S^T, rowsum_v(dS S); dkd, dki                    176
    pair      8-11    112         do S^T, U dS^T, dM, dL, kd ki^T; dqd, dkr, dgT,      320
                                  dbeta, dv
    copy      12, 13  40          producer: TMA and bulk copies in, sigmoid(beta);
                                  store: bulk copies out

The tiles of a chunk have two (tf32) or three (bf16) stages; the state tile, the dS copy, U and dvc
have one.  Outputs are staged in the bytes of tiles that are no longer read.  Barriers:
`schedule.Bar`.

Rows past a sequence's end exist in its last chunk only, the first one walked: its tiles are zeroed
in shared memory once, and everything after that is a full chunk.  The diagonal of dM multiplies
unrounded fp32 values outside the tensor cores, so that the pair (i, i) cancels in dg; with bf16
operands the products over tokens take kd, qd and ki in two parts, hi + lo, so that pairs (i, j) do
(64 steps more than in the table).
No atomics.  Shared-memory layouts come from `kda_cute.layouts`.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from ...device import tma
from ...device.math import clamp
from ...device.tma import Tma
from ...device.warp_mma import WarpMma
from .key import KeyRole
from .pair import PairRole
from .producer import ProducerRole, StoreRole
from .schedule import (
    CONSUMER_WARPS,
    KEY,
    PAIR,
    PRODUCER_WARP,
    STORE_WARP,
    TAIL_BARRIER,
    THREADS,
    WARPS,
    Bar,
    C,
    Config,
    D,
    Gmem,
    Registers,
    Walk,
    shared_memory,
)
from .value import ValueRole


class BwdRecurrence:
    """The kernel for one `Config`."""

    def __init__(self, config: Config):
        self.config = config
        self.plan = shared_memory(config)
        mma = WarpMma(config.precision)
        self.value = ValueRole(config, self.plan, mma)
        self.key, self.pair = (role(config, self.plan, mma) for role in (KeyRole, PairRole))
        self.producer, self.store = ProducerRole(config, self.plan), StoreRole(self.plan)

    # ------------------------------------------------------------ launch
    @cute.jit
    def __call__(
        self, do: cute.Tensor, v: cute.Tensor, beta: cute.Tensor,
        kd: cute.Tensor, qd: cute.Tensor, kr: cute.Tensor, ki: cute.Tensor, g_total: cute.Tensor,
        inv: cute.Tensor, mqk: cute.Tensor, states: cute.Tensor, dfinal, cu_seqlens,
        dkd: cute.Tensor, dqd: cute.Tensor, dki: cute.Tensor, dkr: cute.Tensor, dgT: cute.Tensor,
        dv: cute.Tensor, dbeta: cute.Tensor, dinitial: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        m = Gmem(do, v, beta, kd, qd, kr, ki, g_total, inv, mqk, states, dfinal, cu_seqlens,
                 dkd, dqd, dki, dkr, dgT, dv, dbeta, dinitial)  # fmt: skip
        by_head = lambda t: tma.permuted(t, [0, 2, 1])  # noqa: E731
        tma_do = tma.make_load(by_head(do), self.plan["do"])
        tma_v = tma.make_load(by_head(v), self.plan["v"])
        tma_s = tma.make_load(tma.permuted(states, [2, 3, 1, 0]), self.plan["states"])
        sequences, heads = dinitial.shape[0], dinitial.shape[1]
        self.kernel(m, tma_do, tma_v, tma_s).launch(
            grid=(heads * sequences, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, m: Gmem, tma_do: Tma, tma_v: Tma, tma_s: Tma):
        base = cutlass.memory.SmemAllocator().allocate(self.plan.total_bytes, 1024)
        bars = self.plan["barriers"].view(base).iterator
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            self.init_barriers(bars)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Each role finds its sequence: a value shared by three register budgets would be spilled.
        if warp >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(Registers().copy)
            if warp == PRODUCER_WARP:
                self.producer.run(m, self.find_sequence(m), base, bars, tma_do, tma_v, tma_s)
            if warp == STORE_WARP:
                self.store.run(m, self.find_sequence(m), base, bars)
        elif warp >= PAIR:
            cute.arch.setmaxregister_decrease(Registers().pair)
            self.pair.run(m, self.consumer_walk(m, base, bars), base, bars, warp - PAIR)
        elif warp >= KEY:
            cute.arch.setmaxregister_decrease(Registers().key)
            self.key.run(self.consumer_walk(m, base, bars), base, bars, warp - KEY)
        else:
            cute.arch.setmaxregister_increase(Registers().value)
            self.value.run(m, self.consumer_walk(m, base, bars), base, bars, warp)

    def init_barriers(self, bars):
        warp = 32 if self.config.every_lane else 1  # arrivals of a warp
        with cute.arch.elect_one():
            for s in range(self.producer.stages):
                cute.arch.mbarrier_init(bars + Bar.FULL + s, 1 + warp)  # the copies, and beta
                cute.arch.mbarrier_init(bars + Bar.UPDATED + s, warp * WARPS)
                cute.arch.mbarrier_init(bars + Bar.STORED + s, warp * 2 * WARPS)
                cute.arch.mbarrier_init(bars + Bar.EMPTY + s, 1)
            cute.arch.mbarrier_init(bars + Bar.STATES_FULL, 1)
            cute.arch.mbarrier_init(bars + Bar.STATES_EMPTY, warp * CONSUMER_WARPS)
            cute.arch.mbarrier_init(bars + Bar.DVC_FULL, warp * WARPS)
            cute.arch.mbarrier_init(bars + Bar.U_FULL, warp * WARPS)
            cute.arch.mbarrier_init(bars + Bar.HAND_EMPTY, warp * 2 * WARPS)
            for s in range(2):
                cute.arch.mbarrier_init(bars + Bar.SMALL_FULL + s, warp * 3)  # dM, dL, kd ki^T
                cute.arch.mbarrier_init(bars + Bar.KEY_DONE + s, warp * WARPS)

    @cute.jit
    def consumer_walk(self, m: Gmem, base, bars):
        """The walk of a value, key or pair warp, its tail cleared."""
        walk = self.find_sequence(m)
        if walk.tiles > 0:
            if walk.tail < C:
                self.zero_tail(walk, base, bars)
        return walk

    @cute.jit
    def find_sequence(self, m: Gmem):
        """This CTA's walk.  Offsets out of range or out of order never lead outside the tensors."""
        block, _, _ = cute.arch.block_idx()
        T, H, all_tiles = m.do.shape[0], m.do.shape[1], m.kd.shape[1]
        n, h = block // H, block % H
        first, last, tile = Int32(0), Int32(0), Int32(0)
        if const_expr(self.config.varlen):
            first = clamp(m.cu_seqlens[n], T)
            last = clamp(m.cu_seqlens[n + 1], T)
            before = Int32(0)
            for i in cutlass.range(cute.arch.lane_idx(), n, 32, unroll=4):
                length = clamp(m.cu_seqlens[i + 1], T) - clamp(m.cu_seqlens[i], T)
                # Offsets that contradict each other may add up to anything: no overflow.
                before = cutlass.min(before + (cutlass.max(length, 0) + C - 1) // C, all_tiles)
            tile = cute.arch.warp_reduction(before, lambda a, b: a + b)
            tile = cutlass.min(tile, all_tiles)
        else:
            length = T // m.dinitial.shape[0]
            first = n * length
            last = first + length
            tile = n * ((length + C - 1) // C)
        length = cutlass.max(last - first, 0)
        tiles = cutlass.max(cutlass.min((length + C - 1) // C, all_tiles - tile), 0)
        tail = cutlass.min(length - (tiles - 1) * C, C)
        return Walk(n, h, first, tile, tiles, tail)

    @cute.jit
    def zero_tail(self, walk: Walk, base, bars):
        """Zero the rows past the sequence's end in the first stage; all consumer warps."""
        cute.arch.mbarrier_wait(bars + Bar.FULL, 0)
        tid, _, _ = cute.arch.thread_idx()
        threads = 32 * CONSUMER_WARPS
        for i in cutlass.range(walk.tail * D + tid, C * D, threads, unroll=1):
            self.zero(("kd", "qd", "kr", "ki", "do", "v"), base, i // D, i % D)
        for i in cutlass.range(walk.tail * C + tid, C * C, threads, unroll=1):
            self.zero(("inv", "mqk"), base, i // C, i % C)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=TAIL_BARRIER, number_of_threads=threads)

    def zero(self, names, base, row, col):
        for name in names:
            tile = self.plan[name].view(base)
            tile[row, col] = tile.element_type(0)


# ---------------------------------------------------------------- compile
def trace(config: Config):
    """(jit callable, fake arguments) for `compile.KernelSpec`: T, H, N and tiles dynamic."""
    sym = cute.sym_int
    T, H, N, tiles = sym(), sym(), sym(), sym()

    def fake(dtype, *shape, align=16):
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(
            dtype, shape, stride_order=order, assumed_align=align
        )

    types = {"bf16": BFloat16, "f32": Float32}
    wide = lambda: fake(Float32, H, tiles, C, D)  # noqa: E731
    square = lambda: fake(BFloat16, H, tiles, C, C)  # noqa: E731
    tokens = lambda: fake(BFloat16, T, H, D)  # noqa: E731
    state_type = types.get(config.state_grad, Float32)
    dfinal = fake(state_type, N, H, D, D) if config.state_grad != "none" else None
    cu = None
    if config.varlen:
        cu = cute.runtime.make_fake_tensor(Int32, (sym(),), stride=(sym(),), assumed_align=4)
    arguments = (
        tokens(), tokens(), fake(types[config.beta], T, H, align=2 if config.beta == "bf16" else 4),
        wide(), wide(), wide(), wide(), fake(Float32, H, tiles, D), square(), square(), fake(BFloat16, H, tiles, D, D),
        dfinal, cu,
        wide(), wide(), wide(), wide(), fake(Float32, H, tiles, D), tokens(), fake(Float32, H, tiles, C),
        fake(state_type, N, H, D, D),
    )  # fmt: skip
    return BwdRecurrence(config), arguments
