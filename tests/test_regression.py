"""What `kda-cute bench compare` decides, on made-up and on simulated runs; no GPU."""

import json
import math

import numpy as np
import pytest
from gpu_stand_in import HEADER

from perf import compare, regression, report, results, yardstick
from perf.shapes import find_shape, repeats_of
from perf.timing import Timing

OP, SHAPE = "chunk_kda_fwd", "T8192_H96"
COPY_BYTES = 8 * yardstick.COPY_ELEMENTS


def row(variant, samples, *, op=OP, shape=SHAPE, provider="kda_cute", moved=COPY_BYTES, failed=()):
    timing = None if failed else Timing(tuple(samples))
    return results.timing_row(
        op, shape, provider, variant, timing, moved=moved, flops=1, failed=failed
    )


def steady(us, n=40, spread=0.004):
    """Samples whose middle is us, spread evenly, in an order that isn't sorted."""
    steps = [(i * 7 % n) / (n - 1) - 0.5 for i in range(n)]
    return [us * (1 + spread * step) for step in steps]


def sticks(copy=64.0, matmul=90.0, op=OP, shape=SHAPE):
    made = {"copy": Timing(tuple(steady(copy))), "matmul": Timing(tuple(steady(matmul)))}
    return yardstick.rows(op, find_shape(shape), made)


def run(*rows, **header):
    return {**HEADER, **header, "rows": list(rows)}


def decide(base, new, **more):
    """variant -> verdict."""
    found = regression.compare(base, new, **more)
    return {d.variant: d.verdict for d in found.decisions}


# ---------------------------------------------------------------- one row
def test_ratio_is_the_median_of_pairwise_ratios():
    found = regression.ratio([1.0, 2.0, 4.0], [2.0, 4.0, 8.0], 0.5)
    assert found.estimate == pytest.approx(2.0)
    pairs = sorted(math.log(b / a) for a in (1, 2, 4) for b in (2, 4, 8))
    assert any(math.log(found.low) == pytest.approx(p) for p in pairs)
    assert found.low <= found.estimate <= found.high


def test_an_interval_widens_with_confidence_and_narrows_with_samples():
    few, many = (steady(100.0, n, 0.1) for n in (20, 60))
    narrow, wide = (regression.ratio(many, many, c) for c in (0.9, 0.9999))
    assert wide.low < narrow.low < 1 < narrow.high < wide.high
    fewer = regression.ratio(few, few, 0.9)
    assert fewer.high / fewer.low > narrow.high / narrow.low


def test_too_few_samples_give_no_bounds():
    found = regression.ratio([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], 0.99)
    assert (found.estimate, found.low, found.high) == (2.0, 0.0, math.inf)
    assert regression.verdict(found, 0.02) == regression.UNCLEAR


def test_outliers_move_the_interval_little():
    calm, wild = steady(100.0, 60), steady(100.0, 60)
    wild[5] = wild[17] = wild[41] = 1e6
    found = regression.ratio(calm, wild, 0.9999)
    assert found.estimate == pytest.approx(1.0, abs=0.001)
    assert 0.995 < found.low < found.high < 1.005


def test_the_interval_holds_the_truth_as_often_as_promised():
    rng, missed = np.random.default_rng(3), 0
    for _ in range(1000):
        base, new = rng.lognormal(0, 0.05, 40), 1.03 * rng.lognormal(0, 0.05, 40)
        missed += 1.03 not in regression.ratio(base, new, 0.95)
    assert 25 <= missed <= 75


@pytest.mark.parametrize("bad", [[], [0.0], [-1.0], [math.nan]])
def test_ratio_refuses_what_is_no_time(bad):
    with pytest.raises(ValueError, match="samples|above 0"):
        regression.ratio(bad, [1.0], 0.9)


@pytest.mark.parametrize(
    "low, estimate, high, expected",
    [
        (1.021, 1.05, 1.08, regression.REGRESSION),
        (0.90, 0.95, 0.979, regression.IMPROVEMENT),
        (0.995, 1.0, 1.005, regression.UNCHANGED),
        (1.005, 1.015, 1.025, regression.UNCHANGED),  # leaves the band, but is narrow
        (1.015, 1.03, 1.045, regression.UNCLEAR),  # its estimate is outside
        (0.96, 1.0, 1.04, regression.UNCLEAR),  # wider than the band
        (0.94, 0.97, 0.99, regression.UNCLEAR),
    ],
)
def test_verdicts_come_from_the_interval(low, estimate, high, expected):
    assert regression.verdict(regression.Interval(estimate, low, high), 0.02) == expected


# ---------------------------------------------------------------- drift
def test_a_row_drifts_with_its_share_of_bytes():
    copy, matmul = regression.Interval(1.04, 1.035, 1.045), regression.Interval(0.98, 0.97, 0.99)
    copy_row = row("copy", [64.0])

    def drift(us, moved, copy=copy):
        return regression.drift_of(row("x", [us], moved=moved), copy_row, copy, matmul).estimate

    assert drift(64.0, COPY_BYTES) == pytest.approx(1.04)  # at the copy's rate
    assert drift(1.0, COPY_BYTES) == pytest.approx(1.04)  # no more than all of it
    assert drift(64.0, 0) == pytest.approx(0.98)
    assert drift(128.0, COPY_BYTES) == pytest.approx(math.sqrt(1.04 * 0.98))
    unmoved = regression.Interval(1.04, 0.99, 1.09)  # may as well be 1
    assert drift(64.0, COPY_BYTES, unmoved) == 1.0


def test_drift_of_the_machine_is_no_regression_and_hides_none():
    base = run(*sticks(), row("same", steady(64.0)), row("slow", steady(64.0)))
    new = run(*sticks(copy=64 * 1.04), row("same", steady(66.56)), row("slow", steady(69.9)))
    assert decide(base, new) == {"same": "unchanged", "slow": "regression"}
    plain = [run(*one["rows"][2:]) for one in (base, new)]
    found = regression.compare(*plain)
    assert [d.verdict for d in found.decisions] == ["regression"] * 2
    assert "no yardsticks" in found.warnings[0]


def test_a_faster_machine_does_not_hide_a_regression():
    base = run(*sticks(), row("slow", steady(64.0)))
    new = run(*sticks(copy=64 * 0.95), row("slow", steady(64.0)))
    assert decide(base, new) == {"slow": "regression"}


def test_runs_of_a_machine_in_another_state_are_refused():
    base, new = (run(*sticks(copy=us), row("x", steady(64.0))) for us in (64.0, 80.0))
    with pytest.raises(regression.Incomparable, match=r"1\.25x as long in b.json as in a.json"):
        regression.compare(base, new, names=("a.json", "b.json"))


# ---------------------------------------------------------------- two runs
def test_each_row_is_decided():
    base = run(
        *sticks(), row("same", steady(100)), row("slow", steady(100)), row("fast", steady(100))
    )
    new = run(
        *sticks(), row("same", steady(100.3)), row("slow", steady(105)), row("fast", steady(94))
    )
    assert decide(base, new) == {
        "same": "unchanged",
        "slow": "regression",
        "fast": "improvement",
    }
    found = regression.compare(base, new)
    assert regression.exit_code(found) == 1
    assert [d.variant for d in found.bad] == ["slow"]
    assert regression.exit_code(regression.compare(base, base)) == 0


def test_tolerance_and_providers_choose():
    base = run(row("x", steady(100)), row("x", steady(100), provider="cudnn"))
    new = run(row("x", steady(104)), row("x", steady(110), provider="cudnn"))
    found = regression.compare(base, new, tolerance=0.06)
    assert [d.verdict for d in found.decisions] == ["unchanged", "regression"]
    assert decide(base, new, tolerance=0.06, providers=["kda_cute"]) == {"x": "unchanged"}
    for wrong in (dict(tolerance=0.0), dict(confidence=1.0)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            regression.compare(base, new, **wrong)


def test_the_confidence_is_shared_by_all_rows():
    rows = [row(str(i), steady(100, 30, 0.2)) for i in range(50)]
    one = regression.compare(run(rows[0]), run(rows[0])).decisions[0]
    many = regression.compare(run(*rows), run(*rows)).decisions[0]
    assert many.high > one.high


def test_a_failed_gate_in_new_counts_with_and_without_a_base():
    good, bad = row("x", steady(100)), row("x", (), failed=["dg"])
    found = regression.compare(run(good), run(bad))
    assert [(d.verdict, d.failed) for d in found.decisions] == [("gate failed", ("dg",))]
    assert regression.exit_code(found) == 1
    other = row("y", (), failed=["o"])
    found = regression.compare(run(good), run(good, other))
    assert regression.exit_code(found) == 1
    assert found.only_new == ()
    found = regression.compare(run(bad, row("z", steady(1.0))), run(good, row("z", steady(1.0))))
    assert regression.exit_code(found) == 0
    assert found.undecided == (f"{OP} {SHAPE} kda_cute/x",)


def test_rows_of_one_run_are_listed():
    both = row("both", steady(100))
    found = regression.compare(
        run(both, row("old", steady(1.0))), run(both, row("new", steady(1.0)))
    )
    assert found.only_base == (f"{OP} {SHAPE} kda_cute/old",)
    assert found.only_new == (f"{OP} {SHAPE} kda_cute/new",)
    text = regression.to_markdown(found)
    assert f"Only in BASE: {found.only_base[0]}" in text
    assert f"Only in NEW: {found.only_new[0]}" in text


def test_what_cannot_be_compared_is_refused_by_name():
    mine = row("x", steady(100))
    bare = {k: v for k, v in mine.items() if k != "samples_us"}
    names = ("a.json", "b.json")
    for new, words in (
        (run(mine, gpu="NVIDIA H100"), ("NVIDIA H200", "NVIDIA H100", *names)),
        (run(row("x", steady(1.0), op="bwd_recurrence")), ("no row in common", OP, *names)),
        (run(bare), ("no samples", "b.json")),
    ):
        with pytest.raises(regression.Incomparable) as refused:
            regression.compare(run(mine), new, names=names)
        assert all(word in str(refused.value) for word in words)
    assert "a.json" not in str(refused.value)


def test_other_software_is_warned_of():
    mine = row("x", steady(100))
    new = run(mine, driver="590", torch="2.12", cutlass_dsl="4.9", commit="f00-dirty")
    *versions, dirty, drift = regression.compare(run(mine), new).warnings
    assert versions == [
        "driver: 580.1 in BASE, 590 in NEW",
        "torch: 2.11.0 in BASE, 2.12 in NEW",
        "CuTe DSL: 4.8.1 in BASE, 4.9 in NEW",
    ]
    assert "NEW" in dirty
    assert "no yardsticks" in drift


def test_json_has_the_decision_and_no_infinity():
    base = run(*sticks(), row("x", steady(100)), row("few", [1.0, 1.0]))
    found = json.loads(json.dumps(regression.to_json(regression.compare(base, base))))
    assert found["ok"] is True
    assert [(r["variant"], r["verdict"]) for r in found["rows"]] == [
        ("x", "unchanged"),
        ("few", "unclear"),
    ]
    assert found["rows"][1]["high"] is None
    assert {d["yardstick"] for d in found["drift"]} == {"copy", "matmul"}


def test_the_table_has_the_worst_first():
    base = run(row("same", steady(100)), row("slow", steady(100)))
    new = run(row("same", steady(100)), row("slow", steady(110)), row("bad", (), failed=["o"]))
    lines = regression.to_markdown(regression.compare(base, new)).splitlines()
    assert [line.split("|")[3].strip() for line in lines[2:5]] == [
        "kda_cute bad",
        "kda_cute slow",
        "kda_cute same",
    ]
    assert "1.100x" in lines[3]
    assert "**regression**" in lines[3]
    assert "3 rows: 1 gate failed, 1 regression, 1 unchanged" in lines[-1]


# ---------------------------------------------------------------- simulated runs
# Of a machine: a row's middle differs between runs for no reason that is seen; clocks drift between
# the runs and, by a walk, within them; one call in fifty meets something.
BETWEEN, WITHIN, OUTLIERS, WORST_OUTLIER = 0.002, 0.002, 0.02, 3.0
CLOCK, MEMORY = 0.02, 0.005  # largest drift between two runs
MISJUDGED = 0.2  # how far a row's share of memory time may be from what its bytes say
PAIRS, SLOWDOWN = 200, 1.05


def committed_rows():
    """(op, shape) -> timing rows of the committed results, which say how times spread."""
    found = {}
    for _, run_, ops in report.newest_by_op(results.FOLDER.glob("*.json")):
        for r in run_["rows"]:
            if r["op"] in {*ops} & {*compare.OPS} and results.is_timing(r) and r["median_us"]:
                found.setdefault((r["op"], r["shape"]), []).append(r)
    return found


def simulated(rng, rows, clock=1.0, memory=1.0, slow=None):
    """A run of one op on one shape, in which the row `slow` takes SLOWDOWN times as long."""
    op, shape = rows[0]["op"], find_shape(rows[0]["shape"])
    n = repeats_of(shape, 60)
    walk = np.cumsum(rng.normal(size=n))
    walk = WITHIN * (walk - walk.mean()) / np.abs(walk).max()

    def times(us, spread, share):
        noise = np.exp(rng.normal(0, spread / 1.683, n) + walk + rng.normal(0, BETWEEN))
        late = rng.random(n) < OUTLIERS
        noise = np.where(late, noise * rng.uniform(1.2, WORST_OUTLIER, n), noise)
        return Timing(tuple(us * memory**share * clock ** (1 - share) * noise))

    made = yardstick.rows(
        op, shape, {"copy": times(64.0, 0.004, 1.0), "matmul": times(90.0, 0.01, 0.0)}
    )
    for r in rows:
        spread = (r["p80_us"] - r["p20_us"]) / r["median_us"]
        share = min(1.0, r["bytes"] / COPY_BYTES * 64.0 / r["median_us"])
        share = float(np.clip(share + rng.uniform(-MISJUDGED, MISJUDGED), 0, 1))
        us = r["median_us"] * (SLOWDOWN if r is slow else 1.0)
        made.append(
            results.timing_row(
                op, shape.name, r["provider"], r["variant"], times(us, spread, share),
                moved=r["bytes"], flops=r["flops"],
            )
        )  # fmt: skip
    return run(*made)


@pytest.mark.parametrize("slowed", [True, False])
def test_in_200_simulated_pairs_each_way_every_decision_is_right(slowed):
    groups = committed_rows()
    rows = [(group, r) for group in groups.values() for r in group]
    assert len(rows) > 100
    rng, missed, false = np.random.default_rng(20), [], []
    for i in range(PAIRS):
        group, one = rows[i % len(rows)]
        # One op and shape at a time, at the confidence that all rows together would leave it.
        confidence = 1 - 0.01 * len(group) / len(rows)
        drift = dict(clock=1 + CLOCK * rng.uniform(-1, 1), memory=1 + MEMORY * rng.uniform(-1, 1))
        base = simulated(rng, group)
        new = simulated(rng, group, **drift, slow=one if slowed else None)
        found = regression.compare(base, new, confidence=confidence)
        wanted = {(one["provider"], one["variant"])} if slowed else set()
        bad = {(d.provider, d.variant) for d in found.bad}
        faster = {d.name for d in found.decisions if d.verdict == regression.IMPROVEMENT}
        missed += [(one["shape"], *name) for name in wanted - bad]
        false += [*(bad - wanted), *faster]
    assert (missed, false) == ([], [])
