"""What the compiler made of every kernel, against its budgets.

    python3 -m kda_cute.report                                    every configuration
    python3 -m kda_cute.report --kernel scan --kernel transition  those of some kernels
    python3 -m kda_cute.report --precision tf32 --layout default  some of them
    python3 -m kda_cute.report --json > report.json

Compiles for sm_90a what the cache doesn't hold, so the first run takes 4 to 12 s for each of the
configurations and core; needs no GPU.  Exit code 1 when a budget is broken.  What a kernel promises
is said by `budget` in its `schedule`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from . import backward, forward, ops
from . import compile as kernel_compile
from .kernels.budget import WARPGROUP, Budget
from .layouts import variants
from .layouts.plan import format_table

_SETMAXREG = re.compile(r"USETMAXREG\.[A-Z_.]+ (?:UP\d, )?0x([0-9a-f]+)")
_MMA = re.compile(r"\b[A-Z]{0,2}G?MMA\.[A-Za-z0-9_.]+")


class Measured(NamedTuple):
    """One compiled configuration and its budget; shared memory in bytes, instruction counts in the
    code.
    """

    kernel: str
    config: Any
    budget: Budget
    registers: int
    stack: int
    spills: int
    shared: int
    opcodes: dict[str, int]  # tensor-core instructions by full opcode
    ffma: int
    roles: tuple[int, ...]  # registers per thread that roles ask for after the launch

    def broken(self) -> list[str]:
        """The budgets that this kernel breaks, in words."""
        b = self.budget
        roles, pool = sorted(role.registers for role in b.roles), b.threads // WARPGROUP
        checks = (
            (self.registers <= b.registers, f"{self.registers} registers > {b.registers}"),
            (self.stack == 0, f"{self.stack} bytes of stack"),
            (self.spills == 0, f"{self.spills} loads and stores of spilled registers"),
            (self.shared <= b.shared, f"{self.shared} bytes of shared memory > {b.shared}"),
            (
                self.opcodes == b.in_code,
                f"tensor-core instructions {self.opcodes}, the account holds {b.in_code}",
            ),
            (
                b.per_chunk == b.implied,
                f"tensor-core instructions a chunk {b.per_chunk}, not {b.implied}",
            ),
            (self.ffma <= b.ffma, f"{self.ffma} FFMA > {b.ffma}"),
            (
                sorted(self.roles) == roles,
                f"roles ask for {self.roles} registers, the schedule says {roles}",
            ),
            (  # warps move registers between each other only after the launch
                b.pool <= pool * self.registers,
                f"warpgroups that ask for {b.pool} of {pool * self.registers} registers wait for ever",
            ),
        )
        return [words for kept, words in checks if not kept]


def label(config: Any) -> str:
    """A configuration in a few words: flags that are set, numbers that are not as usual."""
    words = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, bool):
            words += [field.name] * value
        elif isinstance(value, str) or value != field.default:
            words.append(f"{field.name}={value}")
    return " ".join(words)


def budget(spec: kernel_compile.KernelSpec) -> Budget:
    """What the kernel's schedule promises of this config."""
    schedule = importlib.import_module(f"{__package__}.kernels.{spec.name}.schedule")
    return schedule.budget(spec.config)


def measure(spec: kernel_compile.KernelSpec, path: Path) -> Measured:
    """Read the object file of one configuration."""
    (kernel,) = kernel_compile.report(path)
    promised = budget(spec)
    return Measured(
        kernel=spec.name,
        config=spec.config,
        budget=promised,
        registers=kernel.registers,
        stack=kernel.stack,
        spills=kernel.spills,
        shared=promised.plan.total_bytes,
        opcodes=dict(collections.Counter(_MMA.findall(kernel.sass))),
        ffma=kernel.ops["FFMA"],
        roles=tuple(int(count, 16) for count in _SETMAXREG.findall(kernel.sass)),
    )


def all_specs() -> list[kernel_compile.KernelSpec]:
    """Every configuration of the package that a call can ask for."""
    return [*ops.recurrence_specs(), *forward.forward_specs(), *backward.backward_specs()]


def select(
    precisions: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    kernels: Sequence[str] | None = None,
) -> list[kernel_compile.KernelSpec]:
    """Specs of these kernels with one of these precisions and layouts; None: any.  A kernel that
    has only one precision computes in bf16.
    """
    return [
        spec
        for spec in all_specs()
        if (kernels is None or spec.name in kernels)
        and (precisions is None or getattr(spec.config, "precision", "bf16") in precisions)
        and (layouts is None or spec.config.layout in layouts)
    ]


def measure_all(
    specs: Sequence[kernel_compile.KernelSpec],
    workers: int | None = None,
    folder: Path | None = None,
) -> list[Measured]:
    """Compile what is missing, with a progress bar on stderr, and measure everything."""
    with tqdm(total=len(specs), desc="compiling for sm_90a", unit="kernel", file=sys.stderr) as bar:
        paths = kernel_compile.object_files(
            specs, folder=folder, workers=workers, progress=lambda spec: bar.update()
        )
    # The work is nvdisasm's, in processes of its own.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(measure, specs, paths))


def table(kernels: Iterable[Measured]) -> str:
    """One line per kernel."""
    head = (
        *("kernel", "config", "registers", "of", "spills", "shared", "of"),
        *("MMA", "MMA/chunk", "implied", "FFMA", "budgets"),
    )
    rows = [
        (
            k.kernel,
            label(k.config),
            str(k.registers),
            str(k.budget.registers),
            str(k.spills),
            str(k.shared),
            str(k.budget.shared),
            str(sum(k.opcodes.values())),
            str(sum(k.budget.per_chunk.values())),
            str(sum(k.budget.implied.values())),
            str(k.ffma),
            "; ".join(k.broken()) or "kept",
        )
        for k in kernels
    ]
    return format_table(head, rows)


def as_json(kernels: Iterable[Measured]) -> str:
    """A list of objects: the fields of `Measured`, the budget's counts, and the broken budgets."""
    rows = []
    for k in kernels:
        row = k._asdict() | {"config": label(k.config), "broken": k.broken()}
        promised = row.pop("budget")
        counts = {"mma_per_chunk": promised.per_chunk, "mma_implied": promised.implied}
        rows.append(row | counts)
    return json.dumps(rows, indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kda_cute.report", description=__doc__.splitlines()[0])
    families = variants.kernels()

    def choices(of) -> list[str]:
        return list(dict.fromkeys(name for family in families for name in of(family)))

    parser.add_argument("--kernel", action="append", choices=families)
    parser.add_argument("--precision", action="append", choices=choices(variants.precisions))
    parser.add_argument("--layout", action="append", choices=choices(variants.names))
    parser.add_argument("--workers", type=int, help="compiling processes; one per core by default")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    args = parser.parse_args(argv)
    kernels = measure_all(select(args.precision, args.layout, args.kernel), args.workers)
    print(as_json(kernels) if args.json else table(kernels))
    broken = sum(bool(k.broken()) for k in kernels)
    print(f"{len(kernels) - broken} of {len(kernels)} kernels within budget", file=sys.stderr)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
