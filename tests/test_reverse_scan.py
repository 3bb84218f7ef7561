"""The reverse scan: its oracle against autograd, what the compiler made of the kernel (no GPU), and
its results on the GPU against float64.
"""

import functools
from typing import NamedTuple

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
from kda_cute import reference_stages, report
from kda_cute.dtypes import NAMES
from kda_cute.factors import CHUNK, HEAD_DIM, Factors
from kda_cute.kernels import scan
from kda_cute.kernels.scan import ReverseConfig
from kda_cute.layouts import variants

CONFIGS = [
    ReverseConfig(2, False, "none", True),
    ReverseConfig(2, True, "f32", True),
    ReverseConfig(1, True, "bf16", True),
    ReverseConfig(1, False, "none", False),
    ReverseConfig(2, True, "bf16", False, every_lane=True),
]
spec = functools.partial(stages.spec, scan)


# ---------------------------------------------------------------- the oracle
def with_gradient(case, *, seed=1):
    """(do with NaN in tokens of no sequence, as bf16; the case's state stands for dfinal)."""
    device = case.v.device
    generator = torch.Generator(device).manual_seed(seed)
    do = torch.randn(case.v.shape, generator=generator, device=device).bfloat16()
    if case.cu_seqlens is not None:
        do[:, int(case.cu_seqlens[-1]) :] = torch.nan
    return do


@pytest.mark.parametrize("initial", (None, torch.float64), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_oracle_is_the_gradient(shape, initial):
    """Of the scan's v and of its first state."""
    case = make_case(**SHAPES[shape], initial=initial, device="cpu")
    f = Factors(*(x.double() for x in case.factors))
    do = with_gradient(case).double()
    v = case.v.double().requires_grad_()
    first = torch.randn(case.N, f.kd.shape[1], HEAD_DIM, HEAD_DIM, dtype=torch.float64)
    first.requires_grad_()
    got = reference_stages.scan(f, v, first, case.cu_seqlens)
    loss = (got.o * do)[~got.o.isnan()].sum()
    if initial is not None:
        loss = loss + (got.final * case.initial).sum()
    loss.backward()
    expected = reference_stages.reverse_scan(f, do, case.initial, case.cu_seqlens)
    torch.testing.assert_close(expected.dinitial, first.grad)
    owned = ~expected.dv.isnan()
    assert torch.equal(owned, ~v.isnan())
    torch.testing.assert_close(expected.dv[owned], v.grad[owned])


def test_oracle_of_states():
    """dS of the state leaving chunk c is what a sequence that begins after it would pass on."""
    case = make_case(B=1, H=1, initial=torch.float64, device="cpu")
    do = with_gradient(case).double()
    whole = reference_stages.reverse_scan(case.factors, do, case.initial)
    for c in range(whole.dstates.shape[0]):
        rest = Factors(*(x[c + 1 :] for x in case.factors))
        part = reference_stages.reverse_scan(rest, do[:, CHUNK * (c + 1) :], case.initial)
        torch.testing.assert_close(whole.dstates[c], part.dinitial[0])


# ---------------------------------------------------------------- what the compiler made of it
objects = stages.compiled_now(scan, CONFIGS)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_kernel_keeps_its_budgets(objects, config):
    measured = report.measure(spec(config), objects[config])
    assert not measured.broken()
    assert (measured.stack, measured.spills) == (0, 0)
    assert sum(measured.opcodes.values()) == 20
    assert sum(row.static for row in scan.mma_account(config)) == 20
    (kernel,) = kernel_compile.report(objects[config])
    waits = kernel.sass.count("WARPGROUP.DEPBAR")
    assert waits == 3, "a wait that nobody wrote: ptxas orders MMAs and registers itself"


@pytest.mark.parametrize("groups", (1, 2))
def test_plan_fits(groups):
    plan = variants.plan("scan", "default", "bf16", groups=groups, reverse=True)
    assert plan.total_bytes <= plan.limit == 232_448
    assert plan["kd"].stages >= 2
    assert plan["do"].stages == groups * plan["kd"].stages
    assert "v" not in plan and "o" not in plan


def test_directions_are_told_apart():
    configs = scan.Config(2, True, "f32", True, False), ReverseConfig(2, True, "f32", True)
    assert len({kernel_compile.cache_key(spec(config)) for config in configs}) == 2
    assert len({report.label(config) for config in configs}) == 2


# ---------------------------------------------------------------- on the GPU
class Results(NamedTuple):
    """As the kernel writes them into NaN."""

    dinitial: torch.Tensor
    dchunk: torch.Tensor  # records of dstates
    dv: torch.Tensor


def allocate(case, *, final=True, guard=0) -> Results:
    """Outputs; guard: entries before and behind, chunks of them for tokens."""
    slots, H = case.factors.kd.shape[:2]
    slots, N = slots + 2 * guard, case.N + 2 * guard
    B, T = case.v.shape[:2]
    return Results(
        poisoned(N, H, HEAD_DIM, HEAD_DIM, dtype=torch.float32) if final else None,
        poisoned(*records_shape("dchunk", slots, H), dtype=torch.bfloat16),
        poisoned(B, T + 2 * CHUNK * guard, H, HEAD_DIM, dtype=torch.bfloat16),
    )


def launch(case, do, dfinal, cu_seqlens, out, groups):
    dtype = None if dfinal is None else dfinal.dtype
    config = ReverseConfig(groups, cu_seqlens is not None, NAMES[dtype], out.dinitial is not None)
    factors = packed("backward factors", case.factors)
    kernel = kernel_compile.load(spec(config))
    kernel(factors, do, dfinal, cu_seqlens, out.dv, out.dchunk, out.dinitial)


def run(case, do, groups, *, final=True, keys_first=False) -> Results:
    """keys_first: first and last states in memory are [K, V]."""
    out, dfinal = allocate(case, final=final), case.initial
    if keys_first:
        out = out._replace(dinitial=out.dinitial.transpose(2, 3))
        dfinal = None if dfinal is None else dfinal.transpose(2, 3).contiguous().transpose(2, 3)
    launch(case, do, dfinal, case.cu_seqlens, out, groups)
    return out


def check(case, do, results):
    expected = reference_stages.reverse_scan(case.factors, do, case.initial, case.cu_seqlens)
    got = {"dinitial": results.dinitial, "dstates": results.dchunk, "dv": results.dv}
    for name, x in got.items():
        assert_close(x, getattr(expected, name), name)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize("initial", (None, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_reference(shape, initial, groups):
    case = make_case(**SHAPES[shape], initial=initial)
    do = with_gradient(case)
    check(case, do, run(case, do, groups))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize("initial", (None, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", ("dense", "packed"))
def test_options_do_not_change_bits(shape, initial, groups):
    """Repeated, dinitial not wanted, states with keys first in memory: the same results."""
    case = make_case(**SHAPES[shape], initial=initial)
    do = with_gradient(case)
    results = run(case, do, groups)
    for _ in range(3):
        assert same(results, run(case, do, groups))
    assert same(results, run(case, do, groups, final=False))
    assert same(results, run(case, do, groups, keys_first=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_groups_agree(shape):
    case = make_case(**SHAPES[shape], initial=torch.float32)
    do = with_gradient(case)
    assert same(run(case, do, 1), run(case, do, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", (1, 2))
def test_many_chunks(groups):
    case = make_case(B=3, T=2048 + 33, H=5, initial=torch.float32, coupling=0.05)
    do = with_gradient(case)
    check(case, do, run(case, do, groups))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", (1, 2))
def test_neighbours_do_not_matter(groups):
    """NaN in one sequence's do stays there."""
    case = make_case(lengths=PACKED, initial=torch.float32)
    do = with_gradient(case)
    clean = run(case, do, groups)
    bounds = case.cu_seqlens.tolist()
    for n, length in enumerate(PACKED):
        bad = do.clone()
        bad[:, bounds[n] : bounds[n + 1]] = torch.nan
        found = run(case, bad, groups)
        for other in range(len(PACKED)):
            if other != n:
                first = bounds[other] // CHUNK + other
                own = slice(first, first + -(-PACKED[other] // CHUNK))
                assert torch.equal(found.dchunk[own], clean.dchunk[own])
                assert torch.equal(found.dinitial[other], clean.dinitial[other])
                tokens = slice(bounds[other], bounds[other + 1])
                assert torch.equal(found.dv[:, tokens], clean.dv[:, tokens])
        assert not length or found.dinitial[n].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("groups", (1, 2))
def test_strided_do_and_offsets(groups):
    """do and dv inside wider tensors, cu_seqlens as the low words of int64."""
    case = make_case(lengths=PACKED, initial=torch.float32)
    do = with_gradient(case)
    H = do.shape[2]
    buffer, wide = (
        poisoned(1, do.shape[1], 2 * H, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)
    )
    buffer[:, :, H:] = do
    low = case.cu_seqlens.long().view(torch.int32)[::2]
    out = allocate(case)._replace(dv=wide[:, :, H:])
    launch(case, buffer[:, :, H:], case.initial, low, out, groups)
    assert same(out, run(case, do, groups)) and wide[:, :, :H].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("groups", (1, 2))
def test_offsets_out_of_range(groups):
    """Contradictory offsets lead nowhere outside the tensors."""
    case = make_case(lengths=PACKED, initial=torch.float32)
    case = case._replace(factors=Factors(*(x.nan_to_num(1.0) for x in case.factors)))
    do = with_gradient(case)
    low, high = -(2**31), 2**31 - 1
    for bounds in ([high, low, high, 0, high, 17], [low, high, 5, low, 10**9, high], [7] * 6):
        cu = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
        out = allocate(case, guard=1)
        inside = Results(out.dinitial[1:-1], out.dchunk[1:-1], out.dv[:, CHUNK:-CHUNK])
        launch(case, do, case.initial, cu, inside, groups)
        torch.cuda.synchronize()
        for x in (out.dinitial, out.dchunk):
            assert x[[0, -1]].isnan().all()
        assert out.dv[:, :CHUNK].isnan().all() and out.dv[:, -CHUNK:].isnan().all()
