"""Inputs of `chunk_kda` in the forms in which callers pass them, and what float64 says of each.

| form | q, k | g | beta |
|---|---|---|---|
| A | raw, normalised in the kernel | fp32, natural log of the decay | fp32, after the sigmoid |
| B | raw, normalised in the kernel | bf16, raw, with A_log and dt_bias: safe gate, bound -5 | bf16 logits |
| prepared | bf16, normalised beforehand | as A | as A |

All are the same problem, up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kda_cute import reference
from perf.shapes import HEAD_DIM, Shape

# Form -> g, gate and beta, as configurations of kernels name them.
TYPES = {"A": ("f32", "log", "f32"), "B": ("bf16", "safe", "bf16")}
REGIME = "typical"
LOWER_BOUND = -5.0
SCALE = HEAD_DIM**-0.5
# The inputs whose gradients the gate compares.  Gradients of A_log and dt_bias are computed, too,
# but sums of terms that cancel have no error that a few heads could tell.
LEAVES = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True)
class Inputs:
    """One form on one shape; sequences packed.

    q, k, v, do [T, H, 128] bf16; g [T, H, 128]; beta [T, H]; A_log [H] and dt_bias [H, 128] fp32
    (B) or None; cu_seqlens [N + 1] int32, also of equal sequences.
    """

    shape: Shape
    form: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    do: torch.Tensor
    cu_seqlens: torch.Tensor

    @property
    def raw(self) -> bool:
        """Whether gate and sigmoid are the op's work."""
        return self.form == "B"

    @property
    def l2norm(self) -> bool:
        """Whether normalising q and k is the op's work."""
        return self.form != "prepared"


def make_inputs(shape: Shape, device: str = "cuda", seed: int = 0) -> dict[str, Inputs]:
    """Form -> random inputs of the typical regime, drawn on the device."""
    rng = torch.Generator(device).manual_seed(seed)
    full = (shape.T, shape.H, HEAD_DIM)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=rng, device=device).bfloat16()

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=rng, device=device)

    q, k, v, do, g = (normal(*full) for _ in range(5))
    beta, A_log, dt_bias = normal(*full[:2]), uniform(shape.H), uniform(shape.H, HEAD_DIM)
    offsets = torch.tensor(shape.offsets, dtype=torch.int32, device=device)
    raw = Inputs(shape, "B", q, k, v, g, beta, A_log, dt_bias, do, offsets)
    log_g = reference.gate(g.float(), A_log, dt_bias, LOWER_BOUND, "safe")
    log = replace(raw, form="A", g=log_g, beta=beta.float().sigmoid(), A_log=None, dt_bias=None)
    q, k = (reference.l2norm(x.float()).bfloat16() for x in (q, k))
    prepared = replace(log, form="prepared", q=q, k=k)
    return {x.form: x for x in (log, raw, prepared)}


def some_heads(H: int) -> list[int]:
    """First, middle and last head."""
    return sorted({0, H // 2, H - 1})


def expected(op: str, inputs: Inputs, heads: Sequence[int]) -> dict[str, torch.Tensor]:
    """Float64 results of some heads of these very inputs, [T, heads, ...]: o of the forward; of the
    backward the gradients of LEAVES, as dq and so on.
    """
    at = list(heads)
    backward = op == "chunk_kda_bwd"
    leaves = [getattr(inputs, n)[:, at].double().requires_grad_(backward) for n in LEAVES]
    with torch.set_grad_enabled(backward):
        o, _ = reference.scan_forward(
            *leaves,
            scale=SCALE,
            use_qk_l2norm=inputs.l2norm,
            use_beta_sigmoid=inputs.raw,
            gate="safe" if inputs.raw else "log",
            A_log=inputs.A_log[at] if inputs.raw else None,
            dt_bias=inputs.dt_bias[at] if inputs.raw else None,
            lower_bound=LOWER_BOUND,
            cu_seqlens=inputs.cu_seqlens,
            dtype=torch.float64,
        )
    if not backward:
        return {"o": o}
    grads = torch.autograd.grad(o, leaves, inputs.do[:, at].double())
    return {f"d{name}": grad for name, grad in zip(LEAVES, grads, strict=True)}
