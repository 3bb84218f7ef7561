"""Warpgroup products (wgmma), bf16 operands and fp32 accumulators.

Thread l of warp w of a warpgroup owns, of a [64, N] accumulator, rows 16w + l//4 + 8 half and columns
8n + 2(l%4) + i, at linear index i + 2 half + 4n.  An accumulator rounded to bf16 is an A operand as
it stands.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

MAJOR = {"K": OperandMajorMode.K, "MN": OperandMajorMode.MN}


def tiled_mma(a: str, b: str, n: int, *, a_in_registers: bool = False, groups=(1, 1)):
    """D[64 m, n'] = A B; a, b: "K" or "MN", the contiguous mode of each operand; n: columns of one
    instruction; groups: warpgroups along M and N.
    """
    source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
    return hopper.make_trivial_tiled_mma(
        BFloat16, BFloat16, MAJOR[a], MAJOR[b], Float32, (*groups, 1), (64, n), a_source=source
    )


def accumulator(tiled, m: int, n: int):
    """fp32 registers of a [m, n] product."""
    return cute.make_rmem_tensor(tiled.partition_shape_C((m, n)), Float32)


def operand_a(tiled, tid, tile):
    """Descriptors of a shared-memory tile [M, K(, stages)] as A; tid counts from the first thread
    of the tiled MMA's warpgroups.
    """
    group = cute.arch.make_warp_uniform(tid // 128) * 128
    return tiled.make_fragment_A(tiled.get_slice(group).partition_A(tile))


def operand_b(tiled, tid, tile):
    """Descriptors of a shared-memory tile [N, K(, stages)] as B."""
    group = cute.arch.make_warp_uniform(tid // 128) * 128
    return tiled.make_fragment_B(tiled.get_slice(group).partition_B(tile))


@cute.jit
def gemm(
    tiled: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: cutlass.Constexpr = False,
):
    """Issue acc (+)= A B over all of K as one commit group; `warpgroup.wait_group` ends it."""
    atom = cute.make_mma_atom(tiled.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def rounded(acc):
    """An accumulator's values in bf16."""
    values = cute.make_rmem_tensor(acc.shape, BFloat16)
    values.store(acc.load().to(BFloat16))
    return values


def rounded_a(tiled, acc, m: int, k: int):
    """A [m, k] accumulator, rounded to bf16, as the register operand A of `tiled`."""
    a = cute.make_rmem_tensor(tiled.partition_shape_A((m, k)), BFloat16)
    cute.make_tensor(a.iterator, acc.layout).store(acc.load().to(BFloat16))
    return a


def _matrix_copy(op, tiled, tid):
    return cute.make_tiled_copy_C(cute.make_copy_atom(op, BFloat16), tiled).get_slice(tid)


def store_matrix(tiled, tid, values, tile, *, transposed: bool = False):
    """stmatrix: bf16 registers in the accumulator's order to a shared-memory tile [M, N], or [N, M]
    when `transposed`.
    """
    if const_expr(transposed):
        tile = cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0]))
    copy = _matrix_copy(warp.StMatrix8x8x16bOp(transposed, 4), tiled, tid)
    cute.copy(copy, copy.retile(values), copy.partition_D(tile))


def load_matrix(tiled, tid, values, tile, *, transposed: bool = False):
    """ldmatrix: the reverse of `store_matrix`."""
    if const_expr(transposed):
        tile = cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0]))
    copy = _matrix_copy(warp.LdMatrix8x8x16bOp(transposed, 4), tiled, tid)
    cute.copy(copy, copy.partition_S(tile), copy.retile(values))
