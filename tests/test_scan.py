"""The scan: what the compiler made of it (no GPU), and its results on the GPU against float64."""

import functools

import pytest
import stages
import torch
from stages import (
    DEVICE,
    PACKED,
    SHAPES,
    assert_close,
    make_case,
    packed,
    poisoned,
    records_shape,
    same,
)

from kda_cute import compile as kernel_compile
from kda_cute import reference_stages
from kda_cute.dtypes import NAMES
from kda_cute.factors import CHUNK, HEAD_DIM, Factors, slot_count, views
from kda_cute.kernels import scan
from kda_cute.kernels.scan import Config
from kda_cute.layouts import variants

CONFIGS = [
    Config(2, False, "none", True, True),
    Config(2, True, "f32", True, False),
    Config(1, True, "bf16", True, True),
    Config(1, False, "none", False, False),
    Config(2, True, "bf16", True, True, every_lane=True),
]
spec = functools.partial(stages.spec, scan)


# ---------------------------------------------------------------- what the compiler made of it
objects = stages.compiled_now(scan, CONFIGS)


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
    assert plan["kd"].stages >= 2
    assert plan["v"].stages == groups * plan["kd"].stages
    assert ("states" in plan) == ("X" in plan) == save


def test_reference_by_tokens():
    """The chunked oracle on factors made of a plain delta rule without gates, against the rule."""
    torch.manual_seed(0)
    T, H = 100, 2
    q, k, v = (torch.randn(T, H, HEAD_DIM, dtype=torch.float64) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    slots, eye = slot_count(T, 1, False), torch.eye(CHUNK, dtype=torch.float64)
    f = Factors(
        *(torch.zeros(slots, H, CHUNK, HEAD_DIM, dtype=torch.float64) for _ in range(3)),
        torch.zeros(slots, H, CHUNK, CHUNK, dtype=torch.float64),
        torch.zeros(slots, H, CHUNK, dtype=torch.float64),
        torch.ones(slots, H, HEAD_DIM, dtype=torch.float64),
    )
    for c in range(slots):
        qc, kc = (
            torch.nn.functional.pad(x[CHUNK * c :][:CHUNK], (0, 0, 0, 0, 0, max(0, CHUNK * (c + 1) - T)))
            .transpose(0, 1)
            for x in (q, k)
        )  # fmt: skip
        inverse = torch.linalg.inv(eye + (kc @ kc.transpose(1, 2)).tril(-1))
        f.kd[c], f.z[c], f.qd[c] = kc, inverse.mT @ kc, qc
        whole = (qc @ kc.transpose(1, 2)).tril() @ inverse
        f.p[c], f.qk[c] = whole.tril(-1), torch.diagonal(whole, dim1=1, dim2=2)
    got = reference_stages.scan(f, v[None])
    S = torch.zeros(H, HEAD_DIM, HEAD_DIM, dtype=torch.float64)  # [H, K, V]
    for t in range(T):
        delta = v[t] - torch.einsum("hk,hkv->hv", k[t], S)
        S = S + k[t][..., None] * delta[:, None]
        torch.testing.assert_close(got.o[0, t], torch.einsum("hk,hkv->hv", q[t], S))
    torch.testing.assert_close(got.final[0], S.transpose(1, 2))


# ---------------------------------------------------------------- on the GPU
def run(case, groups, *, save=True, keys_first=False, layout="default"):
    """(o, final, states, X) as the kernel writes them into NaN; keys_first: first and last states
    in memory are [K, V].
    """
    initial = case.initial
    dtype = None if initial is None else initial.dtype
    config = Config(groups, case.cu_seqlens is not None, NAMES[dtype], True, save, layout)
    slots, H = case.factors.kd.shape[:2]
    o = poisoned(*case.v.shape, dtype=torch.bfloat16)
    final = poisoned(case.N, H, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
    saved = poisoned(*records_shape("chunk", slots, H), dtype=torch.bfloat16) if save else None
    if keys_first:
        final = final.transpose(2, 3)
        initial = None if initial is None else initial.transpose(2, 3).contiguous().transpose(2, 3)
    kernel = kernel_compile.load(spec(config))
    kernel(packed("factors", case.factors), case.v, initial, case.cu_seqlens, o, saved, final)
    return (o, final, *(views("chunk", saved).values() if save else (None, None)))


def check(case, results):
    expected = reference_stages.scan(case.factors, case.v, case.initial, case.cu_seqlens)
    for what, got, ref in zip(expected._fields, results, expected, strict=True):
        if got is not None:
            assert_close(got, ref, what)


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
        assert same(results, other)


@pytest.mark.gpu
def test_groups_agree():
    case = make_case(initial=torch.float32, H=7)
    assert same(run(case, 1), run(case, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", (1, 2))
def test_many_chunks(groups):
    case = make_case(B=3, T=2048 + 33, H=5, initial=torch.float32, coupling=0.05)
    check(case, run(case, groups))


@pytest.mark.gpu
def test_strides_and_offsets():
    """v and o inside wider tensors, cu_seqlens as the low words of int64."""
    case = make_case(lengths=PACKED, initial=torch.float32)
    o, final, *_ = run(case, 2)
    slots, H = case.factors.kd.shape[:2]
    saved = poisoned(*records_shape("chunk", slots, H), dtype=torch.bfloat16)
    buffer = poisoned(1, case.v.shape[1], 2 * H, HEAD_DIM, dtype=torch.bfloat16)
    v = torch.cat([torch.full_like(case.v, torch.nan), case.v], 2)[:, :, H:]
    low = case.cu_seqlens.long().view(torch.int32)[::2]
    kernel = kernel_compile.load(spec(Config(2, True, "f32", True, True)))
    records = packed("factors", case.factors)
    kernel(records, v, case.initial, low, buffer[:, :, H:], saved, final)
    assert torch.equal(buffer[:, :, H:], o) and buffer[:, :, :H].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("groups", (1, 2))
def test_offsets_out_of_range(groups):
    """Contradictory offsets lead nowhere outside the tensors."""
    case = make_case(lengths=PACKED, initial=torch.float32)
    low, high = -(2**31), 2**31 - 1
    for bounds in ([high, low, high, 0, high, 17], [low, high, 5, low, 10**9, high], [7] * 6):
        cu = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
        slots, H = case.factors.kd.shape[:2]
        guard = 64
        rows = poisoned(1, case.v.shape[1] + 2 * guard, H, HEAD_DIM, dtype=torch.bfloat16)
        saved = poisoned(*records_shape("chunk", slots + 2, H), dtype=torch.bfloat16)
        final = poisoned(case.N + 2, H, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
        factors = Factors(*(x.nan_to_num(1.0) for x in case.factors))
        kernel = kernel_compile.load(spec(Config(groups, True, "f32", True, True)))
        outputs = rows[:, guard:-guard], saved[1:-1], final[1:-1]
        kernel(packed("factors", factors), case.v, case.initial, cu, *outputs)
        torch.cuda.synchronize()
        assert rows[:, :guard].isnan().all() and rows[:, -guard:].isnan().all()
        for x in (saved, final):
            assert x[[0, -1]].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("groups", (1, 2))
def test_neighbours_do_not_matter(groups):
    """NaN in one sequence's v stays there."""
    case = make_case(lengths=PACKED, initial=torch.float32)
    clean, bounds = run(case, groups), case.cu_seqlens.tolist()
    for n, length in enumerate(PACKED):
        v = case.v.clone()
        v[:, bounds[n] : bounds[n + 1]] = torch.nan
        found = run(case._replace(v=v), groups)
        for other in range(len(PACKED)):
            if other != n:
                tokens = slice(bounds[other], bounds[other + 1])
                assert torch.equal(found[0][:, tokens], clean[0][:, tokens])
                assert torch.equal(found[1][other], clean[1][other])
        assert not length or found[1][n].isnan().any()
