"""`chunk_kda` as a differentiable function: which tensors it saves, and who computes gradients.

An autograd.Function around two plain operators takes a third of the host time of
register_autograd. Where nobody looks, the kernels' functions are called without the operators.
"""

from __future__ import annotations

import torch

from . import chunk_ops
from .problem import Problem

_TENSORS = Problem._fields.index("cu_seqlens") + 1
_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))
_forward = torch.ops.kda_cute.chunk_kda_fwd.default
_backward = torch.ops.kda_cute.chunk_kda_bwd.default


def chunk_kda(p: Problem, backend: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run p: (o, final state or None), differentiable with respect to every tensor of p but
    cu_seqlens. Keeps nothing, whatever p.save_states says, where no gradient can be asked for.
    """
    if torch.is_grad_enabled():
        for x in p[: chunk_ops.DIFFERENTIABLE]:
            if x is not None and x.requires_grad:
                out = _ChunkKDA.apply(*p[:_TENSORS], (*p[_TENSORS:], backend))
                return out[0], out[1] if p.output_final_state else None
    if p.save_states:
        p = p._replace(save_states=False)
    if _direct(p, backend):
        return chunk_ops.kernels_forward(p)[:2]
    out = _forward(*p, backend)
    return out[0], out[1] if p.output_final_state else None


def plain(*tensors: torch.Tensor | None) -> bool:
    """Whether these are ordinary tensors, and no transform has wrapped them."""
    for x in tensors:
        if type(x) not in _PLAIN:
            return False
    return not torch._C._are_functorch_transforms_active()


def _direct(p: Problem, backend: str) -> bool:
    """Whether the operators can be passed by: ordinary tensors, and no tracer or mode that would see
    them.
    """
    return (
        backend == "kernels"
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and plain(*p[:_TENSORS])
        and not p.q.is_meta
    )


class _ChunkKDA(torch.autograd.Function):
    """Arguments: the tensors of a Problem, and its flags with the backend, together. Results: o, and
    the final state where it was asked for.
    """

    @staticmethod
    def forward(ctx, *arguments):
        tensors, flags = arguments[:-1], arguments[-1]
        p, backend = Problem(*tensors, *flags[:-1]), flags[-1]
        if _direct(p, backend):
            o, final, saved = chunk_ops.kernels_forward(p)
        else:
            out = list(_forward(*tensors, *flags))
            o = out.pop(0)
            final = out.pop(0) if p.output_final_state else None
            saved = out.pop(0) if out else None
        ctx.save_for_backward(*tensors, saved)
        ctx.flags = flags
        ctx.wanted = list(ctx.needs_input_grad[: chunk_ops.DIFFERENTIABLE])
        ctx.set_materialize_grads(False)
        return (o,) if final is None else (o, final)

    @staticmethod
    def backward(ctx, do, dfinal_state=None):
        *tensors, saved = ctx.saved_tensors
        arguments = (do, dfinal_state, saved, ctx.wanted, *tensors, *ctx.flags)
        # With create_graph, results that carry an error for whoever differentiates them.
        run = _Gradients.apply if torch.is_grad_enabled() else _run_backward
        grads = iter(run(*arguments))
        return (*(next(grads) if want else None for want in ctx.wanted), None, None)


def _run_backward(*arguments):
    """The gradients, by the operator or past it."""
    *upstream, wanted = arguments[:4]
    p, backend = Problem(*arguments[4:-1]), arguments[-1]
    if _direct(p, backend):
        return chunk_ops.kernels_backward(*upstream, wanted, p)
    return _backward(*arguments)


class _Gradients(torch.autograd.Function):
    """The backward operator as something that can't be differentiated."""

    @staticmethod
    def forward(ctx, *arguments):
        return tuple(_run_backward(*arguments))

    @staticmethod
    def backward(ctx, *upstream):
        raise RuntimeError("chunk_kda: its gradients can't be differentiated again")
