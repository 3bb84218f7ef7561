"""Every kernel as the compiler left it, and the cache that keeps it.  No GPU."""

import ast
import functools
import importlib.metadata
import json
import multiprocessing
import os
import re
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

from kda_cute import backward, forward, ops, report
from kda_cute import compile as kernel_compile
from kda_cute.kernels import gradients, scan, transition
from kda_cute.kernels.budget import MMA_BF16, MMA_TF32, Role, wgmma_bf16
from kda_cute.kernels.bwd_recurrence import Config
from kda_cute.kernels.gradients.schedule import MMA_BF16_K8
from kda_cute.layouts import variants

SPECS = report.all_specs()
PACKAGE = Path(kernel_compile.__file__).parent
KERNELS = {spec.name for spec in SPECS}


def spec_id(spec) -> str:
    return f"{spec.name} {report.label(spec.config)}"


# ---------------------------------------------------------------- every configuration
@pytest.fixture(scope="session")
def compiled():
    """{(kernel, config): Measured} of all configurations; what the cache lacks is compiled now, in
    parallel.
    """
    return {(k.kernel, k.config): k for k in report.measure_all(SPECS)}


def test_specs_are_every_combination_of_arguments():
    configs = [spec.config for spec in ops.recurrence_specs()]
    family = "bwd_recurrence"
    layouts, precisions = variants.names(family), variants.precisions(family)
    assert len(set(configs)) == len(configs) == len(layouts) * len(precisions) * 2 * 3 * 2
    for precision in precisions:
        for layout in layouts:
            assert Config(precision, layout, "f32", "bf16", True) in configs
    configs = [spec.config for spec in forward.forward_specs()]
    assert len(set(configs)) == len(configs) == 2 * 3 * 2 * 2 + 2 * 2 * 3 * 2 * 2
    assert transition.Config("bf16", "softplus", "f32", True) in configs
    assert scan.Config(1, True, "bf16", False, True) in configs
    configs = [spec.config for spec in backward.backward_specs()]
    assert len(set(configs)) == len(configs) == 2 * (2 * 3 * 2 * 2) + 2 * 2 * 3 * 2
    assert transition.Config("f32", "log", "bf16", False, backward=True) in configs
    assert scan.ReverseConfig(2, False, "none", True) in configs
    assert gradients.Config("bf16", "safe", "f32", True) in configs


def test_the_report_covers_every_kernel():
    assert {path.parent.name for path in PACKAGE.glob("kernels/*/__init__.py")} == KERNELS
    assert len({kernel_compile.cache_key(spec) for spec in SPECS}) == len(SPECS)
    assert len({spec_id(spec) for spec in SPECS}) == len(SPECS)


def expected(spec) -> tuple:
    """Apart from what the schedules say: registers at launch (64 K over the threads of all CTAs of
    an SM), shared memory, tensor-core instructions of a chunk, FFMA, registers after the launch.
    """
    config = spec.config
    if spec.name == "bwd_recurrence":
        mma = {MMA_TF32: 2112} if config.precision == "tf32" else {MMA_BF16: 1056 + 64}
        return 128, 232_448, mma, 256, [40, 112, 112, 248]
    if spec.name == "transition":
        products = {wgmma_bf16(32): 32, wgmma_bf16(48): 16, wgmma_bf16(64): 24}
        mma = {MMA_BF16: 128, MMA_TF32: 140, **products}
        return 128, 115_712, mma, 256, []
    if spec.name == "gradients":
        products = {wgmma_bf16(16): 64, wgmma_bf16(32): 96, wgmma_bf16(64): 8}
        return 128, 232_448, {MMA_BF16: 672, MMA_BF16_K8: 192, **products}, 640, []
    n = config.groups
    narrow, wide = (12, 8) if config.reverse else (20, 4)
    mma = {wgmma_bf16(64): narrow * n, wgmma_bf16(128): wide * n}
    return (168, 232_448, mma, 64, [40, 232]) if n == 2 else (255, 232_448, mma, 64, [])


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_kernel_keeps_its_budgets(compiled, spec):
    k = compiled[spec.name, spec.config]
    registers, shared, mma, ffma, roles = expected(spec)
    print(k)
    assert k.registers <= registers
    assert k.stack == 0
    assert k.spills == 0
    assert 0 < k.shared <= shared
    assert k.opcodes == k.budget.in_code  # and no tensor-core instruction of another kind
    assert k.budget.per_chunk == k.budget.implied == mma
    assert k.ffma <= k.budget.ffma == ffma  # a scalar kernel has thousands
    assert sorted(k.roles) == roles
    assert not k.broken()


def unfenced_copies(sass: str) -> list[str]:
    """Copies out of shared memory that follow an ordinary store to it, in the order of the code,
    without the fence between them that shows it to the copy engine.
    """
    found, stored = [], False
    for line in sass.splitlines():
        words = re.sub(r"/\*.*?\*/|@!?U?P\w+", "", line).split()
        opcode = words[0] if words else ""
        if opcode.startswith(("STS", "STSM")):
            stored = True
        elif opcode.startswith("FENCE.VIEW.ASYNC"):
            stored = False
        elif stored and (opcode.startswith("UTMASTG") or opcode.startswith("UBLKCP.G.S")):
            found.append(line.strip())
    return found


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_what_is_copied_out_was_shown_to_the_copy_engine(compiled, spec):
    """Barriers don't; and no sanitizer knows.  In level 1 other warps copy than store: key and pair
    warps have a fence each before they say so, and the barriers have theirs.
    """
    (kernel,) = kernel_compile.report(kernel_compile.object_file(spec))
    if spec.name == "bwd_recurrence":
        assert kernel.ops["UBLKCP"] > 0 and kernel.ops["FENCE"] >= 3
    else:
        assert kernel.ops["UTMASTG"] > 0 and unfenced_copies(kernel.sass) == []


def test_a_missing_fence_is_found():
    code = ["STSM.16.M88.4 [R1], R4 ;", "@P0 FENCE.VIEW.ASYNC.S ;", "UTMASTG.4D [UR4], [UR8] ;"]
    assert unfenced_copies("\n".join(code)) == []
    assert unfenced_copies("\n".join([*code[1:2], *code[:1], *code[2:]])) == [code[2]]
    assert unfenced_copies("\n".join(["/*0010*/ @P1 STS [R1], R2 ;", code[2]])) == [code[2]]


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_every_product_of_the_mathematics_is_in_the_account(spec):
    rows = report.budget(spec).mma
    assert all(min(row.issuers, row.static, row.trips) > 0 for row in rows)
    assert len({row.product for row in rows}) == len(rows)


# ---------------------------------------------------------------- the report
def measured(config=Config("bf16"), **changes) -> report.Measured:  # noqa: B008
    good = report.Measured(
        kernel="bwd_recurrence",
        config=config,
        budget=report.budget(kernel_compile.KernelSpec("bwd_recurrence", config, None)),
        registers=128,
        stack=0,
        spills=0,
        shared=232_448,
        opcodes={"HMMA.16816.F32.BF16": 184},
        ffma=65,
        roles=(40, 112, 112, 248),
    )
    return good._replace(**changes)


def promised(**changes):
    """A budget that asks for something else."""
    return measured().budget._replace(**changes)


@pytest.mark.parametrize(
    "changes, word",
    (
        ({"registers": 129}, "129 registers"),
        ({"stack": 8}, "stack"),
        ({"spills": 1}, "spilled"),
        ({"shared": 232_449}, "shared"),
        ({"budget": promised(ctas=2, threads=256, roles=()), "roles": ()}, "> 115712"),
        ({"opcodes": {"HMMA.1688.F32.TF32": 184}}, "HMMA.1688"),
        ({"opcodes": {"HMMA.16816.F32.BF16": 184, "HGMMA.64x8x16.F32.BF16": 1}}, "HGMMA"),
        ({"opcodes": {"HMMA.16816.F32.BF16": 183}}, "183"),
        ({"opcodes": {}}, "account"),
        ({"config": Config("tf32")}, "account"),
        ({"budget": promised(implied={MMA_BF16: 1119})}, "1119"),
        ({"ffma": 2000}, "FFMA"),
        ({"roles": (40, 112, 248)}, "schedule"),  # one keeps the 128 that another waits for
        ({"roles": (40, 112, 112, 256)}, "schedule"),
        ({"roles": (136,), "budget": promised(roles=(Role(136, 4),))}, "for ever"),
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
        asked.append(specs)
        return [measured()]

    monkeypatch.setattr(report, "measure_all", measure_all)
    for arguments in (
        [],
        ["--kernel", "scan", "--kernel", "transition"],
        ["--kernel", "bwd_recurrence", "--precision", "bf16"],
        ["--precision", "tf32", "--layout", "padded"],
    ):
        assert report.main(arguments) == 0
    assert "kept" in capsys.readouterr().out
    two = [spec for spec in SPECS if spec.name in ("scan", "transition")]
    ids = [[spec_id(spec) for spec in specs] for specs in asked]
    assert ids[:2] == [list(map(spec_id, specs)) for specs in (SPECS, two)]
    assert {spec.config.precision for spec in asked[2]} == {"bf16"}
    assert {spec.config.layout for spec in asked[2]} == set(variants.names("bwd_recurrence"))
    assert {(s.name, s.config.precision, s.config.layout) for s in asked[3]} == {
        ("bwd_recurrence", "tf32", "padded")
    }
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
        others = kernel_compile._SOURCES_AT_IMPORT | {"device/tma.py": "other"}
        patch.setattr(kernel_compile, "_SOURCES_AT_IMPORT", others)
        keys.append(kernel_compile.cache_key(spec))
    monkeypatch.setattr(kernel_compile, "DSL_VERSIONS", ("4.8.1", "4.8.2"))
    dsl_versions("4.8.2")
    keys.append(kernel_compile.cache_key(spec))
    assert len(set(keys)) == len(keys)
    dsl_versions("4.8.1")
    assert kernel_compile.cache_key(spec) == keys[0]


@pytest.mark.parametrize(
    "path, kernels",
    (
        ("kernels/scan/consumer.py", {"scan"}),
        ("kernels/transition/new.py", {"transition"}),
        ("kernels/new/kernel.py", set()),
        ("kernels/budget.py", KERNELS),
        ("device/tma.py", KERNELS),
        ("layouts/tile.py", KERNELS),
        ("factors.py", KERNELS),
    ),
)
def test_key_holds_what_the_kernel_can_see(monkeypatch, path, kernels):
    specs = {spec.name: spec for spec in SPECS}

    def keys():
        return {name: kernel_compile.cache_key(spec) for name, spec in specs.items()}

    before, sources = keys(), kernel_compile._SOURCES_AT_IMPORT
    monkeypatch.setattr(kernel_compile, "_SOURCES_AT_IMPORT", sources | {path: "other"})
    after = keys()
    assert {name for name in specs if before[name] != after[name]} == kernels


def test_a_kernel_without_sources_is_refused():
    with pytest.raises(kernel_compile.CompileError, match="no_such_kernel"):
        kernel_compile.cache_key(tiny_spec()._replace(name="no_such_kernel", sources=()))


def imports(path: Path) -> set[str]:
    """Files of the package that a file of it imports, as paths in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in getattr(node, "names", ())]
        if isinstance(node, ast.Import):
            assert not any(name.startswith("kda_cute") for name in names), path
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        for module in (folder, *(folder / name for name in names)):
            for file in (module.with_suffix(".py"), module / "__init__.py"):
                if file.exists():
                    found.add(file.relative_to(PACKAGE).as_posix())
    return found - {"__init__.py"}


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernels_import_only_what_their_keys_hold(name):
    seen = set(kernel_compile._visible(kernel_compile._digests(), name))
    imported = {path: imports(PACKAGE / path) for path in seen}
    assert {path: files - seen for path, files in imported.items() if files - seen} == {}
    assert {"factors.py", "device/tma.py", "kernels/budget.py"} & set().union(*imported.values())


CHANGED_SOURCES = """
import pathlib, sys
import kda_cute
from kda_cute import compile as kernel_compile, forward, ops

def refused(attempt):
    try:
        attempt()
    except kernel_compile.CompileError as error:
        return "changed on disk" in str(error) and "new process" in str(error)
    return False

def change(source):
    source.write_text("# a comment\\n" * 40 + source.read_text())

def main(root, kept):
    assert pathlib.Path(kda_cute.__file__).is_relative_to(root), kda_cute.__file__
    spec, (*_, other, another) = ops.recurrence_specs()[0], forward.forward_specs()
    change(root / "kda_cute" / "kernels" / "bwd_recurrence" / "value.py")
    assert refused(lambda: kernel_compile.object_file(spec, folder=kept))
    assert refused(lambda: kernel_compile.object_files([spec], folder=kept, workers=1))
    assert kernel_compile.object_file(other, folder=kept).exists()  # sees no source that changed
    change(root / "kda_cute" / "device" / "tma.py")
    assert refused(lambda: kernel_compile.object_file(another, folder=kept))
    kernel_compile._check_sources_unchanged = lambda specs: None  # they change as the worker starts
    assert refused(lambda: kernel_compile.object_files([spec], folder=kept, workers=1))
    assert [path.stem.split("_")[0] for path in kept.glob("*.o")] == ["scan"]

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
