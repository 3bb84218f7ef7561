"""The public call without a GPU: the operator's contract, and every bad argument by name."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kda_cute
from kda_cute import api, reference
from kda_cute.accuracy.regimes import make_problem
from kda_cute.workspace import RecurrenceGrads, Workspace

LENGTHS = (17, 0, 5, 32)  # tiles 2, 0, 1, 2
H, TILES = 2, 5


@functools.cache
def good_call() -> dict:
    """Arguments of one call that is right but for its device."""
    p = make_problem("typical+states", H=H, lengths=LENGTHS)
    workspace = reference.prepare(*p.inputs(), **p.options()).workspace
    return dict(
        do=p.do,
        v=p.v,
        beta=p.beta,
        workspace=workspace,
        dfinal_state=p.dfinal_state,
        cu_seqlens=p.cu_seqlens,
        num_seqs=None,
        precision="tf32",
        layout="default",
    )


def call(**changes) -> RecurrenceGrads:
    """The operator itself on the good call's arguments, which runs on the CPU."""
    a = good_call() | changes
    sequences, offsets = api._validate(**a)
    out = torch.ops.kda_cute.bwd_recurrence(
        a["do"], a["v"], a["beta"], *a["workspace"], a["dfinal_state"], offsets, sequences,
        a["precision"], a["layout"],
    )  # fmt: skip
    return RecurrenceGrads(*out)


def field(name, change) -> dict:
    """The good workspace with one field changed."""
    workspace = good_call()["workspace"]
    return {"workspace": workspace._replace(**{name: change(getattr(workspace, name))})}


def argument(name, change) -> dict:
    return {name: change(good_call()[name])}


def offsets(*values, dtype=torch.int32) -> dict:
    return {"cu_seqlens": torch.tensor(values, dtype=dtype)}


@pytest.fixture
def on_cpu(monkeypatch):
    """Let validation take CPU tensors, as if the kernels ran there."""
    monkeypatch.setattr(api, "_supported", lambda name, x: x.device)


# ---------------------------------------------------------------- bad arguments
TENSORS = ("do", "v", "beta", "dfinal_state", "cu_seqlens")
FIELDS = Workspace._fields


def meta(x):
    return x.to("meta")


def misaligned(x):
    """The same values, contiguous, one element past a 16-byte boundary."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


BAD_TYPES = [
    *((name, argument(name, lambda x: x.to(torch.float16))) for name in TENSORS),
    *((f"workspace.{name}", field(name, lambda x: x.to(torch.float16))) for name in FIELDS),
    *((name, {name: [1.0]}) for name in TENSORS),
    *((name, {name: None}) for name in ("do", "v", "beta", "workspace")),
    *((f"workspace.{name}", field(name, lambda x: None)) for name in FIELDS),
    ("workspace", {"workspace": {}}),
    ("workspace", argument("workspace", tuple)),
]
BAD_VALUES = [
    # shapes: a dimension less, one more, a wrong size in each place that has one
    *((name, argument(name, lambda x: x[..., 0])) for name in ("do", "v", "beta", "dfinal_state")),
    *((name, argument(name, lambda x: x[None])) for name in TENSORS),
    *((name, argument(name, lambda x: x[..., :-1])) for name in TENSORS if name != "cu_seqlens"),
    *((name, argument(name, lambda x: x[:-1])) for name in ("v", "beta", "dfinal_state")),
    *((name, argument(name, lambda x: x[:, :1])) for name in ("v", "beta", "dfinal_state")),
    ("dfinal_state", argument("dfinal_state", lambda x: x[:, :, :64])),
    *((f"workspace.{name}", field(name, lambda x: x[:1].clone())) for name in FIELDS),
    *((f"workspace.{name}", field(name, lambda x: x[:, :-1].clone())) for name in FIELDS[1:]),
    *((f"workspace.{name}", field(name, lambda x: x[..., :-1].clone())) for name in FIELDS),
    *((f"workspace.{name}", field(name, lambda x: x[None])) for name in FIELDS),
    # not contiguous
    *(
        (f"workspace.{name}", field(name, lambda x: x.mT.contiguous().mT))
        for name in FIELDS
        if name != "g_total"
    ),
    ("workspace.g_total", field("g_total", lambda x: x.repeat(1, 1, 2)[..., ::2])),
    # addresses
    *((name, argument(name, misaligned)) for name in ("do", "v", "dfinal_state")),
    *((f"workspace.{name}", field(name, misaligned)) for name in FIELDS),
    # devices
    *((name, argument(name, meta)) for name in TENSORS if name != "do"),
    *((f"workspace.{name}", field(name, meta)) for name in FIELDS),
    # choices
    ("precision", {"precision": "fp32"}),
    ("precision", {"precision": None}),
    ("layout", {"layout": "no_such_layout"}),
    ("layout", {"layout": ""}),
    # sequences
    ("cu_seqlens", offsets(0, 17, 16, 22, 54)),  # decreases
    ("cu_seqlens", offsets(1, 17, 17, 22, 54)),
    ("cu_seqlens", offsets(-1, 17, 17, 22, 54)),
    ("cu_seqlens", offsets(0, 17, 17, 22, 53)),
    ("cu_seqlens", offsets(0, 17, 17, 22, 55)),
    ("cu_seqlens", offsets(0, 17, 17, 22, 2**40 + 54, dtype=torch.int64)),
    ("cu_seqlens", offsets(dtype=torch.int64)),
    ("cu_seqlens", {"cu_seqlens": torch.tensor(0)}),
    ("workspace", offsets(0, 16, 16, 22, 54)),  # 4 tiles
    ("dfinal_state", {**offsets(0, 17, 22, 54)}),  # 5 tiles in 3 sequences
    ("num_seqs", {"num_seqs": 3}),
    ("num_seqs", {"num_seqs": 0}),
    ("num_seqs", {"num_seqs": -1, "cu_seqlens": None}),
    ("num_seqs", {"num_seqs": 0, "cu_seqlens": None}),
    ("num_seqs", {"num_seqs": 4, "cu_seqlens": None}),  # 54 tokens
    ("workspace", {"num_seqs": 1, "cu_seqlens": None}),  # 4 tiles
    ("workspace", {"num_seqs": 54, "cu_seqlens": None}),
]
BAD_COUNTS = [1.0, "2", True, torch.tensor(4)]


def check_refused(error, name, changes):
    with pytest.raises(error) as caught:
        call(**changes)
    assert type(caught.value) is error
    assert str(caught.value).startswith(name), str(caught.value)


@pytest.mark.parametrize("name, changes", BAD_TYPES)
def test_a_wrong_type_is_named(on_cpu, name, changes):
    check_refused(TypeError, name, changes)


@pytest.mark.parametrize("name, changes", BAD_VALUES)
def test_a_wrong_shape_device_or_value_is_named(on_cpu, name, changes):
    check_refused(ValueError, name, changes)


@pytest.mark.parametrize("count", BAD_COUNTS, ids=repr)
@pytest.mark.parametrize("packed", (True, False))
def test_num_seqs_must_be_an_int(on_cpu, packed, count):
    check_refused(
        TypeError, "num_seqs", {"num_seqs": count} | ({} if packed else {"cu_seqlens": None})
    )


def test_offsets_on_the_device_are_checked_by_tile_count_only():
    """Their values stay there; a count that no offsets could give is still refused."""
    a = good_call()
    a = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in a.items()}
    a["workspace"] = Workspace(*(x.to("meta") for x in a["workspace"]))
    assert api._validate(**a)[0] == len(LENGTHS)
    for tiles in (3, 8):  # 54 tokens in 4 sequences: 4 to 7
        rows = (x[:, :1].expand(-1, tiles, *x.shape[2:]).contiguous() for x in a["workspace"])
        with pytest.raises(ValueError, match="^workspace"):
            api._validate(**a | {"workspace": Workspace(*rows)})


def test_the_next_good_call_works(on_cpu):
    expected = call()
    for name, changes in (BAD_TYPES[0], BAD_VALUES[0], ("layout", {"layout": "?"})):
        with pytest.raises((TypeError, ValueError), match=name):
            call(**changes)
    for x, y in zip(call(), expected, strict=True):
        assert torch.equal(x, y)


# ---------------------------------------------------------------- devices
def public_arguments() -> dict:
    a = good_call()
    return {name: x for name, x in a.items() if x is not None}


def test_cpu_tensors_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"^do is on cpu.*kda_cute\.reference\.bwd_recurrence"):
        kda_cute.bwd_recurrence(**public_arguments())


@pytest.mark.parametrize("capability", ((8, 0), (8, 9), (10, 0), (12, 0)))
def test_another_gpu_is_refused_by_its_compute_capability(monkeypatch, capability):
    class OnGpu:
        device = torch.device("cuda", 0)

    monkeypatch.setattr(api, "_capability", lambda index: capability)
    with pytest.raises(ValueError, match=f"^do .* {capability[0]}.{capability[1]}; .*Hopper"):
        api._supported("do", OnGpu())
    monkeypatch.setattr(api, "_capability", lambda index: (9, 0))
    assert api._supported("do", OnGpu()) == OnGpu.device


# ---------------------------------------------------------------- good arguments
def matches_reference(grads, **changes):
    a = good_call() | changes
    ref = reference.bwd_recurrence(*(a[name] for name in list(a)[:7]))
    state = a["dfinal_state"]
    for name, x in grads._asdict().items():
        target = getattr(ref, name)
        assert x.shape == target.shape, name
        expected = {
            "dv": torch.bfloat16,
            "dinitial_state": torch.float32 if state is None else state.dtype,
        }.get(name, torch.float32)
        assert x.dtype == expected, name
        assert torch.equal(x, target.to(expected)), name


OPTIONS = {
    "fp32 beta": argument("beta", torch.Tensor.float),
    "bf16 state": argument("dfinal_state", torch.Tensor.bfloat16),
    "no state": {"dfinal_state": None},
    "int64 offsets": argument("cu_seqlens", torch.Tensor.long),
    "counted": {"num_seqs": len(LENGTHS)},
    "bf16": {"precision": "bf16", "layout": "padded"},
}


@pytest.mark.parametrize("changes", [{}, *OPTIONS.values()], ids=["plain", *OPTIONS])
def test_every_option_is_accepted(on_cpu, changes):
    matches_reference(call(**changes), **changes)


def test_strided_tokens_are_accepted(on_cpu):
    fused = torch.cat([good_call()["do"], good_call()["v"]], -1)
    changes = dict(do=fused[..., :128], v=fused[..., 128:])
    assert not changes["do"].is_contiguous()
    matches_reference(call(**changes), **changes)


def empty_call(tokens, sequences, tiles=0) -> dict:
    """Arguments without a chunk."""
    workspace = Workspace(*(x[:, :tiles].contiguous() for x in good_call()["workspace"]))
    state = good_call()["dfinal_state"][:1].expand(sequences, -1, -1, -1)
    return argument("do", lambda x: x[:tokens]) | dict(
        v=good_call()["v"][:tokens],
        beta=good_call()["beta"][:tokens],
        workspace=workspace,
        dfinal_state=state,
        cu_seqlens=torch.zeros(sequences + 1, dtype=torch.int32),
    )


@pytest.mark.parametrize("packed", (True, False))
@pytest.mark.parametrize("sequences", (0, 1, 3))
def test_no_tokens_pass_the_state_through(on_cpu, sequences, packed):
    changes = empty_call(0, sequences)
    if not packed:
        changes |= dict(cu_seqlens=None, num_seqs=sequences)
    grads = call(**changes)
    assert torch.equal(grads.dinitial_state, changes["dfinal_state"])
    assert grads.dv.shape == (0, H, 128) and grads.dkd.shape == (H, 0, 16, 128)
    assert not call(**changes | {"dfinal_state": None}).dinitial_state.any()


def test_no_heads(on_cpu):
    workspace = Workspace(*(x[:0] for x in good_call()["workspace"]))
    tokens = {name: good_call()[name][:, :0] for name in ("do", "v", "beta", "dfinal_state")}
    grads = call(workspace=workspace, **tokens)
    assert grads.dkd.shape == (0, TILES, 16, 128) and grads.dinitial_state.shape[1] == 0


# ---------------------------------------------------------------- the operator
def op_arguments(**changes) -> tuple:
    a = good_call() | changes
    count = a["num_seqs"] or len(LENGTHS)
    return (
        a["do"], a["v"], a["beta"], *a["workspace"], a["dfinal_state"], a["cu_seqlens"], count,
        a["precision"], a["layout"],
    )  # fmt: skip


def equal_call() -> dict:
    """32 tokens of the last sequence as two equal ones."""
    workspace = Workspace(*(x[:, 3:].contiguous() for x in good_call()["workspace"]))
    tokens = {name: good_call()[name][22:] for name in ("do", "v", "beta")}
    state = good_call()["dfinal_state"][:2]
    return tokens | dict(workspace=workspace, dfinal_state=state, cu_seqlens=None, num_seqs=2)


@pytest.mark.parametrize("changes", [{}, *OPTIONS.values()], ids=["plain", *OPTIONS])
def test_opcheck(changes):
    torch.library.opcheck(torch.ops.kda_cute.bwd_recurrence, op_arguments(**changes))


def test_opcheck_of_equal_and_empty_sequences():
    for changes in (equal_call(), empty_call(0, 3) | {"num_seqs": 3}):
        torch.library.opcheck(torch.ops.kda_cute.bwd_recurrence, op_arguments(**changes))


@pytest.mark.parametrize("changes", [{}, *OPTIONS.values()], ids=["plain", *OPTIONS])
def test_meta_tensors_give_the_real_shapes(changes):
    arguments = op_arguments(**changes)
    real = torch.ops.kda_cute.bwd_recurrence(*arguments)
    shaped = torch.ops.kda_cute.bwd_recurrence(
        *(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments)
    )
    for x, y in zip(real, shaped, strict=True):
        assert y.device.type == "meta"
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def test_the_public_call_traces_on_fake_tensors():
    """Validation reads no data of tensors that have none."""
    real, mode = equal_call(), FakeTensorMode()
    a = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in real.items()}
    a["workspace"] = Workspace(*(mode.from_tensor(x) for x in real["workspace"]))
    with mode:
        grads = kda_cute.bwd_recurrence(**a)
    assert grads.dkd.shape == (H, 2, 16, 128)
    assert grads.dinitial_state.shape == (2, H, 128, 128)
