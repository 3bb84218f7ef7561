"""What ncu counts, read from its tables and held against the audit's predictions; needs neither."""

import pytest
from test_lab import subject, tile

from kda_cute.layouts import Plan, RowPadded, Tile, audit
from perf import conflicts, one_kernel

HEAD = ('"#","Address","Source","Instructions Executed","# Samples","Instructions Executed",'
        '"L1 Wavefronts Shared","L1 Wavefronts Shared Ideal"')  # fmt: skip
SOURCE_CSV = "\n".join(
    [
        "==PROF== Disconnected",
        '"Kernel Name","kernelstoy"',
        HEAD,
        '"0","0x10","      LDS R9, [R8+0x40]","7","1","1,000","2,000","1,000"',
        '"1","0x20","@!P0 LDS.64 R9, [R8]","7","1","500","1000","1000"',
        '"2","0x30","LDSM.16.MT88.4 R4, [R5]","7","1","250","1000","1000"',
        '"3","0x40","STS.128 [R4], R8","7","1","0","-","-"',
        '"4","0x50","HMMA.16816.F32.BF16 R4, R8, R12, R4","7","1","99","-","-"',
        '"5","0x60","LDS R9, [R8+0x80]","7","1","1000","1000","1000"',
    ]
)


def test_opcodes_are_kinds_of_the_audit():
    for opcode, kind in {
        "LDS": "lds32",
        "LDS.64": "lds64",
        "LDS.128": "lds128",
        "LDS.U.64": "lds64",
        "LDS.U16": "lds16",
        "STS.U8": "sts8",
        "STS": "sts32",
        "LDSM.16.M88.4": "ldmatrix",
        "LDSM.16.MT88.4": "ldmatrix_trans",
        "STSM.16.MT88.4": "stmatrix_trans",
        "LDG.E": None,
        "HMMA.16816.F32": None,
    }.items():
        assert conflicts.kind_of(opcode) == kind


def test_instructions_of_shared_memory_are_read():
    assert conflicts.read_source(SOURCE_CSV) == [
        ("LDS", 1000, 2000, 1000),
        ("LDS.64", 500, 1000, 1000),
        ("LDSM.16.MT88.4", 250, 1000, 1000),
        ("STS.128", 0, 0, 0),
        ("LDS", 1000, 1000, 1000),
    ]
    with pytest.raises(ValueError, match="L1 Wavefronts Shared"):
        conflicts.read_source('"Address","Source"\n"0","LDS R1, [R2]"\n')


def raw_csv(loads=3000, stores=1000, bank_loads=700, bank_stores=11):
    metrics = [m for pair in conflicts.HARDWARE.values() for m in pair]
    head = ",".join(f'"{m}"' for m in ["ID", *metrics])
    return f'{head}\n"",{",".join(["" for _ in metrics])}\n"0","{loads:,}","{stores}","{bank_loads}","{bank_stores}"\n'


def test_totals_are_sums_of_loads_and_stores():
    assert conflicts.read_totals(raw_csv()) == {"wavefronts": 4000, "conflicts": 711}
    with pytest.raises(ValueError, match="l1tex__data_bank_conflicts"):
        conflicts.read_totals('"ID"\n"0"\n')


def toy_access(name, layout, kind, coords, count):
    return audit.Access(name, Tile(name, (16, 128), "f32", layout), kind, coords, count)


@pytest.fixture
def toy(monkeypatch):
    """A plan whose audit predicts, per chunk, 10 LDS of 2 wavefronts, 10 of 1, and 5 LDS.64 of 2."""
    found = [
        toy_access("slow", RowPadded(136), "lds32", audit.strided(), 10),
        toy_access("fast", RowPadded(132), "lds32", audit.strided(), 10),
        toy_access("pairs", RowPadded(136), "lds64", audit.pairs(), 5),
    ]
    kernel = audit.Kernel(accesses=lambda plan: found, copied=())
    monkeypatch.setitem(audit.KERNELS, "toy", kernel)
    return Plan.build("toy/default", "a", [tile("x", "a", "a")])


def test_measured_wavefronts_are_held_against_the_audit(toy):
    chunks = 100
    instructions = conflicts.read_source(SOURCE_CSV)
    groups = {g.kind: g for g in conflicts.groups(toy, instructions, chunks)}
    assert groups["lds32"][1:] == (20, 30, 20, 30)
    assert groups["lds32"].each == (1.5, 1.5) and groups["lds32"].agrees()
    assert groups["lds64"].each == (2.0, 2.0)
    assert groups["ldmatrix_trans"].each == (None, 4.0) and groups["ldmatrix_trans"].agrees()
    assert not groups["lds32"]._replace(measured_wavefronts=35).agrees()
    assert groups["lds32"]._replace(measured_wavefronts=32.9).agrees()
    assert conflicts.patterns(toy, instructions, chunks) == [
        ("lds32", 1.0, 10, 10, ()),
        ("lds32", 2.0, 10, 10, ("slow",)),
    ]


def test_tables_of_conflicts(toy):
    found = conflicts.Found(
        "toy:tf32/default",
        toy,
        100,
        conflicts.read_source(SOURCE_CSV),
        {"wavefronts": 5000, "conflicts": 1000},
    )
    text = conflicts.markdown([found])
    assert "| toy:tf32/default | 40 | 50 | 50 | 10 | 10 | 10 |" in text
    assert "| toy:tf32/default | lds32 | 20 | 20 | 1.50 | 1.50 | agrees |" in text
    assert "| toy:tf32/default | ldmatrix_trans | 0 | 2 |  | 4.00 | measured only |" in text
    assert "| toy:tf32/default | lds32 | 2 | 10 | 10 | slow |" in text


def test_probes_name_plans_that_are():
    for probe in conflicts.PROBES:
        selection, precision, layout = conflicts.parse_probe(probe)
        assert selection.plan(layout, precision).total_bytes > 0
    for bad, words in (
        ("scan", "KERNEL:PRECISION/LAYOUT"),
        ("scam:bf16/default", "kernel='scam'"),
        ("scan:bf16/wider", "layout='wider'"),
    ):
        with pytest.raises(ValueError, match=words):
            conflicts.parse_probe(bad)
    assert conflicts.SHAPE.T % 64 == 0


def ncu(tmp_path, log, code=0):
    """A stand-in for ncu on PATH: writes what it was asked for, prints a page."""
    script = tmp_path / "bin" / "ncu"
    script.parent.mkdir()
    (tmp_path / "source.csv").write_text(SOURCE_CSV)
    (tmp_path / "raw.csv").write_text(raw_csv())
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n[ {code} -eq 0 ] || {{ echo ERR_NVGPUCTRPERM; exit {code}; }}\n'
        f'case "$*" in *"--page source"*) cat {tmp_path}/source.csv;; *"--page raw"*) cat {tmp_path}/raw.csv;; esac\n'
    )
    script.chmod(0o755)
    return script.parent


@pytest.mark.parametrize("code", (0, 1))
def test_probes_are_profiled_by_ncu_and_read(tmp_path, monkeypatch, capsys, code):
    log = tmp_path / "log"
    monkeypatch.setenv("PATH", f"{ncu(tmp_path, log, code)}:/usr/bin:/bin")
    out, reports = tmp_path / "docs" / "c.md", tmp_path / "reports"
    probe = "scan:bf16/default"
    arguments = ["--probes", probe, "--reports", str(reports), "--out", str(out)]
    got = conflicts.main(arguments)
    asked = log.read_text().splitlines()
    assert "--profile-from-start off" in asked[0] and f"--probe {probe}" in asked[0]
    if code:
        assert got == 2 and "ERR_NVGPUCTRPERM" in capsys.readouterr().err and not out.exists()
        return
    # The toy's single LDS have 1.5 wavefronts; the scan has none at all: nothing to disagree with.
    assert len(asked) == 3 and got == int("differs" in out.read_text())
    assert f"| {probe} | lds32 |" in out.read_text()
    assert conflicts.main(["--probes", probe, "--read", str(reports)]) == got
    assert len(log.read_text().splitlines()) == 3  # ncu did not run again
    assert capsys.readouterr().out.strip() == out.read_text().strip()


def test_conflicts_need_ncu(monkeypatch, capsys):
    monkeypatch.setattr(conflicts.shutil, "which", lambda name: None)
    assert conflicts.main([]) == 2
    assert "not on PATH" in capsys.readouterr().err


def test_a_probe_with_wrong_results_is_not_profiled(monkeypatch):
    launched = []
    wrong = subject("default", {"dv": 2.0}, launched)
    monkeypatch.setattr(one_kernel, "subjects", lambda *arguments: [wrong])
    with pytest.raises(RuntimeError, match="wrong results dv"):
        conflicts.launch("bwd_recurrence:tf32/default")
    assert launched == []
