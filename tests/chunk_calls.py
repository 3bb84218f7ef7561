"""Calls of `chunk_kda` in tests: what `kda_cute.accuracy.calls` makes, on the GPU, and ways to compare,
copy and spoil them.
"""

import functools
import math

import torch

import kda_cute
from kda_cute.accuracy.calls import (
    FORMS,
    LEAVES,
    TOKENS,
    as_call,
    batch,
    bounds,
    exact_gradients,
    gradients,
    make_call,
    oracle,
    sequence,
    upstream,
    with_leaves,
)
from kda_cute.accuracy.errors import GONE

# What tests take from here and is the package's.
__all__ = [
    "FORMS",
    "GONE",
    "LEAVES",
    "TOKENS",
    "as_call",
    "batch",
    "bounds",
    "exact_gradients",
    "gradients",
    "make_call",
    "oracle",
    "sequence",
    "upstream",
    "with_leaves",
]
RESULTS = ("o", "final state")
DEVICE = "cuda"
THREE = (37, 64, 127)  # cu_seqlens 0, 37, 101, 228


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
