"""Audit of a plan without a GPU: bank conflicts of the kernel's accesses, and legality.

Shared memory has 32 banks of 4 bytes and serves one wavefront per cycle: 32 lanes of 4 bytes, 16 of
8, or 8 of 16 (one 8x8 matrix of ldmatrix or stmatrix). Lanes that touch the same 4-byte word don't
conflict; different words of one bank take one wavefront each. An access whose words all fit in one
wavefront, because lanes share them, takes one whatever its width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .plan import Plan, format_table
from .tile import SWIZZLE_ROWS, Swizzle128, Tile

WARP = 32
BANKS = 32
BANK_BYTES = 4
BULK_BYTES = 16  # alignment and granularity of a bulk copy
TMA_BOX_ROWS = 256  # the most rows of one TMA box

# Bytes of one lane. For the matrix kinds a lane gives the address of one row of 8 bf16.
LANE_BYTES = {
    "lds16": 2,
    "lds32": 4,
    "lds64": 8,
    "lds128": 16,
    "sts16": 2,
    "sts32": 4,
    "sts64": 8,
    "sts128": 16,
    "ldmatrix": 16,
    "ldmatrix_trans": 16,
    "stmatrix": 16,
    "stmatrix_trans": 16,
}

Coord = tuple[int, int]


@dataclass(frozen=True)
class Access:
    """A warp-wide instruction and how often a chunk issues it.

    `coords` is the (row, col) of each of the 32 lanes: its first element, or for the matrix kinds
    (always x4) the start of the matrix row that the lane addresses. The instruction is repeated
    with every (row, col) of `shifts` added, equally often; `count` is the number of instructions
    per chunk, of all warps together.
    """

    name: str
    tile: Tile
    kind: str
    coords: tuple[Coord, ...]
    count: int
    shifts: tuple[Coord, ...] = ((0, 0),)

    def __post_init__(self) -> None:
        if self.kind not in LANE_BYTES:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(LANE_BYTES)}")
        if len(self.coords) != WARP:
            raise ValueError(f"access {self.name}: {len(self.coords)} lanes, a warp has {WARP}")

    def offsets(self, shift: Coord = (0, 0)) -> tuple[int, ...]:
        """Byte offset of each lane in stage 0, with `shift` added to the coordinates."""
        return tuple(self.tile.byte_offset(r + shift[0], c + shift[1]) for r, c in self.coords)


class AuditRow(NamedTuple):
    """One access and its conflicts.

    `ideal` and `actual` are wavefronts per instruction, `ways` the worst bank multiplicity, `count`
    instructions per chunk, and `extra_cycles` what the conflicts add per chunk.
    """

    name: str
    tile: str
    kind: str
    ideal: int
    actual: int
    ways: int
    count: int
    extra_cycles: int


def group_ways(offsets: Sequence[int], lane_bytes: int) -> tuple[int, ...]:
    """Wavefronts of each group of lanes that could be served together (1 is free of conflicts)."""
    lanes = min(WARP, BANKS * BANK_BYTES // lane_bytes)
    ways = []
    for start in range(0, len(offsets), lanes):
        words = defaultdict(set)
        for offset in offsets[start : start + lanes]:
            for word in range(offset // BANK_BYTES, (offset + lane_bytes - 1) // BANK_BYTES + 1):
                words[word % BANKS].add(word)
        ways.append(max(map(len, words.values())))
    return tuple(ways)


def ideal_wavefronts(access: Access) -> int:
    """Wavefronts of one instruction without conflicts: enough for the different words it touches."""
    return max(-(-len(_words(access, shift)) // BANKS) for shift in access.shifts)


def wavefronts(access: Access) -> int:
    """Wavefronts of one instruction, at the worst of its shifts."""
    return max(_per_shift(access))


def ways(access: Access) -> int:
    """The worst bank multiplicity: 1 is free of conflicts."""
    size = LANE_BYTES[access.kind]
    return max(max(group_ways(access.offsets(s), size)) for s in access.shifts)


def _words(access: Access, shift: Coord) -> set[int]:
    """The 4-byte words that one instruction touches."""
    size = LANE_BYTES[access.kind]
    return {
        word
        for start in access.offsets(shift)
        for word in range(start // BANK_BYTES, (start + size - 1) // BANK_BYTES + 1)
    }


def _per_shift(access: Access) -> list[int]:
    size = LANE_BYTES[access.kind]
    counts = []
    for shift in access.shifts:
        words = _words(access, shift)
        one = len({word % BANKS for word in words}) == len(words)
        counts.append(1 if one else sum(group_ways(access.offsets(shift), size)))
    return counts


# ---- patterns of lanes; lane l of mma.sync has r = l // 4 and c = l % 4


def pairs() -> tuple[Coord, ...]:
    """(r, 2c): two neighbouring columns of an accumulator, or of an operand contiguous in k."""
    return tuple((lane // 4, 2 * (lane % 4)) for lane in range(WARP))


def strided() -> tuple[Coord, ...]:
    """(2c, r): an operand whose k runs along the rows, or a transposed accumulator."""
    return tuple((2 * (lane % 4), lane // 4) for lane in range(WARP))


def matrices() -> tuple[Coord, ...]:
    """Row addresses of ldmatrix or stmatrix x4 over a 16x16 block: matrices down a column first."""
    return tuple((lane % 16, 8 * (lane // 16)) for lane in range(WARP))


def matrices_across() -> tuple[Coord, ...]:
    """The same, matrices along a row first."""
    return tuple((lane % 8 + 8 * (lane // 16), 8 * (lane // 8 % 2)) for lane in range(WARP))


def per_row() -> tuple[Coord, ...]:
    """(0, r): a vector indexed by an accumulator's row."""
    return tuple((0, lane // 4) for lane in range(WARP))


def per_column() -> tuple[Coord, ...]:
    """(0, 2c): a vector indexed by an accumulator's columns."""
    return tuple((0, 2 * (lane % 4)) for lane in range(WARP))


def column_sums() -> tuple[Coord, ...]:
    """(0, column of 16): where sums over an accumulator's rows end up, each in two lanes."""
    return tuple((0, 8 * (i // 16) + 2 * (i % 4) + i // 8 % 2) for i in range(WARP))


def neighbours() -> tuple[Coord, ...]:
    """(0, 2 lane): 64 columns of one row, two a lane."""
    return tuple((0, 2 * lane) for lane in range(WARP))


def quarters(columns: int) -> tuple[Coord, ...]:
    """(r, columns c): eight rows, four lanes a row, `columns` apart."""
    return tuple((lane // 4, columns * (lane % 4)) for lane in range(WARP))


def vectors_of_8() -> tuple[Coord, ...]:
    """Two rows of 128 bf16 in vectors of 8."""
    return tuple((lane // 16, 8 * (lane % 16)) for lane in range(WARP))


def grid(rows: Sequence[int], cols: Sequence[int]) -> tuple[Coord, ...]:
    """All shifts (row, col)."""
    return tuple((r, c) for r in rows for c in cols)


# ---- kernels


def collector(plan: Plan):
    """(accesses, adder): adder(role, warps) gives a function that appends that role's accesses."""
    accesses: list[Access] = []

    def adder(role: str, warps: int):
        def add(name: str, tile: str, kind: str, coords, per_warp: int, shifts=((0, 0),)) -> None:
            access = Access(f"{role}: {name}", plan[tile], kind, coords, per_warp * warps, shifts)
            accesses.append(access)

        return add

    return accesses, adder


def bwd_recurrence_accesses(plan: Plan) -> list[Access]:
    """What the 4 value, 4 key and 4 pair warps of bwd_recurrence access in one chunk.

    A value warp owns 32 rows of V, a key or pair warp 32 columns of K: 4 column tiles of 8. Three
    pair warps also make one small matrix each. The precision of the plan is read off the dtype of
    dS. Left out: bulk copies, mbarriers, shuffles, the zeroing of a sequence's tail, and the
    predicated stores of the diagonal of dM.
    """
    accesses, adder = collector(plan)
    for role, of_role in (("value", _value), ("key", _key), ("pair", _pair)):
        of_role(adder(role, 4), plan["dS"].dtype == "f32")
    _one_pair_warp(adder("one pair warp", 1), plan["dS"].dtype == "f32")
    adder("producer", 1)("beta store", "beta", "sts32", per_row(), 1, grid((0,), (0, 8)))
    return accesses


WIDE = range(0, 128, 8)
HALVES = (0, 8)
PAIR_SHIFTS = grid(HALVES, WIDE)  # pairs() over [16, 128]
STRIDED_SHIFTS = grid((0, 1, 8, 9), WIDE)  # strided() over [16, 128]
BLOCKS = grid((0,), range(0, 128, 16))  # 16x16 blocks of [16, 128]
STATE_BLOCKS = grid(range(0, 128, 16), range(0, 128, 16))  # and of [128, 128]
SMALL_PAIRS = grid(HALVES, HALVES)  # pairs() over [16, 16]
SMALL_STRIDED = grid((0, 1, 8, 9), HALVES)


def _value(add, tf32: bool) -> None:
    add("do^T as A, twice", "do", "ldmatrix_trans", matrices_across(), 4, BLOCKS)
    add("Mqk as B", "mqk", "ldmatrix_trans", matrices(), 1)
    add("kr as B, K contiguous", "kr", "lds64", pairs(), 32, PAIR_SHIFTS)
    if tf32:
        add("dS store", "dS", "sts64", pairs(), 64, grid(WIDE, WIDE))
    else:
        add("dS store", "dS", "stmatrix", matrices(), 16, STATE_BLOCKS)
    add("INV as B", "inv", "ldmatrix_trans", matrices(), 1)
    for tile in ("dvc", "U"):
        if tf32:
            add(f"{tile} store", tile, "sts32", strided(), 16, STRIDED_SHIFTS)
        else:
            add(f"{tile} store", tile, "stmatrix_trans", matrices_across(), 2, BLOCKS)
    add("dv store", "dv", "stmatrix_trans", matrices_across(), 2, BLOCKS)
    add("S^T as A", "states", "ldmatrix", matrices(), 16, STATE_BLOCKS)
    add("kd as B, K contiguous", "kd", "lds64", pairs(), 32, PAIR_SHIFTS)
    add("v^T", "v", "ldmatrix_trans", matrices_across(), 2, BLOCKS)
    add("INV^T as B", "inv", "ldmatrix", matrices_across(), 1)
    add("beta, three times", "beta", "lds64", per_column(), 6, grid((0,), HALVES))
    add("dbeta part", "dbeta_part", "sts32", column_sums(), 1, grid(range(4), (0,)))
    add("exp(gT)", "g_total", "lds64", per_column(), 16, grid((0,), WIDE))
    for tile in ("qd", "kd"):
        add(f"{tile} as B, tokens strided", tile, "lds32", strided(), 64, STRIDED_SHIFTS)


def _over_v(add, tf32: bool, handed: str) -> None:
    """Operands of the products over v of a key or pair warp: U or dvc, the state, dS."""
    if tf32:
        add(f"{handed} as A", handed, "lds64", pairs(), 32, PAIR_SHIFTS)
        rows = tuple(r + i for r in WIDE for i in (0, 1))
        add("dS as B", "dS", "lds32", strided(), 128, grid(rows, WIDE))
    else:
        add(f"{handed} as A", handed, "ldmatrix", matrices(), 8, BLOCKS)
        add("dS as B", "dS", "ldmatrix_trans", matrices(), 16, STATE_BLOCKS)
    add("S^T as B", "states", "ldmatrix_trans", matrices(), 16, STATE_BLOCKS)


def _key(add, tf32: bool) -> None:
    _over_v(add, tf32, "dvc")
    add("rowsum_v(dS S) store", "dgT_part", "sts32", column_sums(), 2, BLOCKS)
    add("dL as A", "dL", "lds64", pairs(), 4, SMALL_PAIRS)
    for tile in ("dM", "dLb"):
        add(f"{tile}^T as A", tile, "lds32", strided(), 8, SMALL_STRIDED)
    for tile in ("kd", "qd", "ki"):
        add(f"{tile} as B, tokens strided", tile, "lds32", strided(), 16, STRIDED_SHIFTS)
    add("qd elementwise", "qd", "lds64", pairs(), 8, PAIR_SHIFTS)
    for tile in ("dM_diag", "beta"):
        add(tile, tile, "lds32", per_row(), 2, grid((0,), HALVES))
    for name, tile in (("dkd", "kd"), ("dki", "qd")):
        add(f"{name} staged", tile, "sts64", pairs(), 8, PAIR_SHIFTS)


def _pair(add, tf32: bool) -> None:
    add("do as A", "do", "ldmatrix", matrices(), 8, BLOCKS)
    _over_v(add, tf32, "U")
    add("dv", "dv", "lds128", vectors_of_8(), 2, grid(range(0, 16, 2), (0,)))
    add("dM as A", "dM", "lds64", pairs(), 4, SMALL_PAIRS)
    add("ki as B, tokens strided", "ki", "lds32", strided(), 16, STRIDED_SHIFTS)
    add("dM_diag", "dM_diag", "lds32", per_row(), 2, grid((0,), HALVES))
    for tile in ("ki", "kr"):
        add(f"{tile} elementwise", tile, "lds64", pairs(), 8, PAIR_SHIFTS)
    for name, tile in (("exp(gT)", "g_total"), ("rowsum_v(dS S)", "dgT_part")):
        add(name, tile, "lds32", column_sums(), 2, BLOCKS)
    for name, tile in (("dkr", "kr"), ("dqd", "ki")):
        add(f"{name} staged", tile, "sts64", pairs(), 8, PAIR_SHIFTS)


def _one_pair_warp(add, tf32: bool) -> None:
    """dM = tril(do U^T), dL = -tril(dvc U^T, -1) and kd ki^T, each by one warp."""
    add("do as A", "do", "ldmatrix", matrices(), 8, BLOCKS)
    if tf32:
        add("dvc as A", "dvc", "lds64", pairs(), 32, PAIR_SHIFTS)
        add("U as B, for dM and dL", "U", "lds64", pairs(), 2 * 32, PAIR_SHIFTS)
    else:
        add("dvc as A", "dvc", "ldmatrix", matrices(), 8, BLOCKS)
        add("U as B, for dM and dL", "U", "ldmatrix", matrices_across(), 2 * 8, BLOCKS)
    for tile in ("dM", "dL", "dLb"):
        # Element by element in the kernel; the compiler joins half of the pairs.
        add(f"{tile} store, pairs", tile, "sts64", pairs(), 2, SMALL_PAIRS)
        add(f"{tile} store, single", tile, "sts32", pairs(), 4, grid(HALVES, (0, 1, 8, 9)))
    add("beta", "beta", "lds32", per_row(), 6, grid((0,), HALVES))
    add("kd as A", "kd", "lds64", pairs(), 32, PAIR_SHIFTS)
    add("ki as B", "ki", "lds64", pairs(), 32, PAIR_SHIFTS)
    tokens = tuple((0, lane % 16) for lane in range(WARP))
    add("dbeta parts", "dbeta_part", "lds32", tokens, 4, grid(range(4), (0,)))
    add("dL elementwise", "dL", "lds64", pairs(), 4, SMALL_PAIRS)


SQUARES = range(0, 64, 16)  # starts of blocks of 16, of 64 tokens


def transition_accesses(plan: Plan) -> list[Access]:
    """What the 8 warps of transition access in one chunk of 64 tokens.

    Most of them see two columns a lane, and 16 tokens.  An ldmatrix for norms takes two matrices of k
    and two of q; it counts here as half of one that takes four of k and half of one that takes four
    of q.  Left out: bulk copies, operands of wgmma, clearing mqk, lines that whole warps share, and
    the predicated stores of levels 4, 2 and 1.
    """
    accesses, adder = collector(plan)
    every = grid(range(64), (0, 64))
    add = adder("gather", 8)
    add("totals store", "totals", "sts64", neighbours(), 3, grid(range(12), (0, 64)))
    rows = tuple((lane % 8, 8 * (lane // 8)) for lane in range(WARP))
    for tile in ("k", "q"):
        add(tile, tile, "lds32", neighbours(), 16, every)
        add(
            f"{tile} for norms", tile, "ldmatrix", rows, 4, grid(range(0, 64, 8), range(0, 128, 32))
        )
    add = adder("pairs", 8)
    # Of each level 32 left rows of k, as many of q, and 32 right ones, those of level 32 twice.
    add("rows store", "rows", "sts32", neighbours(), 6 * 24 + 8, grid(range(112), (0, 64)))
    add = adder("pairs", 2)
    for s in (32, 16, 8):
        at = _squares(s)
        add(f"level {s}, L store", "L", "sts64", pairs(), len(at) // 2, at)
        add(f"level {s}, mqk store", "mqk", "sts32", pairs(), len(at) // 2, at)
    add = adder("tiles", 8)
    add("totals", "totals", "lds64", neighbours(), 4, grid(range(4), (0, 64)))
    for tile in ("kd", "qd", "kr", "kr_low"):
        add(f"{tile} store", tile, "sts32", neighbours(), 16, every)
    _inverse(adder)
    add = adder("publish", 4)
    rows = tuple((lane % 16, 16 * (lane // 16)) for lane in range(WARP))
    halves = [(16 * i, 32 * (i // 2)) for i in range(4)]  # starts of the warps
    add("X", "L", "lds128", rows, 4, [(r, c + i) for r, c in halves for i in range(0, 16, 4)])
    above = [(0, 32), (16, 32)]  # zeros
    add(
        "INV store",
        "INV",
        "sts128",
        rows,
        3,
        [(r, c + i) for r, c in halves + above for i in HALVES],
    )
    add("corner of INV store", "INV", "sts32", pairs(), 4, grid(range(32, 64, 8), range(0, 32, 8)))
    squares = grid(SQUARES, range(0, 128, 16))
    adder("products", 8)("z store", "kr", "stmatrix", matrices(), 4, squares)
    adder("products", 4)("p store", "mqk", "stmatrix", matrices(), 4, grid(SQUARES, SQUARES))
    return accesses


def _squares(s: int) -> tuple[Coord, ...]:
    """Starts of the 8 x 8 blocks of a level's results, s at least 8."""

    def token(p: int) -> int:
        return (p & -s) << 1 | p & (s - 1)

    lefts = range(0, 32, 8)
    return tuple(
        (token(left) + s, token(right))
        for left in lefts
        for right in lefts
        if left // s == right // s
    )


def _inverse(adder) -> None:
    """Blocks of 16 of L and R: on the diagonal, below it in pairs, in the corner of four.

    Loads of values that are known to be 0 are not there.  The corner's four blocks take 9 products R L
    and 6 of those with R; they leave as INV.
    """
    blocks = grid(range(0, 64, 8), range(0, 64, 8))
    every = grid(tuple(r + i for r in range(0, 64, 8) for i in (0, 1)), range(0, 64, 8))
    for name, warps, rows, columns, results in (
        ("diagonal", 4, 2, 6, 4),
        ("below", 2, 4, 2 * 8, 4),
        ("corner", 1, 9 * 4, (9 + 6) * 8, 0),
    ):
        add = adder(f"inverse, {name}", warps)
        add("L or X as A", "L", "lds64", pairs(), rows, blocks)
        add("L or X as B, rows strided", "L", "lds32", strided(), columns, every)
        if results:
            add("X store", "L", "sts64", pairs(), results, blocks)


def scan_accesses(plan: Plan) -> list[Access]:
    """What the consumer warpgroups of scan access in one chunk of 64 tokens, in either direction; a
    warp has 16 columns v.

    Left out: bulk copies, operands of wgmma, and rows of a last chunk that is not full.
    """
    accesses, adder = collector(plan)
    loaded = next(plan[name] for name in ("v", "do") if name in plan)
    groups = loaded.stages // plan["kd"].stages
    add = adder("consumer", 4 * groups)
    add("eg", "eg", "lds64", per_column(), 16, grid((0,), WIDE))
    add("qk", "qk", "lds64", per_column(), 8, grid((0,), range(0, 64, 8)))
    columns, states = grid(SQUARES, SQUARES), grid(SQUARES, range(0, 128, 16))
    for tile, kind, coords, per_warp, shifts in (
        ("v", "ldmatrix_trans", matrices_across(), 4, columns),
        ("do", "ldmatrix_trans", matrices_across(), 4, columns),
        ("o", "stmatrix_trans", matrices_across(), 4, columns),
        ("X", "stmatrix_trans", matrices_across(), 4, columns),
        ("dv", "stmatrix_trans", matrices_across(), 4, columns),
        ("states", "stmatrix", matrices(), 8, states),
        ("dstates", "stmatrix", matrices(), 8, states),
    ):
        if tile in plan:  # forward or reverse, with or without what a backward pass wants
            add(tile, tile, kind, coords, per_warp, shifts)
    return accesses


def gradients_accesses(plan: Plan) -> list[Access]:
    """What the 16 warps of gradients access in one chunk: see the module of that name."""
    from . import gradients_accesses  # here: that module is made of this one's parts

    return gradients_accesses.accesses(plan)


@dataclass(frozen=True)
class Kernel:
    """What the audit knows of a kernel: its accesses, and the tiles moved by TMA or bulk copies."""

    accesses: Callable[[Plan], list[Access]]
    copied: tuple[str, ...]


KERNELS: dict[str, Kernel] = {
    "bwd_recurrence": Kernel(
        accesses=bwd_recurrence_accesses,
        copied=tuple("kd qd kr ki do v inv mqk g_total states".split()),
    ),
    "scan": Kernel(
        accesses=scan_accesses,
        copied=tuple("kd z qd v do p qk eg o X dv states dstates".split()),
    ),
    "transition": Kernel(
        accesses=transition_accesses,
        copied=tuple("k q kd qd kr INV mqk".split()),
    ),
    "gradients": Kernel(
        accesses=gradients_accesses,
        copied=tuple("g k q do dv S dS X INV raw".split()),
    ),
}


def _kernel(plan: Plan, kernel: str | None) -> Kernel | None:
    return KERNELS.get(plan.name.split("/")[0] if kernel is None else kernel)


def accesses(plan: Plan, kernel: str | None = None) -> list[Access]:
    """The accesses of a kernel under a plan; the default kernel is the plan's name before "/"."""
    found = _kernel(plan, kernel)
    if found is None:
        raise ValueError(f"kernel={kernel or plan.name!r} is not one of {', '.join(KERNELS)}")
    return found.accesses(plan)


def audit(plan: Plan, kernel: str | None = None) -> list[AuditRow]:
    """Bank conflicts of every access of a kernel, in the order of the kernel's roles."""
    rows = []
    for access in accesses(plan, kernel):
        ideal, per_shift = ideal_wavefronts(access), _per_shift(access)
        extra = access.count * (sum(per_shift) - ideal * len(per_shift)) / len(per_shift)
        rows.append(
            AuditRow(
                access.name,
                access.tile.name,
                access.kind,
                ideal,
                max(per_shift),
                ways(access),
                access.count,
                round(extra),
            )
        )
    return rows


def describe(plan: Plan, kernel: str | None = None) -> str:
    """Text table of the audit, with totals of wavefronts (cycles of shared memory) per chunk."""
    rows = audit(plan, kernel)
    head = ("access", "tile", "kind", "ideal", "actual", "ways", "per chunk", "extra cycles")
    extra, ideal = sum(r.extra_cycles for r in rows), sum(r.ideal * r.count for r in rows)
    problems = legality(plan, kernel)
    return "\n".join(
        [
            f"{plan.name}: {ideal} wavefronts per chunk and {extra} extra by bank conflicts",
            format_table(head, [tuple(map(str, row)) for row in rows]),
            *(f"problem: {p}" for p in problems),
        ]
    )


# ---- legality


def legality(plan: Plan, kernel: str | None = None) -> list[str]:
    """Problems that the hardware would refuse or answer wrongly; empty when fine.

    Tiles moved by TMA or bulk copies (every tile, for a kernel the audit doesn't know) need row
    starts and row sizes in multiples of 16 bytes; every access must be aligned to its width and
    contiguous within the row.
    """
    known = _kernel(plan, kernel)
    problems = []
    for tile in plan.tiles:
        if known is None or tile.name in known.copied:
            problems += copy_problems(tile)
    for access in known.accesses(plan) if known else ():
        problems += access_problems(access)
    return problems


def copy_problems(tile: Tile) -> list[str]:
    """Why TMA or bulk copies could not fill this tile."""
    problems = []
    row_bytes = tile.shape[1] * tile.itemsize
    if row_bytes % BULK_BYTES:
        problems.append(f"{tile.name}: rows of {row_bytes} bytes are not a multiple of 16")
    for stage in range(tile.stages):
        for row in range(tile.shape[0]):
            start = tile.byte_offset(row, 0, stage)
            if start % BULK_BYTES:
                problems.append(
                    f"{tile.name}: row {row} of stage {stage} starts at byte {start}, "
                    "not a multiple of 16"
                )
                break
    if isinstance(tile.layout, Swizzle128):
        atom = tile.alignment
        if tile.offset % atom or tile.stage_bytes % atom:
            problems.append(f"{tile.name}: swizzled, but its stages are not aligned to {atom}")
        if tile.shape[0] > TMA_BOX_ROWS or tile.shape[0] % SWIZZLE_ROWS:
            problems.append(f"{tile.name}: {tile.shape[0]} rows are not one TMA box")
    return problems


def access_problems(access: Access) -> list[str]:
    """Why an instruction could not make this access: width, alignment, contiguity, bounds."""
    tile, size = access.tile, LANE_BYTES[access.kind]
    elements = max(1, size // tile.itemsize)
    if size % tile.itemsize:
        return [f"{access.name}: {size} bytes are not whole elements of {tile.dtype}"]
    for dr, dc in access.shifts:
        for r, c in access.coords:
            row, col = r + dr, c + dc
            if row >= tile.shape[0] or col + elements > tile.shape[1]:
                return [f"{access.name}: ({row}, {col}) is outside {tile.name} {tile.shape}"]
            start = tile.byte_offset(row, col)
            if start % size:
                return [
                    f"{access.name}: {access.kind} of {tile.name} ({row}, {col}) is at byte "
                    f"{start}, not a multiple of {size}"
                ]
            if tile.byte_offset(row, col + elements - 1) - start != (elements - 1) * tile.itemsize:
                return [f"{access.name}: {tile.name} ({row}, {col}) is not contiguous"]
    return []
