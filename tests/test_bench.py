"""`kda-cute bench`: its commands, the runs it plans, pages and pictures, and the proof of compare,
on a machine without a GPU.
"""

import functools
import json
import sys

import pytest
import torch
from click.testing import CliRunner
from gpu_stand_in import HEADER, SMALL, Provider, seeming_gpu

from kda_cute.cli import main
from kda_cute.lab import checkout
from perf import (
    bench,
    chunk_kda,
    compare,
    page,
    plots,
    profiler,
    prove_compare,
    providers,
    results,
    timing,
    yardstick,
)
from perf import run as runner
from perf.shapes import SCALING, SHAPES, find_shape, find_shapes, repeats_of

FWD, BWD = compare.OPS
COMMITTED = sorted(results.FOLDER.glob("*.json"))


def invoke(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# ---------------------------------------------------------------- shapes, samples
def test_groups_of_shapes_stand_for_their_shapes():
    assert find_shapes(["all"]) == list(SHAPES.values())
    assert find_shapes(["T8192_H96", "scaling", "T8192_H96"]) == [
        find_shape("T8192_H96"),
        *SCALING.values(),
    ]
    assert not SHAPES.keys() & SCALING.keys()
    for name, shape in SCALING.items():
        assert (name, shape.N) == (f"T{shape.T}_H{shape.H}", 1)
    with pytest.raises(ValueError, match="no shape"):
        find_shapes([])


def test_short_calls_are_repeated_more_often():
    repeats = {name: repeats_of(find_shape(name), 60) for name in SHAPES}
    assert repeats == dict.fromkeys(SHAPES, 60) | {"T8192_H16": 240, "T2048_H12": 480}


def test_condensed_samples_are_medians_of_neighbours():
    t = timing.Timing((1.0, 9.0, 2.0, 3.0, 3.0, 30.0, 5.0))
    assert t.condensed(7) == t.samples
    assert t.condensed(3) == (2.0, 3.0, 5.0)
    with pytest.raises(ValueError, match="most"):
        t.condensed(0)
    row = results.timing_row("o", "s", "p", "v", timing.Timing((1.2345,) * 480), moved=1, flops=1)
    assert row["samples_us"] == [1.23] * 60


# ---------------------------------------------------------------- yardsticks
def test_yardsticks_say_what_they_move_and_multiply(monkeypatch):
    monkeypatch.setattr(yardstick, "COPY_ELEMENTS", 64)
    for name, size in (("M", 8), ("N", 16), ("K", 32)):
        monkeypatch.setattr(yardstick, name, size)
    made = yardstick.make("cpu")
    copied, product = made["copy"](), made["matmul"]()
    assert (copied.numel(), copied.dtype) == (64, torch.float32)
    assert (tuple(product.shape), product.dtype) == ((8, 16), torch.bfloat16)
    t = timing.Timing((1.0, 2.0))
    rows = yardstick.rows(FWD, SMALL, dict.fromkeys(made, t))
    assert [(r["op"], r["shape"], r["variant"]) for r in rows] == [
        ("yardstick/chunk_kda_fwd", "small", "copy"),
        ("yardstick/chunk_kda_fwd", "small", "matmul"),
    ]
    assert [r["bytes"] for r in rows] == [2 * 64 * 4, 2 * (8 * 32 + 32 * 16 + 8 * 16)]
    assert [r["flops"] for r in rows] == [0, 2 * 8 * 16 * 32]
    assert all(yardstick.is_yardstick(r) for r in rows)


# ---------------------------------------------------------------- what a run has
def test_jobs_are_ops_on_shapes_by_those_who_serve_them():
    jobs, left_out = bench.make_jobs([runner.OP, FWD], shapes=["T2048_H12"], rounds=10)
    assert [(job.op, job.shape.name) for job in jobs] == [
        (runner.OP, "T2048_H12"),
        (FWD, "T2048_H12"),
    ]
    assert [c.name for c in jobs[0].how["candidates"]] == [
        "kda_cute/tf32/default",
        "kda_cute/bf16/default",
    ]
    assert [c.repeats for c in jobs[0].how["candidates"]] == [80, 80]
    assert jobs[1].how["wanted"] == ["kda_cute", "cudnn"]
    assert jobs[1].how["repeats"] == 80
    assert left_out == ["bwd_recurrence: cudnn has no such op"]


def test_each_op_has_shapes_of_its_own():
    jobs, _ = bench.make_jobs(bench.OPS, wanted=["kda_cute"])
    by_op = {op: [j.shape.name for j in jobs if j.op == op] for op in bench.OPS}
    assert by_op == {runner.OP: ["T8192_H96"], FWD: list(SHAPES), BWD: list(SHAPES)}


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(ops=["chunk"]), "op 'chunk'"),
        (dict(shapes=["T1"]), "shape 'T1'"),
        (dict(wanted=["triton"]), "providers 'triton'"),
        (dict(wanted=[]), "providers: none given"),
        (dict(forms=["C"]), "forms 'C'"),
        (dict(options=["all"]), "options 'all'"),
        (dict(rounds=0), "rounds must be at least 1"),
        (dict(ops=[FWD], wanted=["scalar"]), "serve none of chunk_kda_fwd"),
        (dict(ops=[runner.OP], variants=["fp8/x"]), "variant 'fp8/x'"),
    ],
)
def test_unknown_names_are_refused(wrong, words):
    ops = wrong.pop("ops", [FWD])
    with pytest.raises(ValueError, match=words):
        bench.make_jobs(ops, **wrong)


def test_list_says_what_there_is_and_why_not(no_gpu):
    done = invoke("run", "--list")
    assert done.exit_code == 0
    assert all(name in done.stdout for name in (*SHAPES, *SCALING, *bench.OPS))
    assert "cudnn      not here: no CUDA device" in done.stdout
    found = json.loads(invoke("run", "--list", "--json").stdout)
    assert {p["name"] for p in found["providers"]} == set(bench.PROVIDERS)
    assert [s["name"] for s in found["shapes"]["all"]] == list(SHAPES)


def test_absent_peers_are_listed_with_their_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    for name in ("cudnn", "cudnn.linear_attention.ops", "fla", "fla.ops.kda"):
        monkeypatch.setitem(sys.modules, name, None)
    why = {p["name"]: p["why_not"] for p in bench.listing()["providers"]}
    assert why["kda_cute"] == "needs a Hopper GPU (9.0), not 8.0"
    assert why["cudnn"].startswith("import cudnn.linear_attention.ops: ModuleNotFoundError")
    assert why["fla"].startswith("import fla.ops.kda: ModuleNotFoundError")
    assert why["scalar"] == ""


def test_a_run_without_a_gpu_says_so(no_gpu):
    done = invoke("run", FWD)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "needs a CUDA device" in done.stderr
    done = invoke("run", "--shapes", "T1")
    assert done.exit_code == 2
    assert "shape 'T1'" in done.stderr


def test_without_a_checkout_the_benchmarks_are_missed(monkeypatch, tmp_path):
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    done = invoke("run", "--list")
    assert done.exit_code == 2
    assert "needs a checkout of the repository" in done.stderr


# ---------------------------------------------------------------- a run on a stand-in
@pytest.fixture
def device(monkeypatch):
    """A machine that seems to have a GPU; its kernels are 1, 2, .. us long, in turn."""
    made = seeming_gpu(monkeypatch, SMALL)
    monkeypatch.setattr(
        chunk_kda, "interleaved", lambda runs, **_: dict.fromkeys(runs, timing.Timing((1.0,)))
    )
    return made


def serve(monkeypatch, *made):
    monkeypatch.setattr(providers, "PROVIDERS", {p.name: p for p in made})


def test_a_run_writes_samples_and_prints_only_json(device, monkeypatch, tmp_path):
    def absent(*_):
        raise providers.Unavailable("import cudnn: not there")

    serve(monkeypatch, Provider(device, "kda_cute", "A/states"))
    providers.PROVIDERS["cudnn"] = absent
    out = tmp_path / "r.json"
    done = invoke("run", FWD, "--shapes", "small", "--rounds", "2", "--out", out, "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found == results.read(out)
    timed = {r["variant"]: r for r in found["rows"] if results.is_timing(r)}
    assert list(timed) == ["copy", "matmul", "A/states", "A/states/mine"]
    assert all(len(r["samples_us"]) == 16 for r in timed.values())
    assert "cudnn: skipped: import cudnn: not there" in done.stderr


def test_a_row_that_fails_its_gate_is_not_timed_and_gives_exit_code_1(
    device, monkeypatch, tmp_path
):
    ours = Provider(device, "kda_cute", "A/states", factor=1.5)
    serve(monkeypatch, ours)
    done = invoke("run", FWD, "--shapes", "small", "--providers", "kda_cute", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["rows"][-1]["failed"] == ["o"]
    assert ours.calls == 1


def test_a_run_of_absent_providers_could_not_be_done(device, monkeypatch):
    def absent(*_):
        raise providers.Unavailable("import cudnn: not there")

    monkeypatch.setattr(providers, "PROVIDERS", {"cudnn": absent})
    done = invoke("run", FWD, "--shapes", "small", "--providers", "cudnn")
    assert done.exit_code == 2
    assert "none of the providers" in done.stderr


# ---------------------------------------------------------------- compare
def results_file(path, us, **header):
    timings = timing.Timing(tuple(us * (1 + i % 7 * 1e-4) for i in range(40)))
    rows = [results.timing_row(FWD, "T8192_H96", "kda_cute", "A/states", timings, moved=1, flops=1)]
    return results.write(path, rows, HEADER | header)


def test_compare_has_an_exit_code_for_each_end(tmp_path, monkeypatch):
    base, slow = (results_file(tmp_path / f"{us}.json", us) for us in (100.0, 105.0))
    other = results_file(tmp_path / "other.json", 100.0, gpu="NVIDIA H100", driver="1")
    assert invoke("compare", base, base).exit_code == 0
    done = invoke("compare", base, slow)
    assert done.exit_code == 1
    assert "**regression**" in done.stdout
    assert invoke("compare", base, slow, "--tolerance", "0.06").exit_code == 0
    done = invoke("compare", base, other)
    assert done.exit_code == 2
    assert all(word in done.stderr for word in ("NVIDIA H200", "NVIDIA H100", str(base)))
    newer = results_file(tmp_path / "newer.json", 100.0, driver="590")
    done = invoke("compare", base, newer, "--json")
    assert json.loads(done.stdout)["rows"][0]["verdict"] == "unchanged"
    assert "warning: driver: 580.1 in BASE, 590 in NEW" in done.stderr
    (tmp_path / "junk.json").write_text("{")
    assert invoke("compare", base, tmp_path / "junk.json").exit_code == 2


def test_a_baseline_goes_by_its_name_and_its_absence_says_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "BASELINES", tmp_path)
    new = results_file(tmp_path / "new.json", 100.0)
    done = invoke("compare", "h200", new)
    assert done.exit_code == 2
    assert "no baseline 'h200'" in done.stderr
    assert "--out perf/baselines/h200.json" in done.stderr
    done = invoke("compare", tmp_path / "none.json", new)
    assert done.exit_code == 2
    assert "there is no file" in done.stderr
    results_file(tmp_path / "h200.json", 100.0)
    assert invoke("compare", "h200", new).exit_code == 0


# ---------------------------------------------------------------- report
def timed(shape, provider, variant, us, op=FWD):
    return results.timing_row(
        op, shape, provider, variant, timing.Timing((us,)), moved=4_260_000, flops=10**9
    )


def test_panels_hold_a_form_with_its_peers():
    rows = [
        timed("T8192_H96", "kda_cute", "A/states", 4.0),
        timed("T8192_H96", "kda_cute", "A/states/scan", 1.0),
        timed("T8192_H96", "kda_cute", "B/states", 4.0),
        timed("T8192_H96", "cudnn", "prepared", 4.0),
        timed("T8192_H96", "fla", "A", 4.0),
    ]
    panels = plots.panels_of(rows)
    assert {form: list(series) for form, series in panels.items()} == {
        "A": ["kda_cute A/states", "cudnn prepared", "fla A"],
        "B": ["kda_cute B/states", "cudnn prepared"],
    }
    level_1 = [
        timed("T8192_H96", "kda_cute", v, 4.0, "bwd_recurrence") for v in ("tf32/x", "bf16/x")
    ]
    assert list(plots.panels_of(level_1)) == [""]


def test_scaling_lines_share_the_other_dimension():
    shapes = ["T8192_H96", "T8192_H16", "T32768_H32", "T8192_H32", "var6_H64", "B4_T4096_H32"]
    rows = [timed(s, "kda_cute", "A/states", float(i + 1)) for i, s in enumerate(shapes)]
    assert plots.scaling_series(rows) == {
        "T": {"H = 32": {"kda_cute A/states": [(8192, 4.0), (32768, 3.0)]}},
        "H": {"T = 8192": {"kda_cute A/states": [(16, 2.0), (32, 4.0), (96, 1.0)]}},
    }


@pytest.fixture
def drawn(tmp_path):
    pytest.importorskip("matplotlib")
    done = invoke("report", *COMMITTED, "--out", tmp_path / "a", "--json")
    assert done.exit_code == 0
    return tmp_path / "a", [tmp_path.joinpath(p) for p in json.loads(done.stdout)]


def test_the_page_names_its_command_and_every_picture_it_shows(drawn):
    folder, (written, *pictures) = drawn
    text = written.read_text()
    assert written == folder / page.PAGE
    assert "kda-cute bench report" in text
    shown = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line[:2] == "!["]
    assert shown == [picture.name for picture in pictures]
    assert {p.name for p in folder.iterdir()} == {page.PAGE, *shown}
    assert len([name for name in shown if FWD in name]) == len(plots.PICTURES)
    assert all("<svg" in picture.read_text() for picture in pictures)
    assert "| T8192_H96 |" in text


def test_the_same_rows_give_the_same_bytes(drawn, tmp_path):
    folder, (_, *pictures) = drawn
    assert invoke("report", *COMMITTED, "--out", tmp_path / "b").exit_code == 0
    for picture in pictures:
        assert (tmp_path / "b" / picture.name).read_bytes() == picture.read_bytes()


def test_every_picture_is_a_white_card(drawn):
    for picture in drawn[1][1:]:
        assert "fill: #ffffff" in picture.read_text().split('id="patch_1"')[1][:600]


def test_report_refuses_mixed_gpus_and_missing_plots(tmp_path, monkeypatch):
    one = results_file(tmp_path / "a.json", 1.0)
    rows = [timed("T8192_H96", "kda_cute", "A/states", 1.0, BWD)]
    two = results.write(tmp_path / "b.json", rows, HEADER | {"gpu": "NVIDIA H100"})
    done = invoke("report", one, two, "--out", tmp_path / "o")
    assert done.exit_code == 2
    assert "different GPUs: NVIDIA H100, NVIDIA H200" in done.stderr
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    done = invoke("report", one, "--out", tmp_path / "o")
    assert done.exit_code == 2
    assert "pip install -e '.[plots]'" in done.stderr


# ---------------------------------------------------------------- the proof
class Chip:
    """A device whose kernels take what they are launched with, in microseconds, and a little more
    or less by turns.
    """

    def __init__(self):
        self.ran, self.turn = [], 0

    def launch(self, name, us):
        self.turn += 1
        self.ran.append((name, us * (1 + (self.turn * 5 % 11 - 5) * 2e-4)))

    def __call__(self, function):
        self.ran.clear()
        function()
        return [profiler.Event(n, float(i), us) for i, (n, us) in enumerate(self.ran)]


@pytest.fixture
def chip(monkeypatch):
    """A stand-in for a GPU on which a further kernel takes 1 us and 1 us per 100,000 elements."""
    made = Chip()
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(results, "surroundings", lambda: HEADER)
    sticks = {
        n: functools.partial(made.launch, n, us) for n, us in (("copy", 64.0), ("matmul", 90.0))
    }
    monkeypatch.setattr(yardstick, "make", lambda: sticks)
    seen = functools.partial(
        profiler.kernel_calls, fence=lambda: made.launch("fence", 9.0), recorder=made
    )
    monkeypatch.setattr(profiler, "kernel_calls", seen)

    def candidate(variant, us):
        def run():
            made.launch("kernelstransition", us * 0.6)
            made.launch("kernelsscan", us * 0.4)

        return providers.Candidate(
            "kda_cute", variant, run, lambda _: {}, KERNELS,
            stages={"kernelsscan": (10**6, 1)}, states=variant == "A/states",
        )  # fmt: skip

    candidates = [candidate("A/states", 200.0), candidate("A/nostates", 150.0)]
    monkeypatch.setattr(chunk_kda, "prepare", lambda *_, **__: (candidates, [], {}))

    def step(c, elements):
        def run():
            c.run()
            made.launch("add", 1 + elements / 1e5)

        return run

    calibrate = functools.partial(prove_compare.calibrate, step=step)
    monkeypatch.setattr(prove_compare, "calibrate", calibrate)
    made.candidates, made.step = candidates, step
    return made


KERNELS = providers.Kernels(("kernelstransition", "kernelsscan"), only=True)


def test_the_slowed_candidate_takes_five_percent_more(chip):
    slow, by = prove_compare.calibrate(chip.candidates[0])
    assert by == pytest.approx(0.05, abs=0.003)
    calls = profiler.kernel_calls({"x": slow.run}, repeats=2)["x"]
    assert [e.name for e in calls[0]] == [*KERNELS.required, "add"]
    assert slow.kernels.complaint([e.name for e in calls[0]]) == ""
    assert chip.candidates[0].kernels.complaint([e.name for e in calls[0]]) != ""


def test_a_slowdown_that_cannot_be_made_voids_the_proof(chip, monkeypatch):
    with pytest.raises(prove_compare.Void, match="the nearest"):
        prove_compare.calibrate(chip.candidates[0], measure=lambda *_: 0.2)
    with pytest.raises(prove_compare.Void, match="just one more kernel"):
        prove_compare.overhead(chip.candidates[0], chip.candidates[0].run, 2)


def test_the_proof_counts_what_was_caught_and_what_passed(chip, tmp_path, capsys):
    out = tmp_path / "proof.json"
    more = ["--shapes", "small", "--pairs", "3", "--rounds", "5", "--out", str(out)]
    assert prove_compare.main(["--op", FWD, *more]) == 0
    assert "caught 3/3, passed 3/3" in capsys.readouterr().out
    (found,) = json.loads(out.read_text())["shapes"]
    assert (found["pairs"], found["passed"], found["caught"]) == (3, 3, 3)
    assert 0.04 < found["slowed_by"] < 0.07
    for one in found["runs"]:
        assert one["unchanged"]["verdict"] == "unchanged"
        assert one["slowed"]["verdict"] == "regression"
        assert one["slowed"]["ratio"] == pytest.approx(1 + found["slowed_by"], abs=0.004)
        assert one["false"] == []


def test_a_slowdown_that_is_missed_fails_the_proof(chip, monkeypatch, capsys):
    # The further kernel hides during calibration only.
    def hidden(c, elements):
        return c.run

    calibrate = functools.partial(
        prove_compare.calibrate.func, step=hidden, measure=lambda *_: 0.05
    )
    monkeypatch.setattr(prove_compare, "calibrate", calibrate)
    assert prove_compare.main(["--shapes", "small", "--pairs", "2", "--rounds", "5"]) == 1
    assert "caught 0/2, passed 2/2" in capsys.readouterr().out


def test_a_wrong_candidate_voids_the_proof(chip, monkeypatch, capsys):
    wrong = {"kda_cute/A/states": ["o"]}
    monkeypatch.setattr(chunk_kda, "prepare", lambda *_, **__: (chip.candidates, [], wrong))
    assert prove_compare.main(["--shapes", "small"]) == 2
    assert "wrong, so not timed" in capsys.readouterr().err


def test_the_proof_needs_a_gpu_and_known_names(no_gpu, capsys):
    assert prove_compare.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    for wrong in (["--variant", "C/states"], ["--variant", "A/x"], ["--pairs", "0"]):
        with pytest.raises(SystemExit) as stop:
            prove_compare.main(wrong)
        assert stop.value.code == 2


def test_the_further_step_depends_on_the_result():
    result = torch.tensor([[3.0, 5.0], [7.0, 9.0]]).t()

    def run():
        return result

    c = providers.Candidate("kda_cute", "A/states", run, lambda r: {"o": r}, KERNELS)
    seen = []
    add = torch.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "add", lambda *a, **k: seen.append(add(*a, **k)))
        assert prove_compare.further_step(c, 4)() is result
    assert seen[0].tolist() == [3.0] * 4
