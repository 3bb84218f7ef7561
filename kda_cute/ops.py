"""Torch operators: schema, CUDA launch, CPU reference, and shapes for tracing.

`Library.define` and `impl` instead of `custom_op`, which takes more host time for each call.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable

import torch

from . import compile as kernel_compile
from . import reference
from .dtypes import NAMES
from .layouts import variants
from .workspace import CHUNK, HEAD_DIM, Workspace

library = torch.library.Library("kda_cute", "DEF")
library.define(
    "bwd_recurrence(Tensor do, Tensor v, Tensor beta, Tensor kd, Tensor qd, Tensor kr, Tensor ki, Tensor g_total, "
    "Tensor inv, Tensor mqk, Tensor states, Tensor? dfinal_state, Tensor? cu_seqlens, int num_seqs, str precision, "
    "str layout) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


_FIELDS = (
    *("do", "v", "beta", *Workspace._fields, "dfinal_state", "cu_seqlens"),
    *("num_seqs", "precision", "layout"),
)


class Arguments(collections.namedtuple("Arguments", _FIELDS)):
    """What the operator takes, in the schema's order."""

    __slots__ = ()

    @property
    def workspace(self) -> Workspace:
        """The prepared tensors among them."""
        return Workspace(*(getattr(self, name) for name in Workspace._fields))

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Uninitialised outputs, in the order of `RecurrenceGrads`."""
        (T, H, _), tiles = self.do.shape, self.kd.shape[1]
        wide = [torch.empty_like(self.kd) for _ in range(4)]
        dgT = self.kd.new_empty((H, tiles, HEAD_DIM))
        dv = self.do.new_empty((T, H, HEAD_DIM))
        dbeta = self.kd.new_empty((H, tiles, CHUNK))
        dtype = torch.float32 if self.dfinal_state is None else self.dfinal_state.dtype
        dinitial_state = self.kd.new_empty((self.num_seqs, H, HEAD_DIM, HEAD_DIM), dtype=dtype)
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
    spec = recurrence_spec(precision, layout, NAMES[beta_dtype], NAMES[state_dtype], varlen)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"bwd_recurrence is captured before its kernel was loaded ({spec.config}): call it "
            "once with tensors of these dtypes, then capture"
        )
    return kernel_compile.load(spec)


def _bwd_recurrence_cuda(*arguments) -> tuple[torch.Tensor, ...]:
    x = Arguments(*arguments)
    out, dfinal, cu = x.outputs(), x.dfinal_state, x.cu_seqlens
    H, tiles = x.kd.shape[:2]
    if cu is not None and cu.shape != (x.num_seqs + 1,):
        raise ValueError(f"cu_seqlens has shape {list(cu.shape)}; expected [{x.num_seqs + 1}]")
    if H == 0 or tiles == 0 or x.num_seqs == 0:
        # No chunk anywhere: the state passes through.
        out[-1].zero_() if dfinal is None else out[-1].copy_(dfinal)
        return out
    state_dtype = None if dfinal is None else dfinal.dtype
    kernel = _recurrence_kernel(x.precision, x.layout, x.beta.dtype, state_dtype, cu is not None)
    if dfinal is not None:
        dfinal = dfinal.contiguous()
    if cu is not None and cu.dtype == torch.int64:
        # Offsets fit 31 bits: the low words, two apart, are the int32 view that the kernel reads.
        cu = cu.view(torch.int32)[::2] if cu.is_contiguous() else cu.to(torch.int32)
    tokens = (x.do.contiguous(), x.v.contiguous(), x.beta.contiguous())
    if x.do.device.index == torch.cuda.current_device():
        kernel(*tokens, *x.workspace, dfinal, cu, *out)
    else:
        with torch.cuda.device(x.do.device):
            kernel(*tokens, *x.workspace, dfinal, cu, *out)
    return out


def _bwd_recurrence_cpu(*arguments) -> tuple[torch.Tensor, ...]:
    x = Arguments(*arguments)
    grads = reference.bwd_recurrence(
        x.do, x.v, x.beta, x.workspace, x.dfinal_state, x.cu_seqlens, x.num_seqs
    )
    out = x.outputs()
    for to, value in zip(out, grads, strict=True):
        to.copy_(value)
    return out


def _bwd_recurrence_fake(*arguments) -> tuple[torch.Tensor, ...]:
    return Arguments(*arguments).outputs()


library.impl("bwd_recurrence", _bwd_recurrence_cuda, "CUDA")
library.impl("bwd_recurrence", _bwd_recurrence_cpu, "CPU")
torch.library.register_fake("kda_cute::bwd_recurrence", _bwd_recurrence_fake, lib=library)
