"""Audit of a plan without a GPU: bank conflicts of the kernel's accesses, and legality.

Shared memory has 32 banks of 4 bytes and serves one wavefront per cycle: 32 lanes of 4 bytes, 16 of
8, or 8 of 16 (one 8x8 matrix of ldmatrix or stmatrix). Lanes that touch the same 4-byte word don't
conflict; different words of one bank take one wavefront each.
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


def ideal_wavefronts(kind: str) -> int:
    """Wavefronts of one warp-wide instruction without conflicts."""
    return max(1, WARP * LANE_BYTES[kind] // (BANKS * BANK_BYTES))


def wavefronts(access: Access) -> int:
    """Wavefronts of one instruction, at the worst of its shifts."""
    return max(_per_shift(access))


def ways(access: Access) -> int:
    """The worst bank multiplicity: 1 is free of conflicts."""
    size = LANE_BYTES[access.kind]
    return max(max(group_ways(access.offsets(s), size)) for s in access.shifts)


def _per_shift(access: Access) -> list[int]:
    size = LANE_BYTES[access.kind]
    return [sum(group_ways(access.offsets(s), size)) for s in access.shifts]


# ---- patterns of lanes; lane l of mma.sync has r = l // 4 and c = l % 4


def pairs() -> tuple[Coord, ...]:
    """(r, 2c): two neighbouring columns of an accumulator, or of an operand contiguous in k."""
    return tuple((lane // 4, 2 * (lane % 4)) for lane in range(WARP))


def strided() -> tuple[Coord, ...]:
    """(2c, r): an operand whose k runs along the rows, or a transposed accumulator."""
    return tuple((2 * (lane % 4), lane // 4) for lane in range(WARP))


def matrices() -> tuple[Coord, ...]:
    """Row addresses of ldmatrix or stmatrix x4 over a 16x16 block."""
    return tuple((lane % 16, 8 * (lane // 16)) for lane in range(WARP))


def grid(rows: Sequence[int], cols: Sequence[int]) -> tuple[Coord, ...]:
    """All shifts (row, col)."""
    return tuple((r, c) for r in rows for c in cols)


# ---- kernels


def bwd_recurrence_accesses(plan: Plan) -> list[Access]:
    """What the 4 value warps and 8 key warps of bwd_recurrence access in one chunk.

    A value warp owns 32 rows of V, a key warp 16 columns of K. The precision of the plan is read
    off the dtype of dS.
    """
    tokens = plan["kd"].shape[0]
    wide = range(0, 128, 8)
    accesses: list[Access] = []

    def add(name: str, tile: str, kind: str, coords, per_warp: int, warps: int, shifts) -> None:
        accesses.append(Access(name, plan[tile], kind, coords, per_warp * warps, shifts))

    def value(name: str, tile: str, kind: str, coords, per_warp: int, shifts=((0, 0),)) -> None:
        add(f"value: {name}", tile, kind, coords, per_warp, 4, shifts)

    def key(name: str, tile: str, kind: str, coords, per_warp: int, shifts=((0, 0),)) -> None:
        add(f"key: {name}", tile, kind, coords, per_warp, 8, shifts)

    half_rows, all_rows = range(0, tokens, 8), (0, 1, 8, 9)
    for tile in ("kd", "kr"):
        value(f"{tile} as B, K contiguous", tile, "lds64", pairs(), 32, grid(half_rows, wide))
    for tile in ("qd", "kd"):
        value(f"{tile} as B, tokens strided", tile, "lds32", strided(), 64, grid(all_rows, wide))
    for tile in ("qd", "kd", "ki"):
        key(f"{tile} as B, tokens strided", tile, "lds32", strided(), 8, grid(all_rows, wide))
    for tile in ("ki", "qd", "kr"):
        key(f"{tile} elementwise", tile, "lds64", pairs(), 4, grid(half_rows, wide))

    blocks = grid((0,), range(0, 128, 16))
    state_blocks = grid(range(0, 128, 16), range(0, 128, 16))
    value("do^T as A", "do", "ldmatrix_trans", matrices(), 2, blocks)
    value("v^T as C", "v", "ldmatrix_trans", matrices(), 2, blocks)
    value("S^T as A", "states", "ldmatrix", matrices(), 16, state_blocks)
    value("Mqk as B", "mqk", "ldmatrix_trans", matrices(), 1)
    value("INV as B", "inv", "ldmatrix_trans", matrices(), 1)
    value("INV^T as B", "inv", "ldmatrix", matrices(), 1)
    value("dv store", "dv", "stmatrix_trans", matrices(), 2, blocks)
    key("do as A", "do", "ldmatrix", matrices(), 8, blocks)
    key("S^T as B", "states", "ldmatrix_trans", matrices(), 8, state_blocks)

    if plan["dS"].dtype == "f32":
        by_8 = range(0, 128, 8)
        v_rows = tuple(r + i for r in by_8 for i in (0, 1))
        value("dS store", "dS", "sts64", pairs(), 64, grid(by_8, wide))
        key("dS as B", "dS", "lds32", strided(), 64, grid(v_rows, wide))
        for tile in ("U", "dvc"):
            value(f"{tile} store", tile, "sts32", strided(), 16, grid(all_rows, wide))
            key(f"{tile} as A", tile, "lds64", pairs(), 32, grid(half_rows, wide))
    else:
        value("dS store", "dS", "stmatrix", matrices(), 16, state_blocks)
        key("dS as B", "dS", "ldmatrix_trans", matrices(), 8, state_blocks)
        for tile in ("U", "dvc"):
            value(f"{tile} store", tile, "stmatrix_trans", matrices(), 2, blocks)
            key(f"{tile} as A", tile, "ldmatrix", matrices(), 8, blocks)

    # One key warp makes each 16x16 product, all eight read it back.
    for tile in ("dM", "dL", "dLb"):
        add(f"key: {tile} store", tile, "sts64", pairs(), 4, 1, grid(half_rows, (0, 8)))
    for tile in ("dM", "dLb"):
        key(f"{tile} as A", tile, "lds64", pairs(), 4, grid(half_rows, (0, 8)))
        key(f"{tile}^T as A", tile, "lds32", strided(), 8, grid(all_rows, (0, 8)))
    return accesses


@dataclass(frozen=True)
class Kernel:
    """What the audit knows of a kernel: its accesses, and the tiles moved by TMA or bulk copies."""

    accesses: Callable[[Plan], list[Access]]
    copied: tuple[str, ...]


KERNELS: dict[str, Kernel] = {
    "bwd_recurrence": Kernel(
        accesses=bwd_recurrence_accesses,
        copied=tuple("kd qd kr ki do v inv mqk g_total states dv".split()),
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
        ideal, per_shift = ideal_wavefronts(access.kind), _per_shift(access)
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
