"""`chunk_kda` as a differentiable function: which tensors it saves, and who computes gradients.

An autograd.Function around two plain operators takes a third of the host time of
register_autograd.
"""

from __future__ import annotations

import torch

from . import chunk_ops
from .problem import Problem

_TENSORS = Problem._fields.index("cu_seqlens") + 1
_forward = torch.ops.kda_cute.chunk_kda_fwd.default
_backward = torch.ops.kda_cute.chunk_kda_bwd.default


def chunk_kda(p: Problem, backend: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run p: (o, final state or None), differentiable with respect to every tensor of p but
    cu_seqlens. Keeps nothing, whatever p.save_states says, where no gradient can be asked for.
    """
    needs_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in p[: chunk_ops.DIFFERENTIABLE]
    )
    if needs_grad:
        out = _ChunkKDA.apply(*p, backend)
    else:
        out = _forward(*p._replace(save_states=False), backend)
    return out[0], out[1] if p.output_final_state else None


class _ChunkKDA(torch.autograd.Function):
    """Arguments: the fields of a Problem, and the backend. Results: o, and the final state where
    it was asked for.
    """

    @staticmethod
    def forward(ctx, *arguments):
        out = _forward(*arguments)
        visible = 1 + Problem(*arguments[:-1]).output_final_state
        states, U = out[visible:] or (None, None)
        ctx.save_for_backward(*arguments[:_TENSORS], states, U)
        ctx.flags = arguments[_TENSORS:]
        ctx.wanted = list(ctx.needs_input_grad[: chunk_ops.DIFFERENTIABLE])
        ctx.set_materialize_grads(False)
        return tuple(out[:visible])

    @staticmethod
    def backward(ctx, do, dfinal_state=None):
        *tensors, states, U = ctx.saved_tensors
        arguments = (do, dfinal_state, states, U, ctx.wanted, *tensors, *ctx.flags)
        # With create_graph, results that carry an error for whoever differentiates them.
        run = _Gradients.apply if torch.is_grad_enabled() else _backward
        grads = iter(run(*arguments))
        rest = (None,) * (len(tensors) + len(ctx.flags) - chunk_ops.DIFFERENTIABLE)
        return (*(next(grads) if want else None for want in ctx.wanted), *rest)


class _Gradients(torch.autograd.Function):
    """The backward operator as something that can't be differentiated."""

    @staticmethod
    def forward(ctx, *arguments):
        return tuple(_backward(*arguments))

    @staticmethod
    def backward(ctx, *upstream):
        raise RuntimeError("chunk_kda: its gradients can't be differentiated again")
