"""Who does what, and what they wait for: config, warp roles, barriers, and the arguments that
travel between roles.
"""

import enum
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ...device.tma import Tma
from ...layouts.plan import Plan
from ...layouts.variants import plan
from ..budget import Budget, MmaRow, Role, wgmma_bf16

C, D = 64, 128  # tokens of a chunk; K = V
ROWS = 64  # columns v of a consumer warpgroup: rows of S^T
WARPS = 4  # of a warpgroup
GROUP = 128  # threads of a warpgroup
PIECES = ROWS // 8  # of 16 bytes, in a row of a tile [token, v]


class Cta:
    """What the configs of both directions have in common."""

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers, and a warpgroup whose first warp is the producer."""
        return GROUP * (self.groups + 1)

    @property
    def parts(self) -> int:
        """CTAs that share a (sequence, head)."""
        return D // (ROWS * self.groups)


@dataclass(frozen=True)
class Config(Cta):
    """groups: consumer warpgroups of a CTA, 1 or 2; a CTA owns 64 groups columns v.  initial:
    "none", "bf16" or "f32"; final: the last state is written; save: so are the state on entering
    each chunk, and X.  layout: a plan's name.

    every_lane: see `device.sync.arrive`.
    """

    groups: int
    varlen: bool
    initial: str
    final: bool
    save: bool
    layout: str = "default"
    every_lane: bool = False
    reverse: ClassVar[bool] = False


@dataclass(frozen=True)
class ReverseConfig(Cta):
    """The fields of `Config` with the gradient of the last state as the initial one, and that of
    the first as the final one; dS and dv of each chunk are always written.
    """

    groups: int
    varlen: bool
    initial: str
    final: bool
    layout: str = "default"
    every_lane: bool = False
    reverse: bool = field(default=True, init=False)


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
    final: cute.Tensor  # [N, H, 128 (V), 128 (K)] f32, or None
    out: cute.Tensor  # [B, T, H, 128 (V)] bf16: o, or dv


class Copies(NamedTuple):
    """Tensor copies; the first two modes are the tile's, head and slot (v, o: head and batch) follow."""

    kd: Tma
    z: Tma
    qd: Tma
    p: Tma
    v: Tma
    o: Tma
    states: Tma  # or None
    X: Tma  # or None


class ReverseCopies(NamedTuple):
    """Likewise; do and dv as v and o."""

    kd: Tma
    z: Tma
    qd: Tma
    p: Tma
    do: Tma
    dv: Tma
    dstates: Tma


class Extent(NamedTuple):
    """Tokens of a batch row, heads, slots."""

    T: Int32
    H: Int32
    slots: Int32


def shared_memory(config: Config | ReverseConfig) -> Plan:
    """The kernel's plan."""
    if config.reverse:
        return plan("scan", config.layout, "bf16", groups=config.groups, reverse=True)
    return plan("scan", config.layout, "bf16", groups=config.groups, save=config.save)


def mma_account(config: Config | ReverseConfig) -> list[MmaRow]:
    """Where the tensor-core instructions of a chunk are: every one is in the code once."""
    if config.reverse:
        products = [
            ("do^T p", C, C // 16),
            ("dS^T z^T", C, D // 16),
            ("do^T qd", D, C // 16),
            ("dv^T kd", D, C // 16),
        ]
    else:
        products = [
            ("S^T kd^T", C, D // 16),
            ("S^T qd^T", C, D // 16),
            ("X^T z", D, C // 16),
            ("X^T p^T", C, C // 16),
        ]
    return [MmaRow(name, wgmma_bf16(n), config.groups, steps) for name, n, steps in products]


def budget(config: Config | ReverseConfig) -> Budget:
    """What the compiled kernel has to keep.  FFMA add the diagonal to the 32 registers of o, or
    dv.
    """
    # Steps of products with n = C, n = D.
    by_tokens, by_keys = 2 * D // 16 + C // 16, C // 16
    if config.reverse:
        by_tokens, by_keys = D // 16 + C // 16, 2 * C // 16
    two = config.groups == 2
    return Budget(
        threads=config.threads,
        ctas=1,
        plan=shared_memory(config),
        mma=mma_account(config),
        implied={
            wgmma_bf16(C): config.groups * by_tokens,
            wgmma_bf16(D): config.groups * by_keys,
        },
        ffma=64,
        roles=(Role(Registers().producer), Role(Registers().consumer, 2)) if two else (),
    )


class Walk(NamedTuple):
    """Where a CTA works: sequence, head, first block of 64 columns v, batch row of tensors over
    tokens, first token there, first slot, chunks, valid rows of the last chunk.
    """

    n: Int32
    h: Int32
    block: Int32
    batch: Int32
    token: Int32
    slot: Int32
    chunks: Int32
    tail: Int32

    def backward(self, it):
        """The chunk that the reverse scan walks as number `it`; the forward one takes chunk `it`."""
        return self.chunks - 1 - it
