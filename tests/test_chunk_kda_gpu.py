"""`chunk_kda` on the GPU: the kernels' forward against the float64 oracle, and its contract.

Tolerances are those of the regimes (relative Frobenius norms); the oracle is the reference's scan
form, which the CPU tests hold to the token recurrence at 1e-13. Sequences of a packed batch and
their last 16 rows are judged on their own too, so that a bad tail cannot hide.
"""

import functools
import math
import statistics
import threading

import pytest
import torch
from chunk_calls import (
    DEVICE,
    FORMS,
    THREE,
    TOKENS,
    as_call,
    assert_same_bits,
    batch,
    bounds,
    call_on_gpu,
    captured,
    clones,
    log_gate_call,
    oracle,
    poison,
    raw_gate_call,
    run,
    sequence,
    strided_versions,
    widened,
    written_into,
)

from kda_cute import chunk_ops, reference
from kda_cute import compile as kernel_cache
from kda_cute.accuracy.errors import failures, rel_error
from kda_cute.accuracy.measure import compare_results
from kda_cute.accuracy.regimes import make_problem
from kda_cute.accuracy.tolerances import PEERS
from kda_cute.accuracy.tolerances import medians as allowed_medians

pytestmark = pytest.mark.gpu

REGIMES = (
    "typical",
    "typical+states",
    "weak+states",
    "nodecay+states",
    "strong",
    "strong+states",
    "mixed+states",
    "burst+states",
    "typical+beta0+states",
    "typical+beta1+states",
    "typical+betam200+states",
    "typical+big",
    "strong+tiny",
    "weak+simk+beta1+states",
    "weak+repk+beta1+states",
    "ub_typ+states",
    "ub_strong+states",
    "ub_burst+states",
    "ub_row+states",
    "ub_mixed+states",
)

exact = functools.partial(oracle, run=reference.scan_forward)


def check(call: dict, regime="typical", result=None) -> tuple[float, float]:
    """Assert that a call is within the regime's tolerances; returns the errors of o and S_T."""
    o, state = run(call) if result is None else result
    o_ref, state_ref = exact(call)
    assert o.dtype == torch.bfloat16 and o.shape == o_ref.shape
    assert state is None or (state.dtype == torch.float32 and state.shape == state_ref.shape)
    compared = compare_results(call, (o, state), (o_ref, state_ref), regime)
    assert not failures(compared), f"{failures(compared)} of {compared}"
    return compared["o"].error, compared["S_T"].error if state is not None else 0.0


def of_sequence(call: dict, result, n: int):
    """Sequence n's part of a call's result."""
    at = bounds(call)
    o, state = result
    return o.flatten(0, 1)[None, at[n] : at[n + 1]], None if state is None else state[n : n + 1]


def assert_each_is_as_alone(call: dict, result=None, sequences=None):
    result = run(call) if result is None else result
    for n in range(len(bounds(call)) - 1) if sequences is None else sequences:
        alone = run(sequence(call, n))
        assert_same_bits(of_sequence(call, result, n), alone, f"sequence {n}")


# ---------------------------------------------------------------- accuracy
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", REGIMES)
def test_accuracy(regime, form):
    for seed in range(3):
        call = call_on_gpu(regime, form, seed % 2 == 0, T=512, H=2, seed=seed)
        errors = check(call, regime)
        print(f"{regime} {form} {seed}: " + ", ".join(f"{1e3 * e:.2f}" for e in errors))


@pytest.mark.parametrize("regime", PEERS)
def test_o_is_as_exact_as_the_best_peers(regime):
    """Median over seeds, at most 1.3 times what that peer's kernels were measured at."""
    calls = (call_on_gpu(regime, T=512, H=2, seed=seed) for seed in range(5))
    error = statistics.median(rel_error(run(c)[0], exact(c)[0]) for c in calls)
    allowed = allowed_medians(regime)["o"]
    print(f"{regime}: {1e3 * error:.2f} of {1e3 * allowed:.2f}")
    assert error <= allowed


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", ("mixed+states", "ub_typ+states"))
def test_ragged_sequences(regime, form):
    check(call_on_gpu(regime, form, H=3, lengths=(1, 15, 64, 65, 0, 300, 1000, 128)), regime)


@pytest.mark.parametrize("scale", (None, 1.0, 0.01))
@pytest.mark.parametrize("l2norm", (True, False))
def test_scale_and_norm(l2norm, scale):
    call = call_on_gpu("strong+states", "A", T=200)
    short = {name: 0.05 * call[name] for name in ("q", "k")}
    check(call | short | dict(scale=scale, use_qk_l2norm_in_kernel=l2norm))


@pytest.mark.parametrize("gate", ("safe", "softplus"))
def test_gate_with_beta_outside_and_negative_eigenvalues(gate):
    call = call_on_gpu("typical+states" if gate == "safe" else "ub_typ+states", T=300)
    check(call | dict(allow_neg_eigval=True))
    for beta in (call["beta"].float().sigmoid(), call["beta"].sigmoid()):
        check(call | dict(beta=beta, use_beta_sigmoid_in_kernel=False))


def test_absent_gate_parameters_are_zeros():
    call = call_on_gpu("typical+states", T=130)
    zeros = {name: torch.zeros_like(call[name]) for name in ("A_log", "dt_bias")}
    expected = run(call | zeros)
    assert_same_bits(run(call | dict(A_log=None, dt_bias=None)), expected)
    assert_same_bits(run(call | zeros | dict(dt_bias=None)), expected)
    for safe_gate in (True, False):
        assert_same_bits(run(call | zeros | dict(safe_gate=safe_gate)), expected)
    check(call | zeros)
    bf16 = {name: call[name].bfloat16() for name in zeros}
    wide = {name: x.float() for name, x in bf16.items()}
    assert_same_bits(run(call | bf16), run(call | wide))


def test_long_sequence():
    check(call_on_gpu("typical+states", T=8192 + 17, H=2))


# ---------------------------------------------------------------- gates at and beyond their bound
@pytest.mark.parametrize("T, H", ((143, 2), (4096, 2), (143, 96)))
def test_gates_at_the_projection_bound(T, H):
    """g = -5 at each token and channel, and patterns of it."""
    token, channel = torch.arange(T)[:, None, None], torch.arange(128)
    patterns = {
        "all": torch.full((1,), 30.0),
        "nearly": torch.full((1,), 4.0),
        "by token": 30.0 - 60 * (token % 2),
        "by 16 tokens": 30.0 - 60 * (token // 16 % 2),
        "by channel": 30.0 - 60 * (channel % 2),
    }
    for name, raw in patterns.items():
        print(name, check(raw_gate_call(raw, T=T, H=H), "weak"))


def test_error_is_flat_over_constant_gates():
    errors = {}
    for g in (-0.01, -0.5, -1.0, -2.0, -2.5, -3.0, -4.0, -4.9, -5.0):
        errors[g] = check(log_gate_call(torch.tensor(g), T=256 + 7))
    print(errors)
    for tensor in zip(*errors.values(), strict=True):
        assert max(tensor) <= 2 * statistics.median(tensor)


@pytest.mark.parametrize("raw", (5.0, 5.5, 6.0, 8.0, 20.0))
def test_softplus_gates_that_empty_a_block(raw):
    check(raw_gate_call(torch.tensor(raw), None, T=129, H=8))


@pytest.mark.parametrize("channels", (slice(None), slice(None, None, 2)), ids=("all", "even"))
@pytest.mark.parametrize("at", (0, 15, 16, 63, 64, 70, 128))
def test_one_token_may_erase_everything(at, channels):
    g = torch.zeros(129, 1, 128)
    g[at, :, channels] = -1000.0
    check(log_gate_call(g, T=129, H=8), "nodecay")


@pytest.mark.parametrize("lower_bound", (-1.0, -5.9, -6.0, -11.0, -12.0, -100.0))
def test_any_lower_bound(lower_bound):
    for raw in (torch.tensor(30.0), torch.randn(129, 8, 128)):
        check(raw_gate_call(raw, lower_bound, T=129, H=8))


@pytest.mark.parametrize("T", (64, 65))
def test_strong_and_weak_halves(T):
    halves = torch.full((T, 1, 1), -1e-4)
    halves[:32] = -4.9
    patterns = [halves, halves.flip(0)]
    for at in (0, 15, 16, 63):
        spike = torch.full((T, 1, 1), -1e-4)
        spike[at] = -5.0
        patterns.append(spike)
    for g in patterns:
        check(log_gate_call(g, T=T), "weak")


def test_the_bounded_gate_of_zeros_is_half_the_bound():
    x = torch.zeros(1, 1, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    call = dict(q=x, k=x, v=x, g=x, beta=x[..., 0], use_gate_in_kernel=True, lower_bound=-5)
    call |= dict(initial_state=x.new_ones(1, 2, 128, 128).float(), output_final_state=True)
    state = run(call | dict(A_log=torch.zeros(2, device=DEVICE)))[1]
    torch.testing.assert_close(state, torch.full_like(state, math.exp(-2.5)), rtol=1e-6, atol=0)


def test_dt_bias_is_by_head_and_channel_in_either_shape():
    call = call_on_gpu("typical+states", T=100, H=3)
    bias = torch.randn(3, 128, device=DEVICE)
    flat = run(call | dict(dt_bias=bias.flatten()))
    assert_same_bits(run(call | dict(dt_bias=bias)), flat)
    check(call | dict(dt_bias=bias), result=flat)


# ---------------------------------------------------------------- keys that repeat
@pytest.mark.parametrize("beta", (1.0, 1.99))
def test_one_key_direction_with_noise(beta):
    T, H = 8192, 2
    call = call_on_gpu("typical", "A", T=T, H=H)
    rng = torch.Generator(DEVICE).manual_seed(0)
    direction = torch.randn(1, 1, H, 128, generator=rng, device=DEVICE)
    noise = torch.randn(1, T, H, 128, generator=rng, device=DEVICE)
    k = direction / direction.norm(dim=-1, keepdim=True) + 0.02 * noise / 128**0.5
    k = 0.9 * k / k.norm(dim=-1, keepdim=True)
    g = -0.012 - 0.022 * torch.rand(1, T, H, 128, generator=rng, device=DEVICE)
    call |= dict(k=k.bfloat16(), g=g, beta=torch.full_like(call["beta"], beta))
    if beta > 1:  # as the sigmoid of a logit, doubled
        logit = math.log(beta / (2 - beta))
        call |= dict(beta=torch.full_like(call["beta"], logit), allow_neg_eigval=True)
        call |= dict(use_beta_sigmoid_in_kernel=True)
    call |= dict(use_qk_l2norm_in_kernel=False)
    check(call, "weak+repk")


def test_one_key_at_every_token():
    T = 16384
    call = raw_gate_call(torch.tensor(-12.0), T=T, H=1)
    k = call["k"][:, :1].expand_as(call["k"])
    v = call["v"][:, torch.arange(T, device=DEVICE) % 16]
    beta = torch.full_like(call["beta"], 8.0)
    o, state = run(call | dict(q=k, k=k, v=v, beta=beta))
    check(call | dict(q=k, k=k, v=v, beta=beta), "weak+repk", (o, state))


def test_blocks_of_sixteen_equal_keys():
    call = call_on_gpu("weak+beta1+states", T=1024)
    k = call["k"][:, ::16].repeat_interleave(16, 1)
    check(call | dict(k=k), "weak+repk")


# ---------------------------------------------------------------- tails and neighbours
@pytest.mark.parametrize("bound", (True, False), ids=("at the bound", "random"))
def test_every_tail_of_a_packed_sequence(bound):
    """640 and 768 + r tokens, in both orders: as alone, bitwise; some against the oracle."""
    T = 640 + 768 + 63
    g = torch.full((1,), -5.0) if bound else -5 * torch.rand(T, 2, 128)
    whole = log_gate_call(g, T=T)
    state = whole["initial_state"].expand(2, -1, -1, -1)
    for r in range(1, 64):
        for cut in (640, 768 + r):
            end = 640 + 768 + r
            cu = torch.tensor([0, cut, end], device=DEVICE)
            call = whole | {name: whole[name][:, :end] for name in TOKENS}
            call |= dict(cu_seqlens=cu, initial_state=state)
            if r in (15, 24, 56):
                poison()
            result = run(call)
            assert_each_is_as_alone(call, result)
            if r in (1, 15, 24, 56, 63):
                check(call, result=result)


@pytest.mark.parametrize(
    "lengths", ((65, 66, 71, 79), (57, 2, 5), (2049, 1011, 513, 256, 128, 65, 32, 16, 8, 4, 5, 1))
)
def test_short_tails_repeat_bitwise(lengths):
    call = call_on_gpu("typical+states", lengths=lengths)
    first = run(call)
    check(call, result=first)
    assert_each_is_as_alone(call, first)
    for i in range(50):
        assert_same_bits(run(call), first, f"call {i}")


@pytest.mark.parametrize("T", (1, 2, 15, 16, 17, 63, 64, 65))
def test_short_dense_batches(T):
    for B in (1, 2):
        call = batch([call_on_gpu("typical+states", T=T, seed=n) for n in range(B)])
        first = run(call)
        check(call, result=first)
        for i in range(50):
            assert_same_bits(run(call), first, f"call {i}")


@pytest.mark.parametrize("T", (63, 500, 1000, 1500))
def test_dense_batches_equal_packed_ones(T):
    call = batch([call_on_gpu("typical+states", T=T, seed=n) for n in range(2)])
    dense = run(call)
    check(call, result=dense)
    flat = {name: call[name].flatten(0, 1)[None] for name in TOKENS}
    o, state = run(call | flat | dict(cu_seqlens=torch.tensor([0, T, 2 * T], device=DEVICE)))
    assert_same_bits((o.view(dense[0].shape), state), dense)
    assert_each_is_as_alone(call, dense)


@pytest.mark.parametrize("N, H", ((200, 2), (33, 4), (3, 96)))
@pytest.mark.parametrize("packed", (True, False))
def test_a_sequence_does_not_depend_on_its_batch(packed, N, H):
    """Grids far above one wave of the GPU, and one sequence alone."""
    calls = [call_on_gpu("mixed+states", T=150, H=H, seed=n) for n in range(4)]
    call = batch([calls[n % 4] for n in range(N)])
    if packed:
        call |= {name: call[name].flatten(0, 1)[None] for name in TOKENS}
        call |= dict(cu_seqlens=150 * torch.arange(N + 1, device=DEVICE))
    result = run(call)
    assert_each_is_as_alone(call, result, (0, 1, N - 1))
    for n in range(4, N):
        same = of_sequence(call, result, n % 4), of_sequence(call, result, n)
        assert_same_bits(*same, f"sequence {n}")


@pytest.mark.parametrize("form", FORMS)
def test_neighbours_do_not_leak(form):
    call = call_on_gpu("typical+states", form, lengths=THREE)
    clean = run(call)

    def spoil(names, factor):
        changed = {}
        for name in names:
            changed[name] = call[name].clone()
            where = 1 if name == "initial_state" else (0, slice(37, 101))
            changed[name][where] *= factor
        return call | changed

    for changed in (spoil("qkv", 1e4), spoil(("g", "beta"), math.nan), spoil(TOKENS, math.nan)):
        result = run(changed)
        for n in (0, 2):
            pair = of_sequence(call, result, n), of_sequence(call, clean, n)
            assert_same_bits(*pair, f"sequence {n}")
    result = run(spoil((*TOKENS, "initial_state"), math.nan))
    for n in (0, 2):
        assert_same_bits(of_sequence(call, result, n), of_sequence(call, clean, n))


@pytest.mark.parametrize("packed", (True, False))
def test_bytes_past_the_last_token_are_not_read(packed):
    call = call_on_gpu("typical+states", lengths=THREE)
    if not packed:
        call = sequence(call, 2)
    T = call["q"].shape[1]
    views = {name: widened(call[name], 64)[:, :T] for name in TOKENS}
    assert_same_bits(run(call | views), run(call))


def test_rows_past_the_last_offset_do_not_count():
    """A batch padded to a fixed T, as for graphs: the sequences are as without the padding."""
    call = call_on_gpu("typical+states", lengths=THREE)
    expected = run(call)
    o, state = run(call | {name: widened(call[name], 100) for name in TOKENS})
    assert_same_bits((o[:, :228], state), expected)


@pytest.mark.parametrize("lengths", ((0, 0, 64, 0, 0, 66, 0), (0, 0), (0, 0, 1, 0), ()))
@pytest.mark.parametrize("with_state", (True, False))
def test_empty_sequences_pass_the_state_on(lengths, with_state):
    call = call_on_gpu("typical+states", lengths=lengths)
    S = torch.randn(len(lengths), 2, 128, 128, device=DEVICE) if with_state else None
    call |= dict(initial_state=S)
    o, state = run(call)
    assert o.shape == (1, sum(lengths), 2, 128) and state.shape == (len(lengths), 2, 128, 128)
    for n, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(state[n], S[n] if with_state else torch.zeros_like(state[n]))
    filled = [n for n, length in enumerate(lengths) if length]
    assert_each_is_as_alone(call, (o, state), filled)
    if filled:
        parts = {name: x[filled] for name, x in (("initial_state", S),) if with_state}
        at = [0, *torch.tensor([lengths[n] for n in filled]).cumsum(0).tolist()]
        dense = run(call | parts | dict(cu_seqlens=torch.tensor(at, device=DEVICE)))
        assert_same_bits((o, state[filled]), dense)


@pytest.mark.parametrize("with_state", (True, False))
def test_many_heads_and_ragged_lengths_repeat(with_state):
    regime = "typical+states" if with_state else "typical"
    call = call_on_gpu(regime, H=48, lengths=(1238, 1199, 1240, 1216, 1187, 1203, 519))
    first = run(call)
    for i in range(100):
        assert_same_bits(run(call), first, f"call {i}")
    check(call, result=first)


# ---------------------------------------------------------------- states
@pytest.mark.parametrize("v_first", (True, False))
def test_a_rank_one_state_comes_out_as_it_is_indexed(v_first):
    """S_0[k, v] = a[k] b[v]: o is scale * b, and with b = 0, g = 0 the state passes through."""
    a, b = torch.zeros(128), torch.arange(128.0)
    a[3] = 1
    S = (torch.outer(b, a) if v_first else torch.outer(a, b)).to(DEVICE)
    q = a.to(DEVICE, torch.bfloat16)[None, None, None]
    zero = torch.zeros_like(q)
    o, state = run(
        dict(q=q, k=q, v=zero, g=zero, beta=zero[..., 0], initial_state=S[None, None])
        | dict(scale=0.25, output_final_state=True, state_v_first=v_first)
    )
    assert torch.equal(o[0, 0, 0].cpu(), (0.25 * b).bfloat16())
    assert torch.equal(state[0, 0], S)


@pytest.mark.parametrize("form", FORMS)
def test_state_layouts_are_transposes_of_each_other(form):
    for regime in ("typical+states", "typical"):
        first, second = (call_on_gpu(regime, form, v, lengths=THREE) for v in (True, False))
        (o_v, S_v), (o_k, S_k) = run(first), run(second)
        assert_same_bits((o_v, S_v), (o_k, S_k.mT))


@pytest.mark.parametrize("v_first", (True, False))
@pytest.mark.parametrize("cut", (75, 64))
def test_two_calls_chained_by_the_state_equal_one(cut, v_first):
    call = call_on_gpu("typical+states", "B", v_first, T=200)
    parts = [call | {n: call[n][:, s] for n in TOKENS} for s in (slice(cut), slice(cut, None))]
    o_1, state = run(parts[0])
    o_2, state = run(parts[1] | dict(initial_state=state))
    chained = torch.cat([o_1, o_2], 1), state
    check(call, result=chained)
    if cut == 64:  # the same chunks: the state is fp32 on both ways
        assert_same_bits(chained, run(call))


@pytest.mark.parametrize("v_first", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_states_keep_fp32(dtype, v_first):
    call = call_on_gpu("typical", "A", v_first, T=1)
    call |= dict(beta=torch.zeros_like(call["beta"]), g=torch.zeros_like(call["g"]))
    for value in (1 + 2**-12, 65536.0, 2.0**-25):
        S = torch.full((1, 2, 128, 128), value, dtype=dtype, device=DEVICE)
        assert torch.equal(run(call | dict(initial_state=S))[1], S.float())
    S.fill_(65536.0)
    state = run(call | dict(initial_state=S, g=torch.full_like(call["g"], -4.0)))[1]
    assert rel_error(state, torch.full_like(state, 65536.0) * math.exp(-4)) < 1e-6


def test_a_bf16_state_is_its_fp32_copy():
    call = call_on_gpu("typical+states", lengths=THREE)
    S = call["initial_state"].bfloat16()
    assert_same_bits(run(call | dict(initial_state=S)), run(call | dict(initial_state=S.float())))


# ---------------------------------------------------------------- strides, offsets, sizes of one
@pytest.mark.parametrize("lengths", ((33,), THREE))
@pytest.mark.parametrize("form", ("A", "B"))
def test_strided_inputs_equal_contiguous_ones(form, lengths):
    call = call_on_gpu("typical+states", form, lengths=lengths)
    expected = run(call)
    for what, changes in strided_versions(call).items():
        for n, x in changes.items():
            assert torch.equal(x, call[n])
        assert_same_bits(run(call | changes), expected, what)


def test_views_of_a_projection_are_not_copied():
    """Peak memory of a call is the same with strided inputs."""
    calls = [call_on_gpu("typical", form, T=4096, H=8) for form in ("B", "C")]
    peaks = []
    for call in calls:
        run(call)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(call)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] == peaks[1]


def test_offsets_of_every_kind_give_the_same():
    call = call_on_gpu("typical+states", lengths=THREE)
    cu, expected = call["cu_seqlens"], run(call)
    for dtype in (torch.int32, torch.int64):
        strided = torch.stack((cu, cu + 999), 1).to(dtype)[:, 0]
        for x in (cu.to(dtype), strided, cu.to(dtype).cpu(), strided.cpu()):
            for extra in ({}, {"cu_seqlens_cpu": cu.cpu()}, {"cu_seqlens_cpu": cu.cpu().long()}):
                result = run(call | dict(cu_seqlens=x) | extra)
                assert_same_bits(result, expected, f"{dtype} {x.stride()} {x.device}")


@pytest.mark.parametrize("B", (1, 2))
@pytest.mark.parametrize("T", (1, 65))
@pytest.mark.parametrize("H", (1, 2))
def test_dimensions_of_size_one(B, T, H):
    call = batch([call_on_gpu("typical+states", H=3, T=70, seed=n) for n in range(B)])
    views = {name: call[name][:, :T, :H] for name in TOKENS}
    views |= dict(initial_state=call["initial_state"][:, :H], A_log=call["A_log"][:H])
    views |= dict(dt_bias=call["dt_bias"].view(3, 128)[:H])
    result = run(call | views)
    check(call | views, result=result)
    whole = {name: x.contiguous() for name, x in views.items()}
    assert_same_bits(result, run(call | whole))


@pytest.mark.parametrize(
    "cu",
    (
        (0, 37, 101, 2_000_000_000),
        (0, 1_000_000, 1_000_001, 228),
        (0, 101, 37, 228),
        (-50, -37, -1, 228),
        (5_000_000, 5_000_037, 5_000_101, 5_000_228),
        (0, 228, 228, 456),
        (-(2**31), 2**31 - 1, -(2**31), 2**31 - 1),
    ),
)
def test_contradictory_offsets_stay_in_bounds(cu):
    """Values mean nothing then; the context and a following call have to survive."""
    call = call_on_gpu("typical+states", lengths=THREE)
    first = run(call)
    run(call | dict(cu_seqlens=torch.tensor(cu, dtype=torch.int32, device=DEVICE)))
    torch.cuda.synchronize()
    assert_same_bits(run(call), first)


# ---------------------------------------------------------------- memory
def test_no_final_state_takes_no_memory():
    call = call_on_gpu("typical", lengths=[20] * 128, H=8)
    peaks = {}
    for wanted in (True, False):
        call |= dict(output_final_state=wanted)
        state = run(call)[1]
        assert (state is not None) == wanted
        del state
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = run(call)
        peaks[wanted] = torch.cuda.max_memory_allocated() - before
        del result
    assert peaks[True] - peaks[False] >= 128 * 8 * 128 * 128 * 4


@pytest.mark.parametrize("count", (127, 128))
def test_sequences_shorter_than_chunks_have_room(count):
    call = call_on_gpu("typical+states", H=6, lengths=[(16, 32, 64)[n % 3] for n in range(count)])
    first = run(call)
    check(call, result=first)
    assert_each_is_as_alone(call, first, range(0, count, 9))
    for value in (math.nan, 1e30):
        poison(value, first)
        assert_same_bits(run(call), first)


@pytest.mark.parametrize("lengths", ((80,), (129,), (20, 20)))
def test_small_batches_have_room(lengths):
    call = call_on_gpu("typical+states", H=6, lengths=lengths)
    first = run(call)
    check(call, result=first)
    poison(like=first)
    assert_same_bits(run(call), first)


def test_thousands_of_single_tokens():
    N = 4096
    call = call_on_gpu("typical", lengths=[1] * N, H=2)
    first = run(call)
    check(call, result=first)
    assert_each_is_as_alone(call, first, (0, 1, N // 2, N - 1))
    poison(like=first)
    assert_same_bits(run(call), first)
    peaks = []
    for changed in (call, call | dict(cu_seqlens=None)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(changed | dict(output_final_state=False))
        peaks.append((torch.cuda.max_memory_allocated() - before) >> 20)
    print(f"peak MiB of {N} sequences of 1 and of 1 sequence of {N}: {peaks}")


@pytest.mark.parametrize("T", (771, 968, 1303))
@pytest.mark.parametrize("value", (math.nan, 1e30))
def test_results_do_not_depend_on_what_memory_held(T, value):
    call = call_on_gpu("typical+states", T=T)
    first = run(call)
    for _ in range(3):
        assert_same_bits(run(call), first, "fresh")
    for _ in range(3):
        poison(value, first)
        assert_same_bits(run(call), first, f"after {value}")


@pytest.mark.parametrize("lengths", ((1,), (16,), (64,), (4096,), (0, 1, 0, 64, 300, 0, 5)))
def test_results_do_not_depend_on_what_shared_memory_held(lengths):
    """A product of NaN matrices passes through the shared memory of all SMs before each call."""
    call = call_on_gpu("typical+states", lengths=lengths)
    first = run(call)
    nan = torch.full((4096, 4096), math.nan, dtype=torch.bfloat16, device=DEVICE)
    for i in range(200):
        torch.mm(nan, nan)
        assert_same_bits(run(call), first, f"call {i}")


def test_inputs_are_not_written():
    call = call_on_gpu("typical+states", lengths=THREE)
    before = {n: x.clone() for n, x in call.items() if isinstance(x, torch.Tensor)}
    run(call)
    assert all(torch.equal(call[n], x) for n, x in before.items())


# ---------------------------------------------------------------- streams, threads, graphs
@pytest.mark.parametrize("in_thread", (False, True))
def test_runs_on_the_current_stream(in_thread):
    """Only stream order separates the new data from the call, and the call from the addition."""
    calls = [call_on_gpu("typical+states", lengths=THREE, seed=s) for s in range(2)]
    expected = [[x + 1 for x in run(call)] for call in calls]
    static = clones(calls[0])
    torch.cuda.synchronize()

    def repeat():
        stream = torch.cuda.Stream()
        for i in range(20):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                written_into(static, calls[i % 2])
                results.append([x + 1 for x in run(static)])
            stream.synchronize()

    results = []
    if in_thread:
        thread = threading.Thread(target=repeat)
        thread.start()
        thread.join()
    else:
        repeat()
    assert len(results) == 20
    for i, result in enumerate(results):
        assert_same_bits(result, expected[i % 2], f"repeat {i}")


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_a_graph_replays_with_new_data_and_offsets(dtype):
    """Eight sequences of 2048 tokens together; last, one long and seven of six tokens."""
    splits = [[256] * 8, [1, 700, 0, 47, 300, 64, 65, 871], [2006] + [6] * 7]
    calls = [call_on_gpu("typical+states", lengths=x, seed=s) for s, x in enumerate(splits)]
    calls = [call | dict(cu_seqlens=call["cu_seqlens"].to(dtype)) for call in calls]
    expected = [run(call) for call in calls]
    static = clones(calls[0])
    graph, result = captured(lambda: run(static))
    for i in (0, 1, 2, 1, 0, 2):
        written_into(static, calls[i])
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(result, expected[i], f"data {i}")
    for i in range(500):
        graph.replay()
        if i % 50 == 0:
            assert_same_bits(result, expected[2], f"replay {i}")
    torch.cuda.synchronize()
    assert_same_bits(result, expected[2])


def test_a_dense_graph_replays_with_new_data():
    calls = [call_on_gpu("ub_typ+states", T=200, seed=s) for s in range(2)]
    expected = [run(call) for call in calls]
    static = clones(calls[0])
    graph, result = captured(lambda: run(static))
    for i in (0, 1, 0):
        written_into(static, calls[i])
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(result, expected[i], f"data {i}")


def test_what_a_capture_makes_first_does_not_outlive_it_broken():
    """A parameter that is not given, first needed inside of a capture: eager calls after it, and
    after the graph's memory is gone, are right.
    """
    heads = 13  # no other test has this many
    call = call_on_gpu("typical+states", T=70, H=heads)
    run(call)
    torch.cuda.synchronize()
    bare = call | dict(A_log=None, dt_bias=None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(bare)
    graph.replay()
    torch.cuda.synchronize()
    check(bare, result=result)
    del graph, result
    poison()
    check(bare)


def test_a_cold_capture_raises_and_leaves_the_process_usable():
    from kda_cute import forward

    call = call_on_gpu("typical+states", lengths=THREE)
    expected = run(call)
    for function in vars(forward).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    with pytest.raises(RuntimeError, match="^chunk_kda is captured before"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run(call)
    torch.cuda.synchronize()
    assert_same_bits(run(call), expected)


def test_what_cannot_be_captured_says_so():
    call = call_on_gpu("typical+states", lengths=THREE)
    expected = run(call)
    for changes, error in (
        (dict(cu_seqlens=call["cu_seqlens"].cpu()), "^cu_seqlens is on the host"),
        (dict(backend="reference"), "^chunk_kda: backend='reference' can't be captured"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=error):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                run(call | changes)
        assert_same_bits(run(call), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device():
    call = call_on_gpu("typical+states", lengths=THREE)
    there = {n: x.to("cuda:1") if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    assert torch.cuda.current_device() == 0
    result = run(there)
    assert all(x.device == torch.device("cuda", 1) for x in result)
    assert_same_bits([x.to(DEVICE) for x in result], run(call))


# ---------------------------------------------------------------- compiled variants
def configurations() -> dict:
    base = call_on_gpu("typical+states", lengths=THREE)
    dense = {name: call_on_gpu("typical+states", T=65)[name] for name in (*TOKENS, "initial_state")}
    small = call_on_gpu("typical+states", lengths=(64,))
    return {
        "base": base,
        "g fp32": base | dict(g=base["g"].float()),
        "beta fp32": base | dict(beta=base["beta"].float()),
        "no state": base | dict(initial_state=None),
        "state bf16": base | dict(initial_state=base["initial_state"].bfloat16()),
        "no final state": base | dict(output_final_state=False),
        "cu int64": base | dict(cu_seqlens=base["cu_seqlens"].long()),
        "dense": base | dense | dict(cu_seqlens=None),
        "bound -1": base | dict(lower_bound=-1.0),
        "softplus": base | dict(lower_bound=None),
        "log gate": call_on_gpu("typical+states", "A", lengths=THREE),
        "scale 1": base | dict(scale=1.0),
        "no norm": base
        | dict(use_qk_l2norm_in_kernel=False)
        | {name: 0.1 * base[name] for name in "qk"},
        "fused": call_on_gpu("typical+states", "C", lengths=THREE),
        "H 64": call_on_gpu("typical+states", H=64, lengths=THREE),
        "B 2": batch([call_on_gpu("typical+states", T=64, seed=n) for n in range(2)]),
        "one chunk": small,
    }


def test_order_of_configurations_does_not_matter():
    """A kernel compiled for one dtype, option or shape is not taken for another."""
    calls = configurations()
    first = {name: run(call) for name, call in calls.items()}
    for name in reversed(calls):
        assert_same_bits(run(calls[name]), first[name], name)
    for name, call in calls.items():
        check(call, result=first[name])


def test_a_new_shape_or_stride_does_not_compile(monkeypatch):
    """N * H from 1 to far above the SMs, so that whatever the grid decides has been seen once."""
    for H in (1, 2, 96):
        for form in FORMS:
            run(call_on_gpu("typical+states", form, H=H, lengths=THREE))
            run(sequence(call_on_gpu("typical+states", form, H=H, lengths=THREE), 2))
    requested = []
    monkeypatch.setattr(kernel_cache, "object_file", lambda spec, *a, **k: requested.append(spec))
    monkeypatch.setattr(kernel_cache, "load", lambda spec, *a, **k: requested.append(spec))
    for lengths, H in (((5,), 1), ((64, 128), 2), ((700, 3, 0, 29), 5), ([7] * 300, 3)):
        for form in FORMS:
            call = call_on_gpu("typical+states", form, H=H, lengths=lengths)
            run(call)
            run(sequence(call, 0))
            run(call | dict(scale=0.3, cu_seqlens=call["cu_seqlens"].long()))
    assert not requested


def test_the_kernels_ran_and_nothing_else_did():
    """Every kernel of a call in form B and C is one of this package's; no copies, no fills."""
    for form in ("B", "C"):
        call = call_on_gpu("typical+states", form, lengths=THREE)
        run(call)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(call)
            torch.cuda.synchronize()
        on_device = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
        print(on_device)
        assert on_device and all("cutlass" in name for name in on_device), on_device


# ---------------------------------------------------------------- errors
def test_bad_calls_are_refused_before_a_launch_and_a_good_one_follows(monkeypatch):
    call = call_on_gpu("typical+states", lengths=THREE)
    expected = run(call)
    bad = {
        "q": (dict(q=call["q"].cpu()), dict(q=call["q"].half()), dict(q=call["q"][..., :64])),
        "k": (dict(k=call["k"].cpu()), dict(k=call["k"][:, :, :1])),
        "v": (dict(v=torch.cat([call["v"]] * 4, -1)), dict(v=torch.cat([call["v"]] * 2, 2))),
        "g": (dict(g=None), dict(g=call["g"][..., 0])),
        "beta": (dict(beta=None), dict(beta=call["beta"][..., None])),
        "A_log": (dict(A_log=None, lower_bound=None), dict(A_log=call["A_log"].cpu())),
        "dt_bias": (dict(dt_bias=call["dt_bias"][:2]),),
        "initial_state": (
            dict(initial_state=call["initial_state"][:2]),
            dict(initial_state=call["initial_state"].cpu()),
        ),
        "cu_seqlens": (
            dict(cu_seqlens=torch.tensor([0, 101, 37, 228])),
            dict(cu_seqlens=torch.tensor([1, 37, 101, 228])),
            dict(cu_seqlens=torch.tensor([0, 37, 101, 227])),
            dict(cu_seqlens=call["cu_seqlens"].short()),
        ),
    }
    monkeypatch.setattr(chunk_ops, "_kernels", lambda: pytest.fail("a bad call was run"))
    for name, changes in bad.items():
        for change in changes:
            with pytest.raises((TypeError, ValueError), match=f"^{name} "):
                run(call | change)
    two = batch([call_on_gpu("typical", T=11, seed=n) for n in range(2)])
    with pytest.raises(ValueError, match="^cu_seqlens "):
        run(two | dict(cu_seqlens=torch.tensor([0, 11, 22], device=DEVICE)))
    monkeypatch.undo()
    torch.cuda.synchronize()
    assert_same_bits(run(call), expected)


# ---------------------------------------------------------------- what is saved, and tracing
def test_saved_states_are_those_of_the_oracle():
    """Of every chunk, [V, K], in bf16; a sequence owns the slots from cu[n] // 64 + n on."""
    for v_first in (True, False):
        call = call_on_gpu("typical+states", "A", v_first, lengths=THREE)
        v = call["v"].clone().requires_grad_()
        o, _ = run(call | dict(v=v))
        saved = o.grad_fn.saved_tensors[-1]
        assert saved.dtype == torch.bfloat16 and saved.shape == (228 // 64 + 3, 2, 192, 128)
        states = saved[:, :, :128]
        for n, (start, end) in enumerate(((0, 37), (37, 101), (101, 228))):
            for chunk in range(-(-(end - start) // 64)):
                part = sequence(call, n)
                part |= {name: part[name][:, : 64 * chunk] for name in TOKENS}
                expected = exact(part)[1][0]
                expected = expected if v_first else expected.mT
                assert rel_error(states[start // 64 + n + chunk], expected) < 10e-3


def test_asking_for_gradients_does_not_change_the_result():
    call = call_on_gpu("typical+states", lengths=THREE)
    expected = run(call)
    for save_states in (True, False):
        v = call["v"].clone().requires_grad_()
        assert_same_bits(run(call | dict(v=v, save_states=save_states)), expected)


def test_torch_compile_takes_the_whole_call():
    call = as_call(make_problem("typical+states", T=100, device=DEVICE))

    def double(call):
        o, state = run(call | dict(q=call["q"] * 2))
        return o * 2, state + 1

    compiled = torch.compile(double, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(call), double(call))
    torch._dynamo.reset()
