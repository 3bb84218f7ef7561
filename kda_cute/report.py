"""What the compiler made of every kernel, against its budgets.

    python3 -m kda_cute.report                                    every configuration
    python3 -m kda_cute.report --precision tf32 --layout default  some of them
    python3 -m kda_cute.report --json > report.json

Compiles for sm_90a what the cache doesn't hold, so the first run takes about 8 s for each of the
configurations and core; needs no GPU.  Exit code 1 when a budget is broken.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from . import compile as kernel_compile
from . import ops
from .kernels import bwd_recurrence
from .layouts import variants
from .layouts.plan import SMEM_PER_CTA, format_table

# A CTA has 512 threads and an SM 65,536 registers; warps move them between each other only after the launch.
REGISTERS_AT_LAUNCH, WARPGROUPS = 128, 4

# m16n8k16 steps of a chunk's products: seven [16,128] x [128,128]-sized ones of 128, seven of [16,16] x [16,128] and
# three of [16,128] x [128,16] of 16 each. In tf32 a step is two instructions, m16n8k8; in bf16 one, but two for the four
# products over tokens that take kd, qd or ki, as hi + lo.
MMA_STEPS = 7 * 128 + 7 * 16 + 3 * 16
MMA_IMPLIED = {"tf32": 2 * MMA_STEPS, "bf16": MMA_STEPS + 4 * 16}
MMA_OPCODES = {"tf32": "HMMA.1688.F32.TF32", "bf16": "HMMA.16816.F32.BF16"}

# fp32 multiply-adds are left for scaling, the diagonal of dM and a few sums.  One product moved off the tensor cores
# would add a thousand.
FFMA_LIMIT = 256

_SETMAXREG = re.compile(r"USETMAXREG\.[A-Z_.]+ (?:UP\d, )?0x([0-9a-f]+)")
_MMA = re.compile(r"\b[A-Z]{0,2}G?MMA\.[A-Z0-9_.]+")


class Measured(NamedTuple):
    """One compiled configuration; shared memory in bytes, instruction counts in the code except
    mma_per_chunk.
    """

    config: Any
    registers: int
    stack: int
    spills: int
    shared: int
    opcodes: dict[str, int]  # tensor-core instructions by full opcode
    accounted: int  # those that the kernel's own account holds
    mma_per_chunk: int  # by that account, over all warps, loops unrolled
    ffma: int
    roles: tuple[int, ...]  # registers per thread that each warpgroup asks for after the launch

    @property
    def mma_implied(self) -> int:
        """Tensor-core instructions that a chunk's mathematics takes."""
        return MMA_IMPLIED[self.config.precision]

    def broken(self) -> list[str]:
        """The budgets that this kernel breaks, in words."""
        opcode, found = MMA_OPCODES[self.config.precision], sum(self.opcodes.values())
        checks = (
            (
                self.registers <= REGISTERS_AT_LAUNCH,
                f"{self.registers} registers > {REGISTERS_AT_LAUNCH}",
            ),
            (self.stack == 0, f"{self.stack} bytes of stack"),
            (self.spills == 0, f"{self.spills} loads and stores of spilled registers"),
            (self.shared <= SMEM_PER_CTA, f"{self.shared} bytes of shared memory > {SMEM_PER_CTA}"),
            (
                set(self.opcodes) == {opcode},
                f"tensor-core instructions {self.opcodes}, not {opcode} only",
            ),
            (
                found == self.accounted,
                f"{found} tensor-core instructions, the account holds {self.accounted}",
            ),
            (
                self.mma_per_chunk == self.mma_implied,
                f"{self.mma_per_chunk} tensor-core instructions a chunk, not {self.mma_implied}",
            ),
            (self.ffma <= FFMA_LIMIT, f"{self.ffma} FFMA > {FFMA_LIMIT}"),
            (
                len(self.roles) == WARPGROUPS and sum(self.roles) <= WARPGROUPS * self.registers,
                f"warpgroups that ask for {self.roles} registers wait for ever",
            ),
        )
        return [words for kept, words in checks if not kept]


def label(config: Any) -> str:
    """A configuration in a few words."""
    walk = "packed" if config.varlen else "equal"
    return f"{config.precision}/{config.layout} beta={config.beta} state_grad={config.state_grad} {walk}"


def measure(config: Any, path: Path) -> Measured:
    """Read the object file of one configuration of the level-1 kernel."""
    (kernel,) = kernel_compile.report(path)
    rows = bwd_recurrence.mma_account(config)
    return Measured(
        config=config,
        registers=kernel.registers,
        stack=kernel.stack,
        spills=kernel.spills,
        shared=variants.plan("bwd_recurrence", config.layout, config.precision).total_bytes,
        opcodes=dict(collections.Counter(_MMA.findall(kernel.sass))),
        accounted=sum(row.static for row in rows),
        mma_per_chunk=sum(row.warps * row.static * row.trips for row in rows),
        ffma=kernel.ops["FFMA"],
        roles=tuple(int(count, 16) for count in _SETMAXREG.findall(kernel.sass)),
    )


def select(
    precisions: Sequence[str] | None = None, layouts: Sequence[str] | None = None
) -> list[kernel_compile.KernelSpec]:
    """Specs of the level-1 kernel with one of these precisions and layouts; None: any."""
    return [
        spec
        for spec in ops.recurrence_specs()
        if (precisions is None or spec.config.precision in precisions)
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
    configs = [spec.config for spec in specs]
    with ThreadPoolExecutor(
        os.cpu_count()
    ) as pool:  # the work is nvdisasm's, in processes of its own
        return list(pool.map(measure, configs, paths))


def table(kernels: Iterable[Measured]) -> str:
    """One line per kernel."""
    head = (
        "kernel",
        "registers",
        "spills",
        "shared",
        f"of {SMEM_PER_CTA}",
        "MMA/chunk",
        "implied",
        "FFMA",
        "budgets",
    )
    rows = [
        (
            label(k.config),
            str(k.registers),
            str(k.spills),
            str(k.shared),
            f"{100 * k.shared / SMEM_PER_CTA:.1f} %",
            str(k.mma_per_chunk),
            str(k.mma_implied),
            str(k.ffma),
            "; ".join(k.broken()) or "kept",
        )
        for k in kernels
    ]
    return format_table(head, rows)


def as_json(kernels: Iterable[Measured]) -> str:
    """A list of objects: the fields of `Measured`, what is implied, and the broken budgets."""
    rows = [
        k._asdict()
        | {"config": label(k.config), "mma_implied": k.mma_implied, "broken": k.broken()}
        for k in kernels
    ]
    return json.dumps(rows, indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kda_cute.report", description=__doc__.splitlines()[0])
    family = "bwd_recurrence"
    parser.add_argument("--precision", action="append", choices=variants.precisions(family))
    parser.add_argument("--layout", action="append", choices=variants.names(family))
    parser.add_argument("--workers", type=int, help="compiling processes; one per core by default")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    args = parser.parse_args(argv)
    kernels = measure_all(select(args.precision, args.layout), args.workers)
    print(as_json(kernels) if args.json else table(kernels))
    broken = sum(bool(k.broken()) for k in kernels)
    print(f"{len(kernels) - broken} of {len(kernels)} kernels within budget", file=sys.stderr)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
