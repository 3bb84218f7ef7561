"""One KDA training step, forward and backward, every result checked against autograd.

    python examples/training_step.py
    python examples/training_step.py --no-compile --precision bf16 --layout padded

Three packed sequences with initial and final states, safe gate, L2 norm and beta logits go through

- `chunk_kda`, the training op: backend "kernels" on a Hopper GPU, "reference" elsewhere;
- level 1: `prepare` (torch), `bwd_recurrence` (the kernel of --precision and --layout on a Hopper
  GPU, its torch reference elsewhere) and `finish` (torch).

Outputs and gradients are compared with float64 autograd of the token-by-token recurrence.  Without
a Hopper GPU the kernels can't run, but they compile: then those of this step are compiled for
sm_90a and held against their budgets.  Exit code 1 when a result or a budget misses.
"""

import argparse
import math
import sys
import time
from typing import NamedTuple

import torch

import kda_cute
from kda_cute import reference, report
from kda_cute.layouts import variants
from kda_cute.layouts.plan import format_table

LENGTHS = (1000, 17, 64)
HEADS, DIM = 4, kda_cute.HEAD_DIM
LOWER_BOUND = -5.0
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
LEVEL_1 = "bwd_recurrence"
# What the configurations of kernels are for this step, in those of their fields that matter to it.
# A scan has one or two consumer warpgroups; which ones depends on the GPU.
STEP = {
    **{"g": "bf16", "gate": "safe", "beta": "bf16", "varlen": True},
    **{"initial": "f32", "final": True, "save": True, "state_grad": "f32"},
}

# Relative Frobenius errors, x 1e-3.  The kernels of chunk_kda multiply in bf16 and sum in fp32; they
# get about twice what such roundings cost in a model of them.  The reference computes in float64, so
# all of its error is that of rounding the results: at most 2 ** -8 in bf16.
CHUNK_KDA = {
    "kernels": {
        **{"o": 10.0, "final_state": 8.0},
        **{"dq": 8.0, "dk": 9.0, "dv": 10.0, "dg": 10.0, "dbeta": 14.0},
        **{"dA_log": 20.0, "ddt_bias": 10.0, "dinitial_state": 8.0},
    },
    "reference": {
        **dict.fromkeys(("o", "dq", "dk", "dv", "dg", "dbeta"), 4.0),
        **dict.fromkeys(("final_state", "dA_log", "ddt_bias", "dinitial_state"), 0.001),
    },
}
# Level 1.  The workspace holds INV, Mqk and the states in bf16, so even an exact recurrence over it
# is off from the oracle: WORKSPACE is twice the largest of those errors over seeds 0 to 4.  The
# final state is carried in fp32 and never rounded; dA_log has four elements, so its error varies
# from seed to seed and gets three times.  The kernel's own rounding comes on top: KERNEL is the most
# that kda_cute/accuracy allows it, against a reference that is fed the same workspace.
WORKSPACE = {
    **{"final_state": 0.001, "dq": 3.0, "dk": 1.5, "dv": 0.5, "dg": 4.0, "dbeta": 1.2},
    **{"dA_log": 10.5, "ddt_bias": 4.0, "dinitial_state": 0.07},
}
KERNEL = {"reference": 0.0, "tf32": 2.5, "bf16": 12.0}


class Problem(NamedTuple):
    """Inputs and upstream gradients of one layer; the tokens of all sequences are packed."""

    q: torch.Tensor  # [T, H, 128] bf16
    k: torch.Tensor  # [T, H, 128] bf16
    v: torch.Tensor  # [T, H, 128] bf16
    g: torch.Tensor  # [T, H, 128] bf16, before the gate
    beta: torch.Tensor  # [T, H] bf16, logits
    A_log: torch.Tensor  # [H] fp32
    dt_bias: torch.Tensor  # [H, 128] fp32
    initial_state: torch.Tensor  # [N, H, 128 (V), 128 (K)] fp32
    cu_seqlens: torch.Tensor  # [N + 1] int32
    do: torch.Tensor  # [T, H, 128] bf16
    dfinal_state: torch.Tensor  # [N, H, 128 (V), 128 (K)] fp32

    def options(self) -> dict:
        """What `prepare` and the oracle take by keyword."""
        return dict(
            initial_state=self.initial_state,
            gate="safe",
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=LOWER_BOUND,
            cu_seqlens=self.cu_seqlens,
        )


def make_problem(seed: int, device: torch.device) -> Problem:
    """Unit normal inputs; decays per token of about 0.5 to 1, so that states live for many chunks.

    The values don't depend on the device.
    """
    rng = torch.Generator().manual_seed(seed)
    T, N = sum(LENGTHS), len(LENGTHS)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=rng).to(device, dtype)

    def uniform(*shape):
        return torch.rand(*shape, generator=rng).to(device)

    q, k, v, g, do = (normal(T, HEADS, DIM) for _ in range(5))
    states = (normal(N, HEADS, DIM, DIM, dtype=torch.float32) for _ in range(2))
    initial_state, dfinal_state = states
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
    return Problem(
        q, k, v, g, normal(T, HEADS), uniform(HEADS), -4 + 3 * uniform(HEADS, DIM),
        initial_state, offsets, do, dfinal_state,
    )  # fmt: skip


# ---------------------------------------------------------------- the step, three ways
def chunk_kda_step(p: Problem, backend: str) -> dict[str, torch.Tensor]:
    """o, the final state and the gradients of all inputs, by the training op."""
    x = {name: getattr(p, name).detach().requires_grad_() for name in INPUTS}
    o, state = kda_cute.chunk_kda(
        *(x[name][None] for name in INPUTS[:5]),
        initial_state=x["initial_state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=LOWER_BOUND,
        state_v_first=True,
        cu_seqlens=p.cu_seqlens,
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        backend=backend,
    )
    grads = torch.autograd.grad((o, state), list(x.values()), (p.do[None], p.dfinal_state))
    return _named(o[0], state, grads)


def level_1_step(p: Problem, kernel: bool, precision: str, layout: str) -> dict[str, torch.Tensor]:
    """The final state and the same gradients, by the three stages of level 1."""
    prepared = kda_cute.prepare(p.q, p.k, p.v, p.g, p.beta, **p.options())
    arguments = (p.do, p.v, p.beta, prepared.workspace, p.dfinal_state, p.cu_seqlens)
    if kernel:
        grads = kda_cute.bwd_recurrence(*arguments, precision=precision, layout=layout)
    else:
        grads = reference.bwd_recurrence(*arguments, dtype=torch.float32)
    grads = kda_cute.finish(grads, prepared)
    named = {f"d{name}": getattr(grads, f"d{name}") for name in INPUTS}
    return {"final_state": prepared.final_state} | named


def oracle(p: Problem) -> dict[str, torch.Tensor]:
    """What `chunk_kda_step` returns, by float64 autograd of the token recurrence."""
    x = {name: getattr(p, name).double().requires_grad_() for name in INPUTS}
    options = p.options() | {name: x[name] for name in INPUTS[5:]}
    o, state = reference.token_recurrence(*(x[name] for name in INPUTS[:5]), **options)
    loss = (o * p.do).sum() + (state * p.dfinal_state).sum()
    return _named(o, state, torch.autograd.grad(loss, list(x.values())))


def _named(o, state, grads) -> dict[str, torch.Tensor]:
    results = {"o": o.detach(), "final_state": state.detach()}
    return results | {f"d{name}": grad for name, grad in zip(INPUTS, grads, strict=True)}


# ---------------------------------------------------------------- comparison
def compare(
    p: Problem,
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    tolerances: dict[str, float],
) -> tuple[str, bool]:
    """The table of errors, and whether all are within tolerance.

    An error is relative to the expected tensor's norm; for the two sums over tokens, which may
    cancel, to that of their terms if it is larger.
    """
    dg = expected["dg"]
    terms = {"ddt_bias": dg, "dA_log": dg * (p.g.double() + p.dt_bias)}
    rows, passed = [], True
    for name, tolerance in tolerances.items():
        x, target = found[name], expected[name]
        size = max(target.norm().item(), terms.get(name, target).norm().item())
        finite = bool(torch.isfinite(x).all())
        error = (x.double() - target).norm().item() / size if finite else math.nan
        good = error <= tolerance  # False for NaN
        passed &= good
        shape = "x".join(map(str, target.shape))
        rows.append((name, shape, f"{error:.2e}", f"{tolerance:.2e}", "ok" if good else "FAIL"))
    return format_table(("tensor", "shape", "relative error", "tolerance", ""), rows), passed


def missing_gpu() -> str | None:
    """Why the kernels can't run here, or None."""
    if not torch.cuda.is_available():
        return "no Hopper GPU found"
    found = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    return None if found == (9, 0) else f"{name} is not a Hopper GPU"


# ---------------------------------------------------------------- compiling without a GPU
def step_specs(precision: str, layout: str) -> list:
    """The configurations that this step runs on a GPU, level 1 with this precision and layout."""
    specs = report.select(kernels=[name for name in variants.kernels() if name != LEVEL_1])
    specs += report.select([precision], [layout], [LEVEL_1])
    return [
        spec
        for spec in specs
        if all(getattr(spec.config, name, value) == value for name, value in STEP.items())
    ]


def compile_kernels(specs: list) -> bool:
    """Compile kernels for sm_90a and print what came of it; True when all keep their budgets."""
    kernels = report.measure_all(specs)
    rows = []
    for name in dict.fromkeys(k.kernel for k in kernels):
        own = [k for k in kernels if k.kernel == name]
        registers, shared = max(k.registers for k in own), max(k.shared for k in own)
        kept = sum(not k.broken() for k in own)
        rows.append((name, str(len(own)), str(registers), f"{shared:,}", f"{kept} kept"))
    head = ("kernel", "configurations", "registers to", "shared bytes to", "budgets")
    print(format_table(head, rows))
    bad = [k for k in kernels if k.broken()]
    for k in bad:
        print(f"FAIL {k.kernel} {report.label(k.config)}: {'; '.join(k.broken())}")
    print(f"\n{len(kernels) - len(bad)} of {len(kernels)} compiled within budget")
    return not bad


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    level_1 = parser.add_argument_group("level 1")
    level_1.add_argument("--precision", choices=variants.precisions(LEVEL_1), default="tf32")
    level_1.add_argument("--layout", choices=variants.names(LEVEL_1), default="default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compile",
        choices=("step", "all", "none"),
        help="for sm_90a: the configurations of this step (default without a GPU), or all",
    )
    parser.add_argument("--no-compile", dest="compile", action="store_const", const="none")
    args = parser.parse_args(argv)

    missing = missing_gpu()
    device = torch.device("cpu" if missing else "cuda")
    where = "CPU" if missing else torch.cuda.get_device_name()
    backend, ran, why = "kernels", args.precision, ""
    stage = f"kernel, {args.precision}, layout {args.layout}, on {where}"
    if missing:
        backend = ran = "reference"
        why, stage = f" ({missing})", f"reference, torch on {where}"

    started = time.perf_counter()
    p = make_problem(args.seed, device)
    lengths = ", ".join(map(str, LENGTHS))
    print(f"KDA, sequences of {lengths} tokens, {HEADS} heads, seed {args.seed}")
    print(f"expected: float64 autograd of the token recurrence, torch on {where}")
    expected = oracle(p)

    print(f"\nchunk_kda, forward and backward: backend {backend} on {where}{why}\n")
    tolerances = {name: 1e-3 * x for name, x in CHUNK_KDA[backend].items()}
    table, passed = compare(p, chunk_kda_step(p, backend), expected, tolerances)
    print(table)

    print(f"\nlevel 1: prepare, finish: torch on {where}\n{LEVEL_1}: {stage}{why}\n")
    # The final state leaves `prepare` in fp32 and never meets the kernel.
    by_kernel = dict.fromkeys(WORKSPACE, KERNEL[ran]) | {"final_state": 0.0}
    tolerances = {name: 1e-3 * (x + by_kernel[name]) for name, x in WORKSPACE.items()}
    found = level_1_step(p, missing is None, args.precision, args.layout)
    table, good = compare(p, found, expected, tolerances)
    passed &= good
    print(table)
    print(f"\n{'ok' if passed else 'FAIL'}, {time.perf_counter() - started:.1f} s", flush=True)

    wanted = args.compile or ("step" if missing else "none")
    if wanted != "none":
        every = report.all_specs()
        specs = every if wanted == "all" else step_specs(args.precision, args.layout)
        print(f"\n{len(specs)} of {len(every)} kernel configurations, compiled for sm_90a:")
        if wanted == "step":
            print(
                "those that this step runs on a Hopper GPU (the tests and --compile all take all)."
            )
        print("One that the cache lacks takes 4 to 12 s of a core.\n", flush=True)
        passed &= compile_kernels(specs)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
