"""One case of `chunk_kda`, or of level 1: run it, and compare every tensor with float64.

`compare_results` and `compare_gradients` are what the GPU tests assert; `measure` and
`measure_recurrence` are what a certificate is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .. import reference
from . import calls, recurrence, tolerances
from .calls import LEAVES, TOKENS
from .errors import GONE, Compared, errors_by_sequence, rel_error
from .regimes import make_problem

# The gradient of a leaf -> the name of the tensor in tables.
TENSORS = {name: f"d{name}" for name in LEAVES} | {"dt_bias": "ddt_bias", "initial_state": "dS0"}
LAST_ROWS = 16  # of a sequence: a bad tail can't hide among its other rows
OF_SEQUENCE, OF_LAST_ROWS = "of a sequence", "of last rows"
# Of everything but one rounding to the dtype of the result: 2^-8, 2^-24 of each element at most.
ROUNDED = {torch.bfloat16: 4e-3, torch.float32: 1e-7}
EXACT = 1e-11  # two float64 computations of the same thing in another order


class Case(NamedTuple):
    """One run: inputs of a regime (`regimes`), in a caller's form (`calls.make_call`).

    lengths: of packed sequences, None for one of T tokens.  With `state`, an initial state is passed
    also where the regime has none (zeros), so that it has a gradient.
    """

    regime: str
    form: str = "B"
    seed: int = 0
    v_first: bool = True
    T: int = 512
    H: int = 2
    lengths: tuple[int, ...] | None = None
    state: bool = True

    @property
    def shape(self) -> str:
        """T and H, or the number of sequences and H."""
        if self.lengths is None:
            return f"T{self.T}_H{self.H}"
        return f"var{len(self.lengths)}_H{self.H}"


class Inputs(NamedTuple):
    """The call, (do, dht), and the norm below which a gradient stands for 0."""

    call: dict[str, Any]
    ups: tuple[torch.Tensor, torch.Tensor | None]
    floor: float


def draw(case: Case, device: torch.device | str) -> Inputs:
    """The tensors of a case; the same on every device."""
    size = {"T": case.T} if case.lengths is None else {"lengths": case.lengths}
    call = calls.make_call(
        case.regime, case.form, case.v_first, H=case.H, seed=case.seed, device=device, **size
    )
    if case.state and call["initial_state"] is None:
        sequences = 1 if case.lengths is None else len(case.lengths)
        call |= dict(initial_state=torch.zeros(sequences, case.H, 128, 128, device=device))
    ups = calls.upstream_of(case.regime, call, case.seed + 1)
    return Inputs(call, ups, floor_of(case.regime, ups[0]))


def floor_of(regime: str, do: torch.Tensor) -> float:
    """Norm below which a gradient stands for 0: where b is 0, dk, dv and, of logits, dbeta are."""
    return 1e-12 * do.double().norm().item() if "betam200" in regime else GONE


# ---------------------------------------------------------------- comparing
def compare_results(
    call: dict[str, Any],
    result: tuple[torch.Tensor, torch.Tensor | None],
    exact: tuple[torch.Tensor, torch.Tensor],
    regime: str,
) -> dict[str, Compared]:
    """o and, where there is one, the final state S_T; of the worst sequence, and of its last rows, as
    well, to twice the tolerance.  ValueError for other shapes than the exact ones'.
    """
    o_tolerance, state_tolerance = tolerances.forward(regime)
    (o, state), (o_ref, state_ref) = result, exact
    found = {"o": Compared(rel_error(o, o_ref), o_tolerance)}
    if state is not None:
        found["S_T"] = Compared(rel_error(state, state_ref, GONE), state_tolerance)
    o, o_ref, at = o.flatten(0, 1), o_ref.flatten(0, 1), calls.bounds(call)
    whole, tails, states = [], [], []
    for n, (start, end) in enumerate(zip(at, at[1:], strict=False)):
        last = slice(max(start, end - LAST_ROWS), end)
        whole.append(rel_error(o[start:end], o_ref[start:end], GONE))
        tails.append(rel_error(o[last], o_ref[last], GONE))
        if state is not None:
            states.append(rel_error(state[n], state_ref[n], GONE))
    for name, errors, tolerance in (
        (f"o {OF_SEQUENCE}", whole, o_tolerance),
        (f"o {OF_LAST_ROWS}", tails, o_tolerance),
        (f"S_T {OF_SEQUENCE}", states, state_tolerance),
    ):
        if errors:
            found[name] = Compared(worst(errors), tolerances.ONE_SEQUENCE * tolerance)
    return found


def compare_gradients(
    call: dict[str, Any],
    got: dict[str, torch.Tensor],
    exact: tuple[dict[str, torch.Tensor], dict[str, float]],
    regime: str,
    *,
    floor: float = GONE,
    gate_floor: float = 0.0,
    each: bool = True,
) -> dict[str, Compared]:
    """Gradients by the name of their leaf; of the worst sequence, and of its last rows, as well, to
    twice the tolerance.

    exact: what `calls.exact_gradients` returns.  floor: norm below which a gradient stands for 0.
    gate_floor: the same for those that pass through the gate's derivative, which may vanish while
    all else is large.  each: judge every sequence on its own, else the median of their errors, to
    once the tolerance.  ValueError for other shapes than the exact ones'.
    """
    ref, terms = exact
    tolerance, found = tolerances.backward(regime), {}
    for name, x in got.items():
        of_gate = gate_floor if name in ("g", "A_log", "dt_bias") else 0.0
        scale = max(scale_of(name, terms), floor, of_gate)
        found[name] = Compared(rel_error(x, ref[name], scale), tolerance[name])
    at = calls.bounds(call)
    if len(at) < 2 or at[-1] == 0:
        return found
    for name in TOKENS:
        if name not in got or (name == "g" and gate_floor) or floor > GONE:
            continue  # what is left is rounding
        for rows, label in ((None, OF_SEQUENCE), (LAST_ROWS, OF_LAST_ROWS)):
            of_terms = terms.get(name) if name == "beta" else None
            errors = errors_by_sequence(got[name], ref[name], at, rows, of_terms)
            allowed = tolerance[name] * (tolerances.ONE_SEQUENCE if each else 1.0)
            error = errors.max() if each else errors.median()
            found[f"{name} {label}"] = Compared(error.item(), allowed)
    if "initial_state" in got:
        x, y = (t["initial_state"].double().flatten(1) for t in (got, ref))
        errors = (x - y).norm(dim=1) / y.norm(dim=1).clamp(min=GONE)
        allowed = tolerances.ONE_SEQUENCE * tolerance["initial_state"]
        found[f"initial_state {OF_SEQUENCE}"] = Compared(errors.max().item(), allowed)
    return found


def scale_of(name: str, terms: dict[str, Any]) -> float:
    """Norm of the terms that a gradient of a parameter may be relative to; 0 for another tensor, whose
    error is relative to itself alone.
    """
    return terms.get(name, 0.0) if name in ("A_log", "dt_bias") else 0.0


def worst(errors: Iterable[float]) -> float:
    """The largest; NaN if one is."""
    errors = list(errors)
    return math.nan if any(math.isnan(e) for e in errors) else max(errors)


def by_tensor(compared: dict[str, Compared]) -> dict[str, Compared]:
    """Gradients under their own names instead of those of their leaves."""
    named = {}
    for name, found in compared.items():
        leaf, _, rest = name.partition(" ")
        named[f"{TENSORS.get(leaf, leaf)} {rest}".rstrip()] = found
    return named


# ---------------------------------------------------------------- chunk_kda
def measure(
    chunk_kda: Callable[..., tuple], case: Case, device: torch.device | str
) -> dict[str, Compared]:
    """Errors of everything that one forward and backward of chunk_kda(**call) returns, by tensor."""
    call, ups, floor = draw(case, device)
    results, got = calls.results_and_gradients(lambda c: chunk_kda(**c), call, *ups)
    exact = calls.oracle(call, reference.scan_forward)
    found = compare_results(call, results, exact, case.regime)
    exact = calls.exact_gradients(call, *ups)
    found |= compare_gradients(call, got, exact, case.regime, floor=floor)
    return by_tensor(found)


def measure_reference(
    chunk_kda: Callable[..., tuple], case: Case, device: torch.device | str
) -> dict[str, dict[str, Compared]]:
    """What stands in for the kernels' certificate where they can't run, by what is compared with the
    token-by-token recurrence in float64 and its autograd:

    "chunk form"  the float64 chunk form, which the kernels are held to elsewhere, to EXACT
    "rounded"     what chunk_kda(**call) returns, to one rounding of its dtype
    """
    call, ups, floor = draw(case, device)
    wide = {n: call[n].double() for n in LEAVES if call.get(n) is not None}
    results, grads = calls.results_and_gradients(calls.oracle, call | wide, *ups)
    exact = dict(zip(tolerances.RESULTS, results, strict=True)) | grads
    chunked = calls.oracle(call, reference.scan_forward)
    of_leaves, terms = calls.exact_gradients(call, *ups)
    chunked = dict(zip(tolerances.RESULTS, chunked, strict=True)) | of_leaves
    results, got = calls.results_and_gradients(lambda c: chunk_kda(**c), call, *ups)
    got = dict(zip(tolerances.RESULTS, results, strict=True)) | got

    def errors(found, tolerance):
        return by_tensor(
            {
                name: Compared(
                    rel_error(x, exact[name], max(scale_of(name, terms), floor)),
                    tolerance(x.dtype),
                )
                for name, x in found.items()
            }
        )

    return {
        "chunk form": errors(chunked, lambda dtype: EXACT),
        "rounded": errors(got, lambda dtype: ROUNDED[dtype]),
    }


# ---------------------------------------------------------------- level 1
def measure_recurrence(
    bwd_recurrence: Callable[..., Any],
    case: Case,
    device: torch.device | str,
    precision: str,
    **options: Any,
) -> dict[str, Compared]:
    """Errors of bwd_recurrence(do, v, beta, workspace, .., precision=.., **options) against the
    float64 reference on the same workspace, see `recurrence.compare`.
    """
    p, prepared, arguments = _level_1(case, device, torch.float32)
    grads = bwd_recurrence(*arguments, precision=precision, **options)
    ref = reference.bwd_recurrence(*arguments)
    return recurrence.compare(grads, ref, prepared, p.do, p.dfinal_state, precision)


def measure_recurrence_reference(
    bwd_recurrence: Callable[..., Any], case: Case, device: torch.device | str
) -> dict[str, Compared]:
    """Level 1 and the stages around it in float64, bwd_recurrence(do, v, beta, workspace, ..) the one
    in the middle: gradients of the inputs against autograd of the token recurrence.
    """
    p, prepared, arguments = _level_1(case, device, torch.float64)
    got = reference.finish(bwd_recurrence(*arguments), prepared)
    leaves = ("q", "k", "v", "g_raw", "beta", "A_log", "dt_bias", "initial_state")
    exact = {n: getattr(p, n).detach().double().requires_grad_() for n in leaves}
    x = p._replace(**exact)
    o, state = reference.token_recurrence(*x.inputs(), **x.options())
    grads = torch.autograd.grad(
        (o, state), list(exact.values()), (p.do.double(), p.dfinal_state.double())
    )
    floor = floor_of(case.regime, p.do)
    found = {}
    for leaf, ref in zip(LEAVES, grads, strict=True):
        name = TENSORS[leaf]
        terms = getattr(got, f"{name}_terms", None)
        scale = floor if terms is None else max(floor, terms.norm().item())
        value = got.dinitial_state if name == "dS0" else getattr(got, name)
        found[name] = Compared(rel_error(value, ref, scale), EXACT)
    return found


def _level_1(case: Case, device, dtype):
    """(problem, what `prepare` makes of it in dtype, arguments of bwd_recurrence)."""
    size = {"T": case.T} if case.lengths is None else {"lengths": case.lengths}
    p = make_problem(case.regime, H=case.H, seed=case.seed, device=device, **size)
    if dtype == torch.float64:
        p = p._replace(
            **{
                name: x.double()
                for name, x in p._asdict().items()
                if isinstance(x, torch.Tensor) and name != "cu_seqlens"
            }
        )
    prepared = reference.prepare(*p.inputs(), **p.options(), dtype=dtype)
    return p, prepared, (p.do, p.v, p.beta, prepared.workspace, p.dfinal_state, p.cu_seqlens)
