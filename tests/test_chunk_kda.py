"""`chunk_kda` without a GPU: its reference backend against the token oracle, and its contract."""

import functools
import inspect
import math
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from chunk_calls import (
    FORMS,
    LEAVES,
    TOKENS,
    as_call,
    batch,
    exact_gradients,
    gradients,
    make_call,
    oracle,
    upstream,
    with_leaves,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import kda_cute
from kda_cute import chunk, chunk_ops, forward, reference
from kda_cute.accuracy.errors import rel_error
from kda_cute.accuracy.regimes import make_problem
from kda_cute.problem import Problem, addressable

F64 = torch.float64
RAGGED = (1, 70, 0, 64, 15)
# What rounding a float64 result to the output's dtype leaves.
TOLERANCES = {torch.bfloat16: 2.5e-3, torch.float32: 2e-7}


def run(call: dict):
    return kda_cute.chunk_kda(**{"backend": "reference"} | call)


def close(x, ref, tolerance=None):
    assert rel_error(x, ref) <= (tolerance or TOLERANCES[x.dtype])


@functools.cache
def small_call() -> dict:
    """A packed call of form B that the contract's tests change one argument of."""
    return make_call("typical+states", H=2, lengths=(17, 0, 5))


# ---------------------------------------------------------------- values
@pytest.mark.parametrize(
    "regime, v_first", (("typical+states", True), ("mixed", False), ("ub_burst+states", False))
)
@pytest.mark.parametrize("form", FORMS)
def test_packed_values_and_gradients(form, regime, v_first):
    call = make_call(regime, form, v_first, H=2, lengths=RAGGED)
    do, dht = upstream(call)
    o, state = run(call)
    o_ref, state_ref = oracle(call)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    close(o, o_ref)
    close(state, state_ref)
    got, expected = (gradients(f, call, do, dht) for f in (run, oracle))
    assert list(got) == list(expected)
    for name, x in got.items():
        assert x.dtype == call[name].dtype and x.shape == call[name].shape, name
        close(x, expected[name])


@pytest.mark.parametrize("form", FORMS)
def test_dense_values_and_gradients(form):
    call = batch([make_call("strong+states", form, T=67, seed=n) for n in range(3)])
    do, dht = upstream(call)
    for x, ref in zip(run(call), oracle(call), strict=True):
        close(x, ref)
    got, expected = (gradients(f, call, do, dht) for f in (run, oracle))
    for name, x in got.items():
        close(x, expected[name])


@pytest.mark.parametrize(
    "lengths, group_rows",
    (((200,), 1 << 17), ((70, 0, 1, 64, 130, 65), 1 << 17), ((70, 0, 1, 64, 130, 65), 1)),
)
@pytest.mark.parametrize(
    "regime",
    ("typical+states", "ub_strong+states", "ub_burst+states", "weak+repk+beta1+states"),
)
def test_scan_form_equals_tokens(monkeypatch, regime, lengths, group_rows):
    """To 1e-13, gradients too, however many chunks it takes at a time."""
    monkeypatch.setattr(reference, "_GROUP_ROWS", group_rows)
    p = make_problem(regime, H=1, lengths=lengths)
    call = as_call(p)
    call = {n: x.double() if n in LEAVES and x is not None else x for n, x in call.items()}
    scan = functools.partial(oracle, run=reference.scan_forward)
    for x, ref in zip(scan(call), oracle(call), strict=True):
        close(x, ref, 1e-13)
    do, dht = (x.double() for x in upstream(call))
    got, expected = (gradients(f, call, do, dht) for f in (scan, oracle))
    for name, x in got.items():
        close(x, expected[name], 1e-13)


@pytest.mark.parametrize("gate", ("log", "safe", "softplus"))
def test_scan_form_passes_gradcheck(gate):
    rng = torch.Generator().manual_seed(3)

    def leaf(*shape):
        return torch.randn(*shape, generator=rng, dtype=F64).requires_grad_()

    T, H, K, V = 5, 2, 4, 3
    leaves = [leaf(T, H, n) for n in (K, K, V, K)] + [leaf(T, H), leaf(3, H, V, K)]
    leaves += [leaf(H), leaf(H, K)] if gate != "log" else []

    def forward(q, k, v, g, beta, state, A_log=None, dt_bias=None):
        return reference.scan_forward(
            q,
            k,
            v,
            -g.square() if gate == "log" else g,
            beta,
            initial_state=state,
            beta_scale=2.0,
            gate=gate,
            A_log=A_log,
            dt_bias=dt_bias,
            cu_seqlens=torch.tensor([0, 2, 2, 5]),
        )

    assert torch.autograd.gradcheck(forward, leaves)


def test_spikes_of_the_gate_leave_everything_finite():
    """One token at -1000, on all channels and on every other one."""
    call = make_call("typical+states", "A", T=129)
    for channels in (slice(None), slice(None, None, 2)):
        g = torch.zeros_like(call["g"])
        g[:, 70, :, channels] = -1000.0
        spiked = call | dict(g=g)
        do, dht = upstream(spiked)
        for x, ref in zip(run(spiked), oracle(spiked), strict=True):
            close(x, ref)
        got, expected = (gradients(f, spiked, do, dht) for f in (run, oracle))
        for name, x in got.items():
            close(x, expected[name])


@pytest.mark.parametrize("gate_in_kernel", (True, False))
def test_b_of_exactly_zero(gate_in_kernel):
    """Tokens whose b is 0 write nothing, but their dbeta counts."""
    call = make_call("typical+states", "B" if gate_in_kernel else "A", T=66)
    beta = torch.rand(call["beta"].shape, generator=torch.Generator().manual_seed(0))
    beta[:, ::2] = 0
    beta[:, 1::4] = 1e-10
    for dtype in (torch.float32, torch.bfloat16):
        changed = call | dict(beta=beta.to(dtype), use_beta_sigmoid_in_kernel=False)
        do, dht = upstream(changed)
        got, expected = (gradients(f, changed, do, dht) for f in (run, oracle))
        for name, x in got.items():
            close(x, expected[name])
        assert not got["v"][:, ::2].any()
        assert got["beta"][:, ::2].double().norm() > 0.1 * got["beta"][:, 3::4].double().norm()


def test_negative_eigenvalues_double_the_sigmoid():
    call = make_call("weak+simk+beta1+states", T=66) | dict(allow_neg_eigval=True)
    do, dht = upstream(call)
    for x, ref in zip(run(call), oracle(call), strict=True):
        close(x, ref)
    got, expected = (gradients(f, call, do, dht) for f in (run, oracle))
    for name, x in got.items():
        close(x, expected[name])
    single = run(call | dict(allow_neg_eigval=False))[0]
    assert rel_error(run(call)[0], single) > 0.1


# ---------------------------------------------------------------- gate
def decay_of(**options) -> torch.Tensor:
    """exp(g) [H, 128] of one token, seen through the state: b = 0, S_0 = 1."""
    x = torch.zeros(1, 1, 2, 128, dtype=torch.bfloat16)
    call = dict(q=x, k=x, v=x, g=x, beta=x[..., 0], initial_state=torch.ones(1, 2, 128, 128))
    _, state = run(call | dict(output_final_state=True, use_gate_in_kernel=True) | options)
    assert torch.equal(state, state[..., :1].expand_as(state))  # [K, V]
    return state[0, ..., 0]


def test_the_bounded_gate_of_zeros_is_half_the_bound():
    zeros = dict(A_log=torch.zeros(2), dt_bias=torch.zeros(256))
    expected = torch.full((2, 128), math.exp(-2.5))
    for options in (zeros, {}, zeros | dict(safe_gate=True)):
        assert torch.equal(decay_of(lower_bound=-5.0, **options), expected)
    assert torch.equal(decay_of(lower_bound=-5, A_log=torch.zeros(2)), expected)
    softplus = decay_of(A_log=torch.tensor([0.0, math.log(2.0)]))
    torch.testing.assert_close(softplus, torch.tensor([[0.5], [0.25]]).expand(2, 128))


def test_dt_bias_of_either_shape_is_by_head_and_channel():
    bias = torch.randn(2, 128, generator=torch.Generator().manual_seed(0))
    A_log = torch.tensor([0.3, -0.7])
    expected = -5 * torch.sigmoid(A_log.double().exp()[:, None] * bias.double())
    for dt_bias in (bias, bias.flatten()):
        close(decay_of(lower_bound=-5, A_log=A_log, dt_bias=dt_bias), expected.exp())
    got = decay_of(lower_bound=-5, A_log=A_log.bfloat16(), dt_bias=bias.bfloat16())
    expected = -5 * torch.sigmoid(A_log.bfloat16().double().exp()[:, None] * bias.bfloat16())
    close(got, expected.exp())


def test_parameters_of_a_gate_outside_are_not_read():
    call = make_call("typical", "A", T=20)
    given = call | dict(A_log=torch.full((2,), math.nan), dt_bias=torch.zeros(3), lower_bound=-1.0)
    for x, y in zip(run(given), run(call), strict=True):
        assert torch.equal(x, y)


# ---------------------------------------------------------------- states
@pytest.mark.parametrize("v_first", (True, False))
def test_a_rank_one_state_comes_out_as_it_is_indexed(v_first):
    """S_0[k, v] = a[k] b[v]: o is scale * b, and with b = 0, g = 0 the state passes through."""
    a, b = torch.zeros(128), torch.arange(128.0)
    a[3] = 1
    S = torch.outer(b, a) if v_first else torch.outer(a, b)
    q = a.bfloat16()[None, None, None]
    zero = torch.zeros_like(q)
    o, state = run(
        dict(q=q, k=q, v=zero, g=zero, beta=zero[..., 0], initial_state=S[None, None])
        | dict(scale=0.25, output_final_state=True, state_v_first=v_first)
    )
    assert torch.equal(o[0, 0, 0], (0.25 * b).bfloat16())
    assert torch.equal(state[0, 0], S)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("v_first", (True, False))
def test_two_calls_chained_by_the_state_equal_one(v_first, form):
    call = make_call("weak+states", form, v_first, T=100)
    do, dht = upstream(call)

    def chained(call):
        cut = 41
        parts = [call | {n: call[n][:, s] for n in TOKENS} for s in (slice(cut), slice(cut, None))]
        o_1, state = run(parts[0])
        o_2, state = run(parts[1] | dict(initial_state=state))
        return torch.cat([o_1, o_2], 1), state

    for x, y in zip(chained(call), run(call), strict=True):
        close(x, y)
    got, whole = (gradients(f, call, do, dht) for f in (chained, run))
    for name, x in got.items():  # two roundings to fp32 in between
        close(x, whole[name], max(TOLERANCES[x.dtype], 1e-6))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_states_keep_fp32(dtype):
    """1 + 2^-12 passes through untouched; 65536 decays; bf16 states are taken, fp32 come out."""
    call = make_call("typical", "A", T=1)
    call |= dict(beta=torch.zeros_like(call["beta"]), g=torch.zeros_like(call["g"]))
    for value in (1 + 2**-12, 65536.0):
        S = torch.full((1, 2, 128, 128), value, dtype=dtype)
        assert torch.equal(run(call | dict(initial_state=S))[1], S.float())
    S.fill_(65536.0)
    got = run(call | dict(initial_state=S, g=torch.full_like(call["g"], -4.0)))[1]
    close(got, torch.full_like(got, 65536.0).double() * math.exp(-4))
    dS = gradients(run, call | dict(initial_state=S), dht=torch.full(S.shape, 2.0**-25))
    assert dS["initial_state"].dtype == dtype
    assert torch.equal(dS["initial_state"].float(), torch.full(S.shape, 2.0**-25))


@pytest.mark.parametrize("lengths", ((0, 0, 64, 0, 66, 0), (0, 0), (0, 1), ()))
@pytest.mark.parametrize("with_state", (True, False))
def test_empty_sequences_pass_the_state_on(lengths, with_state):
    call = make_call("typical+states", lengths=lengths)
    S = torch.randn(len(lengths), 2, 128, 128) if with_state else None
    call |= dict(initial_state=S)
    o, state = run(call)
    assert o.shape == (1, sum(lengths), 2, 128) and state.shape == (len(lengths), 2, 128, 128)
    dht = torch.randn(state.shape)
    dS = gradients(run, call, torch.ones_like(o), dht).get("initial_state")
    start = 0
    for n, length in enumerate(lengths):
        if length:
            one = {name: call[name][:, start : start + length] for name in TOKENS}
            one |= dict(cu_seqlens=None, initial_state=S[n : n + 1] if with_state else None)
            o_one, state_one = run(call | one)
            close(o[:, start : start + length], o_one)
            close(state[n : n + 1], state_one)
        else:
            assert torch.equal(state[n], S[n] if with_state else torch.zeros_like(state[n]))
            assert not with_state or torch.equal(dS[n], dht[n])
        start += length


def test_a_final_state_is_nobody_elses_memory():
    call = make_call("typical+states", lengths=(0,))
    state = run(call)[1]
    assert torch.equal(state, call["initial_state"])
    assert state.data_ptr() != call["initial_state"].data_ptr()


# ---------------------------------------------------------------- what asks for gradients
def test_each_subset_of_inputs_gets_its_gradients():
    """Each tensor alone, and each left out, as when all of them are asked for."""
    call = small_call()
    do, dht = upstream(call)
    full = gradients(run, call, do, dht)
    assert set(full) == set(LEAVES)
    for name in LEAVES:
        for wanted in ((name,), tuple(n for n in LEAVES if n != name)):
            changed, leaves = with_leaves(call, wanted)
            others = {n: call[n].detach() for n in LEAVES if n not in wanted}
            o, state = run(changed | others)
            torch.autograd.backward((o, state), (do, dht))
            for n, x in leaves.items():
                assert torch.equal(x.grad, full[n]), (wanted, n)
            assert all(x.grad is None and not x.requires_grad for x in others.values())


def test_each_loss_gets_its_gradients():
    call = small_call()
    do, dht = upstream(call)
    wanted = tuple(n for n in LEAVES if n != "q")  # no state depends on q
    for ups, names in (((do, None), LEAVES), ((None, dht), wanted)):
        got, expected = (gradients(f, call, *ups, names) for f in (run, oracle))
        for name, x in got.items():
            close(x, expected[name])
    assert not gradients(run, call, None, dht, ("q",))["q"].any()
    changed, leaves = with_leaves(call | dict(output_final_state=False))
    o, state = run(changed)
    assert state is None
    o.backward(do)
    for name, x in gradients(run, call, do).items():
        assert torch.equal(leaves[name].grad, x), name


def test_a_graph_can_be_walked_twice():
    call, leaves = with_leaves(small_call())
    do, dht = upstream(call)
    o, state = run(call)
    once = torch.autograd.grad((o, state), list(leaves.values()), (do, dht), retain_graph=True)
    twice = torch.autograd.grad((o, state), list(leaves.values()), (do, dht))
    assert all(torch.equal(x, y) for x, y in zip(once, twice, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad((o, state), list(leaves.values()), (do, dht))


def test_checkpointing_changes_nothing():
    do, dht = upstream(small_call())

    def again(call):
        return checkpoint(run, call, use_reentrant=False)

    got, expected = (gradients(f, small_call(), do, dht) for f in (again, run))
    for name, x in got.items():
        assert torch.equal(x, expected[name]), name


def test_upstream_gradients_of_any_strides():
    call = small_call()
    do, dht = upstream(call)
    wide = torch.cat([do, do + 1], -1)
    pairs = [
        (wide[..., :128], do),
        (do.transpose(1, 2).contiguous().transpose(1, 2), do),
        (do[:, :1].expand_as(do), do[:, :1].expand_as(do).contiguous()),
    ]
    for strided, dense in pairs:
        got, expected = (gradients(run, call, x) for x in (strided, dense))
        for name, x in got.items():
            assert torch.equal(x, expected[name]), name
    for strided in (dht.mT.contiguous().mT, dht[:1].expand_as(dht)):
        got, expected = (gradients(run, call, None, x) for x in (strided, strided.contiguous()))
        for name, x in got.items():
            assert torch.equal(x, expected[name]), name
    changed, leaves = with_leaves(call)
    run(changed)[0].sum().backward()
    for name, x in gradients(run, call, torch.ones_like(do)).items():
        assert torch.equal(leaves[name].grad, x), name


def test_a_second_derivative_is_refused():
    call, leaves = with_leaves(small_call())
    o, _ = run(call)
    (dq,) = torch.autograd.grad(o.sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="^chunk_kda: .* again"):
        dq.sum().backward()


def test_inputs_changed_before_the_backward_are_noticed():
    call, leaves = with_leaves(small_call())
    beta = leaves["beta"] * 1.0
    o, _ = run(call | dict(beta=beta))
    beta.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_modes_that_ask_for_no_gradient():
    call, _ = with_leaves(small_call())
    expected = run(small_call())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for x, y in zip(run(call), expected, strict=True):
                assert torch.equal(x, y) and not x.requires_grad


def test_autocast_changes_nothing():
    do, dht = upstream(small_call())

    def cast(call):
        with torch.autocast("cpu", torch.bfloat16):
            return run(call)

    for x, y in zip(cast(small_call()), run(small_call()), strict=True):
        assert torch.equal(x, y)
    got, expected = (gradients(f, small_call(), do, dht) for f in (cast, run))
    assert all(torch.equal(got[n], x) for n, x in expected.items())


def test_gradients_under_a_dispatch_mode():
    """It cuts autograd out of an operator's body, where the reference needs it."""
    do, dht = upstream(small_call())

    def counted(call):
        with FlopCounterMode(display=False):
            return gradients(run, call, do, dht)

    expected = gradients(run, small_call(), do, dht)
    assert all(torch.equal(x, expected[n]) for n, x in counted(small_call()).items())


# ---------------------------------------------------------------- strides and offsets
def test_strided_inputs_equal_contiguous_ones():
    call = make_call("typical+states", T=33)
    T, H, D = call["q"].shape[1:]

    def inside(x, *shape):
        """x as a part of a larger tensor; shape marks the dimensions to widen."""
        wide = x.new_full([n * m for n, m in zip(x.shape, shape, strict=True)], math.nan)
        view = wide[tuple(slice(n) for n in x.shape)]
        view.copy_(x)
        return view

    strided = {
        "q": inside(call["q"], 1, 1, 1, 3),
        "k": inside(call["k"], 1, 1, 3, 1),
        "v": call["v"].transpose(-1, -2).contiguous().transpose(-1, -2),
        "g": call["g"].transpose(1, 2).contiguous().transpose(1, 2),
        "beta": torch.stack([call["beta"]] * 4, -1)[..., 1],
        "initial_state": call["initial_state"].mT.contiguous().mT,
        "A_log": torch.stack([call["A_log"]] * 2, -1)[:, 0],
        "dt_bias": torch.stack([call["dt_bias"]] * 2, -1)[:, 0],
    }
    do, dht = upstream(call)
    expected = run(call), gradients(run, call, do, dht)
    for changes in [strided, *({name: x} for name, x in strided.items())]:
        assert not any(x.is_contiguous() for x in changes.values())
        for x, y in zip(run(call | changes), expected[0], strict=True):
            assert torch.equal(x, y), list(changes)
    # A gradient has the strides of its input; the reference's need not have the same bits then.
    for name, x in gradients(run, call | strided, do, dht).items():
        close(x, expected[1][name])


def test_offsets_of_every_kind_give_the_same():
    call = small_call()
    cu = call["cu_seqlens"]
    expected = run(call)
    for offsets in (cu.long(), torch.stack([cu, cu + 7], 1)[:, 0], cu.long().repeat(2, 1).T[:, 1]):
        for extra in ({}, {"cu_seqlens_cpu": cu}, {"cu_seqlens_cpu": cu.long()}):
            for x, y in zip(run(call | dict(cu_seqlens=offsets) | extra), expected, strict=True):
                assert torch.equal(x, y)


@pytest.mark.parametrize("B", (1, 2))
@pytest.mark.parametrize("T", (1, 2))
@pytest.mark.parametrize("H", (1, 2))
def test_dimensions_of_size_one(B, T, H):
    call = batch([make_call("typical+states", H=3, T=4, seed=n) for n in range(B)])
    views = {name: call[name][:, :T, :H] for name in TOKENS}
    views |= dict(initial_state=call["initial_state"][:, :H], A_log=call["A_log"][:H])
    views |= dict(dt_bias=call["dt_bias"].view(3, 128)[:H])
    for x, ref in zip(run(call | views), oracle(call | views), strict=True):
        close(x, ref)


def test_which_tensors_the_copy_engine_can_address():
    x = torch.zeros(2, 8, 3, 384, dtype=torch.bfloat16)
    for good in (x[..., :128], x[..., 128:256], x[..., 8:136], x.transpose(1, 2)[..., :128]):
        assert addressable(good)
    for bad in (
        x[..., 1:129],  # start
        x[..., :256:2],  # last stride
        x[:, :1].expand(2, 8, 3, 384)[..., :128],  # stride 0
        torch.zeros(2, 8, 3, 132, dtype=torch.bfloat16)[..., :128],  # 264 bytes
        torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16).as_strided((1, 8, 1, 128), (7, 128, 3, 1)),
    ):
        assert not addressable(bad)
    assert addressable(torch.zeros(2, 8, 3, 132)[..., :128])  # 528 bytes


def test_a_problem_for_the_kernels_copies_only_what_it_must():
    call = make_call("typical+states", "C", T=9)
    seen = []

    def stop(p, backend):
        seen.append(p)
        return None, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk.autograd, "chunk_kda", stop)
        run(call)
        odd = torch.cat([call["q"].new_zeros(1), call["q"].flatten()])[1:].view(call["q"].shape)
        run(call | dict(q=odd, A_log=call["A_log"].bfloat16(), dt_bias=call["dt_bias"][::1]))
    good, bad = seen
    assert good.for_kernels() is good and good.dt_bias.ndim == 1
    by_head = forward.gate_parameters(good)[1]
    assert by_head.shape == call["q"].shape[2:] and by_head.data_ptr() == good.dt_bias.data_ptr()
    copied = bad.for_kernels()
    assert addressable(copied.q) and torch.equal(copied.q, bad.q)
    assert copied.A_log.dtype == torch.float32
    assert copied.k is bad.k and copied.g is bad.g


# ---------------------------------------------------------------- bad arguments
def argument(name, change) -> dict:
    return {name: change(small_call()[name])}


def offsets(*values, dtype=torch.int32, name="cu_seqlens") -> dict:
    return {name: torch.tensor(values, dtype=dtype)}


def half(x):
    return x.to(torch.float16)


def meta(x):
    return x.to("meta")


BAD_TYPES = [
    *((name, argument(name, half)) for name in LEAVES),
    *((name, {name: None}) for name in TOKENS),
    *((name, {name: [1.0]}) for name in (*LEAVES, "cu_seqlens", "cu_seqlens_cpu")),
    *((name, argument(name, torch.Tensor.float)) for name in ("q", "k", "v")),
    *((name, argument(name, torch.Tensor.double)) for name in ("g", "beta", "initial_state")),
    ("cu_seqlens", argument("cu_seqlens", torch.Tensor.float)),
    ("cu_seqlens", argument("cu_seqlens", torch.Tensor.short)),
    ("cu_seqlens_cpu", {"cu_seqlens_cpu": torch.tensor([0.0, 17, 17, 22])}),
    ("scale", {"scale": "1"}),
    ("scale", {"scale": torch.tensor(1.0)}),
    ("lower_bound", {"lower_bound": torch.tensor(-5.0)}),
    ("lower_bound", {"lower_bound": True}),
]
BAD_VALUES = [
    # shapes
    ("g", argument("g", lambda x: x[..., 0])),  # a gate of gated delta rule
    ("beta", argument("beta", lambda x: x[..., None])),
    ("beta", argument("beta", lambda x: x[:, :-1])),
    *((n, argument(n, lambda x: x[..., :64])) for n in ("q", "k", "v", "g", "initial_state")),
    *((n, argument(n, lambda x: x[:, :, :1])) for n in ("k", "v", "g", "beta", "initial_state")),
    *((n, argument(n, lambda x: x[:, :-1])) for n in ("k", "v", "g")),
    *((n, argument(n, lambda x: x[0])) for n in (*TOKENS, "initial_state")),
    ("v", argument("v", lambda x: torch.cat([x, x], 2))),  # more value heads
    ("v", argument("v", lambda x: torch.cat([x] * 4, 3))),  # V = 512
    ("initial_state", argument("initial_state", lambda x: x[:2])),
    ("A_log", argument("A_log", lambda x: x[:1])),
    ("A_log", argument("A_log", lambda x: x[None])),
    ("dt_bias", argument("dt_bias", lambda x: x[:2])),  # one for each head
    ("dt_bias", argument("dt_bias", lambda x: x.view(128, 2))),
    ("dt_bias", argument("dt_bias", lambda x: x.view(2, 128, 1))),
    # missing
    ("A_log", {"A_log": None, "lower_bound": None}),
    ("lower_bound", {"lower_bound": None, "safe_gate": True}),
    # values
    ("lower_bound", {"lower_bound": 0.0}),
    ("lower_bound", {"lower_bound": 5}),
    ("lower_bound", {"lower_bound": math.nan}),
    ("lower_bound", {"lower_bound": -math.inf}),
    ("allow_neg_eigval", {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False}),
    ("chunk_size", {"chunk_size": 16}),
    ("chunk_size", {"chunk_size": 128}),
    ("backend", {"backend": "fla"}),
    ("backend", {"backend": None}),
    ("save_states", {"save_states": False, "disable_recompute": True}),
    ("transpose_state_layout", {"transpose_state_layout": True}),  # state_v_first is True
    # devices
    *((name, argument(name, meta)) for name in (*LEAVES[1:], "cu_seqlens")),
    ("cu_seqlens_cpu", {"cu_seqlens_cpu": small_call()["cu_seqlens"].to("meta")}),
    # offsets
    ("cu_seqlens", offsets(0, 17, 16, 22)),  # decreases
    ("cu_seqlens", offsets(1, 17, 17, 22)),
    ("cu_seqlens", offsets(-1, 17, 17, 22)),
    ("cu_seqlens", offsets(0, 17, 17, 21)),
    ("cu_seqlens", offsets(0, 17, 17, 23)),
    ("cu_seqlens", offsets(0, 17, 17, 2**40 + 22, dtype=torch.int64)),
    ("cu_seqlens", offsets(dtype=torch.int64)),
    ("cu_seqlens", offsets(0)),
    ("cu_seqlens", {"cu_seqlens": torch.tensor(0)}),
    ("cu_seqlens", argument("cu_seqlens", lambda x: x[None])),
    ("initial_state", offsets(0, 17, 22)),  # three states
    ("cu_seqlens_cpu", offsets(0, 17, 16, 22, name="cu_seqlens_cpu")),
    ("cu_seqlens_cpu", offsets(0, 17, 22, name="cu_seqlens_cpu")),
    ("cu_seqlens_cpu", {"cu_seqlens": None, "cu_seqlens_cpu": small_call()["cu_seqlens"]}),
    # not served
    ("return_intermediate_states", {"return_intermediate_states": True}),
    ("cp_context", {"cp_context": object()}),
    ("max_num_seqs", {"max_num_seqs": 3}),
]


def check_refused(error, name, changes):
    with pytest.raises(error) as caught:
        run(small_call() | changes)
    assert type(caught.value) is error
    assert str(caught.value).startswith(name), str(caught.value)


@pytest.mark.parametrize("name, changes", BAD_TYPES)
def test_a_wrong_type_is_named(name, changes):
    check_refused(TypeError, name, changes)


@pytest.mark.parametrize("name, changes", BAD_VALUES)
def test_a_wrong_shape_device_or_value_is_named(name, changes):
    check_refused(ValueError, name, changes)


def test_packed_sequences_need_a_batch_of_one():
    call = batch([make_call("typical", T=11, seed=n) for n in range(2)])
    with pytest.raises(ValueError, match="^cu_seqlens .*batch of 1, but q has 2"):
        run(call | offsets(0, 11, 22))


def test_an_unknown_keyword_is_named():
    with pytest.raises(TypeError, match="'head_first'"):
        run(small_call() | dict(head_first=False))


def test_nothing_is_run_before_a_refusal_and_the_next_good_call_works(monkeypatch):
    expected = run(small_call())
    with monkeypatch.context() as patch:
        patch.setattr(chunk.autograd, "chunk_kda", lambda *_: pytest.fail("a bad call was run"))
        for name, changes in BAD_TYPES + BAD_VALUES:
            with pytest.raises((TypeError, ValueError), match=f"^{name}"):
                run(small_call() | changes)
    for x, y in zip(run(small_call()), expected, strict=True):
        assert torch.equal(x, y)


def test_cpu_tensors_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match="^q is on cpu.*backend='reference'"):
        kda_cute.chunk_kda(**small_call())


@pytest.mark.parametrize("capability", ((8, 0), (8, 9), (10, 0), (12, 0)))
def test_another_gpu_is_refused_by_its_compute_capability(monkeypatch, capability):
    class OnGpu:
        device = torch.device("cuda", 0)

    monkeypatch.setattr(chunk, "is_fake", lambda x: False)
    monkeypatch.setattr(chunk, "_capability", lambda index: capability)
    match = f"^q .* {capability[0]}.{capability[1]}; .*Hopper.*backend='reference'"
    with pytest.raises(ValueError, match=match):
        chunk._supported(OnGpu(), "kernels")
    assert chunk._supported(OnGpu(), "reference") == OnGpu.device
    monkeypatch.setattr(chunk, "_capability", lambda index: (9, 0))
    assert chunk._supported(OnGpu(), "kernels") == OnGpu.device


# ---------------------------------------------------------------- the signature
def test_the_call_is_the_one_of_fla():
    """Names, order and defaults of fla.ops.kda.chunk_kda (0.6), whose tail is by keyword."""
    parameters = inspect.signature(kda_cute.chunk_kda).parameters
    names = (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel"
        " use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound"
        " disable_recompute return_intermediate_states state_v_first cu_seqlens cu_seqlens_cpu"
        " cp_context use_graph max_num_seqs"
    ).split()
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == names
    off = {n for n in names if n.startswith("use_") or n.startswith("return_")}
    off |= {"output_final_state", "allow_neg_eigval", "safe_gate", "disable_recompute"}
    off |= {"state_v_first"}
    for name in names[5:]:
        assert parameters[name].default is (False if name in off else None), name
    keywords = {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    tail = dict(A_log=None, dt_bias=None, chunk_size=64, transpose_state_layout=None)
    assert keywords == tail | dict(backend="kernels", save_states=True)


@pytest.mark.parametrize(
    "changes",
    (
        {"chunk_size": 32},
        {"use_graph": True},
        {"disable_recompute": True},
        {"save_states": False},
        {"safe_gate": True},
        {"scale": None},
        {"cp_context": None, "max_num_seqs": None, "return_intermediate_states": False},
    ),
    ids=str,
)
def test_options_that_change_no_result(changes):
    for x, y in zip(run(small_call() | changes), run(small_call()), strict=True):
        assert torch.equal(x, y)


def test_the_old_name_of_the_state_layout():
    call = small_call() | dict(state_v_first=False)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        old = run(call | dict(transpose_state_layout=True))
    for x, y in zip(old, run(small_call()), strict=True):
        assert torch.equal(x, y)


def test_the_defaults_are_plain_attention():
    """No norm, no gate, no sigmoid, no state, [K, V]."""
    call = make_call("typical", "A", T=20)
    call = {name: call[name] for name in TOKENS}
    o, state = run(call)
    assert state is None
    close(o, oracle(call)[0])


def test_the_reference_backend_needs_no_dsl():
    code = """
import sys, torch, kda_cute
x = torch.ones(1, 3, 2, 128, dtype=torch.bfloat16)
o, _ = kda_cute.chunk_kda(x, x, x, -x, x[..., 0], backend="reference")
assert o.shape == x.shape and "cutlass" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- the operators
def problem_of(call: dict) -> Problem:
    """What validation makes of a call."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk.autograd, "chunk_kda", lambda p, b: seen.append(p) or (None, None))
        run(call)
    return seen[0]


OP_CALLS = {
    "packed": {},
    "no final state": {"output_final_state": False},
    "no initial state": {"initial_state": None, "state_v_first": False},
    "softplus": {"lower_bound": None},
}


@pytest.mark.parametrize("name", OP_CALLS)
def test_opcheck(name):
    p = problem_of(small_call() | OP_CALLS[name])
    torch.library.opcheck(torch.ops.kda_cute.chunk_kda_fwd, (*p, "reference"))
    do, dht = upstream(small_call())
    wanted = [x is not None for x in p[: chunk_ops.DIFFERENTIABLE]]
    for ups in ((do, dht), (do, None), (None, dht)):
        arguments = (*ups, None, wanted, *p, "reference")
        torch.library.opcheck(torch.ops.kda_cute.chunk_kda_bwd, arguments)


@pytest.mark.parametrize("packed", (True, False))
def test_meta_tensors_give_the_kernels_shapes(packed):
    call = small_call() if packed else batch([make_call("typical+states", T=70)] * 2)
    call = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    do, dht = (x.to("meta") for x in upstream(call | dict(v=torch.empty(call["v"].shape))))
    call, leaves = with_leaves(call)
    o, state = kda_cute.chunk_kda(**call)
    saved = o.grad_fn.saved_tensors[-1]
    assert (o.shape, o.dtype) == (call["v"].shape, torch.bfloat16)
    assert (state.shape, state.dtype) == (call["initial_state"].shape, torch.float32)
    slots = 3 if packed else 4  # 22 // 64 + 3, and 2 * 2
    assert saved.shape == (slots, 2, 128 + 64, 128) and saved.dtype == torch.bfloat16
    torch.autograd.backward((o, state), (do, dht))
    assert all((x.grad.shape, x.grad.dtype) == (x.shape, x.dtype) for x in leaves.values())


def test_the_call_traces_on_fake_tensors():
    mode = FakeTensorMode()
    call = {
        n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
        for n, x in small_call().items()
    }
    with mode:
        o, state = run(call)
    assert o.shape == (1, 22, 2, 128) and state.shape == (3, 2, 128, 128)


def test_torch_compile_takes_the_whole_call():
    """Forward and backward in one graph, for a second length too."""
    graphs = []

    def counting(module, inputs):
        graphs.append(module)
        return module

    def loss(call):
        o, state = run(call | dict(q=call["q"] * 2))
        return o.float().sin(), state.cos()

    compiled = torch.compile(loss, backend=counting, fullgraph=True, dynamic=True)
    for T in (20, 33, 50):
        call = make_call("typical+states", T=T)
        do, dht = upstream(call)
        for x, y in zip(compiled(call), loss(call), strict=True):
            assert torch.equal(x, y)
        graphs_before = len(graphs)
        got, expected = (gradients(f, call, do, dht) for f in (compiled, loss))
        assert all(torch.equal(got[n], x) for n, x in expected.items())
        if T == 50:
            assert len(graphs) == graphs_before
    torch._dynamo.reset()


# ---------------------------------------------------------------- the way to the kernels
class Seen(NamedTuple):
    """What the stand-ins were given: problems, and (problem, do, dfinal_state, saved, flags)."""

    forward: list
    backward: list


@pytest.fixture
def stand_in(monkeypatch) -> Seen:
    """Kernels that a CPU has: the reference, with arguments and results of forward.chunk_kda_fwd and
    backward.chunk_kda_bwd.
    """
    seen = Seen([], [])

    def forward(p: Problem):
        seen.forward.append(p)
        o, state = reference.chunk_kda(p)
        state = state.float() if p.output_final_state else None
        saved = p.q.new_full(chunk_ops.saved_shape(p), 7.0) if p.save_states else None
        return o.to(p.v.dtype), state, saved

    def backward(p: Problem, do, dfinal_state, saved, *, parameters=True, initial_state=True):
        flags = dict(parameters=parameters, initial_state=initial_state)
        seen.backward.append((p, do, dfinal_state, saved, flags))
        offered = [True] * 5 + [parameters] * 2 + [initial_state]
        leaves = [x if x is None else x.detach().requires_grad_() for x in p[: len(LEAVES)]]
        with torch.enable_grad():
            results = reference.chunk_kda(Problem(*leaves, *p[len(LEAVES) :]))
        pairs = zip(results, (do, dfinal_state), strict=True)
        outputs, ups = zip(*((y, dy.to(y)) for y, dy in pairs if dy is not None), strict=True)
        targets = [x for x, use in zip(leaves, offered, strict=True) if use and x is not None]
        grads = iter(
            torch.autograd.grad(outputs, targets, ups, allow_unused=True, materialize_grads=True)
        )
        return tuple(
            next(grads) if use and x is not None else None
            for x, use in zip(leaves, offered, strict=True)
        )

    monkeypatch.setattr(chunk_ops, "_kernels", lambda: forward)
    monkeypatch.setattr(chunk_ops, "_backward_kernels", lambda: backward)
    monkeypatch.setattr(chunk, "_supported", lambda q, backend: q.device)
    return seen


def kernels(call: dict):
    return kda_cute.chunk_kda(**call)


def test_kernels_get_the_problem_and_give_the_gradients(stand_in):
    call = small_call()
    do, dht = upstream(call)
    got = gradients(kernels, call, do, dht)
    for name, x in gradients(run, call, do, dht).items():
        assert torch.equal(got[name], x) and got[name].dtype == x.dtype, name
    (p,) = stand_in.forward
    assert p.save_states and p.output_final_state and p.state_v_first
    assert (p.gate, p.lower_bound, p.scale) == ("safe", -5.0, 128**-0.5)
    assert (p.l2norm, p.beta_sigmoid, p.beta_scale) == (True, True, 1.0)
    assert p.dt_bias.shape == call["dt_bias"].shape and p.num_seqs == 3
    ((again, do_seen, dht_seen, saved, flags),) = stand_in.backward
    for x, y in zip(again, p, strict=True):
        same = x.data_ptr() == y.data_ptr() if isinstance(x, torch.Tensor) else x == y
        assert same
    assert torch.equal(do_seen, do) and torch.equal(dht_seen, dht)
    assert flags == dict(parameters=True, initial_state=True)
    assert saved.shape == (3, 2, 128 + 64, 128) and (saved == 7).all()


@pytest.mark.parametrize("form", FORMS)
def test_only_gradients_that_are_wanted_are_asked_of_the_kernels(stand_in, form):
    call = make_call("typical+states", form, H=2, lengths=(17, 0, 5))
    do, dht = upstream(call)
    full = gradients(run, call, do, dht)
    for wanted in [(name,) for name in full] + [tuple(n for n in full if n != m) for m in full]:
        for n, x in gradients(kernels, call, do, dht, wanted).items():
            assert torch.equal(x, full[n]), (wanted, n)
        flags = stand_in.backward[-1][-1]
        parameters = "A_log" in wanted or "dt_bias" in wanted
        assert flags == dict(parameters=parameters, initial_state="initial_state" in wanted)


def test_kernels_are_told_which_output_has_no_gradient(stand_in):
    call, leaves = with_leaves(small_call(), ("v",))
    do, dht = upstream(call)
    for ups in ((do, None), (None, dht)):
        expected = gradients(run, small_call(), *ups, wanted=("v",))["v"]
        assert torch.equal(gradients(kernels, call, *ups, wanted=("v",))["v"], expected)
        seen = stand_in.backward[-1][1:3]
        assert all((x is None) == (y is None) for x, y in zip(seen, ups, strict=True))


def test_gradients_of_a_kernel_take_the_dtypes_of_the_inputs(stand_in):
    """The kernels give those of the parameters and of the state in fp32."""
    call = small_call()
    narrow = {n: call[n].bfloat16() for n in ("A_log", "dt_bias", "initial_state")}
    do, dht = upstream(call)
    got, expected = (gradients(f, call | narrow, do, dht) for f in (kernels, run))
    for name, x in got.items():
        assert x.dtype == torch.bfloat16 and torch.equal(x, expected[name]), name


def test_states_are_saved_for_a_backward_only(stand_in):
    call, leaves = with_leaves(small_call(), ("v",))
    kda_cute.chunk_kda(**small_call())
    with torch.no_grad():
        kda_cute.chunk_kda(**call)
    assert not any(p.save_states for p in stand_in.forward)
    o, _ = kda_cute.chunk_kda(**call)
    assert stand_in.forward[-1].save_states
    assert o.grad_fn.saved_tensors[-1].shape == (3, 2, 128 + 64, 128)


def test_nothing_is_saved_when_told_so(stand_in):
    """The backward is told, too, and gives the same."""
    call, leaves = with_leaves(small_call() | dict(save_states=False), ("v",))
    do, dht = upstream(call)
    o, state = kda_cute.chunk_kda(**call)
    assert not stand_in.forward[-1].save_states
    assert o.grad_fn.saved_tensors[-1] is None
    torch.autograd.backward((o, state), (do, dht))
    assert stand_in.backward[-1][3] is None
    assert torch.equal(leaves["v"].grad, gradients(run, small_call(), do, dht)["v"])


def test_768_bytes_are_saved_for_each_token_and_head(stand_in):
    T, H = 256, 2
    call, leaves = with_leaves(make_call("typical", T=T, H=H))
    o, _ = kda_cute.chunk_kda(**call)
    own = [call[name] for name in LEAVES if call[name] is not None]
    known = {x.data_ptr() for x in own}
    new = [x for x in o.grad_fn.saved_tensors if x is not None and x.data_ptr() not in known]
    assert sum(x.numel() * x.element_size() for x in new) == 768 * T * H


def test_saved_inputs_are_those_that_were_passed(stand_in):
    call = make_call("typical", "C", T=9)
    call, leaves = with_leaves(call)
    o, _ = kda_cute.chunk_kda(**call)
    saved = o.grad_fn.saved_tensors
    for name, x in zip(TOKENS, saved, strict=False):
        assert x.data_ptr() == call[name].data_ptr() and x.stride() == call[name].stride(), name


# ---------------------------------------------------------------- what the GPU's tests judge by
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", ("typical+states", "ub_burst+states", "mixed"))
def test_exact_gradients_are_those_of_the_token_oracle(form, regime):
    call = make_call(regime, form, H=2, lengths=RAGGED)
    wide = call | {n: call[n].double() for n in LEAVES if call.get(n) is not None}
    do, dht = (x.double() for x in upstream(call))
    for ups in ((do, dht), (do, None)):
        got, terms = exact_gradients(call, *ups)
        expected = gradients(oracle, wide, *ups)
        assert list(got) == list(expected)
        for name, x in got.items():
            close(x, expected[name], 1e-12)
    assert set(terms) == {"A_log", "dt_bias", "beta"} & set(got)


def test_the_terms_are_those_of_the_sums():
    """With one token and one head: A_log's terms by channel, dt_bias's as its sum; beta's are signed
    by the products of dv and v, without a state that holds something.
    """
    call = make_call("typical+states", T=1, H=1)
    do, dht = upstream(call)
    got, terms = exact_gradients(call, do, dht)
    assert math.isclose(terms["dt_bias"], got["dt_bias"].norm().item())
    by_channel = got["dt_bias"] * (call["g"][0, 0, 0].double() + call["dt_bias"])
    close(by_channel.sum()[None], got["A_log"], 1e-12)
    assert math.isclose(terms["A_log"], by_channel.norm().item())
    call = make_call("typical", T=1, H=1)
    got, terms = exact_gradients(call, do)
    products = got["v"] * call["v"] * (1 - call["beta"].double().sigmoid())[..., None]
    close(products.sum(-1), got["beta"], 1e-12)
    close(products.norm(dim=-1), terms["beta"], 1e-12)
