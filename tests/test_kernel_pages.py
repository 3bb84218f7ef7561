"""The kernels' pages: their tables are those that plans, schedules and results files give."""

import re
from pathlib import Path

import pytest

from perf import kernel_pages, report, results

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
KERNELS = kernel_pages.kernels()
FIXED = [name for name in kernel_pages.TABLES if name not in kernel_pages.MEASURED]


def example(begin="<!-- plan:begin -->", end="<!-- plan:end -->"):
    return f"before\n{begin}\nold\n{end}\nafter\n"


@pytest.mark.parametrize("page", KERNELS)
def test_the_pages_are_up_to_date_but_for_times(page):
    """`python3 -m perf.kernel_pages` writes them."""
    text = (kernel_pages.FOLDER / f"{page}.md").read_text()
    assert kernel_pages.updated(text, KERNELS[page], FIXED) == text


@pytest.mark.parametrize("page", KERNELS)
def test_times_are_those_of_a_results_file_that_the_page_names(page):
    text = (kernel_pages.FOLDER / f"{page}.md").read_text()
    inside = text.split("<!-- roofline:begin -->")[1].split("<!-- roofline:end -->")[0]
    named = re.findall(r"\(`(\S+\.json)`\)", inside)
    assert named
    measured = set()
    for name in named:
        for row in results.read(results.FOLDER / name)["rows"]:
            if row.get("median_us"):
                key = row["op"], row["shape"], row["variant"], results.us(row["median_us"])
                measured.add(key)
    shown = [line.split(" | ") for line in inside.splitlines() if line.startswith("| ")][2:]
    lines = [(x[0].strip("| "), x[1], x[2], x[7]) for x in shown if x[1] in kernel_pages.SHAPES]
    assert lines and set(lines) <= measured


def test_only_what_stands_between_the_markers_changes():
    assert report.filled(example(), "plan", "new") == example().replace("old", "new")


@pytest.mark.parametrize(
    "text",
    ("nothing", example(end=""), example(begin="<!-- plan:end -->", end="<!-- plan:begin -->")),
)
def test_a_page_without_its_markers_is_refused(text):
    with pytest.raises(ValueError, match="plan:begin"):
        report.filled(text, "plan", "new")


def row(variant, us, op="chunk_kda_bwd", **more):
    fields = dict(op=op, shape="T8192_H96", provider="kda_cute", variant=variant, median_us=us)
    return fields | dict(p20_us=us, p80_us=us, bytes=int(4.26e9), flops=int(80e9)) | more


def test_the_roofline_takes_the_newest_times_of_its_kernel(tmp_path):
    head = dict.fromkeys(results.HEADER, "x")
    old, new = (head | dict(date=f"2026-01-0{n}T00:00:00+00:00") for n in (1, 2))
    results.write(tmp_path / "old.json", [row("B/states/scan", 9999.0)], old)
    rows = [
        row("B/states/scan", 1500.0),
        row("B/states", 7777.0),
        row("B/states/gradients", 8888.0),
    ]
    rows += [
        row("B/states/scan", 6666.0, shape="T8192_H64"),
        row("B/states/scan", 5555.0, provider="x"),
    ]
    results.write(tmp_path / "new.json", rows, new)
    text = kernel_pages.roofline_table(KERNELS["reverse_scan"], tmp_path)
    assert "| 4.260 | 1,000 | 80.0 | 100 | 1,500 | 1.50x |" in text  # of bytes, the higher roof
    assert "2026-01-02" in text and "new.json" in text
    assert not any(number in text for number in ("9,999", "8,888", "7,777", "6,666", "5,555"))
    assert kernel_pages.roofline_table(KERNELS["scan"], tmp_path) == "Not measured yet."


def test_bytes_of_a_chunk_are_those_of_its_tensors():
    """Of the reverse scan: kd, z, qd, do, dv of 64 x 128 bf16, p, qk, eg, dS."""
    table = kernel_pages.bytes_table(KERNELS["reverse_scan"])
    moved = 5 * 64 * 128 * 2 + 64 * 64 * 2 + 64 * 4 + 128 * 4 + 128 * 128 * 2
    assert f"| {moved:,} |" in table and "memory" in table


def test_check_tells_of_a_stale_page_and_writing_mends_it(tmp_path, monkeypatch, capsys):
    for path in kernel_pages.FOLDER.glob("*.md"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(kernel_pages, "FOLDER", tmp_path)
    assert kernel_pages.main([]) == 0
    assert kernel_pages.main(["--check"]) == 0
    page = tmp_path / "scan.md"
    page.write_text(page.read_text().replace("swizzle 128B", "dense"))
    assert kernel_pages.main(["--check"]) == 1
    assert "scan.md is out of date" in capsys.readouterr().out
    assert kernel_pages.main([]) == 0 and "swizzle 128B" in page.read_text()


def test_links_and_paths_of_the_pages_exist():
    for page in [DOCS / "mathematics.md", DOCS / "accuracy.md", *DOCS.glob("kernels/*.md")]:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / target).exists(), (page.name, target)
        for target in re.findall(r"`((?:kda_cute|tests|perf|docs)/[\w/.]+)`", text):
            assert (ROOT / target).exists(), (page.name, target)
