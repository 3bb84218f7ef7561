"""`kda-cute compile`: which kernels, into which folder, and that calls find them there."""

import json
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import pytest
from click.testing import CliRunner

from kda_cute import compile as kernel_compile
from kda_cute import forward, report
from kda_cute.cli import main
from kda_cute.lab import doctor, prebuilt


@dataclass(frozen=True)
class Toy:
    gate: str = "log"
    varlen: bool = False
    layout: str = "default"


@dataclass(frozen=True)
class Other:
    groups: int = 2
    layout: str = "default"


def spec(name, config):
    return kernel_compile.KernelSpec(name, config, trace=None)


TOYS = [
    *(
        spec("transition", Toy(gate, varlen))
        for gate in ("log", "safe")
        for varlen in (False, True)
    ),
    *(spec("scan", Other(groups)) for groups in (1, 2)),
    spec("bwd_recurrence", Other(2, "padded")),
]


def run(*arguments):
    return CliRunner().invoke(main, ["compile", *map(str, arguments)])


@pytest.fixture
def toys(monkeypatch):
    """The package with a few configurations, whose object files are made without a compiler."""
    asked = []

    def object_files(specs, *, arch, folder, workers, progress):
        asked.append((arch, workers, len(specs)))
        paths = []
        for one in specs:
            path = folder / f"{one.name}_{kernel_compile.cache_key(one, arch)}.o"
            path.write_bytes(repr(one.config).encode())
            paths.append(path)
            progress(one)
        return paths

    kernel = kernel_compile.KernelReport("toy", 168, 0, Counter(), "")
    monkeypatch.setattr(report, "all_specs", lambda: TOYS)
    monkeypatch.setattr(kernel_compile, "object_files", object_files)
    monkeypatch.setattr(kernel_compile, "report", lambda path: [kernel])
    return asked


# ---------------------------------------------------------------- which kernels
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, ["transition"] * 4 + ["scan"] * 2 + ["bwd_recurrence"]),
        ({"operations": ["chunk_kda"]}, ["transition"] * 4 + ["scan"] * 2),
        ({"operations": ["bwd_recurrence"]}, ["bwd_recurrence"]),
        ({"layouts": ["padded"]}, ["bwd_recurrence"]),
        ({"kernels": ["scan"], "where": ["groups=1"]}, ["scan"]),
        ({"where": ["gate=safe", "varlen=true", "layout=default"]}, ["transition"] + ["scan"] * 2),
    ],
)
def test_configurations_are_chosen(arguments, names):
    assert [s.name for s in prebuilt.choose(TOYS, **arguments)] == names


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"operations": ["fwd"]}, "op='fwd' is not one of chunk_kda, bwd_recurrence"),
        ({"kernels": ["scam"]}, "kernel='scam' is not one of transition, scan, bwd_recurrence"),
        ({"layouts": ["wider"]}, "layout='wider' is not one of default, padded"),
        ({"where": ["gates=log"]}, "a field one of gate, varlen, layout, groups"),
        ({"where": ["gate"]}, "expected FIELD=VALUE"),
        ({"where": ["gate=soft"]}, "'soft' is not one of log, safe"),
        ({"kernels": ["scan"], "layouts": ["padded"]}, "exclude each other"),
    ],
)
def test_unknown_choices_are_named(arguments, words):
    with pytest.raises(ValueError) as error:
        prebuilt.choose(TOYS, **arguments)
    assert words in str(error.value)


def test_operations_hold_every_kernel_of_the_package():
    held = {kernel for kernels in prebuilt.OPERATIONS.values() for kernel in kernels}
    assert held == {s.name for s in report.all_specs()}


def test_a_problem_of_chunk_kda_asks_for_a_kernel_of_each_stage():
    where = "g=bf16 beta=bf16 gate=safe varlen=false initial=none final=false save=true groups=2"
    chosen = prebuilt.choose(report.all_specs(), operations=["chunk_kda"], where=where.split())
    names = Counter(
        (s.name, getattr(s.config, "backward", getattr(s.config, "reverse", False))) for s in chosen
    )
    assert names == {
        ("transition", False): 1,
        ("transition", True): 1,
        ("scan", False): 1,
        ("scan", True): 1,
        ("gradients", False): 1,
    }


# ---------------------------------------------------------------- the command
def test_objects_and_their_manifest_are_written(toys, tmp_path):
    done = run("--out", tmp_path / "out", "--op", "chunk_kda", "--jobs", 3, "--json")
    assert done.exit_code == 0, done.output
    assert toys == [("sm_90a", 3, 6)]
    data = json.loads(done.stdout)
    written = json.loads((tmp_path / "out" / prebuilt.MANIFEST).read_text())
    assert {**written, "folder": str(tmp_path / "out"), "loaded": False} == data
    assert (data["arch"], data["cutlass_dsl"]) == ("sm_90a", "4.8.1")
    for entry in data["kernels"]:
        blob = (tmp_path / "out" / entry["file"]).read_bytes()
        assert entry["bytes"] == len(blob) and entry["registers"] == 168
        assert entry["config"].encode() == blob and entry["key"] in entry["file"]


def test_a_second_call_adds_to_the_manifest(toys, tmp_path):
    for kernel in ("scan", "transition"):
        assert run("--out", tmp_path, "--kernel", kernel).exit_code == 0
    held = Counter(
        e["name"] for e in json.loads((tmp_path / prebuilt.MANIFEST).read_text())["kernels"]
    )
    assert held == {"scan": 2, "transition": 4}
    next(tmp_path.glob("scan_*.o")).unlink()
    assert run("--out", tmp_path, "--kernel", "transition").exit_code == 0
    held = Counter(
        e["name"] for e in json.loads((tmp_path / prebuilt.MANIFEST).read_text())["kernels"]
    )
    assert held == {"scan": 1, "transition": 4}


def test_words_say_where_and_how_to_use_it(toys, tmp_path):
    done = run("--out", tmp_path, "--layout", "default", "--layout", "padded")
    assert done.stdout.splitlines()[0] == "kernels ready: 7"
    assert done.stdout.splitlines()[-1] == f"use them: KDA_CUTE_CACHE={tmp_path}"
    assert "compiling for sm_90a" in done.stderr


def test_without_nvdisasm_registers_are_unknown(toys, monkeypatch, tmp_path):
    def report_(path):
        raise kernel_compile.CompileError("nvdisasm not found")

    monkeypatch.setattr(kernel_compile, "report", report_)
    done = run("--out", tmp_path, "--kernel", "scan", "--json")
    assert done.exit_code == 0 and "nvdisasm not found" in done.stderr
    assert {e["registers"] for e in json.loads(done.stdout)["kernels"]} == {None}


def test_a_dry_run_compiles_nothing(toys, monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_CUTE_CACHE", str(tmp_path / "cache"))
    done = run("--dry-run", "--kernel", "scan", "--json")
    assert done.exit_code == 0 and toys == []
    data = json.loads(done.stdout)
    assert data["folder"] == str(tmp_path / "cache") and not (tmp_path / "cache").exists()
    assert [k["missing"] for k in data["kernels"]] == [True, True]
    (tmp_path / "cache").mkdir()
    key = kernel_compile.cache_key(TOYS[4])
    (tmp_path / "cache" / f"scan_{key}.o").write_bytes(b"x")
    lines = run("--dry-run", "--kernel", "scan").stdout.splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["there", "to"]
    assert lines[2].startswith("1 of 2 configurations to compile")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--arch", "sm_80"),
            "arch='sm_80': the kernels use wgmma and TMA of Hopper; choose sm_90a",
        ),
        (("--op", "chunk"), "op='chunk'"),
        (("--where", "gate=x"), "'x' is not one of log, safe"),
        (("--jobs", "0"), "--jobs"),
    ],
)
def test_bad_arguments_are_exit_code_2(toys, arguments, words, tmp_path):
    done = run("--out", tmp_path, *arguments)
    assert (done.exit_code, done.stdout, toys) == (2, "", [])
    assert words in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            kernel_compile.CompileError("scan Other(): ValueError: no"),
            "scan Other(): ValueError: no",
        ),
        (BrokenProcessPool("terminated"), "fewer --jobs"),
    ],
)
def test_a_kernel_that_fails_is_exit_code_2(toys, monkeypatch, tmp_path, error, words):
    def fails(*arguments, **more):
        raise error

    monkeypatch.setattr(kernel_compile, "object_files", fails)
    done = run("--out", tmp_path)
    assert done.exit_code == 2 and words in done.stderr
    assert not (tmp_path / prebuilt.MANIFEST).exists()


def test_a_missing_dsl_is_exit_code_2(toys, monkeypatch):
    def missing():
        raise kernel_compile.CompileError("nvidia-cutlass-dsl is not installed")

    monkeypatch.setattr(kernel_compile, "dsl_version", missing)
    done = run()
    assert done.exit_code == 2 and "nvidia-cutlass-dsl is not installed" in done.stderr


# ---------------------------------------------------------------- warming up
def test_warming_up_needs_a_gpu(toys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "why_no_kernels", lambda facts: "torch finds no CUDA device")
    done = run("--warmup", "--out", tmp_path)
    assert done.exit_code == 2 and toys == []
    assert "--warmup loads kernels: torch finds no CUDA device" in done.stderr


def test_warming_up_loads_from_the_folder(toys, monkeypatch, tmp_path):
    loaded = []
    monkeypatch.setattr(doctor, "why_no_kernels", lambda facts: "")
    monkeypatch.setenv("KDA_CUTE_CACHE", str(tmp_path / "elsewhere"))

    def warm_up(specs, progress):
        loaded.append((kernel_compile.named_folder(), [s.name for s in specs]))

    monkeypatch.setattr(prebuilt, "warm_up", warm_up)
    done = run("--warmup", "--out", tmp_path / "here", "--kernel", "scan", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["loaded"]
    assert loaded == [(tmp_path / "here", ["scan", "scan"])]


def test_every_kernel_is_loaded_once():
    loaded, seen = [], []
    assert prebuilt.warm_up(TOYS, load=loaded.append, progress=seen.append) == len(TOYS)
    assert loaded == seen == TOYS


# ---------------------------------------------------------------- real kernels
@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """A folder with one real kernel, compiled by the command."""
    folder = tmp_path_factory.mktemp("shipped")
    where = ["groups=2", "varlen=false", "initial=none", "final=false", "save=false"]
    flags = [word for condition in where for word in ("--where", condition)]
    done = run("--out", folder, "--kernel", "scan", *flags, "--where", "reverse=false", "--json")
    assert done.exit_code == 0, done.output
    return folder, json.loads(done.stdout)


def test_a_real_kernel_is_compiled_ahead_of_time(shipped):
    folder, data = shipped
    (entry,) = data["kernels"]
    assert entry["name"] == "scan" and "save=False" in entry["config"]
    assert entry["bytes"] == (folder / entry["file"]).stat().st_size > 10_000
    assert 0 < entry["registers"] <= 255


@pytest.mark.parametrize("writable", (True, False))
def test_calls_find_what_was_shipped(shipped, monkeypatch, writable, recwarn):
    """KDA_CUTE_CACHE is the whole installation, and may be read-only."""
    folder, _ = shipped
    monkeypatch.setenv("KDA_CUTE_CACHE", str(folder))
    monkeypatch.setattr(kernel_compile, "_compile", None)
    if not writable:
        monkeypatch.setattr(kernel_compile, "_writable", lambda folder: False)
    wanted = forward.scan_spec(2, False, "none", False, False)
    found = kernel_compile.object_file(wanted)
    assert found.parent == folder and kernel_compile._intact(found)
    assert not [w for w in recwarn if "not writable" in str(w.message)]
