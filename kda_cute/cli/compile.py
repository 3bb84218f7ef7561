"""`kda-cute compile`: compile kernels ahead of time, or load them on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path

import click
from tqdm import tqdm

from .common import Undone, need_kernels


@click.command("compile")
@click.option("--arch", default="sm_90a", show_default=True, help="GPU architecture.")
@click.option(
    "--out", type=click.Path(file_okay=False), help="Folder; the cache folder by default."
)
@click.option("--op", "ops", multiple=True, help="chunk_kda or bwd_recurrence; both by default.")
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel; several times.")
@click.option(
    "--layout", "layouts", multiple=True, help="A plan; several times; `default` by default."
)
@click.option("--where", multiple=True, metavar="FIELD=VALUE", help="Only such configurations.")
@click.option("--jobs", type=click.IntRange(1), help="Processes, about 1 GB each; one per core.")
@click.option("--warmup", is_flag=True, help="Load the kernels on this GPU, too.")
@click.option("--dry-run", is_flag=True, help="Say what would be compiled, and compile nothing.")
@click.option("--json", "as_json", is_flag=True, help="The manifest on stdout, and nothing else.")
def compile(
    arch: str,
    out: str | None,
    ops: tuple[str, ...],
    kernels: tuple[str, ...],
    layouts: tuple[str, ...],
    where: tuple[str, ...],
    jobs: int | None,
    warmup: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Compile kernels ahead of time into a folder that a deployment can ship.

    Needs no GPU.  A configuration takes 4 to 12 s of a core, once; what the folder holds is kept.
    The folder has an object file for each configuration, and manifest.json, which lists them.  On the
    other machine, with the same versions of this package and of the DSL, KDA_CUTE_CACHE=FOLDER makes
    calls find them; it may be read-only there.

    --where chooses by fields of the configurations: g, beta = bf16 or f32; gate = log, safe or
    softplus; varlen = true or false (packed sequences); initial = none, bf16 or f32 (a state goes
    in); final, save = true or false (a state goes out, states are kept for a backward pass); groups =
    1 or 2 (few or many heads); of bwd_recurrence, precision = tf32 or bf16, and state_grad.  A kernel
    without such a field stays.

    --warmup loads the kernels afterwards, which takes a Hopper GPU: so it fills the cache of a machine
    before its first training step, and with --out it proves that a shipped folder works there.

    \b
    Examples:
      kda-cute compile --out kernels --op chunk_kda --where gate=safe --where g=bf16
      KDA_CUTE_CACHE=kernels python train.py
      kda-cute compile --warmup --op chunk_kda --where gate=log --where varlen=false
    """
    from .. import compile as kernel_compile
    from ..lab import prebuilt

    try:
        prebuilt.check_arch(arch)
        specs = _specs(ops, kernels, layouts, where)
        folder = Path(out) if out else kernel_compile.named_folder()
        if warmup:
            need_kernels("--warmup loads kernels")
        if dry_run:
            _plan(specs, folder, arch, as_json)
            return
        folder.mkdir(parents=True, exist_ok=True)
        with _bar(f"compiling for {arch}", len(specs)) as bar:
            manifest = prebuilt.build(
                specs, folder, arch=arch, workers=jobs, progress=lambda spec: bar.update()
            )
        if warmup:
            os.environ["KDA_CUTE_CACHE"] = str(folder)  # where `load` looks, in this process
            with _bar("loading", len(specs)) as bar:
                prebuilt.warm_up(specs, progress=lambda spec: bar.update())
    except BrokenExecutor as error:
        message = "a compiling process died, for want of memory perhaps: fewer --jobs need less"
        raise Undone(message) from error
    except (ValueError, OSError, ImportError, kernel_compile.CompileError) as error:
        raise Undone(str(error)) from error
    if any(entry["registers"] is None for entry in manifest["kernels"]):
        click.echo("registers are not reported: nvdisasm not found", err=True)
    if as_json:
        click.echo(json.dumps(manifest | {"folder": str(folder), "loaded": warmup}, indent=1))
    else:
        size = sum(entry["bytes"] for entry in manifest["kernels"])
        loaded = ", loaded on this GPU" if warmup else ""
        click.echo(f"kernels ready: {len(specs)}{loaded}")
        held = len(manifest["kernels"])
        click.echo(f"{folder}: {held} kernels, {size / 2**20:.1f} MiB, manifest.json")
        click.echo(f"use them: KDA_CUTE_CACHE={folder}")


def _specs(ops: Sequence[str], kernels, layouts, where) -> list:
    from .. import compile as kernel_compile
    from .. import report
    from ..lab import prebuilt

    kernel_compile.dsl_version()  # says what is missing, before kernels are imported
    return prebuilt.choose(
        report.all_specs(),
        operations=ops,
        kernels=kernels,
        layouts=layouts or ("default",),
        where=where,
    )


def _plan(specs: Sequence, folder: Path, arch: str, as_json: bool) -> None:
    from ..lab import prebuilt
    from ..report import label

    missing = {(s.name, s.config) for s in prebuilt.missing(specs, folder, arch)}
    rows = [
        {"name": s.name, "config": label(s.config), "missing": (s.name, s.config) in missing}
        for s in specs
    ]
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "kernels": rows}, indent=1))
        return
    for row in rows:
        state = "to compile" if row["missing"] else "there"
        click.echo(f"{row['name']:15} {state:11} {row['config']}")
    click.echo(f"{len(missing)} of {len(specs)} configurations to compile in {folder}")


def _bar(words: str, total: int) -> tqdm:
    return tqdm(total=total, desc=words, unit="kernel", file=sys.stderr)
