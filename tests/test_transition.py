"""The transition: its oracle, and its factors on the GPU against float64."""

import functools

import pytest
import stages
import torch
from stages import make_inputs, poisoned, records_shape

from kda_cute import compile as kernel_compile
from kda_cute import reference_stages
from kda_cute.accuracy.errors import GONE, rel_error
from kda_cute.dtypes import NAMES
from kda_cute.factors import LEAST_B, views
from kda_cute.kernels import transition
from kda_cute.kernels.transition import Config

spec = functools.partial(stages.spec, transition)
# Relative, Frobenius: what fp32 keeps, tiles rounded to bf16, and products of such tiles.
TOLERANCES = {"eg": 1e-4, "qk": 1e-4, "kd": 2.5e-3, "qd": 2.5e-3, "z": 4e-3, "p": 5e-3, "INV": 3e-3}
OF_SIMILAR_KEYS = {"z": 8e-3, "p": 14e-3}  # sums that cancel: what they leave is a fifth of a term
REGIMES = (
    "typical",
    "weak",
    "strong",
    "mixed",
    "burst",
    "weak+simk+beta1",
    "ub_typ",
    "ub_strong",
    "ub_burst",
    "ub_mixed",
    "ub_row",
)


def test_oracle_by_hand():
    """Two tokens of one head, all numbers known: k of one channel, q of the same, decay 1/2."""
    D = 128
    k = torch.zeros(1, 2, 1, D, dtype=torch.float64)
    k[..., 0] = 1.0
    g = torch.full((1, 2, 1, D), 0.5, dtype=torch.float64).log()
    b = torch.tensor([0.5, 0.25], dtype=torch.float64).view(1, 2, 1)
    x = reference_stages.Inputs(k, k, k, g, b, scale=1.0, l2norm=False, beta_sigmoid=False)
    f, INV = reference_stages.factors(x)
    # L_10 = b_0 k_1 . k_0 / 2 = 1/4; mqk = [[1/2, 0], [1/4, 1/4]]
    expected = torch.tensor([[1.0, 0.0], [-0.25, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(INV[0, 0, :2, :2], expected)
    torch.testing.assert_close(f.p[0, 0, 1, 0].item(), 0.25 - 0.25 * 0.25)
    torch.testing.assert_close(f.qk[0, 0, :2].tolist(), [0.5, 0.25])
    torch.testing.assert_close(f.kd[0, 0, :2, 0].tolist(), [0.5, 0.25])
    torch.testing.assert_close(f.z[0, 0, :2, 0].tolist(), [0.25 - 0.25 * 0.25, 0.25])
    torch.testing.assert_close(f.eg[0, 0].tolist(), [0.25] * D)


# ---------------------------------------------------------------- on the GPU
def run(x: reference_stages.Inputs, *, backward=True):
    """The kernel's records of factors, as tensors, in memory that held NaN."""
    packed = x.cu_seqlens is not None
    config = Config(NAMES[x.g.dtype], x.gate, NAMES[x.beta.dtype], packed, backward=backward)
    kind = config.record
    records = poisoned(*records_shape(kind, x.slots, x.q.shape[2]), dtype=torch.bfloat16)
    kernel_compile.load(spec(config))(
        x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, records,
        x.scale, x.lower_bound, x.beta_scale, int(x.l2norm), int(x.beta_sigmoid),
    )  # fmt: skip
    torch.cuda.synchronize()
    return views(kind, records)


def check(x: reference_stages.Inputs, *, similar_keys=False, **options):
    got = run(x, **options)
    factors, INV = reference_stages.factors(x)
    expected = {**factors._asdict(), "INV": INV}
    errors = {}
    for name, value in got.items():
        ref = expected[name]
        owned = ~ref.isnan()
        assert value[~owned].isnan().all(), f"{name}: a slot that no chunk owns was written"
        errors[name] = rel_error(value[owned], ref[owned], GONE)
    print({name: f"{1e3 * e:.2f}e-3" for name, e in errors.items()})
    allowed = TOLERANCES | (OF_SIMILAR_KEYS if similar_keys else {})
    misses = {name: e for name, e in errors.items() if not e <= allowed[name]}
    assert not misses
    return got


@pytest.mark.gpu
@pytest.mark.parametrize("regime", REGIMES)
def test_packed(regime):
    x, *_ = make_inputs(regime, lengths=(130, 0, 64, 1, 63, 200))
    check(x, similar_keys="simk" in regime)


@pytest.mark.gpu
@pytest.mark.parametrize("T", (64, 209))
@pytest.mark.parametrize("regime", ("typical", "ub_burst"))
def test_dense(regime, T):
    x, *_ = make_inputs(regime, lengths=(T, T), dense=True)
    check(x)


@pytest.mark.gpu
@pytest.mark.parametrize("regime", ("typical", "weak", "ub_row"))
@pytest.mark.parametrize("g", ("bf16", "f32"))
def test_gates_of_log_space(regime, g):
    x, *_ = make_inputs(regime, lengths=(100, 77), g=g, gate="log", beta="f32")
    check(x)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", (dict(l2norm=False), dict(beta="f32"), dict(g="f32")), ids=str)
def test_other_options(changes):
    x, *_ = make_inputs("typical", lengths=(64, 150), **changes)
    check(x)


@pytest.mark.gpu
def test_negative_eigenvalues():
    x, *_ = make_inputs("typical", lengths=(64, 70))
    check(x._replace(beta_scale=2.0))


@pytest.mark.gpu
def test_beta_of_zero():
    """A given b of 0 is LEAST_B for a backward pass, and 0 for a forward one."""
    x, *_ = make_inputs("typical", lengths=(64, 70), beta="f32")
    b = x.beta.sigmoid()
    b[:, ::5] = 0
    x = x._replace(beta=b, beta_sigmoid=False)
    got = check(x)
    zero = (b[0, :64] == 0).mT
    assert 0 < got["z"][0][zero].abs().max() <= 4 * LEAST_B
    assert (check(x, backward=False)["z"][0][zero] == 0).all()


@pytest.mark.gpu
def test_both_forms_agree_and_repeat_bitwise():
    x, *_ = make_inputs("typical", lengths=(130, 64, 7))
    first, again, forward = run(x), run(x), run(x, backward=False)
    assert "INV" not in forward
    for name, value in first.items():
        for other in (again, forward):
            if name in other:
                assert torch.equal(value.nan_to_num(7.0), other[name].nan_to_num(7.0)), name


@pytest.mark.gpu
def test_strided_inputs_equal_contiguous_ones():
    x, *_ = make_inputs("typical", lengths=(130, 70))
    q, k, g = torch.cat([x.q, x.k, x.g], -1).split(x.q.shape[-1], -1)
    first, second = run(x), run(x._replace(q=q, k=k, g=g))
    for name, value in first.items():
        assert torch.equal(value.nan_to_num(7.0), second[name].nan_to_num(7.0)), name
