"""The scalar baseline against the float64 reference, on a GPU."""

import pytest
import torch

from kda_cute import reference
from perf import run
from perf.scalar_recurrence import scalar_recurrence
from perf.shapes import Shape

pytestmark = pytest.mark.gpu

SCALAR = run.Candidate("scalar", "any", scalar_recurrence, "scalar_recurrence", 1)
SHAPES = [
    Shape("full", (64,), 3),
    Shape("tail", (37,), 2),
    Shape("equal", (35, 35), 2),
    Shape("short", (1,), 1),
    Shape("varlen", (5, 0, 48, 17, 1), 2),
]


def problem(shape, state=None, beta=torch.float32, offsets=torch.int32):
    inputs = run.make_inputs(shape, seed=shape.T)
    if state is not None:
        final = torch.randn(shape.N, shape.H, 128, 128, device="cuda").to(state)
        inputs = inputs._replace(dfinal_state=final)
    if inputs.cu_seqlens is not None:
        inputs = inputs._replace(cu_seqlens=inputs.cu_seqlens.to(offsets))
    return inputs._replace(beta=inputs.beta.to(beta))


def assert_matches(grads, inputs):
    expected = reference.bwd_recurrence(*inputs, dtype=torch.float64)
    dtypes = {"dv": torch.bfloat16}
    if inputs.dfinal_state is not None:
        dtypes["dinitial_state"] = inputs.dfinal_state.dtype
    for name, error in run.errors(grads, expected, inputs.workspace).items():
        got, dtype = getattr(grads, name), dtypes.get(name, torch.float32)
        assert got.dtype == dtype
        assert got.shape == getattr(expected, name).shape
        assert error <= (1e-4 if dtype == torch.float32 else 4e-3), (name, error)


def spoil_past_the_end(inputs, shape):
    """Fill the workspace's rows past each sequence's end with NaN."""
    first = 0
    for length in shape.lengths:
        last = first + length // 16
        if length % 16:
            for name in ("kd", "qd", "kr", "ki", "inv", "mqk"):
                getattr(inputs.workspace, name)[:, last, length % 16 :] = float("nan")
        first += -(-length // 16)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("state", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_matches_the_reference(shape, state, recompute):
    inputs = problem(shape, state)
    assert_matches(scalar_recurrence(*inputs, recompute=recompute), inputs)


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
@pytest.mark.parametrize("beta", [torch.bfloat16, torch.float32])
def test_offset_and_beta_dtypes(beta, offsets):
    inputs = problem(SHAPES[-1], torch.float32, beta, offsets)
    assert_matches(scalar_recurrence(*inputs), inputs)


@pytest.mark.parametrize("recompute", [True, False])
def test_rows_past_the_end_are_read_and_written_as_zero(recompute):
    shape = SHAPES[-1]
    inputs = problem(shape, torch.float32)
    spoil_past_the_end(inputs, shape)
    grads = scalar_recurrence(*inputs, recompute=recompute)
    first = 0
    for length in shape.lengths:
        last = first + length // 16
        if length % 16:
            for name in ("dkd", "dqd", "dki", "dkr", "dbeta"):
                assert not getattr(grads, name)[:, last, length % 16 :].any()
        first += -(-length // 16)
    for tensor in grads:
        assert tensor.isfinite().all()


def test_dbeta_where_beta_is_exactly_zero():
    inputs = problem(SHAPES[1])
    inputs.beta[::3] = -200.0
    grads = scalar_recurrence(*inputs)
    expected = reference.bwd_recurrence(*inputs, dtype=torch.float64)
    torch.testing.assert_close(grads.dbeta.double(), expected.dbeta, rtol=1e-4, atol=1e-4)


def test_offsets_that_contradict_the_workspace_stay_in_bounds():
    inputs = problem(SHAPES[-1], torch.float32)
    wild = torch.tensor([-7, 10**6, 3, 2, 40, 10**9], dtype=torch.int32, device="cuda")
    scalar_recurrence(*inputs._replace(cu_seqlens=wild))
    torch.cuda.synchronize()


def test_gate_accepts_it():
    shape = SHAPES[-1]
    inputs = problem(shape)
    heads = run.some_heads(shape.H)
    expected = reference.bwd_recurrence(*run.head_inputs(inputs, heads), dtype=torch.float64)
    _, wrong = run.gate([SCALAR], inputs, expected, heads, shape)
    assert not wrong
    assert not run.foreign_kernels(SCALAR, inputs)
