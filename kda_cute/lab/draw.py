"""Pictures: a tile as cells of banks, and the scratch stack as a timeline."""

from __future__ import annotations

from collections import defaultdict

from ..layouts import audit
from ..layouts.audit import BANK_BYTES, BANKS, LANE_BYTES, Access
from ..layouts.plan import Plan
from ..layouts.tile import Dense, Swizzle128, Tile
from . import stack
from .svg import Picture, width_of

LINE_BYTES = BANKS * BANK_BYTES
PIECE = 16  # bytes of one coloured cell
COLOURS = 8
BANK_WIDTH, ROW_HEIGHT = 20, 20
LEFT = 96


# ---------------------------------------------------------------- a tile
def tile_picture(tile: Tile, *, rows: int = 8, access: Access | None = None) -> str:
    """SVG of the tile's first rows in shared memory: a line is 128 bytes, a column one of 32 banks.

    A cell is 16 bytes of a row.  Its colour is its place in the row, counted modulo 8: the same
    colours under one another are the same columns of different rows in the same banks.  With an
    `access` of this tile, the words of its first instruction are outlined, with the lanes that touch
    them, and those that wait for another word of their bank in red.
    """
    rows = min(rows, tile.shape[0])
    if rows < 1:
        raise ValueError(f"rows={rows} must be at least 1")
    cells = _cells(tile, rows)
    lines = sorted({line for line, _ in cells})
    title = f"{tile.name}, {tile.shape[0]} x {tile.shape[1]} {tile.dtype}, {tile.layout}: banks of its first {rows} rows"
    picture = Picture(
        title, "Lines are 128 bytes of shared memory, columns its 32 banks of 4 bytes."
    )
    picture.text(
        16,
        28,
        f"{tile.name}  [{tile.shape[0]}, {tile.shape[1]}] {tile.dtype}, {tile.layout}",
        size=17,
        bold=True,
    )
    words = "each line: 128 bytes of shared memory; each cell: 16 bytes of a row (r) from a column (c) on"
    picture.text(16, 50, words, css="faint")
    top = 86
    for bank in range(0, BANKS, 4):
        picture.text(
            LEFT + (bank + 0.5) * BANK_WIDTH,
            top - 8,
            str(bank),
            size=12,
            css="faint",
            anchor="middle",
        )
    picture.text(LEFT - 8, top - 8, "byte / bank", size=12, css="faint", anchor="end")
    y = {}
    for i, line in enumerate(lines):
        y[line] = top + i * ROW_HEIGHT
        picture.text(
            LEFT - 8, y[line] + 14, str(line * LINE_BYTES), size=12, css="faint", anchor="end"
        )
        picture.rect(LEFT, y[line], BANKS * BANK_WIDTH, ROW_HEIGHT - 2, "empty")
    for (line, byte), (row, col, size) in sorted(cells.items()):
        x, width = LEFT + byte / BANK_BYTES * BANK_WIDTH, size / BANK_BYTES * BANK_WIDTH
        colour = f"c{col * tile.itemsize // PIECE % COLOURS}"
        note = f"row {row}, columns {col} to {col + size // tile.itemsize - 1}"
        picture.rect(x + 0.5, y[line], width - 1, ROW_HEIGHT - 2, colour, note=note)
        label = f"r{row} c{col}"
        if access is None and width_of(label, 11) < width:
            picture.text(x + width / 2, y[line] + 13.5, label, size=11, css="on", anchor="middle")
    bottom = top + len(lines) * ROW_HEIGHT + 22
    if access is not None:
        bottom = _draw_access(picture, access, y, bottom)
    picture.text(16, bottom + 8, "colour: place of the 16 bytes in their row, in bytes modulo 128")
    entries = [(f"c{i}", f"{PIECE * i} to {PIECE * i + PIECE - 1}") for i in range(COLOURS)]
    held = sum(size for _, _, size in cells.values())
    entries += [("empty", "padding")] if held < len(lines) * LINE_BYTES else []
    picture.legend(16, bottom + 32, entries, LEFT + BANKS * BANK_WIDTH)
    return picture.render()


def _cells(tile: Tile, rows: int) -> dict[tuple[int, int], tuple[int, int, int]]:
    """(line, byte in it) -> (row, first column, bytes) of pieces of up to 16 bytes, from the tile's
    first byte on.
    """
    base, found = tile.byte_offset(0, 0) // LINE_BYTES, {}
    step = max(1, PIECE // tile.itemsize)
    for row in range(rows):
        for col in range(0, tile.shape[1], step):
            line, byte = divmod(tile.byte_offset(row, col), LINE_BYTES)
            count = min(step, tile.shape[1] - col)
            found[line - base, byte] = (row, col, count * tile.itemsize)
    return found


def touched(access: Access) -> dict[int, list[int]]:
    """4-byte word of shared memory -> the lanes that touch it, in the access's first instruction."""
    size, words = LANE_BYTES[access.kind], defaultdict(list)
    for lane, start in enumerate(access.offsets(access.shifts[0])):
        for word in range(start // BANK_BYTES, (start + size - 1) // BANK_BYTES + 1):
            words[word].append(lane)
    return dict(words)


def waiting(access: Access) -> set[int]:
    """Words that take a wavefront of their own, since another word of their bank is served first."""
    size, late = LANE_BYTES[access.kind], set()
    together = max(1, min(32, LINE_BYTES // size))
    words = touched(access)
    if len({word % BANKS for word in words}) == len(words):
        return set()
    for first in range(0, 32, together):
        seen: dict[int, int] = {}
        for word in sorted(
            w for w, lanes in words.items() if set(lanes) & set(range(first, first + together))
        ):
            if seen.setdefault(word % BANKS, word) != word:
                late.add(word)
    return late


def _draw_access(picture: Picture, access: Access, y: dict[int, float], bottom: float) -> float:
    base = access.tile.byte_offset(0, 0) // LINE_BYTES
    late = waiting(access)
    for word, lanes in touched(access).items():
        line, bank = divmod(word, BANKS)
        if line - base not in y:
            continue
        x, top = LEFT + bank * BANK_WIDTH, y[line - base]
        css, width = ("bad", 2.5) if word in late else ("strong", 1.5)
        picture.rect(x + 1, top + 0.5, BANK_WIDTH - 2, ROW_HEIGHT - 3, css, stroke=width)
        many = f"{lanes[0]}" if len(lanes) == 1 else f"{lanes[0]}+"
        picture.text(x + BANK_WIDTH / 2, top + 13, many, size=10, css="on", anchor="middle")
    actual, ideal = audit.wavefronts(access), audit.ideal_wavefronts(access)
    words = f"{access.name}: {access.kind}, wavefronts {actual}, without conflicts {ideal}"
    picture.text(16, bottom, words, bold=True)
    more = "outlined: words of one instruction, by lane; + where lanes share one"
    picture.text(16, bottom + 20, more, css="faint")
    if late:
        picture.text(
            16, bottom + 40, "red: words that wait for another word of their bank", css="warning"
        )
    return bottom + (58 if late else 40)


# ---------------------------------------------------------------- the stack
STACK_HEIGHT, STEP_WIDTH = 660, 118
KINDS = (("c0", "swizzled"), ("c1", "padded"), ("c2", "dense"))


def stack_picture(plan: Plan) -> str:
    """SVG of the scratch stack: bytes upwards, the kernel's steps to the right."""
    title = f"{plan.name}: scratch stack over the steps"
    picture = Picture(
        title, "A box is a tile: its bytes upwards, the steps in which it is live to the right."
    )
    left, top = 92, 104
    width = len(plan.steps) * STEP_WIDTH
    scale = STACK_HEIGHT / max(plan.limit, plan.total_bytes)
    base = top + STACK_HEIGHT

    def height(byte: float) -> float:
        return base - byte * scale

    picture.text(16, 30, plan.name, size=17, bold=True)
    words = f"{plan.total_bytes:,} of {plan.limit:,} bytes; {stack.residency(plan)}"
    separate = sum(tile.nbytes for tile in plan.tiles)
    if separate > plan.total_bytes:
        words += f"; side by side the tiles would take {separate:,}"
    picture.text(16, 52, words, css="faint")
    picture.rect(left, top, width, STACK_HEIGHT, "empty")
    step_bytes = 32 * 1024
    for byte in range(0, plan.limit + 1, step_bytes):
        picture.line([(left - 5, height(byte)), (left, height(byte))])
        picture.text(
            left - 9, height(byte) + 4, f"{byte // 1024} KiB", size=12, css="faint", anchor="end"
        )
    _stack_steps(picture, plan, left, top, base)
    labels = []
    for tile in plan.tiles:
        first, last = plan.steps.index(tile.first), plan.steps.index(tile.last)
        x, w = left + first * STEP_WIDTH, (last - first + 1) * STEP_WIDTH
        y, h = height(tile.offset + tile.nbytes), tile.nbytes * scale
        picture.rect(x + 1, y, w - 2, h, _kind(tile), note=_note(tile))
        picture.rect(x + 1, y, w - 2, h, "edge", stroke=0.8)
        words = _fitting(tile, w) if h >= 15 else ""
        for stage in range(1, tile.stages) if h / tile.stages > 4 else ():
            _stage_line(
                picture, height(tile.offset + stage * tile.stage_bytes), x, w, y + h / 2, words
            )
        if words:
            picture.text(x + w / 2, y + h / 2 + 4.5, words, css="on", anchor="middle")
        else:
            labels.append((y + h / 2, x + w - 1, tile))
    for byte, words in _limits(plan):
        picture.line(
            [(left, height(byte)), (left + width + 8, height(byte))], "bad", width=1.5, dashed=True
        )
        picture.text(left + width, height(byte) - 5, words, size=12, css="warning", anchor="end")
    _side_labels(picture, labels, left + width, top, base)
    entries = [(css, words) for css, words in KINDS if any(_kind(t) == css for t in plan.tiles)]
    picture.legend(left, base + 66, [*entries, ("empty", "free")], left + width + 200)
    return picture.render()


def _stage_line(picture: Picture, at: float, x: float, w: float, middle: float, words: str) -> None:
    """Where the next stage of a tile begins; not through the words in its middle."""
    gap = width_of(words, 13) / 2 + 10 if words and abs(at - middle) < 8 else 0
    for start, end in ((x + 1, x + w / 2 - gap), (x + w / 2 + gap, x + w - 1)):
        picture.line([(start, at), (end, at)], "edge", width=0.8, dashed=True)


def _kind(tile: Tile) -> str:
    if isinstance(tile.layout, Swizzle128):
        return "c0"
    return "c2" if isinstance(tile.layout, Dense) else "c1"


def _note(tile: Tile) -> str:
    stages = f", {tile.stages} stages" if tile.stages > 1 else ""
    return (
        f"{tile.name} [{tile.shape[0]}, {tile.shape[1]}] {tile.dtype}, {tile.layout}{stages}: "
        f"{tile.nbytes:,} bytes at {tile.offset:,}, {tile.first} to {tile.last}"
    )


def _fitting(tile: Tile, width: float) -> str:
    stages = f" x {tile.stages}" if tile.stages > 1 else ""
    for words in (
        f"{tile.name}  [{tile.shape[0]}, {tile.shape[1]}] {tile.dtype}{stages}",
        f"{tile.name} {tile.dtype}{stages}",
    ):
        if width_of(words, 13) < width - 10:
            return words
    return tile.name


def _limits(plan: Plan) -> list[tuple[int, str]]:
    found = [(plan.limit, f"limit of a CTA: {plan.limit:,}")]
    if plan.ctas_per_sm > 1:
        most = stack.most_bytes(plan.ctas_per_sm)
        found.append((most, f"{plan.ctas_per_sm} CTAs per SM: {most:,} each"))
    return found


def _stack_steps(picture: Picture, plan: Plan, left: float, top: float, base: float) -> None:
    """Names of the steps above, their live bytes below."""
    found = stack.steps(plan)
    peak = stack.peak(plan).name if len({step.live_bytes for step in found}) > 1 else ""
    for i, step in enumerate(found):
        middle = left + (i + 0.5) * STEP_WIDTH
        picture.text(middle, top - 24, step.name, size=14, anchor="middle", bold=True)
        if i:
            picture.line([(left + i * STEP_WIDTH, top), (left + i * STEP_WIDTH, base)])
        words = f"{step.live_bytes:,}" + (" (peak)" if step.name == peak else "")
        picture.text(middle, base + 20, words, anchor="middle", bold=step.name == peak)
    picture.text(left - 9, base + 20, "live bytes", size=12, css="faint", anchor="end")


def _side_labels(
    picture: Picture, labels: list[tuple[float, float, Tile]], x: float, top: float, base: float
) -> None:
    """Names of flat tiles to the right, moved apart, each with a line to its tile."""
    gap, at = 17.0, base
    placed = []
    for y, end, tile in sorted(labels, key=lambda label: -label[0]):
        at = min(y, at)
        placed.append((at, y, end, tile))
        at -= gap
    lift = max(0.0, top - at)  # labels of a crowded stack start lower
    for y_label, y, end, tile in placed:
        y_text = y_label + lift
        picture.line([(end, y), (x + 10, y), (x + 26, y_text)])
        stages = f" x {tile.stages}" if tile.stages > 1 else ""
        words = f"{tile.name}  {tile.nbytes:,} B{stages and f' ({tile.stages} stages)'}"
        picture.text(x + 31, y_text + 4, words, size=12)
