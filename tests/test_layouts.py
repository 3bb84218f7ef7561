"""Shared-memory layouts, plans and their audit: all on the host, no GPU."""

import os
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_cute.layouts import (
    Dense,
    GroupPadded,
    LayoutError,
    Plan,
    RowPadded,
    Swizzle128,
    Tile,
    audit,
    variants,
)
from kda_cute.layouts.tile import ITEMSIZE

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is first imported

KERNEL = "bwd_recurrence"
ALL_PLANS = [
    (layout, precision)
    for layout in variants.names(KERNEL)
    for precision in variants.precisions(KERNEL)
]
FP32_LAYOUTS = [Dense(), RowPadded(132), RowPadded(136), GroupPadded(4, 136, 552)]


TRANSITION = variants.plan("transition", "default", "bf16")
SCAN = [
    variants.plan("scan", "default", "bf16", groups=groups, **options)
    for groups in (1, 2)
    for options in ({"save": False}, {"save": True}, {"reverse": True})
]
SCAN_TOTALS = (207_232, 231_808, 223_616, 165_504, 214_656, 198_272)


def plan_id(p):
    return p.name


def plan(layout="default", precision="tf32"):
    return variants.plan(KERNEL, layout, precision)


def rebuilt(base, **kwargs):
    """The tiles of a plan, packed again with other options."""
    return Plan.build(base.name, base.steps, base.tiles, **kwargs)


# ---- tiles


def test_affine_offsets():
    dense = Tile("x", (16, 128), "f32", Dense())
    assert (dense.byte_offset(3, 5), dense.stage_bytes) == (4 * (3 * 128 + 5), 8192)
    rows = Tile("x", (16, 128), "f32", RowPadded(136), stages=2)
    assert rows.byte_offset(3, 5, stage=1) == rows.stage_bytes + 4 * (3 * 136 + 5)
    assert rows.layout.nbytes((16, 128), 4) == 4 * (15 * 136 + 128) == 8672
    assert (rows.stage_bytes, rows.nbytes) == (8704, 17408)
    groups = Tile("x", (16, 128), "f32", GroupPadded(4, 136, 552))
    assert groups.byte_offset(7, 9) == 4 * (552 + 3 * 136 + 9)
    assert groups.layout.row_offsets((16, 128), 4)[:5] == (0, 544, 1088, 1632, 2208)
    assert (groups.layout.nbytes((16, 128), 4), groups.stage_bytes) == (8768, 8832)
    assert groups.copy_bytes == 8192
    assert Tile("x", (16, 16), "f32", RowPadded(24)).stage_bytes == 1536


def test_swizzle_offsets():
    tile = Tile("x", (16, 128), "bf16", Swizzle128(), offset=1024)
    assert tile.alignment == 1024 and tile.stage_bytes == 4096
    assert tile.byte_offset(0, 9) == 1024 + 18
    assert tile.byte_offset(1, 0) == 1024 + 128 + 16  # chunk 0 of row 1 is stored in chunk 1
    assert tile.byte_offset(1, 8) == 1024 + 128  # an element map would say 1024 + 128 + 16 + ...
    assert tile.byte_offset(3, 64) == 1024 + 16 * 128 + 3 * 128 + 3 * 16  # second column block
    assert tile.byte_offset(8, 8) == 1024 + 8 * 128 + 16


@pytest.mark.parametrize(
    ("shape", "dtype", "layout", "words"),
    [
        ((16, 128), "f32", RowPadded(127), "row stride 127"),
        ((16, 128), "f32", GroupPadded(4, 136, 500), "group stride 500"),
        ((18, 128), "f32", GroupPadded(4, 136, 552), "18 rows"),
        ((12, 128), "bf16", Swizzle128(), "8 rows, not 12"),
        ((16, 72), "bf16", Swizzle128(), "not 144"),
        ((16, 128), "f16", Dense(), "'f16'"),
    ],
)
def test_impossible_tiles(shape, dtype, layout, words):
    with pytest.raises(LayoutError, match="tile odd") as error:
        Tile("odd", shape, dtype, layout)
    assert words in str(error.value)


def test_misaligned_offset():
    with pytest.raises(LayoutError, match="tile odd: offset 128 is not a multiple of 1024"):
        Tile("odd", (16, 128), "bf16", Swizzle128(), offset=128)


@st.composite
def tiles(draw, name="x"):
    dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
    kind = draw(st.sampled_from(["dense", "rows", "groups", "swizzle"]))
    cols = draw(st.integers(1, 40))
    rows = draw(st.integers(1, 24))
    if kind == "dense":
        layout = Dense()
    elif kind == "rows":
        layout = RowPadded(cols + draw(st.integers(0, 9)))
    elif kind == "groups":
        group, stride = draw(st.integers(1, 5)), cols + draw(st.integers(0, 9))
        layout = GroupPadded(group, stride, group * stride + draw(st.integers(0, 9)))
        rows = group * draw(st.integers(1, 6))
    else:
        dtype = draw(st.sampled_from(["bf16", "f32"]))
        layout, rows = Swizzle128(), 8 * draw(st.integers(1, 4))
        cols = 128 // ITEMSIZE[dtype] * draw(st.integers(1, 2))
    return Tile(name, (rows, cols), dtype, layout, stages=draw(st.integers(1, 3)))


@settings(max_examples=60, deadline=None)
@given(tiles())
def test_no_two_elements_share_bytes(tile):
    starts = sorted(
        tile.byte_offset(r, c, s)
        for s in range(tile.stages)
        for r in range(tile.shape[0])
        for c in range(tile.shape[1])
    )
    assert all(b - a >= tile.itemsize for a, b in zip(starts, starts[1:], strict=False))
    assert starts[0] == 0 and starts[-1] + tile.itemsize <= tile.nbytes
    assert all(start % tile.itemsize == 0 for start in starts)
    assert tile.stage_bytes % tile.alignment == 0
    row_starts = tuple(tile.byte_offset(r, 0) for r in range(tile.shape[0]))
    assert tile.layout.row_offsets(tile.shape, tile.itemsize) == row_starts


# ---- plans


@pytest.mark.parametrize(
    ("layout", "precision", "total"),
    [
        ("default", "tf32", 227_584),
        ("default", "bf16", 225_408),
        ("padded", "tf32", 225_280),
        ("padded", "bf16", 223_872),
    ],
)
def test_totals(layout, precision, total):
    p = plan(layout, precision)
    assert p.total_bytes == total <= p.limit == 232_448
    assert p.ctas_per_sm == 1
    assert p.name == f"{KERNEL}/{layout}/{precision}"


def assert_apart(p):
    """No two tiles share bytes while both are live, without the plan's own notion of a lifetime."""
    for a, b in combinations(p.tiles, 2):
        live = {s for s in p.steps if a in p.live(s) and b in p.live(s)}
        apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
        assert apart or not live, (a.name, b.name)


@pytest.mark.parametrize(("layout", "precision"), ALL_PLANS)
def test_plan_tiles(layout, precision):
    p = plan(layout, precision)
    assert p.steps == ("load", "solve", "contract", "mix", "store")
    assert_apart(p)
    for tile in p.tiles:
        assert tile.offset % tile.alignment == 0
        small = tile.name in ("dM", "dL", "dLb", "dM_diag")
        assert (tile.first, tile.last) == ("load", "store")
        assert not small or tile.stages == 2  # the roles that share them are a chunk apart
    operands = ("kd", "qd", "kr", "ki", "do", "v", "inv", "mqk", "g_total", "beta")
    assert {p[n].stages for n in operands} == {2 if precision == "tf32" else 3}
    assert {p[n].stages for n in ("states", "dS", "U", "dvc", "dv")} == {1}
    assert {p[n].dtype for n in ("dS", "U", "dvc")} == {"f32" if precision == "tf32" else "bf16"}
    assert "kd" in p and "absent" not in p
    with pytest.raises(KeyError, match="absent"):
        p["absent"]


@pytest.mark.parametrize(("layout", "precision"), ALL_PLANS)
def test_dL_never_shares_with_inv(layout, precision):
    """An early kernel kept dL on INV's bytes while INV was still read: silently wrong gradients."""
    with pytest.raises(LayoutError) as error:
        rebuilt(plan(layout, precision), share={"dL": "inv"})
    message = str(error.value)
    assert "dL" in message.split() and "inv" in message.split()
    assert "load, solve, contract, mix, store" in message


def test_transition_plan():
    p = TRANSITION
    assert_apart(p)
    assert p.total_bytes == 107_648
    assert p.ctas_per_sm == 2 and rebuilt(p, limit=115_712) == replace(p, limit=115_712)
    assert {t.name: t.stages for t in p.tiles if t.stages > 1} == {"rows": 2}  # of a warpgroup each
    assert {n: (p[n].first, p[n].last) for n in p.names} == {
        **dict.fromkeys(("k", "q"), ("load", "gather")),
        **dict.fromkeys(("kd", "qd", "kr", "kr_low"), ("tiles", "store")),
        "rows": ("pairs", "pairs"),
        "INV": ("publish", "store"),
        "L": ("pairs", "publish"),
        "mqk": ("gate", "store"),
        "totals": ("gate", "tiles"),
        "factors": ("gate", "publish"),
        "barriers": ("load", "store"),
    }
    # Two CTAs fit an SM since operands of the levels lie where k and q came, and kd, qd, kr after.
    assert sum(t.nbytes for t in p.tiles) > 115_712


@pytest.mark.parametrize(
    ("guest", "host", "steps"),
    [
        ("rows", "L", "pairs"),  # one level's results leave while another's operands are made
        ("mqk", "k", "gate, gather"),
        ("INV", "L", "publish"),  # INV is X, rounded
        ("kr", "kd", "tiles, invert, publish, multiply, store"),
        ("INV", "kd", "publish, multiply, store"),
    ],
)
def test_transition_tiles_that_cannot_share(guest, host, steps):
    with pytest.raises(LayoutError) as error:
        rebuilt(TRANSITION, share={guest: host})
    message = str(error.value)
    assert {guest, host} <= set(re.findall(r"\w+", message)) and message.endswith(f" {steps}")


def test_operands_wait_until_k_was_gathered():
    """Operands of a level are made of k in registers: not while some warp still reads the tile."""
    p = TRANSITION
    assert p["rows"].offset == p["k"].offset
    early = [replace(t, first="gather") if t.name == "rows" else t for t in p.tiles]
    with pytest.raises(LayoutError, match="rows and k|k and rows") as error:
        Plan.build(p.name, p.steps, early, share={"rows": "k"})
    assert str(error.value).endswith(" gather")


@pytest.mark.parametrize(("p", "total"), list(zip(SCAN, SCAN_TOTALS, strict=True)))
def test_scan_plan(p, total):
    assert_apart(p)
    groups = 1 if "groups=1" in p.name else 2
    assert p.total_bytes == total <= p.limit == 232_448
    assert {(t.first, t.last) for t in p.tiles} == {("load", "store")}
    reverse, save = "reverse=True" in p.name, "save=True" in p.name
    stages = 2 if groups == 2 else 3
    assert {p[n].stages for n in ("kd", "z", "qd", "p", "qk", "eg")} == {stages}
    assert p["barriers"].shape == (1, 2 * stages)
    loaded, staged = ("do", ["dv", "dstates"]) if reverse else ("v", ["o", "X", "states"])
    assert p[loaded].stages == stages * groups
    assert [n for n in staged if n in p] == (staged if reverse or save else ["o"])
    assert {p[n].stages for n in staged if n in p} == {groups}
    for guest, host in ((staged[0], loaded), ("qk", "eg")):  # chunks ahead, chunks behind
        with pytest.raises(LayoutError, match=f"{host} and {guest}|{guest} and {host}") as error:
            rebuilt(p, share={guest: host})
        assert str(error.value).endswith("load, multiply, store")


def test_check_does_not_trust_offsets():
    p = plan()
    moved = tuple(replace(t, offset=p["inv"].offset) if t.name == "dL" else t for t in p.tiles)
    with pytest.raises(LayoutError) as error:
        Plan(p.name, p.steps, moved)
    assert "inv" in str(error.value) and "dL" in str(error.value)
    with pytest.raises(LayoutError, match="inv"):
        replace(p, tiles=moved)


def test_sharing_by_lifetime():
    def tile(name, first, last, cols=32):
        return Tile(name, (8, cols), "f32", Dense(), first=first, last=last)

    early, late = tile("early", "a", "b"), tile("late", "c", "d", cols=48)
    whole = tile("whole", "", "")
    p = Plan.build("toy", "abcd", [early, late, whole])
    assert p["early"].offset == p["late"].offset == 0
    assert (p["whole"].offset, p.total_bytes) == (1536, 2560)
    forced = Plan.build("toy", "abcd", [early, late, whole], share={"late": "early"})
    assert forced["late"].offset == forced["early"].offset
    assert [t.name for t in forced.live("b")] == ["early", "whole"]
    with pytest.raises(LayoutError, match="whole and early|early and whole") as error:
        Plan.build("toy", "abcd", [early, late, whole], share={"whole": "early"})
    assert "a, b" in str(error.value)
    with pytest.raises(LayoutError, match="'nobody'"):
        Plan.build("toy", "abcd", [early, late], share={"late": "nobody"})
    with pytest.raises(LayoutError, match="circle"):
        Plan.build("toy", "abcd", [early, late], share={"late": "early", "early": "late"})


def test_bad_plans():
    x = Tile("x", (8, 32), "f32", Dense())
    with pytest.raises(LayoutError, match="two tiles are named x"):
        Plan.build("toy", "ab", [x, x])
    with pytest.raises(LayoutError, match="step 'z'"):
        Plan.build("toy", "ab", [replace(x, first="z")])
    with pytest.raises(LayoutError, match="before it begins"):
        Plan.build("toy", "ab", [replace(x, first="b", last="a")])
    with pytest.raises(LayoutError, match="different names"):
        Plan.build("toy", "aa", [x])


def test_over_the_limit():
    with pytest.raises(LayoutError) as error:
        rebuilt(plan(), limit=200_000)
    assert all(w in str(error.value) for w in ("227584", "200000", "dS 70656", "states 32768"))


def test_ctas_per_sm():
    def ctas(nbytes):
        return Plan.build("t", "a", [Tile("x", (1, nbytes // 4), "f32", Dense())]).ctas_per_sm

    assert [ctas(n * 1024) for n in (227, 114, 113, 75, 1)] == [1, 1, 2, 3, 32]


def test_plan_is_a_key():
    p = plan()
    assert p is plan() and hash(p) == hash(rebuilt(p)) and p == rebuilt(p)
    assert len({plan(*args).fingerprint for args in ALL_PLANS}) == len(ALL_PLANS)
    assert rebuilt(p).fingerprint == p.fingerprint
    with pytest.raises(FrozenInstanceError):
        p.name = "other"


def test_fingerprint_and_import_without_dsl():
    """Another process gives the same fingerprint, and never imports the DSL."""
    code = (
        "import sys; from kda_cute.layouts import audit, variants; "
        f"p = variants.plan({KERNEL!r}, 'default', 'tf32'); audit.audit(p); p.describe(); "
        "assert 'cutlass' not in sys.modules; print(p.fingerprint)"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == plan().fingerprint


def test_describe_lists_every_tile():
    text = plan().describe()
    assert "227584 of 232448 bytes" in text
    line = next(ln for ln in text.splitlines() if ln.startswith("states "))
    assert line.split()[:3] == ["states", "128x128", "bf16"] and line.endswith("load..store")
    assert len(text.splitlines()) == 3 + len(plan().tiles)


@pytest.mark.parametrize(
    ("args", "argument", "choices"),
    [
        (("nope", "default", "tf32"), "kernel='nope'", "bwd_recurrence"),
        ((KERNEL, "nope", "tf32"), "layout='nope'", "default, padded"),
        ((KERNEL, "default", "nope"), "precision='nope'", "tf32, bf16"),
    ],
)
def test_unknown_names(args, argument, choices):
    with pytest.raises(ValueError) as error:
        variants.plan(*args)
    assert argument in str(error.value) and choices in str(error.value)


STEPS = ("a", "b", "c", "d")


@st.composite
def tile_lists(draw):
    out = []
    for i in range(draw(st.integers(1, 9))):
        first = draw(st.integers(0, 3))
        last = draw(st.integers(first, 3))
        tile = draw(tiles(name=f"t{i}"))
        out.append(replace(tile, first=STEPS[first], last=STEPS[last]))
    return out


@settings(max_examples=80, deadline=None)
@given(tile_lists())
def test_packed_tiles_never_overlap(given_tiles):
    p = Plan.build("any", STEPS, given_tiles)
    used = {}  # (step, line of 128 bytes) -> tile; offsets and sizes are whole lines
    for tile in p.tiles:
        assert tile.offset % tile.alignment == 0
        for step in STEPS[STEPS.index(tile.first) : STEPS.index(tile.last) + 1]:
            for line in range(tile.offset // 128, (tile.offset + tile.nbytes) // 128):
                assert used.setdefault((step, line), tile.name) == tile.name
    assert p.total_bytes <= sum(t.nbytes + t.alignment for t in p.tiles)
    assert p.names == tuple(t.name for t in given_tiles)


# ---- audit


def ways_of(layout, kind, coords, shifts=((0, 0),), shape=(16, 128), dtype="f32"):
    access = audit.Access("x", Tile("x", shape, dtype, layout), kind, coords, 1, shifts)
    return audit.ways(access), audit.wavefronts(access)


@pytest.mark.parametrize(
    ("layout", "contiguous", "strided"),
    [
        (GroupPadded(4, 136, 552), 1, 1),
        (RowPadded(136), 1, 2),
        (RowPadded(132), 2, 1),
        (Dense(), 4, 4),
    ],
)
def test_both_fragments(layout, contiguous, strided):
    cols = range(0, 128, 8)
    rows, every = audit.grid((0, 8), cols), audit.grid((0, 1, 8, 9), cols)
    assert ways_of(layout, "lds64", audit.pairs(), rows) == (contiguous, 2 * contiguous)
    assert ways_of(layout, "lds32", audit.strided(), every) == (strided, strided)


@pytest.mark.parametrize(("layout", "ways"), [(RowPadded(136), 1), (Swizzle128(), 2), (Dense(), 4)])
def test_accumulator_pairs_as_measured(layout, ways):
    """fp32 [64,128] read as accumulator pairs: 317, 566 and 1082 cycles were measured."""
    shifts = audit.grid(range(0, 64, 8), range(0, 128, 8))
    assert ways_of(layout, "lds64", audit.pairs(), shifts, (64, 128))[0] == ways


def test_matrix_accesses():
    blocks = audit.grid((0,), range(0, 128, 16))
    for kind in ("ldmatrix", "ldmatrix_trans", "stmatrix"):
        got = ways_of(Swizzle128(), kind, audit.matrices(), blocks, dtype="bf16")
        assert got == (1, 4)
        assert ways_of(Dense(), kind, audit.matrices(), blocks, dtype="bf16") == (8, 32)
    assert ways_of(Dense(), "ldmatrix", audit.matrices(), shape=(16, 16), dtype="bf16") == (2, 8)
    assert ways_of(Swizzle128(), "lds32", audit.pairs(), blocks, dtype="bf16") == (1, 1)


def test_broadcast_and_width():
    assert ways_of(Dense(), "lds32", ((0, 0),) * 32) == (1, 1)
    assert ways_of(Dense(), "lds32", tuple((i % 16, 0) for i in range(32))) == (16, 16)
    assert ways_of(Dense(), "lds128", tuple((0, 4 * i) for i in range(32))) == (1, 4)
    assert ways_of(Dense(), "sts16", tuple((0, i) for i in range(32)), dtype="bf16") == (1, 1)
    with pytest.raises(ValueError, match="kind='lds99'"):
        ways_of(Dense(), "lds99", audit.pairs())
    with pytest.raises(ValueError, match="8 lanes"):
        ways_of(Dense(), "lds32", audit.pairs()[:8])


def test_shared_words_take_one_wavefront():
    """A 64-bit access whose lanes share words is as cheap as its different words, as measured."""
    line = Tile("x", (1, 128), "f32", Dense())
    for coords, words in ((audit.per_column(), 8), (audit.pairs()[:4] * 8, 8)):
        access = audit.Access("x", line, "lds64", coords, 1)
        assert len({c + i for _, c in coords for i in (0, 1)}) == words
        assert (audit.ideal_wavefronts(access), audit.wavefronts(access)) == (1, 1)
    access = audit.Access("x", Tile("x", (8, 8), "f32", Dense()), "lds64", audit.pairs(), 1)
    assert (audit.ideal_wavefronts(access), audit.wavefronts(access)) == (2, 2)


def test_default_layout_is_free_of_fp32_conflicts():
    wide = ("kd", "qd", "kr", "ki", "dS", "U", "dvc")
    for precision in variants.precisions(KERNEL):
        rows = audit.audit(plan("default", precision))
        assert {r.tile for r in rows} >= set(wide) | {"states", "do", "v", "dv"}
        assert all(r.ways == 1 and r.extra_cycles == 0 for r in rows if r.tile in wide)
        assert all(r.ways == 1 for r in rows if r.tile in ("states", "do", "v", "dv"))
        assert {r.tile for r in rows if r.ways > 1} == {"inv", "mqk", "dM", "dL", "dLb"}
        stores = {r.name for r in rows if r.ways > 1 and r.tile[0] == "d"}
        assert all(name.endswith("store, single") for name in stores)


# Wavefronts of shared-memory instructions in a chunk of the default layout, as a profiler counted
# them on the GPU. They include the shuffles, which the audit leaves out: one wavefront each.
MEASURED = {"tf32": 5823, "bf16": 4649}
SHUFFLES = 4 * (4 + 12 + 8) + 6  # value, key and pair warps, and one pair warp for dbeta


@pytest.mark.parametrize(
    ("layout", "precision", "extra"),
    [
        ("default", "tf32", 60),
        ("default", "bf16", 60),
        ("padded", "tf32", 1980),
        ("padded", "bf16", 828),
    ],
)
def test_extra_cycles(layout, precision, extra):
    rows = audit.audit(plan(layout, precision))
    assert sum(r.extra_cycles for r in rows) == extra
    ideal = sum(r.ideal * r.count for r in rows)
    assert ideal == (5671 if precision == "tf32" else 4487)
    assert f"{extra} extra" in audit.describe(plan(layout, precision))
    if layout == "default":
        assert ideal + extra == pytest.approx(MEASURED[precision] - SHUFFLES, rel=0.02)


def test_counts_of_the_kernel():
    rows = audit.audit(plan())
    counts = {r.name: (r.kind, r.count) for r in rows}
    assert len(counts) == len(rows)
    assert counts["value: kd as B, K contiguous"] == ("lds64", 128)
    assert counts["value: qd as B, tokens strided"] == ("lds32", 256)
    assert counts["value: dS store"] == ("sts64", 256)
    assert counts["value: U store"] == ("sts32", 64)
    assert counts["key: ki as B, tokens strided"] == ("lds32", 64)
    assert counts["key: qd elementwise"] == ("lds64", 32)
    assert counts["key: dvc as A"] == counts["pair: U as A"] == ("lds64", 128)
    assert counts["key: dS as B"] == counts["pair: dS as B"] == ("lds32", 512)
    assert counts["key: S^T as B"] == counts["pair: S^T as B"] == ("ldmatrix_trans", 64)
    assert counts["pair: kr elementwise"] == ("lds64", 32)
    assert counts["one pair warp: U as B, for dM and dL"] == ("lds64", 64)
    for staged in ("key: dkd", "key: dki", "pair: dkr", "pair: dqd"):
        assert counts[f"{staged} staged"] == ("sts64", 32)
    low = {r.name: (r.kind, r.count) for r in audit.audit(plan(precision="bf16"))}
    assert low["value: dS store"] == ("stmatrix", 64)
    assert low["value: U store"] == ("stmatrix_trans", 8)
    assert low["key: dS as B"] == low["pair: dS as B"] == ("ldmatrix_trans", 64)
    assert low["key: dvc as A"] == low["pair: U as A"] == ("ldmatrix", 32)


@pytest.mark.parametrize(("layout", "precision"), ALL_PLANS)
def test_every_plan_is_legal(layout, precision):
    assert audit.legality(plan(layout, precision)) == []


@pytest.mark.parametrize("p", [TRANSITION, *SCAN], ids=plan_id)
def test_every_plan_of_level_2_is_legal(p):
    assert audit.legality(p) == []
    names = [r.name for r in audit.audit(p)]
    assert len(set(names)) == len(names)


def test_transition_conflicts():
    p = TRANSITION
    rows = {r.name: r for r in audit.audit(p)}
    # L: rows of 72 floats serve pairs along a row, and cost two ways along a column.
    columns = [f"inverse, {x}: L or X as B, rows strided" for x in ("diagonal", "below", "corner")]
    slow = {*columns, "publish: X"}
    assert {name for name, r in rows.items() if r.extra_cycles} == slow
    assert {rows[name].ways for name in slow} == {2}
    assert sum(r.extra_cycles for r in rows.values()) == 240
    assert "240 extra" in audit.describe(p)
    assert {r.tile for r in rows.values()} == set(p.names) - {"factors", "barriers"}


def test_counts_of_the_transition():
    counts = {r.name: (r.kind, r.count) for r in audit.audit(TRANSITION)}
    assert counts["gather: k"] == ("lds32", 64 * 2)  # a warp takes half a row
    assert counts["gather: k for norms"] == ("ldmatrix", 64 // 8 * 128 // 32)
    # Left rows of k and of q, right rows; those of level 32 twice.
    assert counts["pairs: rows store"] == ("sts32", (6 * 96 + 32) * 2)
    for s in (32, 16, 8):  # 32 / s squares of s x s, in blocks of 8 x 8
        assert counts[f"pairs: level {s}, L store"] == ("sts64", 32 // s * (s // 8) ** 2)
        assert counts[f"pairs: level {s}, mqk store"] == ("sts32", 32 // s * (s // 8) ** 2)
    for tile in ("kd", "qd", "kr", "kr_low"):
        assert counts[f"tiles: {tile} store"] == ("sts32", 64 * 2)
    assert counts["inverse, corner: L or X as B, rows strided"] == ("lds32", 15 * 8)
    assert counts["products: z store"] == ("stmatrix", 64 * 128 // 256)
    assert counts["products: p store"] == ("stmatrix", 64 * 64 // 256)


@pytest.mark.parametrize("p", SCAN, ids=plan_id)
def test_scan_is_free_of_conflicts(p):
    rows = audit.audit(p)
    groups = 1 if "groups=1" in p.name else 2
    assert all(r.ways == 1 and r.extra_cycles == 0 for r in rows)
    counts = {
        **dict.fromkeys(("v", "do"), ("ldmatrix_trans", 16)),
        **dict.fromkeys(("o", "X", "dv"), ("stmatrix_trans", 16)),
        **dict.fromkeys(("states", "dstates"), ("stmatrix", 32)),
        **{"eg": ("lds64", 64), "qk": ("lds64", 32)},
    }
    found = {r.tile: (r.kind, r.count // groups) for r in rows}
    assert found == {tile: counts[tile] for tile in counts if tile in p}


def test_legality_finds_problems():
    def with_layout(name, layout, precision="bf16"):
        p = plan("padded", precision)
        swapped = [replace(t, layout=layout) if t.name == name else t for t in p.tiles]
        return audit.legality(Plan.build(p.name, p.steps, swapped))

    assert any("row 1 of stage 0" in p for p in with_layout("kd", RowPadded(137)))
    assert any("not a multiple of 8" in p for p in with_layout("kr", RowPadded(137)))
    assert any("not a multiple of 16" in p for p in with_layout("inv", RowPadded(20)))
    narrow = Plan.build("unknown", "a", [Tile("x", (4, 3), "f32", Dense())])
    assert audit.legality(narrow)[0] == "x: rows of 12 bytes are not a multiple of 16"
    with pytest.raises(ValueError, match="unknown"):
        audit.audit(narrow)


class Split(Dense):
    """Columns from 8 on are moved by 64 bytes."""

    def byte_offset(self, row, col, shape, itemsize):
        return super().byte_offset(row, col, shape, itemsize) + (64 if col >= 8 else 0) + 8


def test_access_problems():
    def problem(layout, kind, coords, dtype="f32"):
        access = audit.Access("x", Tile("t", (16, 128), dtype, layout), kind, coords, 1)
        return audit.access_problems(access)

    assert problem(Dense(), "lds64", audit.pairs()) == []
    assert "outside" in problem(Dense(), "lds64", ((0, 127),) * 32)[0]
    assert "not a multiple of 16" in problem(Dense(), "lds128", audit.pairs())[0]
    crosses_chunks = ((0, 4),) * 32
    assert "not contiguous" in problem(Split(), "ldmatrix", crosses_chunks, "bf16")[0]
    assert "not whole elements" in problem(Dense(), "lds16", audit.pairs())[0]


# ---- against CuTe: evaluated by the DSL on the host


def crd2idx(index, shape, stride):
    """CuTe's map of a linear index into a nested mode, written out."""
    if isinstance(shape, int):
        return index * stride
    total = 0
    for s, d in zip(shape, stride, strict=True):
        size = leaf_product(s)
        total += crd2idx(index % size, s, d)
        index //= size
    return total


def leaf_product(shape):
    if isinstance(shape, int):
        return shape
    out = 1
    for s in shape:
        out *= leaf_product(s)
    return out


def traced(function):
    """Run function while a no-argument jit function is traced on the host."""
    cute = pytest.importorskip("cutlass.cute")
    box = []

    @cute.jit
    def probe():
        box.append(function())

    probe()
    return box[0]


def cute_parts(tile):
    """(shape, stride, swizzle or None) of the tile's CuTe layout, as Python values."""
    import cutlass.cute as cute

    layout = tile.cute_layout()
    swizzle = None
    if isinstance(layout, cute.ComposedLayout):
        swizzle = tuple(map(int, re.search(r"S<(\d+),(\d+),(\d+)>", str(layout)).groups()))
        layout = layout.outer
    return layout.shape, layout.stride, swizzle


@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        *(((16, 128), "f32", layout) for layout in FP32_LAYOUTS),
        ((128, 128), "f32", GroupPadded(4, 136, 552)),
        ((1, 128), "f32", GroupPadded(4, 136, 552)),
        ((16, 128), "bf16", Swizzle128()),
        ((64, 128), "bf16", Swizzle128()),
        ((128, 128), "bf16", Swizzle128()),
        ((16, 64), "bf16", Swizzle128()),
        ((64, 128), "f32", Swizzle128()),
        ((16, 16), "f32", RowPadded(24)),
    ],
)
def test_host_offsets_equal_cute(shape, dtype, layout):
    tile = Tile("x", shape, dtype, layout)
    cute_shape, cute_stride, swizzle = traced(lambda: cute_parts(tile))
    for row in range(shape[0]):
        for col in range(shape[1]):
            index = crd2idx(row, cute_shape[0], cute_stride[0])
            byte = (index + crd2idx(col, cute_shape[1], cute_stride[1])) * tile.itemsize
            if swizzle:  # of byte addresses
                bits, base, shift = swizzle
                byte ^= (byte >> shift) & (((1 << bits) - 1) << base)
            assert byte == tile.byte_offset(row, col)


def test_cute_layouts_as_text():
    kd = Tile("kd", (16, 128), "f32", GroupPadded())
    do = Tile("do", (16, 128), "bf16", Swizzle128())
    assert traced(lambda: str(kd.cute_layout())) == "((4,4),128):((136,552),1)"
    assert "S<3,4,3>" in traced(lambda: str(do.cute_layout()))


def build_view_kernel(plan, seen, dump_dir):
    """A kernel that writes and reads a padded and a swizzled tile at a runtime stage."""
    import cutlass
    import cutlass.cute as cute

    class Touch:
        @cute.jit
        def __call__(self, mX: cute.Tensor, stream):
            self.kernel(mX).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)

        @cute.kernel
        def kernel(self, mX: cute.Tensor):
            tid, _, _ = cute.arch.thread_idx()
            base = cutlass.memory.SmemAllocator().allocate(plan.total_bytes, 1024)
            for i in cutlass.range(mX.shape[0], unroll=1):
                kd, do = plan["kd"].view(base, i % 2), plan["do"].view(base, i % 2)
                do_t = plan["do"].view(base, i % 2, transposed=True)
                all_do = plan["do"].staged_view(base)
                seen["kd"] = (str(kd.iterator.type), str(kd.layout), kd.iterator.alignment)
                seen["do"] = (str(do.iterator.type), str(do.layout), do.iterator.alignment)
                seen["do_t"], seen["all_do"] = str(do_t.layout), str(all_do.layout)
                seen["barriers"] = str(plan["barriers"].view(base).iterator.type)
                pair = cute.local_tile(kd[tid // 8, None], (2,), (tid % 8,))
                pair.store(cute.local_tile(mX[i, None], (2,), (tid,)).load())
                do[tid // 8, tid % 8] = cutlass.BFloat16(mX[i, tid])
                cute.arch.sync_threads()
                mX[i, tid] = kd[tid % 16, tid // 16] + cutlass.Float32(do_t[tid // 16, tid % 16])

    rows = cute.sym_int()
    fake = cute.runtime.make_fake_compact_tensor(
        cutlass.Float32, (rows, 256), stride_order=(1, 0), assumed_align=16
    )
    return cute.compile(
        Touch(),
        fake,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir={dump_dir}",
    )


def test_views_compile(tmp_path):
    pytest.importorskip("cutlass.cute")
    seen = {}
    p = plan()
    build_view_kernel(p, seen, tmp_path)
    assert seen["kd"][1:] == ("((4,4),128):((136,552),1)", 128)
    assert "S<3,4,3>" in seen["do"][0] and seen["do"][2] == 1024
    assert seen["do"][1] == "((8,2),(64,2)):((64,512),(1,1024))"
    assert seen["do_t"] == "((64,2),(8,2)):((1,1024),(64,512))"
    assert seen["all_do"] == "((8,2),(64,2),2):((64,512),(1,1024),2048)"
    alignment = int(re.search(r"i64.*align<(\d+)>", seen["barriers"])[1])
    assert alignment % 128 == 0 and p["barriers"].offset % alignment == 0
    (ptx,) = (f.read_text() for f in tmp_path.glob("*.ptx"))
    assert f"+{p['kd'].offset}]" in ptx  # the planned offset is an immediate
    assert "st.shared.v2" in ptx  # the alignment of a runtime stage is known
    assert str(p["kd"].stage_bytes) in ptx
    with pytest.raises(LayoutError, match="stage 2 of 2"):
        p["kd"].pointer(0, stage=2)
