"""Who else computes `chunk_kda`: FLA and cuDNN's front end, found and measured as this package is.

Both are optional, imported here alone and when asked for; why one can't be measured is said by
`Unavailable`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import reference
from . import calls
from .errors import Compared
from .measure import Case, by_tensor, compare_gradients, compare_results, draw, measure

CUDNN_PLAN = "kda_hopper_cuda"  # by name: it declines rather than falls back


class Unavailable(RuntimeError):
    """A peer, or a case of it, that can't be measured, and why."""


class Peer(NamedTuple):
    """name; measure: (case, device) -> errors by tensor, or Unavailable."""

    name: str
    measure: Callable[[Case, Any], dict[str, Compared]]


def find() -> tuple[list[Peer], dict[str, str]]:
    """The peers that can be imported, and name -> why not of the others."""
    found, skipped = [], {}
    for name, make in MAKERS.items():
        try:
            found.append(make())
        except Unavailable as reason:
            skipped[name] = str(reason)
    return found, skipped


def _import(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a peer may fail in ways of its own: libraries, drivers, versions
        raise Unavailable(f"import {module}: {type(error).__name__}: {error}") from error


def fla_forward() -> Callable[..., Any]:
    """FLA's `chunk_kda`; Unavailable without it."""
    return _import("fla.ops.kda", "chunk_kda")


def cudnn_forward() -> Callable[..., Any]:
    """The front end's forward operator; Unavailable without it."""
    return _import("cudnn.linear_attention.ops", "kimi_delta_attention")


def cudnn_backward() -> Callable[..., Any]:
    """The front end's backward operator, once `cudnn_forward` has imported it; Unavailable where it
    has none.
    """
    try:
        return torch.ops.cudnn.kimi_delta_attention_bwd.default
    except AttributeError as error:  # an older front end
        raise Unavailable(f"no backward operator: {error}") from error


def fla() -> Peer:
    """FLA's call, with the arguments of this package's."""
    function = fla_forward()

    def chunk_kda(**call):
        cu_seqlens = call.pop("cu_seqlens", None)
        if cu_seqlens is not None:
            call["cu_seqlens"] = cu_seqlens.long()
        return function(**call, safe_gate=call.get("lower_bound") is not None)

    return Peer("fla", lambda case, device: measure(chunk_kda, case, device))


def cudnn() -> Peer:
    """The Hopper engine.  Its backward takes prepared inputs alone (q and k normalised, the gate's
    value, b), so both directions get those, and are held to the oracle of the same inputs.
    """
    forward, backward = cudnn_forward(), cudnn_backward()

    def run(case, device):
        if "states" in case.regime.split("+"):
            raise Unavailable("states of cuDNN's engine are not measured")
        call, (do, _), _ = draw(case._replace(form="A"), device)
        q, k = (reference_norm(call[name]) for name in "qk")
        call |= dict(q=q, k=k, use_qk_l2norm_in_kernel=False)
        packed = [call[name].flatten(0, 1) for name in calls.TOKENS]
        offsets = torch.tensor(calls.bounds(call), dtype=torch.int32, device=device)
        zeros = torch.zeros(len(offsets) - 1, case.H, 128, 128, device=device)
        same = dict(initial_state=zeros, plan_name=CUDNN_PLAN)
        o = forward(
            *packed, offsets, scale=call["scale"], use_qk_l2norm_in_kernel=False,
            use_beta_sigmoid_in_kernel=False, safe_gate=False, gate_lower_bound=None,
            a_log=None, dt_bias=None, **same,
        )[0]  # fmt: skip
        do = do.flatten(0, 1)
        grads = backward(do, *packed, offsets, call["scale"], d_final_state=zeros, **same)
        got = {n: x.view(call[n].shape) for n, x in zip(calls.TOKENS, grads, strict=False)}
        exact = calls.oracle(call, reference.scan_forward)
        found = compare_results(call, (o.view(call["v"].shape), None), exact, case.regime)
        exact = calls.exact_gradients(call, do.view(call["v"].shape))
        return by_tensor(found | compare_gradients(call, got, exact, case.regime))

    return Peer("cudnn", run)


def reference_norm(x: torch.Tensor) -> torch.Tensor:
    """x normalised in fp32, in x's dtype."""
    return reference.l2norm(x.float()).to(x.dtype)


MAKERS: dict[str, Callable[[], Peer]] = {"fla": fla, "cudnn": cudnn}
