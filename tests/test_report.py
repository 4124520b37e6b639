"""The report holds the run's numbers and texts, all of them where they fit, and nothing in them can act on the page."""

import html.parser
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from jrl import jsonl, report
from jrl.errors import UserError
from jrl.metrics import MetricsWriter, read_metrics
from jrl.report import charts, curve_svg, main, write_report

HOSTILE = (
    '</script><script>alert("x")</script><img src=x onerror=alert(1)>&lt;!--'
    "\u2028\u2029{{data}}{{title}}\ud800 https://example.org"
)
HELD_OUT = "val-core/gym:sum/acc/mean@4"


class Page(html.parser.HTMLParser):
    """What a browser makes of the page: elements with their attributes, and the contents of script and style."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.text, self._script = [], [], "", False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        else:
            self.text += data

    @property
    def data(self):
        return json.loads(self.scripts[0])


def sample(step, group=0, completion="4", prompt="2+2=", tokens=3, **changes):
    row = {
        "step": step, "uid": "u", "group": group, "prompt": prompt, "completion": completion, "prompt_tokens": [1, 2],
        "tokens": list(range(tokens)), "logprobs": [-0.12345] * tokens, "reward": 1.0, "reward_parts": {"match": 1.0},
        "advantage": 0.5, "stop_reason": "eos", "version": step, "valid": True,
    }  # fmt: skip
    return row | changes


def make_run(run_dir, steps=6, samples=(), config=None, result=None):
    rng = np.random.default_rng(0)
    writer = MetricsWriter(run_dir, False, steps, console=False)
    for step in range(steps):
        metrics = {"critic/score/mean": rng.random(), "train/accuracy": rng.random() / 3, "timing_s/step": 2.0}
        if step == 2:
            metrics["actor/grad_norm"] = math.nan
        elif step > 2:
            metrics["actor/grad_norm"] = rng.random() * 1e-7
        writer.log(step, metrics)
    writer.log_eval(0, {HELD_OUT: 0.125})
    writer.log_eval(steps, {HELD_OUT: 0.5})
    writer.close()
    jsonl.Appender(run_dir / "samples.jsonl", lambda row: False).write(samples)
    for name, value in (("config", config), ("result", result)):
        if value is not None:
            (run_dir / f"{name}.json").write_text(json.dumps(value))
    return run_dir


def page_of(run_dir):
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


def test_the_embedded_data_are_the_numbers_of_metrics_jsonl(tmp_path):
    data = page_of(make_run(tmp_path)).data
    for kind, rows in zip(("train", "eval"), read_metrics(tmp_path), strict=True):
        table = data["metrics"][kind]
        assert table["steps"] == [row["step"] for row in rows]
        assert set(table["series"]) == {key for row in rows for key in row} - {"step"}
        for key, values in table["series"].items():
            assert values == [row.get(key) for row in rows], "exactly, to the last bit"
    # Missing before step 2, not finite at it.
    assert data["metrics"]["train"]["series"]["actor/grad_norm"][:3] == [None] * 3
    assert data["metrics"]["train"]["nonfinite"] == {"actor/grad_norm": [2]}


def test_every_metric_is_in_exactly_one_chart(tmp_path):
    run = page_of(make_run(tmp_path)).data
    lines = [(line["kind"], line["key"]) for chart in run["charts"] for line in chart["lines"]]
    assert sorted(lines) == sorted((kind, key) for kind in ("train", "eval") for key in run["metrics"][kind]["series"])
    together = next(chart for chart in run["charts"] if chart["title"] == "Accuracy")
    assert [(line["key"], line["label"]) for line in together["lines"]] == [
        ("train/accuracy", "training samples"), (HELD_OUT, "held out mean@4"),
    ]  # fmt: skip
    unknown = charts(["made/up", "plain", "response_length/mean", "response_length/max"], ["val-core/a/x/m", "val-core/b/x/m"])
    assert [(c["group"], c["title"]) for c in unknown if c["group"] == "Other"] == [("Other", "made/up"), ("Other", "plain")]
    assert [line["label"] for c in unknown for line in c["lines"]][:4] == ["held out a m", "held out b m", "mean", "max"]


def test_the_page_needs_nothing_from_outside(tmp_path):
    page = page_of(make_run(tmp_path, samples=[sample(0)]))
    loading = {"link", "img", "iframe", "object", "embed", "base", "source", "video", "audio"}
    assert not loading & {tag for tag, _ in page.elements}
    for tag, attrs in page.elements:
        assert "src" not in attrs, f"{tag} loads something"
        assert attrs.get("href", "#").startswith("#")
        assert not [name for name in attrs if name.startswith("on")], "no code in attributes"
    text = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bfetch\(|XMLHttpRequest|import\(", text)
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    unsafe = r"\.(innerHTML|outerHTML)|insertAdjacentHTML|document\.write|\beval\("
    assert not re.search(unsafe, page.scripts[1]), "text is set as text"


def test_hostile_text_stays_text(tmp_path):
    run_dir = tmp_path / "<b>run{{data}}"
    run_dir.mkdir()
    clean = page_of(make_run(tmp_path / "clean", samples=[sample(0)]))
    rows = [sample(0, completion=HOSTILE, prompt=HOSTILE, uid=HOSTILE, stop_reason=HOSTILE, reward_parts={HOSTILE: 1.0})]
    make_run(run_dir, samples=rows, config={"model.path": HOSTILE, HOSTILE: 1}, result={"task": HOSTILE, HOSTILE: HOSTILE})
    page = page_of(run_dir)
    assert page.elements == clean.elements, "not one element or attribute more than in a harmless run"
    assert page.scripts[1] == clean.scripts[1]
    assert not set("<>&\u2028\u2029") & set(page.scripts[0]), "not even what only some parsers trip over, as <!--<script"
    data = page.data
    row = data["samples"]["steps"][0]["rows"][0]
    assert data["samples"]["prompts"] == [HOSTILE] and data["samples"]["parts"] == [HOSTILE] and row.count(HOSTILE) == 3
    assert data["result"]["task"] == HOSTILE and data["run"] == "<b>run{{data}}"
    naive = f'<script type="application/json">{json.dumps(HOSTILE)}</script>'
    assert len(Page(naive).elements) > 1, "the control: unescaped, the text does become markup"


def test_samples_are_grouped_by_step_and_prompts_stored_once(tmp_path):
    rows = [sample(step, group, f"{step} {group} {i}") for step in range(3) for group in range(2) for i in range(2)]
    run = page_of(make_run(tmp_path, samples=rows)).data
    assert run["samples"]["prompts"] == ["2+2="] and run["notes"] == []
    assert [(s["step"], s["total"], len(s["rows"])) for s in run["samples"]["steps"]] == [(s, 4, 4) for s in range(3)]
    assert run["samples"]["steps"][2]["rows"][3] == [
        0, 3, [1.0], 1, "2 1 1", 1.0, 0.5, "eos", 2, True, "u", [0, 1, 2], [-0.12] * 3,
    ]  # fmt: skip


def test_the_script_names_the_places_of_a_sample_as_they_are_written():
    names = re.search(r"s\.rows\.map\(\(\[(.*?)\]\)", report._TEMPLATE.read_text())[1].split(", ")
    shorter = {"stop_reason": "stop", "completion": "text"}
    itself = {key: shorter.get(key, key) for key in sample(0)} | {"reward_parts": {"match": "parts"}, "tokens": ()}
    row = report._row(itself, ["match"], "prompt")
    assert row[:3] == ["prompt", 0, ["parts"]]
    assert names == ["prompt", "length", "parts", *row[3:], "ids", "logprobs"]


@pytest.mark.parametrize(
    ("budget", "with_tokens", "all_samples", "whole_texts"),
    [(10**7, True, True, True), (250_000, False, True, True), (40_000, False, False, True), (4_000, False, False, False)],
)
def test_many_samples_stay_within_the_budget_and_every_step_is_there(
    tmp_path, monkeypatch, budget, with_tokens, all_samples, whole_texts
):
    monkeypatch.setattr(report, "SAMPLE_BYTES", budget)
    rows = [
        sample(step, i, f"<{step} {i}>" + "x" * 600, f"<prompt {step} {i % 4}>", tokens=100)
        for step in range(10) for i in range(20)
    ]  # fmt: skip
    run = page_of(make_run(tmp_path, samples=rows)).data
    steps, notes = run["samples"]["steps"], " ".join(run["notes"])
    assert [s["step"] for s in steps] == list(range(10)) and all(s["rows"] and s["total"] == 20 for s in steps)
    shown = [row for s in steps for row in s["rows"]]
    assert all(len(row) == (13 if with_tokens else 11) for row in shown)
    assert (len(shown) == 200) == all_samples
    assert ("log-probabilities are left out" not in notes) == with_tokens
    assert (f"{len(shown)} of 200 samples" not in notes) == all_samples
    assert all(row[4].endswith("x" * 600) for row in shown) == whole_texts
    assert ("cut" not in notes) == whole_texts
    if whole_texts:  # else every step keeps one sample with 200 characters, whatever the budget
        assert len(report._embed(run["samples"])) < 1.05 * budget + 1000


def test_many_steps_are_thinned_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "METRIC_VALUES", 50)
    run = page_of(make_run(tmp_path, steps=43)).data
    assert run["metrics"]["train"]["steps"] == [*range(0, 43, 4), 42], "evenly, and the last"
    assert "every 4th of 43 steps" in run["notes"][0]


def test_the_config_is_shown_with_defaults_and_meanings_flat_or_nested(tmp_path):
    flat = page_of(make_run(tmp_path / "a", config={"steps": 7, "data.options": {"min_terms": 2}})).data["config"]
    nested = page_of(make_run(tmp_path / "b", config={"steps": 7, "data": {"options": {"min_terms": 2}}})).data["config"]
    assert flat == nested
    assert [(row["key"], row["value"]) for row in flat] == [("steps", 7), ("data.options", {"min_terms": 2})]
    assert all(row["doc"] for row in flat) and "default" in flat[0]


def test_a_run_that_has_only_just_begun(tmp_path):
    MetricsWriter(tmp_path, False, 5, console=False).close()
    run = page_of(tmp_path).data
    assert run["charts"] == [] and run["result"] is None and run["config"] == [] and run["samples"]["steps"] == []


def test_the_command_line(tmp_path, capsys):
    make_run(tmp_path)
    assert main([str(tmp_path)]) == 0 and (tmp_path / "report.html").exists()
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert main([str(tmp_path / "nowhere")]) == 2 and "metrics.jsonl" in capsys.readouterr().err
    assert main([]) == 2 and "usage" in capsys.readouterr().err
    (tmp_path / "result.json").write_text("{")
    assert main([str(tmp_path)]) == 2 and "result.json" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript engine here")
def test_the_script_parses(tmp_path):
    script = tmp_path / "page.js"
    script.write_text(page_of(make_run(tmp_path)).scripts[1])
    subprocess.run(["node", "--check", script], check=True, timeout=60)


# The standalone picture ------------------------------------------------------------------------------------------------


def test_the_picture_shows_the_points(tmp_path):
    make_run(tmp_path)
    title = "A <b>title</b> & more"
    root = ElementTree.fromstring(curve_svg(tmp_path, {"train/accuracy": "<training>", HELD_OUT: "held out"}, title))
    tag = lambda name: [e for e in root.iter() if e.tag == f"{{http://www.w3.org/2000/svg}}{name}"]  # noqa: E731
    texts = [e.text for e in tag("text")]
    assert texts[0] == title and "<training>" in texts and "held out" in texts
    dots = [(float(e.get("cx")), float(e.get("cy"))) for e in tag("circle")]
    raw, smooth, _ = ([tuple(map(float, p.split())) for p in e.get("d")[1:].split("L")] for e in tag("path"))
    assert len(raw) == len(smooth) == 6 and len(dots) == 2
    # Two ticks give the scale, by which every point must lie where its number says.
    ticks = {e.text: float(e.get("y")) - 4 for e in tag("text") if e.get("text-anchor") == "end"}
    (v0, y0), (v1, y1) = ((float(text), ticks[text]) for text in ("0", "0.5"))
    accuracy = [row["train/accuracy"] for row in read_metrics(tmp_path)[0]]
    at = lambda y: v0 + (y - y0) / (y1 - y0) * (v1 - v0)  # noqa: E731
    np.testing.assert_allclose([at(y) for _, y in raw], accuracy, atol=2e-3)
    np.testing.assert_allclose([at(y) for _, y in dots], [0.125, 0.5], atol=2e-3)
    assert raw[0] == smooth[0] and dots[0][0] == raw[0][0] and dots[1][0] > raw[-1][0]
    expected = (0.8 * accuracy[0] + accuracy[1]) / 1.8
    assert at(smooth[1][1]) == pytest.approx(expected, abs=2e-3)


def test_the_picture_of_a_metric_that_is_not_there(tmp_path):
    make_run(tmp_path)
    with pytest.raises(UserError, match="critic/typo.*train/accuracy"):
        curve_svg(tmp_path, ["critic/typo"], "")


@pytest.mark.parametrize("values", [[0.5], [0.0, 0.0], [1e-9, 2e-9], [-5.0, 5e6]])
def test_the_picture_of_odd_ranges_is_well_formed(tmp_path, values):
    writer = MetricsWriter(tmp_path, False, 5, console=False)
    for step, value in enumerate(values):
        writer.log(step, {"x": value})
    text = curve_svg(tmp_path, ["x"], "x")
    ElementTree.fromstring(text)
    assert "nan" not in text and "inf" not in text
