"""Who does what, and what they wait for: config, warp roles, barriers, and the arguments that travel between roles."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

C, D = 16, 128  # tokens of a chunk; K = V
K_BLOCKS = D // 16  # steps of 16 along K or V
UNROLL = 2  # of the loops over those steps whose accumulators stay: more would thrash the instruction cache
THREADS = 512
CONSUMER_WARPS, PRODUCER_WARP, STORE_WARP = 12, 12, 13  # warps 14, 15 complete a warpgroup, for setmaxnreg


@dataclass(frozen=True)
class Config:
    """precision "tf32" or "bf16"; layout: a plan's name; beta "bf16" or "f32"; state_grad those or "none"."""

    precision: str = "tf32"
    layout: str = "default"
    beta: str = "bf16"
    state_grad: str = "none"
    varlen: bool = False
    value_warps: int = 4


class Registers(NamedTuple):
    """Registers per thread of each role: 128 on average over four warpgroups."""

    value: int
    key: int
    producer: int


REGISTERS = {8: Registers(144, 184, 40), 4: Registers(232, 120, 40)}  # by number of value warps


class Bar(enum.IntEnum):
    """Indices of mbarriers; the first four have one for each stage, up to three."""

    FULL = 0  # producer -> value, key: the tiles of a chunk
    UPDATED = 3  # value -> key: the tiles were read, their bytes may take the outputs
    STORED = 6  # key -> store: the outputs are in the tiles' bytes
    EMPTY = 9  # store -> producer
    STATES_FULL = 12  # producer -> value, key: the state on entering the chunk
    STATES_EMPTY = 13
    DVC_FULL = 14  # value -> key: dS, dvc, dv
    U_FULL = 15  # value -> key: U, parts of dbeta
    HAND_EMPTY = 16  # key -> value, for both


class Sync(enum.IntEnum):
    """Named barriers."""

    KEYS = 1
    CONSUMERS = 2


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


class Tma(NamedTuple):
    """A tensor copy: its atom and the coordinate tensor of global memory."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Walk(NamedTuple):
    """Where a CTA works: sequence, head, first token, first tile, tiles, valid rows of the last tile."""

    n: Int32
    h: Int32
    token: Int32
    tile: Int32
    tiles: Int32
    tail: Int32


class Slot(NamedTuple):
    """Buffers of one chunk: stage of its tiles, the parity of that stage's barriers, and the half of the small tiles."""

    stage: Int32
    turn: Int32
    small: Int32
