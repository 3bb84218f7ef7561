"""Activations around the recurrence, forward and backward: the three decay gates and the L2 norm.

Everything here is elementwise torch in the dtype of the arguments. A gate's value is the natural
logarithm of the decay, so it is <= 0, per token, head and key channel.
"""

import torch

GATES = ("log", "safe", "softplus")
NORM_EPS = 1e-6


def _bias_and_rate(g_raw, A_log, dt_bias):
    x = g_raw if dt_bias is None else g_raw + dt_bias
    rate = g_raw.new_ones(1) if A_log is None else A_log.exp()[:, None]
    return x, rate


def _softplus(x):
    # exact for every x: torch's own goes linear at 20, which is visible in float64
    return torch.logaddexp(x, torch.zeros_like(x))


def _check_kind(kind: str):
    if kind not in GATES:
        raise ValueError(f"gate: one of {GATES} expected, got {kind!r}")


def gate(
    g_raw: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    kind: str = "log",
) -> torch.Tensor:
    """Log-space gate of raw values g_raw [..., H, K]; A_log [H], dt_bias [H, K], each None for 0.

    kind "log"       g_raw is the gate already
    kind "safe"      lower_bound * sigmoid(exp(A_log) (g_raw + dt_bias)), bounded
    kind "softplus"  -exp(A_log) softplus(g_raw + dt_bias), not bounded

    ValueError for any other kind.
    """
    _check_kind(kind)
    if kind == "log":
        return g_raw
    x, rate = _bias_and_rate(g_raw, A_log, dt_bias)
    if kind == "safe":
        return lower_bound * torch.sigmoid(rate * x)
    return -rate * _softplus(x)


def gate_backward(
    dg: torch.Tensor,
    g_raw: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    kind: str = "log",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of `gate` given dg [..., H, K]: (that of g_raw, the summands of that of A_log).

    The gradient of dt_bias is the sum of the first over tokens; that of A_log the sum of the second
    over tokens and channels (None for kind "log", which has neither).
    """
    _check_kind(kind)
    if kind == "log":
        return dg, None
    x, rate = _bias_and_rate(g_raw, A_log, dt_bias)
    if kind == "safe":
        s = torch.sigmoid(rate * x)
        dx = dg * lower_bound * s * (1 - s) * rate
        return dx, dx * x
    return -dg * rate * torch.sigmoid(x), -dg * rate * _softplus(x)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension; finite, and 0, at x = 0."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def l2norm_backward(dn: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of `l2norm` at x for the upstream dn, both [..., K]."""
    r = torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
    n = x * r
    return r * (dn - n * (n * dn).sum(-1, keepdim=True))
