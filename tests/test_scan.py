"""The scan: what the compiler made of it (no GPU), and its results on the GPU against float64."""

import functools
from typing import NamedTuple

import pytest
import torch

from kda_cute import compile as kernel_compile
from kda_cute import reference_stages
from kda_cute.factors import CHUNK, HEAD_DIM, Factors, record_rows, slot_count, views
from kda_cute.kernels import scan
from kda_cute.kernels.scan import Config
from kda_cute.layouts import variants

DEVICE = "cuda"
TOLERANCE = 6e-3  # relative, Frobenius
DENSE_T = 64 * 5 + 17
PACKED = (130, 0, 64, 1, 200)
CONFIGS = [
    Config(2, False, "none", True, True),
    Config(2, True, "f32", True, False),
    Config(1, True, "bf16", True, True),
    Config(1, False, "none", False, False),
    Config(2, True, "bf16", True, True, every_lane=True),
]


def spec(config):
    return kernel_compile.KernelSpec("scan", config, functools.partial(scan.trace, config))


# ---------------------------------------------------------------- what the compiler made of it
@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """{config: object file}, compiled now."""
    folder = tmp_path_factory.mktemp("kernels")
    specs = [spec(config) for config in CONFIGS]
    paths = kernel_compile.object_files(specs, folder=folder, workers=2)
    return dict(zip(CONFIGS, paths, strict=True))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_kernel_keeps_its_budgets(objects, config):
    (kernel,) = kernel_compile.report(objects[config])
    assert (kernel.stack, kernel.spills) == (0, 0)
    assert kernel.registers <= (168 if config.groups == 2 else 255)
    assert kernel.ops["HGMMA"] == sum(row.static for row in scan.mma_account(config)) == 24
    waits = kernel.sass.count("WARPGROUP.DEPBAR")
    assert waits == 5, "a wait that nobody wrote: ptxas orders MMAs and registers itself"
    assert kernel.ops["USETMAXREG"] == (2 if config.groups == 2 else 0)


@pytest.mark.parametrize("save", (False, True))
@pytest.mark.parametrize("groups", (1, 2))
def test_plan_fits(groups, save):
    plan = variants.plan("scan", "default", "bf16", groups=groups, save=save)
    assert plan.total_bytes <= plan.limit == 232_448
    assert plan["w"].stages >= 2
    assert plan["u"].stages == groups * plan["w"].stages
    assert ("states" in plan) == ("U" in plan) == save


def test_reference_by_tokens():
    """The chunked oracle on factors made of a plain delta rule without gates, against the rule."""
    torch.manual_seed(0)
    T, H = 100, 2
    q, k, v = (torch.randn(T, H, HEAD_DIM, dtype=torch.float64) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    slots, eye = slot_count(T, 1, False), torch.eye(CHUNK, dtype=torch.float64)
    f = Factors(
        *(torch.zeros(slots, H, CHUNK, HEAD_DIM, dtype=torch.float64) for _ in range(4)),
        torch.zeros(slots, H, CHUNK, CHUNK, dtype=torch.float64),
        torch.zeros(slots, H, CHUNK, dtype=torch.float64),
        torch.ones(slots, H, HEAD_DIM, dtype=torch.float64),
    )
    for c in range(slots):
        qc, kc, vc = (
            torch.nn.functional.pad(x[CHUNK * c :][:CHUNK], (0, 0, 0, 0, 0, max(0, CHUNK * (c + 1) - T)))
            .transpose(0, 1)
            for x in (q, k, v)
        )  # fmt: skip
        inverse = torch.linalg.inv(eye + (kc @ kc.transpose(1, 2)).tril(-1))
        f.w[c], f.u[c], f.kr[c], f.qd[c] = inverse @ kc, inverse @ vc, kc, qc
        f.mqk[c] = (qc @ kc.transpose(1, 2)).tril(-1)
        f.qk[c] = (qc * kc).sum(-1)
    got = reference_stages.scan(f, 1, T)
    S = torch.zeros(H, HEAD_DIM, HEAD_DIM, dtype=torch.float64)  # [H, K, V]
    for t in range(T):
        delta = v[t] - torch.einsum("hk,hkv->hv", k[t], S)
        S = S + k[t][..., None] * delta[:, None]
        torch.testing.assert_close(got.o[0, t], torch.einsum("hk,hkv->hv", q[t], S))
    torch.testing.assert_close(got.final[0], S.transpose(1, 2))


# ---------------------------------------------------------------- on the GPU
class Case(NamedTuple):
    """Factors of B sequences of T tokens, or of packed ones."""

    factors: Factors
    B: int
    T: int
    N: int
    initial: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


def make_case(
    *, B=2, T=DENSE_T, lengths=None, spare=0, H=3, initial=None, coupling=0.1, device=DEVICE
) -> Case:
    """Random factors, 0 in rows that no token has; slots that no chunk owns hold NaN.  `spare`
    tokens follow the last packed sequence.  coupling: the size of w and kr; rounding errors of S grow
    from chunk to chunk at 0.1, and fade at half of that.
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
        wide(coupling), wide(coupling), wide(0.1), wide(1.0), square.bfloat16(),
        0.3 * rand(slots, H, CHUNK) * valid[..., 0], eg * valid[:, :, :1, 0],
    )  # fmt: skip
    state = None if initial is None else rand(N, H, HEAD_DIM, HEAD_DIM).to(initial)
    return Case(factors, B, T, N, state, cu)


def poisoned(*shape, dtype):
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def chunk_records(slots, H):
    """Shape of the records of states and U, or of their gradients."""
    return slots, H, record_rows("chunk"), HEAD_DIM


def packed(kind, tensors):
    """Records that hold the tensors of one kind; NaN where they have none."""
    slots, H = tensors[0].shape[:2]
    records = poisoned(slots, H, record_rows(kind), HEAD_DIM, dtype=torch.bfloat16)
    found = views(kind, records)
    for name, x in tensors._asdict().items():
        if name in found:
            found[name].copy_(x)
    return records


def run(case, groups, *, save=True, keys_first=False, layout="default"):
    """(o, final, states, U) as the kernel writes them into NaN; keys_first: first and last states
    in memory are [K, V].
    """
    names = {None: "none", torch.bfloat16: "bf16", torch.float32: "f32"}
    initial = case.initial
    dtype = None if initial is None else initial.dtype
    config = Config(groups, case.cu_seqlens is not None, names[dtype], True, save, layout)
    slots, H = case.factors.w.shape[:2]
    o = poisoned(case.B, case.T, H, HEAD_DIM, dtype=torch.bfloat16)
    final = poisoned(case.N, H, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
    saved = poisoned(*chunk_records(slots, H), dtype=torch.bfloat16) if save else None
    if keys_first:
        final = final.transpose(2, 3)
        initial = None if initial is None else initial.transpose(2, 3).contiguous().transpose(2, 3)
    kernel = kernel_compile.load(spec(config))
    kernel(packed("factors", case.factors), initial, case.cu_seqlens, o, saved, final)
    return (o, final, *(views("chunk", saved).values() if save else (None, None)))


def assert_close(got, expected, what):
    """Written exactly where the oracle writes, and close to it there."""
    missing = expected.isnan()
    assert torch.equal(got.isnan(), missing), f"{what}: written in other places"
    got, expected = got.double()[~missing], expected[~missing]
    error = ((got - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    print(f"{what}: {error:.2e}")
    assert error < TOLERANCE, f"{what}: relative error {error:.2e}"


def check(case, results):
    expected = reference_stages.scan(case.factors, case.B, case.T, case.initial, case.cu_seqlens)
    U = case.factors.u.double() - case.factors.w.double() @ expected.states.mT
    names = ("o", "final", "states", "U")
    for what, got, ref in zip(names, results, (*expected, U), strict=True):
        if got is not None:
            assert_close(got, ref, what)


SHAPES = {
    "dense": {},
    "one full chunk": {"B": 1, "T": 64},
    "one token": {"B": 3, "T": 1},
    "packed": {"lengths": PACKED},
    "packed, tokens left over": {"lengths": PACKED, "spare": 70},
}


@pytest.mark.gpu
@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize("initial", (None, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_reference(shape, initial, groups):
    case = make_case(**SHAPES[shape], initial=initial)
    check(case, run(case, groups))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize("initial", (None, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", ("dense", "packed"))
def test_options_do_not_change_bits(shape, initial, groups):
    """Repeated, states not saved, states with keys first in memory: the same results."""
    case = make_case(**SHAPES[shape], initial=initial)
    results = run(case, groups)
    for other in (
        *(run(case, groups) for _ in range(3)),
        run(case, groups, save=False),
        run(case, groups, keys_first=True),
    ):
        for a, b in zip(results, other, strict=True):
            assert b is None or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.gpu
def test_groups_agree():
    case = make_case(initial=torch.float32, H=7)
    for a, b in zip(run(case, 1), run(case, 2), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", (1, 2))
def test_many_chunks(groups):
    case = make_case(B=3, T=2048 + 33, H=5, initial=torch.float32, coupling=0.05)
    check(case, run(case, groups))


@pytest.mark.gpu
def test_strided_outputs_and_offsets():
    """o inside a wider tensor, cu_seqlens as the low words of int64."""
    case = make_case(lengths=PACKED, initial=torch.float32)
    o, final, *_ = run(case, 2)
    slots, H = case.factors.w.shape[:2]
    saved = poisoned(*chunk_records(slots, H), dtype=torch.bfloat16)
    buffer = poisoned(1, case.T, 2 * H, HEAD_DIM, dtype=torch.bfloat16)
    low = case.cu_seqlens.long().view(torch.int32)[::2]
    kernel = kernel_compile.load(spec(Config(2, True, "f32", True, True)))
    records = packed("factors", case.factors)
    kernel(records, case.initial, low, buffer[:, :, H:], saved, final)
    assert torch.equal(buffer[:, :, H:], o) and buffer[:, :, :H].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("groups", (1, 2))
def test_offsets_out_of_range(groups):
    """Contradictory offsets lead nowhere outside the tensors."""
    case = make_case(lengths=PACKED, initial=torch.float32)
    low, high = -(2**31), 2**31 - 1
    for bounds in ([high, low, high, 0, high, 17], [low, high, 5, low, 10**9, high], [7] * 6):
        cu = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
        slots, H = case.factors.w.shape[:2]
        guard = 64
        rows = poisoned(1, case.T + 2 * guard, H, HEAD_DIM, dtype=torch.bfloat16)
        saved = poisoned(*chunk_records(slots + 2, H), dtype=torch.bfloat16)
        final = poisoned(case.N + 2, H, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
        factors = Factors(*(x.nan_to_num(1.0) for x in case.factors))
        kernel = kernel_compile.load(spec(Config(groups, True, "f32", True, True)))
        outputs = rows[:, guard:-guard], saved[1:-1], final[1:-1]
        kernel(packed("factors", factors), case.initial, cu, *outputs)
        torch.cuda.synchronize()
        assert rows[:, :guard].isnan().all() and rows[:, -guard:].isnan().all()
        for x in (saved, final):
            assert x[[0, -1]].isnan().all()
