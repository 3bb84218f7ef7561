"""`kda-cute doctor`: what it says of this machine, and of machines that it only hears of."""

import importlib.metadata
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from kda_cute import compile as kernel_compile
from kda_cute.cli import main
from kda_cute.lab import doctor

H200 = doctor.Gpu("NVIDIA H200", (9, 0), 150_000_000_000)
A100 = doctor.Gpu("NVIDIA A100", (8, 0), 80_000_000_000)
HOPPER = doctor.Facts(
    system="Linux x86_64, 2 cores",
    python="3.11.7",
    kda_cute="0.1.0",
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    driver="580.159.04",
    gpus=(H200,),
    gpu_problem="",
    dsl="4.8.1",
    dsl_pin="4.8.1",
    dsl_problem="",
    tvm_ffi="0.1.15",
    nvdisasm="/usr/bin/nvdisasm",
    cache=doctor.Cache("/home/x/.cache/kda_cute", True, 3, 600_000),
    peers={"fla": "0.6.0", "cudnn frontend": ""},
)


def run(*arguments):
    return CliRunner().invoke(main, ["doctor", *arguments])


def of(facts):
    return {(v.operation, v.backend): v for v in doctor.verdicts(facts)}


def test_kernels_run_on_a_hopper_machine(monkeypatch):
    monkeypatch.setattr(doctor, "gather", lambda: HOPPER)
    done = run("--json")
    data = json.loads(done.stdout)
    assert done.exit_code == 0 and data["kernels_run"] and data["notes"] == []
    assert data["facts"]["gpus"][0]["name"] == "NVIDIA H200"
    verdicts = of(HOPPER)
    for operation in ("chunk_kda forward", "chunk_kda backward", "bwd_recurrence"):
        for backend in ("kernels", "reference"):
            assert verdicts[operation, backend].runs
        assert verdicts[operation, "kernels"].why == "NVIDIA H200"
    assert verdicts["comparison with fla", "peer"].runs
    assert not verdicts["comparison with cudnn frontend", "peer"].runs
    text = run().stdout
    assert "compute capability 9.0" in text and text.rstrip().endswith("the kernels run here")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": (), "gpu_problem": "torch finds no CUDA device"}, "no CUDA device"),
        ({"gpus": (A100,)}, "compute capability 9.0 (Hopper), found NVIDIA A100 8.0"),
        ({"dsl": "", "dsl_problem": "nvidia-cutlass-dsl is not installed"}, "not installed"),
        ({"driver": "550.54.14"}, "driver 550.54.14 is older than 580"),
    ],
)
def test_why_only_the_reference_runs(monkeypatch, change, words):
    facts = HOPPER._replace(**change)
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    done = run("--json")
    assert done.exit_code == 1 and words in json.loads(done.stdout)["why"]
    verdicts = of(facts)
    assert not verdicts["chunk_kda forward", "kernels"].runs
    assert verdicts["chunk_kda forward", "reference"].runs
    assert verdicts["compile", "kernels"].runs == ("dsl_problem" not in change)
    assert verdicts["layouts list, show, audit, draw", "host"].runs
    last = run().stdout.rstrip().splitlines()[-1]
    assert last.startswith("only the reference runs here") and words in last


def test_a_second_gpu_of_another_kind_is_noted():
    facts = HOPPER._replace(gpus=(A100, H200))
    assert doctor.why_no_kernels(facts) == ""
    assert "no kernels on NVIDIA A100: not of capability 9.0" in doctor.notes(facts)


def test_a_cache_that_cannot_be_written_and_no_nvdisasm_are_noted():
    facts = HOPPER._replace(cache=HOPPER.cache._replace(writable=False), nvdisasm="")
    assert doctor.why_no_kernels(facts) == ""
    cache, disassembler = doctor.notes(facts)
    assert "KDA_CUTE_CACHE" in cache and "nvdisasm" in disassembler
    assert not of(facts)["report of registers", "kernels"].runs


# ---------------------------------------------------------------- reading the machine
def test_this_machine_is_read_without_starting_anything(monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_CUTE_CACHE", str(tmp_path / "none" / "yet"))
    facts = doctor.gather()
    assert facts.torch == torch.__version__ and facts.dsl_pin == "4.8.1"
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.cache == (str(tmp_path / "none" / "yet"), True, 0, 0)
    assert not (tmp_path / "none").exists()
    assert run().exit_code == int(bool(doctor.why_no_kernels(facts)))


def test_objects_in_the_cache_are_counted(tmp_path):
    (tmp_path / "a.o").write_bytes(b"12345")
    (tmp_path / "b.o").write_bytes(b"123")
    (tmp_path / "a.json").write_text("{}")
    assert doctor.cache(tmp_path)[2:] == (2, 8)
    blocked = tmp_path / "a.o" / "cache"
    assert not doctor.cache(blocked).writable


def test_a_torch_without_cuda_and_one_whose_driver_is_absent():
    bare = SimpleNamespace(version=SimpleNamespace(cuda=None), __version__="2.13.0+cpu")
    assert doctor._gpus(bare) == ((), "torch 2.13.0+cpu is built without CUDA")

    def unavailable():
        warnings.warn("CUDA initialization: found no NVIDIA driver", stacklevel=1)
        return False

    cuda = SimpleNamespace(is_available=unavailable, device_count=lambda: 0)
    blind = SimpleNamespace(version=SimpleNamespace(cuda="13.0"), cuda=cuda)
    assert doctor._gpus(blind)[1].endswith("CUDA initialization: found no NVIDIA driver")
    cuda.is_available = lambda: (_ for _ in ()).throw(RuntimeError("driver too old"))
    assert doctor._gpus(blind)[1] == "torch cannot start CUDA: driver too old"
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=7)
    there = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda i: properties,
    )
    found = doctor._gpus(SimpleNamespace(version=SimpleNamespace(cuda="13.0"), cuda=there))
    assert found == ((doctor.Gpu("NVIDIA H200", (9, 0), 7),), "")


@pytest.mark.parametrize("absent", ("nvidia-cutlass-dsl", "apache-tvm-ffi"))
def test_a_missing_dsl_is_said_and_not_raised(monkeypatch, absent):
    version = importlib.metadata.version

    def without(name):
        if name == absent:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    kernel_compile.dsl_version.cache_clear()
    try:
        facts = doctor.gather()
        assert f"{absent} is not installed" in facts.dsl_problem
        assert not of(facts)["compile", "kernels"].runs
        assert run().exit_code == 1
    finally:
        kernel_compile.dsl_version.cache_clear()


def test_another_dsl_version_is_refused(monkeypatch):
    monkeypatch.setattr(kernel_compile, "DSL_VERSIONS", ("9.9.9",))
    kernel_compile.dsl_version.cache_clear()
    try:
        facts = doctor.gather()
        assert "9.9.9" in facts.dsl_problem and facts.dsl_pin == "9.9.9"
    finally:
        kernel_compile.dsl_version.cache_clear()


def test_doctor_and_layouts_import_no_dsl(tmp_path):
    """In a process in which importing the DSL fails."""
    code = (
        "import sys; sys.modules['cutlass'] = None; from kda_cute.cli import main; "
        "main(sys.argv[1:], prog_name='kda-cute')"
    )
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    for arguments, words in (
        (["doctor"], "pinned to 4.8.1"),
        (["layouts", "show", "scan"], "scan/default/bf16"),
        (["--help"], "doctor"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True, text=True, cwd=tmp_path, env=environment,
        )  # fmt: skip
        assert words in done.stdout, done.stderr
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr
