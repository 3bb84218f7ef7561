"""The benchmarks' own parts, without a GPU."""

import dataclasses
import functools
import importlib
import itertools
import json
import math
import sys
import types

import pytest
import torch
from gpu_stand_in import HEADER, SMALL, STICKS, Provider, Recorder, seeming_gpu

import kda_cute
from kda_cute import compile as kernels
from kda_cute import machine, reference
from kda_cute.factors import Factors
from kda_cute.workspace import Workspace
from perf import (
    chunk_kda,
    compare,
    eager,
    forms,
    profiler,
    providers,
    report,
    results,
    run,
    sanitize,
    timing,
    yardstick,
)
from perf.scalar_recurrence import ScalarConfig, scalar_recurrence, scalar_spec, smem_bytes
from perf.shapes import (
    SHAPES,
    Shape,
    backward_stages,
    bwd_recurrence_bytes,
    bwd_recurrence_flops,
    chunk_kda_bytes,
    chunk_kda_flops,
    find_shape,
    floor_us,
    forward_stages,
)

BEGIN, END = "<!-- perf:begin -->", "<!-- perf:end -->"


# ---------------------------------------------------------------- shapes
def test_shape_names_say_what_they_are():
    described = {n: (s.N, s.T // s.N, s.H) for n, s in SHAPES.items() if not s.varlen}
    assert described == {
        "T8192_H96": (1, 8192, 96),
        "T8192_H64": (1, 8192, 64),
        "B4_T4096_H32": (4, 4096, 32),
        "T8192_H16": (1, 8192, 16),
        "T2048_H12": (1, 2048, 12),
        "T32768_H32": (1, 32768, 32),
    }
    var6 = find_shape("var6_H64")
    assert (var6.lengths, var6.H) == ((1300, 547, 2048, 963, 271, 3063), 64)
    assert var6.varlen
    assert all(name == shape.name for name, shape in SHAPES.items())


def test_offsets_and_tiles_count_tails():
    assert SMALL.offsets == (0, 40, 40, 57)
    assert (SMALL.T, SMALL.N, SMALL.tiles) == (57, 3, 5)


def test_shapes_are_frozen_and_unknown_names_are_refused():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.H = 3
    with pytest.raises(ValueError, match="T8192_H96"):
        find_shape("T8192")


def test_bytes_of_a_full_chunk():
    one, two = Shape("one", (16,), 1), Shape("two", (32,), 1)
    chunk = bwd_recurrence_bytes(two) - bwd_recurrence_bytes(one)
    assert chunk == 75_328 + 37_440
    assert bwd_recurrence_bytes(one) - chunk == 128 * 128 * 4
    assert bwd_recurrence_bytes(two, beta_bytes=2) == bwd_recurrence_bytes(two) - 64


def test_bytes_are_those_of_the_tensors():
    inputs = run.make_inputs(SMALL, "cpu")
    grads = reference.bwd_recurrence(*inputs, dtype=torch.float32)
    grads = grads._replace(dv=grads.dv.bfloat16())
    tensors = (inputs.do, inputs.v, inputs.beta, *inputs.workspace, *grads)
    assert bwd_recurrence_bytes(SMALL) == sum(t.numel() * t.element_size() for t in tensors)


def test_bytes_and_flops_of_a_named_shape():
    shape = find_shape("T8192_H96")
    assert bwd_recurrence_flops(shape) == 512 * 96 * 1056 * 4096
    assert bwd_recurrence_bytes(shape) == 512 * 96 * 112_768 + 96 * 65_536
    assert floor_us(bwd_recurrence_bytes(shape)) == pytest.approx(1302.6, abs=0.1)


# ---------------------------------------------------------------- timing
def test_percentile_interpolates():
    assert timing.percentile([3.0], 80) == 3.0
    assert timing.percentile([5, 1, 4, 2, 3], 20) == pytest.approx(1.8)
    assert timing.percentile([1, 2], 100) == 2
    for samples, percent in (([], 50), ([1.0], 101)):
        with pytest.raises(ValueError):
            timing.percentile(samples, percent)


def test_timing_keeps_samples_in_order():
    t = timing.Timing((9.0, 1.0, 2.0, 3.0, 4.0))
    assert t.samples[0] == 9.0
    assert (t.median, t.p20, t.p80) == pytest.approx((3.0, 1.8, 5.0))


def test_round_robin_interleaves_and_spreads_small_counts():
    order = list(timing.round_robin({"a": 6, "b": 6, "slow": 2}))
    assert [name for name, _ in order].count("slow") == 2
    assert [turn for name, turn in order if name == "a"] == list(range(6))
    at = [i for i, (name, _) in enumerate(order) if name == "slow"]
    assert at[1] - at[0] >= 5  # not next to each other
    assert [name for name, _ in order[:4]] == ["a", "b", "b", "a"]


class Clock:
    """Counts, instead of timing: measurement i takes i microseconds."""

    def __init__(self, log):
        self.log, self.count = log, 0

    def measure(self, function):
        function()
        self.count += 1
        return self.count

    def synchronize(self):
        self.log.append("synchronize")

    def read(self, taken):
        return float(taken)


def test_interleaved_flushes_before_each_timed_call_and_rotates_inputs():
    log = []
    candidates = {
        "one": lambda: log.append("one"),
        "two": [lambda: log.append("two0"), lambda: log.append("two1")],
    }
    found = timing.interleaved(
        candidates,
        repeats={"one": 2, "two": 3},
        warmup=1,
        flush=lambda: log.append("flush"),
        clock=Clock(log),
    )
    assert log[:3] == ["one", "two0", "synchronize"]
    timed = log[3:-1]
    assert timed[::2] == ["flush"] * 5
    assert [name for name in timed[1::2] if name != "one"] == ["two0", "two1", "two0"]
    assert {name: len(t.samples) for name, t in found.items()} == {"one": 2, "two": 3}
    assert sorted(s for t in found.values() for s in t.samples) == [1, 2, 3, 4, 5]


def test_interleaved_refuses_no_repeats():
    with pytest.raises(ValueError, match="repeats"):
        timing.interleaved({"a": print}, repeats=0, flush=print, clock=Clock([]))


# ---------------------------------------------------------------- results
def example_rows():
    shape, moved = "T8192_H96", 5_549_000_000
    fast, slow = timing.Timing((2000.0, 2100.0, 2200.0)), timing.Timing((42000.0,))
    common = dict(moved=moved, flops=10**12)
    op = "bwd_recurrence"
    return [
        results.accuracy_row(op, "typical", "dkd", 1.23456e-3, 3e-3, "kda_cute", variant="tf32/x"),
        results.accuracy_row(op, "typical", "dv", 5e-3, 3e-3, "kda_cute", variant="tf32/x"),
        results.accuracy_row(op, "typical", "dgT", float("nan"), 3e-3, "kda_cute"),
        results.timing_row(op, shape, "kda_cute", "tf32/default", fast, **common),
        results.timing_row(op, shape, "kda_cute", "tf32/x", None, failed=["dv"], **common),
        results.timing_row(op, shape, "scalar", "stored", slow, **common),
    ]


def test_results_round_trip(tmp_path):
    rows = example_rows()
    path = results.write(tmp_path / "new" / "run.json", rows, HEADER)
    assert results.read(path) == {**HEADER, "rows": rows}
    assert set(json.loads(path.read_text())) == {*HEADER, "rows"}
    assert rows[3]["median_us"] == 2100.0


def test_results_refuse_what_they_cannot_describe(tmp_path):
    with pytest.raises(ValueError, match="neither"):
        results.write(tmp_path / "a.json", [{"op": "x"}], HEADER)
    with pytest.raises(ValueError, match="surprise"):
        results.write(tmp_path / "a.json", [example_rows()[0] | {"surprise": 1}], HEADER)
    with pytest.raises(ValueError, match="header"):
        results.write(tmp_path / "a.json", [], {"gpu": "x"})
    with pytest.raises(ValueError, match="never both"):
        results.timing_row("o", "s", "p", "v", None, moved=1, flops=1)
    (tmp_path / "b.json").write_text('{"gpu": "x", "rows": []}')
    with pytest.raises(ValueError, match="driver"):
        results.read(tmp_path / "b.json")


def test_commit_comes_from_the_environment_git_or_the_release(monkeypatch, tmp_path):
    answers = {"rev-parse": "abc", "status": None}
    monkeypatch.setattr(machine, "_output", lambda *command: answers[command[1]])
    monkeypatch.setenv("KDA_CUTE_COMMIT", "def")
    assert machine.commit() == "def"
    monkeypatch.delenv("KDA_CUTE_COMMIT")
    assert machine.commit() == "abc"
    answers["status"] = " M file"
    assert machine.commit() == "abc-dirty"
    answers["rev-parse"] = None
    assert machine.commit() == "unknown"
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.commit().startswith("release ")


def test_surroundings_have_every_key():
    found = results.surroundings()
    assert tuple(found) == results.HEADER
    assert all(isinstance(value, str) and value for value in found.values())


def cells(markdown, first):
    lines = [line for line in markdown.splitlines() if line.startswith(f"| {first}")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_markdown_has_floor_and_ratios():
    markdown = results.to_markdown(example_rows())
    fast, failed, slow = cells(markdown, "T8192_H96")
    assert fast[3:] == ["2,100", "2,040 to 2,160", "5.549", "1,303", "1.61x", "20.0x"]
    assert failed[3] == "gate failed: dv"
    assert failed[-1] == ""
    assert slow[-1] == "1.0x"
    checked = cells(markdown, "typical")
    assert checked[0][4:] == ["1.2e-03", "**5.0e-03** of 0.003", ""]
    assert checked[1][4:] == ["", "", "**not finite** of 0.003"]


def test_markdown_without_scalar_has_no_such_column():
    rows = [row for row in example_rows() if row["provider"] != "scalar"]
    assert "against scalar" not in results.to_markdown(rows)


# ---------------------------------------------------------------- report
def readme(tmp_path, text=f"head\n{BEGIN}\nold\n{END}\ntail\n"):
    path = tmp_path / "README.md"
    path.write_text(text)
    return path


def test_report_takes_the_newest_file_of_each_op(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    mine = example_rows()
    other = [row | {"op": "chunk_kda_fwd"} for row in mine]
    results.write(tmp_path / "old.json", mine + other, HEADER | {"gpu": "old GPU"})
    results.write(tmp_path / "new.json", mine, HEADER | {"date": "2031-01-01", "gpu": "new GPU"})
    path = readme(tmp_path)
    assert report.main([str(path), "--check"]) == 1
    assert "old\n" in path.read_text()
    assert report.main([str(path)]) == 0
    text = path.read_text()
    assert text.startswith(f"head\n{BEGIN}\n")
    assert text.endswith(f"\n{END}\ntail\n")
    assert text.index("new GPU") < text.index("`bwd_recurrence`, kernel") < text.index("old GPU")
    assert text.count("`bwd_recurrence`, kernel") == text.count("`chunk_kda_fwd`, kernel") == 1
    assert report.main([str(path), "--check"]) == 0
    assert "up to date" in capsys.readouterr().out


def test_layout_effects_are_per_chunk_of_a_walk():
    def row(variant, us, shape="T8192_H96", provider="kda_cute"):
        return dict(
            op="bwd_recurrence", shape=shape, provider=provider, variant=variant, median_us=us
        )

    rows = [row("tf32/default", 2000.0), row("tf32/padded", 2051.2), row("bf16/padded", 1.0)]
    rows += [row("stored", 9.0, provider="scalar"), row("tf32/default", 1.0, "var6_H64")]
    rows += [row("tf32/padded", 2.0, "var6_H64")]  # 384 CTAs: three waves, no figure per chunk
    *_, line = report.layout_effects(rows).splitlines()
    # 51.2 us over 512 chunks; the conflicts as test_layouts asserts them, 1980 - 60
    assert line == "| T8192_H96 | tf32 | padded | 1,920 cycles | 100 ns | +2.6% |"
    assert report.layout_effects(rows[2:]) == ""


@pytest.mark.parametrize("text", ["none", END + BEGIN, BEGIN * 2 + END])
def test_report_needs_its_markers(tmp_path, text, capsys):
    path = readme(tmp_path, text)
    file = results.write(tmp_path / "r.json", example_rows(), HEADER)
    assert report.main([str(path), "--results", str(file)]) == 1
    assert path.read_text() == text
    assert "perf:begin" in capsys.readouterr().err


# ---------------------------------------------------------------- the gate
@functools.cache
def small_problem():
    """Inputs, all of the reference's results, the heads that the gate compares and their results."""
    inputs = run.make_inputs(SMALL, "cpu")
    grads = reference.bwd_recurrence(*inputs, dtype=torch.float64)
    heads = run.some_heads(SMALL.H)
    return inputs, grads, heads, run.head_grads(grads, heads)


def reference_candidate(provider="kda_cute", variant="tf32/default", change=lambda grads: grads):
    return run.Candidate(provider, variant, lambda *_: change(small_problem()[1]), "none", 1)


def test_gate_on_some_heads_equals_those_heads_of_all():
    inputs = run.make_inputs(Shape("three", (33,), 5), "cpu")
    heads = run.some_heads(5)
    assert heads == [0, 2, 4]
    expected = reference.bwd_recurrence(*run.head_inputs(inputs, heads), dtype=torch.float64)
    full = run.head_grads(reference.bwd_recurrence(*inputs, dtype=torch.float64), heads)
    for got, want in zip(full, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_gate_passes_the_reference_and_fails_each_wrong_tensor():
    inputs, _, heads, expected = small_problem()
    for tensor in expected._fields:
        for wrong in (1.01, float("nan")):

            def spoil(grads, tensor=tensor, wrong=wrong):
                return grads._replace(**{tensor: getattr(grads, tensor) * wrong})

            good, bad = reference_candidate(), reference_candidate(change=spoil)
            bad = dataclasses.replace(bad, variant="tf32/padded")
            rows, failed = run.gate([good, bad], inputs, expected, heads, SMALL)
            assert failed == {"kda_cute/tf32/padded": [tensor]}
            assert len(rows) == 2 * len(expected)
            assert all(not results.is_timing(row) for row in rows)


def test_a_result_that_should_be_zero_has_to_be():
    inputs, _, heads, expected = small_problem()
    zero = expected._replace(dgT=expected.dgT * 0)
    workspace = run.head_inputs(inputs, heads).workspace
    assert run.errors(zero, zero, workspace)["dgT"] == 0
    assert run.errors(expected, zero, workspace)["dgT"] == math.inf


def test_gate_survives_a_candidate_that_raises():
    def explode(grads):
        raise RuntimeError("no such layout")

    inputs, _, heads, expected = small_problem()
    candidates = [reference_candidate(variant="bf16/odd", change=explode), reference_candidate()]
    rows, failed = run.gate(candidates, inputs, expected, heads, SMALL)
    assert failed == {"kda_cute/bf16/odd": ["RuntimeError"]}
    assert len(rows) == len(expected)


def test_tolerances_follow_precision_and_provider():
    assert reference_candidate(variant="tf32/padded").tolerance("dv") == 3e-3
    assert reference_candidate(variant="bf16/default").tolerance("dkd") == 3e-2
    scalar = reference_candidate("scalar", "stored")
    assert (scalar.tolerance("dkd"), scalar.tolerance("dv")) == (1e-4, 4e-3)


def test_command_line_refuses_unknown_names(capsys):
    for args in (["--shapes", "T1"], ["--variants", "fp8/default"], ["--variants", "tf32"]):
        with pytest.raises(SystemExit) as stop:
            run.main(["bwd_recurrence", *args])
        assert stop.value.code == 2
        assert args[1] in capsys.readouterr().err


@pytest.fixture
def stand_in(monkeypatch):
    """A machine that seems to have a GPU, and an op that is the reference: wrong in bf16, unknown layouts raise."""

    def op(*args, precision, layout):
        if layout not in ("default", "padded", "foreign"):
            raise ValueError(layout)
        grads = reference.bwd_recurrence(*args, dtype=torch.float64)
        return grads._replace(dv=grads.dv * 1.5) if precision == "bf16" else grads

    def kernels_of(function):
        return {"other" if function.keywords["layout"] == "foreign" else "kda_cute_kernel"}

    make_inputs, interleaved = run.make_inputs, timing.interleaved
    copy = timing.Timing((1000.0,))
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setattr(kda_cute, "bwd_recurrence", op, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(results, "surroundings", lambda: HEADER)
    monkeypatch.setattr(run, "make_inputs", lambda shape: make_inputs(shape, "cpu"))
    monkeypatch.setattr(yardstick, "make", lambda: dict.fromkeys(STICKS, lambda: None))
    monkeypatch.setattr(run, "launched_kernels", kernels_of)
    monkeypatch.setattr(run, "measure_copy_bandwidth", lambda: (4.2e12, copy))
    fake_time = functools.partial(interleaved, flush=lambda: None, clock=Clock([]))
    monkeypatch.setattr(run, "interleaved", fake_time)


def run_main(variants, out):
    return run.main(
        ["bwd_recurrence", "--shapes", "small", "--variants", variants, "--repeats", "3"]
        + ["--out", str(out)]
    )


def test_a_run_in_which_all_pass(stand_in, tmp_path, capsys):
    assert run_main("tf32/default,tf32/padded", tmp_path / "r.json") == 0
    rows = results.read(tmp_path / "r.json")["rows"]
    timed = [row for row in rows if results.is_timing(row)]
    assert [row["variant"] for row in timed] == ["copy_", *STICKS, "tf32/default", "tf32/padded"]
    assert timed[3]["bytes"] == bwd_recurrence_bytes(SMALL)
    assert all(row["median_us"] > 0 for row in timed)
    assert [len(row["samples_us"]) for row in timed] == [1, 3, 3, 3, 3]
    assert len(rows) == 5 + 2 * 8
    printed = capsys.readouterr().out
    assert "kda_cute/tf32/padded: ok" in printed
    assert "copy in this run: 4.20 TB/s" in printed


def test_what_fails_is_never_timed(stand_in, tmp_path, capsys):
    variants = "tf32/default,bf16/default,tf32/odd,tf32/foreign"
    assert run_main(variants, tmp_path / "r.json") == 1
    rows = results.read(tmp_path / "r.json")["rows"]
    timed = {row["variant"]: row for row in rows if results.is_timing(row)}
    assert timed["tf32/default"]["median_us"] > 0
    failed = {variant: row["failed"] for variant, row in timed.items() if "failed" in row}
    assert failed == {
        "bf16/default": ["dv"],
        "tf32/odd": ["ValueError"],
        "tf32/foreign": ["kernel"],
    }
    assert all(timed[variant]["median_us"] is None for variant in failed)
    assert "FAILED: dv" in capsys.readouterr().out


def test_a_run_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(kda_cute, "bwd_recurrence", None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main(["bwd_recurrence", "--variants", ""]) == 2
    assert "CUDA" in capsys.readouterr().err


# ---------------------------------------------------------------- level 2: bytes and forms
DENSE = Shape("dense", (70, 70), 2)
OPS = ("chunk_kda_fwd", "chunk_kda_bwd")


@functools.cache
def form_inputs(shape=DENSE):
    return forms.make_inputs(shape, "cpu")


def nbytes(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def test_level_2_bytes_are_those_of_the_tensors():
    for shape in (DENSE, SMALL):
        saved = [
            torch.empty(shape.chunks, shape.H, rows, 128, dtype=torch.bfloat16)
            for rows in (128, 64)  # S, X
        ]
        for form in ("A", "B"):
            x = form_inputs(shape)[form]
            inputs = (x.q, x.k, x.v, x.g, x.beta)
            forward = functools.partial(chunk_kda_bytes, "chunk_kda_fwd", shape, form)
            assert forward(states=False) == nbytes(*inputs, x.v)
            assert forward(states=True) == nbytes(*inputs, x.v, *saved)
            backward = chunk_kda_bytes("chunk_kda_bwd", shape, form, states=True)
            assert backward == nbytes(*inputs, x.do, *inputs, *saved)


def test_bytes_of_a_full_chunk_of_each_kernel():
    shape = Shape("one", (64,), 1)
    wide = [torch.empty(64, 128, dtype=torch.bfloat16)] * 3
    p, qk, eg = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(64), torch.empty(128)
    factors = nbytes(*Factors(*wide, p, qk, eg))
    assert factors == 3 * 16_384 + 8_192 + 256 + 512
    for form, gate, beta in (("A", 32_768, 256), ("B", 16_384, 128)):
        for states in (False, True):
            found = forward_stages(shape, form, states=states)
            assert found["transition"][0] == 2 * 16_384 + gate + beta + factors
            assert found["scan"][0] == factors + 2 * 16_384 + (32_768 + 16_384) * states
            flops = chunk_kda_flops("chunk_kda_fwd", shape)
            assert sum(n for _, n in found.values()) == flops
        found = backward_stages(shape, form)
        assert found["transition"][0] == 2 * 16_384 + gate + beta + factors + 8_192  # INV
        assert found["scan"][0] == factors + 2 * 16_384 + 32_768  # do, dv, dS
        inputs, outputs = 4 * 16_384 + gate + beta, 2 * 16_384 + gate + beta
        parts = 4 * (128 + 1) if form == "B" else 0
        tiles = 2 * 32_768 + 16_384 + 8_192  # S, dS, X, INV
        assert found["gradients"][0] == inputs + outputs + tiles + parts
        flops = chunk_kda_flops("chunk_kda_bwd", shape)
        assert sum(n for _, n in found.values()) == flops == 23.5 * 2 * 64 * 64 * 128


def test_forms_are_one_problem():
    for shape in (DENSE, SMALL):
        inputs = form_inputs(shape)
        assert tuple(inputs) == ("A", "B", "prepared")
        o = {form: forms.expected("chunk_kda_fwd", x, [0, 1])["o"] for form, x in inputs.items()}
        torch.testing.assert_close(o["A"], o["B"], rtol=1e-5, atol=1e-6)
        error = (o["prepared"] - o["B"]).norm() / o["B"].norm()
        assert 1e-4 < error < 1e-2
    assert inputs["B"].g.dtype == inputs["B"].beta.dtype == torch.bfloat16
    assert inputs["A"].g.dtype == inputs["A"].beta.dtype == torch.float32
    assert inputs["A"].g.max() <= 0 <= inputs["A"].beta.min()


@pytest.mark.parametrize("shape", (DENSE, SMALL), ids=lambda shape: shape.name)
@pytest.mark.parametrize("form", ("A", "B"))
def test_calls_are_what_the_gate_expects(shape, form):
    """Our public call, and the backward through it, by its reference backend."""
    function = functools.partial(kda_cute.chunk_kda, backend="reference")
    x, heads = form_inputs(shape)[form], [0, 1]
    call = providers.chunk_kda_call(x)
    returned = {
        "chunk_kda_fwd": providers._packed_output(function(**call)),
        "chunk_kda_bwd": providers._packed_grads(providers._backward(function, call, x.do)()),
    }
    for op, tensors in returned.items():
        want = forms.expected(op, x, heads)
        found = chunk_kda.errors(tensors, want, heads)
        assert set(found) == ({"o"} if op == "chunk_kda_fwd" else {"dq", "dk", "dv", "dg", "dbeta"})
        assert max(found.values()) < 4e-3  # the rounding of the results
        some = chunk_kda.errors(tensors, forms.expected(op, x, [1]), [1])
        assert max(some.values()) < 4e-3


# ---------------------------------------------------------------- level 2: profiler
def test_kernel_calls_belong_to_candidates():
    device = Recorder()
    candidates = {
        "one": lambda: device.launch("a", "b"),
        "none": lambda: None,
        "two": lambda: device.launch("b"),
    }
    found = profiler.kernel_calls(
        candidates, repeats=3, fence=lambda: device.launch("fence"), recorder=device
    )
    names = {n: [[e.name for e in call] for call in calls] for n, calls in found.items()}
    assert names == {"one": [["a", "b"]] * 3, "none": [[]] * 3, "two": [["b"]] * 3}
    first = found["one"][0]
    assert profiler.total([first]).samples == (first[0].us + first[1].us,)
    assert profiler.total([first], "b").samples == (first[1].us,)
    assert profiler.total(found["none"]).median == 0


def test_kernel_calls_refuse_what_they_cannot_tell_apart():
    device = Recorder()
    fence = lambda: device.launch("fence")  # noqa: E731
    with pytest.raises(RuntimeError, match="fences"):
        profiler.kernel_calls({"x": fence}, repeats=2, fence=fence, recorder=device)
    with pytest.raises(RuntimeError, match="the profiler shows"):
        profiler.kernel_calls({"x": fence}, repeats=2, fence=lambda: None, recorder=device)


def test_host_time_waits_before_each_call_only():
    log = []
    timed = profiler.host_time(
        lambda: log.append("call"), repeats=2, synchronize=lambda: log.append("wait")
    )
    assert log == ["wait", "call", "wait", "call", "wait"]
    assert len(timed.samples) == 2
    assert all(us >= 0 for us in timed.samples)


def test_kernels_say_what_is_wrong():
    exact = providers.Kernels(("transition", "scan"), only=True)
    assert exact.complaint(["x_transition_0", "x_scan_0"]) == ""
    assert "no kernel like scan" in exact.complaint(["x_transition_0", "fill"])
    for more in ("copy", "x_scan_1"):
        assert "nothing else" in exact.complaint(["x_transition_0", "x_scan_0", more])
    loose = providers.Kernels(("fused",))
    assert loose.complaint(["fused", "copy"]) == ""
    assert loose.others(["fused", "copy", "copy"]) == ["copy"]
    assert loose.complaint([]) != ""


# ---------------------------------------------------------------- level 2: providers
def test_our_candidates_are_forms_and_options():
    made = providers.make("kda_cute", "chunk_kda_fwd", DENSE, form_inputs(), providers.OPTIONS)
    assert [c.variant for c in made] == ["A/states", "A/nostates", "B/states", "B/nostates"]
    for c in made:
        assert c.states == c.run.keywords["q"].requires_grad == ("/states" in c.variant)
        assert c.kernels.only and c.host
        costs = forward_stages(DENSE, c.form, states=c.states)
        assert c.stages == {f"kernels{name}": cost for name, cost in costs.items()}


@pytest.mark.parametrize("name", ("transition", "scan"))
def test_parts_of_kernel_names_are_their_modules(name):
    """A kernel's name starts with its module's, without dots."""
    module = importlib.import_module(f"kda_cute.kernels.{name}.kernel")
    assert f"kernels{name}" in module.__name__.replace(".", "")


def test_forward_specs_are_those_of_the_run():
    dense, packed = find_shape("T8192_H96"), find_shape("var6_H64")
    few = providers.forward_specs(["B"], ["states"], [dense])
    assert {(s.name, s.config.varlen) for s in few} == {("transition", False), ("scan", False)}
    (transition,) = (s.config for s in few if s.name == "transition")
    assert (transition.g, transition.gate, transition.beta) == ("bf16", "safe", "bf16")
    assert all(s.config.save and not s.config.final for s in few if s.name == "scan")
    more = providers.forward_specs(["A", "B"], providers.OPTIONS, [dense, packed])
    assert len(more) == 2 * (1 + len([s for s in few if s.name == "scan"]) * 2) + 2


def absent(monkeypatch, *names):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_absent_peers_are_skipped_with_a_reason(monkeypatch, capsys):
    absent(monkeypatch, "cudnn", "cudnn.linear_attention.ops", "fla", "fla.ops.kda")
    shape = find_shape("T8192_H96")
    made = chunk_kda.make_candidates(OPS[0], shape, form_inputs(), ["states"], ["cudnn", "fla"])
    assert made == []
    printed = capsys.readouterr().out
    for peer in ("cudnn", "fla"):
        assert f"{peer}: skipped: import {peer}" in printed
    other = find_shape("T8192_H64")
    with pytest.raises(providers.Unavailable, match="T8192_H96, B4_T4096_H32 only"):
        providers.make("fla", OPS[0], other, form_inputs(), [])


def test_cudnn_is_called_by_its_plan_with_what_it_takes(monkeypatch):
    asked = []

    def fwd(*args, **more):
        asked.append((args, more))
        return args[2], None

    monkeypatch.setitem(
        sys.modules,
        "cudnn.linear_attention.ops",
        types.SimpleNamespace(kimi_delta_attention=fwd),
    )
    inputs = form_inputs()
    made = providers.make("cudnn", "chunk_kda_fwd", DENSE, inputs, [])
    assert [c.variant for c in made] == ["A", "B", "prepared"]
    for c in made:
        assert c.results(c.run())["o"] is inputs[c.form].v
        args, more = asked[-1]
        x = inputs[c.form]
        assert all(a is b for a, b in zip(args, (x.q, x.k, x.v, x.g, x.beta), strict=False))
        assert args[5].tolist() == [0, 70, 140]
        assert more["plan_name"] == "kda_hopper_cuda"
        assert more["initial_state"].shape == (2, 2, 128, 128)
        assert more["use_qk_l2norm_in_kernel"] == (c.form != "prepared")
        raw = (more["safe_gate"], more["use_beta_sigmoid_in_kernel"], more["a_log"] is not None)
        assert raw == (c.form == "B",) * 3

    def bwd(*args, **more):
        asked.append((args, more))
        return (*args[1:6], more["initial_state"], None, None)

    op = types.SimpleNamespace(default=bwd)
    monkeypatch.setattr(
        torch.ops, "cudnn", types.SimpleNamespace(kimi_delta_attention_bwd=op), raising=False
    )
    (c,) = providers.make("cudnn", "chunk_kda_bwd", DENSE, inputs, [])
    assert c.variant == "prepared"
    assert list(c.results(c.run())) == ["dq", "dk", "dv", "dg", "dbeta"]
    args, more = asked[-1]
    assert args[0] is inputs["prepared"].do
    assert args[7] == 128**-0.5
    assert more["d_final_state"].shape == (2, 2, 128, 128)


def test_fla_is_called_as_we_are(monkeypatch):
    function = functools.partial(kda_cute.chunk_kda, backend="reference")
    module = types.SimpleNamespace(chunk_kda=function)
    monkeypatch.setitem(sys.modules, "fla.ops.kda", module)
    monkeypatch.setattr(providers, "FLA_SHAPES", ("dense",))
    for op in OPS:
        made = providers.make("fla", op, DENSE, form_inputs(), [])
        assert [c.variant for c in made] == ["A", "B"]
        rows, wrong = chunk_kda.gate(op, made, form_inputs())
        assert not wrong
        assert {row["tensor"] for row in rows} == set(forms.expected(op, form_inputs()["A"], [0]))


# ---------------------------------------------------------------- level 2: a run
@pytest.fixture
def level_2(monkeypatch):
    """Run level 2 on a machine that seems to have a GPU: level_2({name: Provider}, *arguments)."""
    device = seeming_gpu(monkeypatch, SMALL, DENSE)
    fake_time = functools.partial(timing.interleaved, flush=lambda: None, clock=Clock([]))
    monkeypatch.setattr(chunk_kda, "interleaved", fake_time)

    def start(op, made, *more):
        monkeypatch.setattr(providers, "PROVIDERS", {p.name: p for p in made})
        return run.main([op, "--repeats", "3", *more])

    start.device = device
    return start


@pytest.mark.parametrize("op", OPS)
def test_a_level_2_run_in_which_all_pass(level_2, tmp_path, capsys, op):
    ours = Provider(level_2.device, "kda_cute", "A/states", "B/states", kernels=("mine", "copy"))
    cudnn = Provider(level_2.device, "cudnn", "prepared")
    out = tmp_path / "r.json"
    assert level_2(op, [ours, cudnn], "--shapes", "small,dense", "--out", str(out)) == 0
    rows = results.read(out)["rows"]
    timed = [row for row in rows if results.is_timing(row)]
    variants = [*STICKS, "A/states", "A/states/mine", "B/states", "B/states/mine", "prepared"]
    assert [(r["shape"], r["variant"]) for r in timed] == list(
        itertools.product(("small", "dense"), variants)
    )
    assert [row["op"] for row in timed[:3]] == [f"yardstick/{op}"] * 2 + [op]
    assert all(len(row["samples_us"]) == 3 for row in timed)
    whole, kernel = timed[2], timed[3]
    assert 0 < kernel["median_us"] < whole["median_us"]
    assert whole["wall_us"] > 0
    assert whole["host_us"] >= 0
    assert "host_us" not in timed[6]
    assert whole["bytes"] == chunk_kda_bytes(op, SMALL, "A", states=False)
    assert timed[6]["bytes"] == whole["bytes"]  # fp32 g and beta, too
    assert kernel["bytes"] == 4_260_000
    tensors = len(forms.LEAVES) if op == "chunk_kda_bwd" else 1
    assert len(rows) - len(timed) == 2 * 3 * tensors
    printed = capsys.readouterr().out
    assert "kda_cute/A/states also ran: copy" in printed
    assert "| A/states | cudnn/prepared |" in printed
    assert "geometric mean" in printed


def test_what_fails_in_level_2_is_never_timed(level_2, tmp_path, capsys):
    device = level_2.device
    bad = [
        Provider(device, "kda_cute", "B/states", factor=1.5),
        Provider(device, "cudnn", "prepared", raises=ValueError("no plan")),
        Provider(device, "fla", "B", kernels=("theirs",)),
    ]
    out = tmp_path / "r.json"
    assert level_2(OPS[0], bad, "--shapes", "dense", "--fla", "--out", str(out)) == 1
    rows = results.read(out)["rows"]
    timed = [r for r in rows if results.is_timing(r) and not yardstick.is_yardstick(r)]
    assert {row["provider"]: row["failed"] for row in timed} == {
        "kda_cute": ["o"],
        "cudnn": ["ValueError"],
        "fla": ["kernels"],
    }
    assert all(row["median_us"] is None for row in timed)
    assert [p.calls for p in bad[:2]] == [1, 1]  # by the gate
    printed = capsys.readouterr().out
    assert "kda_cute/B/states: FAILED: o" in printed
    assert "no kernel like mine among ['theirs']" in printed


def test_not_a_number_fails_the_gate(level_2):
    ours = Provider(level_2.device, "kda_cute", "A/states", factor=math.nan)
    assert level_2(OPS[0], [ours], "--shapes", "dense", "--no-cudnn") == 1
    assert ours.calls == 1


def test_a_profiler_that_sees_nothing_gives_no_times(level_2, monkeypatch, tmp_path):
    def blind(*_, **__):
        raise RuntimeError("the profiler shows []")

    monkeypatch.setattr(profiler, "kernel_calls", blind)
    ours, out = Provider(level_2.device, "kda_cute", "A/states"), tmp_path / "r.json"
    more = ("--shapes", "dense", "--no-cudnn", "--out", str(out))
    assert level_2(OPS[0], [ours], *more) == 1
    assert results.read(out)["rows"][-1]["failed"] == ["profiler"]


def test_which_providers_a_level_2_run_asks(level_2, monkeypatch):
    asked = []
    nothing = lambda op, shape, **how: asked.append(how) or ([], True)  # noqa: E731
    monkeypatch.setattr(chunk_kda, "run_shape", nothing)
    for flags, wanted in (
        ((), ["kda_cute", "cudnn"]),
        (("--fla", "--no-cudnn"), ["kda_cute", "fla"]),
        (("--no-ours",), ["cudnn"]),
    ):
        assert level_2(OPS[0], [], *flags) == 0
        assert asked[-1]["wanted"] == wanted


def test_level_2_command_line(monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(run.kernels, "object_files", compiled.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for args in (["--forms", "C"], ["--options", "all"], ["--shapes", "T1"]):
        with pytest.raises(SystemExit) as stop:
            run.main(["chunk_kda_fwd", *args])
        assert stop.value.code == 2
        assert args[1] in capsys.readouterr().err
    assert not compiled
    assert run.main(["chunk_kda_fwd", "--compile-only", "--forms", "A"]) == 0
    assert len(compiled[0]) > 0
    assert run.main(["chunk_kda_bwd"]) == 2
    assert "CUDA" in capsys.readouterr().err


# ---------------------------------------------------------------- level 2: tables
def level_2_rows():
    def row(shape, provider, variant, us, moved=4_260_000, **more):
        timed = None if us is None else timing.Timing((us,))
        return results.timing_row(
            OPS[0], shape, provider, variant, timed, moved=moved, flops=1, **more
        )

    host = timing.Timing((40.0,))
    return [
        row("T8192_H96", "kda_cute", "A/states", 200.0, wall=timing.Timing((210.0,)), host=host),
        row("T8192_H96", "kda_cute", "A/states/scan", 2.0),
        row("T2048_H12", "kda_cute", "A/states", 30.0),
        row("T2048_H12", "kda_cute", "A/states/scan", 8.0),
        row("T8192_H96", "kda_cute", "B/states", None, failed=["o"]),
        row("T8192_H96", "cudnn", "prepared", 100.0),
        row("T2048_H12", "cudnn", "prepared", 60.0),
        row("T8192_H96", "cudnn", "B", 100.0),
        row("T8192_H96", "fla", "A", 400.0),
    ]


def test_geometric_means():
    assert compare.geomean([2.0, 8.0]) == pytest.approx(4.0)
    with pytest.raises(ValueError):
        compare.geomean([])


def test_ratios_are_within_a_form_and_to_prepared_inputs():
    rows = level_2_rows()
    assert compare.peer_ratios(rows) == {
        ("A/states", "cudnn/prepared"): {"T8192_H96": 2.0, "T2048_H12": 0.5},
        ("A/states", "fla/A"): {"T8192_H96": 0.5},
    }
    kernels = compare.kernel_ratios(rows)
    assert kernels[("A/states", "scan")] == pytest.approx({"T8192_H96": 2.0, "T2048_H12": 8.0})


def test_level_2_tables():
    markdown = compare.to_markdown(level_2_rows())
    times, host, *_ = (line for line in cells(markdown, "T8192_H96") if line[1] in ("200", "40.0"))
    assert times == ["T8192_H96", "200", "gate failed: o", "100", "100", "400"]
    assert host == ["T8192_H96", "40.0"]
    ratio = cells(markdown, "A/states | cudnn/prepared")[0]
    assert ratio[2:] == ["2.00x", "0.50x", "**1.00x** of 2"]
    assert cells(markdown, "A/states | fla/A")[0][2:] == ["0.50x", "", "**0.50x** of 1"]
    assert cells(markdown, "A/states | scan")[0][2:] == ["2.00x", "8.00x", "**4.00x** of 2"]


def test_report_has_level_2_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    results.write(tmp_path / "r.json", level_2_rows(), HEADER)
    path = readme(tmp_path)
    assert report.main([str(path)]) == 0
    text = path.read_text()
    assert text.count("`chunk_kda_fwd`, kernel time") == 1
    assert "| A/states | cudnn/prepared | 2.00x | 0.50x |" in text


# ---------------------------------------------------------------- the scalar kernel
CONFIGS = [
    ScalarConfig(),
    ScalarConfig(recompute=False),
    ScalarConfig(beta="bfloat16", state="bfloat16", varlen=True),
    ScalarConfig(beta="bfloat16", state="float32", varlen=True, recompute=False),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, vars(c).values())))
def test_scalar_kernel_compiles_without_spills_or_tensor_cores(config, tmp_path):
    (kernel,) = kernels.report(kernels.object_file(scalar_spec(config), folder=tmp_path))
    assert "scalar_recurrence" in kernel.name
    assert kernel.spills == kernel.stack == 0
    assert not {"HMMA", "HGMMA", "DMMA", "IMMA"} & set(kernel.ops)
    assert kernel.ops["FFMA"] > 0


def test_scalar_kernel_fits_in_shared_memory():
    for config in CONFIGS:
        assert smem_bytes(config) <= 232_448
    assert smem_bytes(ScalarConfig()) == 65_536 + 5 * 8192 + 4 * 1024 + 512 + 128


def test_scalar_kernel_has_a_key_for_each_config():
    configs = itertools.product(("float32", "bfloat16"), ("none", "float32"), (True, False))
    keys = {kernels.cache_key(scalar_spec(ScalarConfig(*c))) for c in configs}
    assert len(keys) == 8


def test_scalar_host_function_without_tokens_returns_the_final_gradient():
    shape = Shape("empty", (0, 0), 2)
    inputs = run.make_inputs(shape, "cpu")
    assert scalar_recurrence(*inputs).dinitial_state.count_nonzero() == 0
    final = torch.randn(2, 2, 128, 128).bfloat16()
    grads = scalar_recurrence(*inputs._replace(dfinal_state=final))
    assert torch.equal(grads.dinitial_state, final)
    with pytest.raises(ValueError, match="num_seqs"):
        scalar_recurrence(*run.make_inputs(SMALL, "cpu")[:4], num_seqs=2)


# ---------------------------------------------------------------- sanitize
@pytest.mark.parametrize("factor, code", ((1.0, 0), (0.0, 1), (float("nan"), 1)))
def test_sanitize_holds_its_runs_against_the_reference(monkeypatch, capsys, factor, code):
    """A stand-in that computes the reference, returns zeros, or NaN."""

    def kernel(do, v, beta, *rest):
        workspace, (last, offsets), out = rest[:8], rest[8:10], rest[10:]
        grads = reference.bwd_recurrence(do, v, beta, Workspace(*workspace), last, offsets)
        for to, x in zip(out, grads, strict=True):
            to.copy_(x * factor)

    asked = []
    monkeypatch.setattr(sanitize, "DEVICE", "cpu")
    monkeypatch.setattr(sanitize, "load", lambda *config: asked.append(config) or kernel)
    assert sanitize.main(["--every-lane", "--operator", "bwd_recurrence"]) == code
    assert asked == [(p, x, True) for p in ("tf32", "bf16") for x in ("default", "padded")]
    assert capsys.readouterr().out.count("ok" if code == 0 else "WRONG") == 4


# ---------------------------------------------------------------- eager calls
def test_the_first_calls_are_not_timed(monkeypatch):
    calls, clock = [], iter((0, 3000, 3000, 4000, 4000, 6000))
    monkeypatch.setattr(profiler.time, "perf_counter_ns", lambda: next(clock))
    assert eager.host_us(lambda: calls.append(0), repeats=3, warm=2) == 2.0
    assert len(calls) == 5


def test_wall_time_is_that_of_all_calls_together(monkeypatch):
    calls, clock = [], iter((10.0, 16.0))
    monkeypatch.setattr(eager.time, "perf_counter", lambda: next(clock))
    assert eager.wall_us(lambda: calls.append(0), repeats=3, warm=2) == pytest.approx(2e6)
    assert len(calls) == 5


def test_a_row_has_a_figure_under_every_head():
    reference_call = functools.partial(kda_cute.chunk_kda, backend="reference")
    row = eager.measure(Shape("tiny", (5, 3), 1), reference_call, "cpu", repeats=1)
    assert len(row) == len(eager.HEAD) - 2
    assert all(x > 0 for x in row[:-1]) and row[-1] == 0.0


def test_eager_without_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert eager.main([]) == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err
