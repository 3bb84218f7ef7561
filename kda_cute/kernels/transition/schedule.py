"""Config, arguments and barriers of the transition kernel."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...factors import CHUNK as C
from ...factors import HEAD_DIM as D

BLOCK = 16  # tokens of a diagonal block: rows of one mma.sync
STEPS = D // 16  # k steps of mma.sync
WARPS, THREADS = 8, 256
GROUP = 128  # threads of a warpgroup
LEVELS = 4  # of the dyadic scheme inside a block: 8, 4, 2, 1
LOG2E = 1.4426950408889634
DEEPEST = -160.0  # log2 of a decay that is 0 in fp32, whatever multiplies it
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
    """Named barriers: of the warps that invert, of those that make tiles, of the two products."""

    INVERT = 1
    TILES = 2
    PRODUCT = 3  # and 4


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


def mma_account(config: Config) -> dict[str, int]:
    """Tensor-core instructions of a chunk over all warps, by kind."""
    pairs = LEVELS * (C // BLOCK) * STEPS + 6 * 4 * STEPS
    inverse = 4 * 3 * 4 * 8 + 2 * 2 * 8 + 4 * 6 * 8
    return {"m16n8k16": pairs, "m16n8k8": inverse, "m64n128k16": 2 * C // 16}
