"""The scan: state, U and output of every chunk of C = 64 tokens, K = V = 128.

Per (sequence, head), from the first chunk to the last, S the state on entering the chunk:

    U = u - w S        o = qd S + mqk U + diag(qk) U        S <- diag(eg) S + kr^T U

The recurrence acts on each column v of S alone, so a warpgroup owns 64 of them, as rows of S^T: fp32
accumulators of wgmma with all K, and after rounding to bf16 the left operands of the next products.
U^T is an operand as it stands, too.  The serial chain S -> U -> S crosses neither shared memory nor
another warpgroup.

    role       warps         registers   work of a chunk                    MMA (m64 n k16)
    consumer   4 per group   232         S^T w^T, S^T qd^T, U^T mqk^T       8 + 8 + 4 of n = 64
                                         U^T kr                             4 of n = 128
    producer   1             40          tensor copies of w, qd, u, kr, mqk; bulk copies of eg, qk

With groups = 2 a CTA owns a (sequence, head), with groups = 1 half of its columns v.  Warpgroups
never wait for each other: each has its own tiles to stage o and the state in, and only stages of
the loaded tiles are shared.  The order inside a chunk keeps an MMA in flight wherever registers are
at work: the decay of S, the subtraction from u and the copies out run under S^T w^T and S^T qd^T,
the diagonal under U^T kr, and rounding the state under U^T mqk^T.

Rows past a sequence's end are 0 in every factor, so they add nothing to S; only o must not be
written there.  Sequences may be empty.  Shared-memory layouts come from `kda_cute.layouts`.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from ...device import tma
from ...layouts.variants import plan
from .consumer import ConsumerRole
from .producer import ProducerRole
from .schedule import WARPS, Bar, C, Config, Copies, D, Gmem, Registers, Walk


class Scan:
    """The kernel for one `Config`."""

    def __init__(self, config: Config):
        self.config = config
        self.plan = plan("scan", config.layout, "bf16", groups=config.groups, save=config.save)
        self.producer = ProducerRole(config, self.plan)
        self.consumer = ConsumerRole(config, self.plan)

    # ------------------------------------------------------------ launch
    @cute.jit
    def __call__(
        self, w: cute.Tensor, kr: cute.Tensor, qd: cute.Tensor, u: cute.Tensor, mqk: cute.Tensor,
        qk: cute.Tensor, eg: cute.Tensor, initial, cu_seqlens,
        o: cute.Tensor, states, final, stream: cuda.CUstream,
    ):  # fmt: skip
        slots, tile_first = w.shape[0], [2, 3, 1, 0]
        load = lambda t, name: tma.make_load(tma.permuted(t, tile_first), self.plan[name])  # noqa: E731
        to_states = None
        if const_expr(self.config.save):
            to_states = tma.make_store(tma.permuted(states, tile_first), self.plan["states"])
        copies = Copies(
            *(load(t, name) for t, name in ((w, "w"), (kr, "kr"), (qd, "qd"), (u, "u"), (mqk, "mqk"))),
            tma.make_store(tma.permuted(o, [1, 3, 2, 0]), self.plan["o"]),
            to_states,
        )  # fmt: skip
        if const_expr(self.config.varlen):
            sequences = cu_seqlens.shape[0] - 1
        else:
            sequences = o.shape[0]
        m = Gmem(qk, eg, initial, cu_seqlens, o, final)
        self.kernel(m, copies, slots).launch(
            grid=(self.config.parts * o.shape[2] * sequences, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, m: Gmem, copies: Copies, slots: Int32):
        base = cutlass.memory.SmemAllocator().allocate(self.plan.total_bytes, 1024)
        bars = self.plan["barriers"].view(base).iterator
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            self.init_barriers(bars)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Each role finds its sequence: a value shared by two register budgets would be spilled.
        if warp >= WARPS * self.config.groups:
            if const_expr(self.config.groups == 2):
                cute.arch.setmaxregister_decrease(Registers().producer)
            if warp == WARPS * self.config.groups:
                self.producer.run(m, self.find_sequence(m, slots), base, bars, copies)
        else:
            if const_expr(self.config.groups == 2):
                cute.arch.setmaxregister_increase(Registers().consumer)
            walk = self.find_sequence(m, slots)
            self.consumer.run(m, walk, base, bars, copies, warp // WARPS)

    def init_barriers(self, bars):
        warp = 32 if self.config.every_lane else 1  # arrivals of a warp
        stages = self.producer.stages
        with cute.arch.elect_one():
            for s in range(stages):
                cute.arch.mbarrier_init(bars + Bar.FULL * stages + s, 1)
                cute.arch.mbarrier_init(
                    bars + Bar.EMPTY * stages + s, warp * WARPS * self.config.groups
                )

    @cute.jit
    def find_sequence(self, m: Gmem, slots: Int32):
        """This CTA's walk.  Offsets out of range or out of order never lead outside the tensors."""
        block, _, _ = cute.arch.block_idx()
        T, H = m.o.shape[1], m.o.shape[2]
        part, block = block % self.config.parts, block // self.config.parts
        n, h = block // H, block % H
        batch, first, length, slot = n, Int32(0), Int32(T), Int32(0)
        if const_expr(self.config.varlen):
            batch = Int32(0)
            first = clamp(m.cu_seqlens[n], T)
            length = cutlass.max(clamp(m.cu_seqlens[n + 1], T) - first, 0)
            slot = cutlass.min(first // C + n, slots)
        else:
            slot = cutlass.min(n * ((length + C - 1) // C), slots)
        chunks = cutlass.min((length + C - 1) // C, slots - slot)
        tail = cutlass.min(length - (chunks - 1) * C, C)
        return Walk(n, h, part * self.config.groups, batch, first, slot, chunks, tail)


def clamp(x, top):
    """x as Int32 within [0, top]."""
    return cutlass.max(cutlass.min(Int32(x), top), 0)


# ---------------------------------------------------------------- compile
def trace(config: Config):
    """(jit callable, fake arguments) for `compile.KernelSpec`: B, T, H, N, slots and strides of o and
    of first and last states dynamic.
    """
    sym, wide = cute.sym_int, cute.sym_int64
    B, T, H, slots = sym(), sym(), sym(), sym()
    N = sym() if config.varlen else B

    def fake(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(
            dtype, shape, stride_order=order, assumed_align=16
        )

    def strided(dtype, shape, stride, align):
        return cute.runtime.make_fake_tensor(dtype, shape, stride=stride, assumed_align=align)

    def state(dtype):
        return strided(dtype, (N, H, D, D), tuple(wide() for _ in range(4)), dtype.width // 8)

    tokens = lambda: fake(BFloat16, slots, H, C, D)  # noqa: E731
    initial = {"none": None, "bf16": BFloat16, "f32": Float32}[config.initial]
    o_stride = (*(wide(divisibility=8) for _ in range(3)), 1)
    arguments = (
        tokens(), tokens(), tokens(), tokens(), fake(BFloat16, slots, H, C, C),
        fake(Float32, slots, H, C), fake(Float32, slots, H, D),
        state(initial) if initial else None,
        strided(Int32, (sym(),), (sym(),), 4) if config.varlen else None,
        strided(BFloat16, (B, T, H, D), o_stride, 16),
        fake(BFloat16, slots, H, D, D) if config.save else None,
        state(Float32) if config.final else None,
    )  # fmt: skip
    return Scan(config), arguments
