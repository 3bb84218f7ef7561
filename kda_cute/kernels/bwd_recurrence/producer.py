"""The producer warp (copies of the next chunk's tiles, the sigmoid of its beta) and the store warp
(copies of outputs).
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...device import tma
from ...device.math import sigmoid
from ...device.sync import arrive
from ...device.tma import Tma
from .schedule import OUTPUT_BYTES, Bar, C, D, Gmem, Walk


class ProducerRole:
    """Code of the producer warp."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan
        self.stages = plan["kd"].stages

    @cute.jit
    def run(self, m: Gmem, walk: Walk, base, bars, tma_do: Tma, tma_v: Tma, tma_s: Tma):
        """Copy the tiles of each chunk to shared memory, and the sigmoid of its beta."""
        for it in cutlass.range(walk.tiles, unroll=1):
            t = walk.tiles - 1 - it
            s = it % self.stages
            cute.arch.mbarrier_wait(bars + Bar.EMPTY + s, (it // self.stages & 1) ^ 1)
            self.copy_chunk(m, walk, base, bars + Bar.FULL + s, s, t, tma_do, tma_v)
            self.write_beta(m, walk, base, s, t)
            arrive(self.config, bars + Bar.FULL + s)
            cute.arch.mbarrier_wait(bars + Bar.STATES_EMPTY, (it & 1) ^ 1)
            self.copy_states(walk, base, bars + Bar.STATES_FULL, t, tma_s)

    def copy_chunk(self, m, walk, base, full, s, t, tma_do, tma_v):
        """Issue the copies of one chunk's stage; they complete on `full`."""
        p, h = self.plan, walk.h
        tile, token = Int64(walk.tile + t), walk.token + t * C
        f32_row = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        bf16_row = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BFloat16)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                full, 4 * C * D * 4 + 2 * C * D * 2 + 2 * C * C * 2 + D * 4
            )
        copy_tokens(tma_do, p["do"].view(base, s), token, h, full)
        copy_tokens(tma_v, p["v"].view(base, s), token, h, full)
        with cute.arch.elect_one():
            for src, name in ((m.kr, "kr"), (m.kd, "kd"), (m.qd, "qd"), (m.ki, "ki")):
                dst = p[name].view(base, s)
                for row in range(C):
                    cute.copy(f32_row, src[h, tile, row, None], dst[row, None], mbar_ptr=full)
            for src, name in ((m.inv, "inv"), (m.mqk, "mqk")):
                flat = cute.make_layout(C * C)
                row = cute.make_tensor(src[h, tile, None, None].iterator, flat)
                cute.copy(
                    bf16_row,
                    row,
                    cute.make_tensor(p[name].view(base, s).iterator, flat),
                    mbar_ptr=full,
                )
            cute.copy(
                f32_row,
                m.g_total[h, tile, None],
                p["g_total"].view(base, s)[0, None],
                mbar_ptr=full,
            )

    @cute.jit
    def write_beta(self, m: Gmem, walk: Walk, base, s: Int32, t: Int32):
        """b = sigmoid(beta) of the chunk's tokens; 0 past the sequence's end."""
        lane = cute.arch.lane_idx()
        line = self.plan["beta"].view(base, s)
        if lane < C:
            b = Float32(0)
            if t * C + lane < (walk.tiles - 1) * C + walk.tail:
                b = sigmoid(Float32(m.beta[walk.token + t * C + lane, walk.h]))
            line[0, lane] = b

    def copy_states(self, walk, base, full, t, tma_s):
        """Issue the copy of one chunk's state."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, D * D * 2)
        tile = cute.local_tile(tma_s.tensor[None, None, walk.tile + t, walk.h], (D, D), (0, 0))
        tma.load(tma_s, tile, self.plan["states"].view(base), full)


class StoreRole:
    """Code of the store warp: outputs from the tiles' bytes to global memory, then the stage is
    empty.
    """

    def __init__(self, plan):
        self.plan, self.stages = plan, plan["kd"].stages

    @cute.jit
    def run(self, m: Gmem, walk: Walk, base, bars):
        for it in cutlass.range(walk.tiles, unroll=1):
            s = it % self.stages
            cute.arch.mbarrier_wait(bars + Bar.STORED + s, (it // self.stages) & 1)
            tile = Int64(walk.tile + walk.tiles - 1 - it)
            with cute.arch.elect_one():
                for row in cutlass.range(C, unroll=4):
                    self.copy_row(m, base, s, walk.h, tile, row)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(bars + Bar.EMPTY + s)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)

    def copy_row(self, m, base, s, h, tile, row):
        atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), Float32)
        for name, held_by in OUTPUT_BYTES.items():
            out = getattr(m, name)
            cute.copy(atom, self.plan[held_by].view(base, s)[row, None], out[h, tile, row, None])


def copy_tokens(copy, tile, token, h, bar):
    """16 rows from `token` on, of head h, to a tile."""
    rows = cute.domain_offset((token, 0), copy.tensor[None, None, h])
    tma.load(copy, cute.local_tile(rows, (C, D), (0, 0)), tile, bar)
