"""Config, arguments, barriers and shared rows of the gradients kernel."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute

from ...device.tma import Tma
from ...factors import CHUNK as C
from ...factors import HEAD_DIM as D
from ...layouts.plan import Plan
from ...layouts.variants import plan
from ..budget import MMA_BF16, Budget, MmaRow, wgmma_bf16

MMA_BF16_K8 = "HMMA.1688.F32.BF16"
BLOCK = 16  # tokens, or channels, of one mma.sync
STEPS = D // BLOCK
WARPS, THREADS = 16, 512
GROUP = 128  # threads of a warpgroup
PAIRS = D // 2  # threads that cover the channels of a token, two each
SPAN = C * PAIRS // THREADS  # consecutive tokens of such a thread
DEEPEST = -160.0  # log2 of a decay that is 0 in fp32, whatever multiplies it
NORM_EPS = 1e-6
AHEAD = 132  # a CTA prefetches for the one that starts so many later
PREFETCHING = 12  # the warp that does


@dataclass(frozen=True)
class Config:
    """g, beta: dtypes "bf16" or "f32"; gate: "log", "safe" or "softplus", see `kda_cute.gates`;
    varlen: packed sequences.  every_thread: see `device.sync.meet`.
    """

    g: str = "f32"
    gate: str = "log"
    beta: str = "f32"
    varlen: bool = False
    layout: str = "default"
    every_thread: bool = False


class Bar(enum.IntEnum):
    """Indices of mbarriers."""

    GATE = 0  # g
    ROWS = 1  # k, q
    INVERSE = 2  # X, INV
    START = 3  # do, S
    END = 4  # dS
    VALUES = 5  # dv
    AGAIN = 6  # g, for the backward


class NamedBar(enum.IntEnum):
    """Named barriers, with those after them: of the two warps that share channels (by warp % 8),
    and of a warpgroup that makes U.
    """

    HALVES = 1  # to 8
    WRITTEN = 9  # and 10


class Row(enum.IntEnum):
    """Rows of the tile `rows`, one fp32 a token."""

    FK = 0  # 1 / norm of k
    FQ = 1  # scale / norm of q
    B = 2  # beta after activation
    NK = 3  # 1 / (sum of squares of k), 0 without the norm
    NQ = 4  # the same of q
    DIAGONAL = 5  # M_ii
    PAIRS = 6  # M_ij of i = j + 1 odd, at (i - 1) / 2, and L_ij, at 32 + (i - 1) / 2
    DBETA = 7  # sum_v dv U
    DA = 8  # warps' parts of dA_log
    SLOPE = 9  # of B by the raw beta, over B
    BK = 10  # B / norm of k


class Sum(enum.IntEnum):
    """Rows of the tile `sums`, one fp32 a channel, each of one half of the tokens."""

    LOWER = 0  # what the upper half's tokens add to dg of the lower half; then the reverse
    DDT = 2  # and 3: parts of ddt_bias


class Gmem(NamedTuple):
    """Global tensors: the caller's, and parts of records."""

    q: cute.Tensor  # [B, T, H, 128] bf16
    k: cute.Tensor
    do: cute.Tensor
    g: cute.Tensor  # [B, T, H, 128] bf16 or f32
    beta: cute.Tensor  # [B, T, H] bf16 or f32
    A_log: cute.Tensor  # [H] f32, or None
    dt_bias: cute.Tensor  # [H, 128] f32, or None
    cu_seqlens: cute.Tensor  # [N + 1] int32, or None
    dv: cute.Tensor  # [B, T, H, 128] bf16
    S: cute.Tensor  # [slots, H, 128 (V), 128 (K)] bf16, on entering the chunk
    dS: cute.Tensor  # the same, of the state on leaving it
    X: cute.Tensor  # [slots, H, 64, 128] bf16
    INV: cute.Tensor  # [slots, H, 64, 64] bf16
    dq: cute.Tensor  # [B, T, H, 128] bf16
    dk: cute.Tensor
    dg: cute.Tensor  # [B, T, H, 128], as g
    dbeta: cute.Tensor  # [B, T, H], as beta
    dA_part: cute.Tensor  # [slots, H] f32, or None
    ddt_part: cute.Tensor  # [slots, H, 128] f32, or None


class Copies(NamedTuple):
    """Tensor copies into the tiles of these names."""

    g: Tma
    k: Tma
    q: Tma
    do: Tma
    dv: Tma
    S: Tma
    dS: Tma
    X: Tma
    INV: Tma


class Stores(NamedTuple):
    """Tensor copies out, by the tensor at their other end."""

    dq: Tma  # from the tile q
    dk: Tma  # from k
    dg: Tma  # from raw


class Grid(NamedTuple):
    """What the host knows of the grid: a CTA is (slot, head), heads first.

    heads: divisor; chunks: of a dense sequence, divisor.
    """

    heads: cute.FastDivmodDivisor
    chunks: cute.FastDivmodDivisor


def shared_memory(config: Config) -> Plan:
    """The kernel's plan."""
    return plan("gradients", config.layout, "bf16", g=config.g)


def mma_account(config: Config) -> list[MmaRow]:
    """Where the tensor-core instructions of a chunk are: every one is in the code once."""
    blocks = 2  # of 16 tokens, of a warp
    products = [
        ("do S^T", wgmma_bf16(32), 4, D // 16),
        ("U dS^T", wgmma_bf16(32), 4, D // 16),
        ("dv S^T", wgmma_bf16(32), 4, D // 16),
        ("U = INV X", wgmma_bf16(64), 2, C // 16),
        ("dM", wgmma_bf16(16), 4, D // 16),
        ("dL", wgmma_bf16(16), 4, D // 16),
        ("sum_v dS S", MMA_BF16, WARPS, C // BLOCK * 2),
        # two blocks by two, two column tiles: a and y, or two operands of y
        ("level 32, right", MMA_BF16, WARPS // 2, blocks * 2 * 2 * 2),
        ("level 32, left", MMA_BF16, WARPS // 2, blocks * 2 * 2 * 2),
        ("level 16", MMA_BF16, WARPS, 2 * 2 * 2),
        ("level 8, right", MMA_BF16, WARPS, blocks),
        ("level 8, left: a, y", MMA_BF16_K8, WARPS, blocks * 2),
        ("levels 4, 2: y", MMA_BF16, WARPS, 2 * blocks * 2),
        ("levels 4, 2: a", MMA_BF16_K8, WARPS, 2 * blocks * 2),
    ]
    return [MmaRow(*product) for product in products]


def budget(config: Config) -> Budget:
    """What the compiled kernel has to keep.

    In products of 16 x 8 x 16, for 8 blocks of channels: dS^T S on the diagonal, 2 of 128 deep; of
    pairs, three products of the 6 blocks below the diagonal, 2 each, of which M's serve rows and
    columns and so are 4 products; on the diagonal level 8 takes one and two halves, levels 4 and 2
    for each 8 tokens one and a half.  FFMA are left for norms, gates, and sums of products.
    """
    channels, blocks = D // BLOCK, C // BLOCK
    return Budget(
        threads=THREADS,
        ctas=1,
        plan=shared_memory(config),
        mma=mma_account(config),
        implied={
            MMA_BF16: channels * (2 * STEPS + 6 * 4 * 2 + blocks * (1 + 2 * 2)),
            MMA_BF16_K8: channels * blocks * (2 + 2 * 2),
            wgmma_bf16(32): 3 * 2 * 2 * D // 16,
            wgmma_bf16(64): 2 * C // 16,
            wgmma_bf16(16): 2 * 4 * D // 16,
        },
        ffma=640,
    )
