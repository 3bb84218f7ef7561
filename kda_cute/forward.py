"""The forward pass of `chunk_kda` on kernels: the order of its stages, and their buffers.

    transition  (q, k, v, g, beta)   -> factors of every chunk     one CTA per (chunk, head)
    scan        (factors, S_0)       -> o, S_T, states per chunk    CTAs walk the chunks of a (sequence, head)

Bytes of the factors, freed when the scan has run: 1,164 per token and head (w, kr, qd, u 256 each,
mqk 128, qk 4, eg 8).  States, kept for a backward pass: 512.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch

from . import compile as kernel_compile
from .factors import CHUNK, HEAD_DIM, Factors, slot_count
from .problem import Problem

_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32", None: "none"}
GATES = ("log", "safe", "softplus")


# ---------------------------------------------------------------- kernels
def transition_spec(g: str, gate: str, beta: str, varlen: bool) -> kernel_compile.KernelSpec:
    """The compile spec of one configuration of the transition."""
    from .kernels import transition

    config = transition.Config(g, gate, beta, varlen)
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


def _load(spec: kernel_compile.KernelSpec) -> Callable:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"chunk_kda is captured before its kernel {spec.name} was loaded ({spec.config}): call "
            "it once with tensors of these dtypes, then capture"
        )
    return kernel_compile.load(spec)


@functools.cache
def _transition(g, gate, beta, varlen) -> Callable:
    return _load(transition_spec(_NAMES[g], gate, _NAMES[beta], varlen))


@functools.cache
def _scan(groups, varlen, initial, final, save) -> Callable:
    return _load(scan_spec(groups, varlen, _NAMES[initial], final, save))


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
def chunk_kda_fwd(
    problem: Problem,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """o [B, T, H, 128] bf16, the final state fp32 in the problem's layout or None, and the states
    [slots, H, 128 (V), 128 (K)] bf16 on entering each chunk, or None, see `factors`.

    Launches on torch's current stream of the inputs' device; no host synchronisation.
    """
    device = problem.q.device
    if device.index == torch.cuda.current_device():
        return run(problem.for_kernels())
    with torch.cuda.device(device):
        return run(problem.for_kernels())


def run(p: Problem, scan: Callable | None = None):
    """The stages; `scan` stands for the kernel that the problem asks for."""
    B, T, H, D = p.q.shape
    N = p.num_seqs
    o = torch.empty_like(p.v, memory_format=torch.contiguous_format)
    final = None
    if p.output_final_state:
        final = o.new_empty(p.state_shape(), dtype=torch.float32)
    slots = slot_count(B * T, N, p.cu_seqlens is not None)
    states = o.new_empty(slots, H, D, D) if p.save_states else None
    if o.numel() == 0 or slots == 0:
        if final is not None:
            final.zero_() if p.initial_state is None else final.copy_(p.initial_state)
        return o, final, states

    factors = make_factors(p, slots)
    initial, v_first = p.initial_state, p.state_v_first
    scan = scan or _scan(
        1 if 2 * N * H <= _multiprocessors(o.device) else 2,
        p.cu_seqlens is not None,
        None if initial is None else initial.dtype,
        final is not None,
        states is not None,
    )
    scan(
        *factors,
        initial if initial is None or v_first else initial.mT,
        low_words(p.cu_seqlens),
        o,
        states,
        None if states is None else o.new_empty(slots, H, CHUNK, D),  # U
        final if final is None or v_first else final.mT,
    )
    return o, final, states


def make_factors(p: Problem, slots: int) -> Factors:
    """The factors of every chunk, by the transition kernel."""
    H = p.q.shape[2]
    q = p.q
    A_log, dt_bias = p.A_log, p.dt_bias
    if p.gate != "log":
        A_log = _zeros(q.device, H) if A_log is None else A_log
        dt_bias = _zeros(q.device, H, HEAD_DIM) if dt_bias is None else dt_bias
    wide = (slots, H, CHUNK, HEAD_DIM)
    factors = Factors(
        *(q.new_empty(wide) for _ in range(4)),
        q.new_empty(slots, H, CHUNK, CHUNK),
        q.new_empty(slots, H, CHUNK, dtype=torch.float32),
        q.new_empty(slots, H, HEAD_DIM, dtype=torch.float32),
    )
    kernel = _transition(p.g.dtype, p.gate, p.beta.dtype, p.cu_seqlens is not None)
    kernel(
        q, p.k, p.v, p.g, p.beta, A_log, dt_bias, low_words(p.cu_seqlens), *factors,
        p.scale, p.lower_bound, p.beta_scale, int(p.l2norm), int(p.beta_sigmoid),
    )  # fmt: skip
    return factors


def low_words(cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """int32 offsets; those of int64, which fit 31 bits, as a strided view of their low words."""
    if cu_seqlens is None or cu_seqlens.dtype == torch.int32:
        return cu_seqlens
    return cu_seqlens.view(torch.int32)[::2]
