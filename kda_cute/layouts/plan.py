"""Plans: the tiles of one kernel packed into one scratch stack of shared memory, with explicit
byte offsets.

A kernel's chunk is an ordered list of named steps, and every tile names the first and the last
step in which its bytes are live. Two tiles may share bytes only if those intervals don't meet. The
packer obeys that rule, and `Plan.check` verifies it again on the finished offsets, so a plan that
breaks it can't exist, however it was made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from .tile import LayoutError, Tile, round_up

SMEM_PER_CTA = 232_448  # bytes: 227 KiB, the most one CTA may ask for on sm_90
SMEM_PER_SM = 233_472  # bytes: 228 KiB
SMEM_RESERVED_PER_CTA = 1_024  # bytes the driver takes for every CTA
MAX_CTAS_PER_SM = 32


@dataclass(frozen=True)
class Plan:
    """Placed tiles of a kernel; offsets and sizes in bytes. Hashable: it can be part of a key."""

    name: str
    steps: tuple[str, ...]
    tiles: tuple[Tile, ...]
    limit: int = SMEM_PER_CTA

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def build(
        cls,
        name: str,
        steps: Iterable[str],
        tiles: Iterable[Tile],
        *,
        limit: int = SMEM_PER_CTA,
        share: Mapping[str, str] | None = None,
    ) -> Plan:
        """Pack tiles, largest first, each at the lowest offset that is free during its lifetime.

        share={"a": "b"} forces tile a to b's offset. LayoutError names both tiles when their
        lifetimes meet, and the biggest tiles when the total passes `limit` bytes.
        """
        steps = tuple(steps)
        tiles = [
            replace(t, first=t.first or steps[0], last=t.last or steps[-1], offset=0) for t in tiles
        ]
        _check_steps_and_names(name, steps, tiles)
        units = _units(name, steps, tiles, dict(share or {}))
        units.sort(key=lambda unit: -max(t.nbytes for t in unit))  # stable: ties in the given order
        placed: dict[str, Tile] = {}
        for unit in units:
            offset = _lowest_free(steps, unit, placed.values())
            placed |= {t.name: replace(t, offset=offset) for t in unit}
        return cls(name, steps, tuple(placed[t.name] for t in tiles), limit)

    def check(self) -> None:
        """Raise LayoutError unless steps, names, every pair of tiles and the total are right."""
        _check_steps_and_names(self.name, self.steps, self.tiles)
        for a, b in combinations(self.tiles, 2):
            common = _common_steps(self.steps, a, b)
            if common and _bytes_meet(a, b):
                raise LayoutError(
                    f"plan {self.name}: tiles {a.name} (bytes {a.offset} to {a.offset + a.nbytes}) "
                    f"and {b.name} ({b.offset} to {b.offset + b.nbytes}) share bytes, "
                    f"but both are live in {_words(common)}"
                )
        if self.total_bytes > self.limit:
            biggest = sorted(self.tiles, key=lambda t: -t.nbytes)[:4]
            raise LayoutError(
                f"plan {self.name}: {self.total_bytes} bytes of shared memory, "
                f"the limit is {self.limit}; "
                f"the biggest tiles are {', '.join(f'{t.name} {t.nbytes}' for t in biggest)}"
            )

    def __getitem__(self, name: str) -> Tile:
        for tile in self.tiles:
            if tile.name == name:
                return tile
        raise KeyError(f"plan {self.name} has no tile {name!r}; it has {', '.join(self.names)}")

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tiles, in the order they were given."""
        return tuple(t.name for t in self.tiles)

    @property
    def total_bytes(self) -> int:
        """Bytes of the scratch stack: what the kernel allocates, with 1024-byte alignment."""
        return max((t.offset + t.nbytes for t in self.tiles), default=0)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs of this plan that shared memory lets run together on one SM."""
        per_cta = round_up(self.total_bytes, 128) + SMEM_RESERVED_PER_CTA
        return min(MAX_CTAS_PER_SM, SMEM_PER_SM // per_cta)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change when anything in the plan does; the same in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def live(self, step: str) -> tuple[Tile, ...]:
        """Tiles whose bytes hold live data in `step`."""
        i = self.steps.index(step)
        return tuple(
            t for t in self.tiles if self.steps.index(t.first) <= i <= self.steps.index(t.last)
        )

    def describe(self) -> str:
        """Text table, one line per tile in order of offset; offsets and sizes in bytes."""
        head = ("tile", "shape", "dtype", "layout", "stages", "offset", "bytes", "lifetime")
        rows = [
            (
                t.name,
                f"{t.shape[0]}x{t.shape[1]}",
                t.dtype,
                str(t.layout),
                str(t.stages),
                str(t.offset),
                str(t.nbytes),
                f"{t.first}..{t.last}",
            )
            for t in sorted(self.tiles, key=lambda t: (t.offset, t.name))
        ]
        title = (
            f"{self.name}: {self.total_bytes} of {self.limit} bytes, "
            f"{self.ctas_per_sm} CTA{'s' if self.ctas_per_sm > 1 else ''} per SM, steps {' > '.join(self.steps)}"
        )
        return title + "\n" + format_table(head, rows)


def format_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Left-aligned columns, numbers right-aligned."""
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]

    def line(cells: tuple[str, ...]) -> str:
        return "  ".join(
            c.rjust(w) if c.lstrip("-").isdigit() else c.ljust(w)
            for c, w in zip(cells, widths, strict=True)
        ).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, rows)])


def _words(steps: Iterable[str]) -> str:
    return "step(s) " + ", ".join(steps)


def _common_steps(steps: tuple[str, ...], a: Tile, b: Tile) -> tuple[str, ...]:
    """Steps in which both tiles are live."""
    first = max(steps.index(a.first), steps.index(b.first))
    last = min(steps.index(a.last), steps.index(b.last))
    return steps[first : last + 1] if first <= last else ()


def _bytes_meet(a: Tile, b: Tile) -> bool:
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def _check_steps_and_names(plan: str, steps: tuple[str, ...], tiles: Iterable[Tile]) -> None:
    if not steps or len(set(steps)) != len(steps):
        raise LayoutError(f"plan {plan}: steps must be one or more different names, not {steps}")
    seen: set[str] = set()
    for tile in tiles:
        if tile.name in seen:
            raise LayoutError(f"plan {plan}: two tiles are named {tile.name}")
        seen.add(tile.name)
        for step in (tile.first, tile.last):
            if step not in steps:
                raise LayoutError(
                    f"plan {plan}: tile {tile.name} names step {step!r}, not one of {steps}"
                )
        if steps.index(tile.first) > steps.index(tile.last):
            raise LayoutError(
                f"plan {plan}: tile {tile.name} ends in {tile.last}, "
                f"before it begins in {tile.first}"
            )


def _units(
    plan: str, steps: tuple[str, ...], tiles: list[Tile], share: dict[str, str]
) -> list[list[Tile]]:
    """Tiles grouped by common offset: those chained by `share` together, all others alone."""
    by_name = {t.name: t for t in tiles}
    for guest, host in share.items():
        for tile in (guest, host):
            if tile not in by_name:
                raise LayoutError(f"plan {plan}: share names {tile!r}, which is not a tile")

    def root(name: str) -> str:
        seen = [name]
        while name in share:
            name = share[name]
            if name in seen:
                raise LayoutError(
                    f"plan {plan}: share goes in a circle, {' > '.join([*seen, name])}"
                )
            seen.append(name)
        return name

    units: dict[str, list[Tile]] = {}
    for tile in tiles:
        units.setdefault(root(tile.name), []).append(tile)
    for unit in units.values():
        for a, b in combinations(unit, 2):
            common = _common_steps(steps, a, b)
            if common:
                raise LayoutError(
                    f"plan {plan}: tiles {a.name} and {b.name} can't share bytes: "
                    f"both are live in {_words(common)}"
                )
    return list(units.values())


def _lowest_free(steps: tuple[str, ...], unit: list[Tile], placed: Iterable[Tile]) -> int:
    """Lowest aligned byte offset at which no tile of the unit meets a placed tile of a meeting
    lifetime."""
    alignment = max(t.alignment for t in unit)
    obstacles = [(t, p) for p in placed for t in unit if _common_steps(steps, t, p)]
    ends = {round_up(p.offset + p.nbytes, alignment) for _, p in obstacles}
    for offset in sorted({0} | ends):
        if not any(_bytes_meet(replace(t, offset=offset), p) for t, p in obstacles):
            return offset
    raise AssertionError("unreachable: the end of all obstacles is free")
