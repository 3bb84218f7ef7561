"""Which ops, shapes and providers a benchmark run has; `kda-cute bench run` is its command line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from perf import compare, providers, run
from perf.forms import TYPES
from perf.results import FOLDER
from perf.shapes import GROUPS, SHAPES, Shape, find_shapes, repeats_of

OPS = (run.OP, *compare.OPS)
# Who serves which op.  Peers are optional: one that is absent is skipped, with the reason.
PROVIDERS = {
    "kda_cute": OPS,
    "cudnn": compare.OPS,
    "fla": compare.OPS,
    "scalar": (run.OP,),
}
DEFAULT_PROVIDERS = ("kda_cute", "cudnn")
DEFAULT_VARIANTS = ("tf32/default", "bf16/default")
DEFAULT_SHAPES = {run.OP: ("T8192_H96",), **dict.fromkeys(compare.OPS, tuple(SHAPES))}
FORMS = tuple(TYPES)
ROUNDS = 60
SCALAR_REPEATS = 3  # a call takes up to half a second
BASELINES = FOLDER.parent / "baselines"


class Impossible(RuntimeError):
    """What was asked for can't be done here, and why."""


def make_jobs(
    ops: Sequence[str],
    *,
    shapes: Sequence[str] = (),
    wanted: Sequence[str] = DEFAULT_PROVIDERS,
    forms: Sequence[str] = FORMS,
    options: Sequence[str] = providers.OPTIONS,
    variants: Sequence[str] = DEFAULT_VARIANTS,
    rounds: int = ROUNDS,
) -> tuple[list[run.Job], list[str]]:
    """What is to be measured, and what of the wanted is left out, with the reason.

    shapes: names or names of groups; none, each op's own.  forms and options are of level 2,
    variants of level 1.  rounds: of a long call; short ones get more (`repeats_of`).  ValueError
    for unknown names or rounds below 1.
    """
    run.check_names("op", ops, OPS)
    run.check_names("providers", wanted, tuple(PROVIDERS))
    run.check_names("forms", forms, FORMS)
    run.check_names("options", options, providers.OPTIONS)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    jobs, left_out = [], []
    for op in dict.fromkeys(ops):
        mine = [name for name in dict.fromkeys(wanted) if op in PROVIDERS[name]]
        left_out += [f"{op}: {name} has no such op" for name in wanted if name not in mine]
        if not mine:
            continue
        for shape in find_shapes(shapes or DEFAULT_SHAPES[op]):
            repeats = repeats_of(shape, rounds)
            if op == run.OP:
                how = dict(candidates=_level_1(mine, variants, repeats))
            else:
                how = dict(forms=forms, options=options, wanted=mine, repeats=repeats)
            jobs.append(run.Job(op, shape, how))
    if not jobs:
        raise ValueError(f"providers {', '.join(wanted)} serve none of {', '.join(ops)}")
    return jobs, left_out


def _level_1(wanted: Sequence[str], variants: Sequence[str], repeats: int) -> list[run.Candidate]:
    made = run.package_candidates(variants, repeats) if "kda_cute" in wanted else []
    return made + (run.scalar_candidates(SCALAR_REPEATS) if "scalar" in wanted else [])


def compile_jobs(jobs: Sequence[run.Job]) -> None:
    """Compile what this package's forward misses, in parallel; the rest is compiled when called."""
    mine = [j for j in jobs if j.op == "chunk_kda_fwd" and "kda_cute" in j.how["wanted"]]
    if mine:
        how = mine[0].how
        run.compile_forward(how["forms"], how["options"], [job.shape for job in mine])


def need_gpu() -> None:
    """Impossible without a CUDA device."""
    if not torch.cuda.is_available():
        raise Impossible("a benchmark run needs a CUDA device, and torch sees none")


# ---------------------------------------------------------------- what there is
def _described(shape: Shape) -> dict[str, Any]:
    return dict(
        name=shape.name, tokens=shape.T, sequences=shape.N, heads=shape.H,
        lengths=list(shape.lengths), repeats=repeats_of(shape, ROUNDS),
    )  # fmt: skip


def listing() -> dict[str, Any]:
    """Ops, shapes by group, and providers with what keeps each from running here (empty: nothing)."""
    return {
        "ops": list(OPS),
        "shapes": {g: [_described(s) for s in group.values()] for g, group in GROUPS.items()},
        "providers": [
            {"name": name, "ops": list(ops), "why_not": providers.why_not(name)}
            for name, ops in PROVIDERS.items()
        ],
    }


def listing_text(found: Mapping[str, Any]) -> str:
    """The same to read."""
    lines = [f"ops: {', '.join(found['ops'])}"]
    for group, shapes in found["shapes"].items():
        lines += ["", f"shapes, group {group!r}:"]
        for s in shapes:
            lengths, equal = s["lengths"], len(set(s["lengths"])) == 1
            each = f"{s['sequences']} x {lengths[0]}" if equal else "+".join(map(str, lengths))
            lines.append(f"  {s['name']:14} {s['tokens']:6} tokens, {s['heads']:3} heads, {each}")
    lines += ["", "providers:"]
    for p in found["providers"]:
        state = f"not here: {p['why_not']}" if p["why_not"] else "available"
        lines.append(f"  {p['name']:10} {state} ({', '.join(p['ops'])})")
    lines += ["", f"FLA tunes itself for minutes, so it runs on {', '.join(providers.FLA_SHAPES)}."]
    return "\n".join(lines)


# ---------------------------------------------------------------- baselines
def find_results(name: str) -> Path:
    """A results file by its path, or a committed baseline by its name, as in "h200"; Impossible says
    how to make one that is missing.
    """
    path, baseline = Path(name), BASELINES / f"{name}.json"
    if path.is_file():
        return path
    if path.suffix or len(path.parts) > 1:
        raise Impossible(f"there is no file {name}")
    if not baseline.is_file():
        raise Impossible(
            f"there is no baseline {name!r}; on that GPU, "
            f"`kda-cute bench run --out perf/baselines/{name}.json` makes one (docs/regressions.md)"
        )
    return baseline
