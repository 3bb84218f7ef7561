"""The gradients kernel: its oracle against autograd and what the compiler made of it (no GPU), and
its results on the GPU against float64.
"""

import functools

import pytest
import stages
import torch
from stages import make_inputs, poisoned

from kda_cute import compile as kernel_compile
from kda_cute import reference, reference_stages
from kda_cute.accuracy.errors import rel_error
from kda_cute.dtypes import NAMES
from kda_cute.factors import HEAD_DIM, record_rows, slot_count, views
from kda_cute.kernels import gradients
from kda_cute.kernels.gradients import Config
from kda_cute.layouts import variants

F64 = torch.float64
CONFIGS = [
    Config("bf16", "safe", "bf16", False),
    Config("f32", "log", "f32", True),
    Config("bf16", "softplus", "f32", True, "padded"),
]
TOLERANCES = {"dg": 1.2e-2, "dbeta": 1.4e-2, "dA_part": 2e-2, "ddt_part": 1.2e-2}
TOLERANCE = 1e-2  # of the others; relative, Frobenius
spec = functools.partial(stages.spec, gradients)


# ---------------------------------------------------------------- the oracle
@pytest.mark.parametrize(
    "gate, beta, l2norm, lengths",
    [
        *((gate, "sigmoid", True, (150,)) for gate in ("log", "safe", "softplus")),
        ("log", "plain", True, (70, 0, 80)),
        ("safe", "double", False, (70, 0, 80)),
        ("softplus", "plain", False, (150,)),
    ],
)
@pytest.mark.parametrize("depth", (0, 50))
def test_oracle_is_autograd_of_the_token_recurrence(gate, beta, l2norm, lengths, depth):
    """The stages in float64, composed, against the recurrence; b of exactly 0 among plain ones.  All
    of dg is tiny where gates are about -depth: no term may be a difference of larger ones.
    """
    rng = torch.Generator().manual_seed(0)
    T, H, D, N = sum(lengths), 2, HEAD_DIM, len(lengths)
    rand = lambda *shape: torch.randn(*shape, generator=rng, dtype=F64)  # noqa: E731
    q, k, v, do, g = (rand(T, H, D) for _ in range(5))
    k = k if l2norm else 0.05 * k
    logits, A_log, dt_bias = rand(T, H), rand(H), rand(H, D)
    g = -(g.abs() + depth) if gate == "log" else g + depth
    if beta == "plain":
        logits = logits.sigmoid()
        logits[::7] = 0
    initial, dfinal = rand(2, N, H, D, D)
    leaves = [x.requires_grad_() for x in (q, k, v, g, logits, A_log, dt_bias, initial)]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    parameters = dict(A_log=A_log, dt_bias=dt_bias) if gate != "log" else {}
    beta_scale = 2.0 if beta == "double" else 1.0
    o, final = reference.token_recurrence(
        q,
        k,
        v,
        g,
        logits,
        initial_state=initial,
        use_qk_l2norm=l2norm,
        use_beta_sigmoid=beta != "plain",
        beta_scale=beta_scale,
        gate=gate,
        cu_seqlens=bounds,
        **parameters,
    )
    used = leaves if gate != "log" else [*leaves[:5], initial]
    exact = torch.autograd.grad((o, final), used, (do, dfinal))
    x = reference_stages.Inputs(
        *(t.detach()[None] for t in (q, k, do, g, logits)),
        *(t.detach() for t in parameters.values()),
        **(dict(A_log=None, dt_bias=None) if gate == "log" else {}),
        cu_seqlens=bounds,
        gate=gate,
        beta_scale=beta_scale,
        l2norm=l2norm,
        beta_sigmoid=beta != "plain",
    )
    tensors, dinitial = reference_stages.chunk_tensors(
        x, v.detach()[None], initial.detach(), dfinal
    )
    got = reference_stages.gradients(x, tensors)
    ours = [t[0] for t in (*got[:2], tensors.dv, *got[2:4])]
    if gate != "log":
        ours += [got.dA_part.sum(0), got.ddt_part.sum(0)]
    for value, ref in zip([*ours, dinitial], exact, strict=True):
        assert rel_error(value, ref) < 1e-10


# ---------------------------------------------------------------- what the compiler made of it
objects = stages.compiled_now(gradients, CONFIGS)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_kernel_keeps_its_budgets(objects, config):
    (kernel,) = kernel_compile.report(objects[config])
    assert (kernel.stack, kernel.spills) == (0, 0)
    assert kernel.registers <= 128
    assert kernel.ops["HGMMA"] == 3 * 8 + 4 + 2 * 8
    assert kernel.ops["HMMA"] == 70
    assert kernel.sass.count("WARPGROUP.DEPBAR") == 3, "a wait that nobody wrote"


@pytest.mark.parametrize("g", ("bf16", "f32"))
@pytest.mark.parametrize("layout", variants.names("gradients"))
def test_plan_fits(layout, g):
    plan = variants.plan("gradients", layout, "bf16", g=g)
    assert plan.total_bytes <= plan.limit == 232_448


# ---------------------------------------------------------------- on the GPU
def outputs(x: reference_stages.Inputs) -> reference_stages.Gradients:
    """Tensors full of NaN for the kernel to write."""
    H, D = x.q.shape[2:]
    dq, dk = (poisoned(*x.q.shape, dtype=torch.bfloat16) for _ in range(2))
    parts = (None, None)
    if x.gate != "log":
        row = poisoned(x.slots, H * (D + 1), dtype=torch.float32)
        parts = row[:, H * D :], row[:, : H * D].view(x.slots, H, D)
    dg, dbeta = (poisoned(*y.shape, dtype=y.dtype) for y in (x.g, x.beta))
    return reference_stages.Gradients(dq, dk, dg, dbeta, *parts)


def records(tensors: reference_stages.ChunkTensors) -> list[torch.Tensor]:
    """Those of states and X, of the states' gradients, and of INV."""
    _, S, dS, X, INV = tensors
    held = (("chunk", {"S": S, "X": X}), ("dchunk", {"dS": dS}), ("backward factors", {"INV": INV}))
    found = []
    for kind, values in held:
        shape = (*S.shape[:2], record_rows(kind), HEAD_DIM)
        found.append(poisoned(*shape, dtype=torch.bfloat16))
        for name, x in values.items():
            views(kind, found[-1])[name].copy_(x)
    return found


def run(x: reference_stages.Inputs, tensors, layout="default") -> reference_stages.Gradients:
    """The kernel's gradients."""
    out = outputs(x)
    config = Config(NAMES[x.g.dtype], x.gate, NAMES[x.beta.dtype], x.cu_seqlens is not None, layout)
    kernel = kernel_compile.load(spec(config))
    parameters = None if out.dA_part is None else out.dA_part._base
    kernel(
        *x[:8], tensors.dv, *records(tensors), *out[:4], parameters,
        x.scale, x.lower_bound, x.beta_scale, int(x.l2norm), int(x.beta_sigmoid),
    )  # fmt: skip
    torch.cuda.synchronize()
    return out


def check(x, v, initial, dfinal, layout="default"):
    """Every output of the kernel against float64 from the same rounded tensors."""
    tensors, _ = reference_stages.chunk_tensors(x, v, initial, dfinal)
    tensors = reference_stages.ChunkTensors(*(t.to(torch.bfloat16) for t in tensors))
    exact = reference_stages.gradients(x, tensors)
    dv = tensors.dv.clone()
    got = run(x, tensors, layout)
    b = x.beta.sigmoid() if x.beta_sigmoid else x.beta
    dv = torch.where((b == 0)[..., None], 0, dv).nan_to_num(7.0)  # was made with LEAST_B for b
    assert torch.equal(tensors.dv.nan_to_num(7.0), dv)
    errors = {}
    for name, value, ref in zip(got._fields, got, exact, strict=True):
        if ref is None:
            continue
        written = ~ref.isnan()
        assert value[~written].isnan().all(), f"{name}: a token of no sequence was written"
        errors[name] = rel_error(value[written], ref[written])
    print({name: f"{1e3 * e:.2f}e-3" for name, e in errors.items()})
    misses = {n: e for n, e in errors.items() if not e <= TOLERANCES.get(n, TOLERANCE)}
    assert not misses


REGIMES = (
    "typical+states",
    "weak+states",
    "strong+states",
    "mixed+states",
    "burst+states",
    "tiny+states",
    "ub_typ+states",
    "ub_strong+states",
    "ub_burst+states",
    "ub_mixed+states",
)


@pytest.mark.gpu
@pytest.mark.parametrize("regime", REGIMES)
def test_packed(regime):
    check(*make_inputs(regime, lengths=(130, 0, 64, 1, 63, 200)))


@pytest.mark.gpu
@pytest.mark.parametrize("T", (64, 209))
@pytest.mark.parametrize("regime", ("typical+states", "ub_burst+states"))
def test_dense(regime, T):
    check(*make_inputs(regime, lengths=(T, T), dense=True))


@pytest.mark.gpu
@pytest.mark.parametrize("regime", ("typical+states", "weak+states", "ub_row+states"))
@pytest.mark.parametrize("g", ("bf16", "f32"))
def test_gates_of_log_space(regime, g):
    check(*make_inputs(regime, lengths=(100, 77), g=g, gate="log", beta="f32"))


@pytest.mark.gpu
@pytest.mark.parametrize("changes", (dict(l2norm=False), dict(beta="f32"), dict(g="f32")), ids=str)
def test_other_options(changes):
    check(*make_inputs("typical+states", lengths=(64, 150), **changes))


@pytest.mark.gpu
def test_beta_without_a_sigmoid_and_of_zero():
    x, *rest = make_inputs("typical+states", lengths=(64, 70), beta="f32")
    b = x.beta.sigmoid()
    b[:, ::5] = 0
    x = x._replace(beta=b, beta_sigmoid=False)
    check(x, *rest)


@pytest.mark.gpu
def test_negative_eigenvalues():
    x, *rest = make_inputs("typical+states", lengths=(64, 70))
    check(x._replace(beta_scale=2.0), *rest)


@pytest.mark.gpu
def test_another_layout():
    check(*make_inputs("typical+states", lengths=(64, 70)), layout="padded")


@pytest.mark.gpu
def test_runs_are_bitwise_equal():
    x, v, initial, dfinal = make_inputs("typical+states", lengths=(130, 64, 7))
    tensors, _ = reference_stages.chunk_tensors(x, v, initial, dfinal)
    tensors = reference_stages.ChunkTensors(*(t.to(torch.bfloat16) for t in tensors))
    first, second = run(x, tensors), run(x, tensors)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.gpu
def test_strided_inputs_equal_contiguous_ones():
    x, v, initial, dfinal = make_inputs("typical+states", lengths=(130, 70))
    tensors, _ = reference_stages.chunk_tensors(x, v, initial, dfinal)
    tensors = reference_stages.ChunkTensors(*(t.to(torch.bfloat16) for t in tensors))
    fused = torch.cat([x.q, x.k, x.do, x.g], -1)
    q, k, do, g = fused.split(HEAD_DIM, -1)
    first, second = run(x, tensors), run(x._replace(q=q, k=k, do=do, g=g), tensors)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_slots_of_packed_sequences():
    x, *_ = (
        reference_stages.Inputs(
            *(torch.zeros(1, 150, 1, HEAD_DIM) for _ in range(4)),
            torch.zeros(1, 150, 1),
            cu_seqlens=torch.tensor([0, 70, 70, 150]),
        ),
    )
    assert x.slots == slot_count(150, 3, True)
    assert [w[3] for w in x.walks()] == [0, 2, 3]
