"""`chunk_kda` on the GPU: the kernels' gradients against the float64 oracle, and their contract.

Tolerances are those of the regimes (relative Frobenius norms; A_log and dt_bias relative to the
larger of the sum and its terms); the oracle is `exact_gradients`, which the CPU tests hold to the
token recurrence. Sequences of a packed batch and their last 16 rows are judged on their own too, so
that a bad tail cannot hide.
"""

import functools
import math
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from chunk_calls import (
    DEVICE,
    FORMS,
    GONE,
    LEAVES,
    THREE,
    TOKENS,
    assert_same_bits,
    batch,
    bounds,
    call_on_gpu,
    captured,
    clones,
    exact_gradients,
    gradients,
    integers,
    log_gate_call,
    oracle,
    poison,
    raw_gate_call,
    run,
    sequence,
    strided_versions,
    upstream,
    widened,
    with_leaves,
    written_into,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import kda_cute
from kda_cute import chunk_ops, reference
from kda_cute import compile as kernel_cache
from kda_cute.accuracy.calls import upstream_of
from kda_cute.accuracy.errors import failures, rel_error
from kda_cute.accuracy.measure import compare_gradients, floor_of, scale_of
from kda_cute.accuracy.tolerances import PEERS, REGIMES
from kda_cute.accuracy.tolerances import backward as tolerances
from kda_cute.accuracy.tolerances import medians as allowed_medians

pytestmark = pytest.mark.gpu


# ---------------------------------------------------------------- helpers
def regime_of(tokens: int) -> str:
    """Typical inputs, of so many tokens together or in each row of a batch."""
    return "typical" if tokens > 16 else "few tokens"


backward = functools.partial(gradients, run)  # (call, do, dht, wanted) -> {name: gradient}


def check(
    call, regime="typical", ups=None, got=None, gate_floor=0.0, floor=GONE, each=True
) -> dict:
    """Assert that the gradients are within the regime's tolerances; returns their errors.

    floor: norm below which a gradient stands for 0. gate_floor: the same for those that pass
    through the gate's derivative, which may vanish while all else is large. each: judge every
    sequence on its own, else the median of their errors.
    """
    ups = upstream(call) if ups is None else ups
    got = backward(call, *ups) if got is None else got
    ref, terms = exact_gradients(call, *ups)
    assert list(got) == list(ref)
    for name, x in got.items():
        assert x.dtype == call[name].dtype and x.shape == call[name].shape, name
    floors = dict(floor=floor, gate_floor=gate_floor)
    compared = compare_gradients(call, got, (ref, terms), regime, **floors, each=each)
    assert not failures(compared), f"{failures(compared)} of {compared}"
    return {name: compared[name].error for name in got}


def shown(errors: dict) -> str:
    return ", ".join(f"{n} {1e3 * e:.2f}" for n, e in errors.items())


def of_sequence(call: dict, got: dict, n: int) -> dict:
    """Sequence n's part of the gradients of a call; without those of the parameters."""
    at = bounds(call)
    parts = {m: got[m].flatten(0, 1)[None, at[n] : at[n + 1]] for m in TOKENS if m in got}
    if "initial_state" in got:
        parts["initial_state"] = got["initial_state"][n : n + 1]
    return parts


def upstream_of_sequence(call: dict, ups, n: int):
    at = bounds(call)
    do, dht = ups
    return (
        None if do is None else do.flatten(0, 1)[None, at[n] : at[n + 1]],
        None if dht is None else dht[n : n + 1],
    )


def assert_each_is_as_alone(call: dict, ups, got=None, sequences=None):
    got = backward(call, *ups) if got is None else got
    for n in range(len(bounds(call)) - 1) if sequences is None else sequences:
        alone = backward(sequence(call, n), *upstream_of_sequence(call, ups, n))
        alone = {name: x for name, x in alone.items() if name not in ("A_log", "dt_bias")}
        assert_same_bits(of_sequence(call, got, n), alone, f"sequence {n}")


def count_differences(a: dict, b: dict) -> torch.Tensor:
    """How many values differ in their bits, on the GPU."""
    assert list(a) == list(b)
    return sum((integers(a[n]) != integers(b[n])).sum() for n in a)


def assert_repeats(function, times: int, between=None) -> dict:
    """Gradients of `times` runs have the bits of the first one, which is returned."""
    first = function()
    differences = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(times):
        if between is not None:
            between()
        differences += count_differences(function(), first)
    assert differences.item() == 0
    return first


def assert_close_sums(a: dict, b: dict):
    """Gradients of the parameters, whose terms may be added in another order."""
    for name in ("A_log", "dt_bias"):
        if name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-4 * b[name].abs().max())


def of_tokens(got: dict) -> dict:
    return {name: x for name, x in got.items() if name not in ("A_log", "dt_bias")}


# ---------------------------------------------------------------- accuracy
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", REGIMES)
def test_accuracy(regime, form):
    for seed in range(2):
        call = call_on_gpu(regime, form, seed == 0, T=512, H=2, seed=seed)
        ups = upstream_of(regime, call, seed + 1)
        errors = check(call, regime, ups, floor=floor_of(regime, ups[0]))
        print(f"{regime} {form} {seed}: {shown(errors)}")


@pytest.mark.parametrize("regime", PEERS)
def test_gradients_are_as_exact_as_the_best_peers(regime):
    """Median over seeds, at most 1.3 times what that peer's kernels were measured at."""
    of_o, errors = [], []
    for seed in range(5):
        call = call_on_gpu(regime, T=512, H=2, seed=seed)
        if call["initial_state"] is None:
            call |= dict(initial_state=torch.zeros(1, 2, 128, 128, device=DEVICE))
        of_o.append(rel_error(run(call)[0], oracle(call, reference.scan_forward)[0]))
        errors.append(check(call, regime, upstream_of(regime, call, seed + 1)))
    medians = {n: statistics.median(e[n] for e in errors) for n in LEAVES}
    print(f"{regime}: o {1e3 * statistics.median(of_o):.2f}, {shown(medians)}")
    allowed = allowed_medians(regime)
    assert statistics.median(of_o) <= allowed["o"]
    misses = {n: e for n, e in medians.items() if not e <= allowed[n]}
    assert not misses, (misses, allowed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", ("typical+states", "mixed+states", "ub_typ+states"))
def test_ragged_sequences(regime, form):
    check(call_on_gpu(regime, form, H=3, lengths=(1, 15, 64, 65, 0, 300, 1000, 128)), regime)


@pytest.mark.parametrize("form", FORMS)
def test_dense_batches(form):
    for regime in ("strong+states", "ub_burst+states"):
        calls = [call_on_gpu(regime, form, T=209, seed=n) for n in range(3)]
        check(batch(calls), regime)


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


def test_rows_of_zeros():
    """q and k of norm 0 are divided by sqrt(1e-6) only: their gradients are 1000 times larger."""
    for name in ("q", "k", "v"):
        call = call_on_gpu("typical+states", T=130)
        rows = call[name].clone()
        rows[:, ::7] = 0
        check(call | {name: rows})
    do, dht = upstream(call)
    do[:, 64:] = 0
    check(call, ups=(do, dht))


def test_absent_gate_parameters_are_zeros():
    call = call_on_gpu("typical+states", T=130)
    ups = upstream(call)
    zeros = {name: torch.zeros_like(call[name]) for name in ("A_log", "dt_bias")}
    expected = backward(call | zeros, *ups)
    check(call | zeros, got=expected)
    for absent in (("A_log", "dt_bias"), ("dt_bias",), ("A_log",)):
        got = backward(call | zeros | dict.fromkeys(absent), *ups)
        assert_same_bits(got, {n: x for n, x in expected.items() if n not in absent}, str(absent))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gradients_have_the_dtypes_of_the_inputs(dtype):
    """All that may be either, at once and one at a time; `check` compares dtypes."""
    call = call_on_gpu("typical+states", lengths=THREE)
    either = {n: call[n].to(dtype) for n in LEAVES if n not in "qkv"}
    for changes in (either, *({n: x} for n, x in either.items())):
        check(call | changes)
    check(call_on_gpu("typical+states", "A", lengths=THREE) | {n: either[n] for n in ("beta",)})


def test_dt_bias_is_by_head_and_channel_in_either_shape():
    call = call_on_gpu("typical+states", T=100, H=3)
    call |= dict(dt_bias=torch.randn(3, 128, device=DEVICE))
    ups = upstream(call)
    got = backward(call, *ups)
    check(call, got=got)
    flat = backward(call | dict(dt_bias=call["dt_bias"].flatten()), *ups)
    assert flat["dt_bias"].shape == (384,)
    assert_same_bits(flat | dict(dt_bias=flat["dt_bias"].view(3, 128)), got)


# ---------------------------------------------------------------- gates at and beyond their bound
@pytest.mark.parametrize("T, H", ((143, 2), (4096, 2), (143, 96)))
def test_gates_at_the_projection_bound(T, H):
    """g = -5 at each token and channel, and patterns of it; the gate's derivative is 0 at +-30."""
    token, channel = torch.arange(T)[:, None, None], torch.arange(128)
    patterns = {
        "all": torch.full((1,), 30.0),
        "nearly": torch.full((1,), 4.0),
        "by token": 30.0 - 60 * (token % 2),
        "by 16 tokens": 30.0 - 60 * (token // 16 % 2),
        "by channel": 30.0 - 60 * (channel % 2),
    }
    for name, raw in patterns.items():
        call = raw_gate_call(raw, T=T, H=H)
        ups = upstream(call)
        gate_floor = 0.0 if name == "nearly" else 1e-8 * ups[0].double().norm().item()
        print(name, shown(check(call, "weak", ups, gate_floor=gate_floor)))


def test_errors_are_flat_over_constant_gates():
    errors = {}
    for g in (-0.01, -0.5, -1.0, -2.0, -2.5, -3.0, -4.0, -4.9, -5.0):
        errors[g] = check(log_gate_call(torch.tensor(g), T=256 + 7))
        print(g, shown(errors[g]))
    for name in errors[-5.0]:
        values = [e[name] for e in errors.values()]
        assert max(values) <= max(2 * statistics.median(values), 4e-3), (name, values)


@pytest.mark.parametrize("raw", (5.0, 5.5, 6.0, 8.0, 20.0))
def test_softplus_gates_that_empty_a_block(raw):
    check(raw_gate_call(torch.tensor(raw), None, T=129, H=8), "ub_strong")


def erasing_call(at: int, channels: slice) -> dict:
    """A token whose gate is exp(-1000), on those channels, among tokens that keep everything."""
    g = torch.zeros(129, 1, 128)
    g[at, :, channels] = -1000.0
    return log_gate_call(g, T=129, H=8)


@pytest.mark.parametrize("channels", (slice(None), slice(None, None, 2)), ids=("all", "even"))
@pytest.mark.parametrize("at", (0, 15, 16, 63, 64, 70, 128))
def test_one_token_may_erase_everything(at, channels):
    """The gate that does it has a gradient of 0, up to the rounding of what cancels in it."""
    call = erasing_call(at, channels)
    got = backward(call, *upstream(call))
    check(call, "nodecay", got=got)
    rms = got["g"].square().mean().sqrt()
    assert (got["g"][:, at, :, channels].abs() <= 1e-3 * rms).all()


@pytest.mark.parametrize("lower_bound", (-1.0, -5.9, -6.0, -11.0, -12.0, -100.0))
def test_any_lower_bound(lower_bound):
    call = raw_gate_call(torch.randn(129, 8, 128), lower_bound, T=129, H=8)
    check(call)
    call = raw_gate_call(torch.tensor(30.0), lower_bound, T=129, H=8)
    ups = upstream(call)
    check(call, "weak", ups, gate_floor=1e-8 * ups[0].double().norm().item())


@pytest.mark.parametrize("loss", ("o", "final state"))
@pytest.mark.parametrize("T", (64, 65))
def test_strong_and_weak_halves(T, loss):
    """Sums of one output: what is finite and not in the oracle is so here."""
    halves = torch.full((T, 1, 1), -1e-4)
    halves[:32] = -4.9
    patterns = [halves, halves.flip(0)]
    for at in (0, 15, 16, 63):
        spike = torch.full((T, 1, 1), -1e-4)
        spike[at] = -5.0
        patterns.append(spike)
    for g in patterns:
        call = log_gate_call(g, T=T)
        do, dht = (torch.ones_like(x) for x in upstream(call))
        check(call, "weak", (do, None) if loss == "o" else (None, dht))


def test_the_gradient_of_saturated_gates_is_not_rounding():
    """g = -5 at each token, no states: rms of dg is 1e-3 of the others'; then a bounded gate whose
    derivative is not 0; then gates sixteen times as steep.
    """
    call = log_gate_call(torch.tensor(-5.0), T=128) | dict(initial_state=None)
    do, dht = upstream(call)
    print(shown(check(call, "strong", (do, None))))
    raw = raw_gate_call(torch.tensor(3.0), T=128) | dict(initial_state=None)
    print(shown(check(raw, "strong", (do, None))))
    call = raw_gate_call(torch.randn(2048, 2, 128), T=2048)
    call |= dict(A_log=torch.full_like(call["A_log"], math.log(16)))
    for lower_bound in (-5.0, None):
        steep = call | dict(lower_bound=lower_bound)
        errors = check(steep, "weak" if lower_bound else "ub_typ")
        print(shown(errors))
        assert errors["A_log"] <= 1e-2 and errors["dt_bias"] <= 1e-2


@pytest.mark.parametrize("form", ("A", "B"))
def test_one_token_without_a_state_has_no_gradient_of_the_gate(form):
    call = call_on_gpu("typical", form, lengths=[1] * 64)
    do, dht = upstream(call)
    for ups in ((do, None), (do, dht)):
        got = backward(call, *ups)
        assert all(not got[n].any() for n in ("g", "A_log", "dt_bias") if n in got)
        check(call, ups=ups, got=got)


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
    print(shown(check(call | dict(use_qk_l2norm_in_kernel=False), "degenerate")))


def test_one_key_at_every_token():
    T = 16384
    call = raw_gate_call(torch.tensor(-12.0), T=T, H=1)
    k = call["k"][:, :1].expand_as(call["k"])
    v = call["v"][:, torch.arange(T, device=DEVICE) % 16]
    beta = torch.full_like(call["beta"], 8.0)
    print(shown(check(call | dict(q=k, k=k, v=v, beta=beta), "degenerate")))


def test_blocks_of_sixteen_equal_keys():
    call = call_on_gpu("weak+beta1+states", T=1024)
    k = call["k"][:, ::16].repeat_interleave(16, 1)
    print(shown(check(call | dict(k=k), "degenerate")))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_b_of_zero_and_nearly(dtype):
    """dv is exactly 0 where b is 0; dbeta there is as large as elsewhere, and as exact."""
    call = log_gate_call(torch.tensor(-0.1), T=128)
    beta = torch.full_like(call["beta"], 0.5)
    beta[:, ::2], beta[:, 1::8], beta[:, 3::8] = 0.0, 1e-10, 1e-6
    call |= dict(beta=beta.to(dtype))
    ups = upstream(call)
    got, (ref, _) = backward(call, *ups), exact_gradients(call, *ups)
    check(call, got=got)
    assert not got["v"][:, ::2].any() and got["v"][:, 1::2].any()
    for rows in (slice(0, None, 2), slice(1, None, 8), slice(3, None, 8), slice(5, None, 8)):
        assert rel_error(got["beta"][:, rows], ref["beta"][:, rows]) <= 25e-3


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
            ups = upstream(call)
            got = backward(call, *ups)
            assert_each_is_as_alone(call, ups, got)
            if r in (1, 15, 24, 56, 63):
                check(call, ups=ups, got=got)


@pytest.mark.parametrize(
    "lengths", ((65, 66, 71, 79), (57, 2, 5), (2049, 1011, 513, 256, 128, 65, 32, 16, 8, 4, 5, 1))
)
def test_short_tails_repeat_bitwise(lengths):
    call = call_on_gpu("typical+states", lengths=lengths)
    ups = upstream(call)
    first = assert_repeats(lambda: backward(call, *ups), 50)
    check(call, ups=ups, got=first)
    assert_each_is_as_alone(call, ups, first)


@pytest.mark.parametrize("T", (1, 2, 15, 16, 17, 63, 64, 65))
def test_short_dense_batches(T):
    for B in (1, 2):
        call = batch([call_on_gpu("typical+states", T=T, H=8, seed=n) for n in range(B)])
        ups = upstream(call)
        first = assert_repeats(lambda call=call, ups=ups: backward(call, *ups), 50)
        check(call, regime_of(T), ups, first)


@pytest.mark.parametrize("T", (63, 500, 1000, 1500))
def test_dense_batches_equal_packed_ones(T):
    call = batch([call_on_gpu("typical+states", T=T, seed=n) for n in range(2)])
    do, dht = upstream(call)
    dense = backward(call, do, dht)
    check(call, ups=(do, dht), got=dense)
    flat = {name: call[name].flatten(0, 1)[None] for name in TOKENS}
    flat |= dict(cu_seqlens=torch.tensor([0, T, 2 * T], device=DEVICE))
    packed = backward(call | flat, do.flatten(0, 1)[None], dht)
    packed = {name: x.view(dense[name].shape) for name, x in packed.items()}
    assert_same_bits(of_tokens(packed), of_tokens(dense))
    assert_close_sums(packed, dense)
    assert_each_is_as_alone(call, (do, dht), dense)


@pytest.mark.parametrize("N, H", ((200, 2), (33, 4), (3, 96)))
@pytest.mark.parametrize("packed", (True, False))
def test_a_sequence_does_not_depend_on_its_batch(packed, N, H):
    """Grids far above one wave of the GPU, and one sequence alone."""
    calls = [call_on_gpu("mixed+states", T=150, H=H, seed=n) for n in range(4)]
    ups = [upstream(c, seed=n) for n, c in enumerate(calls)]
    call = batch([calls[n % 4] for n in range(N)])
    do, dht = (torch.cat([ups[n % 4][i] for n in range(N)]) for i in range(2))
    if packed:
        call |= {name: call[name].flatten(0, 1)[None] for name in TOKENS}
        call |= dict(cu_seqlens=150 * torch.arange(N + 1, device=DEVICE))
        do = do.flatten(0, 1)[None]
    got = backward(call, do, dht)
    assert_each_is_as_alone(call, (do, dht), got, (0, 1, N - 1))
    for n in range(4, N):
        same = of_sequence(call, got, n % 4), of_sequence(call, got, n)
        assert_same_bits(*same, f"sequence {n}")


@pytest.mark.parametrize("form", FORMS)
def test_neighbours_do_not_leak(form):
    """Sequences 0 and 2 have the same gradients, whatever sequence 1 holds."""
    call = call_on_gpu("typical+states", form, lengths=THREE)
    do, dht = upstream(call)
    clean = backward(call, do, dht)

    def spoiled(names, factor, upstream_factor=1.0):
        changed = {}
        for name in names:
            changed[name] = call[name].clone()
            changed[name][1 if name == "initial_state" else (0, slice(37, 101))] *= factor
        bad_do, bad_dht = do.clone(), dht.clone()
        bad_do[:, 37:101] *= upstream_factor
        bad_dht[1] *= upstream_factor
        return backward(call | changed, bad_do, bad_dht)

    for got in (
        spoiled("qkv", 1e4),
        spoiled(("g", "beta"), math.nan, math.nan),
        spoiled((*TOKENS, "initial_state"), math.nan, math.nan),
        spoiled((), 1.0, math.nan),
    ):
        for n in (0, 2):
            pair = of_sequence(call, got, n), of_sequence(call, clean, n)
            assert_same_bits(*pair, f"sequence {n}")
        assert not torch.equal(got["q"][:, 37:101], clean["q"][:, 37:101])


@pytest.mark.parametrize("packed", (True, False))
def test_bytes_past_the_last_token_are_not_read(packed):
    call = call_on_gpu("typical+states", lengths=THREE)
    if not packed:
        call = sequence(call, 2)
    do, dht = upstream(call)
    T = call["q"].shape[1]
    views = {name: widened(call[name], 64)[:, :T] for name in TOKENS}
    got = backward(call | views, widened(do, 64)[:, :T], dht)
    assert_same_bits(got, backward(call, do, dht))


def test_rows_past_the_last_offset_do_not_count():
    """A batch padded to a fixed T, as for graphs: the sequences are as without the padding."""
    call = call_on_gpu("typical+states", lengths=THREE)
    do, dht = upstream(call)
    expected = backward(call, do, dht)
    wide = {name: widened(call[name], 100) for name in TOKENS}
    poison(like=[*wide.values()])
    got = backward(call | wide, widened(do, 100), dht)
    got |= {name: got[name][:, :228] for name in TOKENS}
    assert_same_bits(of_tokens(got), of_tokens(expected))
    assert_close_sums(got, expected)


@pytest.mark.parametrize("lengths", ((0, 0, 64, 0, 0, 66, 0), (0, 0), (0, 0, 1, 0), ()))
@pytest.mark.parametrize("with_state", (True, False))
def test_empty_sequences_pass_the_gradient_on(lengths, with_state):
    call = call_on_gpu("typical+states", lengths=lengths)
    S = torch.randn(len(lengths), 2, 128, 128, device=DEVICE) if with_state else None
    call |= dict(initial_state=S)
    do, dht = upstream(call)
    got = backward(call, do, dht)
    assert ("initial_state" in got) == with_state
    for n, length in enumerate(lengths):
        if length == 0 and with_state:
            assert torch.equal(got["initial_state"][n], dht[n])
    filled = [n for n, length in enumerate(lengths) if length]
    assert_each_is_as_alone(call, (do, dht), got, filled)
    if not filled:
        assert not got["A_log"].any() and not got["dt_bias"].any()
        return
    check(call, regime_of(sum(lengths)), (do, dht), got)
    parts = {name: x[filled] for name, x in (("initial_state", S),) if with_state}
    at = [0, *torch.tensor([lengths[n] for n in filled]).cumsum(0).tolist()]
    dense = call | parts | dict(cu_seqlens=torch.tensor(at, device=DEVICE))
    expected = backward(dense, do, dht[filled])
    if with_state:
        got["initial_state"] = got["initial_state"][filled]
    assert_same_bits(of_tokens(got), of_tokens(expected))
    assert_close_sums(got, expected)
    if with_state:  # without do: dht alone is passed on
        only = backward(call, None, dht, ("initial_state",))["initial_state"]
        assert all(torch.equal(only[n], dht[n]) for n, x in enumerate(lengths) if x == 0)


@pytest.mark.parametrize("with_state", (True, False))
def test_many_heads_and_ragged_lengths_repeat(with_state):
    regime = "typical+states" if with_state else "typical"
    call = call_on_gpu(regime, H=48, lengths=(1238, 1199, 1240, 1216, 1187, 1203, 519))
    ups = upstream_of(regime, call)
    first = assert_repeats(lambda: backward(call, *ups), 100)
    assert_each_is_as_alone(call, ups, first, (2, 6))
    last = sequence(call, 6)
    check(last, ups=upstream_of_sequence(call, ups, 6))


# ---------------------------------------------------------------- states
def gradients_of_one_hot(v_first: bool) -> tuple[dict, torch.Tensor]:
    """(gradients, the exact dS_0) of one token with b = 0, g = 0 and a one-hot q."""
    a, b = torch.zeros(128), torch.arange(128.0)
    a[3] = 1
    kv = lambda x: (x.mT if v_first else x).to(DEVICE)[None, None]  # noqa: E731
    q = a.to(DEVICE, torch.bfloat16)[None, None, None]
    zero = torch.zeros_like(q)
    S, dht = torch.zeros(128, 128), torch.zeros(128, 128)
    S[5, 7], dht[9, 11], dht[3, 2] = 2.0, 4.0, 0.5  # [K, V]
    call = dict(q=q, k=q, v=zero, g=zero, beta=zero[..., 0], initial_state=kv(S))
    call |= dict(scale=0.25, output_final_state=True, state_v_first=v_first)
    got = backward(call, b.to(DEVICE, torch.bfloat16)[None, None, None], kv(dht))
    return got, kv(0.25 * torch.outer(a, b) + dht)


@pytest.mark.parametrize("v_first", (True, False))
def test_the_state_gradient_comes_out_as_it_is_indexed(v_first):
    """b = 0, g = 0, one token, q one-hot: dS_0[k, v] = scale q[k] do[v] + dS_T[k, v], exactly; and
    dq[k] = scale sum_v S_0[k, v] do[v], dg[k] = sum_v S_0 dS_0.
    """
    got, dS = gradients_of_one_hot(v_first)
    assert torch.equal(got["initial_state"], dS)
    dq = torch.zeros(128)
    dq[5] = 0.25 * 2.0 * 7
    assert torch.equal(got["q"].flatten().cpu(), dq.bfloat16())
    assert not got["v"].any() and (got["k"].abs() <= 1e-12).all()


@pytest.mark.parametrize("form", FORMS)
def test_state_layouts_are_transposes_of_each_other(form):
    for regime in ("typical+states", "typical"):
        first, second = (call_on_gpu(regime, form, v, lengths=THREE) for v in (True, False))
        do, dht = upstream(first)
        got, other = backward(first, do, dht), backward(second, do, dht.mT.contiguous())
        if regime != "typical":
            other["initial_state"] = other["initial_state"].mT
        assert_same_bits(got, other)


def chained(call: dict, cut: int, do, dht) -> dict:
    """Gradients of a call with initial states, by two calls: the tokens before the cut and those from
    it on, S_T of the first passed forward, dS_0 of the second passed backward.
    """
    at = bounds(call)
    m = max(n for n, start in enumerate(at) if start < cut)
    state, tail = call["initial_state"], [x - cut for x in at[m + 1 :]]

    def part(rows, offsets, state):
        offsets = torch.tensor(offsets, device=DEVICE)
        cu = dict(cu_seqlens=offsets, initial_state=state)
        return call | {n: call[n][:, rows] for n in TOKENS} | cu

    first = part(slice(cut), [*at[: m + 1], cut], state[: m + 1])
    middle = run(first)[1][m:]
    second = part(slice(cut, None), [0, *tail], torch.cat([middle, state[m + 1 :]]))
    back = backward(second, do[:, cut:], dht[m:])
    dS = back["initial_state"]
    front = backward(first, do[:, :cut], torch.cat([dht[:m], dS[:1]]))
    got = {}
    for name, x in front.items():
        if name in TOKENS:
            got[name] = torch.cat([x, back[name]], 1)
        elif name == "initial_state":
            got[name] = torch.cat([x, dS[1:]])
        else:
            got[name] = x + back[name]
    return got


@pytest.mark.parametrize("v_first", (True, False))
@pytest.mark.parametrize("form", ("A", "B"))
@pytest.mark.parametrize("cut", (75, 64))
def test_two_calls_chained_by_the_states_equal_one(cut, form, v_first):
    call = call_on_gpu("typical+states", form, v_first, T=200)
    ups = upstream(call)
    got, whole = chained(call, cut, *ups), backward(call, *ups)
    check(call, ups=ups, got=got)
    check(call, ups=ups, got=whole)
    if cut == 64:  # the same chunks: states and their gradients are fp32 on both ways
        assert_same_bits(of_tokens(got), of_tokens(whole))


@pytest.mark.parametrize("H", (1, 4))
@pytest.mark.parametrize("cut", (4096, 4097))
@pytest.mark.parametrize("packed", (False, True))
def test_halves_of_a_long_sequence_with_heads_that_differ(packed, cut, H):
    """The decay of head h is exp(-0.3 (h + 1)): one of another head is far off."""
    lengths = dict(lengths=(6000, 2192)) if packed else dict(T=8192)
    g = -0.3 * (1 + torch.arange(H))[None, :, None]
    call = log_gate_call(g, H=H, **lengths)
    ups = upstream(call)
    got, whole = chained(call, cut, *ups), backward(call, *ups)
    print(shown(check(call, ups=ups, got=got)))
    check(call, ups=ups, got=whole)
    if cut == 4096:
        assert_same_bits(of_tokens(got), of_tokens(whole))
    raw = call_on_gpu("typical+states", "B", H=H, T=300)
    raw |= dict(A_log=torch.linspace(-1, 1, H, device=DEVICE))
    ups = upstream(raw)
    check(raw, ups=ups, got=chained(raw, 130, *ups))


@pytest.mark.parametrize("v_first", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_state_gradients_keep_fp32(dtype, v_first):
    call = call_on_gpu("typical", "A", v_first, T=1)
    call |= dict(beta=torch.zeros_like(call["beta"]), g=torch.zeros_like(call["g"]))
    for value in (1 + 2**-12, 65536.0, 2.0**-25):
        S = torch.full((1, 2, 128, 128), 0.5, dtype=dtype, device=DEVICE)
        dht = torch.full(S.shape, value, device=DEVICE)
        for do in (None, torch.zeros_like(call["v"])):
            dS = backward(call | dict(initial_state=S), do, dht)["initial_state"]
            assert dS.dtype == dtype and torch.equal(dS, dht.to(dtype))
    S.fill_(65536.0)
    strong = call | dict(initial_state=S, g=torch.full_like(call["g"], -4.0))
    check(strong, "degenerate", floor=1e-6)  # with b = 0, dk and dv are 0
    dS = backward(strong, None, dht)["initial_state"]
    assert rel_error(dS, dht.double() * math.exp(-4)) < (1e-6 if dtype == torch.float32 else 2e-3)


def test_a_bf16_state_is_its_fp32_copy():
    call = call_on_gpu("typical+states", lengths=THREE)
    S, ups = call["initial_state"].bfloat16(), upstream(call)
    got, wide = (backward(call | dict(initial_state=x), *ups) for x in (S, S.float()))
    wide["initial_state"] = wide["initial_state"].bfloat16()
    assert_same_bits(got, wide)


def test_rounding_of_the_reverse_recurrence_does_not_grow():
    """One key at each token, b = 1, no decay: dS_0 and dg are exactly 0, what is left is rounding."""
    ratios = {}
    for T in (256, 4096):
        rng = torch.Generator(DEVICE).manual_seed(0)
        normal = functools.partial(torch.randn, generator=rng, device=DEVICE)
        k = torch.zeros(1, T, 1, 128, dtype=torch.bfloat16, device=DEVICE)
        k[..., :16] = 0.25
        v, do = (normal(1, T, 1, 128).bfloat16() for _ in range(2))
        call = dict(q=k, k=k, v=v, g=torch.zeros(1, T, 1, 128, device=DEVICE))
        call |= dict(beta=torch.ones(1, T, 1, device=DEVICE), output_final_state=True)
        got = backward(call | dict(initial_state=normal(1, 1, 128, 128)), do)
        rms = {n: x.double().square().mean().sqrt().item() for n, x in got.items()}
        ratios[T] = {n: rms[n] / rms["v"] for n in ("initial_state", "g")}
        by_row = got["g"].double().square().view(-1, 64, 128).mean((0, 2)).sqrt() / rms["v"]
        print(f"T = {T}: {ratios[T]}; dg by row of a chunk {by_row[::9].tolist()}")
        expected = 128**-0.5 * do.double()  # o = scale v
        assert rel_error(got["v"], expected) <= 10e-3
    for name, ratio in ratios[4096].items():
        assert ratio <= max(1.5 * ratios[256][name], 1e-9), (name, ratios)
        assert ratio <= 5e-2


# ---------------------------------------------------------------- what asks for gradients
def test_each_subset_of_inputs_gets_its_gradients():
    """Each tensor alone, and each left out, as when all of them are asked for."""
    for form in FORMS:
        call = call_on_gpu("typical+states", form, lengths=THREE)
        do, dht = upstream(call)
        full = backward(call, do, dht)
        assert set(full) == {n for n in LEAVES if call.get(n) is not None}
        check(call, ups=(do, dht), got=full)
        for name in full:
            for wanted in ((name,), tuple(n for n in full if n != name)):
                changed, leaves = with_leaves(call, wanted)
                others = {n: call[n].detach() for n in full if n not in wanted}
                o, state = run(changed | others)
                torch.autograd.backward((o, state), (do, dht))
                got = {n: x.grad for n, x in leaves.items()}
                assert_same_bits(got, {n: full[n] for n in got}, str(wanted))
                assert all(x.grad is None and not x.requires_grad for x in others.values())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", ("typical+states", "ub_burst+states"))
def test_each_loss_gets_its_gradients(regime, form):
    call = call_on_gpu(regime, form, lengths=THREE)
    do, dht = upstream(call)
    for ups in ((do, None), (None, dht)):
        check(call, regime, ups)
    assert not backward(call, None, dht)["q"].any()  # no state depends on q
    unused = backward(call, do)
    assert_same_bits(backward(call | dict(output_final_state=False), do), unused)
    zero = backward(call, do, torch.zeros_like(dht))
    assert all(torch.equal(zero[n], x) for n, x in unused.items())


def test_a_graph_can_be_walked_twice():
    call, leaves = with_leaves(call_on_gpu("typical+states", lengths=THREE))
    do, dht = upstream(call)
    o, state = run(call)
    once = torch.autograd.grad((o, state), list(leaves.values()), (do, dht), retain_graph=True)
    again = torch.autograd.grad((o, state), list(leaves.values()), (2 * do, dht), retain_graph=True)
    twice = torch.autograd.grad((o, state), list(leaves.values()), (do, dht))
    assert all(torch.equal(x, y) for x, y in zip(once, twice, strict=True))
    assert not torch.equal(once[0], again[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad((o, state), list(leaves.values()), (do, dht))


def test_checkpointing_changes_nothing():
    call = call_on_gpu("typical+states", lengths=THREE)
    ups = upstream(call)
    got = gradients(lambda call: checkpoint(run, call, use_reentrant=False), call, *ups)
    assert_same_bits(got, backward(call, *ups))


def test_a_second_derivative_is_refused():
    call, leaves = with_leaves(call_on_gpu("typical+states", lengths=THREE))
    o, _ = run(call)
    (dq,) = torch.autograd.grad(o.float().sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="^chunk_kda: .* again"):
        dq.sum().backward()


@pytest.mark.parametrize("form", FORMS)
def test_states_that_were_not_saved_are_made_again(form):
    for lengths in (THREE, (1000, 0, 3)):
        call = call_on_gpu("typical+states", form, lengths=lengths)
        for state in (call["initial_state"], None):
            call |= dict(initial_state=state)
            for ups in (upstream(call), (upstream(call)[0], None)):
                got = backward(call | dict(save_states=False), *ups)
                assert_same_bits(got, backward(call, *ups))


def test_inputs_are_not_written():
    call = call_on_gpu("typical+states", lengths=THREE)
    ups = upstream(call)
    before = {n: x.clone() for n, x in call.items() if isinstance(x, torch.Tensor)}
    ups_before = [x.clone() for x in ups]
    backward(call, *ups)
    assert all(torch.equal(call[n], x) for n, x in before.items())
    assert all(torch.equal(x, y) for x, y in zip(ups, ups_before, strict=True))


# ---------------------------------------------------------------- strides, offsets, sizes of one
@pytest.mark.parametrize("lengths", ((33,), THREE))
@pytest.mark.parametrize("form", ("A", "B"))
def test_strided_inputs_equal_contiguous_ones(form, lengths):
    call = call_on_gpu("typical+states", form, lengths=lengths)
    ups = upstream(call)
    expected = backward(call, *ups)
    for what, changes in strided_versions(call).items():
        for n, x in changes.items():
            assert torch.equal(x, call[n])
        assert_same_bits(backward(call | changes, *ups), expected, what)


def test_gradients_reach_a_fused_projection():
    call = call_on_gpu("typical+states", lengths=THREE)
    ups = upstream(call)
    expected = backward(call, *ups)
    fused = torch.cat([call[n] for n in "qkv"], -1).requires_grad_()
    q, k, v = fused.split(128, -1)
    torch.autograd.backward(run(call | dict(q=q, k=k, v=v)), ups)
    assert torch.equal(fused.grad, torch.cat([expected[n] for n in "qkv"], -1))


def test_upstream_gradients_of_any_strides():
    call = call_on_gpu("typical+states", lengths=THREE)
    do, dht = upstream(call)
    one = torch.ones((), device=DEVICE, dtype=torch.bfloat16)
    odd = torch.cat([do.new_zeros(1), do.flatten()])[1:].view(do.shape)
    for strided in (
        torch.cat([do, do + 1], -1)[..., :128],
        torch.cat([do + 1, do], 2)[:, :, 2:],
        do.transpose(1, 2).contiguous().transpose(1, 2),
        do.mT.contiguous().mT,
        do[:, :1].expand_as(do),
        do[..., :1].expand_as(do),
        one.expand_as(do),
        odd,
    ):
        assert strided is odd or not strided.is_contiguous()
        for other in (None, dht):
            got = backward(call, strided, other)
            assert_same_bits(got, backward(call, strided.clone(memory_format=DENSE), other))
    for strided in (dht.mT.contiguous().mT, dht[:1].expand_as(dht), one.float().expand_as(dht)):
        for other in (None, do):
            got = backward(call, other, strided)
            assert_same_bits(got, backward(call, other, strided.clone(memory_format=DENSE)))
    for v_first in (True, False):
        changed, leaves = with_leaves(call | dict(state_v_first=v_first))
        o, state = run(changed)
        (o.sum() + state.sum()).backward()
        expected = backward(
            call | dict(state_v_first=v_first), torch.ones_like(do), torch.ones_like(dht)
        )
        assert_same_bits({n: x.grad for n, x in leaves.items()}, expected)


DENSE = torch.contiguous_format


def test_an_output_may_be_cut_and_multiplied():
    """do is then a slice, or transposed."""
    call = call_on_gpu("typical+states", T=130)
    w = torch.randn(2, 130, 40, device=DEVICE).bfloat16()
    cases = (
        (lambda o: torch.cat([o, o], -1)[..., 64:200].sum((0, 1, 2)).float().square().sum()),
        (lambda o: (o[0].transpose(0, 1).mT @ w).float().square().sum()),
    )
    for loss in cases:
        changed, leaves = with_leaves(call)
        o, _ = run(changed)
        alone = o.detach().requires_grad_()
        (do,) = torch.autograd.grad(loss(alone), alone)
        loss(o).backward()
        assert do.any()
        expected = backward(call, do.clone(memory_format=DENSE))
        assert_same_bits({n: x.grad for n, x in leaves.items()}, expected)


def test_offsets_of_every_kind_give_the_same():
    call = call_on_gpu("typical+states", lengths=THREE)
    cu, ups = call["cu_seqlens"], upstream(call)
    expected = backward(call, *ups)
    for dtype in (torch.int32, torch.int64):
        strided = torch.stack((cu, cu + 999), 1).to(dtype)[:, 0]
        for x in (cu.to(dtype), strided, cu.to(dtype).cpu(), strided.cpu()):
            for extra in ({}, {"cu_seqlens_cpu": cu.cpu()}, {"cu_seqlens_cpu": cu.cpu().long()}):
                got = backward(call | dict(cu_seqlens=x) | extra, *ups)
                assert_same_bits(got, expected, f"{dtype} {x.stride()} {x.device}")


@pytest.mark.parametrize("B", (1, 2))
@pytest.mark.parametrize("T", (1, 65))
@pytest.mark.parametrize("H", (1, 2))
def test_dimensions_of_size_one(B, T, H):
    call = batch([call_on_gpu("typical+states", H=3, T=70, seed=n) for n in range(B)])
    views = {name: call[name][:, :T, :H] for name in TOKENS}
    views |= dict(initial_state=call["initial_state"][:, :H], A_log=call["A_log"][:H])
    views |= dict(dt_bias=call["dt_bias"].view(3, 128)[:H])
    ups = upstream(call | views)
    got = backward(call | views, *ups)
    check(call | views, regime_of(T), ups, got)
    whole = {name: x.contiguous() for name, x in views.items()}
    assert_same_bits(got, backward(call | whole, *ups))


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
    ups = upstream(call)
    first = backward(call, *ups)
    wrong = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    backward(call | dict(cu_seqlens=wrong), *ups)
    torch.cuda.synchronize()
    assert_same_bits(backward(call, *ups), first)


# ---------------------------------------------------------------- sizes
def large_call(lengths, H: int) -> tuple[dict, tuple]:
    """(call of form B drawn on the GPU, its do and dht)."""
    rng = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(generator=rng)

    T, N = sum(lengths), len(lengths)
    q, k, v, g, do = (normal(1, T, H, 128) for _ in range(5))
    S, dht = (normal(N, H, 128, 128, dtype=torch.float32) for _ in range(2))
    small = call_on_gpu("typical+states", T=1, H=H)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    call = small | dict(q=q, k=k, v=v, g=g, beta=normal(1, T, H), initial_state=S, cu_seqlens=cu)
    return call, (do, dht)


@pytest.mark.parametrize(
    "lengths, H, whole",
    (
        ((65536, 65472, 143), 64, False),  # states of the last one lie past 2^31 elements
        ((16384,) * 4, 2, True),
        ((32784,) * 4, 2, True),
        ((13,) * 5000, 2, True),
    ),
    ids=str,
)
def test_the_last_of_many_tokens_are_as_alone(lengths, H, whole):
    call, ups = large_call(lengths, H)
    got = backward(call, *ups)
    N = len(lengths)
    assert_each_is_as_alone(call, ups, got, {0, N // 2, N - 1} if whole else {N - 1})
    last = upstream_of_sequence(call, ups, N - 1)
    part = of_sequence(call, got, N - 1)
    if whole:
        check(call, ups=ups, got=got)
    else:
        alone = backward(sequence(call, N - 1), *last)
        check(sequence(call, N - 1), ups=last, got=alone | part)
    del call, ups, got, part
    torch.cuda.empty_cache()


def test_no_gradient_of_a_state_takes_no_memory():
    call = call_on_gpu("typical+states", lengths=[20] * 128, H=8)
    do, dht = upstream(call)
    peaks = {}
    for wanted in (LEAVES, LEAVES[:-1]):
        backward(call, do, dht, wanted)
        changed, leaves = with_leaves(call, wanted)
        results = run(changed)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        got = torch.autograd.grad(results, list(leaves.values()), (do, dht))
        peaks[len(wanted)] = torch.cuda.max_memory_allocated() - before
        del got, results
    assert peaks[8] - peaks[7] >= 128 * 8 * 128 * 128 * 4


# ---------------------------------------------------------------- memory
@pytest.mark.parametrize("save_states", (True, False))
@pytest.mark.parametrize(
    "lengths",
    (
        [(16, 32, 64)[n % 3] for n in range(127)],
        [(16, 32, 64)[n % 3] for n in range(128)],
        (80,),
        (129,),
        (20, 20),
        (64, 64),
    ),
    ids=lambda x: f"{len(x)} of {sum(x)}",
)
def test_sequences_shorter_than_chunks_have_room(lengths, save_states):
    """Chunk slots that no sequence owns hold anything; dA_log and ddt_bias must not."""
    call = call_on_gpu("typical+states", H=6, lengths=lengths) | dict(save_states=save_states)
    ups = upstream(call)
    first = backward(call, *ups)
    check(call, ups=ups, got=first)
    assert_each_is_as_alone(call, ups, first, range(0, len(lengths), 9))
    if len(lengths) == 1:
        check(sequence(call, 0), ups=ups)
    for value in (math.nan, 1e30):
        poison(value, first.values())
        assert_same_bits(backward(call, *ups), first)


@pytest.mark.parametrize("save_states", (True, False))
def test_thousands_of_single_tokens(save_states):
    N = 4096
    call = call_on_gpu("typical", lengths=[1] * N, H=2) | dict(save_states=save_states)
    ups = upstream(call)
    first = backward(call, *ups)
    check(call, ups=ups, got=first, each=False)
    assert_each_is_as_alone(call, ups, first, (0, 1, N // 2, N - 1))
    poison(like=first.values())
    assert_same_bits(backward(call, *ups), first)
    peaks = []
    del first
    for changed, dht in ((call, ups[1]), (call | dict(cu_seqlens=None), ups[1][:1])):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backward(changed, ups[0], dht)
        peaks.append((torch.cuda.max_memory_allocated() - before) >> 20)
    print(f"peak MiB of {N} sequences of 1 and of 1 sequence of {N}: {peaks}")


@pytest.mark.parametrize("T", (771, 968, 1303))
@pytest.mark.parametrize("value", (math.nan, 1e30))
def test_gradients_do_not_depend_on_what_memory_held(T, value):
    call = call_on_gpu("typical+states", T=T)
    ups = upstream(call)
    first = assert_repeats(lambda: backward(call, *ups), 3)
    check(call, ups=ups, got=first)
    for save_states in (True, False):
        for _ in range(3):
            poison(value, first.values())
            got = backward(call | dict(save_states=save_states), *ups)
            assert_same_bits(got, first, f"after {value}")


FIRST_CALL = """
import sys
import torch
from chunk_calls import call_on_gpu, gradients, run, upstream
call = call_on_gpu("typical+states", T=771)
grads = gradients(run, call, *upstream(call))
torch.save({name: x.cpu() for name, x in grads.items()}, sys.argv[1])
"""


def test_the_first_call_of_a_process_has_the_bits_of_later_ones(tmp_path):
    """Its allocator holds nothing, and it loads the kernels."""
    folder, file = Path(__file__).parent, tmp_path / "first.pt"
    seen = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    subprocess.run([sys.executable, "-c", FIRST_CALL, file], env=seen, check=True)
    call = call_on_gpu("typical+states", T=771)
    later = {name: x.cpu() for name, x in backward(call, *upstream(call)).items()}
    assert_same_bits(torch.load(file), later)


@pytest.mark.parametrize("lengths", ((1,), (16,), (64,), (4096,), (0, 1, 0, 64, 300, 0, 5)))
def test_gradients_do_not_depend_on_what_shared_memory_held(lengths):
    """A product of NaN matrices passes through the shared memory of all SMs before each call."""
    call = call_on_gpu("typical+states", lengths=lengths)
    ups = upstream(call)
    nan = torch.full((4096, 4096), math.nan, dtype=torch.bfloat16, device=DEVICE)
    first = assert_repeats(lambda: backward(call, *ups), 400, lambda: torch.mm(nan, nan))
    assert all(x.isfinite().all() for x in first.values())


# ---------------------------------------------------------------- repeatability, races
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", ("mixed+states", "ub_burst+states"))
def test_fifty_runs_have_the_same_bits(regime, form):
    call = call_on_gpu(regime, form, H=5, lengths=(700, 0, 65, 1, 333))
    ups = upstream(call)
    check(call, regime, ups, assert_repeats(lambda: backward(call, *ups), 50))


@pytest.mark.parametrize("N, H", ((1, 1), (1, 131), (2, 66), (7, 19), (2, 132)))
def test_repeats_while_another_stream_is_busy(N, H):
    """Around the number of SMs, of which products on another stream take a part."""
    call = call_on_gpu("typical+states", lengths=[70] * N, H=H)
    ups = upstream(call)
    side, x = torch.cuda.Stream(), torch.randn(1024, 1024, device=DEVICE).bfloat16()

    def keep_busy():
        with torch.cuda.stream(side):
            torch.mm(x, x)

    first = assert_repeats(lambda: backward(call, *ups), 1000, keep_busy)
    side.synchronize()
    check(call, ups=ups, got=first)


def test_upstream_gradients_made_just_before_are_waited_for():
    """do from a long product on the same stream, dq consumed right after; 1000 steps."""
    call = call_on_gpu("typical+states", lengths=THREE)
    do, dht = upstream(call)
    rows = do.flatten(0, 1).flatten(1)  # [T, H * 128]
    long = torch.zeros(rows.shape[0], 8192, device=DEVICE, dtype=torch.bfloat16)
    long[:, : rows.shape[1]] = rows
    eye = torch.eye(8192, device=DEVICE, dtype=torch.bfloat16)
    expected = {n: 2 * x for n, x in backward(call, do, dht).items()}
    differences = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(1000):
        buffer = torch.full_like(do, math.nan)
        made = (long @ eye)[:, : rows.shape[1]].view(do.shape)
        changed, leaves = with_leaves(call)
        o, state = run(changed)
        buffer.copy_(made)
        ups = (buffer if i % 2 else made, dht)
        grads = torch.autograd.grad((o, state), list(leaves.values()), ups)
        got = {n: 2 * x for n, x in zip(leaves, grads, strict=True)}
        differences += count_differences(got, expected)
    assert differences.item() == 0


# ---------------------------------------------------------------- streams, threads, graphs
@pytest.mark.parametrize("place", ("stream", "outside", "thread"))
def test_runs_on_the_current_stream(place):
    """Only stream order separates the new data from the call, and the gradients from the addition.

    outside: the backward is called with another stream current than the forward's.
    """
    calls = [call_on_gpu("typical+states", lengths=THREE, seed=s) for s in range(2)]
    upstreams = [upstream(call, s) for s, call in enumerate(calls)]
    pairs = zip(calls, upstreams, strict=True)
    expected = [{n: x + 1 for n, x in backward(c, *u).items()} for c, u in pairs]
    static, static_ups = clones(calls[0]), [x.clone() for x in upstreams[0]]
    torch.cuda.synchronize()
    results = []

    def repeat():
        stream = torch.cuda.Stream()
        for i in range(20):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                written_into(static, calls[i % 2])
                for to, x in zip(static_ups, upstreams[i % 2], strict=True):
                    to.copy_(x)
                changed, leaves = with_leaves(static)
                outputs = run(changed)
                if place != "outside":
                    grads = torch.autograd.grad(outputs, list(leaves.values()), static_ups)
                    results.append({n: x + 1 for n, x in zip(leaves, grads, strict=True)})
            if place == "outside":
                grads = torch.autograd.grad(outputs, list(leaves.values()), static_ups)
                results.append({n: x + 1 for n, x in zip(leaves, grads, strict=True)})
                torch.cuda.synchronize()
            stream.synchronize()

    if place == "thread":
        thread = threading.Thread(target=repeat)
        thread.start()
        thread.join()
    else:
        repeat()
    assert len(results) == 20
    for i, result in enumerate(results):
        assert_same_bits(result, expected[i % 2], f"repeat {i}")


@pytest.mark.parametrize("save_states", (True, False))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_a_graph_replays_with_new_data_and_offsets(dtype, save_states):
    """Eight sequences of 2048 tokens together; last, one long and seven of six tokens."""
    splits = [[256] * 8, [1, 700, 0, 47, 300, 64, 65, 871], [2006] + [6] * 7]
    calls = [call_on_gpu("typical+states", lengths=x, seed=s) for s, x in enumerate(splits)]
    calls = [call | dict(cu_seqlens=call["cu_seqlens"].to(dtype)) for call in calls]
    calls = [call | dict(save_states=save_states) for call in calls]
    upstreams = [upstream(call, s) for s, call in enumerate(calls)]
    expected = [backward(c, *u) for c, u in zip(calls, upstreams, strict=True)]
    static, static_ups = clones(calls[0]), [x.clone() for x in upstreams[0]]
    graph, got = captured(lambda: backward(static, *static_ups))
    for i in (0, 1, 2, 1, 0, 2):
        written_into(static, calls[i])
        for to, x in zip(static_ups, upstreams[i], strict=True):
            to.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(got, expected[i], f"data {i}")
    differences = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(500):
        graph.replay()
        differences += count_differences(got, expected[2])
    assert differences.item() == 0


def test_a_dense_graph_replays_with_new_data():
    calls = [call_on_gpu("ub_typ+states", T=200, seed=s) for s in range(2)]
    upstreams = [upstream(call, s) for s, call in enumerate(calls)]
    expected = [backward(c, *u) for c, u in zip(calls, upstreams, strict=True)]
    static, static_ups = clones(calls[0]), [x.clone() for x in upstreams[0]]
    graph, got = captured(lambda: backward(static, *static_ups))
    for i in (0, 1, 0):
        written_into(static, calls[i])
        for to, x in zip(static_ups, upstreams[i], strict=True):
            to.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(got, expected[i], f"data {i}")


def test_a_cold_capture_raises_and_leaves_the_process_usable():
    """Of the backward, with the forward's kernels loaded."""
    from kda_cute import backward as stages
    from kda_cute import forward

    call = call_on_gpu("typical+states", lengths=THREE)
    ups = upstream(call)
    expected = backward(call, *ups)
    for module in (forward, stages):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
    run(with_leaves(call)[0])
    with pytest.raises(RuntimeError, match="^chunk_kda is captured before"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            backward(call, *ups)
    torch.cuda.synchronize()
    assert_same_bits(backward(call, *ups), expected)


# ---------------------------------------------------------------- compiled variants
def configurations() -> dict:
    """{name: (call, whether its final state has a gradient)}."""
    base = call_on_gpu("typical+states", lengths=THREE)
    dense = {name: call_on_gpu("typical+states", T=65)[name] for name in (*TOKENS, "initial_state")}
    short = {name: 0.1 * base[name] for name in "qk"}
    calls = {
        "base": base,
        "g fp32": base | dict(g=base["g"].float()),
        "beta fp32": base | dict(beta=base["beta"].float()),
        "no state": base | dict(initial_state=None),
        "state bf16": base | dict(initial_state=base["initial_state"].bfloat16()),
        "no final state": base | dict(output_final_state=False),
        "not saved": base | dict(save_states=False),
        "cu int64": base | dict(cu_seqlens=base["cu_seqlens"].long()),
        "dense": base | dense | dict(cu_seqlens=None),
        "bound -1": base | dict(lower_bound=-1.0),
        "softplus": base | dict(lower_bound=None),
        "log gate": call_on_gpu("typical+states", "A", lengths=THREE),
        "scale 1": base | dict(scale=1.0),
        "no norm": base | dict(use_qk_l2norm_in_kernel=False) | short,
        "fused": call_on_gpu("typical+states", "C", lengths=THREE),
        "[K, V]": base | dict(state_v_first=False),
        "H 64": call_on_gpu("typical+states", H=64, lengths=THREE),
        "B 2": batch([call_on_gpu("typical+states", T=64, seed=n) for n in range(2)]),
        "one chunk": call_on_gpu("typical+states", lengths=(64,)),
    }
    cases = {name: (call, call["output_final_state"]) for name, call in calls.items()}
    return cases | {"no dht": (base, False)}


def test_order_of_configurations_does_not_matter():
    """A kernel compiled for one dtype, option or shape is not taken for another."""
    cases = {}
    for name, (call, with_final) in configurations().items():
        do, dht = upstream(call)
        cases[name] = call, (do, dht if with_final else None)
    first = {name: backward(call, *ups) for name, (call, ups) in cases.items()}
    for name in reversed(cases):
        call, ups = cases[name]
        assert_same_bits(backward(call, *ups), first[name], name)
    for name, (call, ups) in cases.items():
        print(name, shown(check(call, ups=ups, got=first[name])))


def test_a_new_shape_or_stride_does_not_compile(monkeypatch):
    """N * H from 1 to far above the SMs, so that whatever the grid decides has been seen once."""

    def each(call):
        ups = upstream(call)
        backward(call, *ups)
        backward(sequence(call, 0), *upstream_of_sequence(call, ups, 0))
        return ups

    for H in (1, 2, 96):
        for form in FORMS:
            each(call_on_gpu("typical+states", form, H=H, lengths=THREE))
    requested = []
    monkeypatch.setattr(kernel_cache, "object_file", lambda spec, *a, **k: requested.append(spec))
    monkeypatch.setattr(kernel_cache, "load", lambda spec, *a, **k: requested.append(spec))
    for lengths, H in (((5,), 1), ((64, 128), 2), ((700, 3, 0, 29), 5), ([7] * 300, 3)):
        for form in FORMS:
            call = call_on_gpu("typical+states", form, H=H, lengths=lengths)
            do, dht = each(call)
            strided = do.transpose(1, 2).contiguous().transpose(1, 2), dht.mT.contiguous().mT
            cu = call["cu_seqlens"].long()
            backward(call | dict(scale=0.3, cu_seqlens=cu), *strided)
    assert not requested


@pytest.mark.parametrize("save_states, kernels", ((True, 3), (False, 5)))
def test_the_kernels_ran_and_little_else_did(save_states, kernels):
    """A backward in forms B and C: transition, reverse scan, gradients, before them the forward's
    two where nothing was saved, and the sums of two parameters' partial gradients; no copies.
    """
    for form in ("B", "C"):
        call = call_on_gpu("typical+states", form, lengths=THREE) | dict(save_states=save_states)
        ups = upstream(call)
        backward(call, *ups)
        changed, leaves = with_leaves(call)
        results = run(changed)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.autograd.grad(results, list(leaves.values()), ups)
            torch.cuda.synchronize()
        on_device = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
        print(on_device)
        others = [name for name in on_device if "cutlass" not in name]
        assert len(on_device) - len(others) == kernels, on_device
        assert len(others) <= 2 and all("reduce" in name for name in others), others


# ---------------------------------------------------------------- errors
def test_bad_calls_are_refused_before_a_launch_and_a_good_one_follows(monkeypatch):
    call = call_on_gpu("typical+states", lengths=THREE)
    ups = upstream(call)
    expected = backward(call, *ups)
    bad = {
        "q": (dict(q=call["q"].cpu()), dict(q=call["q"].half()), dict(q=call["q"][..., :64])),
        "k": (dict(k=call["k"].cpu()), dict(k=call["k"][:, :, :1])),
        "v": (dict(v=torch.cat([call["v"]] * 4, -1)), dict(v=torch.cat([call["v"]] * 2, 2))),
        "g": (dict(g=None), dict(g=call["g"][..., 0])),
        "beta": (dict(beta=None), dict(beta=call["beta"][..., None])),
        "dt_bias": (dict(dt_bias=call["dt_bias"][:2]),),
        "initial_state": (dict(initial_state=call["initial_state"][:2]),),
        "cu_seqlens": (dict(cu_seqlens=torch.tensor([0, 101, 37, 228])),),
    }
    for kernels in ("_kernels", "_backward_kernels"):
        monkeypatch.setattr(chunk_ops, kernels, lambda: pytest.fail("a bad call was run"))
    for name, changes in bad.items():
        for change in changes:
            with pytest.raises((TypeError, ValueError), match=f"^{name} "):
                run(with_leaves(call | change)[0])
    monkeypatch.undo()
    o, state = run(with_leaves(call)[0])
    with pytest.raises(RuntimeError):
        torch.autograd.backward((o, state), (ups[0][:, :-1], ups[1]))
    torch.cuda.synchronize()
    assert_same_bits(backward(call, *ups), expected)


# ---------------------------------------------------------------- modules
class Layer(torch.nn.Module):
    """Projections of every argument around the call, and a learnt initial state."""

    def __init__(self, width: int, H: int):
        super().__init__()
        self.H = H
        self.qkv = torch.nn.Linear(width, 3 * H * 128, bias=False)
        self.gate = torch.nn.Linear(width, H * 128, bias=False)
        self.beta = torch.nn.Linear(width, H, bias=False)
        self.out = torch.nn.Linear(H * 128, width, bias=False)
        self.A_log = torch.nn.Parameter(torch.zeros(H))
        self.dt_bias = torch.nn.Parameter(torch.zeros(H * 128))
        self.state = torch.nn.Parameter(torch.randn(1, H, 128, 128))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (self.H, 3 * 128)).split(128, -1)
        o, state = kda_cute.chunk_kda(
            q,
            k,
            v,
            self.gate(x).unflatten(-1, (self.H, 128)),
            self.beta(x),
            initial_state=self.state.expand(x.shape[0], -1, -1, -1),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=-5.0,
            A_log=self.A_log.float(),
            dt_bias=self.dt_bias.float(),
        )
        return self.out(o.flatten(-2)), state


def test_torch_compile_takes_a_module_and_its_backward():
    torch.manual_seed(0)
    layer = Layer(64, 2).to(DEVICE, torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    for T in (100, 130):
        x = torch.randn(2, T, 64, device=DEVICE).bfloat16().requires_grad_()
        found = []
        for model in (compiled, layer):
            y, state = model(x)
            loss = y.float().square().sum() + state.square().sum()
            found.append(torch.autograd.grad(loss, [x, *parameters]))
        for name, got, expected in zip(("x", *names), *found, strict=True):
            assert expected.any(), name
            assert rel_error(got, expected) <= 1e-2, name
    torch._dynamo.reset()


# ---------------------------------------------------------------- random shapes
@st.composite
def calls(draw):
    """(regime, call, (do, dht)): at least 32 token-heads, as fewer may cancel."""
    form, H = draw(st.sampled_from(FORMS)), draw(st.integers(1, 5))
    base = draw(st.sampled_from(("typical", "weak", "strong", "mixed", "burst", "ub_typ")))
    regime = base + draw(st.sampled_from(("", "+states")))
    v_first, seed = draw(st.booleans()), draw(st.integers(0, 1000))
    length = st.one_of(st.integers(0, 70), st.integers(0, 300), st.sampled_from((63, 64, 65, 128)))
    lengths = draw(st.lists(length, min_size=1, max_size=6))
    lengths[0] = max(lengths[0], 32)
    if draw(st.booleans()):
        call = call_on_gpu(regime, form, v_first, H=H, lengths=lengths, seed=seed)
    else:
        parts = [
            call_on_gpu(regime, form, v_first, H=H, T=lengths[0], seed=seed + n)
            for n in range(min(len(lengths), 3))
        ]
        shared = ("A_log", "dt_bias")
        call = batch([part | {n: parts[0].get(n) for n in shared} for part in parts])
        if form == "A":
            call = {n: x for n, x in call.items() if n not in shared}
    call |= dict(save_states=draw(st.booleans()))
    do, dht = upstream(call, seed)
    ups = draw(st.sampled_from(((do, dht), (do, None), (None, dht))))
    return regime, call, ups


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(calls())
def test_random_shapes_equal_the_reference(drawn):
    regime, call, ups = drawn
    got = backward(call, *ups)
    expected = backward(call | dict(backend="reference"), *ups)
    _, terms = exact_gradients(call, *ups)
    tolerance = tolerances(regime)
    assert list(got) == list(expected)
    for name, x in got.items():
        assert x.dtype == expected[name].dtype and x.shape == expected[name].shape
        error = rel_error(x, expected[name], max(scale_of(name, terms), GONE))
        allowed = max(1.5 * tolerance[name], 25e-3 if name == "beta" else 0.0)
        assert error <= allowed, (name, error, regime, bounds(call))
