"""Level 2's torch operators: one for the forward, one for the backward, each with both backends.

They take the fields of a `Problem`, return lists of the tensors that were asked for, and hold no
autograd of their own (autograd.py does). Both backends run on every device that they can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from . import reference
from .factors import HEAD_DIM, record_rows, slot_count
from .ops import library
from .problem import Problem

_PROBLEM = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? initial_state, Tensor? cu_seqlens, float scale, str gate, float lower_bound, "
    "bool l2norm, bool beta_sigmoid, float beta_scale, bool state_v_first, "
    "bool output_final_state, bool save_states, str backend"
)
_TAGS = (torch.Tag.pt2_compliant_tag,)
library.define(f"chunk_kda_fwd({_PROBLEM}) -> Tensor[]", tags=_TAGS)
library.define(
    f"chunk_kda_bwd(Tensor? do, Tensor? dfinal_state, Tensor? saved, bool[] wanted, {_PROBLEM})"
    " -> Tensor[]",
    tags=_TAGS,
)
# Positions of the tensors that have a gradient, in Problem and in `wanted`.
DIFFERENTIABLE = 8
_PLAIN_DISPATCH = (
    torch._C._dispatch_tls_local_include_set(),
    torch._C._dispatch_tls_local_exclude_set(),
)


def saved_shape(p: Problem) -> tuple[int, ...]:
    """Shape of what is saved: a record of each chunk and head, with its state and X (factors.py)."""
    B, T, H, _ = p.q.shape
    slots = slot_count(B * T, p.num_seqs, p.cu_seqlens is not None)
    return slots, H, record_rows("chunk"), HEAD_DIM


def _outputs(p: Problem, backend: str) -> list[torch.Tensor]:
    """Uninitialised o, then the final state, and what is saved, where they were asked for."""
    out = [p.v.new_empty(p.v.shape)]
    if p.output_final_state:
        out.append(p.v.new_empty(p.state_shape(), dtype=torch.float32))
    if p.save_states and backend == "kernels":
        out.append(p.v.new_empty(saved_shape(p), dtype=torch.bfloat16))
    return out


# ---------------------------------------------------------------- forward
def _forward(*arguments) -> list[torch.Tensor]:
    p, backend = Problem(*arguments[:-1]), arguments[-1]
    if backend == "reference":
        _not_captured(p, "backend='reference'")
        out = _outputs(p, backend)
        with torch.no_grad():
            for to, value in zip(out, reference.chunk_kda(p), strict=False):
                to.copy_(value)
        return out
    return [x for x in kernels_forward(p) if x is not None]


def kernels_forward(p: Problem) -> tuple[torch.Tensor | None, ...]:
    """What `forward.chunk_kda_fwd` returns."""
    return _kernels()(p)


@functools.cache
def _kernels() -> Callable[[Problem], tuple]:
    from .forward import chunk_kda_fwd  # here: a call of the reference needs no DSL

    return chunk_kda_fwd


def _forward_fake(*arguments) -> list[torch.Tensor]:
    return _outputs(Problem(*arguments[:-1]), arguments[-1])


# ---------------------------------------------------------------- backward
def _backward(do, dfinal_state, saved, wanted, *arguments) -> list[torch.Tensor]:
    p, backend = Problem(*arguments[:-1]), arguments[-1]
    if backend == "kernels":
        return kernels_backward(do, dfinal_state, saved, wanted, p)
    _not_captured(p, "the backward of backend='reference'")
    leaves = [
        x if x is None else x.detach().requires_grad_(want)
        for x, want in zip(p[:DIFFERENTIABLE], wanted, strict=True)
    ]
    targets = [x for x, want in zip(leaves, wanted, strict=True) if want]
    # Under a TorchDispatchMode an operator's body runs with autograd cut out.
    with torch._C._ForceDispatchKeyGuard(*_PLAIN_DISPATCH), torch.enable_grad():
        if not all(x.view_as(x).requires_grad for x in targets):
            raise RuntimeError("chunk_kda: the backward needs autograd, which is off here")
        results = reference.chunk_kda(Problem(*leaves, *p[DIFFERENTIABLE:]))
        return _gradients(results, (do, dfinal_state), targets)


def kernels_backward(do, dfinal_state, saved, wanted, p: Problem) -> list[torch.Tensor]:
    """The wanted gradients, in the dtypes of the inputs."""
    flags = {"parameters": wanted[5] or wanted[6], "initial_state": wanted[7]}
    grads = _backward_kernels()(p, do, dfinal_state, saved, **flags)
    return [
        dx if dx.dtype == x.dtype and dx.shape == x.shape else dx.to(x.dtype).view(x.shape)
        for x, dx, want in zip(p, grads, wanted, strict=False)
        if want
    ]


@functools.cache
def _backward_kernels() -> Callable[..., tuple]:
    from .backward import chunk_kda_bwd

    return chunk_kda_bwd


def _gradients(results, upstream, targets) -> list[torch.Tensor]:
    pairs = [
        (y, dy.to(y.dtype))
        for y, dy in zip(results, upstream, strict=True)
        if dy is not None and y.requires_grad
    ]
    if not pairs:
        return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in targets]
    outputs, upstream = zip(*pairs, strict=True)
    grads = torch.autograd.grad(
        outputs, targets, upstream, allow_unused=True, materialize_grads=True
    )
    return [x.contiguous() for x in grads]


def _backward_fake(do, dfinal_state, saved, wanted, *arguments) -> list[torch.Tensor]:
    tensors = zip(arguments[:DIFFERENTIABLE], wanted, strict=True)
    return [x.new_empty(x.shape) for x, want in tensors if want]


def _not_captured(p: Problem, what: str):
    """The reference reads cu_seqlens on the host, and copies what it makes of the lengths there."""
    if p.q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"chunk_kda: {what} can't be captured in a CUDA graph")


for _name, _run, _fake in (
    ("chunk_kda_fwd", _forward, _forward_fake),
    ("chunk_kda_bwd", _backward, _backward_fake),
):
    library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kda_cute::{_name}", _fake, lib=library)
