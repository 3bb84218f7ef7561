"""Config, arguments and barriers of the transition kernel."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute

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
PAIR = 64  # of two warps
LEVELS = ((1, 32), (16, 8), (4, 2))  # of the dyadic scheme, as they are multiplied
NORM_EPS = 1e-6
CTAS = 2  # that share an SM
STORING = 5  # the warp that copies kd and qd out: inverts little, and has no corner
AHEAD = 132  # a CTA prefetches for one that starts at least so many later
L2_LINE = 128  # bytes of a prefetch


@dataclass(frozen=True)
class Config:
    """g, beta: dtypes "bf16" or "f32"; gate: "log", "safe" or "softplus", see `kda_cute.gates`;
    varlen: packed sequences; backward: INV goes out too, and no given |b| is below `factors.LEAST_B`.

    every_thread: see `device.sync.meet`.
    """

    g: str = "f32"
    gate: str = "log"
    beta: str = "f32"
    varlen: bool = False
    layout: str = "default"
    backward: bool = False
    every_thread: bool = False

    @property
    def record(self) -> str:
        """The kind of record that it writes, see `kda_cute.factors`."""
        return "backward factors" if self.backward else "factors"


class Bar(enum.IntEnum):
    """Indices of mbarriers."""

    QK = 0


class NamedBar(enum.IntEnum):
    """Named barriers: of a warpgroup; of the two warps that invert a half; R of both halves is there;
    kd and qd are.
    """

    GROUP = 1  # and 2
    PAIR = 3  # and 4
    HALVES = 5
    TILES = 6


class Factor(enum.IntEnum):
    """Rows of the tile `factors`: 1 / norm of k; scale / norm of q; b; b times the first."""

    K = 0
    Q = 1
    B = 2
    BK = 3


class Gmem(NamedTuple):
    """Global tensors: the caller's, and parts of records."""

    q: cute.Tensor  # [B, T, H, 128] bf16
    k: cute.Tensor
    g: cute.Tensor  # [B, T, H, 128] bf16 or f32
    beta: cute.Tensor  # [B, T, H]
    A_log: cute.Tensor  # [H] f32, or None
    dt_bias: cute.Tensor  # [H, 128] f32, or None
    cu_seqlens: cute.Tensor  # [N + 1] int32, or None
    kd: cute.Tensor  # [slots, H, 64, 128] bf16
    z: cute.Tensor
    qd: cute.Tensor
    p: cute.Tensor  # [slots, H, 64, 64] bf16
    qk: cute.Tensor  # [slots, H, 64] f32
    eg: cute.Tensor  # [slots, H, 128] f32
    INV: cute.Tensor = None  # as p; backward only


def shared_memory(config: Config) -> Plan:
    """The kernel's plan."""
    return plan("transition", config.layout, "bf16")


# The corner of R: warps that run each product of -R21 = sum_b (sum_a R_ia L_ab) R_bj.
CORNER = {"R L_20": 2, "R L_30": 1, "(R L) R_0": 2, "R L_21": 4, "R L_31": 2, "(R L) R_1": 4}


def mma_account(config: Config) -> list[MmaRow]:
    """Where the tensor-core instructions of a chunk are.

    A product of 16 x 16 matrices is four m16n8k8; of two pairs of 8 x 8 matrices it takes two.  The
    inverse of a block of 16 has four of the latter in each of two doublings, less the two that only
    R22^T would need, and two instructions below the diagonal.
    """
    square = 4
    products = [
        ("norms", MMA_BF16, WARPS, 2 * STEPS),
        *((f"levels {a} and {b}", wgmma_bf16(BLOCK + max(b, BLOCK)), 2, STEPS) for a, b in LEVELS),
        ("R, R^T of a block", MMA_TF32, 4, 2 * 4 * 2 - 2 + 2),
        ("R of two blocks", MMA_TF32, 2, 2 * square),
        *(
            (f"R of four blocks, {product}", MMA_TF32, warps, square)
            for product, warps in CORNER.items()
        ),
        ("z = INV^T kr, high and low", wgmma_bf16(D // 2), 2, 2 * C // 16),
        ("p = mqk INV, twice", wgmma_bf16(C), 2, C // 16),
    ]
    return [MmaRow(*product) for product in products]


def budget(config: Config) -> Budget:
    """What the compiled kernel has to keep.

    Two levels of a half are a product [64, 128] [128, 32], or 48 with level 32; rows of k and q meet
    themselves and each other in blocks of 8.  In instructions, the inverse takes 16 in each block
    of 16, 8 below it in pairs of blocks, and 4 in each of the 6 + 4 + 3 + 2 products of the corner of
    four.  FFMA are left for gates.
    """
    return Budget(
        threads=THREADS,
        ctas=CTAS,
        plan=shared_memory(config),
        mma=mma_account(config),
        implied={
            MMA_BF16: 2 * (C // 8) * STEPS,
            MMA_TF32: 4 * 16 + 2 * 8 + 4 * (6 + 4 + 3 + 2),
            wgmma_bf16(32): 2 * 2 * STEPS,
            wgmma_bf16(48): 2 * STEPS,
            wgmma_bf16(D // 2): 2 * (2 + 1) * C // 16,
        },
        ffma=256,
    )
