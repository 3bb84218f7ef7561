"""Compile kernels, keep them on disk, and say what the compiler made of them.

This is the only module that calls ``cute.compile``.  A kernel is described by a `KernelSpec`; its
frozen config is the whole key.  Object files live in one folder (``KDA_CUTE_CACHE``, else
``~/.cache/kda_cute``) under a name that hashes config, architecture, the sources that the kernel
can see and the versions of the DSL and of tvm-ffi.  They are written under a lock and published by
rename, with a manifest that holds their checksum, so that several processes may start cold at once
and a damaged file is compiled again.  No GPU is needed to compile for a named architecture.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

ARCH = "sm_90a"
DSL_VERSIONS = ("4.8.1",)
PACKAGE = Path(__file__).resolve().parent
# What every kernel may import of the package, next to its own folder kernels/<name>.
SHARED_SOURCES = ("kernels/*.py", "device/**/*.py", "layouts/**/*.py", "factors.py")


class KernelSpec(NamedTuple):
    """What `load` needs to know of a kernel.

    name: a C identifier, the function's name in the object file, and for a kernel of the package
    its folder in kernels/.  config: a frozen dataclass; its repr is the key.  trace: called only to
    compile; returns (jit callable, fake arguments without the stream).  sources: files whose text
    belongs to the key, next to that folder and SHARED_SOURCES.
    """

    name: str
    config: Any
    trace: Callable[[], tuple[Callable, tuple]]
    sources: tuple[str, ...] = ()


class KernelReport(NamedTuple):
    """One kernel in an object file: registers per thread at launch, stack bytes, SASS opcode counts
    and SASS text.
    """

    name: str
    registers: int
    stack: int
    ops: collections.Counter
    sass: str

    @property
    def spills(self) -> int:
        """Local-memory loads and stores in the SASS."""
        return self.ops["LDL"] + self.ops["STL"]


class CompileError(RuntimeError):
    """The kernel can't be compiled or loaded here; the message says why."""


# ---------------------------------------------------------------- versions, sources, keys
@functools.cache
def dsl_version() -> str:
    """Version of nvidia-cutlass-dsl; CompileError when it is absent or not one that this package
    was checked with.
    """
    try:
        found = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        raise CompileError(
            f"nvidia-cutlass-dsl is not installed; kda_cute needs nvidia-cutlass-dsl[cu13]=={DSL_VERSIONS[-1]}"
        ) from None
    if found not in DSL_VERSIONS:
        raise CompileError(
            f"nvidia-cutlass-dsl {found} is installed; kda_cute was checked with {', '.join(DSL_VERSIONS)} only, "
            "and the DSL's API moves between releases"
        )
    return found


def _digests() -> dict[str, str]:
    """{path in the package: sha256} of every source that some kernel is compiled from."""
    patterns = (*SHARED_SOURCES, "kernels/*/**/*.py")
    files = sorted({path for pattern in patterns for path in PACKAGE.glob(pattern)})
    return {
        path.relative_to(PACKAGE).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def _visible(digests: dict[str, str], name: str) -> dict[str, str]:
    """Those that kernel `name` can see: all but the folders of other kernels."""

    def folder(path: str) -> str | None:
        parts = path.split("/")
        return parts[1] if parts[0] == "kernels" and len(parts) > 2 else None

    return {path: digest for path, digest in digests.items() if folder(path) in (None, name)}


def _hash_files(files: list[Path]) -> str:
    h = hashlib.sha256()
    for path in files:
        h.update(f"{path.parent.name}/{path.name}".encode())
        h.update(path.read_bytes())
    return h.hexdigest()


# Taken when this module is imported, before any kernel module: what is in memory is what gets compiled.
_SOURCES_AT_IMPORT = _digests()


def _check_sources_unchanged(specs: Iterable[KernelSpec]) -> None:
    now = _digests()
    for name in {spec.name for spec in specs}:
        if _visible(now, name) != _visible(_SOURCES_AT_IMPORT, name):
            raise CompileError(
                f"sources of kernel {name} changed on disk since kda_cute was imported; the DSL reads "
                "them again when it compiles, so the result would mix two versions: start a new process"
            )


def cache_key(spec: KernelSpec, arch: str = ARCH) -> str:
    """24 hex digits that change with config, architecture, visible sources and versions."""
    seen = _visible(_SOURCES_AT_IMPORT, spec.name)
    if not spec.sources and not any(path.startswith(f"kernels/{spec.name}/") for path in seen):
        raise CompileError(f"kernel {spec.name} has no folder in kernels/, and names no sources")
    parts = (
        spec.name,
        repr(spec.config),
        arch,
        sorted(seen.items()),
        _hash_files([Path(s) for s in spec.sources]),
        dsl_version(),
        importlib.metadata.version("apache-tvm-ffi"),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


# ---------------------------------------------------------------- the folder
def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@functools.cache
def _fallback_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="kda_cute_"))


def named_folder() -> Path:
    """KDA_CUTE_CACHE, or the usual folder; it need not exist."""
    named = os.environ.get("KDA_CUTE_CACHE")
    return Path(named) if named else Path(os.path.expanduser("~")) / ".cache" / "kda_cute"


def cache_folder() -> Path:
    """Where object files are read and written; a temporary folder, with a warning, when the usual
    one is read-only.
    """
    folder = named_folder()
    if _writable(folder):
        return folder
    warnings.warn(
        f"kernel cache {folder} is not writable: compiled kernels are kept for this process only; "
        "set KDA_CUTE_CACHE to a writable folder",
        RuntimeWarning,
        stacklevel=2,
    )
    return _fallback_folder()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _intact(path: Path) -> bool:
    """True when the object file and its manifest are there and the checksum agrees."""
    try:
        manifest = json.loads(path.with_suffix(".json").read_text())
        return hashlib.sha256(path.read_bytes()).hexdigest() == manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _publish(path: Path, text: bytes, suffix: str) -> None:
    target = path.with_suffix(suffix)
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    scratch.write_bytes(text)
    os.replace(scratch, target)


def _compile(spec: KernelSpec, arch: str, path: Path) -> None:
    """Trace, compile and publish path (.o) and its manifest (.json)."""
    _check_sources_unchanged([spec])
    os.environ.setdefault("CUTE_DSL_ARCH", arch)  # read by the DSL when it is first imported
    import cutlass.cute as cute

    started = time.perf_counter()
    function, arguments = spec.trace()
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled = cute.compile(
        function, *arguments, stream, options=f"--enable-tvm-ffi --gpu-arch {arch}"
    )
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    compiled.export_to_c(str(scratch), function_name=spec.name)
    blob = scratch.read_bytes()
    os.replace(scratch, path)
    manifest = {
        "name": spec.name,
        "config": repr(spec.config),
        "arch": arch,
        "cutlass_dsl": dsl_version(),
        "seconds": round(time.perf_counter() - started, 2),
        "sha256": hashlib.sha256(blob).hexdigest(),
    }
    _publish(path, json.dumps(manifest, indent=1).encode(), ".json")


def object_file(spec: KernelSpec, arch: str = ARCH, folder: Path | None = None) -> Path:
    """The kernel's object file for arch, compiled now unless the folder holds it.  Works without a
    GPU.  A folder that was compiled elsewhere and is read-only here serves what it holds.
    """
    if folder is None:
        shipped = named_folder() / f"{spec.name}_{cache_key(spec, arch)}.o"
        if _intact(shipped):
            return shipped
        folder = cache_folder()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{spec.name}_{cache_key(spec, arch)}.o"
    if not _intact(path):
        with _lock(path.with_suffix(".lock")):
            if not _intact(path):  # another process may have won
                _compile(spec, arch, path)
    return path


def _object_file_in_worker(spec: KernelSpec, arch: str, expected: Path) -> Path:
    """`object_file` as a worker process runs it: errors travel as text, since not all of the DSL's
    can be pickled.
    """
    if expected.stem != f"{spec.name}_{cache_key(spec, arch)}":
        raise CompileError(
            "kernel sources changed on disk while a worker process started: start a new process"
        )
    try:
        return object_file(spec, arch, expected.parent)
    except Exception as error:
        raise CompileError(f"{spec.name} {spec.config}: {type(error).__name__}: {error}") from None


def object_files(
    specs: Iterable[KernelSpec],
    *,
    arch: str = ARCH,
    folder: Path | None = None,
    workers: int | None = None,
    progress: Callable[[KernelSpec], None] | None = None,
) -> list[Path]:
    """`object_file` of every spec, in order, those that are missing compiled in parallel processes.

    workers: processes, os.cpu_count() by default; each imports torch and the DSL (about 1 GB).
    progress is called in this process with each spec whose file is ready.  CompileError names the
    first config that fails; nothing more is started then.  Specs must pickle: their trace is a
    module's function or a partial of one.
    """
    specs = list(specs)
    folder = Path(folder) if folder is not None else cache_folder()
    paths = [folder / f"{spec.name}_{cache_key(spec, arch)}.o" for spec in specs]
    missing = []
    for spec, path in zip(specs, paths, strict=True):
        if not _intact(path):
            missing.append((spec, path))
        elif progress is not None:
            progress(spec)
    if not missing:
        return paths
    _check_sources_unchanged(spec for spec, _ in missing)
    count = max(1, min(workers or os.cpu_count() or 1, len(missing)))
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {
            pool.submit(_object_file_in_worker, spec, arch, path): spec for spec, path in missing
        }
        try:
            for job in as_completed(jobs):
                job.result()
                if progress is not None:
                    progress(jobs[job])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return paths


_loaded: dict[tuple[str, Any], Callable] = {}
_load_lock = threading.Lock()


def load(spec: KernelSpec) -> Callable:
    """The compiled kernel as a callable on torch tensors (positional arguments, torch's current
    stream).
    """
    key = (spec.name, spec.config)
    function = _loaded.get(key)
    if function is None:
        with _load_lock:
            function = _loaded.get(key)
            if function is None:
                path = object_file(spec)
                import cutlass.cute as cute

                module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
                function = _loaded[key] = getattr(module, spec.name)
    return function


# ---------------------------------------------------------------- inspection
_EM_CUDA, _REGCOUNT, _FRAME_SIZE = 190, 0x2F, 0x11
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.M)


def _cubins(blob: bytes) -> Iterator[bytes]:
    """Every CUDA ELF image inside an object file."""
    start = 0
    while (start := blob.find(b"\x7fELF", start)) >= 0:
        if struct.unpack_from("<H", blob, start + 18)[0] == _EM_CUDA:
            programs, sections = struct.unpack_from("<QQ", blob, start + 0x20)
            program_size, program_count, section_size, section_count = struct.unpack_from(
                "<HHHH", blob, start + 0x36
            )
            end = max(
                sections + section_size * section_count, programs + program_size * program_count
            )
            yield blob[start : start + end]
        start += 4


def _sections(elf: bytes) -> dict[str, bytes]:
    table = struct.unpack_from("<Q", elf, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]

    def name(offset: int) -> str:
        at = headers[names][4] + offset
        return elf[at : elf.index(b"\0", at)].decode()

    nobits = 8
    return {name(h[0]): (elf[h[4] : h[4] + h[5]] if h[1] != nobits else b"") for h in headers}


def _attributes(sections: dict[str, bytes]) -> dict[int, dict[str, int]]:
    """Per-function values of the attributes read here, from .nv.info."""
    symbols, strings, info = sections[".symtab"], sections[".strtab"], sections[".nv.info"]
    found: dict[int, dict[str, int]] = {_REGCOUNT: {}, _FRAME_SIZE: {}}

    def symbol(index: int) -> str:
        at = struct.unpack_from("<I", symbols, 24 * index)[0]
        return strings[at : strings.index(b"\0", at)].decode()

    i = 0
    while i < len(info):
        sized = 4
        if info[i] == sized:
            length = struct.unpack_from("<H", info, i + 2)[0]
            if info[i + 1] in found:
                index, value = struct.unpack_from("<II", info, i + 4)
                found[info[i + 1]][symbol(index)] = value
            i += length
        i += 4
    return found


def nvdisasm() -> str:
    """Path of nvdisasm: on PATH, or from the nvidia-cuda-nvdisasm wheel."""
    found = shutil.which("nvdisasm")
    for folder in sys.path if found is None else ():
        for wheel in ("cu13", "cuda_nvdisasm"):
            candidate = Path(folder) / "nvidia" / wheel / "bin" / "nvdisasm"
            if candidate.exists():
                return str(candidate)
    if found is None:
        raise CompileError("nvdisasm not found: pip install nvidia-cuda-nvdisasm")
    return found


def report(path: Path) -> list[KernelReport]:
    """Registers, stack and SASS of each kernel in an object file."""
    kernels = []
    for elf in _cubins(Path(path).read_bytes()):
        sections = _sections(elf)
        attributes = _attributes(sections)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(elf)
            cubin.flush()
            done = subprocess.run(
                [nvdisasm(), "-c", cubin.name], capture_output=True, text=True, check=True
            )
        for name in (s[6:] for s in sections if s.startswith(".text.")):
            sass = done.stdout.split(f".text.{name}:", 1)[-1].split("//-----", 1)[0]
            ops = collections.Counter(m.group(1).split(".")[0] for m in _OPCODE.finditer(sass))
            registers, stack = (
                attributes[_REGCOUNT].get(name, 0),
                attributes[_FRAME_SIZE].get(name, 0),
            )
            kernels.append(KernelReport(name, registers, stack, ops, sass))
    return kernels
