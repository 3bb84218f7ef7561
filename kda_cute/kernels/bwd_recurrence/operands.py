"""Operands that key and pair warps read alike: A is 16 tokens by v, B is v by this warp's 32
columns k.
"""

import cutlass.cute as cute

from ...device.matrix_rows import LaneRows, MatrixRows
from ...device.sync import arrive
from ...device.warp_mma import block_a, pairs_along_columns, store_pair
from .schedule import OUTPUT_BYTES, WARPS, Bar, D

N = D // 8 // WARPS  # column tiles of 8 that a warp owns


class Operands:
    """Base of the two roles: the plan, the products, and the shared operands."""

    def __init__(self, config, plan, mma):
        self.config, self.plan, self.mma, self.tf32 = config, plan, mma, mma.tf32
        self.stages = plan["kd"].stages

    def do_operand(self, base, slot, lane):
        """kb -> A operand: rows of tokens, k = v 16 kb .., of do."""
        rows = MatrixRows(self.plan["do"], base, slot.stage, *LaneRows(lane).rows_first())
        return lambda kb: self.mma.a_from_ldmatrix(rows.load(chunk_step=2 * kb))

    def handed_operand(self, name, base, lane):
        """kb -> A operand: rows of tokens, k = v 16 kb .., of U or dvc."""
        if self.tf32:
            view = pairs_along_columns(self.plan[name].view(base), lane)
            return lambda kb: self.mma.exact_a(block_a(view, 0, 2 * kb))
        rows = MatrixRows(self.plan[name], base, 0, *LaneRows(lane).rows_first())
        return lambda kb: self.mma.a_from_ldmatrix(rows.load(chunk_step=2 * kb))

    def state_columns(self, name, base, warp, lane):
        """Rows of v, this warp's columns k, of the states tile or of a bf16 dS tile: B operands
        with k = v.
        """
        row, chunk = LaneRows(lane).rows_first()
        return MatrixRows(self.plan[name], base, 0, row, N * warp + chunk)

    def stage_output(self, name, acc, base, slot, warp, lane):
        """This warp's columns of an output, into the bytes of a tile that is no longer read."""
        view = pairs_along_columns(self.plan[OUTPUT_BYTES[name]].view(base, slot.stage), lane)
        for n in range(N):
            for half in range(2):
                store_pair(view, half, N * warp + n, [acc[(e, half), 0, n] for e in range(2)])

    def arrive_stored(self, bars, slot):
        """This warp's outputs are staged, also for the copy engine."""
        cute.arch.fence_view_async_shared()
        arrive(self.config, bars + Bar.STORED + slot.stage)
