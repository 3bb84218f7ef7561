"""Who does what, and what they wait for: config, warp roles, barriers, and the arguments that
travel between roles.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ...device.tma import Tma

C, D = 64, 128  # tokens of a chunk; K = V
ROWS = 64  # columns v of a consumer warpgroup: rows of S^T
WARPS = 4  # of a warpgroup
GROUP = 128  # threads of a warpgroup


@dataclass(frozen=True)
class Config:
    """groups: consumer warpgroups of a CTA, 1 or 2; a CTA owns 64 groups columns v.  initial:
    "none", "bf16" or "f32"; final: the last state is written; save: so is the state on entering
    each chunk.  layout: a plan's name.

    every_lane: all lanes of a warp arrive at a barrier, not one of them for all: slower, for race
    checkers that don't follow a warp's own synchronisation.
    """

    groups: int
    varlen: bool
    initial: str
    final: bool
    save: bool
    layout: str = "default"
    every_lane: bool = False

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers, and a warpgroup whose first warp is the producer."""
        return GROUP * (self.groups + 1)

    @property
    def parts(self) -> int:
        """CTAs that share a (sequence, head)."""
        return D // (ROWS * self.groups)


class Registers(NamedTuple):
    """Registers per thread of each role's warpgroup, with two consumer warpgroups: together at most
    what three start with.  With one, they start with enough.
    """

    consumer: int = 232
    producer: int = 40


class Bar(enum.IntEnum):
    """Indices of mbarriers, in units of the number of stages."""

    FULL = 0  # producer -> consumers: the tiles of a chunk
    EMPTY = 1  # consumers -> producer


STAGING_BARRIER = 1  # named barriers of a consumer warpgroup: this one and the next, by group


class Gmem(NamedTuple):
    """Global tensors that are read or written without tensor copies."""

    qk: cute.Tensor  # [slots, H, 64] f32
    eg: cute.Tensor  # [slots, H, 128] f32
    initial: cute.Tensor  # [N, H, 128 (V), 128 (K)] bf16 or f32, or None
    cu_seqlens: cute.Tensor  # [N + 1] int32, or None
    o: cute.Tensor  # [B, T, H, 128 (V)] bf16
    final: cute.Tensor  # [N, H, 128 (V), 128 (K)] f32, or None


class Copies(NamedTuple):
    """Tensor copies; the first two modes are the tile's, head and slot (o: head and batch) follow."""

    w: Tma
    kr: Tma
    qd: Tma
    u: Tma
    mqk: Tma
    o: Tma
    states: Tma  # or None


class MmaRow(NamedTuple):
    """Tensor-core instructions of one product in a chunk, in the code of a warpgroup: m64, n wide,
    16 deep.
    """

    product: str
    n: int
    count: int


def mma_account(config: Config) -> list[MmaRow]:
    """Where the tensor-core instructions of a chunk are.  Every one is in the code once."""
    return [
        MmaRow("S^T w^T", C, D // 16),
        MmaRow("S^T qd^T", C, D // 16),
        MmaRow("U^T kr", D, C // 16),
        MmaRow("U^T mqk^T", C, C // 16),
    ]


class Walk(NamedTuple):
    """Where a CTA works: sequence, head, first block of 64 columns v, batch row of o, first token
    there, first slot, chunks, valid rows of the last chunk.
    """

    n: Int32
    h: Int32
    block: Int32
    batch: Int32
    token: Int32
    slot: Int32
    chunks: Int32
    tail: Int32

    def chunk(self, it):
        """The chunk that is walked as number `it`."""
        return it


def arrive(config: Config, bar):
    """This warp's arrival at a barrier, after all its lanes came here."""
    cute.arch.sync_warp()
    if config.every_lane:
        cute.arch.mbarrier_arrive(bar)
    else:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bar)
