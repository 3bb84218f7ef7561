"""What the 16 warps of gradients access in one chunk of 64 tokens, for `audit`.

Left out: bulk copies, operands of wgmma, the line `chunk`, which whole warps share, rows past a
sequence's end or with the least b, and stores of single lanes (norms, totals of tokens, the diagonals
of M and L, dS S, parts of dA_log and ddt_bias).
"""

from .audit import (
    SQUARES,
    WARP,
    Access,
    Coord,
    collector,
    grid,
    matrices,
    matrices_across,
    neighbours,
    per_column,
    per_row,
    strided,
)
from .plan import Plan

WARPS = 16
ROWS, EIGHTS = range(64), range(0, 64, 8)
CHANNELS = range(0, 128, 8)
BLOCKS = grid(SQUARES, range(0, 128, 16))  # 16 x 16, of [64, 128]
BELOW = tuple((i, j) for i in SQUARES for j in SQUARES if i > j)  # of [64, 64]
ABOVE = tuple((j, i) for i, j in BELOW)
DIAGONAL = tuple((i, i) for i in SQUARES)
# Rows of the tile `rows`: gradients.schedule.Row.
FK, FQ, B, NK, NQ, M_DIAGONAL, PAIRS, DBETA, SLOPE, BK = (0, 1, 2, 3, 4, 5, 6, 7, 9, 10)


def accesses(plan: Plan) -> list[Access]:
    """In the order of the kernel's steps."""
    found, adder = collector(plan)
    wide = plan["g"].dtype == "f32"
    _gate_and_norms(adder, wide)
    _products(adder)
    _combine(adder)
    _pairs(adder)
    _columns(adder, wide)
    return found


def lanes() -> tuple[Coord, ...]:
    """(0, lane): a vector of 32."""
    return tuple((0, lane) for lane in range(WARP))


def fours() -> tuple[Coord, ...]:
    """(0, 4 lane): 128 fp32 values, four a lane."""
    return tuple((0, 4 * lane) for lane in range(WARP))


def pieces() -> tuple[Coord, ...]:
    """Four rows of 64 bf16, eight a lane."""
    return tuple((lane // 8, 8 * (lane % 8)) for lane in range(WARP))


def of_either(s: int) -> tuple[Coord, ...]:
    """A lane's first token, or the next one where bit s of it is clear."""
    return tuple((2 * (lane % 4) + (2 * (lane % 4) & s == 0), lane // 4) for lane in range(WARP))


def anchors(s: int) -> tuple[Coord, ...]:
    """The token between a lane's pair of groups of s tokens."""
    return tuple(((2 * (lane % 4) & (8 - 2 * s)) + s, lane // 4) for lane in range(WARP))


def scattered_tokens() -> tuple[Coord, ...]:
    """(0, token): where a lane's sum over channels ends up, of 32 tokens."""
    return tuple((0, 2 * (lane % 4) + lane // 4 % 2 + 8 * (lane // 8)) for lane in range(WARP))


def _gate_and_norms(adder, wide: bool) -> None:
    every, halves = grid(ROWS, (0, 64)), (0, 64)
    add = adder("gate", WARPS)
    add("g", "g", "lds64" if wide else "lds32", neighbours(), 8, every)
    add("totals store", "gate_sums", "sts64", neighbours(), 1, grid(range(8), halves))
    add("totals", "gate_sums", "lds64", neighbours(), 7, grid(range(7), halves))
    add("gc store", "gc", "sts64", neighbours(), 8, every)
    adder("gate", 2)("exp(gT) store", "dgT", "sts64", neighbours(), 1, grid((2,), halves))
    adder("gate", 2)("b and its slope", "rows", "sts32", lanes(), 2, grid((B, SLOPE), (0, 32)))
    add = adder("norms", WARPS)
    for tile in ("k", "q"):
        add(tile, tile, "lds128", pieces(), 2, grid(range(0, 64, 4), halves))


def _products(adder) -> None:
    adder("write", 8)("U store", "X", "stmatrix", matrices(), 4, BLOCKS)
    add = adder("publish", 1)  # a block below or on the diagonal is one warp's
    for tile, left in (("M", FQ), ("L", FK)):
        add(f"{tile}, norms of rows", "rows", "lds32", per_row(), 20, grid((left,), EIGHTS))
        add(f"{tile}, norms of columns", "rows", "lds64", per_column(), 20, grid((BK,), EIGHTS))
        add(f"{tile} store", tile, "stmatrix", matrices(), 10, BELOW + DIAGONAL)
        add(f"{tile}^T store", tile, "stmatrix_trans", matrices_across(), 6, ABOVE)
    add = adder("decay", WARPS)
    blocks = grid(range(0, 128, 16), range(0, 128, 16))
    add("dS^T as A", "dS", "ldmatrix_trans", matrices_across(), 4, blocks)
    add("S as B", "S", "ldmatrix_trans", matrices(), 4, blocks)


def _combine(adder) -> None:
    """Products with states, and pairs of equal or neighbouring tokens."""
    add = adder("combine", WARPS)
    add("gc", "gc", "lds32", strided(), 16, _positions((0, 1)))
    add("gc of the last token", "gc", "lds32", per_row(), 2, grid((63,), CHANNELS))
    for name, row in (
        ("norms of k", FK), ("norms of q", FQ), ("b and norms of k", BK), ("diagonal of M", M_DIAGONAL)
    ):  # fmt: skip
        add(name, "rows", "lds64", per_column(), 4, grid((row,), EIGHTS))
    quads = tuple((0, lane % 4) for lane in range(WARP))
    add("M and L of neighbours", "rows", "lds32", quads, 8, grid((PAIRS,), range(0, 64, 4)))
    add("kr dkr store", "krdkr", "sts128", fours(), 4, grid(ROWS, (0,)))
    for tile in ("k", "q"):
        add(tile, tile, "ldmatrix_trans", matrices_across(), 2, BLOCKS)


def _positions(shifts) -> tuple[Coord, ...]:
    """strided() over [64 tokens, 128 channels], from tokens of these shifts on."""
    return grid([token + i for token in EIGHTS for i in shifts], CHANNELS)


def _pairs(adder) -> None:
    squares = grid(SQUARES, SQUARES)
    lower, upper = range(0, 32, 8), range(32, 64, 8)
    for side, first, tokens, gives, takes, q in (
        ("right", 1, lower, 2, 6, 0),  # the words of the other half once, for both blocks
        ("left", 0, upper, 4, 6, 2),
    ):
        add = adder(f"level 32, {side}", WARPS // 2)
        add("anchor", "gc", "lds32", per_row(), 2, grid((32,), CHANNELS))
        at = grid([token + first for token in tokens], CHANNELS)
        add("gc", "gc", "lds32", strided(), 16, at)
        add("words store", "exchange", "sts128", fours(), gives, grid(ROWS, (0,)))
        add("words", "exchange", "lds128", fours(), takes, grid(ROWS, (0,)))
        for tile, count in (("k", 2), ("q", q)):
            if count:
                rows = SQUARES[:2] if side == "right" else SQUARES[2:]
                at = grid(rows, range(0, 128, 16))
                add(tile, tile, "ldmatrix_trans", matrices_across(), count, at)
        for tile in ("M", "L"):
            at = [
                x for x in squares if (x[0] < 32) == (side == "right") and x[0] // 32 != x[1] // 32
            ]
            add(f"{tile} as B", tile, "ldmatrix", matrices_across(), 4, at)
    add = adder("level 16", WARPS)
    add("anchor", "gc", "lds32", per_row(), 2, grid((16, 48), CHANNELS))
    for side, starts, shift, count in (("right", (0, 32), 1, 8), ("left", (16, 48), 0, 4)):
        at = grid([t + 8 * s + shift for t in starts for s in range(2)], CHANNELS)
        add(f"gc, {side}", "gc", "lds32", strided(), count, at)
    for tile, count in (("k", 2), ("q", 1)):
        add(tile, tile, "ldmatrix_trans", matrices_across(), count, BLOCKS)
    for tile in ("M", "L"):
        at = [(16, 0), (0, 16), (48, 32), (32, 48)]
        add(f"{tile} as B", tile, "ldmatrix", matrices_across(), 2, at)
    add = adder("levels 8, 4, 2", WARPS)
    for tile in ("k", "q"):
        add(tile, tile, "ldmatrix_trans", matrices_across(), 2, BLOCKS)
    for tile in ("M", "L"):
        add(f"{tile} as B", tile, "ldmatrix", matrices_across(), 2, DIAGONAL)
    add = adder("level 8", WARPS)
    add("anchor", "gc", "lds32", per_row(), 4, grid([t + 8 for t in SQUARES], CHANNELS))
    add("gc, right", "gc", "lds32", strided(), 4, grid([t + 1 for t in SQUARES], CHANNELS))
    add("gc, left", "gc", "lds32", strided(), 4, grid([t + 8 for t in SQUARES], CHANNELS))
    for s in (4, 2):
        add = adder(f"level {s}", WARPS)
        add("anchor", "gc", "lds32", anchors(s), 8, grid(EIGHTS, CHANNELS))
        add("gc", "gc", "lds32", of_either(s), 8, grid(EIGHTS, CHANNELS))


def _columns(adder, wide: bool) -> None:
    """Sums over tokens and over channels, norms, the gate."""
    add = adder("columns", WARPS)
    add("kr dkr", "krdkr", "lds128", fours(), 4, grid(ROWS, (0,)))
    halves = (0, 32)
    add("dots store", "dots", "sts32", scattered_tokens(), 2, grid(range(16), halves))
    for tile in ("k", "q"):
        add(f"{tile}, for dots and norms", tile, "ldmatrix_trans", matrices_across(), 4, BLOCKS)
    add("dots", "dots", "lds32", lanes(), 16, grid(range(16), halves))
    add("norms", "rows", "lds32", lanes(), 2, grid((NK, NQ), halves))
    own = range(0, 64, 4)  # a warp's rows of `exchange`
    add("row factors store", "exchange", "sts32", lanes(), 2, grid(own, halves))
    add("row factors", "exchange", "lds64", per_column(), 8, grid(own, range(0, 64, 8)))
    for name, tile in (("dk", "k"), ("dq", "q")):
        add(f"{name} store", tile, "stmatrix_trans", matrices_across(), 2, BLOCKS)
    add("sums of the other half", "sums", "lds32", per_row(), 2, grid((0, 1), CHANNELS))
    add("dgT", "dgT", "lds32", per_row(), 6, grid((0, 1, 2), CHANNELS))
    if wide:
        add("raw g", "raw", "lds32", strided(), 16, _positions((0, 1)))
        add("dg store", "raw", "sts32", strided(), 16, _positions((0, 1)))
    else:
        add("raw g", "raw", "ldmatrix_trans", matrices_across(), 2, BLOCKS)
        add("dg store", "raw", "stmatrix_trans", matrices_across(), 2, BLOCKS)
    adder("columns", 2)("dbeta", "rows", "lds32", lanes(), 2, grid((DBETA, SLOPE), halves))
