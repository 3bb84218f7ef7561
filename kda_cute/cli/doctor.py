"""`kda-cute doctor`: what runs here, what doesn't, and why."""

from __future__ import annotations

import json
import sys

import click

from ..lab import doctor as judge
from ..layouts.plan import format_table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, and nothing else.")
def doctor(as_json: bool) -> None:
    """GPU, driver, versions, and what will run, what won't, and why.

    Starts nothing on the GPU and writes nothing.  Exit code 0 when the kernels run here, 1 when only
    the reference does.

    \b
    Example:
      kda-cute doctor --json > machine.json
    """
    facts = judge.gather()
    verdicts, why = judge.verdicts(facts), judge.why_no_kernels(facts)
    if as_json:
        found = {
            "kernels_run": not why,
            "why": why,
            "facts": facts._asdict()
            | {
                "gpus": [gpu._asdict() for gpu in facts.gpus],
                "cache": facts.cache._asdict(),
            },
            "verdicts": [verdict._asdict() for verdict in verdicts],
            "notes": judge.notes(facts),
        }
        click.echo(json.dumps(found, indent=1))
    else:
        click.echo(_text(facts, verdicts, why))
    sys.exit(int(bool(why)))


def _text(facts: judge.Facts, verdicts: list[judge.Verdict], why: str) -> str:
    missing = "missing"
    lines = [
        ("system", facts.system),
        ("python", facts.python),
        ("kda_cute", facts.kda_cute or "not installed"),
        ("torch", f"{facts.torch}, CUDA {facts.torch_cuda or 'none'}"),
        ("driver", facts.driver or missing),
        *(("GPU", _gpu(gpu)) for gpu in facts.gpus),
        *([("GPU", facts.gpu_problem)] if facts.gpu_problem else []),
        ("DSL", f"{facts.dsl or missing}, pinned to {facts.dsl_pin}"),
        ("tvm-ffi", facts.tvm_ffi or missing),
        ("nvdisasm", facts.nvdisasm or missing),
        ("cache", _cache(facts.cache)),
        *((name, version or "not installed") for name, version in facts.peers.items()),
    ]
    width = max(len(name) for name, _ in lines)
    table = format_table(
        ("operation", "backend", "runs", "why"),
        [(v.operation, v.backend, "yes" if v.runs else "no", v.why) for v in verdicts],
    )
    ending = f"only the reference runs here: {why}" if why else "the kernels run here"
    noted = [f"note: {note}" for note in judge.notes(facts)]
    return "\n".join(
        [*(f"{name:{width}}  {value}" for name, value in lines), "", table, "", *noted, ending]
    )


def _gpu(gpu: judge.Gpu) -> str:
    major, minor = gpu.capability
    return f"{gpu.name}, compute capability {major}.{minor}, {gpu.memory / 2**30:.0f} GiB"


def _cache(cache: judge.Cache) -> str:
    state = "writable" if cache.writable else "NOT writable"
    return f"{cache.folder}, {state}, {cache.objects} kernels, {cache.bytes / 2**20:.1f} MiB"
