"""The scratch stack of a plan over the steps of its kernel: who lives where, and how much is live."""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

from ..layouts.plan import SMEM_PER_SM, SMEM_RESERVED_PER_CTA, Plan, format_table
from ..layouts.tile import Tile


class Step(NamedTuple):
    """A step of the kernel: bytes of its live tiles, and their names by offset."""

    name: str
    live_bytes: int
    tiles: tuple[str, ...]


class Shared(NamedTuple):
    """Two tiles that hold the same bytes at different times."""

    first: str
    then: str
    bytes: int


def steps(plan: Plan) -> list[Step]:
    """Every step, in order."""
    made = []
    for name in plan.steps:
        live = sorted(plan.live(name), key=lambda tile: tile.offset)
        made.append(Step(name, sum(t.nbytes for t in live), tuple(t.name for t in live)))
    return made


def peak(plan: Plan) -> Step:
    """The step with the most live bytes, the first of equals."""
    return max(steps(plan), key=lambda step: step.live_bytes)


def sharing(plan: Plan) -> list[Shared]:
    """Pairs of tiles on common bytes, in order of time."""
    found = []
    for a, b in combinations(plan.tiles, 2):
        common = min(a.offset + a.nbytes, b.offset + b.nbytes) - max(a.offset, b.offset)
        if common > 0:
            first, then = sorted((a, b), key=lambda tile: plan.steps.index(tile.first))
            found.append(Shared(first.name, then.name, common))
    order = {tile.name: (plan.steps.index(tile.first), tile.offset) for tile in plan.tiles}
    return sorted(found, key=lambda pair: (order[pair.first], order[pair.then]))


def residency(plan: Plan) -> str:
    """How many CTAs share an SM, in words."""
    return f"{plan.ctas_per_sm} CTA{'s' if plan.ctas_per_sm > 1 else ''} per SM"


def most_bytes(ctas: int) -> int:
    """The most shared memory of a CTA with which so many fit an SM."""
    return (SMEM_PER_SM // ctas - SMEM_RESERVED_PER_CTA) // 128 * 128


def lives(plan: Plan, tile: Tile) -> list[bool]:
    """For each step, whether the tile is live in it."""
    first, last = plan.steps.index(tile.first), plan.steps.index(tile.last)
    return [first <= i <= last for i in range(len(plan.steps))]


def describe(plan: Plan) -> str:
    """Text: a line per tile by offset, a column per step, then the live bytes of each step."""
    head = ("tile", "offset", "bytes", *plan.steps)
    rows = [
        (
            tile.name,
            str(tile.offset),
            str(tile.nbytes),
            *(
                "#" * len(s) if live else ""
                for s, live in zip(plan.steps, lives(plan, tile), strict=True)
            ),
        )
        for tile in sorted(plan.tiles, key=lambda t: (t.offset, t.name))
    ]
    rows.append(("live bytes", "", "", *(str(step.live_bytes) for step in steps(plan))))
    top, separate = peak(plan), sum(t.nbytes for t in plan.tiles)
    lines = [
        f"{plan.name}: {plan.total_bytes} of {plan.limit} bytes, {residency(plan)}",
        f"peak: {top.live_bytes} bytes live in {top.name}; side by side the tiles would take {separate}",
        "",
        format_table(head, rows),
    ]
    pairs = sharing(plan)
    if pairs:
        lines += ["", "on the same bytes, one after the other:"]
        lines += [f"  {p.first} then {p.then}: {p.bytes} bytes" for p in pairs]
    return "\n".join(lines)


def as_dict(plan: Plan) -> dict[str, Any]:
    """The same for a program."""
    return {
        "plan": plan.name,
        "bytes": plan.total_bytes,
        "limit": plan.limit,
        "ctas_per_sm": plan.ctas_per_sm,
        "peak": peak(plan)._asdict(),
        "steps": [step._asdict() for step in steps(plan)],
        "sharing": [pair._asdict() for pair in sharing(plan)],
        "tiles": [
            {
                "name": t.name,
                "shape": list(t.shape),
                "dtype": t.dtype,
                "layout": str(t.layout),
                "stages": t.stages,
                "offset": t.offset,
                "bytes": t.nbytes,
                "first": t.first,
                "last": t.last,
            }
            for t in sorted(plan.tiles, key=lambda t: (t.offset, t.name))
        ],
    }
