"""The plans of every kernel, by name: one entry adds one.

`plan("bwd_recurrence", "padded", "tf32")` is what a kernel run with layout="padded",
precision="tf32" uses. An experiment is a new entry in a kernel's `layouts`; the kernel takes it
unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .plan import Plan
from .tile import Dense, GroupPadded, Layout, RowPadded, Swizzle128, Tile


@dataclass(frozen=True)
class Family:
    """The plans of one kernel: its steps, a builder of tiles, named layouts, and precisions."""

    steps: tuple[str, ...]
    tiles: Callable[..., list[Tile]]  # (layout of the wide tiles, precision, **options)
    layouts: Mapping[str, Layout]
    precisions: tuple[str, ...]


def bwd_recurrence_tiles(wide: Layout, precision: str) -> list[Tile]:
    """Tiles of one chunk of 16 tokens, K = V = 128.

    `wide` is the layout of the fp32 tiles of 128 columns.

    The roles are a producer and a store warp, which copy, and value, key and pair warps. A chunk's
    steps are load (producer), solve (value: dvc and U), contract (key, pair: products over v), mix
    (key, pair: products over tokens; the outputs are staged in the bytes of kd, qd, kr and ki) and
    store (copies out of those bytes). The roles work on different chunks at the same time: while one
    mixes, others solve the next chunk and load the one after. So every tile is live in every step,
    and none may share bytes with another; a kernel whose warps stay on one chunk can say more.
    """
    tf32 = precision == "tf32"
    stages = 2 if tf32 else 3
    swizzle, dense, square = Swizzle128(), Dense(), GroupPadded(4, 24, 104)

    def operand(name: str, rows: int) -> Tile:
        """What the value warps hand to key and pair warps, in the precision of their MMAs."""
        dtype, layout = ("f32", wide) if tf32 else ("bf16", swizzle)
        return Tile(name, (rows, 128), dtype, layout)

    def small(name: str, shape: tuple[int, int], layout: Layout) -> Tile:
        return Tile(name, shape, "f32", layout, stages=2)

    return [
        *(Tile(name, (16, 128), "f32", wide, stages=stages) for name in ("kd", "qd", "kr", "ki")),
        *(Tile(name, (16, 128), "bf16", swizzle, stages=stages) for name in ("do", "v")),
        *(Tile(name, (16, 16), "bf16", dense, stages=stages) for name in ("inv", "mqk")),
        Tile("g_total", (1, 128), "f32", dense, stages=stages),
        Tile("beta", (1, 16), "f32", dense, stages=stages),
        Tile("states", (128, 128), "bf16", swizzle, stages=1),  # [V, K]
        operand("dS", 128),  # [V, K]
        operand("U", 16),
        operand("dvc", 16),
        Tile("dv", (16, 128), "bf16", swizzle),
        Tile("dgT_part", (1, 128), "f32", dense, stages=2),
        Tile("dbeta_part", (4, 16), "f32", dense, stages=2),
        *(small(name, (16, 16), square) for name in ("dM", "dL", "dLb")),
        small("dM_diag", (1, 16), dense),
        Tile("barriers", (1, 32), "i64", dense),
    ]


BWD_RECURRENCE = Family(
    steps=("load", "solve", "contract", "mix", "store"),
    tiles=bwd_recurrence_tiles,
    layouts={"default": GroupPadded(4, 136, 552), "padded": RowPadded(136)},
    precisions=("tf32", "bf16"),
)


def scan_tiles(
    wide: Layout, precision: str, *, groups: int = 2, save: bool = True, reverse: bool = False
) -> list[Tile]:
    """Tiles of one chunk of 64 tokens, K = V = 128, for `groups` warpgroups of 64 columns v each.

    A warpgroup has its own stage of the tiles that are cut along V: stage s of the chunk is stage
    groups * s + g of v or do, and what is staged for output has no more stages than that. The
    producer is chunks ahead of the consumers, so every tile is live in every step.
    """
    stages = 2 if groups == 2 else 3
    dense = Dense()
    if reverse:
        columns, by_tokens, states = "do", ("dv",), ("dstates",)
    else:
        columns, by_tokens, states = "v", ("o", "X")[: 1 + save], ("states",)[:save]
    return [
        *(Tile(name, (64, 128), "bf16", wide, stages=stages) for name in ("kd", "z", "qd")),
        Tile("p", (64, 64), "bf16", wide, stages=stages),
        Tile(columns, (64, 64), "bf16", wide, stages=stages * groups),  # [token, v]
        Tile("qk", (1, 64), "f32", dense, stages=stages),
        Tile("eg", (1, 128), "f32", dense, stages=stages),
        *(Tile(name, (64, 64), "bf16", wide, stages=groups) for name in by_tokens),  # [token, v]
        Tile("barriers", (1, 2 * stages), "i64", dense),
        *(Tile(name, (64, 128), "bf16", wide, stages=groups) for name in states),  # [v, K]
    ]


SCAN = Family(
    steps=("load", "multiply", "store"),
    tiles=scan_tiles,
    layouts={"default": Swizzle128()},
    precisions=("bf16",),
)


def transition_tiles(wide: Layout, precision: str) -> list[Tile]:
    """Tiles of one chunk of 64 tokens, K = V = 128; `wide` is the layout of the bf16 tiles.

    k and q go to registers and leave their bytes. kr changes its meaning in place (then z), and so
    do mqk (p) and L (X). A stage of rows is a warpgroup's operand of two levels: 64 left rows, then
    the right ones.
    """
    dense = Dense()
    raw, made = {"last": "gather"}, {"first": "tiles"}
    return [
        *(Tile(name, (64, 128), "bf16", wide, **raw) for name in ("k", "q")),
        *(Tile(name, (64, 128), "bf16", wide, **made) for name in ("kd", "qd", "kr", "kr_low")),
        Tile("rows", (112, 128), "bf16", wide, stages=2, first="pairs", last="pairs"),
        Tile("INV", (64, 64), "bf16", wide, first="publish"),
        Tile("L", (64, 64), "f32", RowPadded(72), first="pairs", last="publish"),
        Tile("mqk", (64, 64), "bf16", wide, first="gate"),
        Tile("totals", (12, 128), "f32", dense, first="gate", last="tiles"),
        Tile("factors", (4, 64), "f32", dense, first="gate", last="publish"),
        Tile("barriers", (1, 1), "i64", dense),
    ]


TRANSITION = Family(
    steps=("load", "gate", "gather", "pairs", "tiles", "invert", "publish", "multiply", "store"),
    tiles=transition_tiles,
    layouts={"default": Swizzle128()},
    precisions=("bf16",),
)


def gradients_tiles(wide: Layout, precision: str, *, g: str = "bf16") -> list[Tile]:
    """Tiles of one chunk of 64 tokens, K = V = 128; `wide` is the layout of the fp32 tile gc, g the
    dtype of the raw gates, which are loaded twice.

    Tiles change their meaning in place: X becomes U, q and k their gradients, raw that of the gate.  M
    and L hold both triangles; nobody reads their diagonals.
    """
    swizzle, dense = Swizzle128(), Dense()
    return [
        *(Tile(name, (64, 128), "bf16", swizzle) for name in ("q", "k")),
        *(Tile(name, (128, 128), "bf16", swizzle, last="multiply") for name in ("S", "dS")),
        *(Tile(name, (64, 128), "bf16", swizzle, last="multiply") for name in ("do", "dv", "X")),
        Tile("INV", (64, 64), "bf16", swizzle, last="write"),
        Tile("g", (64, 128), g, swizzle, last="sum"),
        Tile("gc", (64, 128), "f32", wide, first="multiply", last="pairs"),
        *(Tile(n, (64, 64), "bf16", swizzle, first="multiply", last="pairs") for n in ("M", "L")),
        Tile("exchange", (64, 128), "f32", dense, first="pairs"),
        Tile("krdkr", (64, 128), "f32", dense, first="pairs"),
        Tile("raw", (64, 128), g, swizzle, first="pairs"),
        Tile("gate_sums", (8, 128), "f32", dense, first="sum", last="multiply"),
        Tile("sums", (4, 128), "f32", dense, first="pairs"),  # see gradients.schedule.Sum
        Tile("dots", (16, 64), "f32", dense, first="pairs"),  # parts of q . dq, then of k . dk
        Tile("dgT", (3, 128), "f32", dense, first="multiply"),  # halves of sum_v dS S; exp(gT)
        Tile("rows", (11, 64), "f32", dense),  # see gradients.schedule.Row
        Tile("chunk", (1, 8), "i64", dense),
        Tile("barriers", (1, 7), "i64", dense),
    ]


GRADIENTS = Family(
    steps=("load", "sum", "write", "multiply", "pairs", "columns"),
    tiles=gradients_tiles,
    layouts={"default": GroupPadded(4, 136, 552), "padded": RowPadded(136)},
    precisions=("bf16",),
)

FAMILIES: dict[str, Family] = {
    "bwd_recurrence": BWD_RECURRENCE,
    "scan": SCAN,
    "transition": TRANSITION,
    "gradients": GRADIENTS,
}


@functools.cache
def plan(kernel: str, layout: str, precision: str, **options) -> Plan:
    """The plan of a kernel; options: those of its builder of tiles. ValueError names an unknown
    argument and lists the choices.
    """
    family = FAMILIES[_choice("kernel", kernel, FAMILIES)]
    wide = family.layouts[_choice("layout", layout, family.layouts)]
    _choice("precision", precision, family.precisions)
    name = "/".join([kernel, layout, precision, *(f"{k}={v}" for k, v in options.items())])
    return Plan.build(name, family.steps, family.tiles(wide, precision, **options))


def kernels() -> tuple[str, ...]:
    """Names of the kernels that have plans."""
    return tuple(FAMILIES)


def names(kernel: str) -> tuple[str, ...]:
    """Names of a kernel's layouts."""
    return tuple(FAMILIES[_choice("kernel", kernel, FAMILIES)].layouts)


def precisions(kernel: str) -> tuple[str, ...]:
    """Names of a kernel's precisions."""
    return FAMILIES[_choice("kernel", kernel, FAMILIES)].precisions


def _choice(argument: str, value: str, choices: Iterable[str]) -> str:
    if value not in choices:
        raise ValueError(f"{argument}={value!r} is not one of {', '.join(choices)}")
    return value
