"""What runs on this machine, what doesn't, and why.

`gather` reads the machine and starts nothing on a GPU; `verdicts` judges what it found, so that any
machine can be judged anywhere.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import compile as kernel_compile
from .. import machine

CAPABILITY = (9, 0)
LEAST_DRIVER = 580  # of CUDA 13, in which the kernels are compiled
PEERS = {  # what others call it -> (module, distributions that hold it)
    "fla": ("fla", ("flash-linear-attention", "fla-core")),
    "cudnn frontend": ("cudnn", ("nvidia-cudnn-frontend",)),
}


class Gpu(NamedTuple):
    """A device that torch sees; memory in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


class Cache(NamedTuple):
    """The folder of compiled kernels: how many object files it holds, and their bytes."""

    folder: str
    writable: bool
    objects: int
    bytes: int


class Facts(NamedTuple):
    """What was found here.  Versions are empty where something is missing, and `..._problem` says
    why it can't be used.
    """

    system: str
    python: str
    kda_cute: str
    torch: str
    torch_cuda: str
    driver: str
    gpus: tuple[Gpu, ...]
    gpu_problem: str
    dsl: str
    dsl_pin: str
    dsl_problem: str
    tvm_ffi: str
    nvdisasm: str
    cache: Cache
    peers: dict[str, str]


class Verdict(NamedTuple):
    """Whether an operation runs here on a backend, and why or what follows."""

    operation: str
    backend: str
    runs: bool
    why: str


def gather() -> Facts:
    """Read this machine."""
    import torch

    gpus, gpu_problem = _gpus(torch)
    dsl_problem = ""
    try:
        kernel_compile.dsl_version()
    except kernel_compile.CompileError as error:
        dsl_problem = str(error)
    if not dsl_problem and not machine.version("apache-tvm-ffi"):
        dsl_problem = "apache-tvm-ffi is not installed; kernels are compiled and called through it"
    return Facts(
        system=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        python=platform.python_version(),
        kda_cute=machine.version("kda-cute"),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda or "",
        driver=machine.driver(),
        gpus=gpus,
        gpu_problem=gpu_problem,
        dsl=machine.version("nvidia-cutlass-dsl"),
        dsl_pin=", ".join(kernel_compile.DSL_VERSIONS),
        dsl_problem=dsl_problem,
        tvm_ffi=machine.version("apache-tvm-ffi"),
        nvdisasm=_nvdisasm(),
        cache=cache(kernel_compile.named_folder()),
        peers={name: _peer(*where) for name, where in PEERS.items()},
    )


def _peer(module: str, distributions: Sequence[str]) -> str:
    """Its version; "found" without one; empty when it isn't there.  Imports nothing."""
    if importlib.util.find_spec(module) is None:
        return ""
    return machine.version(*distributions) or "found"


def _gpus(torch: Any) -> tuple[tuple[Gpu, ...], str]:
    if torch.version.cuda is None:
        return (), f"torch {torch.__version__} is built without CUDA"
    with warnings.catch_warnings(record=True) as said:  # of a driver that is absent or too old
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        except RuntimeError as error:
            return (), f"torch cannot start CUDA: {error}"
    if not count:
        reason = f": {said[0].message}" if said else ""
        return (), f"torch finds no CUDA device{reason}"
    found = []
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        found.append(Gpu(device.name, (device.major, device.minor), device.total_memory))
    return tuple(found), ""


def _nvdisasm() -> str:
    try:
        return kernel_compile.nvdisasm()
    except kernel_compile.CompileError:
        return ""


def cache(folder: Path) -> Cache:
    """The folder as it is; it is not made."""
    existing = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    sizes = [path.stat().st_size for path in folder.glob("*.o")] if folder.is_dir() else []
    return Cache(str(folder), writable, len(sizes), sum(sizes))


# ---------------------------------------------------------------- judging
def why_not_here() -> str:
    """Why no kernel runs on this machine; empty when they do."""
    return why_no_kernels(gather())


def why_no_kernels(facts: Facts) -> str:
    """Why no kernel runs here; empty when they do."""
    if facts.gpu_problem:
        return facts.gpu_problem
    usable = [gpu for gpu in facts.gpus if gpu.capability == CAPABILITY]
    if not usable:
        found = ", ".join(f"{g.name} {g.capability[0]}.{g.capability[1]}" for g in facts.gpus)
        return f"the kernels are for compute capability 9.0 (Hopper), found {found or 'no GPU'}"
    if facts.dsl_problem:
        return facts.dsl_problem
    major = facts.driver.split(".")[0]
    if major.isdigit() and int(major) < LEAST_DRIVER:
        return f"driver {facts.driver} is older than {LEAST_DRIVER}, the first for CUDA 13"
    return ""


def verdicts(facts: Facts) -> list[Verdict]:
    """Every operation on every backend."""
    why = why_no_kernels(facts)
    runs = not why
    on = why or ", ".join(sorted({g.name for g in facts.gpus if g.capability == CAPABILITY}))
    slow = "float64 in torch, on any device, slow"
    compiles = not facts.dsl_problem
    rows = []
    for operation in ("chunk_kda forward", "chunk_kda backward"):
        rows.append(Verdict(operation, "kernels", runs, on))
        rows.append(Verdict(operation, "reference", True, f'backend="reference": {slow}'))
    rows.append(Verdict("bwd_recurrence", "kernels", runs, on))
    rows.append(Verdict("bwd_recurrence", "reference", True, f"for tensors on the CPU: {slow}"))
    compiling = facts.dsl_problem or f"for {kernel_compile.ARCH}, without a GPU"
    rows.append(Verdict("compile", "kernels", compiles, compiling))
    disassembler = facts.nvdisasm or "nvdisasm not found: pip install nvidia-cuda-nvdisasm"
    rows.append(Verdict("report of registers", "kernels", bool(facts.nvdisasm), disassembler))
    rows.append(Verdict("layouts list, show, audit, draw", "host", True, "plain Python"))
    for name, version in facts.peers.items():
        there = f"{version} installed" if version else "not installed; only comparisons want it"
        rows.append(Verdict(f"comparison with {name}", "peer", bool(version) and runs, there))
    return rows


def notes(facts: Facts) -> list[str]:
    """What is worth knowing and breaks nothing."""
    found = []
    if not facts.cache.writable:
        found.append(
            f"the cache folder {facts.cache.folder} is not writable: kernels that it lacks are "
            "compiled again by every process; set KDA_CUTE_CACHE to a writable folder"
        )
    others = [g for g in facts.gpus if g.capability != CAPABILITY]
    if others and not why_no_kernels(facts):
        found.append(f"no kernels on {', '.join(g.name for g in others)}: not of capability 9.0")
    if not facts.nvdisasm:
        found.append("nvdisasm is missing: kernels run, and their registers are not reported")
    return found
