"""Calls of `chunk_kda` as keyword dictionaries: drawn from a regime, and what float64 says of them.

`oracle` reads a call's public arguments on its own, without the package's validation.
"""

import functools
import math

import torch
from regimes import Problem, make_problem

import kda_cute
from kda_cute import gates, reference

LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
TOKENS = LEAVES[:5]
FORMS = ("A", "B", "C")
RESULTS = ("o", "final state")
F64 = torch.float64
DEVICE = "cuda"
THREE = (37, 64, 127)  # cu_seqlens 0, 37, 101, 228
GONE = 1e-30  # norm of what has decayed out of fp32's range: only 0 is near it


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


call_on_gpu = functools.partial(make_call, device=DEVICE)


def log_gate_call(g: torch.Tensor, **shape) -> dict:
    """Form A on the GPU with the gate g [T, H, 128] or something that broadcasts to it."""
    call = call_on_gpu("typical+states", "A", **shape)
    g = g.to(call["g"].device, torch.float32)
    return call | dict(g=g.expand(call["g"].shape[1:])[None])


def raw_gate_call(raw: torch.Tensor, lower_bound: float | None = -5.0, **shape) -> dict:
    """Form B on the GPU with A_log = dt_bias = 0 and the raw gate given."""
    call = call_on_gpu("typical+states", "B", **shape)
    zeros = {name: torch.zeros_like(call[name]) for name in ("A_log", "dt_bias")}
    raw = raw.to(call["g"].device, torch.bfloat16).expand(call["g"].shape[1:])[None]
    return call | zeros | dict(g=raw, lower_bound=lower_bound)


def run(call: dict):
    """(o, final state) by what the call asks for: the kernels, unless told otherwise."""
    return kda_cute.chunk_kda(**call)


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
    call, leaves = with_leaves(call, wanted)
    outputs, ups = zip(
        *((y, dy) for y, dy in zip(function(call), (do, dht), strict=True) if dy is not None),
        strict=True,
    )
    ups = [dy.to(y.dtype) for y, dy in zip(outputs, ups, strict=True)]
    return dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), ups), strict=True))


def exact_gradients(call: dict, do=None, dht=None) -> tuple[dict, dict]:
    """`gradients` in float64, by the reference's scan form; and the 2-norms of the terms that sum up
    to those of A_log and dt_bias, which may cancel.
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
    return {name: grads[name] for name in LEAVES if name in grads}, terms


# ---------------------------------------------------------------- comparing, copying, spoiling
def integers(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor."""
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def by_name(x) -> dict:
    """{name: tensor} of gradients by name, a NamedTuple, or a result (o, final state)."""
    if isinstance(x, dict):
        return x
    return x._asdict() if hasattr(x, "_asdict") else dict(zip(RESULTS, x, strict=True))


def assert_same_bits(a, b, what=""):
    """Of two of what `by_name` takes."""
    a, b = by_name(a), by_name(b)
    assert list(a) == list(b), what
    for name, x in a.items():
        y = b[name]
        if x is None or y is None:
            assert x is y, (what, name)
            continue
        assert x.dtype == y.dtype and x.shape == y.shape, (what, name)
        same = torch.equal(integers(x), integers(y))
        assert same, f"{what} {name}: {(x != y).sum().item()} of {x.numel()} differ"


def clones(call: dict) -> dict:
    return {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in call.items()}


def written_into(static: dict, source: dict):
    """Copy source's tensors into static's, on the current stream."""
    for name, x in static.items():
        if isinstance(x, torch.Tensor):
            x.copy_(source[name])


def poison(value=math.nan, like=()):
    """Leave blocks of many sizes, and of the sizes of `like`, full of value with the GPU's
    allocator. NaN is one in fp32 and in each bf16 half.
    """
    sizes = [1 << n for n in range(9, 31, 1)] + [3 << n for n in range(9, 28)]
    sizes += [x.numel() * x.element_size() for x in like if x is not None] * 2
    fill = functools.partial(torch.full, device=DEVICE)
    value, dtype = (0x7FFF7FFF, torch.int32) if math.isnan(value) else (value, torch.float32)
    blocks = [fill((-(-n // 4),), value, dtype=dtype) for n in sizes if n]
    torch.cuda.synchronize()
    del blocks


def captured(function):
    """(graph of function(), what it returned), after a warm-up."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def widened(x: torch.Tensor, rows: int, dim: int = 1) -> torch.Tensor:
    """x with more tokens, of NaN, in dimension dim."""
    shape = list(x.shape)
    shape[dim] += rows
    larger = x.new_full(shape, math.nan)
    larger.narrow(dim, 0, x.shape[dim]).copy_(x)
    return larger


def strided_versions(call: dict) -> dict:
    """{what: the same tensors with other strides}."""
    q, k, v, g = (call[name] for name in "qkvg")
    fused = torch.cat([q, k, v], -1)
    stacked = torch.stack([q, k, v], 2)
    rows = q.new_full((1, q.shape[1], q.shape[2], 256), math.nan)
    rows[..., :128] = q
    odd = torch.cat([q.new_zeros(1), q.flatten()])[1:].view(q.shape)
    state = call["initial_state"]
    wide_state = torch.cat([state, state], -1)
    fused_views = dict(zip("qkv", fused.split(128, -1), strict=True))
    stacked_views = dict(zip("qkv", stacked.unbind(2), strict=True))
    heads_first = {
        name: x.transpose(1, 2).contiguous().transpose(1, 2)
        for name, x in zip("qkvg", (q, k, v, g), strict=True)
    }
    beta = {"beta": torch.stack([call["beta"]] * 4, -1)[..., 1]}
    transposed = {"initial_state": state.mT.contiguous().mT}
    return {
        "fused": fused_views,
        "stacked": stacked_views,
        "padded rows": {"q": rows[..., :128]},
        "heads first": heads_first,
        "channels apart": {"k": k.mT.contiguous().mT},
        "odd address": {"q": odd},
        "beta": beta,
        "state rows": {"initial_state": wide_state[..., :128]},
        "state transposed": transposed,
        "all": fused_views | {"g": heads_first["g"]} | beta | transposed,
    }  # fmt: skip
