"""`kda-cute layouts` without a GPU, and `compare` with fake kernels."""

import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from click.testing import CliRunner

from kda_cute import compile as kernel_compile
from kda_cute.cli import main
from kda_cute.lab import catalogue, checkout, doctor
from kda_cute.layouts import GroupPadded, RowPadded, variants
from perf import layouts, one_kernel
from perf.timing import Timing


def run(*arguments):
    return CliRunner().invoke(main, ["layouts", *map(str, arguments)])


def found(*arguments):
    """The JSON of a command that is fine."""
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def more_layouts(monkeypatch):
    """more_layouts(name=layout): plans of bwd_recurrence beside those of the package."""

    def add(**more):
        family = variants.BWD_RECURRENCE
        wider = replace(family, layouts=dict(family.layouts) | more)
        monkeypatch.setitem(variants.FAMILIES, "bwd_recurrence", wider)

    return add


def test_every_command_has_help_with_an_example():
    assert "compare" in run("--help").stdout
    for command in ("list", "show", "audit", "draw", "compare"):
        text = run(command, "--help").stdout
        assert f"kda-cute layouts {command}" in text and "--json" in text


def test_list_has_every_plan_of_a_kernel():
    rows = found("list", "bwd_recurrence")
    assert [(r["layout"], r["precision"]) for r in rows] == [
        ("default", "tf32"),
        ("default", "bf16"),
        ("padded", "tf32"),
        ("padded", "bf16"),
    ]
    assert [r["conflicts"] for r in rows] == [60, 60, 1980, 828]
    bytes_ = catalogue.select("scan", ["groups=1"]).plan().total_bytes
    assert [r["bytes"] for r in found("list", "scan", "-o", "groups=1")] == [bytes_]
    assert [r["bytes"] for r in found("list", "scan")] != [bytes_]
    text = run("list", "scan").stdout
    assert "options of scan, with defaults: groups=2, save=True" in text


def test_list_has_every_kernel(monkeypatch):
    monkeypatch.setattr(catalogue.audit, "audit", lambda plan: [])
    monkeypatch.setattr(catalogue.audit, "legality", lambda plan: [])
    assert {r["kernel"] for r in found("list")} == set(catalogue.kernels())


@pytest.mark.parametrize("command", ("list", "show", "audit", "draw", "compare"))
def test_a_typo_lists_the_kernels(command):
    done = run(command, "scam")
    assert (done.exit_code, done.stdout) == (2, "")
    assert (
        "'scam' is not one of bwd_recurrence, scan, transition, gradients, reverse_scan"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show", "scan", "--layout", "padded"), "layout='padded' is not one of default"),
        (("show", "scan", "--precision", "tf32"), "precision='tf32' is not one of bf16"),
        (("audit", "scan", "-o", "g=f32"), "groups=2, save=True"),
        (("draw", "scan", "--tile", "w"), "tile='w' is not one of kd, z"),
        (("draw", "scan", "--access", "kd"), "access='kd' is not one of: consumer: eg;"),
        (("draw", "scan", "--access", "consumer: eg", "--tile", "kd"), "is of tile eg, not kd"),
        (("draw", "scan", "--tile", "kd", "--rows", "0"), "rows=0"),
        (("draw", "scan", "--json"), "--out"),
        (("compare", "scan", "--layout", "padded"), "layout='padded'"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr


def test_show_has_the_stack_over_the_steps():
    data = found("show", "transition")
    assert data["bytes"] == 107_648 and data["ctas_per_sm"] == 2
    assert data["peak"]["name"] == "publish"
    assert {"first": "k", "then": "kd", "bytes": 16_384} in data["sharing"]
    text = run("show", "transition").stdout
    assert "k then kd: 16384 bytes" in text and "k         64x128   bf16   swizzle 128B" in text


def test_audit_has_conflicts_and_legality():
    data = found("audit", "bwd_recurrence", "--layout", "padded", "--conflicts")
    assert (data["ideal_wavefronts"], data["extra_wavefronts"], data["problems"]) == (
        5671,
        1980,
        [],
    )
    assert all(row["actual"] > row["ideal"] for row in data["accesses"])
    assert sum(row["extra_cycles"] for row in data["accesses"]) == 1980
    text = run("audit", "reverse_scan").stdout
    assert "0 extra by bank conflicts" in text and text.splitlines()[-1].startswith("legal")


def test_an_illegal_plan_is_exit_code_1(more_layouts):
    more_layouts(odd=RowPadded(137), huge=RowPadded(400))
    done = run("audit", "bwd_recurrence", "--layout", "odd")
    assert done.exit_code == 1 and "not legal: kd: row 1 of stage 0 starts at byte" in done.stdout
    for command in ("audit", "show", "draw"):
        done = run(command, "bwd_recurrence", "--layout", "huge")
        assert done.exit_code == 1 and "the limit is 232448" in done.stderr
    done = run("list", "bwd_recurrence", "--json")
    problems = {
        r["layout"]: r["problem"] for r in json.loads(done.stdout) if r["precision"] == "tf32"
    }
    assert done.exit_code == 1 and "limit" in problems["huge"] and not problems["default"]


def test_a_new_plan_is_one_entry(more_layouts):
    more_layouts(wider=RowPadded(140))
    (row,) = [
        r
        for r in found("list", "bwd_recurrence")
        if (r["layout"], r["precision"]) == ("wider", "tf32")
    ]
    assert row["tiles"] == "rows/140" and row["bytes"] <= 232_448 and row["problem"] == ""
    data = found("audit", "bwd_recurrence", "--layout", "wider", "--conflicts")
    assert {"pair: kr elementwise", "value: kr as B, K contiguous"} & {
        r["name"] for r in data["accesses"]
    }


def test_draw_writes_svg(tmp_path):
    stack, banks = tmp_path / "new" / "stack.svg", tmp_path / "banks.svg"
    assert run("draw", "gradients", "-O", stack).exit_code == 0
    assert "gradients/default/bf16" in ElementTree.fromstring(stack.read_text())[0].text
    data = found("draw", "scan", "--tile", "kd", "-O", banks)
    assert data["tile"] == "kd" and data["bytes"] == len(banks.read_text())
    done = run("draw", "gradients", "--access", "level 4: gc")
    assert done.exit_code == 0 and "gc, 64 x 128 f32" in ElementTree.fromstring(done.stdout)[0].text


# ---------------------------------------------------------------- compare
def test_compare_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "why_no_kernels", lambda facts: "torch finds no CUDA device")
    done = run("compare", "gradients")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "compare runs kernels: torch finds no CUDA device" in done.stderr


@pytest.fixture
def gpu(monkeypatch):
    """A machine that seems to have a GPU: gpu(layout=error over tolerance), whose kernels take 100
    microseconds, or 125 where padded.
    """
    asked = []
    monkeypatch.setattr(doctor, "why_no_kernels", lambda facts: "")
    monkeypatch.setattr(kernel_compile, "object_file", lambda spec: asked.append(spec))

    def subjects(selection, names, shape, precision):
        plans = [selection.plan(name, precision) for name in names]
        return [
            one_kernel.Subject(
                n, precision or "tf32", p, lambda n=n: {"dv": errors[n]}, lambda: None
            )
            for n, p in zip(names, plans, strict=True)
        ]

    def timer(candidates, repeats):
        return {n: Timing((100.0 if n == "default" else 125.0,) * repeats) for n in candidates}

    monkeypatch.setattr(one_kernel, "subjects", subjects)
    monkeypatch.setattr(layouts, "interleaved", timer)
    errors = {}
    return lambda **given: errors.update(given) or asked


def test_compare_has_prediction_beside_measurement(gpu):
    asked = gpu(default=0.5, padded=0.6)
    data = found("compare", "bwd_recurrence")
    assert data["shape"] == "T8192_H96"
    assert [(r["layout"], r["conflicts"], r["median_us"], r["ratio"]) for r in data["rows"]] == [
        ("default", 60, 100.0, 1.0),
        ("padded", 1980, 125.0, 1.25),
    ]
    assert [spec.config.layout for spec in asked] == ["default", "padded"]
    done = run("compare", "bwd_recurrence", "--layout", "padded", "--precision", "bf16")
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("padded")]
    assert line.split()[1] == "bf16" and "1.000" in line


def test_compare_refuses_a_wrong_plan(gpu):
    gpu(default=0.5, padded=7.0)
    done = run("compare", "bwd_recurrence", "--json")
    assert done.exit_code == 1
    rows = json.loads(done.stdout)["rows"]
    assert rows[1]["failed"] == ["dv"] and rows[1]["median_us"] is None


def test_compare_names_a_bad_shape(gpu):
    gpu()
    done = run("compare", "bwd_recurrence", "--shape", "T1")
    assert done.exit_code == 2 and "'T1' is not one of T8192_H96" in done.stderr


def test_compare_outside_a_checkout(gpu, monkeypatch, tmp_path):
    gpu()
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    done = run("compare", "bwd_recurrence")
    assert done.exit_code == 2 and "needs a checkout of the repository" in done.stderr


def test_the_measuring_package_is_found_from_anywhere(monkeypatch):
    monkeypatch.setattr(
        checkout.sys, "path", [p for p in checkout.sys.path if p != str(checkout.ROOT)]
    )
    assert checkout.perf("shapes").find_shape("T8192_H96").H == 96
    assert str(checkout.ROOT) in checkout.sys.path


# ---------------------------------------------------------------- documentation
DOCS = checkout.ROOT / "docs" / "layouts.md"
DRAWN = [line for line in DOCS.read_text().splitlines() if line.startswith("kda-cute layouts draw")]
FIGURES = [line for line in DRAWN if "docs/figures" in line]


@pytest.mark.parametrize("command", FIGURES, ids=lambda command: command.split("/")[-1])
def test_pictures_of_the_documentation_are_what_their_commands_draw(command, tmp_path):
    *arguments, figure = shlex.split(command)[2:]
    out = tmp_path / "now.svg"
    assert run(*arguments, out).exit_code == 0
    assert out.read_text() == (checkout.ROOT / figure).read_text()
    assert figure.removeprefix("docs/") in DOCS.read_text().replace(command, "")  # shown, too


def test_the_documentation_names_commands_and_kernels_that_are():
    text = DOCS.read_text()
    assert len(FIGURES) == 8
    assert set(re.findall(r"kda-cute layouts (\w+)", text)) == set(layouts_commands())
    assert all(f"`{kernel}`" in text for kernel in catalogue.kernels())


def layouts_commands():
    return main.get_command(None, "layouts").commands


def test_the_plans_that_the_documentation_explains():
    plain, grouped = (variants.BWD_RECURRENCE.layouts[name] for name in ("padded", "default"))
    assert (plain, grouped) == (RowPadded(136), GroupPadded(4, 136, 552))
    (row,) = found("list", "gradients")[:1]
    assert (
        row["bytes"]
        <= 232_448
        < sum(t.nbytes for t in catalogue.select("gradients").plan().tiles)
        == 320_512
    )
