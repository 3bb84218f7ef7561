"""What `chunk_kda` is held to: regimes, tolerances by regime and tensor, and the peers' figures.

Tolerances are of errors as `errors` measures them, those of A_log and dt_bias relative to the larger
of the sum and the 2-norm of its terms. They are about twice the worst that a model of the kernels'
roundings gave over seeds (bf16 operands, fp32 accumulation), by kind of regime.
"""

import math

from .calls import LEAVES

# Regimes of `regimes`, combined: every one without and with states.
BASES = (
    "typical",
    "weak",
    "nodecay",
    "strong",
    "mixed",
    "burst",
    "typical+beta0",
    "typical+beta1",
    "typical+betam200",
    "typical+big",
    "typical+tiny",
    "strong+tiny",
    "weak+simk+beta1",
    "weak+repk+beta1",
    "ub_typ",
    "ub_strong",
    "ub_burst",
    "ub_row",
    "ub_mixed",
)
REGIMES = tuple(base + states for base in BASES for states in ("", "+states"))

RESULTS = ("o", "S_T")
# x 1e-3, of o and the final state.
FORWARD = {
    "bounded": (10, 8),
    "weak": (11, 10),
    "similar keys": (20, 20),
    "repeated keys": (120, 180),
    "unbounded": (6, 6),
}
# x 1e-3, of the gradients of LEAVES in order. Those of the parameters are not judged where keys repeat.
BACKWARD = {
    "bounded": (8, 9, 10, 10, 14, 20, 10, 8),
    "weak": (10, 11, 11, 12, 13, 90, 11, 10),
    "similar keys": (20, 12, 20, 20, 23, 95, 20, 7),
    "repeated keys": (120, 16, 120, 120, 120, math.inf, math.inf, 7),
    "unbounded": (6, 6, 6, 8, 6, 20, 10, 6),
    # as bounded; of at most 16 tokens, dbeta's dot products that cancel are not averaged
    "few tokens": (8, 9, 10, 10, 25, 20, 10, 8),
    # keys that repeat over long sequences or with b near 2, which no table was measured for
    "degenerate": (120, 120, 120, 120, 120, math.inf, math.inf, 120),
}
ONE_SEQUENCE = 2.0  # times the tolerance, for a sequence and for its last rows

# x 1e-3: the better peer's errors, cuDNN's or FLA's, measured on an H200 against the same oracle
# (T = 512, H = 2): of o, then of the gradients of LEAVES but for those of the parameters.
PEERS = {
    "typical": (4.1, 3.3, 3.3, 3.8, 3.7, 3.6, 2.7),
    "strong+states": (3.9, 2.9, 2.8, 2.9, 2.9, 3.2, 2.2),
    "strong+tiny": (5.2, 3.3, 3.3, 4.4, 14, 4.4, 2.8),
    "weak+simk+beta1": (10, 9.8, 5.5, 10, 11, 21, 3.0),
    "ub_burst": (4.4, 3.8, 3.9, 4.0, 6.0 / 1.3, 4.0, 2.5),  # dg: no peer has a good one
}
OVER_PEERS = 1.3  # times a peer's figure, for the median over seeds
PARAMETERS = 6e-3  # of A_log and dt_bias, for the median over seeds where peers have figures


def kind(regime: str) -> str:
    """The row of FORWARD and BACKWARD; `regime`: one of regimes.py, or a key of BACKWARD."""
    names = regime.split("+")
    if regime in BACKWARD:
        return regime
    if "repk" in names:
        return "repeated keys"
    if "simk" in names:
        return "similar keys"
    if names[0].startswith("ub_"):
        return "unbounded"
    return "weak" if names[0] in ("weak", "nodecay") else "bounded"


def forward(regime: str) -> tuple[float, float]:
    """Of o and of the final state."""
    o, state = FORWARD[kind(regime)]
    return 1e-3 * o, 1e-3 * state


def backward(regime: str) -> dict[str, float]:
    """Of the gradient of each of LEAVES."""
    return {n: 1e-3 * t for n, t in zip(LEAVES, BACKWARD[kind(regime)], strict=True)}


def medians(regime: str) -> dict[str, float]:
    """Of the median over seeds, of o and of the gradient of each of LEAVES; empty where peers have no
    figures.
    """
    if regime not in PEERS:
        return {}
    judged = ("o", *(n for n in LEAVES if n not in ("A_log", "dt_bias")))
    of_peers = {n: 1e-3 * OVER_PEERS * x for n, x in zip(judged, PEERS[regime], strict=True)}
    return of_peers | {"A_log": PARAMETERS, "dt_bias": PARAMETERS}
