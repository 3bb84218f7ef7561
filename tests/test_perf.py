"""The benchmarks' own parts, without a GPU."""

import dataclasses
import functools
import itertools
import json

import pytest
import torch

import kda_cute
from kda_cute import compile as kernels
from kda_cute import reference
from kda_cute.workspace import Workspace
from perf import report, results, run, sanitize, timing
from perf.scalar_recurrence import ScalarConfig, scalar_recurrence, scalar_spec, smem_bytes
from perf.shapes import (
    SHAPES,
    Shape,
    bwd_recurrence_bytes,
    bwd_recurrence_flops,
    find_shape,
    floor_us,
)

SMALL = Shape("small", (40, 0, 17), 2)
HEADER = dict(
    gpu="NVIDIA H200",
    driver="580.1",
    torch="2.11.0",
    cutlass_dsl="4.8.1",
    commit="0123456789abcdef",
    date="2030-01-02T03:04:05+00:00",
)


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


def test_commit_comes_from_git_or_the_environment(monkeypatch):
    answers = {"rev-parse": "abc", "status": None}
    monkeypatch.setattr(results, "_output", lambda *command: answers[command[1]])
    monkeypatch.setenv("KDA_CUTE_COMMIT", "def")
    assert results.commit() == "abc"
    answers["status"] = " M file"
    assert results.commit() == "abc-dirty"
    answers["rev-parse"] = None
    assert results.commit() == "def"
    monkeypatch.delenv("KDA_CUTE_COMMIT")
    assert results.commit() == "unknown"


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
def readme(tmp_path, text=f"head\n{report.BEGIN}\nold\n{report.END}\ntail\n"):
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
    assert text.startswith(f"head\n{report.BEGIN}\n")
    assert text.endswith(f"\n{report.END}\ntail\n")
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


@pytest.mark.parametrize("text", ["none", report.END + report.BEGIN, report.BEGIN * 2 + report.END])
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


def test_error_of_a_result_that_should_be_zero_is_absolute():
    inputs, _, heads, expected = small_problem()
    zero = expected._replace(dgT=expected.dgT * 0)
    workspace = run.head_inputs(inputs, heads).workspace
    assert run.errors(zero, zero, workspace)["dgT"] == 0
    assert run.errors(expected, zero, workspace)["dgT"] > 0


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
    assert [row["variant"] for row in timed] == ["copy_", "tf32/default", "tf32/padded"]
    assert timed[1]["bytes"] == bwd_recurrence_bytes(SMALL)
    assert all(row["median_us"] > 0 for row in timed)
    assert len(rows) == 3 + 2 * 8
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
    assert sanitize.main(["--every-lane"]) == code
    assert asked == [(p, x, True) for p in ("tf32", "bf16") for x in ("default", "padded")]
    assert capsys.readouterr().out.count("ok" if code == 0 else "WRONG") == 4
