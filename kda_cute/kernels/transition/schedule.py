"""Config, arguments and barriers of the transition kernel."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...factors import CHUNK as C
from ...factors import HEAD_DIM as D
from ...layouts.plan import Plan
from ...layouts.variants import plan
from ..budget import MMA_BF16, MMA_TF32, Budget, MmaRow, wgmma_bf16

BLOCK = 16  # tokens of a diagonal block: rows of one mma.sync
STEPS = D // 16  # k steps of mma.sync
BLOCKS = C // BLOCK
WARPS, THREADS = 8, 256
GROUP = 128  # threads of a warpgroup
LEVELS = (32, 16, 8, 4, 2, 1)  # of the dyadic scheme
LOG2E = 1.4426950408889634
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Config:
    """g, beta: dtypes "bf16" or "f32"; gate: "log", "safe" or "softplus", see `kda_cute.gates`;
    varlen: packed sequences.
    """

    g: str = "f32"
    gate: str = "log"
    beta: str = "f32"
    varlen: bool = False
    layout: str = "default"


class Bar(enum.IntEnum):
    """Indices of mbarriers."""

    QK = 0
    V = 1


class NamedBar(enum.IntEnum):
    """Named barriers: of the warps that invert, of the two products."""

    INVERT = 1
    PRODUCT = 2  # and 3


class Factor(enum.IntEnum):
    """Rows of the tile `factors`: 1 / norm of k; scale / norm of q; b; b times the first."""

    K = 0
    Q = 1
    B = 2
    BK = 3


class Gmem(NamedTuple):
    """Global tensors, in the order of the compiled function's arguments."""

    q: cute.Tensor  # [B, T, H, 128] bf16
    k: cute.Tensor
    v: cute.Tensor
    g: cute.Tensor  # [B, T, H, 128] bf16 or f32
    beta: cute.Tensor  # [B, T, H]
    A_log: cute.Tensor  # [H] f32, or None
    dt_bias: cute.Tensor  # [H, 128] f32, or None
    cu_seqlens: cute.Tensor  # [N + 1] int32, or None
    w: cute.Tensor  # [slots, H, 64, 128] bf16
    kr: cute.Tensor
    qd: cute.Tensor
    u: cute.Tensor
    mqk: cute.Tensor  # [slots, H, 64, 64] bf16
    qk: cute.Tensor  # [slots, H, 64] f32
    eg: cute.Tensor  # [slots, H, 128] f32


class Options(NamedTuple):
    """Scalars known at the call."""

    scale: Float32
    lower_bound: Float32
    beta_scale: Float32
    l2norm: Int32
    beta_sigmoid: Int32


class Chunk(NamedTuple):
    """Where a CTA works: batch row, first token, tokens (0: nothing to do), slot, head."""

    b: Int32
    token: Int32
    rows: Int32
    slot: Int32
    h: Int32


def shared_memory(config: Config) -> Plan:
    """The kernel's plan."""
    return plan("transition", config.layout, "bf16")


def mma_account(config: Config) -> list[MmaRow]:
    """Where the tensor-core instructions of a chunk are.

    A product of 16 x 16 matrices is four m16n8k8; of two pairs of 8 x 8 matrices it takes two.  The
    inverse of a block of 16 has four of the latter in each of two doublings, less the two that only
    X22^T would need, and two instructions below the diagonal.
    """
    square = 4
    products = [
        ("norms", MMA_BF16, WARPS, 2 * STEPS),
        *((f"level {s}", wgmma_bf16(C // 2), 1, STEPS) for s in LEVELS),
        ("X, X^T of a block", MMA_TF32, 4, 2 * 4 * 2 - 2 + 2),
        ("X of two blocks", MMA_TF32, 2, 2 * square),
        ("X of four blocks", MMA_TF32, 4, (2 * 2 + 2) * square),
        ("w = A kd", wgmma_bf16(D), 1, C // 16),
        ("u = A v", wgmma_bf16(D), 1, C // 16),
    ]
    return [MmaRow(*product) for product in products]


def budget(config: Config) -> Budget:
    """What the compiled kernel has to keep.

    A level is a product [64, 128] [128, 32]; rows of k and q meet themselves and each other in
    blocks of 8.  In instructions, the inverse takes 16 in each block of 16, 8 below it in pairs of
    blocks, and 4 x 6 in the corner of four.  FFMA are left for gates.
    """
    return Budget(
        threads=THREADS,
        ctas=2,
        plan=shared_memory(config),
        mma=mma_account(config),
        implied={
            MMA_BF16: 2 * (C // 8) * STEPS,
            MMA_TF32: 4 * 16 + 2 * 8 + 4 * 4 * 6,
            wgmma_bf16(C // 2): len(LEVELS) * STEPS,
            wgmma_bf16(D): 2 * C // 16,
        },
        ffma=256,
    )
