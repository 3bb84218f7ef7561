"""README's main job: what it compares, what it compiles, and what it answers when something is off."""

import pytest
import torch

from examples import training_step
from kda_cute import report
from kda_cute.kernels.budget import Budget
from kda_cute.layouts import variants


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(training_step, "LENGTHS", (150, 17))
    monkeypatch.setattr(training_step, "HEADS", 1)


def on_cpu(monkeypatch):
    monkeypatch.setattr(training_step, "missing_gpu", lambda: "no Hopper GPU found")


def test_without_a_gpu_the_reference_takes_both_steps(short, monkeypatch, capsys):
    on_cpu(monkeypatch)
    assert training_step.main(["--no-compile"]) == 0
    out = capsys.readouterr().out
    assert "chunk_kda, forward and backward: backend reference on CPU (no Hopper GPU found)" in out
    assert "bwd_recurrence: reference, torch on CPU (no Hopper GPU found)" in out
    for name in ("o", "final_state", *(f"d{x}" for x in training_step.INPUTS)):
        assert any(line.split()[:1] == [name] for line in out.splitlines()), name
    assert "FAIL" not in out


@pytest.mark.parametrize("step", ["chunk_kda_step", "level_1_step"])
@pytest.mark.parametrize("wrong", [lambda x: x * 1.1, lambda x: x * torch.nan])
def test_a_wrong_gradient_fails(short, monkeypatch, capsys, step, wrong):
    on_cpu(monkeypatch)
    right = getattr(training_step, step)

    def broken(*arguments):
        found = right(*arguments)
        return found | {"dk": wrong(found["dk"])}

    monkeypatch.setattr(training_step, step, broken)
    assert training_step.main(["--no-compile"]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.endswith("FAIL")]
    assert [line.split()[0] for line in failed] == ["dk"]


def test_every_kernel_is_compiled_as_the_step_runs_it():
    specs = training_step.step_specs("bf16", "padded")
    assert {spec.name for spec in specs} == set(variants.kernels())
    assert {getattr(s.config, "reverse", False) for s in specs if s.name == "scan"} == {False, True}
    backward = {spec.config.backward for spec in specs if spec.name == "transition"}
    assert backward == {False, True}
    (level_1,) = (spec.config for spec in specs if spec.name == "bwd_recurrence")
    assert (level_1.precision, level_1.layout) == ("bf16", "padded")
    assert all(spec.config.varlen for spec in specs)
    assert len(specs) < 12  # a fresh machine waits for them


@pytest.mark.parametrize(
    "options, compiled", [([], "step"), (["--compile", "all"], "all"), (["--no-compile"], None)]
)
def test_what_is_compiled(short, monkeypatch, options, compiled):
    on_cpu(monkeypatch)
    taken = []

    def compile_kernels(specs):
        taken.extend((spec.name, spec.config) for spec in specs)
        return True

    monkeypatch.setattr(training_step, "compile_kernels", compile_kernels)
    assert training_step.main(options) == 0
    wanted = {
        "step": training_step.step_specs("tf32", "default"), "all": report.all_specs(), None: []
    }  # fmt: skip
    assert taken == [(spec.name, spec.config) for spec in wanted[compiled]]


def test_a_broken_budget_fails(short, monkeypatch, capsys):
    on_cpu(monkeypatch)

    def measured(specs):
        budget: Budget = report.budget(specs[0])
        sizes = dict(registers=budget.registers, stack=0, spills=3, shared=budget.shared)
        code = dict(opcodes=budget.in_code, ffma=0, roles=())
        return [report.Measured(specs[0].name, specs[0].config, budget, **sizes, **code)]

    monkeypatch.setattr(report, "measure_all", measured)
    assert training_step.main([]) == 1
    out = capsys.readouterr().out
    assert "3 loads and stores of spilled registers" in out
    assert "0 of 1 compiled within budget" in out


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_take_both_steps(capsys):
    assert training_step.main(["--precision", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "backend kernels on NVIDIA" in out
    assert "bwd_recurrence: kernel, bf16, layout default, on NVIDIA" in out
    assert "compiled for sm_90a" not in out
