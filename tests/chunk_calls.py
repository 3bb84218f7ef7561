"""Calls of `chunk_kda` in tests: what `kda_cute.accuracy.calls` makes, and ways to compare, copy and
spoil them.
"""

import math

import torch

from kda_cute.accuracy.calls import (
    FORMS,
    LEAVES,
    TOKENS,
    as_call,
    batch,
    bounds,
    exact_gradients,
    gradients,
    log_gate_call,
    make_call,
    oracle,
    raw_gate_call,
    sequence,
    upstream,
    with_leaves,
)
from kda_cute.accuracy.errors import GONE

__all__ = [
    "GONE",
    "RESULTS",
    "FORMS",
    "LEAVES",
    "TOKENS",
    "as_call",
    "batch",
    "bounds",
    "exact_gradients",
    "gradients",
    "log_gate_call",
    "make_call",
    "oracle",
    "raw_gate_call",
    "sequence",
    "upstream",
    "with_leaves",
    "assert_same_bits",
    "clones",
    "integers",
    "poison",
    "strided_versions",
    "written_into",
]
RESULTS = ("o", "final state")


def integers(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor."""
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def assert_same_bits(a, b, what=""):
    """Of two results (o, final state), or of gradients by name."""
    a, b = (x if isinstance(x, dict) else dict(zip(RESULTS, x, strict=True)) for x in (a, b))
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
    allocator.
    """
    sizes = [1 << n for n in range(9, 31, 1)] + [3 << n for n in range(9, 28)]
    sizes += [x.numel() * x.element_size() for x in like if x is not None] * 2
    blocks = [torch.full((-(-n // 4),), value, device="cuda") for n in sizes if n]
    torch.cuda.synchronize()
    del blocks


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
