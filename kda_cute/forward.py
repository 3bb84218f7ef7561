"""The forward pass of `chunk_kda` on kernels: the order of its stages, and their buffers.

    transition  (q, k, g, beta)    -> factors of every chunk     one CTA per (chunk, head)
    scan        (factors, v, S_0)  -> o, S_T, S and X per chunk  one or two walk a (sequence, head)

Bytes of the factors, freed when the scan has run: 908 per token and head (kd, z, qd 256 each, p 128,
qk 4, eg 8).  Kept for a backward pass: 512 for S, 256 for X.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import compile as kernel_compile
from .dtypes import NAMES
from .factors import HEAD_DIM, record_rows, slot_count
from .problem import Problem

GATES = ("log", "safe", "softplus")
FORWARD_ROWS, BACKWARD_ROWS = record_rows("factors"), record_rows("backward factors")
CHUNK_ROWS = record_rows("chunk")


# ---------------------------------------------------------------- kernels
def transition_spec(
    g: str, gate: str, beta: str, varlen: bool, *, backward: bool = False
) -> kernel_compile.KernelSpec:
    """The compile spec of one configuration of the transition."""
    from .kernels import transition

    config = transition.Config(g, gate, beta, varlen, backward=backward)
    trace = functools.partial(transition.trace, config)
    return kernel_compile.KernelSpec("transition", config, trace)


def scan_spec(
    groups: int, varlen: bool, initial: str, final: bool, save: bool
) -> kernel_compile.KernelSpec:
    """The compile spec of one configuration of the scan."""
    from .kernels import scan

    config = scan.Config(groups, varlen, initial, final, save)
    return kernel_compile.KernelSpec("scan", config, functools.partial(scan.trace, config))


def forward_specs() -> list[kernel_compile.KernelSpec]:
    """Every configuration that a call of `chunk_kda` can ask for."""
    types, flags = ("bf16", "f32"), (False, True)
    return [
        *(transition_spec(*x) for x in itertools.product(types, GATES, types, flags)),
        *(scan_spec(*x) for x in itertools.product((1, 2), flags, ("none", *types), flags, flags)),
    ]


def load(spec: kernel_compile.KernelSpec) -> Callable:
    """The compiled kernel; RuntimeError where loading would break a capture."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"chunk_kda is captured before its kernel {spec.name} was loaded ({spec.config}): call "
            "it once with tensors of these dtypes, then capture"
        )
    return kernel_compile.load(spec)


@functools.cache
def _transition(g, gate, beta, varlen, backward) -> Callable:
    return load(transition_spec(NAMES[g], gate, NAMES[beta], varlen, backward=backward))


@functools.cache
def _scan(groups, varlen, initial, final, save) -> Callable:
    return load(scan_spec(groups, varlen, NAMES[initial], final, save))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kept_zeros(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32).to(
        device
    )  # done on every stream when it returns


def _zeros(device: torch.device, *shape: int) -> torch.Tensor:
    """Stands for a parameter that is not given; never written."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(shape, dtype=torch.float32, device=device)
    return _kept_zeros(device, *shape)


# ---------------------------------------------------------------- stages
class Results(NamedTuple):
    """What the forward leaves.

    o            [B, T, H, 128] bf16
    final_state  [N, H, 128, 128] fp32 in the problem's layout, or None
    saved        [slots, H, 192, 128] bf16, or None: records of kind "chunk", see `factors`
    """

    o: torch.Tensor
    final_state: torch.Tensor | None
    saved: torch.Tensor | None


def chunk_kda_fwd(problem: Problem) -> Results:
    """Run the stages.

    Launches on torch's current stream of the inputs' device; no host synchronisation.
    """
    device = problem.q.device
    if device.index == torch.cuda.current_device():
        return run(problem.for_kernels())
    with torch.cuda.device(device):
        return run(problem.for_kernels())


def run(p: Problem, transition: Callable | None = None, scan: Callable | None = None) -> Results:
    """The stages; `transition` and `scan` stand for the kernels that the problem asks for."""
    B, T, H, D = p.q.shape
    N = p.num_seqs
    o = torch.empty_like(p.v, memory_format=torch.contiguous_format)
    final = None
    if p.output_final_state:
        final = o.new_empty(p.state_shape(), dtype=torch.float32)
    slots = slot_count(B * T, N, p.cu_seqlens is not None)
    saved = o.new_empty((slots, H, CHUNK_ROWS, D)) if p.save_states else None
    if o.numel() == 0 or slots == 0:
        if final is not None:
            final.zero_() if p.initial_state is None else final.copy_(p.initial_state)
        return Results(o, final, saved)

    factors = make_factors(p, slots, kernel=transition)
    initial, v_first = p.initial_state, p.state_v_first
    scan = scan or _scan(
        groups(p),
        p.cu_seqlens is not None,
        None if initial is None else initial.dtype,
        final is not None,
        saved is not None,
    )
    scan(
        factors,
        p.v,
        initial if initial is None or v_first else initial.mT,
        low_words(p.cu_seqlens),
        o,
        saved,
        final if final is None or v_first else final.mT,
    )
    return Results(o, final, saved)


def make_factors(
    p: Problem, slots: int, backward: bool = False, kernel: Callable | None = None
) -> torch.Tensor:
    """The records of factors of every chunk [slots, H, rows, 128], by the transition kernel."""
    q = p.q
    rows = BACKWARD_ROWS if backward else FORWARD_ROWS
    factors = q.new_empty((slots, q.shape[2], rows, HEAD_DIM))
    packed = p.cu_seqlens is not None
    kernel = kernel or _transition(p.g.dtype, p.gate, p.beta.dtype, packed, backward)
    kernel(
        q, p.k, p.g, p.beta, *gate_parameters(p),
        low_words(p.cu_seqlens), factors,
        p.scale, p.lower_bound, p.beta_scale, int(p.l2norm), int(p.beta_sigmoid),
    )  # fmt: skip
    return factors


def groups(p: Problem) -> int:
    """Consumer warpgroups of a scan's CTA: with few heads, two CTAs share a (sequence, head)."""
    return 1 if 2 * p.num_seqs * p.q.shape[2] <= _multiprocessors(p.q.device) else 2


def gate_parameters(p: Problem) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A_log [H] and dt_bias [H, 128]; zeros for those not given, None where there is no gate."""
    if p.gate == "log":
        return None, None
    A_log, dt_bias, H = p.A_log, p.dt_bias, p.q.shape[2]
    if A_log is None:
        A_log = _zeros(p.q.device, H)
    if dt_bias is None:
        dt_bias = _zeros(p.q.device, H, HEAD_DIM)
    elif dt_bias.ndim == 1:
        dt_bias = dt_bias.view(H, HEAD_DIM)
    return A_log, dt_bias


def low_words(cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """int32 offsets; those of int64, which fit 31 bits, as a strided view of their low words."""
    if cu_seqlens is None or cu_seqlens.dtype == torch.int32:
        return cu_seqlens
    return cu_seqlens.view(torch.int32)[::2]
