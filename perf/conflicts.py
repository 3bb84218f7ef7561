"""Bank conflicts: what the audit predicts of real kernels beside what ncu counts.

    python3 -m perf.conflicts --out docs/figures/conflicts.md    every probe; needs ncu and a GPU
    python3 -m perf.conflicts --reports FOLDER                   keep ncu's reports and CSV there
    python3 -m perf.conflicts --read FOLDER --out FILE           tables of what a folder holds
    python3 -m perf.conflicts --probe gradients:bf16/padded      one launch, to run under ncu

A probe is KERNEL:PRECISION/LAYOUT.  Its results are checked against float64, then one launch is
profiled: wavefronts of shared memory of every instruction (source counters), and of the whole kernel
(hardware counters).  Exit code 1 when a kind of instruction takes other wavefronts than predicted.
"""

import argparse
import collections
import csv
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from kda_cute.lab import catalogue
from kda_cute.layouts import audit
from kda_cute.layouts.plan import Plan
from perf import results
from perf.shapes import CHUNK, LONG_CHUNK, Shape

PROBES = (
    "bwd_recurrence:tf32/default",
    "bwd_recurrence:tf32/padded",
    "bwd_recurrence:bf16/default",
    "bwd_recurrence:bf16/padded",
    "transition:bf16/default",
    "scan:bf16/default",
    "reverse_scan:bf16/default",
    "gradients:bf16/default",
    "gradients:bf16/padded",
)
# Whole chunks only, and so many heads that a scan's CTA has both halves of v, as its default plan.
SHAPE = Shape("probe", (1024,), 72)
SOURCE = ("inst_executed", "memory_l1_wavefronts_shared", "memory_l1_wavefronts_shared_ideal")
HARDWARE = {
    "wavefronts": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    ),
    "conflicts": (
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    ),
}
TOLERANCE = 0.1  # of the wavefronts of an instruction
_OPCODE = re.compile(r"^\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


class Instruction(NamedTuple):
    """One instruction of shared memory in the code: how often warps ran it, and its wavefronts."""

    opcode: str
    executed: int
    wavefronts: int
    ideal: int


class Group(NamedTuple):
    """A kind of instruction: instructions and wavefronts per chunk, predicted and measured."""

    kind: str
    predicted: float
    predicted_wavefronts: float
    measured: float
    measured_wavefronts: float

    @property
    def each(self) -> tuple[float | None, float | None]:
        """Wavefronts of one instruction, predicted and measured."""
        return (
            self.predicted_wavefronts / self.predicted if self.predicted else None,
            self.measured_wavefronts / self.measured if self.measured else None,
        )

    def agrees(self, tolerance: float = TOLERANCE) -> bool:
        """Whether those two do; true where one of them has no such instruction."""
        predicted, measured = self.each
        return predicted is None or measured is None or abs(measured / predicted - 1) <= tolerance


class Pattern(NamedTuple):
    """Instructions of a kind that take so many wavefronts: how many per chunk, predicted and
    measured, and the accesses with conflicts that are predicted to be among them.
    """

    kind: str
    wavefronts: float
    predicted: float
    measured: float
    accesses: tuple[str, ...]


# ---------------------------------------------------------------- reading ncu
def kind_of(opcode: str) -> str | None:
    """The audit's kind of a SASS opcode; None for one that is not of shared memory."""
    name, _, rest = opcode.partition(".")
    if name in ("LDSM", "STSM"):
        matrix = "ldmatrix" if name == "LDSM" else "stmatrix"
        return f"{matrix}_trans" if ".MT" in f".{rest}" else matrix
    if name not in ("LDS", "STS"):
        return None
    widths = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
    width = next((widths[part] for part in rest.split(".") if part in widths), 32)
    return f"{name.lower()}{width}"


def read_source(text: str) -> list[Instruction]:
    """The instructions of shared memory in `ncu --page source --csv --print-source sass`."""
    columns, found = None, []
    for row in csv.reader(io.StringIO(text)):
        if "Source" in row and "L1 Wavefronts Shared" in row:
            columns = {name: i for i, name in enumerate(row)}  # the last of equal names
        elif columns is not None and len(row) > max(columns.values()):
            one = _instruction(columns, row)
            found += [one] if one is not None else []
    if columns is None:
        raise ValueError("no table with the columns Source and L1 Wavefronts Shared in ncu's CSV")
    return found


def _instruction(columns: dict[str, int], row: list[str]) -> Instruction | None:
    opcode = _OPCODE.match(row[columns["Source"]])
    if opcode is None or kind_of(opcode[1]) is None:
        return None
    names = ("Instructions Executed", "L1 Wavefronts Shared", "L1 Wavefronts Shared Ideal")
    return Instruction(opcode[1], *(_number(row[columns[name]]) for name in names))


def _number(text: str) -> int:
    text = text.replace(",", "").strip()
    return 0 if text in ("", "-") else round(float(text))


def read_totals(text: str) -> dict[str, int]:
    """{"wavefronts", "conflicts"} of the whole kernel in `ncu --page raw --csv`, loads and stores."""
    rows = list(csv.reader(io.StringIO(text)))
    wanted = [metric for pair in HARDWARE.values() for metric in pair]
    for i, row in enumerate(rows):
        if all(metric in row for metric in wanted):
            values = [line for line in rows[i + 1 :] if len(line) == len(row)][-1]
            return {
                name: sum(_number(values[row.index(metric)]) for metric in pair)
                for name, pair in HARDWARE.items()
            }
    raise ValueError(f"no table with the columns {', '.join(wanted)} in ncu's CSV")


# ---------------------------------------------------------------- beside the audit
def groups(plan: Plan, instructions: Iterable[Instruction], chunks: int) -> list[Group]:
    """Every kind of instruction that is predicted or was seen."""
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * 4)
    for row in audit.audit(plan):
        sums[row.kind][0] += row.count
        sums[row.kind][1] += row.count * row.ideal + row.extra_cycles
    for one in instructions:
        sums[kind_of(one.opcode)][2] += one.executed / chunks
        sums[kind_of(one.opcode)][3] += one.wavefronts / chunks
    return [Group(kind, *sums[kind]) for kind in sorted(sums)]


def patterns(plan: Plan, instructions: Iterable[Instruction], chunks: int) -> list[Pattern]:
    """Kinds with conflicts, predicted or seen, by the wavefronts of an instruction in quarters."""
    predicted: dict[tuple[str, float], float] = collections.Counter()
    measured: dict[tuple[str, float], float] = collections.Counter()
    names: dict[tuple[str, float], list[str]] = collections.defaultdict(list)
    conflicting = set()
    for row in audit.audit(plan):
        key = (row.kind, _quarters(row.ideal + row.extra_cycles / row.count))
        predicted[key] += row.count
        if row.extra_cycles:
            names[key].append(row.name)
            conflicting.add(row.kind)
    for one in instructions:
        if one.executed:
            key = (kind_of(one.opcode), _quarters(one.wavefronts / one.executed))
            measured[key] += one.executed / chunks
            if one.wavefronts > one.ideal:
                conflicting.add(key[0])
    keys = sorted(key for key in {*predicted, *measured} if key[0] in conflicting)
    return [Pattern(*key, predicted[key], measured[key], tuple(names[key])) for key in keys]


def _quarters(x: float) -> float:
    return round(4 * x) / 4


# ---------------------------------------------------------------- tables
class Found(NamedTuple):
    """What was read of one probe."""

    probe: str
    plan: Plan
    chunks: int
    instructions: list[Instruction]
    totals: dict[str, int]


def markdown(found: Sequence[Found]) -> str:
    """Totals of every probe, then its kinds of instructions, then those with conflicts."""
    totals = []
    for f in found:
        predicted = catalogue.wavefronts(f.plan)
        seen = sum(one.wavefronts for one in f.instructions) / f.chunks
        excess = seen - sum(one.ideal for one in f.instructions) / f.chunks
        counted = {name: value / f.chunks for name, value in f.totals.items()}
        totals.append(
            (
                f.probe,
                f"{predicted['all']:,}",
                f"{seen:,.0f}",
                f"{counted['wavefronts']:,.0f}",
                f"{predicted['conflicts']:,}",
                f"{excess:,.0f}",
                f"{counted['conflicts']:,.0f}",
            )
        )
    head = ("plan", "wavefronts predicted", "by instruction", "by counter")
    head += ("conflicts predicted", "by instruction", "by counter")
    parts = ["Per chunk, of all instructions of shared memory:", results.table(head, totals)]
    kinds = [
        (f.probe, g.kind, f"{g.predicted:,.0f}", f"{g.measured:,.0f}", *map(_each, g.each), _ok(g))
        for f in found
        for g in groups(f.plan, f.instructions, f.chunks)
    ]
    head = ("plan", "kind", "predicted", "measured", "wavefronts each, predicted", "measured", "")
    parts += ["By kind, instructions per chunk:", results.table(head, kinds)]
    lines = [
        (f.probe, p.kind, f"{p.wavefronts:g}", f"{p.predicted:,.0f}", f"{p.measured:,.0f}", "; ".join(p.accesses))
        for f in found
        for p in patterns(f.plan, f.instructions, f.chunks)
    ]  # fmt: skip
    head = ("plan", "kind", "wavefronts each", "predicted", "measured", "predicted conflicts")
    parts += ["Kinds with conflicts, instructions per chunk:", results.table(head, lines)]
    return "\n\n".join(parts) + "\n"


def _each(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ok(group: Group) -> str:
    if None in group.each:
        return "measured only" if group.each[0] is None else "predicted only"
    return "agrees" if group.agrees() else "differs"


# ---------------------------------------------------------------- probes
def parse_probe(text: str) -> tuple[catalogue.Selection, str, str]:
    """(selection, precision, layout) of KERNEL:PRECISION/LAYOUT."""
    kernel, colon, variant = text.partition(":")
    precision, slash, layout = variant.partition("/")
    if not colon or not slash:
        raise ValueError(f"probe {text!r}: expected KERNEL:PRECISION/LAYOUT, as in {PROBES[0]}")
    selection = catalogue.select(kernel)
    selection.plan(layout, precision)
    return selection, precision, layout


def launch(probe: str) -> None:
    """Check the kernel, then launch it once between the marks that `ncu --profile-from-start off`
    waits for.
    """
    import torch

    from perf import one_kernel

    selection, precision, layout = parse_probe(probe)
    (subject,) = one_kernel.subjects(selection, [layout], SHAPE, precision)
    wrong = [name for name, part in subject.check().items() if not part <= 1]
    if wrong:
        raise RuntimeError(f"{probe}: wrong results {', '.join(wrong)}: nothing is profiled")
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    subject.launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def file_name(probe: str) -> str:
    """The probe as a file's name."""
    return re.sub(r"[:/]", "_", probe)


def profile(probe: str, folder: Path) -> None:
    """Run ncu, and leave its CSV in the folder."""
    report = folder / f"{file_name(probe)}.ncu-rep"
    metrics = ",".join([*SOURCE, *(m for pair in HARDWARE.values() for m in pair)])
    command = ["ncu", "--profile-from-start", "off", "--section", "SourceCounters"]
    command += ["--metrics", metrics, "--force-overwrite", "--export", str(report)]
    _run([*command, sys.executable, "-m", "perf.conflicts", "--probe", probe])
    pages = {"source": ["--page", "source", "--print-source", "sass"], "raw": ["--page", "raw"]}
    for page, flags in pages.items():
        text = _run(["ncu", "--import", str(report), "--csv", *flags])
        (folder / f"{file_name(probe)}.{page}.csv").write_text(text)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = (done.stdout + done.stderr).strip()[-2000:]
        raise RuntimeError(f"{' '.join(command[:2])} ... ended with {done.returncode}: {words}")
    return done.stdout


def read(probe: str, folder: Path) -> Found:
    """What `profile` left of a probe."""
    selection, precision, layout = parse_probe(probe)
    chunk = CHUNK if selection.family == "bwd_recurrence" else LONG_CHUNK
    source, raw = (folder / f"{file_name(probe)}.{page}.csv" for page in ("source", "raw"))
    instructions = read_source(source.read_text())
    return Found(
        probe,
        selection.plan(layout, precision),
        SHAPE.H * SHAPE.T // chunk,
        instructions,
        read_totals(raw.read_text()),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="perf.conflicts", description=__doc__.splitlines()[0])
    parser.add_argument("--probes", default=",".join(PROBES), help="KERNEL:PRECISION/LAYOUT,...")
    parser.add_argument("--probe", help="launch this one once, and do nothing else")
    parser.add_argument("--reports", type=Path, help="folder that keeps ncu's reports and CSV")
    parser.add_argument("--read", type=Path, help="folder of an earlier run; ncu doesn't run")
    parser.add_argument("--out", type=Path, help="Markdown file; stdout by default")
    args = parser.parse_args(argv)
    probes = [word for word in args.probes.split(",") if word]
    try:
        for probe in [args.probe] if args.probe else probes:
            parse_probe(probe)
        if args.probe:
            launch(args.probe)
            return 0
        if args.read is None and shutil.which("ncu") is None:
            raise RuntimeError("ncu (Nsight Compute) is not on PATH")
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.read or args.reports or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            for probe in probes if args.read is None else ():
                print(f"profiling {probe}", file=sys.stderr, flush=True)
                profile(probe, folder)
            found = [read(probe, folder) for probe in probes]
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = markdown(found)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    else:
        print(text)
    return int(any(not g.agrees() for f in found for g in groups(f.plan, f.instructions, f.chunks)))


if __name__ == "__main__":
    sys.exit(main())
