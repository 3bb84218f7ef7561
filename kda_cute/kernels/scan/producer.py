"""The producer warp: copies of the next chunks' tiles to shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.nvgpu import cpasync

from ...device import tma
from .schedule import Bar, Copies, Gmem, Walk


class ProducerRole:
    """Code of the producer warp."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan
        self.stages = plan["w"].stages
        loaded = (*("w", "kr", "qd", "mqk", "qk", "eg"), *("u",) * config.groups)
        self.bytes = sum(plan[name].copy_bytes for name in loaded)

    @cute.jit
    def run(self, m: Gmem, walk: Walk, base, bars, copies: Copies):
        empty, full = bars + Bar.EMPTY * self.stages, bars + Bar.FULL * self.stages
        for it in cutlass.range(walk.chunks, unroll=1):
            s = it % self.stages
            cute.arch.mbarrier_wait(empty + s, (it // self.stages & 1) ^ 1)
            self.copy_chunk(m, walk, base, full + s, s, walk.slot + walk.chunk(it), copies)

    def copy_chunk(self, m, walk, base, full, s, slot, copies):
        """Issue the copies of one chunk's stage; they complete on `full`.  What the first products
        read comes first.
        """
        p, h = self.plan, walk.h
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes)
        for name in ("w", "qd"):
            self.copy_tile(getattr(copies, name), p[name].view(base, s), h, slot, full)
        for g in range(self.config.groups):
            tile = p["u"].view(base, s * self.config.groups + g)
            self.copy_tile(copies.u, tile, h, slot, full, walk.block + g)
        with cute.arch.elect_one():
            row = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
            for name, line in (("eg", m.eg), ("qk", m.qk)):
                source = line[Int64(slot), h, None]
                cute.copy(row, source, p[name].view(base, s)[0, None], mbar_ptr=full)
        for name in ("kr", "mqk"):
            self.copy_tile(getattr(copies, name), p[name].view(base, s), h, slot, full)

    def copy_tile(self, copy, tile, h, slot, full, block=0):
        """One tile of a head's slot; block: which 64 columns, of a tile that has only those."""
        shape = tuple(cute.size(tile, mode=[i]) for i in range(2))
        rows = cute.local_tile(copy.tensor[None, None, h, slot], shape, (0, block))
        tma.load(copy, rows, tile, full)
