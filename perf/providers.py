"""Who can run `chunk_kda`: this package, cuDNN's front end, FLA.  Peers are optional.

Each provider makes candidates for one op on one shape, or raises `Unavailable` with the reason.  A
candidate says which kernels a call of it must launch, so that no fallback is timed by its name.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kda_cute.accuracy.peers import (
    CUDNN_PLAN,
    Unavailable,
    cudnn_backward,
    cudnn_forward,
    fla_forward,
)
from perf.forms import LEAVES, LOWER_BOUND, SCALE, TYPES, Inputs
from perf.shapes import HEAD_DIM, Shape, backward_stages, forward_stages

OPTIONS = ("states", "nostates")  # of this package: keep states and X for the backward?
TOLERANCE = {"kda_cute": 1e-2, "cudnn": 2e-2, "fla": 2e-2}  # relative Frobenius error
# cuDNN's error in dg is 2.1e-2 on typical inputs.
LOOSER = {("kda_cute", "dbeta"): 1.4e-2, ("cudnn", "dg"): 5e-2}
# FLA tunes itself for minutes at each number of heads.
FLA_SHAPES = ("T8192_H96", "B4_T4096_H32")


@dataclass(frozen=True)
class Kernels:
    """Parts of the names of the kernels that each call must launch; with `only`, each of them once
    and nothing else, no copy either.
    """

    required: tuple[str, ...]
    only: bool = False

    def complaint(self, names: Sequence[str]) -> str:
        """What is wrong with what a call ran; empty when nothing is."""
        missing = [part for part in self.required if not any(part in name for name in names)]
        if missing:
            return f"no kernel like {', '.join(missing)} among {sorted(set(names))}"
        if self.only and len(names) != len(self.required):
            return f"expected {', '.join(self.required)} and nothing else, not {list(names)}"
        return ""

    def others(self, names: Sequence[str]) -> list[str]:
        """What ran beside the required kernels."""
        return sorted({n for n in names if not any(part in n for part in self.required)})


@dataclass(frozen=True)
class Candidate:
    """One way to run an op on one form's tensors.

    variant: FORM or FORM/option.  run: a call without arguments; results: what it returns ->
    tensors by name, [T, H, ...].  states: it keeps the states.  stages: part of a kernel's name ->
    (bytes, flops) of it, for kernels that are timed apart, too.  host: its host time is measured.
    """

    provider: str
    variant: str
    run: Callable[[], Any]
    results: Callable[[Any], dict[str, torch.Tensor]]
    kernels: Kernels
    states: bool = False
    stages: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    host: bool = False

    @property
    def name(self) -> str:
        """provider/variant, unique in a run."""
        return f"{self.provider}/{self.variant}"

    @property
    def form(self) -> str:
        """The form whose inputs it gets."""
        return self.variant.split("/")[0]

    def tolerance(self, tensor: str) -> float:
        """Largest error allowed."""
        return LOOSER.get((self.provider, tensor), TOLERANCE[self.provider])


def make(
    provider: str, op: str, shape: Shape, inputs: Mapping[str, Inputs], options: Sequence[str]
) -> list[Candidate]:
    """The provider's candidates; Unavailable when there are none."""
    return PROVIDERS[provider](op, shape, inputs, options)


# ---------------------------------------------------------------- calls of chunk_kda, ours and FLA's
def chunk_kda_call(inputs: Inputs, offsets: torch.dtype = torch.int32) -> dict[str, Any]:
    """Keyword arguments of `chunk_kda`."""
    shape = inputs.shape
    B = 1 if shape.varlen else shape.N
    call = {name: getattr(inputs, name).unflatten(0, (B, -1)) for name in LEAVES}
    call |= dict(scale=SCALE, use_qk_l2norm_in_kernel=inputs.l2norm)
    if shape.varlen:
        call["cu_seqlens"] = inputs.cu_seqlens.to(offsets)
    if inputs.raw:
        call |= dict(
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=LOWER_BOUND,
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias.flatten(),
        )
    return call


def _forward(function: Callable, call: dict[str, Any], grad: bool) -> Callable[[], Any]:
    """Run the call with inputs that require gradients, or not."""
    return functools.partial(function, **(with_leaves(call)[0] if grad else call))


def with_leaves(call: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The call with inputs that require gradients, and those inputs."""
    names = [n for n in (*LEAVES, "A_log", "dt_bias") if n in call]
    leaves = {n: call[n].detach().requires_grad_() for n in names}
    return call | leaves, list(leaves.values())


def _backward(
    function: Callable, call: dict[str, Any], do: torch.Tensor, **more: Any
) -> Callable[[], Any]:
    """Run the backward of a forward that has run."""
    call, leaves = with_leaves(call)
    o, _ = function(**call, **more)
    do = do.view(o.shape)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def _packed_output(returned: tuple) -> dict[str, torch.Tensor]:
    return {"o": returned[0].detach().flatten(0, 1)}


def _packed_grads(returned: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    grads = zip(LEAVES, returned, strict=False)  # those of A_log and dt_bias follow
    return {f"d{name}": grad.flatten(0, 1) for name, grad in grads}


# ---------------------------------------------------------------- this package
def kda_cute(op, shape, inputs, options) -> list[Candidate]:
    """Forms A and B, with the states kept or not, by the public call."""
    import kda_cute as package

    if op == "chunk_kda_bwd":
        parts = ("transition", "scan", "gradients")
        results, kernels = _packed_grads, Kernels(tuple(f"kernels{p}" for p in parts))
    else:
        results = _packed_output
        kernels = Kernels(("kernelstransition", "kernelsscan"), only=True)

    made = []
    for form in TYPES:
        for option in options if form in inputs else ():
            states = option == "states"
            call = chunk_kda_call(inputs[form])
            if op == "chunk_kda_bwd":
                run = _backward(package.chunk_kda, call, inputs[form].do, save_states=states)
                parts = backward_stages(shape, form) if states else {}
            else:
                # Nothing is kept unless a gradient can be asked for.
                run = _forward(package.chunk_kda, call, grad=states)
                parts = forward_stages(shape, form, states=states)
            stages = {f"kernels{part}": cost for part, cost in parts.items()}
            made.append(
                Candidate(
                    "kda_cute", f"{form}/{option}", run, results, kernels, states, stages, host=True
                )
            )
    return made


def forward_specs(forms: Sequence[str], options: Sequence[str], shapes: Sequence[Shape]) -> list:
    """What this package compiles for the forward on these shapes."""
    from kda_cute import forward

    wanted = [TYPES[form] for form in forms]
    varlen = {shape.varlen for shape in shapes}
    save = {option == "states" for option in options}
    specs = []
    for spec in forward.forward_specs():
        c = spec.config
        if spec.name == "transition":
            needed = (c.g, c.gate, c.beta) in wanted
        else:
            needed = c.initial == "none" and not c.final and c.save in save
        if needed and c.varlen in varlen:
            specs.append(spec)
    return specs


# ---------------------------------------------------------------- cuDNN
def cudnn(op, shape, inputs, options) -> list[Candidate]:
    """The Hopper engine by its plan's name, which declines rather than falls back.

    The forward takes all forms (raw bf16 g and beta are converted by copies first, which count);
    the backward takes prepared inputs alone.  States that are zero are given, since the engine
    would fill buffers of its own at each call.
    """
    op_of = cudnn_forward()
    x = inputs["prepared"]
    zeros = x.q.new_zeros(shape.N, shape.H, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
    if op == "chunk_kda_bwd":
        backward = cudnn_backward()
        run = functools.partial(
            backward, x.do, x.q, x.k, x.v, x.g, x.beta, x.cu_seqlens, SCALE,
            initial_state=zeros, d_final_state=zeros, plan_name=CUDNN_PLAN,
        )  # fmt: skip
        kernels = Kernels(("k_prep", "k_scan_t", "k_bwd"))  # and k_meta for several sequences
        return [Candidate("cudnn", "prepared", run, _grads, kernels)]

    made = []
    for form, x in inputs.items():
        run = functools.partial(
            op_of, x.q, x.k, x.v, x.g, x.beta, x.cu_seqlens,
            scale=SCALE, initial_state=zeros, plan_name=CUDNN_PLAN,
            use_qk_l2norm_in_kernel=x.l2norm, use_beta_sigmoid_in_kernel=x.raw, safe_gate=x.raw,
            gate_lower_bound=LOWER_BOUND if x.raw else None, a_log=x.A_log, dt_bias=x.dt_bias,
        )  # fmt: skip
        made.append(Candidate("cudnn", form, run, _output, Kernels(("kda_fused",))))
    return made


def _output(returned: tuple) -> dict[str, torch.Tensor]:
    return {"o": returned[0]}


def _grads(returned: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"d{name}": grad for name, grad in zip(LEAVES, returned, strict=False)}


# ---------------------------------------------------------------- FLA
FLA_KERNELS = {
    "chunk_kda_fwd": (
        "chunk_kda_fwd_kernel_inter_solve_fused",
        "recompute_w_u_fwd_kda_kernel",
        "chunk_gated_delta_rule_fwd_kernel_h",
        "chunk_gla_fwd_kernel_o",
    ),
    "chunk_kda_bwd": (
        "chunk_kda_bwd_kernel_dAv",
        "chunk_gated_delta_rule_bwd_kernel_dhu",
        "chunk_kda_bwd_kernel_wy_dqkg_fused",
        "chunk_kda_bwd_kernel_intra",
    ),
}


def fla(op, shape, inputs, options) -> list[Candidate]:
    """Forms A and B on two of the shapes, with FLA's defaults: the backward recomputes."""
    if shape.name not in FLA_SHAPES:
        raise Unavailable(f"tunes itself for minutes, so it runs on {', '.join(FLA_SHAPES)} only")
    function = fla_forward()
    kernels = Kernels(FLA_KERNELS[op])
    made = []
    for form in TYPES:
        if form not in inputs:
            continue
        call = chunk_kda_call(inputs[form], offsets=torch.int64)
        if op == "chunk_kda_bwd":
            run, results = _backward(function, call, inputs[form].do), _packed_grads
        else:
            run, results = _forward(function, call, grad=False), _packed_output
        made.append(Candidate("fla", form, run, results, kernels))
    return made


PROVIDERS: dict[str, Callable[..., list[Candidate]]] = {
    "kda_cute": kda_cute,
    "cudnn": cudnn,
    "fla": fla,
}


def why_not(provider: str) -> str:
    """Why a provider can't run here, as far as can be told without calling it; empty if it can.

    Imports the peer.
    """
    if not torch.cuda.is_available():
        return "no CUDA device"
    if provider == "kda_cute":
        major, minor = torch.cuda.get_device_capability()
        return "" if (major, minor) == (9, 0) else f"needs a Hopper GPU (9.0), not {major}.{minor}"
    try:
        if provider == "cudnn":
            cudnn_forward()
        if provider == "fla":
            fla_forward()
    except Unavailable as reason:
        return str(reason)
    return ""
