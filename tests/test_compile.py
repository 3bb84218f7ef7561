"""Every kernel as the compiler left it, and the cache that keeps it.  No GPU."""

import functools
import importlib.metadata
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import cutlass.cute as cute
import pytest
from cutlass import Float32

from kda_cute import compile as kernel_compile
from kda_cute import ops, report
from kda_cute.kernels import bwd_recurrence
from kda_cute.kernels.bwd_recurrence import Config
from kda_cute.kernels.bwd_recurrence.schedule import Registers
from kda_cute.layouts import variants

SPECS = ops.recurrence_specs()
PACKAGE = Path(kernel_compile.__file__).parent


# ---------------------------------------------------------------- every configuration
@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """{config: Measured} of all configurations, compiled now, in parallel."""
    folder = tmp_path_factory.mktemp("kernels")
    assert not list(folder.iterdir())
    return {k.config: k for k in report.measure_all(SPECS, folder=folder)}


def test_specs_are_every_combination_of_arguments():
    configs = [spec.config for spec in SPECS]
    family = "bwd_recurrence"
    layouts, precisions = variants.names(family), variants.precisions(family)
    assert len(set(configs)) == len(configs) == len(layouts) * len(precisions) * 2 * 3 * 2
    assert len({kernel_compile.cache_key(spec) for spec in SPECS}) == len(SPECS)
    for precision in precisions:
        for layout in layouts:
            assert Config(precision, layout, "f32", "bf16", True) in configs


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: report.label(spec.config))
def test_kernel_keeps_its_budgets(compiled, spec):
    k = compiled[spec.config]
    precision = spec.config.precision
    print(k)
    assert k.registers <= 128  # 512 threads at launch
    assert k.stack == 0
    assert k.spills == 0
    assert 0 < k.shared <= 232_448
    opcode = {"tf32": "HMMA.1688.F32.TF32", "bf16": "HMMA.16816.F32.BF16"}[precision]
    assert set(k.opcodes) == {opcode}  # neither HGMMA nor another kind of HMMA
    assert k.opcodes[opcode] == k.accounted
    assert k.mma_per_chunk == {"tf32": 2112, "bf16": 1056 + 64}[precision]
    assert k.ffma < report.FFMA_LIMIT == 256  # a scalar kernel has thousands
    assert sorted(k.roles) == sorted(Registers()) and sum(k.roles) == 4 * 128
    assert not k.broken()


@pytest.mark.parametrize("precision", ("tf32", "bf16"))
def test_every_product_of_the_mathematics_is_in_the_account(precision):
    rows = bwd_recurrence.mma_account(Config(precision))
    assert all(min(row.warps, row.static, row.trips) > 0 for row in rows)
    assert len({row.product for row in rows}) == len(rows)
    # seven [16,128] x [128,128], seven [16,16] x [16,128], three [16,128] x [128,16]
    steps = 7 * 128 + 7 * 16 + 3 * 16
    extra = 4 * 16 if precision == "bf16" else steps  # hi + lo of four products; m16n8k8
    assert sum(r.warps * r.static * r.trips for r in rows) == steps + extra


# ---------------------------------------------------------------- the report
def measured(**changes) -> report.Measured:
    good = report.Measured(
        config=Config("bf16"),
        registers=128,
        stack=0,
        spills=0,
        shared=232_448,
        opcodes={"HMMA.16816.F32.BF16": 144},
        accounted=144,
        mma_per_chunk=1120,
        ffma=65,
        roles=(40, 112, 112, 248),
    )
    return good._replace(**changes)


@pytest.mark.parametrize(
    "changes, word",
    (
        ({"registers": 129}, "registers"),
        ({"stack": 8}, "stack"),
        ({"spills": 1}, "spilled"),
        ({"shared": 232_449}, "shared"),
        ({"opcodes": {"HMMA.1688.F32.TF32": 144}}, "HMMA.1688"),
        ({"opcodes": {"HMMA.16816.F32.BF16": 143, "HGMMA.64x8x16.F32.BF16": 1}}, "HGMMA"),
        ({"opcodes": {}, "accounted": 0}, "only"),
        ({"accounted": 143}, "account"),
        ({"mma_per_chunk": 1119}, "1119"),
        ({"config": Config("tf32"), "opcodes": {"HMMA.1688.F32.TF32": 144}}, "not 2112"),
        ({"ffma": 2000}, "FFMA"),
        (
            {"roles": (40, 112, 248)},
            "for ever",
        ),  # one warpgroup keeps the 128 that another waits for
        ({"roles": (40, 112, 112, 256)}, "for ever"),
        ({"registers": 120}, "for ever"),  # the pool is what the launch took
    ),
)
def test_a_broken_budget_is_reported(monkeypatch, capsys, changes, word):
    assert not measured().broken()
    (words,) = measured(**changes).broken()
    assert word in words
    monkeypatch.setattr(
        report, "measure_all", lambda specs, workers: [measured(), measured(**changes)]
    )
    assert report.main([]) == 1
    out, err = capsys.readouterr()
    assert words in out and "1 of 2 kernels within budget" in err
    assert report.main(["--json"]) == 1
    assert [row["broken"] for row in json.loads(capsys.readouterr().out)] == [[], [words]]


def test_report_takes_the_chosen_kernels(monkeypatch, capsys):
    asked = []

    def measure_all(specs, workers):
        asked.append({(spec.config.precision, spec.config.layout) for spec in specs})
        return [measured()]

    monkeypatch.setattr(report, "measure_all", measure_all)
    for arguments in ([], ["--precision", "bf16"], ["--precision", "tf32", "--layout", "padded"]):
        assert report.main(arguments) == 0
    assert "kept" in capsys.readouterr().out
    assert len(asked[0]) == len({layout for _, layout in asked[1]}) * 2
    assert {precision for precision, _ in asked[1]} == {"bf16"}
    assert asked[2] == {("tf32", "padded")}
    with pytest.raises(SystemExit):
        report.main(["--layout", "no_such_layout"])


# ---------------------------------------------------------------- a tiny kernel for the cache
@dataclass(frozen=True)
class TinyConfig:
    """addend: a constant of the kernel; works: False fails while tracing."""

    addend: int = 1
    works: bool = True


class Tiny:
    """y = x + addend."""

    def __init__(self, addend):
        self.addend = addend

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, stream):
        self.kernel(mX, mY).launch(grid=(mX.shape[0], 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        mY[row, tid] = mX[row, tid] + self.addend


def trace_tiny(config: TinyConfig):
    if not config.works:
        raise ZeroDivisionError("tiny kernel asked to fail")
    n = cute.sym_int()
    x, y = (
        cute.runtime.make_fake_compact_tensor(Float32, (n, 32), stride_order=(1, 0))
        for _ in range(2)
    )
    return Tiny(config.addend), (x, y)


def tiny_spec(*args) -> kernel_compile.KernelSpec:
    config = TinyConfig(*args)
    return kernel_compile.KernelSpec(
        "tiny", config, functools.partial(trace_tiny, config), (__file__,)
    )


@pytest.fixture
def compiles(monkeypatch):
    """The specs that this process compiles."""
    seen, original = [], kernel_compile._compile

    def counted(spec, *rest):
        seen.append(spec)
        return original(spec, *rest)

    monkeypatch.setattr(kernel_compile, "_compile", counted)
    return seen


def is_a_kernel(path) -> bool:
    (kernel,) = kernel_compile.report(path)
    return kernel.ops["FADD"] > 0 and kernel.registers > 0


def no_litter(folder) -> bool:
    return all(p.suffix in (".o", ".json", ".lock") for p in Path(folder).iterdir())


# ---------------------------------------------------------------- processes and threads
def compile_at_once(folder, barrier, answers):
    """One of several processes that start cold together."""
    compiled, original = [], kernel_compile._compile

    def counted(*args):
        compiled.append(args)
        return original(*args)

    kernel_compile._compile = counted
    spec = tiny_spec()
    barrier.wait(timeout=300)
    path = kernel_compile.object_file(spec, folder=folder)
    answers.put((str(path), len(compiled), kernel_compile._intact(path)))


def run_processes(count, folder) -> list[tuple[str, int, bool]]:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(count), context.Queue()
    processes = [
        context.Process(target=compile_at_once, args=(folder, barrier, answers))
        for _ in range(count)
    ]
    for process in processes:
        process.start()
    found = [answers.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    return found


def test_eight_cold_processes_compile_once_and_a_warm_one_not_at_all(tmp_path):
    cold = run_processes(8, tmp_path)
    assert len({path for path, _, _ in cold}) == 1
    assert sum(count for _, count, _ in cold) == 1
    assert all(intact for _, _, intact in cold)
    assert is_a_kernel(cold[0][0]) and no_litter(tmp_path)
    before = Path(cold[0][0]).stat().st_mtime_ns
    assert run_processes(1, tmp_path) == [(cold[0][0], 0, True)]
    assert Path(cold[0][0]).stat().st_mtime_ns == before


def test_two_threads_compile_once(tmp_path, compiles):
    barrier, paths = threading.Barrier(2), []

    def first_call():
        barrier.wait()
        paths.append(kernel_compile.object_file(tiny_spec(), folder=tmp_path))

    threads = [threading.Thread(target=first_call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2 and paths[0] == paths[1]
    assert len(compiles) == 1 and is_a_kernel(paths[0])


def test_two_threads_load_one_function(tmp_path, monkeypatch):
    """The lock around the first load: one file, one module."""
    made = []
    monkeypatch.setenv("KDA_CUTE_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_compile, "_loaded", {})
    monkeypatch.setattr(kernel_compile, "object_file", lambda spec: made.append(spec) or tmp_path)

    class Module:
        tiny = staticmethod(lambda *args: None)

    monkeypatch.setattr(cute.runtime, "load_module", lambda path, enable_tvm_ffi: Module)
    barrier, functions = threading.Barrier(2), []

    def first_call():
        barrier.wait()
        functions.append(kernel_compile.load(tiny_spec()))

    threads = [threading.Thread(target=first_call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert functions == [Module.tiny] * 2 and len(made) == 1


# ---------------------------------------------------------------- object_files
def test_object_files_compile_in_other_processes_in_order(tmp_path, compiles):
    specs = [tiny_spec(addend) for addend in (3, 1, 2)]
    first = kernel_compile.object_file(specs[1], folder=tmp_path)
    compiles.clear()
    ready = []
    paths = kernel_compile.object_files(
        specs, folder=tmp_path, workers=2, progress=lambda spec: ready.append(spec.config)
    )
    assert compiles == []  # not here
    assert paths[1] == first and len(set(paths)) == 3
    assert all(is_a_kernel(path) for path in paths) and no_litter(tmp_path)
    assert sorted(config.addend for config in ready) == [1, 2, 3]
    assert paths == [kernel_compile.object_file(spec, folder=tmp_path) for spec in specs]
    assert compiles == []  # found


def test_object_files_need_no_process_for_what_is_there(tmp_path, monkeypatch):
    path = kernel_compile.object_file(tiny_spec(), folder=tmp_path)
    monkeypatch.setattr(kernel_compile, "ProcessPoolExecutor", None)
    assert kernel_compile.object_files([tiny_spec()], folder=tmp_path) == [path]
    assert kernel_compile.object_files([], folder=tmp_path) == []


def test_object_files_name_the_config_that_fails(tmp_path):
    with pytest.raises(kernel_compile.CompileError, match=r"TinyConfig\(addend=7, works=False\)"):
        kernel_compile.object_files([tiny_spec(7, False)], folder=tmp_path, workers=1)
    assert not list(tmp_path.glob("*.o"))


# ---------------------------------------------------------------- damaged files, bad folders
def test_a_damaged_file_is_compiled_again(tmp_path, compiles):
    def again():
        compiles.clear()
        assert kernel_compile.object_file(tiny_spec(), folder=tmp_path) == path
        return len(compiles)

    path = kernel_compile.object_file(tiny_spec(), folder=tmp_path)
    good, manifest = path.read_bytes(), path.with_suffix(".json")
    assert again() == 0
    path.write_bytes(good[: len(good) // 2])
    assert again() == 1 and is_a_kernel(path)
    path.write_bytes(b"")
    assert again() == 1 and is_a_kernel(path)
    path.unlink()
    assert again() == 1 and is_a_kernel(path)
    for text in (manifest.read_text()[:20], "", "[]", "{}"):
        manifest.write_text(text)
        assert again() == 1 and is_a_kernel(path)
    manifest.unlink()
    assert again() == 1 and again() == 0


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("KDA_CUTE_CACHE", str(tmp_path / "named" / "deep"))
    assert kernel_compile.cache_folder() == tmp_path / "named" / "deep"
    monkeypatch.delenv("KDA_CUTE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kernel_compile.cache_folder() == tmp_path / "home" / ".cache" / "kda_cute"


@pytest.mark.parametrize("named", (True, False))
def test_unwritable_folders_warn_and_compile_elsewhere(tmp_path, monkeypatch, compiles, named):
    """Below a regular file nobody may write, the superuser neither."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("HOME", str(blocked))
    if named:
        monkeypatch.setenv("KDA_CUTE_CACHE", str(blocked / "cache"))
    else:
        monkeypatch.delenv("KDA_CUTE_CACHE", raising=False)
    with pytest.warns(RuntimeWarning, match="not writable.*KDA_CUTE_CACHE"):
        path = kernel_compile.object_file(tiny_spec())
    assert blocked not in path.parents and is_a_kernel(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert kernel_compile.object_file(tiny_spec()) == path
        assert kernel_compile.object_files([tiny_spec()]) == [path]
    assert len(compiles) <= 1  # one folder for the process


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write to read-only folders")
def test_a_read_only_folder_warns(tmp_path, monkeypatch):
    tmp_path.chmod(0o555)
    monkeypatch.setenv("KDA_CUTE_CACHE", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="not writable"):
        assert kernel_compile.cache_folder() != tmp_path
    tmp_path.chmod(0o755)


# ---------------------------------------------------------------- versions and sources
@pytest.fixture
def dsl_versions(monkeypatch):
    """Set the version of nvidia-cutlass-dsl that is found; None: not installed."""
    original = importlib.metadata.version

    def pretend(found):
        def version(name):
            if name != "nvidia-cutlass-dsl":
                return original(name)
            if found is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)
        kernel_compile.dsl_version.cache_clear()

    yield pretend
    monkeypatch.undo()
    kernel_compile.dsl_version.cache_clear()


@pytest.mark.parametrize("found", ("4.8.0", "4.9.0", "5.0.0", None))
def test_another_dsl_version_is_refused_by_name(tmp_path, dsl_versions, compiles, found):
    kernel_compile.object_file(tiny_spec(), folder=tmp_path)
    compiles.clear()
    dsl_versions(found)
    words = (found or "not installed", *kernel_compile.DSL_VERSIONS)
    for attempt in (kernel_compile.object_file, kernel_compile.load):
        with pytest.raises(kernel_compile.CompileError) as caught:
            attempt(tiny_spec(99))
        assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not compiles


def test_key_changes_with_everything_that_matters(tmp_path, monkeypatch, dsl_versions):
    source = tmp_path / "source.py"
    source.write_text("one")
    spec = tiny_spec()._replace(sources=(str(source),))
    keys = [kernel_compile.cache_key(spec), kernel_compile.cache_key(spec, "sm_100a")]
    keys.append(kernel_compile.cache_key(spec._replace(config=TinyConfig(2))))
    keys.append(kernel_compile.cache_key(spec._replace(name="tiny2")))
    source.write_text("two")
    keys.append(kernel_compile.cache_key(spec))
    source.write_text("one")
    with monkeypatch.context() as patch:
        patch.setattr(kernel_compile, "_SOURCES_AT_IMPORT", "other")
        keys.append(kernel_compile.cache_key(spec))
    monkeypatch.setattr(kernel_compile, "DSL_VERSIONS", ("4.8.1", "4.8.2"))
    dsl_versions("4.8.2")
    keys.append(kernel_compile.cache_key(spec))
    assert len(set(keys)) == len(keys)
    dsl_versions("4.8.1")
    assert kernel_compile.cache_key(spec) == keys[0]


CHANGED_SOURCES = """
import pathlib, sys
import kda_cute
from kda_cute import compile as kernel_compile, ops

def refused(attempt):
    try:
        attempt()
    except kernel_compile.CompileError as error:
        return "changed on disk" in str(error) and "new process" in str(error)
    return False

def main(root, kept):
    assert pathlib.Path(kda_cute.__file__).is_relative_to(root), kda_cute.__file__
    spec = ops.recurrence_specs()[0]
    source = sorted((root / "kda_cute" / "kernels").rglob("*.py"))[-1]
    source.write_text("# a comment\\n" * 40 + source.read_text())
    assert refused(lambda: kernel_compile.object_file(spec, folder=kept))
    assert refused(lambda: kernel_compile.object_files([spec], folder=kept, workers=1))
    kernel_compile._check_sources_unchanged = lambda: None  # they change as the worker starts
    assert refused(lambda: kernel_compile.object_files([spec], folder=kept, workers=1))
    assert not list(kept.glob("*.o"))

if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
"""


def test_sources_changed_since_import_are_refused(tmp_path):
    """In a copy of the package: the DSL reads sources again when it compiles."""
    root, kept = tmp_path / "root", tmp_path / "cache"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, root / "kda_cute", ignore=ignore)
    kept.mkdir()
    script = tmp_path / "script.py"
    script.write_text(CHANGED_SOURCES)
    done = subprocess.run(
        [sys.executable, str(script), str(root), str(kept)],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
