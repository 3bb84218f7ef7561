"""What the tests of a single kernel share: specs and compiled objects of configurations, inputs of
the scans, comparing outputs that hold NaN where nothing belongs.
"""

import functools
from typing import NamedTuple

import pytest
import torch

from kda_cute import compile as kernel_compile
from kda_cute import reference, reference_stages
from kda_cute.accuracy.regimes import make_problem
from kda_cute.factors import CHUNK, HEAD_DIM, Factors, record_rows, slot_count, views

DEVICE = "cuda"
SCAN_TOLERANCE = 6e-3  # relative, Frobenius
DENSE_T = 64 * 5 + 17
PACKED = (130, 0, 64, 1, 200)
SHAPES = {
    "dense": {},
    "one full chunk": {"B": 1, "T": 64},
    "one token": {"B": 3, "T": 1},
    "packed": {"lengths": PACKED},
    "packed, tokens left over": {"lengths": PACKED, "spare": 70},
}


def spec(kernel, config) -> kernel_compile.KernelSpec:
    """kernel: a package of kda_cute.kernels."""
    name = kernel.__name__.rpartition(".")[2]
    return kernel_compile.KernelSpec(name, config, functools.partial(kernel.trace, config))


def compiled_now(kernel, configs):
    """A fixture of a test module: {config: object file}, compiled into a new folder."""

    @pytest.fixture(scope="module")
    def objects(tmp_path_factory):
        folder = tmp_path_factory.mktemp("kernels")
        specs = [spec(kernel, config) for config in configs]
        paths = kernel_compile.object_files(specs, folder=folder, workers=2)
        return dict(zip(configs, paths, strict=True))

    return objects


# ---------------------------------------------------------------- inputs of the scans
class Case(NamedTuple):
    """Factors of N sequences, and v [B, T, H, 128]: dense, or packed."""

    factors: Factors
    v: torch.Tensor
    N: int
    initial: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


def make_case(
    *, B=2, T=DENSE_T, lengths=None, spare=0, H=3, initial=None, coupling=0.1, device=DEVICE
) -> Case:
    """Random factors, 0 in rows that no token has; slots that no chunk owns hold NaN.  `spare`
    tokens follow the last packed sequence and hold NaN.  coupling: the size of kd and z; rounding errors
    of S grow from chunk to chunk at 0.1, and fade at half of that.
    """
    generator = torch.Generator(device).manual_seed(0)
    rand = functools.partial(torch.randn, generator=generator, device=device)
    cu = None
    if lengths is not None:
        B, T, N = 1, sum(lengths) + spare, len(lengths)
        bounds = [sum(lengths[:n]) for n in range(N + 1)]
        cu = torch.tensor(bounds, dtype=torch.int32, device=device)
        first_slots = [first // CHUNK + n for n, first in enumerate(bounds[:-1])]
        slots = slot_count(T, N, True)
    else:
        N, lengths = B, [T] * B
        slots = slot_count(B * T, B, False)
        first_slots = [n * (slots // B) for n in range(B)]
    valid = torch.full((slots, 1, CHUNK, 1), torch.nan, device=device)
    for first, length in zip(first_slots, lengths, strict=True):
        for c in range(-(-length // CHUNK)):
            rows = torch.arange(CHUNK, device=device) < length - CHUNK * c
            valid[first + c, 0, :, 0] = rows.float()
    wide = lambda scale: (scale * rand(slots, H, CHUNK, HEAD_DIM) * valid).bfloat16()  # noqa: E731
    square = (0.1 * rand(slots, H, CHUNK, CHUNK)).tril(-1) * valid
    eg = 0.3 + 0.7 * torch.rand(slots, H, HEAD_DIM, generator=generator, device=device)
    factors = Factors(
        wide(coupling), wide(coupling), wide(0.1), square.bfloat16(),
        0.3 * rand(slots, H, CHUNK) * valid[..., 0], eg * valid[:, :, :1, 0],
    )  # fmt: skip
    state = None if initial is None else rand(N, H, HEAD_DIM, HEAD_DIM).to(initial)
    v = rand(B, T, H, HEAD_DIM).bfloat16()
    if cu is not None:
        v[:, sum(lengths) :] = torch.nan
    return Case(factors, v, N, state, cu)


# ---------------------------------------------------------------- inputs of the other stages
def make_inputs(
    regime, *, lengths, dense=False, g="bf16", gate=None, beta="bf16", l2norm=True, H=2
):
    """Inputs on the GPU (dense: equal lengths as a batch), and v, initial, dfinal.  gate "log": the
    regime's gate, evaluated.
    """
    p = make_problem(regime, H=H, lengths=lengths, device=DEVICE)
    N = len(lengths)
    raw, A_log, dt_bias, kind = p.g_raw, p.A_log, p.dt_bias, p.gate
    if gate == "log":
        wide = (t.double() for t in (p.g_raw, p.A_log, p.dt_bias))
        raw, kind = reference.gate(*wide, p.lower_bound, p.gate), "log"
        A_log = dt_bias = None
    raw = raw.to(torch.bfloat16 if g == "bf16" else torch.float32)
    logits = p.beta.to(torch.bfloat16 if beta == "bf16" else torch.float32)
    k = p.k if l2norm else 0.05 * p.k
    rows = lambda t: t.view(N, -1, *t.shape[1:]) if dense else t[None]  # noqa: E731
    x = reference_stages.Inputs(
        *(rows(t) for t in (p.q, k, p.do, raw, logits)),
        A_log,
        dt_bias,
        None if dense else p.cu_seqlens,
        gate=kind,
        scale=p.scale,
        l2norm=l2norm,
    )
    return x, rows(p.v), p.initial_state, p.dfinal_state


def poisoned(*shape, dtype):
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def records_shape(kind, slots, H):
    """Shape of the records of a kind."""
    return slots, H, record_rows(kind), HEAD_DIM


def packed(kind, tensors):
    """Records that hold the tensors of one kind; NaN where they have none."""
    slots, H = tensors[0].shape[:2]
    records = poisoned(*records_shape(kind, slots, H), dtype=torch.bfloat16)
    found = views(kind, records)
    for name, x in tensors._asdict().items():
        if name in found:
            found[name].copy_(x)
    return records


# ---------------------------------------------------------------- comparing
def assert_close(got, expected, what):
    """Written exactly where the oracle writes, and close to it there."""
    missing = expected.isnan()
    assert torch.equal(got.isnan(), missing), f"{what}: written in other places"
    got, expected = got.double()[~missing], expected[~missing]
    error = ((got - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    print(f"{what}: {error:.2e}")
    assert error < SCAN_TOLERANCE, f"{what}: relative error {error:.2e}"


def same(a, b) -> bool:
    """Whether outputs that both have are equal, in what was not written, too."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in pairs)
