"""The references against each other, in float64, and what the accuracy gate notices."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_cute import reference, varlen
from kda_cute.accuracy import recurrence as accuracy
from kda_cute.accuracy.regimes import make_problem
from kda_cute.workspace import CHUNK

GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dinitial_state")
RAGGED = (1, 15, 16, 17, 31, 63, 0, 37)
F64 = torch.float64


def double(problem):
    """The problem with every tensor but cu_seqlens in float64."""
    return problem._replace(
        **{
            name: x.double()
            for name, x in problem._asdict().items()
            if isinstance(x, torch.Tensor) and name != "cu_seqlens"
        }
    )


def in_domain(problem, kind):
    """The same problem with another kind of gate, inside level 1's domain of -80 per chunk."""
    if kind == "log":
        g = reference.gate(problem.g_raw, problem.A_log, problem.dt_bias, kind="safe")
        return problem._replace(g_raw=g, gate="log")
    if kind == "softplus":  # softplus(x) <= 4 for these x, times exp(A_log) <= 1.2
        g_raw = (problem.g_raw - problem.dt_bias).clamp(max=3.9)
        return problem._replace(g_raw=g_raw, A_log=0.2 * problem.A_log, gate="softplus")
    return problem


def oracle_gradients(p, num_seqs=None):
    """(o, final state, {name: gradient}) of the token recurrence by autograd; p in float64."""
    leaves = {
        name: getattr(p, name).detach().requires_grad_()
        for name in ("q", "k", "v", "g_raw", "beta", "A_log", "dt_bias", "initial_state")
    }
    x = p._replace(**leaves)
    o, state = reference.token_recurrence(*x.inputs(), **x.options(), num_seqs=num_seqs)
    loss = (o * p.do).sum() + (state * p.dfinal_state).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return o.detach(), state.detach(), dict(zip(GRADIENTS, grads, strict=True))


def staged_gradients(p, num_seqs=None, dtype=F64):
    """(Prepared, RecurrenceGrads, Gradients), the recurrence and finish in float64."""
    prepared = reference.prepare(*p.inputs(), **p.options(), num_seqs=num_seqs, dtype=dtype)
    grads = reference.bwd_recurrence(
        p.do, p.v, p.beta, prepared.workspace, p.dfinal_state, p.cu_seqlens, num_seqs
    )
    return prepared, grads, reference.finish(grads, prepared)


def assert_gradients_match(p, tolerance, num_seqs=None):
    _, state, expected = oracle_gradients(p, num_seqs)
    prepared, _, got = staged_gradients(p, num_seqs)
    errors = {"final_state": accuracy.rel_error(prepared.final_state, state)}
    for name, ref in expected.items():
        x = getattr(got, name)
        if ref is None:
            assert x is None or not x.any(), name
            continue
        terms = getattr(got, name + "_terms", None)
        errors[name] = accuracy.rel_error(x, ref, 0.0 if terms is None else terms.norm())
    print({name: f"{e:.1e}" for name, e in errors.items()})
    assert all(e <= tolerance for e in errors.values()), errors
    return errors


@pytest.mark.parametrize("chunk_size", (1, 2, 7, 16, 64, 300))
@pytest.mark.parametrize("regime", ("typical+states", "mixed+states", "ub_burst+states"))
def test_chunk_form_equals_tokens(regime, chunk_size):
    p = double(make_problem(regime, T=80))
    o, state = reference.token_recurrence(*p.inputs(), **p.options())
    o_chunk, state_chunk = reference.chunk_forward(
        *p.inputs(), **p.options(), chunk_size=chunk_size
    )
    assert accuracy.rel_error(o_chunk, o) < 1e-12
    assert accuracy.rel_error(state_chunk, state) < 1e-12


def test_chunk_form_is_exact_for_any_gate():
    p = double(make_problem("typical+states", T=40))
    g = -torch.rand(p.g_raw.shape, dtype=F64)
    g[7], g[20, :, ::3], g[33] = -1000.0, -1e4, 0.0
    p = p._replace(g_raw=g, gate="log")
    o, state = reference.token_recurrence(*p.inputs(), **p.options())
    o_chunk, state_chunk = reference.chunk_forward(*p.inputs(), **p.options(), chunk_size=32)
    assert accuracy.rel_error(o_chunk, o) < 1e-11
    assert accuracy.rel_error(state_chunk, state) < 1e-11


@pytest.mark.parametrize("kind", ("log", "safe", "softplus"))
@pytest.mark.parametrize(
    "regime",
    (
        "typical+states",
        "weak+states",
        "mixed+states",
        "strong+states",
        "burst+states",
        "typical+beta0",
        "typical+betam200+states",
        "typical+repk",
    ),
)
def test_gradients_equal_autograd_of_the_oracle(regime, kind):
    p = in_domain(double(make_problem(regime, H=2, T=53)), kind)
    assert_gradients_match(p, 1e-11)


@pytest.mark.parametrize("kind", ("log", "safe", "softplus"))
def test_gradients_of_ragged_sequences(kind):
    p = in_domain(double(make_problem("typical+states", lengths=RAGGED)), kind)
    assert_gradients_match(p, 1e-11)
    empty = RAGGED.index(0)
    _, grads, _ = staged_gradients(p)
    assert torch.equal(grads.dinitial_state[empty], p.dfinal_state[empty])


def test_gradients_of_equal_sequences():
    n = 3
    p = double(make_problem("mixed+states", lengths=[37] * n))
    packed = staged_gradients(p)[2]
    p = p._replace(cu_seqlens=None)
    assert_gradients_match(p, 1e-11, num_seqs=n)
    equal = staged_gradients(p, n)[2]
    assert all(torch.equal(getattr(packed, n), getattr(equal, n)) for n in GRADIENTS)


@pytest.mark.parametrize("use_qk_l2norm", (False, True))
def test_options_and_absent_parameters(use_qk_l2norm):
    p = double(make_problem("typical", T=20))
    options = {"use_qk_l2norm": use_qk_l2norm, "scale": 0.5, "gate": "safe", "lower_bound": -2.0}
    leaves = [x.requires_grad_() for x in p._replace(k=0.1 * p.k).inputs()]
    o, _ = reference.token_recurrence(*leaves, **options)
    expected = torch.autograd.grad((o * p.do).sum(), leaves)
    with torch.no_grad():
        prepared = reference.prepare(*leaves, **options, dtype=F64)
        grads = reference.bwd_recurrence(p.do, p.v, p.beta, prepared.workspace)
        got = reference.finish(grads, prepared)
    assert got.dA_log is None and got.ddt_bias is None
    for name, ref in zip(GRADIENTS, expected, strict=False):
        assert accuracy.rel_error(getattr(got, name), ref) < 1e-11, name


@pytest.mark.parametrize("lengths", ((), (0,), (0, 0)))
def test_no_tokens(lengths):
    p = double(make_problem("typical+states", lengths=lengths))
    for forward in (reference.token_recurrence, reference.chunk_forward):
        o, state = forward(*p.inputs(), **p.options())
        assert o.shape == (0, 2, 128) and torch.equal(state, p.initial_state)
    for dtype in (F64, torch.float32):
        prepared, grads, got = staged_gradients(p, dtype=dtype)
        assert prepared.workspace.states.shape == (2, 0, 128, 128)
        assert torch.equal(grads.dinitial_state, p.dfinal_state)
        assert got.dq.shape == (0, 2, 128) and got.dbeta.shape == (0, 2)


@pytest.mark.parametrize("gate", ("log", "safe", "softplus"))
def test_token_recurrence_passes_gradcheck(gate):
    rng = torch.Generator().manual_seed(3)

    def leaf(*shape):
        return torch.randn(*shape, generator=rng, dtype=F64).requires_grad_()

    T, H, K, V = 5, 2, 4, 3
    cu = torch.tensor([0, 2, 2, 5])
    leaves = [leaf(T, H, n) for n in (K, K, V, K)] + [leaf(T, H), leaf(3, H, V, K)]
    leaves += [leaf(H), leaf(H, K)] if gate != "log" else []

    def run(q, k, v, g, beta, state, *params):
        A_log, dt_bias = params or (None, None)
        return reference.token_recurrence(
            q,
            k,
            v,
            -g.square() if gate == "log" else g,
            beta,
            initial_state=state,
            gate=gate,
            A_log=A_log,
            dt_bias=dt_bias,
            cu_seqlens=cu,
        )

    assert torch.autograd.gradcheck(run, leaves)


def test_workspace_of_a_known_chunk():
    """One token, b = 1/2: every workspace entry by hand."""
    p = make_problem("typical+states", H=1, T=1)
    p = p._replace(beta=torch.zeros_like(p.beta), gate="log", g_raw=torch.full_like(p.q, -2.0))
    w = reference.prepare(*p.inputs(), **p.options()).workspace
    k, q = (x[0, 0].float() / x[0, 0].float().norm() for x in (p.k, p.q))
    close = {"rtol": 1e-5, "atol": 0.0}
    torch.testing.assert_close(w.kd[0, 0, 0], k * math.exp(-2), **close)
    torch.testing.assert_close(w.qd[0, 0, 0], q * math.exp(-2) * 128**-0.5, **close)
    torch.testing.assert_close(w.ki[0, 0, 0], k * math.exp(2), **close)
    torch.testing.assert_close(w.kr[0, 0, 0], k, **close)
    torch.testing.assert_close(w.g_total[0, 0], torch.full((128,), math.exp(-2)), **close)
    assert torch.equal(w.states[0, 0], p.initial_state[0, 0].bfloat16())
    one = torch.zeros(CHUNK, CHUNK)
    one[0, 0] = 1
    assert torch.equal(w.inv[0, 0].float(), one)
    assert torch.equal(w.mqk[0, 0].float() != 0, one != 0)
    for tile in (w.kd, w.qd, w.ki, w.kr):
        assert not tile[0, 0, 1:].any()
    dtypes = [x.dtype for x in w]
    assert dtypes == [torch.float32] * 5 + [torch.bfloat16] * 3


def test_state_is_value_by_key():
    """S0 = b a^T, a one-hot: o is scale * b, and the state passes through at beta = -inf."""
    a = torch.zeros(128, dtype=F64)
    a[3] = 1
    b = torch.arange(128, dtype=F64)
    state = torch.outer(b, a)[None, None]
    x = a[None, None]
    o, final = reference.token_recurrence(
        x,
        x,
        0 * x,
        0 * x,
        torch.full((1, 1), -math.inf, dtype=F64),
        scale=0.25,
        initial_state=state,
        use_qk_l2norm=False,
    )
    assert torch.equal(o[0, 0], 0.25 * b)
    assert torch.equal(final, state)


def test_rows_past_the_end_are_not_read():
    p = make_problem("typical+states", lengths=RAGGED)
    prepared, clean, _ = staged_gradients(p, dtype=torch.float32)
    past = ~varlen.tile_map(list(RAGGED), CHUNK).valid
    poisoned = {
        name: x.masked_fill(past[None, :, :, None], math.nan)
        for name, x in prepared.workspace._asdict().items()
        if name not in ("g_total", "states")
    }
    workspace = prepared.workspace._replace(**poisoned)
    got = reference.bwd_recurrence(p.do, p.v, p.beta, workspace, p.dfinal_state, p.cu_seqlens)
    for name, x in got._asdict().items():
        assert torch.equal(x, getattr(clean, name)), name
    for name in ("dkd", "dqd", "dki", "dkr", "dbeta"):
        assert not getattr(got, name)[:, past].any(), name


def kernel_like(p, prepared):
    """A fp32 reverse recurrence with the kernel's output dtypes: has to pass the accuracy gate."""
    grads = reference.bwd_recurrence(
        p.do, p.v, p.beta, prepared.workspace, p.dfinal_state, p.cu_seqlens, dtype=torch.float32
    )
    return grads._replace(dv=grads.dv.bfloat16())


def _skip_tail(grads, p, prepared):
    def cut(x):
        x = x.clone()
        x[:, -1] = 0
        return x

    dv = grads.dv.clone()
    dv[-(p.do.shape[0] % CHUNK) :] = 0
    tiles = {n: cut(getattr(grads, n)) for n in ("dkd", "dqd", "dki", "dkr", "dbeta", "dgT")}
    return grads._replace(dv=dv, **tiles)


def _transposed_states(grads, p, prepared):
    w = prepared.workspace
    return kernel_like(p, prepared._replace(workspace=w._replace(states=w.states.mT)))


MUTATIONS = {
    "zeros": (
        lambda grads, p, prepared: type(grads)(*(torch.zeros_like(x) for x in grads)),
        {"dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dS0", "dgT", "dkd"},
    ),
    "a skipped tail": (_skip_tail, {"dq", "dk", "dv", "dg", "dbeta"}),
    "a transposed state": (_transposed_states, {"dq", "dk", "dg", "dbeta", "dkd", "dqd", "dgT"}),
    "a transposed gradient of the state": (
        lambda grads, p, prepared: grads._replace(dinitial_state=grads.dinitial_state.mT),
        {"dS0"},
    ),
    "dfinal_state ignored": (
        lambda grads, p, prepared: kernel_like(p._replace(dfinal_state=None), prepared),
        {"dk", "dv", "dg", "dbeta", "dkr", "dgT"},
    ),
    "nothing done to NaN": (
        lambda grads, p, prepared: grads._replace(dqd=grads.dqd * math.nan),
        {"dqd", "dq", "dg"},
    ),
}


@pytest.mark.parametrize("precision", ("tf32", "bf16"))
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_accuracy_gate_fails_on(mutation, precision):
    p = make_problem("weak+states", T=73)
    prepared, ref, _ = staged_gradients(p, dtype=torch.float32)
    grads = kernel_like(p, prepared)
    assert not accuracy.failures(
        accuracy.compare(grads, ref, prepared, p.do, p.dfinal_state, precision)
    )
    change, must_fail = MUTATIONS[mutation]
    broken = change(grads, p, prepared)
    failed = accuracy.failures(
        accuracy.compare(broken, ref, prepared, p.do, p.dfinal_state, precision)
    )
    assert must_fail <= set(failed), (must_fail, failed)


@pytest.mark.parametrize("regime", ("strong+states", "typical+betam200", "burst+beta1+states"))
def test_the_accuracy_gate_passes_fp32(regime):
    p = make_problem(regime, T=73)
    prepared, ref, _ = staged_gradients(p, dtype=torch.float32)
    compared = accuracy.compare(
        kernel_like(p, prepared), ref, prepared, p.do, p.dfinal_state, "tf32"
    )
    assert not accuracy.failures(compared), compared


def test_prepare_refuses_gates_beyond_its_domain():
    p = make_problem("ub_burst", T=64)
    with pytest.raises(ValueError, match="^g: .*80"):
        reference.prepare(*p.inputs(), **p.options())
    at_bound = p._replace(gate="log", g_raw=torch.full_like(p.g_raw, -5.0))
    reference.prepare(*at_bound.inputs(), **at_bound.options())
    for value in (-5.01, math.nan):
        g = at_bound.g_raw.float()
        g[17, 1, 5] = value if math.isnan(value) else -5.0 - 0.1
        with pytest.raises(ValueError, match="^g: "):
            reference.prepare(*at_bound._replace(g_raw=g).inputs(), **at_bound.options())


def test_errors_name_the_argument():
    p = make_problem("typical", T=10)
    for bad, match in (
        (dict(num_seqs=3), "^num_seqs: "),
        (dict(cu_seqlens=torch.tensor([0, 4])), "^cu_seqlens: "),
        (dict(cu_seqlens=torch.tensor([1, 10])), "^cu_seqlens: "),
        (dict(cu_seqlens=torch.tensor([0, 7, 5, 10])), "^cu_seqlens: "),
        (dict(cu_seqlens=torch.tensor([[0, 10]])), "^cu_seqlens: "),
        (dict(cu_seqlens=torch.tensor([0, 10]), num_seqs=2), "^num_seqs: "),
        (dict(gate="relu"), "^gate: "),
    ):
        with pytest.raises(ValueError, match=match):
            reference.token_recurrence(*p.inputs(), **bad)
        with pytest.raises(ValueError, match=match):
            reference.prepare(*p.inputs(), **bad)
    with pytest.raises(TypeError, match="^cu_seqlens: "):
        reference.token_recurrence(*p.inputs(), cu_seqlens=torch.tensor([0.0, 10.0]))
    with pytest.raises(ValueError, match="^chunk_size: "):
        reference.chunk_forward(*p.inputs(), chunk_size=0)
    with pytest.raises(ValueError, match="^workspace: "):
        w = reference.prepare(*p.inputs()).workspace
        reference.bwd_recurrence(p.do, p.v, p.beta, w, num_seqs=2)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 35), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_random_lengths(lengths, seed):
    """Packed equals each sequence alone, and the oracle; the tile map is a bijection on tokens."""
    p = double(make_problem("mixed+states", H=1, lengths=lengths, seed=seed))
    tiles = varlen.tile_map(lengths, CHUNK)
    assert tiles.offsets[-1] == varlen.total_tiles(lengths, CHUNK) == tiles.valid.shape[0]
    assert torch.equal(tiles.token[tiles.valid], torch.arange(sum(lengths)))
    assert torch.equal(varlen.from_tiles(varlen.to_tiles(p.q, tiles), tiles), p.q)
    if sum(lengths):
        assert_gradients_match(p, 1e-10)
    *_, packed = staged_gradients(p)
    bounds = p.cu_seqlens.tolist()
    for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        tokens = {x: getattr(p, x)[start:end] for x in ("q", "k", "v", "do", "g_raw", "beta")}
        states = {x: getattr(p, x)[n : n + 1] for x in ("initial_state", "dfinal_state")}
        *_, alone = staged_gradients(p._replace(**tokens, **states, cu_seqlens=None))
        for name in ("dq", "dk", "dv", "dg", "dbeta"):
            x = getattr(packed, name)[start:end]
            assert accuracy.rel_error(x, getattr(alone, name)) < 1e-12, name
        assert accuracy.rel_error(packed.dinitial_state[n], alone.dinitial_state[0]) < 1e-12
