"""The layout lab without a GPU: catalogue, stack, pictures, the audit of gradients, and comparisons with
fake kernels.
"""

import collections
import functools
import itertools
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch

from kda_cute import backward, forward, reference
from kda_cute import compile as kernel_compile
from kda_cute.lab import catalogue, draw, stack, svg
from kda_cute.layouts import Dense, Plan, RowPadded, Swizzle128, Tile, audit, variants
from kda_cute.layouts import gradients_accesses as gradients
from perf import conflicts, forms, layouts, one_kernel
from perf.shapes import Shape
from perf.timing import Timing

SVG = "{http://www.w3.org/2000/svg}"
SMALL = Shape("small", (64, 100), 2)
DENSE = Shape("dense", (70, 70), 2)


# ---------------------------------------------------------------- catalogue
def test_every_kernel_has_a_name_and_the_reverse_scan_is_one():
    assert catalogue.kernels() == (*variants.kernels(), "reverse_scan")
    assert "dv" in catalogue.select("reverse_scan").plan()
    assert "dv" not in catalogue.select("scan").plan()


def test_options_are_those_of_the_builder_of_tiles():
    assert catalogue.option_defaults("scan") == {"groups": 2, "save": True}
    assert catalogue.option_defaults("reverse_scan") == {"groups": 2}
    assert catalogue.option_defaults("gradients") == {"g": "bf16"}
    assert catalogue.option_defaults("bwd_recurrence") == {}
    chosen = catalogue.select("scan", ["groups=1", "save=false"])
    assert chosen.options == {"groups": 1, "save": False}
    assert chosen.plan() is variants.plan("scan", "default", "bf16", groups=1, save=False)


@pytest.mark.parametrize(
    ("kernel", "options", "words"),
    [
        ("gradient", [], "kernel='gradient' is not one of bwd_recurrence, scan, transition"),
        ("scan", ["reverse=true"], "groups=2, save=True"),
        ("scan", ["groups"], "option='groups'"),
        ("scan", ["groups=two"], "whole number"),
        ("scan", ["save=2"], "true or false"),
        ("bwd_recurrence", ["g=f32"], "none"),
    ],
)
def test_unknown_names_list_the_choices(kernel, options, words):
    with pytest.raises(ValueError) as error:
        catalogue.select(kernel, options)
    assert words in str(error.value)


def test_a_row_agrees_with_plan_and_audit():
    (row,) = [
        r
        for r in catalogue.rows(catalogue.select("bwd_recurrence"))
        if r[1:3] == ("padded", "tf32")
    ]
    assert (row.bytes, row.ctas_per_sm, row.conflicts, row.problem) == (225_280, 1, 1980, "")
    assert row.wavefronts == 5671 + 1980


def test_an_impossible_plan_is_a_row_with_its_problem(monkeypatch):
    family = variants.BWD_RECURRENCE
    more = dict(family.layouts) | {"huge": RowPadded(400), "odd": RowPadded(137)}
    monkeypatch.setitem(variants.FAMILIES, "bwd_recurrence", replace(family, layouts=more))
    rows = {
        r.layout: r
        for r in catalogue.rows(catalogue.select("bwd_recurrence"))
        if r.precision == "tf32"
    }
    assert rows["huge"].bytes is None and "the limit is 232448" in rows["huge"].problem
    assert rows["odd"].bytes > 0 and "not a multiple of 16" in rows["odd"].problem


# ---------------------------------------------------------------- stack
def tile(name, first, last, cols=32, layout=None):
    return Tile(name, (8, cols), "f32", layout or Dense(), first=first, last=last)


TOY = Plan.build(
    "toy", "abc", [tile("early", "a", "a"), tile("late", "b", "c", 48), tile("whole", "a", "c")]
)


def test_live_bytes_of_each_step():
    assert [(s.name, s.live_bytes, s.tiles) for s in stack.steps(TOY)] == [
        ("a", 2048, ("early", "whole")),
        ("b", 2560, ("late", "whole")),
        ("c", 2560, ("late", "whole")),
    ]
    assert stack.peak(TOY).name == "b"
    assert stack.sharing(TOY) == [("early", "late", 1024)]
    text = stack.describe(TOY)
    assert "early then late: 1024 bytes" in text and "would take 3584" in text
    line = next(ln for ln in text.splitlines() if ln.startswith("late"))
    assert line.split() == ["late", "0", "1536", "#", "#"]


def test_stack_of_every_kernel_is_its_plan():
    for name in catalogue.kernels():
        plan = catalogue.select(name).plan()
        assert stack.peak(plan).live_bytes <= plan.total_bytes
        found = stack.as_dict(plan)
        assert found["bytes"] == plan.total_bytes and len(found["tiles"]) == len(plan.tiles)
        for one in found["steps"]:
            assert one["live_bytes"] == sum(plan[t].nbytes for t in one["tiles"])


def test_most_bytes_of_ctas_that_share_an_sm():
    assert [stack.most_bytes(n) for n in (1, 2)] == [232_448, 115_712]


# ---------------------------------------------------------------- pictures
def shapes(text, kind):
    return list(ElementTree.fromstring(text).iter(f"{SVG}{kind}"))


def words_of(text):
    return [element.text for element in shapes(text, "text")]


def test_picture_of_a_stack_has_every_tile_where_its_plan_puts_it():
    text = draw.stack_picture(TOY)
    boxes = {
        box.find(f"{SVG}title").text.split()[0]: box.attrib
        for box in shapes(text, "rect")
        if box.find(f"{SVG}title") is not None
    }
    assert set(boxes) == {"early", "late", "whole"}
    left, late = (float(boxes[n]["x"]) for n in ("early", "late"))
    assert late - left == draw.STEP_WIDTH
    assert float(boxes["late"]["width"]) == 2 * draw.STEP_WIDTH - 2
    bottoms = {n: float(b["y"]) + float(b["height"]) for n, b in boxes.items()}
    assert bottoms["early"] == pytest.approx(bottoms["late"], abs=0.02)
    assert bottoms["whole"] < bottoms["late"]
    words = words_of(text)
    assert {"a", "b", "c", "2,048", "2,560 (peak)"} <= set(words)
    assert any(w.startswith("early") for w in words)


def test_pictures_of_every_kernel_name_every_tile_and_have_a_title():
    for name in catalogue.kernels():
        plan = catalogue.select(name).plan()
        text = draw.stack_picture(plan)
        root = ElementTree.fromstring(text)
        assert plan.name in root.find(f"{SVG}title").text and root.attrib["role"] == "img"
        labels = " ".join(words_of(text)).split()
        assert set(plan.names) <= set(labels)


def test_a_swizzle_is_drawn_with_the_chunks_permuted():
    swizzled = Tile("x", (16, 64), "bf16", Swizzle128())
    words = [w for w in words_of(draw.tile_picture(swizzled)) if re.match(r"r\d+ c\d+$", w)]
    assert words[:8] == [f"r0 c{8 * i}" for i in range(8)]
    assert words[8:16] == [f"r1 c{8 * (i ^ 1)}" for i in range(8)]
    assert len(words) == 8 * 8 and words[-1] == "r7 c0"
    padded = draw.tile_picture(Tile("x", (8, 64), "bf16", RowPadded(72)))
    assert "padding" in words_of(padded) and "padding" not in words_of(draw.tile_picture(swizzled))
    with pytest.raises(ValueError, match="rows=0"):
        draw.tile_picture(swizzled, rows=0)


@pytest.mark.parametrize(("layout", "late"), [("default", 0), ("padded", 16)])
def test_words_that_wait_are_those_of_the_audit(layout, late):
    plan = variants.plan("bwd_recurrence", layout, "tf32")
    (access,) = [a for a in audit.accesses(plan) if a.name == "value: kd as B, tokens strided"]
    assert len(draw.touched(access)) == 32 and len(draw.waiting(access)) == late
    text = draw.tile_picture(plan["kd"], access=access)
    outlined = [box.attrib["class"] for box in shapes(text, "rect") if "stroke-width" in box.attrib]
    assert collections.Counter(outlined) == {"strong": 32 - late} | ({"bad": late} if late else {})
    assert any(f"wavefronts {2 if late else 1}, without conflicts 1" in w for w in words_of(text))


def test_pictures_have_colours_for_light_and_dark():
    text = draw.stack_picture(TOY)
    assert "prefers-color-scheme: dark" in text
    light, dark = (svg.in_colours_of(text, dark=d) for d in (False, True))
    for name, (prop, bright, dim) in svg.PALETTE.items():
        assert f".{name} {{{prop}: {bright}}}" in light and dim not in light.replace(bright, "")
        assert f".{name} {{{prop}: {dim}}}" in dark
    with pytest.raises(ValueError, match="not a picture"):
        svg.in_colours_of("<svg/>", dark=True)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("shade", (1, 2))
def test_text_stands_out_from_what_it_is_drawn_on(shade):
    """A contrast of 4.5, what WCAG asks of small text."""
    on_page = [(name, "bg") for name in ("text", "faint", "warning")]
    for text, ground in [*on_page, *(("on", f"c{i}") for i in range(8))]:
        a, b = sorted((luminance(svg.PALETTE[n][shade]) for n in (text, ground)), reverse=True)
        assert (a + 0.05) / (b + 0.05) >= 4.5, (text, ground)


# ---------------------------------------------------------------- the audit of gradients
GRADIENTS = {
    (layout, g): variants.plan("gradients", layout, "bf16", g=g)
    for layout in variants.names("gradients")
    for g in ("bf16", "f32")
}


@pytest.mark.parametrize("plan", GRADIENTS.values(), ids=lambda p: p.name)
def test_gradients_are_legal_and_named_once(plan):
    assert audit.legality(plan) == []
    names = [row.name for row in audit.audit(plan)]
    assert len(set(names)) == len(names)
    untouched = set(plan.names) - {row.tile for row in audit.audit(plan)}
    assert untouched == {"chunk", "barriers", "do", "dv", "INV"}  # whole warps; wgmma


def test_conflicts_of_gradients_are_of_the_running_sums():
    def conflicts_of(layout):
        return {
            r.name: (r.ways, r.extra_cycles)
            for r in audit.audit(GRADIENTS[layout, "bf16"])
            if r.extra_cycles
        }

    # Lanes left and right of an anchor read rows of both parities: 4 rows of 2 groups each.
    assert conflicts_of("default") == {"level 4: gc": (2, 128), "level 2: gc": (2, 128)}
    # Rows of 136 floats: every second one has the same banks.
    strided = ("combine: gc", "level 32, right: gc", "level 32, left: gc", "level 16: gc, right",
               "level 16: gc, left", "level 8: gc, right", "level 8: gc, left")  # fmt: skip
    assert set(strided) <= set(conflicts_of("padded"))
    assert all(r.tile == "gc" for r in audit.audit(GRADIENTS["padded", "bf16"]) if r.extra_cycles)


def counts(g="bf16"):
    return {r.name: (r.kind, r.count) for r in audit.audit(GRADIENTS["default", g])}


def test_counts_of_gradients():
    found = counts()
    assert found["gate: g"] == ("lds32", 64 * 2) and counts("f32")["gate: g"] == ("lds64", 64 * 2)
    assert found["gate: totals store"] == ("sts64", 8 * 2)  # two warps of a span
    assert found["gate: totals"] == ("lds64", 16 * 7)
    assert found["gate: gc store"] == ("sts64", 64 * 2)
    assert found["gate: b and its slope"] == ("sts32", 2 * 2)
    for name in ("k", "q"):  # 64 rows of 16 pieces
        assert found[f"norms: {name}"] == ("lds128", 64 * 16 // 32)
    blocks = 64 * 128 // 256  # of 16 x 16
    assert found["gate: exp(gT) store"] == ("sts64", 2)
    assert found["write: U store"] == ("stmatrix", blocks)
    for name in ("M", "L"):  # six blocks of 16 below the diagonal, four on it
        assert found[f"publish: {name} store"] == ("stmatrix", 6 + 4)
        assert found[f"publish: {name}^T store"] == ("stmatrix_trans", 6)
        assert found[f"publish: {name}, norms of rows"] == ("lds32", 2 * 10)
        assert found[f"publish: {name}, norms of columns"] == ("lds64", 2 * 10)
    for name in ("dS^T as A", "S as B"):
        assert found[f"decay: {name}"] == ("ldmatrix_trans", 128 * 128 // 256)
    assert found["combine: gc"] == ("lds32", 64 * 128 // 32)
    assert found["combine: gc of the last token"] == ("lds32", 16 * 2)
    for name in ("norms of k", "norms of q", "diagonal of M"):
        assert found[f"combine: {name}"] == ("lds64", 16 * 4)
    assert found["combine: M and L of neighbours"] == ("lds32", 16 * 8)
    for name in ("combine: kr dkr store", "columns: kr dkr"):
        assert found[name][1] == 64 * 128 // (32 * 4)
    for name in ("k", "q"):
        assert found[f"combine: {name}"] == ("ldmatrix_trans", blocks)
        assert found[f"levels 8, 4, 2: {name}"] == ("ldmatrix_trans", blocks)
        assert found[f"columns: {name}, for dots and norms"] == ("ldmatrix_trans", 2 * blocks)
        assert found[f"columns: d{name} store"] == ("stmatrix_trans", blocks)
    # Words of kf from the right; of kf and qf from the left.  A side reads its own and the other's,
    # those once for both of its blocks.
    assert found["level 32, right: words store"] == ("sts128", 8 * 2)
    assert found["level 32, left: words store"] == ("sts128", 8 * 4)
    assert found["level 32, right: words"] == ("lds128", 8 * (2 + 4))
    assert found["level 32, left: words"] == ("lds128", 8 * (4 + 2))
    for side in ("right", "left"):
        assert found[f"level 32, {side}: anchor"] == ("lds32", 8 * 2)
        assert found[f"level 32, {side}: gc"] == ("lds32", 8 * 2 * 8)
        assert found[f"level 32, {side}: k"] == ("ldmatrix_trans", 8 * 2)
        for name in ("M", "L"):
            assert found[f"level 32, {side}: {name} as B"] == ("ldmatrix", 8 * 4)
    assert found["level 32, left: q"] == ("ldmatrix_trans", 8 * 2)
    assert "level 32, right: q" not in found
    assert found["level 16: gc, right"] == ("lds32", 16 * 8)  # for operands, and for results
    assert found["level 16: gc, left"] == ("lds32", 16 * 4)
    assert found["level 16: anchor"] == ("lds32", 16 * 2)
    assert (found["level 16: k"][1], found["level 16: q"][1]) == (16 * 2, 16)
    for name in ("M", "L"):
        assert found[f"level 16: {name} as B"] == ("ldmatrix", 16 * 2)
        assert found[f"levels 8, 4, 2: {name} as B"] == ("ldmatrix", 16 * 2)
    assert found["level 8: anchor"] == ("lds32", 16 * 4)
    assert found["level 8: gc, right"] == found["level 8: gc, left"] == ("lds32", 16 * 4)
    for s in (4, 2):
        assert found[f"level {s}: anchor"] == found[f"level {s}: gc"] == ("lds32", 16 * 8)
    assert found["columns: dots store"] == ("sts32", 16 * 64 // 32)
    assert found["columns: dots"] == ("lds32", 16 * 16)
    assert found["columns: norms"] == ("lds32", 16 * 2)
    assert found["columns: row factors store"] == ("sts32", 16 * 2)
    assert found["columns: row factors"] == ("lds64", 16 * 8)
    assert found["columns: sums of the other half"] == ("lds32", 16 * 2)
    assert found["columns: dgT"] == ("lds32", 16 * 6)
    assert found["columns: raw g"] == ("ldmatrix_trans", blocks)
    assert found["columns: dg store"] == ("stmatrix_trans", blocks)
    wide = counts("f32")
    assert wide["columns: raw g"] == ("lds32", 16 * 16)
    assert wide["columns: dg store"] == ("sts32", 16 * 16)
    assert found["columns: dbeta"] == ("lds32", 2 * 2)
    tested = 20 + 2 * 4 + 2 * 4 + 4 + 4 + 8 + 2 + 2
    assert len(found) >= tested


def test_patterns_of_gradients():
    assert gradients.lanes()[31] == (0, 31) and gradients.fours()[31] == (0, 124)
    assert gradients.pieces()[9] == (1, 8)
    # Lane 6 has token 4 (left of both), lane 5 token 2, and level 4 wants its next token.
    assert gradients.of_either(4)[6] == (4, 1) and gradients.of_either(4)[5] == (3, 1)
    assert gradients.of_either(2)[5] == (2, 1) and gradients.of_either(2)[6] == (5, 1)
    assert set(gradients.anchors(4)) == {(4, r) for r in range(8)}
    assert set(gradients.anchors(2)) == {(t, r) for t in (2, 6) for r in range(8)}
    assert sorted(gradients.scattered_tokens()) == [(0, t) for t in range(32)]
    assert len(set(gradients.BELOW)) == len(set(gradients.ABOVE)) == 6


def test_gradients_have_as_many_instructions_in_the_code():
    """Of the kinds that the compiler neither joins nor drops."""
    spec = backward.gradients_spec("f32", "log", "f32", False)
    (kernel,) = kernel_compile.report(kernel_compile.object_file(spec))
    seen = collections.Counter(
        conflicts.kind_of(m) for m in re.findall(r"\b(?:LDS|STS|LDSM|STSM)[A-Z0-9.]*", kernel.sass)
    )
    warps = collections.defaultdict(
        lambda: 16, {"write": 8, "level 32, right": 8, "level 32, left": 8}
    )
    expected = collections.Counter()
    for row in audit.audit(GRADIENTS["default", "f32"]):
        role = row.name.split(": ")[0]
        if (
            role != "publish"
            and row.name != "columns: dbeta"
            and row.name not in ("gate: b and its slope", "gate: exp(gT) store")
        ):
            expected[row.kind] += row.count // warps[role]
    # `publish`, once for M and once for L: a block below the diagonal is stored twice, one on it once;
    # either way it reads two pairs of factors of columns.
    expected += {"stmatrix": 2 * 2, "stmatrix_trans": 2, "lds64": 2 * 2 * 2}
    expected += {"lds128": 2 * 2}  # rows of dq and dk of a chunk with a tail
    for kind in ("ldmatrix", "ldmatrix_trans", "stmatrix", "stmatrix_trans", "lds64", "lds128"):
        assert seen[kind] == expected[kind], kind
    assert seen["lds32"] == pytest.approx(expected["lds32"], rel=0.08)


# ---------------------------------------------------------------- one kernel in any plan
def test_a_problem_of_one_kernel_is_the_problem_of_its_form():
    for shape, form in itertools.product((SMALL, DENSE), ("A", "B")):
        x = forms.make_inputs(shape, "cpu")[form]
        o = reference.chunk_kda(one_kernel.problem(x))[0].flatten(0, 1)
        expected = forms.expected("chunk_kda_fwd", x, [0, 1])["o"]
        assert torch.linalg.vector_norm(o - expected) < 1e-6 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize(
    ("kernel", "options", "op", "form"),
    [
        ("transition", [], "chunk_kda_fwd", "A"),
        ("scan", [], "chunk_kda_fwd", "A"),
        ("reverse_scan", [], "chunk_kda_bwd", "A"),
        ("gradients", [], "chunk_kda_bwd", "B"),
        ("gradients", ["g=f32"], "chunk_kda_bwd", "A"),
    ],
)
def test_specs_are_of_the_plan_that_was_asked_for(monkeypatch, kernel, options, op, form):
    selection = catalogue.select(kernel, options)
    assert one_kernel.STAGES[kernel][0] == op
    assert one_kernel.form_of(selection) == form
    family = variants.FAMILIES[selection.family]
    more = dict(family.layouts) | {"again": family.layouts["default"]}
    monkeypatch.setitem(variants.FAMILIES, selection.family, replace(family, layouts=more))
    (spec,) = one_kernel.specs(selection, ["again"], Shape("wide", (8192,), 96))
    assert spec.name == selection.family and spec.config.layout == "again"
    assert one_kernel.report.budget(spec).plan.total_bytes == selection.plan().total_bytes


def test_specs_of_level_1_follow_precision_and_lengths():
    selection = catalogue.select("bwd_recurrence")
    (spec,) = one_kernel.specs(selection, ["padded"], SMALL, "bf16")
    config = spec.config
    assert (config.layout, config.precision, config.varlen) == ("padded", "bf16", True)
    (spec,) = one_kernel.specs(selection, ["default"], DENSE)
    assert (spec.config.precision, spec.config.varlen) == ("tf32", False)


@pytest.mark.parametrize("factor", (1.0, 1.5, math.nan))
def test_a_stage_is_checked_inside_its_pass_and_launched_alone(monkeypatch, factor):
    """A stand-in for the forward, whose scan computes o."""
    seen = []

    def scan(p, scale):
        seen.append(scale)
        return reference.chunk_kda(p)[0].bfloat16() * scale

    monkeypatch.setattr(
        forward, "run", lambda p, scan: forward.Results(scan(p, factor), None, None)
    )
    stage = one_kernel.Stage(catalogue.select("scan"), DENSE, "cpu")
    (subject,) = stage.subjects(["default"], load=lambda spec: scan)
    with pytest.raises(RuntimeError, match="after it was checked"):
        subject.launch()
    found, failed = layouts.gate(subject)
    assert set(found) == {"o"} and failed == (() if factor == 1.0 else ("o",))
    subject.launch()
    assert seen == pytest.approx([factor] * 2, nan_ok=True)
    assert subject.plan.name.startswith("scan/default/bf16/groups=1")


def test_a_backward_stage_gets_what_the_forward_saved(monkeypatch):
    calls = []
    monkeypatch.setattr(forward, "run", lambda p: forward.Results("o", None, "saved"))

    def run(p, do, dfinal, saved, **kernels):
        calls.append((saved, tuple(kernels)))
        leaves = [x.detach().double().requires_grad_() for x in p[:5]]
        o = reference.chunk_kda(
            p._replace(**dict(zip("q k v g beta".split(), leaves, strict=True)))
        )[0]
        grads = torch.autograd.grad(o, leaves, do.double())
        kernels["gradients"]("x")
        return backward.Gradients(*grads, None, None, None)

    monkeypatch.setattr(backward, "run", run)
    stage = one_kernel.Stage(catalogue.select("gradients"), DENSE, "cpu")
    (subject,) = stage.subjects(["padded"], load=lambda spec: lambda *x: x)
    assert layouts.gate(subject)[1] == ()
    assert calls == [("saved", ("gradients",))]
    assert subject.launch() == ("x",)


def test_backward_runs_the_kernels_that_it_is_given():
    p = one_kernel.problem(forms.make_inputs(DENSE, "cpu")["B"])
    seen = {}
    kernels = {
        name: functools.partial(lambda name, *x: seen.update({name: len(x)}), name)
        for name in ("transition", "reverse_scan", "gradients")
    }
    saved = p.q.new_zeros(4, 2, 192, 128)
    grads = backward.run(p, torch.zeros_like(p.q), None, saved, **kernels)
    assert seen == {"transition": 13, "reverse_scan": 7, "gradients": 22}
    assert grads.dg.dtype == torch.bfloat16 and grads.dA_log.shape == (2,)


# ---------------------------------------------------------------- comparing plans
def subject(layout, errors, launches):
    def check():
        if isinstance(errors, Exception):
            raise errors
        return errors

    plan = variants.plan("bwd_recurrence", "padded" if layout == "padded" else "default", "tf32")
    return one_kernel.Subject(
        layout, "tf32", plan, check, functools.partial(launches.append, layout)
    )


def fake_timer(candidates, repeats):
    times = {"default": 100.0, "padded": 125.0}
    for launch in candidates.values():
        launch()
    return {name: Timing((times[name],) * repeats) for name in candidates}


def test_plans_are_checked_then_timed_against_the_first():
    launched, said = [], []
    made = [
        subject("default", {"dv": 0.5, "dgT": 0.2}, launched),
        subject("padded", {"dv": 1.0}, launched),
    ]
    rows = layouts.compare(made, repeats=3, timer=fake_timer, progress=said.append)
    assert [(r.layout, r.median_us, r.ratio, r.failed) for r in rows] == [
        ("default", 100.0, 1.0, ()),
        ("padded", 125.0, 1.25, ()),
    ]
    assert [(r.conflicts, r.worst, r.worst_of_tolerance) for r in rows] == [
        (60, "dv", 0.5),
        (1980, "dv", 1.0),
    ]
    assert launched == ["default", "padded"]
    assert said == ["checking default", "checking padded", "timing default, padded"]
    head, lines = layouts.table(rows)
    assert lines[1][-1] == "1.250" and len(head) == len(lines[0])


@pytest.mark.parametrize("errors", ({"dv": 1.01}, {"dv": math.nan}, ValueError("no plan")))
def test_a_wrong_plan_is_never_timed(errors, capsys):
    launched = []
    made = [subject("padded", errors, launched), subject("default", {"dv": 0.1}, launched)]
    rows = layouts.compare(made, timer=fake_timer)
    assert launched == ["default"]
    assert rows[0].failed and rows[0].median_us is None and rows[0].ratio is None
    assert rows[1].ratio == 1.0
    assert layouts.table(rows)[1][0][6].startswith("FAILED: ")
