"""The storer warps: copies of what a consumer warpgroup has staged, out of shared memory.

One warp for each consumer warpgroup.  Consumers say that a chunk is staged by an mbarrier, and learn
from another that its bytes were read: they neither issue copies nor wait for each other.
"""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ...device import tma
from ...device.sync import arrive
from .schedule import ROWS, Bar, Buffers, C, Copies, ReverseCopies, Walk


class _Storer:
    """A chunk at a time; a subclass says which tiles go where."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan
        self.buffers = Buffers(config, plan)

    @cute.jit
    def walk_chunks(self, walk: Walk, base, bars, copies, group):
        """Send what consumers stage for each chunk of the walk."""
        pending = self.buffers.depth - 1  # chunks whose copies may still read
        for it in cutlass.range(walk.chunks, unroll=1):
            self.wait(bars, group, it)
            self.send_chunk(walk, base, copies, group, it)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
            if it >= pending:
                arrive(self.config, self.buffers.bar(bars, Bar.FREE, group, it - pending))
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def wait(self, bars, group, it):
        """Until chunk `it` is staged."""
        staged = self.buffers.bar(bars, Bar.STAGED, group, it)
        cute.arch.mbarrier_wait(staged, self.buffers.parity(it))

    def send(self, name, copy, walk, base, group, it, chunk):
        """A tile staged for chunk `it` of the walk, to the slot of that chunk of the sequence."""
        tile = self.plan[name]
        block = walk.block + group
        at = (0, block) if tile.shape == (C, ROWS) else (block, 0)
        slot = copy.tensor[None, None, walk.h, walk.slot + chunk]
        staged = tile.view(base, self.buffers.index(group, it))
        tma.store(copy, staged, cute.local_tile(slot, tile.shape, at))


class StorerRole(_Storer):
    """Forward: the state on entering a chunk, its U, and o of the chunk before."""

    @cute.jit
    def run(self, walk: Walk, base, bars, copies: Copies, group):
        self.walk_chunks(walk, base, bars, copies, group)
        # A last chunk that isn't full goes out by rows: what follows belongs to another sequence.
        if walk.chunks > 0 and walk.tail == C:
            self.wait(bars, group, walk.chunks)
            self.send_outputs(walk, base, copies.o, group, walk.chunks)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def send_chunk(self, walk: Walk, base, copies: Copies, group, it):
        if const_expr(self.config.save):
            self.send("states", copies.states, walk, base, group, it, it)
            self.send("U", copies.U, walk, base, group, it, it)
        if it > 0:
            self.send_outputs(walk, base, copies.o, group, it)

    def send_outputs(self, walk, base, copy, group, it):
        """o staged for chunk `it`: that of the chunk before."""
        rows = cute.domain_offset(
            (walk.token + C * (it - 1), 0), copy.tensor[None, None, walk.h, walk.batch]
        )
        block = cute.local_tile(rows, (C, ROWS), (0, walk.block + group))
        tma.store(copy, self.plan["o"].view(base, self.buffers.index(group, it)), block)


class ReverseStorerRole(_Storer):
    """Backward: dS of the state leaving a chunk, and its dU."""

    @cute.jit
    def run(self, walk: Walk, base, bars, copies: ReverseCopies, group):
        self.walk_chunks(walk, base, bars, copies, group)

    def send_chunk(self, walk, base, copies, group, it):
        chunk = walk.backward(it)
        self.send("dstates", copies.dstates, walk, base, group, it, chunk)
        self.send("dU", copies.dU, walk, base, group, it, chunk)
