"""What the kernels of both directions share: launch, barriers, the way to a CTA's sequence, and fake
arguments.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from ...device import fakes, records, tma
from ...device.math import clamp
from .schedule import WARPS, Bar, C, D, Extent, Gmem, Registers, Walk, shared_memory

SLOTTED = [2, 3, 1, 0]  # modes of a tensor over slots, head and slot last
BY_TOKEN = [1, 3, 2, 0]  # of a tensor over tokens, head and batch last


class Walker:
    """A CTA walks a (sequence, head): consumer warpgroups, and a producer warp."""

    def __init__(self, config, consumer, producer):
        self.config = config
        self.plan = shared_memory(config)
        self.consumer = consumer(config, self.plan)
        self.producer = producer(config, self.plan)

    # ------------------------------------------------------------ launch
    def load(self, name, tensor, modes=SLOTTED):
        """Copies of a tensor's tiles to shared memory."""
        return tma.make_load(tma.permuted(tensor, modes), self.plan[name])

    def store(self, name, tensor, modes=SLOTTED):
        """Copies out of it."""
        return tma.make_store(tma.permuted(tensor, modes), self.plan[name])

    def launch(self, m: Gmem, copies, by_token, slots, stream):
        """Walk every sequence and head.  by_token: [B, T, H, 128], for its extent."""
        B, T, H = (by_token.shape[i] for i in range(3))
        sequences = m.cu_seqlens.shape[0] - 1 if self.config.varlen else B
        self.kernel(m, copies, Extent(T, H, slots)).launch(
            grid=(self.config.parts * H * sequences, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, m: Gmem, copies, extent: Extent):
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
                walk = self.find_sequence(m.cu_seqlens, extent)
                self.producer.run(m, walk, base, bars, copies)
        else:
            if const_expr(self.config.groups == 2):
                cute.arch.setmaxregister_increase(Registers().consumer)
            walk = self.find_sequence(m.cu_seqlens, extent)
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
    def find_sequence(self, cu_seqlens, extent: Extent):
        """This CTA's walk.  Offsets out of range or out of order never lead outside the tensors."""
        block, _, _ = cute.arch.block_idx()
        T, H, slots = extent
        part, block = block % self.config.parts, block // self.config.parts
        n, h = block // H, block % H
        batch, first, length, slot = n, Int32(0), Int32(T), Int32(0)
        if const_expr(self.config.varlen):
            batch = Int32(0)
            first = clamp(cu_seqlens[n], T)
            length = cutlass.max(clamp(cu_seqlens[n + 1], T) - first, 0)
            slot = cutlass.min(first // C + n, slots)
        else:
            slot = cutlass.min(n * ((length + C - 1) // C), slots)
        chunks = cutlass.min((length + C - 1) // C, slots - slot)
        tail = cutlass.min(length - (chunks - 1) * C, C)
        return Walk(n, h, part * self.config.groups, batch, first, slot, chunks, tail)


# ---------------------------------------------------------------- fake arguments
class Fakes:
    """Fake tensors of one config; B, T, H, N, slots and strides dynamic."""

    def __init__(self, config):
        self.config = config
        self.B, self.T, self.H, self.slots = (cute.sym_int() for _ in range(4))
        self.N = cute.sym_int() if config.varlen else self.B

    def records(self, kind):
        """Of every slot and head."""
        return records.fake(kind, self.slots, self.H)

    def by_token(self):
        """[B, T, H, 128] with any strides that keep 16 bytes aligned."""
        return fakes.strided(BFloat16, self.B, self.T, self.H, D)

    def state(self, dtype):
        """[N, H, 128 (V), 128 (K)] with any strides; dtype None: None."""
        return None if dtype is None else fakes.scattered(dtype, self.N, self.H, D, D)

    def initial(self):
        return self.state({"none": None, "bf16": BFloat16, "f32": Float32}[self.config.initial])

    def final(self):
        return self.state(Float32 if self.config.final else None)

    def cu_seqlens(self):
        return fakes.offsets() if self.config.varlen else None
