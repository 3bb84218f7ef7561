"""The accuracy gate of level 1: the tensors compared, how an error is measured, the tolerances.

Errors are Frobenius norms, of the difference over that of the float64 reference, which is fed the
same workspace. The gradients of the four tiles span e^-80 .. e^80 as their exponentials do, so they
are compared after multiplying by them: dkd by exp(gc), dqd by scale exp(gc), dki by exp(-gc),
dkr by exp(gT - gc). What those sum to for the inputs is compared as well, with `finish` in float64
on both sides, so that only the kernel's errors count.
"""

import torch

from .. import reference
from ..workspace import RecurrenceGrads
from .errors import Compared, failures, rel_error

__all__ = ["REGIMES", "TOLERANCES", "Compared", "compare", "failures", "rel_error"]

# That level 1 is judged in, see `regimes`.
REGIMES = (
    "typical+states",
    "weak+states",
    "strong+states",
    "mixed+states",
    "burst+states",
    "typical+beta0+states",
    "typical+beta1+states",
    "typical+betam200+states",
    "typical+betam200",
)

# x 1e-3. "dv" and "dS0 bf16" hold the rounding of a bf16 output, 1.7e-3 of them.
TOLERANCES = {
    "tf32": {
        "dkd": 2.0,
        "dqd": 1.5,
        "dki": 1.5,
        "dkr": 1.5,
        "dgT": 1.5,
        "dq": 1.5,
        "dk": 1.5,
        "dv": 2.5,
        "dg": 1.5,
        "dbeta": 1.5,
        "dA_log": 2.0,
        "ddt_bias": 2.0,
        "dS0": 1.5,
        "dS0 bf16": 2.5,
    },
    "bf16": {
        "dkd": 20.0,
        "dqd": 9.0,
        "dki": 9.0,
        "dkr": 9.0,
        "dgT": 7.0,
        "dq": 4.0,
        "dk": 7.0,
        "dv": 7.0,
        "dg": 7.0,
        "dbeta": 12.0,
        "dA_log": 10.0,
        "ddt_bias": 12.0,
        "dS0": 9.0,
        "dS0 bf16": 9.0,
    },
}

# A reference this small beside the upstream gradients stands for 0: see `compare`.
ZERO_FLOOR = 1e-12


def compare(
    grads: RecurrenceGrads,
    ref: RecurrenceGrads,
    prepared: reference.Prepared,
    do: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    precision: str,
) -> dict[str, Compared]:
    """Compare a kernel's gradients with the float64 reference's: {tensor: (error, tolerance)}.

    grads and ref come from the same prepared.workspace, do and dfinal_state. dA_log and ddt_bias
    are sums that may cancel: their error is relative to the larger of the sum's norm and the 2-norm
    of the terms. dbeta is with respect to b. Where the reference vanishes (dv at b = 0, an empty
    tensor), the error is relative to ZERO_FLOOR times the norm of the upstream gradients, so that
    the kernel's value has to vanish too. Returned tolerances include the 1e-3.
    """
    upstream = torch.linalg.vector_norm(do.double()).item()
    if dfinal_state is not None:
        upstream += torch.linalg.vector_norm(dfinal_state.double()).item()
    floor = ZERO_FLOOR * upstream

    gc = prepared.gate_sums()
    factors = {
        "dkd": gc.exp(),
        "dqd": prepared.scale * gc.exp(),
        "dki": (-gc).exp(),
        "dkr": (gc[:, :, -1:] - gc).exp(),
    }
    errors = {
        name: rel_error(getattr(grads, name).double() * factor, getattr(ref, name) * factor, floor)
        for name, factor in factors.items()
    }
    errors["dgT"] = rel_error(grads.dgT, ref.dgT, floor)

    ours, exact = reference.finish(grads, prepared), reference.finish(ref, prepared)
    for name in ("dq", "dk", "dv", "dg"):
        errors[name] = rel_error(getattr(ours, name), getattr(exact, name), floor)
    errors["dbeta"] = rel_error(ours.db, exact.db, floor)
    for name in ("dA_log", "ddt_bias"):
        total = getattr(exact, name)
        if total is not None:
            terms = torch.linalg.vector_norm(getattr(exact, name + "_terms")).item()
            errors[name] = rel_error(getattr(ours, name), total, max(terms, floor))
    dS0 = "dS0 bf16" if grads.dinitial_state.dtype == torch.bfloat16 else "dS0"
    errors[dS0] = rel_error(ours.dinitial_state, exact.dinitial_state, floor)
    return {n: Compared(e, TOLERANCES[precision][n] * 1e-3) for n, e in errors.items()}
