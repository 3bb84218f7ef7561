"""Who does what, and what they wait for: config, warp roles, barriers, and the arguments that
travel between roles.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ...layouts.plan import Plan
from ...layouts.variants import plan
from ..budget import MMA_BF16, MMA_TF32, Budget, MmaRow, Role

C, D = 16, 128  # tokens of a chunk; K = V
K_BLOCKS = D // 16  # steps of 16 along K or V
WARPS = 4  # in each role that computes: a warpgroup, so that it has its own register budget
KEY, PAIR = 4, 8  # first warps of those roles; value warps come before
CONSUMER_WARPS, PRODUCER_WARP, STORE_WARP = 12, 12, 13
THREADS = 512  # warps 14 and 15 only complete a warpgroup
DM_WARP, DL_WARP, GRAM_WARP = 0, 1, 2  # pair warps with a small matrix to make


@dataclass(frozen=True)
class Config:
    """precision "tf32" or "bf16"; layout: a plan's name; beta "bf16" or "f32"; state_grad those or
    "none".

    unroll: of loops over K_BLOCKS whose accumulators stay; longer code misses the instruction cache
    more often.
    every_lane: see `device.sync.arrive`.
    """

    precision: str = "tf32"
    layout: str = "default"
    beta: str = "bf16"
    state_grad: str = "none"
    varlen: bool = False
    unroll: int = 2
    every_lane: bool = False


class Registers(NamedTuple):
    """Registers per thread of each role's warpgroup; together what four warpgroups of 128 start
    with.
    """

    value: int = 248
    key: int = 112
    pair: int = 112
    copy: int = 40


class Bar(enum.IntEnum):
    """Indices of mbarriers; the first four have one for each stage, up to three."""

    FULL = 0  # producer -> value, key, pair: the tiles of a chunk
    UPDATED = 3  # value -> key, pair: the tiles were read, their bytes may take the outputs
    STORED = 6  # key, pair -> store: the outputs are in the tiles' bytes
    EMPTY = 9  # store -> producer
    STATES_FULL = 12  # producer -> value, key, pair: the state on entering the chunk
    STATES_EMPTY = 13
    DVC_FULL = 14  # value -> key, pair: dS, dvc, dv
    U_FULL = 15  # value -> pair: U, parts of dbeta
    HAND_EMPTY = 16  # key, pair -> value, for both
    # One for even and one for odd chunks: a warp may reach its wait after others went on to the next chunk.
    SMALL_FULL = 17  # pair -> key, pair: dM, dL; and kd, ki are no longer needed whole
    KEY_DONE = 19  # key -> pair: ki was read, rowsum_v(dS S) is there


# Outputs leave through the bytes of tiles that only their own role still reads; ki alone is read by both.
OUTPUT_BYTES = {"dkd": "kd", "dki": "qd", "dkr": "kr", "dqd": "ki"}
TAIL_BARRIER = 1  # named barrier of all consumer warps


class Gmem(NamedTuple):
    """Global tensors, in the order of the compiled function's arguments."""

    do: cute.Tensor  # [T, H, 128] bf16
    v: cute.Tensor  # [T, H, 128] bf16
    beta: cute.Tensor  # [T, H]
    kd: cute.Tensor  # [H, tiles, 16, 128] f32
    qd: cute.Tensor
    kr: cute.Tensor
    ki: cute.Tensor
    g_total: cute.Tensor  # [H, tiles, 128] f32
    inv: cute.Tensor  # [H, tiles, 16, 16] bf16
    mqk: cute.Tensor
    states: cute.Tensor  # [H, tiles, 128 (V), 128 (K)] bf16
    dfinal: cute.Tensor  # [N, H, 128 (V), 128 (K)], or None
    cu_seqlens: cute.Tensor  # [N + 1] int32, or None
    dkd: cute.Tensor  # [H, tiles, 16, 128] f32
    dqd: cute.Tensor
    dki: cute.Tensor
    dkr: cute.Tensor
    dgT: cute.Tensor  # [H, tiles, 128] f32
    dv: cute.Tensor  # [T, H, 128] bf16
    dbeta: cute.Tensor  # [H, tiles, 16] f32
    dinitial: cute.Tensor  # [N, H, 128 (V), 128 (K)]


def shared_memory(config: Config) -> Plan:
    """The kernel's plan."""
    return plan("bwd_recurrence", config.layout, config.precision)


def mma_account(config: Config) -> list[MmaRow]:
    """Where the tensor-core instructions of a chunk are.

    A step of 16 along the contraction is one m16n8k16 in bf16, two m16n8k8 in tf32. Products with
    kd, qd and ki over tokens take their right operand in two bf16 parts: `finish` multiplies what
    they give by the unrounded tiles, and pairs (i, j) have to cancel in dg.
    """
    loops = K_BLOCKS // config.unroll
    steps = [
        ("do^T Mqk", WARPS, 4, 1),
        ("dS^T kr^T", WARPS, 4 * K_BLOCKS, 1),
        ("dU^T INV", WARPS, 4, 1),
        ("S^T kd^T", WARPS, 4 * config.unroll, loops),
        ("vc^T INV^T", WARPS, 4, 1),
        ("do^T qd, (b dvc)^T kd", WARPS, 2 * 4 * K_BLOCKS, 1),
        ("dvc S^T", WARPS, 4 * config.unroll, loops),
        ("do S^T", WARPS, 4 * config.unroll, loops),
        ("do U^T", 1, 2 * config.unroll, loops),
        ("dvc U^T", 1, 2 * config.unroll, loops),
        ("kd ki^T", 1, 2 * config.unroll, loops),
        ("U dS^T", WARPS, 4 * config.unroll, loops),
    ]
    opcode, each = (MMA_TF32, 2) if config.precision == "tf32" else (MMA_BF16, 1)
    rows = [(product, warps, static * each, trips) for product, warps, static, trips in steps]
    rows += [("dL ki, dM^T qd, (b dL)^T kd", WARPS, 2 * 3 * 4, 1), ("dM ki", WARPS, 2 * 4, 1)]
    return [MmaRow(product, opcode, *counts) for product, *counts in rows]


def budget(config: Config) -> Budget:
    """What the compiled kernel has to keep.

    The mathematics takes, in steps of m16n8k16, seven products of the size [16,128] x [128,128],
    seven of [16,16] x [16,128] and three of [16,128] x [128,16].  FFMA are left for scaling, the
    diagonal of dM and a few sums; one product moved off the tensor cores would add a thousand.
    """
    steps = 7 * 128 + 7 * 16 + 3 * 16
    tf32 = config.precision == "tf32"
    implied = {MMA_TF32: 2 * steps} if tf32 else {MMA_BF16: steps + 4 * 16}  # hi + lo of four
    return Budget(
        threads=THREADS,
        ctas=1,
        plan=shared_memory(config),
        mma=mma_account(config),
        implied=implied,
        ffma=256,
        roles=tuple(Role(registers) for registers in Registers()),
    )


class Walk(NamedTuple):
    """Where a CTA works: sequence, head, first token, first tile, tiles, valid rows of the last
    tile.
    """

    n: Int32
    h: Int32
    token: Int32
    tile: Int32
    tiles: Int32
    tail: Int32


class Slot(NamedTuple):
    """Buffers of a chunk and the parities of their barriers: the stage of its tiles, the half of
    the small tiles.
    """

    stage: Int32
    turn: Int32
    small: Int32
    lap: Int32
