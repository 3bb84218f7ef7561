"""The language model of examples/: its text, its layers, its training and its command line."""

import math
import random
import re

import kda_model
import language_model as lm
import pytest
import torch

CPU = torch.device("cpu")
TINY = lm.Size(layers=1, heads=1, batch=2, sequence=64, steps=3)
OPTIONS = [f"--{name}={value}" for name, value in TINY._asdict().items()]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(lm, "missing_gpu", lambda: "no Hopper GPU found")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# ---------------------------------------------------------------- text
def test_answers_repeat_the_last_fact_and_are_marked():
    text, recall = lm.make_text(random.Random(0), 5000)
    assert len(text) == len(recall) == 5000
    facts, marked, updates, asked = {}, set(), 0, 0
    for m in re.finditer(r"([A-Z]\w+)(\??) (\d) (\w+) (\w+)\. ", text.decode()):
        name, verb, *said = m.groups()
        if verb == "?":
            assert facts[name] == said
            marked |= {m.start(i) for i in (3, 4, 5)}
            asked += 1
        else:
            updates += facts.get(name, said) != said
            facts[name] = said
        end = m.end()
    assert {i for i, x in enumerate(recall[:end]) if x} == marked
    assert asked > 50 and updates > 50
    assert end > 5000 - 30  # all of the text, up to a sentence cut off


def test_words_of_a_group_differ_in_the_first_byte():
    for words in lm.WORDS:
        assert len({word[0] for word in words}) == len(words) == 8  # a guess costs ln 8


def test_batches_follow_the_seed():
    (a, _), (b, _), (c, _) = (lm.make_batch(random.Random(s), TINY, CPU) for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert a.shape == (2, 65) and not torch.equal(a[0], a[1])


# ---------------------------------------------------------------- model
def test_shapes_and_dtypes():
    model = lm.LanguageModel(layers=2, heads=2, backend="reference")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tokens = torch.randint(256, (2, 19))
    logits = model(tokens)
    assert logits.shape == (2, 19, 256) and logits.dtype == torch.float32
    logits.square().mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.norm() > 0, name


def test_a_token_reads_no_later_one():
    torch.manual_seed(0)
    model = lm.LanguageModel(layers=1, heads=1, backend="reference")
    tokens = torch.randint(256, (1, 40))
    other = tokens.clone()
    other[:, 25:] += 1
    with torch.no_grad():
        a, b = model(tokens), model(other % 256)
    torch.testing.assert_close(a[:, :25], b[:, :25])
    assert not torch.allclose(a[:, 25], b[:, 25])


def test_the_op_gets_raw_bf16_views(monkeypatch):
    calls = []
    real = kda_model.kda_cute.chunk_kda

    def spy(*tensors, **options):
        calls.append((tensors, options))
        return real(*tensors, **options)

    monkeypatch.setattr(kda_model.kda_cute, "chunk_kda", spy)
    lm.LanguageModel(layers=1, heads=2, backend="reference")(torch.zeros(2, 8, dtype=torch.long))
    ((tensors, options),) = calls
    assert [tuple(x.shape) for x in tensors] == 4 * [(2, 8, 2, 128)] + [(2, 8, 2)]
    assert {x.dtype for x in tensors} == {torch.bfloat16}
    q, k, _ = (x.untyped_storage().data_ptr() for x in tensors[:3])
    assert q == k  # one projection, not copies
    raw = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    assert all(options[name] for name in (*raw, "safe_gate")) and options["lower_bound"] == -5.0
    assert options["A_log"].dtype == options["dt_bias"].dtype == torch.float32


def test_initial_decays_span_the_memory():
    layer = kda_model.KDALayer(128, 1, "reference")
    rate = 5 * (layer.A_log.exp() * layer.dt_bias).sigmoid()
    assert 0.9e-3 < rate.min() < 0.01 and 0.5 < rate.max() <= 1.001


# ---------------------------------------------------------------- training
def test_steps_reduce_the_loss_of_a_fixed_batch():
    torch.manual_seed(0)
    model = lm.LanguageModel(layers=1, heads=1, backend="reference")
    optimizer, _ = lm.make_optimizer(model, steps=1)
    batch = lm.make_batch(random.Random(0), TINY, CPU)
    before, _ = lm.training_step(model, optimizer, *batch)
    after = lm.losses_of(model, *batch)[0].item()
    assert abs(before - math.log(256)) < 1
    assert after < before - 0.1


def test_the_rate_warms_up_and_falls_to_a_tenth():
    optimizer, schedule = lm.make_optimizer(torch.nn.Linear(2, 2), steps=100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"] / lm.LEARNING_RATE)
        optimizer.step()
        schedule.step()
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11
    assert [g["weight_decay"] for g in optimizer.param_groups] == [lm.WEIGHT_DECAY, 0.0]


def test_training_is_repeatable():
    first, again, other = (lm.train(TINY, "reference", CPU, seed) for seed in (0, 0, 1))
    assert repr(first) == repr(again)  # NaN where a step asks for nothing
    assert first.all != other.all
    assert len(first.all) == len(first.recall) == TINY.steps
    assert 2.5 < first.entropy < 3.5


# ---------------------------------------------------------------- command line
def test_main_without_a_gpu(no_gpu, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "loss.png"
    assert lm.main([*OPTIONS, "--out", str(path)]) == 0
    out = capsys.readouterr().out
    assert "layers 1, heads 1, batch 2, sequence 64, steps 3, seed 0" in out
    assert "backend reference on CPU (no Hopper GPU found)" in out
    assert path.read_bytes().startswith(b"\x89PNG")


def test_no_matplotlib_is_said_before_training(no_gpu, monkeypatch, capsys):
    monkeypatch.setattr(lm.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(lm, "train", None)
    assert lm.main(OPTIONS) == 2
    assert "needs matplotlib" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, missing, backends, size",
    [
        ([], "none", ("reference",), lm.SIZES["reference"]),
        ([], None, ("kernels",), lm.SIZES["kernels"]),
        (["--backend", "reference"], None, ("reference",), lm.SIZES["reference"]),
        (["--compare"], None, ("kernels", "reference"), lm.SIZES["compare"]),
        (OPTIONS, None, ("kernels",), TINY),
        (["--compare", "--steps=7"], None, ("kernels", "reference"),
         lm.SIZES["compare"]._replace(steps=7)),
    ],
)  # fmt: skip
def test_options(options, missing, backends, size):
    args, found = lm.parse(options, missing)
    assert (tuple(args.backends), found) == (backends, size)


@pytest.mark.parametrize(
    "options, missing, message",
    [
        (["--compare"], "none here", "the kernels need a Hopper GPU: none here"),
        (["--backend", "kernels"], "none here", "the kernels need a Hopper GPU: none here"),
        (["--compare", "--backend", "kernels"], None, "leave out --backend"),
        (["--steps", "0"], None, "0 is not at least 1"),
        (["--heads", "x"], None, "--heads"),
        (["--backend", "torch"], None, "invalid choice"),
    ],
)
def test_wrong_options(options, missing, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        lm.parse(options, missing)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "kernels, reference, code",
    [(1.0, 1.005, 0), (1.0, 1.02, 1), (math.nan, 1.0, 1), (3.2, 3.2, 1)],
)
def test_compare_fails_apart_or_untrained(monkeypatch, capsys, kernels, reference, code):
    finals = {"kernels": kernels, "reference": reference}

    def train(size, backend, device, seed):
        return lm.Losses([5.5] * 30 + [finals[backend]] * 20, [math.nan] * 29 + [2.0] * 21, 3.0)

    monkeypatch.setattr(lm, "missing_gpu", lambda: None)
    monkeypatch.setattr(lm, "train", train)
    assert lm.main(["--compare", "--no-plot"]) == code
    assert ("FAIL" in capsys.readouterr().out) == bool(code)


@pytest.mark.gpu
def test_kernels_train_as_the_reference_does(capsys):
    assert lm.main(["--compare", "--no-plot", "--steps=40", "--layers=1"]) == 0
    assert "backend kernels on NVIDIA" in capsys.readouterr().out
