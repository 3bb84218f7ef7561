"""Kernels compiled ahead of time: which ones, where they lie, and what a deployment can read of them.

A folder that was made here is a cache folder: with KDA_CUTE_CACHE naming it, calls find their
kernels in it, as long as package, DSL and tvm-ffi have the versions that the keys were made of.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import compile as kernel_compile
from .. import machine
from ..compile import KernelSpec

MANIFEST = "manifest.json"
ARCHITECTURES = (kernel_compile.ARCH,)
# Kernels of each operation.
OPERATIONS = {
    "chunk_kda": ("transition", "scan", "gradients"),
    "bwd_recurrence": ("bwd_recurrence",),
}


def check_arch(arch: str) -> str:
    """The architecture; ValueError unless the kernels are written for it."""
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"arch={arch!r}: the kernels use wgmma and TMA of Hopper; "
            f"choose {', '.join(ARCHITECTURES)}"
        )
    return arch


def choose(
    specs: Iterable[KernelSpec],
    *,
    operations: Sequence[str] = (),
    kernels: Sequence[str] = (),
    layouts: Sequence[str] = (),
    where: Sequence[str] = (),
) -> list[KernelSpec]:
    """Those of these operations, kernels and layouts (none named: any) whose configs have the fields
    `where` says, as "gate=safe"; a config without such a field stays.

    ValueError names what is unknown, and lists the choices.
    """
    specs = list(specs)
    named = [kernel for op in operations for kernel in _known("op", op, OPERATIONS)]
    for name in kernels:
        _known("kernel", name, dict.fromkeys(spec.name for spec in specs))
    for name in layouts:
        _known("layout", name, dict.fromkeys(spec.config.layout for spec in specs))
    conditions = [_condition(text, specs) for text in where]
    chosen = [
        spec
        for spec in specs
        if (not operations or spec.name in named)
        and (not kernels or spec.name in kernels)
        and (not layouts or spec.config.layout in layouts)
        and all(_field(spec, name) in (None, value) for name, value in conditions)
    ]
    if not chosen:
        raise ValueError("no configuration is left: the choices exclude each other")
    return chosen


def _known(what: str, name: str, choices: Mapping[str, Any]) -> Any:
    if name not in choices:
        raise ValueError(f"{what}={name!r} is not one of {', '.join(choices)}")
    return choices[name]


def _field(spec: KernelSpec, name: str) -> str | None:
    """A field of the config as `where` writes it."""
    value = getattr(spec.config, name, None)
    return str(value).lower() if isinstance(value, bool) else value if value is None else str(value)


def _condition(text: str, specs: Sequence[KernelSpec]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    fields = dict.fromkeys(f.name for s in specs for f in dataclasses.fields(s.config))
    if not equals or name not in fields:
        raise ValueError(
            f"where={text!r}: expected FIELD=VALUE, a field one of {', '.join(fields)}"
        )
    values = dict.fromkeys(v for s in specs if (v := _field(s, name)) is not None)
    _known(f"where: {name}", value, values)
    return name, value


def build(
    specs: Sequence[KernelSpec],
    folder: Path,
    *,
    arch: str = kernel_compile.ARCH,
    workers: int | None = None,
    progress: Callable[[KernelSpec], None] | None = None,
) -> dict[str, Any]:
    """Compile what the folder lacks, and write its manifest, which is returned.

    The manifest lists every kernel: name, config, key, file, bytes, sha256, and the registers per
    thread (None without nvdisasm).  Those of earlier calls stay in it if versions are the same.
    """
    check_arch(arch)
    paths = kernel_compile.object_files(
        specs, arch=arch, folder=folder, workers=workers, progress=progress
    )
    head = {
        "arch": arch,
        "kda_cute": machine.version("kda-cute") or machine.UNKNOWN,
        "cutlass_dsl": kernel_compile.dsl_version(),
        "tvm_ffi": machine.version("apache-tvm-ffi") or machine.UNKNOWN,
    }
    entries = {entry["file"]: entry for entry in _earlier(folder, head)}
    for spec, path in zip(specs, paths, strict=True):
        entries[path.name] = _entry(spec, path, arch)
    found = head | {"kernels": [entries[name] for name in sorted(entries)]}
    scratch = folder / f"{MANIFEST}.new"
    scratch.write_text(json.dumps(found, indent=1) + "\n")
    scratch.replace(folder / MANIFEST)
    return found


def _earlier(folder: Path, head: Mapping[str, str]) -> list[dict[str, Any]]:
    """Entries of the folder's manifest whose files are still there, if its versions are these."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
        same = all(found[name] == value for name, value in head.items())
        return [x for x in found["kernels"] if (folder / x["file"]).exists()] if same else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _entry(spec: KernelSpec, path: Path, arch: str) -> dict[str, Any]:
    blob = path.read_bytes()
    return {
        "name": spec.name,
        "config": repr(spec.config),
        "key": kernel_compile.cache_key(spec, arch),
        "file": path.name,
        "bytes": len(blob),
        "sha256": hashlib.sha256(blob).hexdigest(),
        "registers": _registers(path),
    }


def _registers(path: Path) -> int | None:
    try:
        return max((kernel.registers for kernel in kernel_compile.report(path)), default=None)
    except kernel_compile.CompileError:
        return None


def missing(
    specs: Sequence[KernelSpec], folder: Path, arch: str = kernel_compile.ARCH
) -> list[KernelSpec]:
    """Those whose object files the folder doesn't hold."""
    return [
        spec
        for spec in specs
        if not (folder / f"{spec.name}_{kernel_compile.cache_key(spec, arch)}.o").exists()
    ]


def warm_up(
    specs: Sequence[KernelSpec],
    *,
    load: Callable[[KernelSpec], Any] = kernel_compile.load,
    progress: Callable[[KernelSpec], None] | None = None,
) -> int:
    """Load every kernel onto the current GPU, compiling those that the cache lacks; how many."""
    for spec in specs:
        load(spec)
        if progress is not None:
            progress(spec)
    return len(specs)
