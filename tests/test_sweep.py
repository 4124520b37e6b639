"""What a sweep consists of, what it refuses, and the numbers that it makes of its runs."""

import csv
import json
import logging
import math
import pathlib
import re
import subprocess
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import scipy.stats

from jrl.errors import UserError
from jrl.flags import without_config
from jrl.svg import Curve, picture
from jrl.sweep import execute, figure, grid, page, results
from jrl.sweep.__main__ import main, parse
from jrl.sweep.execute import FAILED, FINISHED, WAITING
from jrl.sweep.grid import arm_name, check_directory, make_sweep, read_grid, write_identity
from tests.fake_run import finish
from tests.runs import ROOT, TINY, lines
from tests.test_report import Page

RATES = {"learner.learning_rate": ["1e-6", "3e-6"]}
HELD_OUT = "val-core/sums/last_number/mean@4"


def sweep_of(directory, values=None, seeds=2, config=TINY, **overrides):
    keys = {name.replace("__", "."): value for name, value in overrides.items()}
    return make_sweep(str(config), keys, RATES if values is None else values, seeds, directory)


# Arms and runs -------------------------------------------------------------------------------------------------------------


def test_every_combination_with_every_seed_the_first_seed_of_all_first(tmp_path):
    sweep = sweep_of(tmp_path, {**RATES, "algorithm.name": ["grpo", "dapo"]}, seeds=3)
    found = [(r.arm.values["learner.learning_rate"], r.arm.values["algorithm.name"], r.seed) for r in sweep.runs]
    assert found == [(rate, name, seed) for seed in range(3) for rate in (1e-6, 3e-6) for name in ("grpo", "dapo")]
    assert len({run.directory for run in sweep.runs}) == len({run.name for run in sweep.runs}) == 12
    run = sweep.runs[-1]
    assert run.directory == tmp_path / "algorithm.name=dapo,learner.learning_rate=3e-06" / "seed2"
    command = run.command()
    assert command[1:4] == ["-m", "jrl.main", f"--config={TINY}"]
    assert set(command[4:]) == {
        "--config.learner.learning_rate=3e-6", "--config.algorithm.name=dapo", "--config.seed=2",
        f"--config.run_dir={run.directory}",
    }  # fmt: skip
    run.directory.mkdir(parents=True)
    assert "--config.resume=True" not in run.command()
    (run.directory / "config.json").write_text("{}")
    assert "--config.resume=True" in run.command(), "it has begun"


def test_values_with_commas_and_keys_within_options(tmp_path):
    values = read_grid(['reward.functions="last_number, length_penalty*0.1",last_number', "data.options.max_terms=2,3"])
    assert values == {
        "reward.functions": ["last_number, length_penalty*0.1", "last_number"], "data.options.max_terms": ["2", "3"],
    }  # fmt: skip
    sweep = sweep_of(tmp_path, {"data.options.max_terms": ["2", "3"]})
    assert [arm.settings["data.options"]["max_terms"] for arm in sweep.arms] == [2, 3]
    assert grid.identity(sweep)["base"]["data.options"] == {"min_terms": 2, "min_digits": 1, "max_digits": 2}


def test_the_name_of_an_arm_is_a_safe_path_of_its_own():
    assert arm_name({}) == "base"
    assert arm_name({"b": 1e-6, "a": None}) == arm_name({"a": None, "b": 1e-6}) == "a=preset,b=1e-06"
    odd = ["Qwen/Qwen2.5", "Qwen:Qwen2.5", "../../x", "a b", "\n", "é", "x" * 300, "x" * 301, "$(rm)"]
    names = [arm_name({"model.path": value}) for value in odd]
    assert len(set(names)) == len(odd)
    assert all(re.fullmatch(r"[A-Za-z0-9._=,+~-]{1,200}", name) for name in names)


def test_no_grid_is_one_arm_with_several_seeds(tmp_path):
    sweep = sweep_of(tmp_path, {}, seeds=3)
    assert [run.directory.relative_to(tmp_path).as_posix() for run in sweep.runs] == ["base/seed0", "base/seed1", "base/seed2"]


def test_the_arguments_of_the_config_are_told_from_the_others():
    args = ["--grid", "steps=1,2", "--config", "x.py", "--noconfig.resume", "--config.learner.mesh.fsdp", "-1", "--seeds=2"]
    own, config = without_config(args)
    assert own == ["--grid", "steps=1,2", "--seeds=2"]
    assert config == ["--config", "x.py", "--noconfig.resume", "--config.learner.mesh.fsdp", "-1"]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--grid", "learner.learning_rate=1e-6,fast"], "arm learner.learning_rate=fast: config.learner.learning_rate='fast'"),
        (["--grid", "learner.learning_rat=1,2"], "did you mean learner.learning_rate?"),
        (["--grid", "algorithm.minibatches=2,3"], "arm algorithm.minibatches=3: config.algorithm.minibatches=3: must divide"),
        (["--grid", "algorithm.name=grpo,gropo"], "arm algorithm.name=gropo"),
        (["--grid", "algorithm.name=grpo,ppo", "--config.algorithm.lam=0.9"], "arm algorithm.name=grpo"),
        (["--grid", "learner.learning_rate=1e-6,0.000001"], "a value is there twice"),
        (["--grid", "seed=1,2"], "--seeds=N"),
        (["--grid", "run_dir=a,b"], "give --sweep_dir"),
        (["--config.resume"], "resumed by itself"),
        (["--grid", "steps"], "KEY=VALUE"),
        (["--grid", "steps="], "KEY=VALUE"),
        (["--grid", "steps=1", "--grid", "steps=2"], "has values already"),
        (["--grid", "steps=1", "--config.steps=2"], "leave out one of them"),
        (["--seeds=0"], "--seeds=0: must be at least 1"),
        (["--seeds=some"], "invalid int value"),
        (["--parallel=2", "--ray"], "--parallel=2"),
        (["--parallel=2", "--config.log.prometheus_port=9000"], "config.log.prometheus_port=9000: runs at the same time"),
        (["--num_gpus=1"], "--num_gpus=1: is for --ray"),
        (["--grids=steps=1"], "--grids=steps=1"),
        (["--config=nowhere.py"], "error: --config=nowhere.py: no such file"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_begun(tmp_path, capsys, args, part):
    directory = tmp_path / "sweep"
    assert main([f"--config={TINY}", f"--sweep_dir={directory}", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and part in captured.err
    assert not directory.exists()


def test_without_a_config(capsys):
    assert main(["--grid", "steps=1,2"]) == 2
    assert "--config is missing" in capsys.readouterr().err


def test_a_dry_run_shows_the_commands_touches_no_device_and_needs_no_ray(tmp_path):
    code = (
        "import sys\nsys.modules['ray'] = None\nfrom jrl.sweep.__main__ import main\n"
        f"assert main(['--config={TINY}', '--grid', 'algorithm.name=grpo,ppo', '--sweep_dir={tmp_path}/x', '--dry_run']) == 0\n"
        "from jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized()\n"
        f"assert main(['--config={TINY}', '--sweep_dir={tmp_path}/x', '--ray']) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# 2 arms x 1 seeds = 2 runs, 0 finished\n") and done.stdout.count("-m jrl.main") == 2
    assert "pip install -e '.[ray]'" in done.stderr and not (tmp_path / "x").exists()


# The directory ---------------------------------------------------------------------------------------------------------


def test_a_directory_takes_more_of_the_same_sweep_and_nothing_else(tmp_path):
    write_identity(sweep_of(tmp_path, steps="5"))
    for same in (sweep_of(tmp_path, steps="5"), sweep_of(tmp_path, seeds=3, steps="5")):
        check_directory(same)
    check_directory(sweep_of(tmp_path, {"learner.learning_rate": ["1e-5", "0.000003", "1e-6"]}, steps="5"))
    other = {**RATES, "algorithm.name": ["grpo"]}
    for changed, part in (
        (sweep_of(tmp_path, steps="6"), "has config.steps=5, this one 6; give --config.steps=5, or another --sweep_dir"),
        (sweep_of(tmp_path, {"learner.learning_rate": ["1e-6"]}, steps="5"), "has learner.learning_rate=3e-06 too"),
        (sweep_of(tmp_path, seeds=1, steps="5"), "has 2 seeds; give --seeds=2 or more"),
        (sweep_of(tmp_path, other, steps="5"), "is over learner.learning_rate, this one over algorithm.name, learner"),
        (sweep_of(tmp_path, {}, steps="5"), "this one over no key"),
    ):
        with pytest.raises(UserError, match=re.escape(part)):
            check_directory(changed)


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="no sweep's"):
        check_directory(sweep_of(tmp_path))
    with pytest.raises(UserError, match="thesis.tex is not a directory"):
        check_directory(sweep_of(tmp_path / "thesis.tex" / "runs"))
    (tmp_path / grid.FILE).write_text('{"grid"')
    with pytest.raises(UserError, match="not JSON"):
        check_directory(sweep_of(tmp_path))


def test_two_sweeps_do_not_work_in_one_directory(tmp_path):
    with execute.held(tmp_path / "a"):
        with execute.held(tmp_path / "b"):
            pass
        with pytest.raises(UserError, match="still at work there"), execute.held(tmp_path / "a"):
            pass
    with execute.held(tmp_path / "a") as lock:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    try:
        with pytest.raises(UserError, match="still at work"), execute.held(tmp_path / "a"):
            pass  # the sweep is over, and a run of its is not
    finally:
        child.communicate(b"\n", timeout=60)
    with execute.held(tmp_path / "a"):
        pass


# Numbers ---------------------------------------------------------------------------------------------------------------


def test_the_interval_is_students():
    assert results.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.302653 / 3**0.5))  # t of 2 degrees of freedom, sd 1
    for n in (2, 5, 30):
        values = np.random.default_rng(n).normal(size=n)
        low, high = scipy.stats.t.interval(0.95, n - 1, values.mean(), scipy.stats.sem(values))
        mean, half = results.interval(list(values))
        assert (mean - half, mean + half) == pytest.approx((low, high), rel=1e-12)
    mean, half = results.interval([0.25])
    assert mean == 0.25 and math.isnan(half)


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        ((0.57532, 0.0604), "0.575 ± 0.060"), ((65.03, 16.1), "65 ± 16"), ((0.1, 0.0), "0.1 ± 0"), ((60.0, math.nan), "60"),
        ((1.23e-7, 4.5e-8), "1.23e-07 ± 4.5e-08"), ((12345.6, 1234.0), "12346 ± 1234"),
    ],
)  # fmt: skip
def test_numbers_have_the_digits_that_they_are_worth(pair, text):
    assert results.text(*pair) == text


@pytest.fixture
def swept(tmp_path):
    """A sweep of two arms and three seeds, of which one run has failed and one has not begun; its runs' status."""
    sweep = sweep_of(tmp_path / "<b>sweep{{title}}", {"learner.learning_rate": ["1e-4", "2e-4"]}, seeds=3)
    status = dict.fromkeys((run.name for run in sweep.runs), FINISHED)
    for run in sweep.runs[:-2]:
        run.directory.mkdir(parents=True)
        finish(run.directory, run.seed, 1e3 * run.arm.values["learner.learning_rate"])
    failed, waiting = sweep.runs[-2:]
    status |= {failed.name: FAILED, waiting.name: WAITING}
    failed.directory.parent.mkdir(exist_ok=True)
    failed.log.write_text("first\n" + "x\n" * 9 + "\x1b[31m</pre><script>alert(1)</script>\n")
    return sweep, status


def test_the_table_holds_the_numbers_of_the_runs(swept):
    sweep, status = swept
    rows = results.read_rows(sweep, status)
    metrics, unknown = results.chosen_metrics(rows, [])
    assert metrics == [HELD_OUT, "train/accuracy", "critic/score/mean"] and not unknown
    file = results.write_csv(sweep, rows, metrics)
    with file.open(newline="") as opened:
        table = list(csv.DictReader(opened))
    assert [row["status"] for row in table] == [FINISHED] * 4 + [FAILED, WAITING]
    for run, row in zip(sweep.runs[:4], table, strict=False):
        result = json.loads((run.directory / "result.json").read_text())
        assert (sweep.directory / row["directory"], int(row["seed"])) == (run.directory, run.seed)
        assert float(row["learner.learning_rate"]) == run.arm.values["learner.learning_rate"]
        assert {k: row[k] for k in result} == {k: "" if v is None else str(v) for k, v in result.items()}
        written = lines(run.directory / "metrics.jsonl")
        assert float(row["train/accuracy"]) == written[3]["train/accuracy"]
        assert HELD_OUT not in row, "the result has it"
    assert table[4]["accuracy_after"] == table[5]["train/accuracy"] == ""


def test_curves_are_the_means_over_seeds_with_their_intervals(swept):
    sweep, status = swept
    rows = results.read_rows(sweep, status)
    first, second = results.by_arm(sweep, rows)
    written = [lines(run.directory / "metrics.jsonl") for run in sweep.runs[:4] if run.arm is sweep.arms[0]]
    assert len(written) == 2
    values = np.array([[row["train/accuracy"] for row in run if row["kind"] == "train"] for run in written])
    curve = first.curve("train/accuracy")
    np.testing.assert_allclose(curve.points, list(enumerate(values.mean(0))))
    half = scipy.stats.t.ppf(0.975, 1) * values.std(0, ddof=1) / 2**0.5
    np.testing.assert_allclose(curve.band, np.stack([values.mean(0) - half, values.mean(0) + half], 1))
    assert curve.smooth and not second.curve(HELD_OUT).smooth and second.curve("critic/typo") is None
    assert [step for step, _ in second.curve(HELD_OUT).points] == [0, 4]
    after = [row.result["accuracy_after"] for row in rows if row.run.arm is sweep.arms[0] and row.result]
    assert first.of("accuracy_after") == results.interval(after)


def test_the_best_arm_is_that_of_the_highest_mean_among_those_with_most_seeds(swept):
    sweep, status = swept
    one, two = results.by_arm(sweep, results.read_rows(sweep, status))
    assert results.best([one, two]) == (two, "accuracy_after")
    assert results.best([one, results.ArmResult(two.arm, two.rows[:1], "")]) == (one, "accuracy_after")
    assert results.best([results.ArmResult(one.arm, [], "")]) is None


def test_the_agents_of_a_run_have_results_of_their_own(tmp_path):
    sweep = sweep_of(tmp_path, {"agents.options.checker.learner.learning_rate": ["1e-4"]}, 1, ROOT / "configs" / "agents.py")
    (run,) = sweep.runs
    assert run.parts() == {"solver": run.directory / "solver", "checker": run.directory / "checker"}
    for slope, directory in enumerate(run.parts().values(), 1):
        assert run.result() is None, "not before all of them have ended"
        directory.mkdir(parents=True)
        finish(directory, 0, slope)
    rows = results.read_rows(sweep, {run.name: FINISHED})
    (arm,) = results.by_arm(sweep, rows)
    assert 1 < rows[0].result["solver/accuracy_after"] < 2 < rows[0].result["checker/accuracy_after"]
    assert results.best([arm]) == (arm, "solver/accuracy_after")
    assert f"solver/{HELD_OUT}" in results.chosen_metrics(rows, [])[0]
    page.write_page(sweep, rows, ["checker/train/accuracy"])
    assert "checker/report.html" in (tmp_path / "index.html").read_text()


def test_metrics_are_chosen_by_pattern(swept):
    rows = results.read_rows(*swept)
    assert results.chosen_metrics(rows, ["actor/*", "val-core/*", "no/such"]) == (["actor/lr", HELD_OUT], ["no/such"])
    assert results.chosen_metrics([], ["actor/*"]) == ([], []), "no run has ended, so nobody knows"


def test_the_page_shows_the_arms_and_needs_nothing_from_outside(swept):
    sweep, status = swept
    rows = results.read_rows(sweep, status)
    text = page.write_page(sweep, rows, ["train/accuracy", HELD_OUT], ["a <note>"]).read_text()
    shown = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in shown.elements}
    assert all("src" not in attrs and not [a for a in attrs if a.startswith("on")] for _, attrs in shown.elements)
    policy = next(a["content"] for t, a in shown.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    links = [attrs["href"] for tag, attrs in shown.elements if tag == "a"]
    reports = [(run.directory / "report.html").relative_to(sweep.directory).as_posix() for run in sweep.runs[:4]]
    assert [urllib.parse.unquote(link) for link in links] == [
        *reports, sweep.runs[4].log.relative_to(sweep.directory).as_posix()
    ]  # fmt: skip
    one, two = results.by_arm(sweep, rows)
    for arm in (one, two):
        assert results.text(*arm.of("accuracy_after")) in shown.text
    (winner,) = re.findall(r'<tr class="best">(.*?)</tr>', text)
    assert "0.0002" in winner and "0.0001" not in winner
    head = re.findall(r"<th>(.*?)</th>", text)
    assert head[: head.index("arm")] == [
        "learner.learning_rate", "seeds", "accuracy_after", "steps", "seconds", "train/accuracy", "critic/score/mean"
    ]  # fmt: skip
    assert "</pre><script>alert(1)</script>" in shown.text and "\x1b" not in text and "first" not in shown.text
    assert "<b>sweep{{title}}" in shown.text and "a <note>" in shown.text
    assert text.count("<svg xmlns") == 2 and "2 of 3" in shown.text


def test_many_arms_have_a_picture_each(tmp_path):
    rates = [f"{i}e-4" for i in range(1, results.TOGETHER + 2)]
    sweep = sweep_of(tmp_path, {"learner.learning_rate": rates}, seeds=1)
    for run in sweep.runs:
        run.directory.mkdir(parents=True)
        finish(run.directory, 0, 1.0)
    rows = results.read_rows(sweep, dict.fromkeys((run.name for run in sweep.runs), FINISHED))
    arms = results.by_arm(sweep, rows)
    found = results.panels(arms, HELD_OUT)
    assert [(p.arm, len(p.curves), len(p.behind)) for p in found] == [(a.arm.label, 1, results.TOGETHER) for a in arms]
    assert [len(p.curves) for p in results.panels(arms[1:], HELD_OUT)] == [results.TOGETHER], "as many as go together"
    assert page.write_page(sweep, rows, [HELD_OUT]).read_text().count("<svg xmlns") == len(rates)


def test_a_page_before_any_run_has_ended(tmp_path):
    sweep = sweep_of(tmp_path)
    rows = results.read_rows(sweep, dict.fromkeys((run.name for run in sweep.runs), WAITING))
    assert "No run is finished yet." in page.write_page(sweep, rows, []).read_text()


def test_the_picture_shades_the_band_and_keeps_within_its_frame():
    points, band = [(0, 1.0), (1, 2.0), (2, 3.0)], [(0.9, 1.1), (-50.0, 50.0), (3.0, 3.0)]
    root = ElementTree.fromstring(picture([Curve("x", points, "#123456", False, band)], "x"))
    ticks = [float(e.text) for e in root.iter() if e.tag.endswith("}text") and e.get("text-anchor") == "end"]
    assert min(ticks) >= 0 and max(ticks) <= 4, "a wide band does not squash the curve"
    shape = next(e for e in root.iter() if e.get("opacity") == "0.15")
    inner = next(e for e in root if e.tag.endswith("}svg"))
    assert shape in list(inner) and len(re.findall(r"[ML]", shape.get("d"))) == 6
    assert not ElementTree.fromstring(picture([Curve("x", points, "#123456", False)], "x")).findall("{*}svg")


def test_the_figure_is_left_out_with_a_line_without_matplotlib(swept, monkeypatch, caplog):
    sweep, status = swept
    panels = results.panels(results.by_arm(sweep, results.read_rows(sweep, status)), HELD_OUT)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = pathlib.Path(sweep.directory / figure.FILE)
    with caplog.at_level(logging.INFO, "jrl"):
        assert not figure.save_figure(panels, file)
    assert caplog.messages == ["curves.png is left out: matplotlib is not installed (pip install -e '.[plot]')"]
    assert not file.exists()


def test_the_figure(swept):
    pytest.importorskip("matplotlib")
    sweep, status = swept
    arms = results.by_arm(sweep, results.read_rows(sweep, status))
    panels = [panel for metric in ("train/accuracy", HELD_OUT) for panel in results.panels(arms, metric)]
    assert figure.save_figure(panels, sweep.directory / figure.FILE)
    assert (sweep.directory / figure.FILE).read_bytes().startswith(b"\x89PNG")


def test_flags(tmp_path):
    args = [
        f"--config={TINY}",
        "--grid=steps=1,2",
        "--seeds",
        "3",
        f"--sweep_dir={tmp_path}",
        "--config.model.path",
        "random:tiny",
    ]
    settings, sweep = parse(args)
    assert (settings.seeds, settings.parallel, settings.ray, len(sweep.runs)) == (3, 1, False, 6)
    assert sweep.overrides == {"model.path": "random:tiny"}
