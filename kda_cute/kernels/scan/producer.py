"""The producer warp: copies of the next chunks' tiles to shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.nvgpu import cpasync

from ...device import tma
from .schedule import Bar, C, Gmem, Walk

WHOLE = ("kd", "z", "qd", "p", "qk", "eg")  # tiles of a stage that all warpgroups share


class _Producer:
    """A stage at a time; a subclass says which chunk and in which order.  columns: the tile that is
    cut along V.
    """

    columns: str

    def __init__(self, config, plan):
        self.config, self.plan = config, plan
        self.stages = plan["kd"].stages
        loaded = (*WHOLE, *(self.columns,) * config.groups)
        self.bytes = sum(plan[name].copy_bytes for name in loaded)

    @cute.jit
    def run(self, m: Gmem, walk: Walk, base, bars, copies):
        empty, full = bars + Bar.EMPTY * self.stages, bars + Bar.FULL * self.stages
        for it in cutlass.range(walk.chunks, unroll=1):
            s = it % self.stages
            cute.arch.mbarrier_wait(empty + s, (it // self.stages & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + s, self.bytes)
            self.copy_chunk(m, walk, base, full + s, s, it, copies)

    def copy_tiles(self, names, walk, base, full, s, chunk, copies):
        """Tiles that all warpgroups read."""
        for name in names:
            copy, tile = getattr(copies, name), self.plan[name].view(base, s)
            self.copy_block(copy.tensor[None, None, walk.h, walk.slot + chunk], copy, tile, full)

    def copy_columns(self, copy, walk, base, full, s, chunk):
        """Each warpgroup's 64 columns v of 64 tokens; those past the sequence's end come along."""
        rows = cute.domain_offset(
            (walk.token + C * chunk, 0), copy.tensor[None, None, walk.h, walk.batch]
        )
        for g in range(self.config.groups):
            tile = self.plan[self.columns].view(base, s * self.config.groups + g)
            self.copy_block(rows, copy, tile, full, walk.block + g)

    def copy_block(self, rows, copy, tile, full, block=0):
        shape = tuple(cute.size(tile, mode=[i]) for i in range(2))
        tma.load(copy, cute.local_tile(rows, shape, (0, block)), tile, full)

    def copy_lines(self, m, walk, base, full, s, chunk):
        """eg and qk."""
        with cute.arch.elect_one():
            row = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
            for name, line in (("eg", m.eg), ("qk", m.qk)):
                source = line[Int64(walk.slot + chunk), walk.h, None]
                cute.copy(row, source, self.plan[name].view(base, s)[0, None], mbar_ptr=full)


class ProducerRole(_Producer):
    """Forward."""

    columns = "v"

    def copy_chunk(self, m, walk, base, full, s, it, copies):
        """Issue the copies of one chunk's stage; they complete on `full`.  What the first products
        read comes first.
        """
        where = walk, base, full, s, it
        self.copy_tiles(("kd", "qd"), *where, copies)
        self.copy_columns(copies.v, *where)
        self.copy_lines(m, *where)
        self.copy_tiles(("z", "p"), *where, copies)


class ReverseProducerRole(_Producer):
    """Backward."""

    columns = "do"

    def copy_chunk(self, m, walk, base, full, s, it, copies):
        """Likewise."""
        where = walk, base, full, s, walk.backward(it)
        self.copy_columns(copies.do, *where)
        self.copy_tiles(("p", "z"), *where, copies)
        self.copy_lines(m, *where)
        self.copy_tiles(("qd", "kd"), *where, copies)
