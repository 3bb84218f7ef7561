"""Calls of `chunk_kda` as keyword dictionaries: drawn from a regime, and what float64 says of them.

`oracle` reads a call's public arguments on its own, without the package's validation.
"""

import torch

from .. import gates, reference
from .regimes import Problem, make_problem

LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
TOKENS = LEAVES[:5]
FORMS = ("A", "B", "C")
F64 = torch.float64


def make_call(regime: str, form: str = "B", v_first: bool = True, **shape) -> dict:
    """One packed or single sequence as callers pass it; `shape` as for make_problem.

    A: fp32 gate, fp32 b after the sigmoid. B: raw bf16 gate with its parameters, logits. C: as B,
    with q, k, v views of one fused projection.
    """
    return as_call(make_problem(regime, **shape), form, v_first)


def as_call(p: Problem, form: str = "B", v_first: bool = True) -> dict:
    """The call that a problem of regimes.py means; initial_state left out where it is 0."""
    q, k, v = (x[None] for x in (p.q, p.k, p.v))
    state = p.initial_state if v_first else p.initial_state.mT.contiguous()
    call = dict(
        scale=p.scale,
        initial_state=state if p.initial_state.any() else None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        state_v_first=v_first,
        cu_seqlens=p.cu_seqlens,
    )
    if form == "A":
        wide = (x.double() for x in (p.g_raw, p.A_log, p.dt_bias))
        g = reference.gate(*wide, p.lower_bound, p.gate)
        return dict(q=q, k=k, v=v, g=g.float()[None], beta=p.beta.float().sigmoid()[None]) | call
    if form == "C":
        fused = torch.cat([q, k, v], -1)
        q, k, v = fused.split(128, -1)
    return call | dict(
        q=q,
        k=k,
        v=v,
        g=p.g_raw[None],
        beta=p.beta[None],
        A_log=p.A_log,
        dt_bias=p.dt_bias.flatten(),
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=p.lower_bound if p.gate == "safe" else None,
    )


def batch(calls: list[dict]) -> dict:
    """Single sequences of equal length as one dense batch."""
    rows = {name: torch.cat([c[name] for c in calls]) for name in TOKENS}
    states = [c["initial_state"] for c in calls]
    return calls[0] | rows | dict(initial_state=None if states[0] is None else torch.cat(states))


def bounds(call: dict) -> list[int]:
    """Token offsets of the sequences in [B * T]."""
    cu, (B, T) = call.get("cu_seqlens"), call["q"].shape[:2]
    return cu.tolist() if cu is not None else [n * T for n in range(B + 1)]


def sequence(call: dict, n: int) -> dict:
    """Sequence n of a call as a call of its own, dense."""
    at = bounds(call)
    rows = slice(at[n], at[n + 1])
    parts = {name: call[name].flatten(0, 1)[None, rows] for name in TOKENS}
    state = call.get("initial_state")
    parts |= dict(initial_state=None if state is None else state[n : n + 1], cu_seqlens=None)
    return call | parts


def upstream(call: dict, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random do and dht for a call."""
    rng = torch.Generator().manual_seed(seed)
    v, cu = call["v"], call.get("cu_seqlens")
    N = v.shape[0] if cu is None else len(cu) - 1
    do = torch.randn(v.shape, generator=rng).to(v.device, torch.bfloat16)
    return do, torch.randn(N, v.shape[2], 128, 128, generator=rng).to(v.device)


def upstream_of(regime: str, call: dict, seed: int = 1):
    """(do, dht) as the regime has them: dht is None without states."""
    do, dht = upstream(call, seed)
    names = regime.split("+")
    factor = (1e3 if "big" in names else 1.0) * (1e-6 if "tiny" in names else 1.0)
    return (factor * do.float()).bfloat16(), dht if "states" in names else None


def oracle(call: dict, run=reference.token_recurrence) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, final state) of a call in float64, by the token recurrence unless told otherwise."""
    q, k, v, g, beta = (call[name].flatten(0, 1).double() for name in TOKENS)
    gate, A_log, dt_bias = "log", None, None
    if call.get("use_gate_in_kernel"):
        gate = "softplus" if call.get("lower_bound") is None else "safe"
        A_log, dt_bias = call.get("A_log"), call.get("dt_bias")
        dt_bias = dt_bias if dt_bias is None else dt_bias.reshape(q.shape[1:])
    if call.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid() * (2 if call.get("allow_neg_eigval") else 1)
    v_first, state = call.get("state_v_first", False), call.get("initial_state")
    packed = call.get("cu_seqlens") is not None
    o, final = run(
        q,
        k,
        v,
        g,
        beta,
        scale=call.get("scale"),
        initial_state=state if state is None or v_first else state.mT,
        use_qk_l2norm=call.get("use_qk_l2norm_in_kernel", False),
        use_beta_sigmoid=False,
        gate=gate,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=call.get("lower_bound"),
        cu_seqlens=call["cu_seqlens"] if packed else None,
        num_seqs=None if packed else call["q"].shape[0],
        dtype=F64,
    )
    return o.view(call["v"].shape), final if v_first else final.mT


def with_leaves(call: dict, wanted=LEAVES) -> tuple[dict, dict]:
    """The call with fresh leaves for the wanted tensors that it has, and those leaves."""
    leaves = {
        name: call[name].detach().requires_grad_() for name in wanted if call.get(name) is not None
    }
    return call | leaves, leaves


def gradients(function, call: dict, do=None, dht=None, wanted=LEAVES) -> dict:
    """{name: gradient} of sum(o do) + sum(final_state dht) with respect to the wanted tensors."""
    return results_and_gradients(function, call, do, dht, wanted)[1]


def results_and_gradients(function, call: dict, do=None, dht=None, wanted=LEAVES) -> tuple:
    """((o, final state), `gradients`) of one run of function(call); the former without their graph."""
    call, leaves = with_leaves(call, wanted)
    results = function(call)
    outputs, ups = zip(
        *((y, dy) for y, dy in zip(results, (do, dht), strict=True) if dy is not None),
        strict=True,
    )
    ups = [dy.to(y.dtype) for y, dy in zip(outputs, ups, strict=True)]
    grads = torch.autograd.grad(outputs, list(leaves.values()), ups)
    results = tuple(y if y is None else y.detach() for y in results)
    return results, dict(zip(leaves, grads, strict=True))


def exact_gradients(call: dict, do=None, dht=None) -> tuple[dict, dict]:
    """`gradients` in float64, by the reference's scan form; and of those that are sums which may
    cancel, the 2-norms of their terms: of A_log and dt_bias, and [B, T, H] of beta.
    """
    wide = {name: call[name].detach().double() for name in LEAVES if call.get(name) is not None}
    gated, options = call.get("use_gate_in_kernel"), ()
    if gated:
        A_log, dt_bias, bound = wide.get("A_log"), wide.get("dt_bias"), call.get("lower_bound")
        by_head = dt_bias if dt_bias is None else dt_bias.view(call["g"].shape[2:])
        options = A_log, by_head, bound, "softplus" if bound is None else "safe"
        raw = wide["g"]
        wide["g"] = gates.gate(raw, *options)
    inner = call | wide | dict(use_gate_in_kernel=False, A_log=None, dt_bias=None)
    inner, leaves = with_leaves(inner)
    results = oracle(inner, reference.scan_forward)
    pairs = [(y, dy.double()) for y, dy in zip(results, (do, dht), strict=True) if dy is not None]
    outputs, ups = zip(*pairs, strict=True)
    grads = torch.autograd.grad(
        outputs, list(leaves.values()), ups, allow_unused=True, materialize_grads=True
    )
    grads, terms = dict(zip(leaves, grads, strict=True)), {}
    if gated:
        grads["g"], of_A_log = gates.gate_backward(grads["g"], raw, *options)
        if A_log is not None:
            grads["A_log"] = of_A_log.sum((0, 1, 3))
            terms["A_log"] = torch.linalg.vector_norm(of_A_log).item()
        if dt_bias is not None:
            grads["dt_bias"] = grads["g"].sum((0, 1)).view(dt_bias.shape)
            terms["dt_bias"] = torch.linalg.vector_norm(grads["g"]).item()
    if "v" in grads and "beta" in grads:
        terms["beta"] = _terms_of_beta(call, wide, grads["v"])
    return {name: grads[name] for name in LEAVES if name in grads}, terms


def _terms_of_beta(call: dict, wide: dict, dv: torch.Tensor) -> torch.Tensor:
    """2-norms of the 128 terms of each dbeta, b db = sum_v dv (v - what the state holds), as if it held
    nothing.
    """
    norms = torch.linalg.vector_norm(dv * wide["v"], dim=-1)
    if call.get("use_beta_sigmoid_in_kernel"):
        return norms * (1 - wide["beta"].sigmoid())
    return torch.where(wide["beta"] == 0, 0.0, norms / wide["beta"].abs())
