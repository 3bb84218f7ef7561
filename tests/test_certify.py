"""`kda-cute certify`: what it measures, that planted faults make it fail, and its files.

Without a GPU: the faults are planted into the reference, which it then certifies.
"""

import json
import math

import pytest
import torch
from click.testing import CliRunner

import kda_cute
from kda_cute import machine, reference
from kda_cute.accuracy import certificate, document, measure, tolerances
from kda_cute.accuracy.calls import exact_gradients, results_and_gradients
from kda_cute.accuracy.certificate import Certificate, Line
from kda_cute.accuracy.errors import Compared, failures
from kda_cute.accuracy.measure import Case
from kda_cute.cli import main
from kda_cute.lab import doctor

PACKED = Case("mixed+states", lengths=(5, 0, 66), H=1)
SMALL = Case("weak+states", T=20, H=1)


def chunk_kda(**call):
    return kda_cute.chunk_kda(**call, backend="reference")


# ---------------------------------------------------------------- planted faults
def with_value(x, value):
    """x with another value, and its gradient."""
    return x + (value - x).detach()


def with_gradient(x, factor):
    """x with a multiple of its gradient."""
    same = x.clone()
    if same.requires_grad:
        same.register_hook(lambda gradient: factor * gradient)
    return same


def without_tail_mask(**call):
    """A sequence's last chunk takes the tokens after its end along, up to a whole chunk."""
    at = call["cu_seqlens"].tolist()
    o, states = [], []
    for n, (start, end) in enumerate(zip(at, at[1:], strict=False)):
        stop = min(start + -(-(end - start) // 64) * 64, at[-1])
        rows = {x: call[x][:, start:stop] for x in ("q", "k", "v", "g", "beta")}
        first = call["initial_state"][n : n + 1]
        one, state = chunk_kda(**call | rows | dict(initial_state=first, cu_seqlens=None))
        o.append(one[:, : end - start])
        states.append(state)
    return torch.cat(o, 1), torch.cat(states)


def with_transposed_final_state(**call):
    o, state = chunk_kda(**call)
    return o, state.mT


def with_transposed_initial_state(**call):
    return chunk_kda(**call | dict(initial_state=call["initial_state"].mT))


def with_zero_dA_log(**call):
    return chunk_kda(**call | dict(A_log=with_gradient(call["A_log"], 0.0)))


def with_zeros_in_o(**call):
    o, state = chunk_kda(**call)
    zeros = o.detach().clone()
    zeros[:, 3] = 0
    return with_value(o, zeros), state


def with_do_ignored(**call):
    o, state = chunk_kda(**call)
    return with_gradient(o, 0.0), state


def with_dfinal_state_ignored(**call):
    o, state = chunk_kda(**call)
    return o, with_gradient(state, 0.0)


def with_nan_in_dv(**call):
    return chunk_kda(**call | dict(v=with_gradient(call["v"], math.nan)))


FAULTS = {  # what is planted: the case, and tensors that must miss and that must not
    without_tail_mask: (PACKED, {"S_T", "dk", "dv", "dg", "dbeta", "dS0"}, {"o", "dq"}),
    with_transposed_final_state: (SMALL, {"S_T", "dk", "dv", "dS0"}, {"o"}),
    with_transposed_initial_state: (SMALL, {"o", "S_T", "dq", "dk", "dg", "dS0"}, {"dv"}),
    with_zero_dA_log: (SMALL, {"dA_log"}, {"o", "S_T", "dq", "dk", "dg", "ddt_bias", "dS0"}),
    with_zeros_in_o: (SMALL, {"o"}, {"S_T", "dq", "dk", "dv", "dg", "dA_log"}),
    with_do_ignored: (SMALL, {"dq", "dk", "dv", "dg", "dbeta", "dA_log", "dS0"}, {"o", "S_T"}),
    with_dfinal_state_ignored: (SMALL, {"dk", "dv", "dg", "dbeta", "dS0"}, {"o", "S_T", "dq"}),
    with_nan_in_dv: (SMALL, {"dv"}, {"o", "S_T", "dq", "dk", "dg", "dA_log"}),
}


def plan_of(*cases):
    return lambda op, form, backend, chosen: list(cases)


def certified(function, case, **more):
    return certificate.certify(
        ops=("chunk_kda",),
        backend="reference",
        device="cpu",
        chunk_kda=function,
        plan=plan_of(case),
        **more,
    )


def misses(made):
    return {line.tensor for line in made.misses}


def test_the_reference_passes():
    for case in (PACKED, SMALL):
        made = certified(chunk_kda, case)
        assert not made.misses, made.misses
        assert {"o", "S_T", *measure.TENSORS.values()} == {line.tensor for line in made.lines}
        assert {line.variant for line in made.lines} == {"chunk form", "rounded"}
        assert "kernels were not certified" in made.notes[0]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_misses(fault):
    case, must, must_not = FAULTS[fault]
    found = misses(certified(fault, case))
    assert must <= found and not must_not & found, found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_misses_the_tolerances_of_the_kernels(fault):
    """The same, measured as kernels are."""
    case, must, must_not = FAULTS[fault]
    found = set(failures(measure.measure(fault, case, "cpu")))
    assert must <= found and not must_not & found, found


def test_a_fault_of_level_1_misses():
    def without_dv(*arguments):
        grads = reference.bwd_recurrence(*arguments)
        return grads._replace(dv=torch.zeros_like(grads.dv))

    def found(function):
        return certificate.certify(
            ops=("bwd_recurrence",),
            backend="reference",
            device="cpu",
            bwd_recurrence=function,
            plan=plan_of(Case("mixed+states", lengths=(5, 0, 17), H=1), SMALL),
        )

    good = found(reference.bwd_recurrence)
    assert not good.misses and {line.shape for line in good.lines} == {"var3_H1", "T20_H1"}
    assert misses(found(without_dv)) == {"dv"}


def test_a_call_that_raises_is_a_miss_and_the_others_get_their_turn():
    def fails_once(**call):
        if call["q"].shape[1] == 20:
            raise RuntimeError("no luck")
        return chunk_kda(**call)

    made = certificate.certify(
        ops=("chunk_kda",),
        backend="reference",
        device="cpu",
        chunk_kda=fails_once,
        plan=plan_of(SMALL, SMALL._replace(T=21)),
    )
    assert misses(made) == {"RuntimeError"} and "no luck" in made.notes[-1]
    assert {line.tensor for line in made.lines if line.ok} >= {"o", "dA_log", "dS0"}


@pytest.mark.parametrize("fault", (with_zero_dA_log, with_transposed_final_state))
def test_the_exit_code_tells_of_a_fault(fault, monkeypatch, tmp_path):
    monkeypatch.setattr(certificate, "_chunk_kda", lambda backend: fault)
    monkeypatch.setattr(certificate, "REFERENCE_QUICK", certificate.REFERENCE_QUICK._replace(T=17))
    case = "weak+states"
    arguments = ["certify", "--op", "chunk_kda", "--regimes", case, "--out", str(tmp_path)]
    result = CliRunner().invoke(main, [*arguments, "--backend", "reference"])
    assert result.exit_code == 1, result.output
    assert "MISS" in result.output and "miss their tolerance" in result.output
    assert json.loads((tmp_path / "certificate.json").read_text())["passed"] is False


# ---------------------------------------------------------------- numbers
def test_numbers_are_those_of_the_tests():
    """The GPU tests assert what compare_results and compare_gradients return; so does `measure`."""
    case = PACKED
    call, ups, floor = measure.draw(case, "cpu")
    results, got = results_and_gradients(lambda c: chunk_kda(**c), call, *ups)
    exact = measure.calls.oracle(call, reference.scan_forward)
    expected = measure.compare_results(call, results, exact, case.regime)
    exact = exact_gradients(call, *ups)
    expected |= measure.compare_gradients(call, got, exact, case.regime, floor=floor)
    assert measure.measure(chunk_kda, case, "cpu") == measure.by_tensor(expected)
    assert expected["q of a sequence"].tolerance == 2 * expected["q"].tolerance == 2 * 8e-3


def test_a_bad_tail_does_not_hide_among_other_rows():
    def bad_tail(**call):
        o, state = chunk_kda(**call)
        spoiled = o.detach().clone()
        spoiled[:, 4] *= 1.05  # the last row of the first sequence
        return with_value(o, spoiled), state

    found = measure.measure(bad_tail, PACKED, "cpu")
    assert set(failures(found)) == {"o of a sequence", "o of last rows"}


def test_every_regime_has_tolerances_and_medians_are_those_of_the_peers():
    for regime in tolerances.REGIMES:
        assert len(tolerances.backward(regime)) == 8 and len(tolerances.forward(regime)) == 2
    assert tolerances.medians("weak") == {}
    allowed = tolerances.medians("ub_burst")
    assert allowed["o"] == pytest.approx(1.3 * 4.4e-3) and allowed["g"] == pytest.approx(6e-3)
    assert allowed["initial_state"] == pytest.approx(1.3 * 2.5e-3) and allowed["A_log"] == 6e-3


def line(errors, tensor="dA_log", form="B", variant=""):
    """The line of such errors, to a tolerance of 20e-3 each, of the typical regime."""
    runs = [(Case("typical", form), Compared(e, 20e-3)) for e in errors]
    return certificate.lines(
        "chunk_kda", {("typical", "T512_H2", tensor, "kda_cute", variant): runs}
    )[0]


def test_a_line_has_the_worst_error_and_the_median():
    found = line([1e-3, 2e-3, 19e-3, 4e-3, 3e-3])
    assert (found.error, found.median, found.median_tolerance) == (19e-3, 3e-3, 6e-3)
    assert found.ok and not line([1e-3, 2e-3, 21e-3, 4e-3, 3e-3]).ok
    assert not line([7e-3] * 5).ok  # each is within, their median is not
    assert line([7e-3] * 4).ok  # of four seeds it is not judged
    assert line([7e-3] * 5, variant="rounded").ok  # nor of anything but kernels
    assert not line([1e-3, math.nan, 1e-3, 1e-3, 1e-3]).ok


# ---------------------------------------------------------------- which cases
@pytest.mark.parametrize("backend", ("kernels", "reference"))
def test_cases_cover_what_faults_need(backend):
    quick, full = (certificate.cases("chunk_kda", form, backend) for form in ("quick", "full"))
    for cases in (quick, full):
        states = [c for c in cases if c.regime.endswith("+states")]
        assert {c.regime.split("+")[0] for c in states} >= {"typical", "weak", "mixed", "ub_burst"}
        packed = [c for c in cases if c.lengths]
        assert all(0 in c.lengths and any(n % 64 for n in c.lengths) for c in packed)
        assert {c.v_first for c in packed} == {True, False}
        assert any(c.T % 64 and c.lengths is None for c in states)
        assert set(tolerances.PEERS) <= {c.regime for c in cases}
    assert {c.regime for c in full} == set(tolerances.REGIMES)
    assert len(quick) < len(full) / 2
    assert {c.form for c in full} == ({"A", "B", "C"} if backend == "kernels" else {"B"})
    if backend == "kernels":
        seeds = {c.seed for c in full if c.regime == "typical" and c.form == "B" and c.T == 512}
        assert seeds == set(range(5))


def test_chosen_regimes_alone_are_measured():
    assert {c.regime for c in certificate.cases("chunk_kda", "quick", "kernels", ["weak"])} == {
        "weak"
    }
    assert certificate.cases("bwd_recurrence", "quick", "kernels", ["weak"]) == []


def test_zero_states_are_given_where_a_regime_has_none():
    call = measure.draw(Case("typical", T=3, H=1), "cpu").call
    assert call["initial_state"].shape == (1, 1, 128, 128) and not call["initial_state"].any()
    assert measure.draw(Case("typical", T=3, H=1, state=False), "cpu").call["initial_state"] is None


# ---------------------------------------------------------------- peers
class FakePeer:
    name = "fake"

    def measure(self, case, device):
        if case.T == 21:
            raise certificate.Unavailable("not that one")
        return {"o": Compared(0.5, 10e-3)}


def test_a_peer_stands_beside_the_package_and_is_not_judged():
    made = certificate.certify(
        ops=("chunk_kda",),
        backend="reference",
        device="cpu",
        chunk_kda=chunk_kda,
        peers=[FakePeer()],
        plan=plan_of(SMALL, SMALL._replace(T=21)),
    )
    assert not made.misses
    assert made.skipped == {"fake, some regimes": "not that one"}
    head, rows = document.table_rows(made.lines)
    assert head[-1] == "fake x1e-3"
    beside = {(row[2], row[3]): row[-1] for row in rows}
    assert beside["T20_H1", "o"] == "500" and beside["T21_H1", "o"] == ""


def test_peers_that_are_not_installed_are_skipped_with_the_reason():
    from kda_cute.accuracy import peers

    found, skipped = peers.find()
    assert {p.name for p in found} | set(skipped) == {"fla", "cudnn"}
    assert all(why.startswith("import ") for why in skipped.values())


# ---------------------------------------------------------------- files and command line
def example(error=1e-3):
    made = Certificate("kernels", "full", skipped={"fla": "import fla: no"})
    common = ("chunk_kda", "typical", "T512_H2")
    made.lines = [
        Line(*common, "o", "kda_cute", "", 15, error, 10e-3, 1e-3, 5.33e-3),
        Line(*common, "dA_log", "kda_cute", "", 15, 0.5, math.inf, 0.5, math.inf),
        Line(*common, "o", "cudnn", "", 15, 50e-3, 10e-3, 50e-3, math.inf),
    ]
    return made


def test_the_files_say_the_same_as_the_table(tmp_path):
    made = example()
    paths = document.write(made, tmp_path / "new")
    assert [p.name for p in paths] == ["certificate.json", "certificate.md"]
    found = json.loads(paths[0].read_text())
    assert found["passed"] and found["backend"] == "kernels" and found["form"] == "full"
    assert {"gpu", "driver", "torch", "cutlass_dsl", "commit", "date"} <= set(found)
    assert [(r["tensor"], r["error"], r["variant"], r["provider"]) for r in found["rows"]] == [
        ("o", 1e-3, "kernels, worst of 15", "kda_cute"),
        ("o", 1e-3, "kernels, median of 15", "kda_cute"),
        ("o", 50e-3, "worst of 15", "cudnn"),
    ]
    text = paths[1].read_text()
    assert "**all 2 tensors within tolerance" in text and "fla: skipped: import fla: no" in text
    assert "| typical | T512_H2 | o | kernels | 1 | 10 | 1 | 5.33 | ok | 50 |" in text
    assert "not judged" in text
    head = machine.surroundings() | dict(commit="0123456789abcdef-dirty")
    assert "commit 0123456789ab-dirty," in document.markdown(made, head)


def test_the_rows_are_those_of_results_files(tmp_path):
    from perf import results

    path = document.write(example(), tmp_path)[0]
    assert all(not results.is_timing(row) for row in results.read(path)["rows"])


@pytest.mark.parametrize("error, shown", ((math.nan, "NaN"), (11e-3, "11")))
def test_a_miss_is_said_everywhere(error, shown, tmp_path):
    made = example(error)
    assert "1 of 2 tensors miss" in document.summary(made)
    assert any(row[5] == shown and "MISS" in row for row in document.table_rows(made.lines)[1])
    found = json.loads(document.write(made, tmp_path)[0].read_text())
    assert not found["passed"]
    assert found["rows"][0]["error"] == (None if math.isnan(error) else error)


def test_json_alone_is_printed(monkeypatch, tmp_path):
    monkeypatch.setattr(certificate, "certify", lambda **options: example())
    result = CliRunner().invoke(main, ["certify", "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads((tmp_path / "certificate.json").read_text())


@pytest.mark.parametrize(
    "arguments, words",
    (
        (["--backend", "kernels"], "torch finds no CUDA device"),
        (["--regimes", "nosuch"], "nosuch is not among typical"),
        (["--op", "nosuch"], "nosuch"),
        (["--op", "bwd_recurrence", "--regimes", "ub_typ"], "ub_typ is not among"),
    ),
)
def test_what_can_not_be_done_exits_with_2(arguments, words, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "why_not_here", lambda: "torch finds no CUDA device")
    result = CliRunner().invoke(main, ["certify", *arguments, "--out", str(tmp_path / "x")])
    assert result.exit_code == 2 and words in result.output
    assert not (tmp_path / "x").exists()


def test_without_a_hopper_gpu_the_reference_is_certified_and_that_is_said(monkeypatch, tmp_path):
    asked = {}

    def fake(**options):
        asked.update(options)
        made = example()
        made.backend = options["backend"]
        return made

    monkeypatch.setattr(certificate, "certify", fake)
    monkeypatch.setattr(doctor, "why_not_here", lambda: "an older GPU 8.0")
    result = CliRunner().invoke(main, ["certify", "--peers", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (asked["backend"], asked["device"]) == ("reference", "cpu")
    assert "No kernel ran: an older GPU 8.0." in result.output
    monkeypatch.setattr(doctor, "why_not_here", lambda: "")
    CliRunner().invoke(main, ["certify", "--full", "--out", str(tmp_path)])
    assert (asked["backend"], asked["device"], asked["form"]) == ("kernels", "cuda", "full")


# ---------------------------------------------------------------- on a GPU
@pytest.mark.gpu
def test_the_kernels_pass(tmp_path):
    arguments = ["certify", "--backend", "kernels", "--regimes", "mixed+states,typical"]
    result = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "certificate.json").read_text())
    assert found["passed"] and {row["op"] for row in found["rows"]} == {
        "chunk_kda",
        "bwd_recurrence",
    }
    assert all(row["error"] <= row["tolerance"] for row in found["rows"])


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_planted_into_the_kernels_misses(fault, monkeypatch):
    monkeypatch.setitem(globals(), "chunk_kda", kda_cute.chunk_kda)
    case, must, must_not = FAULTS[fault]
    if case.lengths is None:
        case = case._replace(T=200, H=2)
    found = set(failures(measure.measure(fault, case, "cuda")))
    assert must <= found and not must_not & found, found
