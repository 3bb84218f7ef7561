"""The backward pass of `chunk_kda` on kernels: the order of its stages, and their buffers.

    transition    (q, k, g, beta)              -> factors of every chunk, and INV
    reverse scan  (factors, do, dS_T)          -> dv, dS per chunk, dS_0
    gradients     (inputs, dv, S, dS, X, INV)  -> dq, dk, dg, dbeta, partial dA_log and ddt_bias
    sums over chunks of the partial ones, in a fixed order

Bytes per token and head while it runs, beside inputs, states and gradients: 1,036 for the factors
(kd, z, qd 256 each, INV, p 128 each, qk 4, eg 8), 512 for dS.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import compile as kernel_compile
from . import forward
from .dtypes import NAMES
from .factors import record_rows, slot_count
from .forward import GATES, load, low_words
from .problem import Problem, addressable

DCHUNK_ROWS = record_rows("dchunk")


class Gradients(NamedTuple):
    """Of a Problem's first eight tensors, in their shapes and dtypes but for what is said here:
    dA_log [H] and ddt_bias [H * 128] fp32, None for gate "log"; dinitial_state fp32 or None.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    dA_log: torch.Tensor | None
    ddt_bias: torch.Tensor | None
    dinitial_state: torch.Tensor | None


# ---------------------------------------------------------------- kernels
def reverse_spec(
    groups: int, varlen: bool, dfinal: str, dinitial: bool
) -> kernel_compile.KernelSpec:
    """The compile spec of one configuration of the reverse scan."""
    from .kernels import scan

    config = scan.ReverseConfig(groups, varlen, dfinal, dinitial)
    return kernel_compile.KernelSpec("scan", config, functools.partial(scan.trace, config))


def gradients_spec(g: str, gate: str, beta: str, varlen: bool) -> kernel_compile.KernelSpec:
    """The compile spec of one configuration of the gradients."""
    from .kernels import gradients

    config = gradients.Config(g, gate, beta, varlen)
    return kernel_compile.KernelSpec(
        "gradients", config, functools.partial(gradients.trace, config)
    )


def backward_specs() -> list[kernel_compile.KernelSpec]:
    """Every configuration that a backward of `chunk_kda` can ask for, beside those of the forward."""
    types, flags = ("bf16", "f32"), (False, True)
    inputs = list(itertools.product(types, GATES, types, flags))
    return [
        *(forward.transition_spec(*x, backward=True) for x in inputs),
        *(reverse_spec(*x) for x in itertools.product((1, 2), flags, ("none", *types), flags)),
        *(gradients_spec(*x) for x in inputs),
    ]


@functools.cache
def _reverse_scan(groups, varlen, dfinal, dinitial) -> Callable:
    return load(reverse_spec(groups, varlen, NAMES[dfinal], dinitial))


@functools.cache
def _gradients(g, gate, beta, varlen) -> Callable:
    return load(gradients_spec(NAMES[g], gate, NAMES[beta], varlen))


# ---------------------------------------------------------------- stages
def chunk_kda_bwd(
    problem: Problem,
    do: torch.Tensor | None,
    dfinal_state: torch.Tensor | None,
    saved: torch.Tensor | None,
    *,
    parameters: bool = True,
    initial_state: bool = True,
) -> Gradients:
    """Gradients of a call for do [B, T, H, 128] and the gradient of its final state, fp32 or bf16 in
    the problem's layout; None is 0.

    saved: what the forward saved; None runs the forward again for them.  parameters,
    initial_state: whether those gradients are wanted.  Launches on torch's current stream; no host
    synchronisation.
    """
    wanted = {"parameters": parameters, "initial_state": initial_state}
    device = problem.q.device
    if device.index == torch.cuda.current_device():
        return run(problem.for_kernels(), do, dfinal_state, saved, **wanted)
    with torch.cuda.device(device):
        return run(problem.for_kernels(), do, dfinal_state, saved, **wanted)


def run(
    p: Problem,
    do: torch.Tensor | None,
    dfinal: torch.Tensor | None,
    saved: torch.Tensor | None,
    *,
    parameters: bool = True,
    initial_state: bool = True,
    transition: Callable | None = None,
    reverse_scan: Callable | None = None,
    gradients: Callable | None = None,
) -> Gradients:
    """The stages; `transition`, `reverse_scan` and `gradients` stand for the kernels that the problem
    asks for.
    """
    B, T, H, D = p.q.shape
    packed = p.cu_seqlens is not None
    slots = slot_count(B * T, p.num_seqs, packed)
    initial_state = initial_state and p.initial_state is not None
    dq, dk, dv = (p.q.new_empty(p.q.shape) for _ in range(3))
    dg, dbeta = p.g.new_empty(p.g.shape), p.beta.new_empty(p.beta.shape)
    dinitial = p.q.new_empty(p.state_shape(), dtype=torch.float32) if initial_state else None
    with_parameters = parameters and p.gate != "log"
    if dq.numel() == 0 or slots == 0:
        if dinitial is not None:
            dinitial.zero_() if dfinal is None else dinitial.copy_(dfinal)
        zeros = functools.partial(torch.zeros, dtype=torch.float32, device=p.q.device)
        parts = (zeros(H), zeros(H * D)) if with_parameters else (None, None)
        return Gradients(dq, dk, dv, dg, dbeta, *parts, dinitial)

    if saved is None:
        saved = forward.run(p._replace(save_states=True, output_final_state=False)).saved
    do = upstream(do, p)
    cu = low_words(p.cu_seqlens)
    factors = forward.make_factors(p, slots, backward=True, kernel=transition)

    dchunk = dq.new_empty((slots, H, DCHUNK_ROWS, D))
    reverse_scan = reverse_scan or _reverse_scan(
        forward.groups(p), packed, None if dfinal is None else dfinal.dtype, dinitial is not None
    )
    v_first = p.state_v_first
    reverse_scan(
        factors, do,
        dfinal if dfinal is None or v_first else dfinal.mT,
        cu, dv, dchunk,
        dinitial if dinitial is None or v_first else dinitial.mT,
    )  # fmt: skip

    parts = None
    if p.gate != "log":
        parts = dq.new_empty((slots, H * (D + 1)), dtype=torch.float32)
    gradients = gradients or _gradients(p.g.dtype, p.gate, p.beta.dtype, packed)
    gradients(
        p.q, p.k, do, p.g, p.beta, *forward.gate_parameters(p), cu,
        dv, saved, dchunk, factors,
        dq, dk, dg, dbeta, parts,
        p.scale, p.lower_bound, p.beta_scale, int(p.l2norm), int(p.beta_sigmoid),
    )  # fmt: skip
    dA_log = ddt_bias = None
    if with_parameters:
        ddt_bias, dA_log = parts.sum(0).split((H * D, H))
    return Gradients(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial)


def upstream(do: torch.Tensor | None, p: Problem) -> torch.Tensor:
    """do as the kernels take it: bf16, strides that TMA can walk (an expanded one is copied)."""
    if do is None:
        return torch.zeros_like(p.q, memory_format=torch.contiguous_format)
    do = do.to(torch.bfloat16)
    return do if addressable(do) else do.clone(memory_format=torch.contiguous_format)
