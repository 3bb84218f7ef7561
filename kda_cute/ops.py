"""Torch operators: schema, CUDA launch, CPU reference, and shapes for tracing.

`Library.define` and `impl` instead of `custom_op`: a call costs a fifth of the host time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch

from . import compile as kernel_compile
from . import reference
from .layouts import variants
from .workspace import CHUNK, HEAD_DIM, Workspace

library = torch.library.Library("kda_cute", "DEF")
library.define(
    "bwd_recurrence(Tensor do, Tensor v, Tensor beta, Tensor kd, Tensor qd, Tensor kr, Tensor ki, Tensor g_total, "
    "Tensor inv, Tensor mqk, Tensor states, Tensor? dfinal_state, Tensor? cu_seqlens, int num_seqs, str precision, "
    "str layout) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}


def _outputs(do, kd, dfinal_state, num_seqs):
    """Uninitialised outputs, in the order of `RecurrenceGrads`."""
    T, H, _ = do.shape
    tiles = kd.shape[1]
    wide = [torch.empty_like(kd) for _ in range(4)]
    dgT = kd.new_empty((H, tiles, HEAD_DIM))
    dv = do.new_empty((T, H, HEAD_DIM))
    dbeta = kd.new_empty((H, tiles, CHUNK))
    state_dtype = torch.float32 if dfinal_state is None else dfinal_state.dtype
    dinitial_state = kd.new_empty((num_seqs, H, HEAD_DIM, HEAD_DIM), dtype=state_dtype)
    return (*wide, dgT, dv, dbeta, dinitial_state)


@functools.cache
def recurrence_spec(
    precision: str, layout: str, beta: str, state_grad: str, varlen: bool
) -> kernel_compile.KernelSpec:
    """The compile spec of one configuration of the level-1 kernel."""
    from .kernels import bwd_recurrence as kernel

    config = kernel.Config(precision, layout, beta, state_grad, varlen)
    return kernel_compile.KernelSpec(
        "bwd_recurrence", config, functools.partial(kernel.trace, config)
    )


def recurrence_specs() -> list[kernel_compile.KernelSpec]:
    """Every configuration of the level-1 kernel that an argument combination can ask for."""
    family = "bwd_recurrence"
    choices = itertools.product(
        variants.precisions(family),
        variants.names(family),
        ("bf16", "f32"),  # beta
        ("none", "bf16", "f32"),  # gradient of the final state
        (False, True),  # varlen
    )
    return [recurrence_spec(*choice) for choice in choices]


@functools.cache
def _recurrence_kernel(precision, layout, beta_dtype, state_dtype, varlen) -> Callable:
    spec = recurrence_spec(
        precision, layout, _NAMES[beta_dtype], _NAMES.get(state_dtype, "none"), varlen
    )
    return kernel_compile.load(spec)


def _bwd_recurrence_cuda(
    do,
    v,
    beta,
    kd,
    qd,
    kr,
    ki,
    g_total,
    inv,
    mqk,
    states,
    dfinal_state,
    cu_seqlens,
    num_seqs,
    precision,
    layout,
):
    out = _outputs(do, kd, dfinal_state, num_seqs)
    if kd.shape[0] == 0 or num_seqs == 0 or kd.shape[1] == 0:
        # No chunk anywhere: the state passes through.
        out[-1].zero_() if dfinal_state is None else out[-1].copy_(dfinal_state)
        return out
    state_dtype = None if dfinal_state is None else dfinal_state.dtype
    kernel = _recurrence_kernel(precision, layout, beta.dtype, state_dtype, cu_seqlens is not None)
    if dfinal_state is not None:
        dfinal_state = dfinal_state.contiguous()
    if cu_seqlens is not None and cu_seqlens.dtype == torch.int64:
        # Offsets fit 31 bits: the low words, two apart, are the int32 view that the kernel reads.
        cu_seqlens = (
            cu_seqlens.view(torch.int32)[::2]
            if cu_seqlens.is_contiguous()
            else cu_seqlens.to(torch.int32)
        )
    arguments = (
        do.contiguous(), v.contiguous(), beta.contiguous(),
        kd, qd, kr, ki, g_total, inv, mqk, states, dfinal_state, cu_seqlens, *out,
    )  # fmt: skip
    if do.device.index == torch.cuda.current_device():
        kernel(*arguments)
    else:
        with torch.cuda.device(do.device):
            kernel(*arguments)
    return out


def _bwd_recurrence_cpu(
    do,
    v,
    beta,
    kd,
    qd,
    kr,
    ki,
    g_total,
    inv,
    mqk,
    states,
    dfinal_state,
    cu_seqlens,
    num_seqs,
    precision,
    layout,
):
    workspace = Workspace(kd, qd, kr, ki, g_total, inv, mqk, states)
    grads = reference.bwd_recurrence(do, v, beta, workspace, dfinal_state, cu_seqlens, num_seqs)
    out = _outputs(do, kd, dfinal_state, num_seqs)
    for to, value in zip(out, grads, strict=True):
        to.copy_(value)
    return out


def _bwd_recurrence_fake(
    do,
    v,
    beta,
    kd,
    qd,
    kr,
    ki,
    g_total,
    inv,
    mqk,
    states,
    dfinal_state,
    cu_seqlens,
    num_seqs,
    precision,
    layout,
):
    return _outputs(do, kd, dfinal_state, num_seqs)


library.impl("bwd_recurrence", _bwd_recurrence_cuda, "CUDA")
library.impl("bwd_recurrence", _bwd_recurrence_cpu, "CPU")
torch.library.register_fake("kda_cute::bwd_recurrence", _bwd_recurrence_fake, lib=library)
