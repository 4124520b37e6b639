"""What operators look at: the audit file, the way back to a checkpoint, Prometheus, the log as JSON."""

import json
import logging
import shutil
import sys
import urllib.request

import pytest

from jrl.audit import Audit, surroundings
from jrl.config import load
from jrl.errors import UserError
from jrl.logs import JsonLines, configure
from jrl.prometheus import Exporter
from jrl.trainer import Trainer
from tests.clusters import free_port
from tests.runs import RUN, TINY, a_run, assert_same_runs, lines

SETTINGS = {"eval__every_steps": 0, "eval__at_start": False, "checkpoint__keep": 9}


def test_back_to_a_checkpoint_and_the_audit_of_it(tmp_path):
    folder, kept = tmp_path / "run", tmp_path / "kept"
    a_run(folder, steps=4, **SETTINGS).train()
    shutil.copytree(folder, kept)
    a_run(folder, steps=4, resume=True, resume_step=2, **SETTINGS).train()
    assert_same_runs(folder, kept, 4)
    # Nothing of what came after is lost.
    assert (folder / "metrics.jsonl.1").read_text() == (kept / "metrics.jsonl").read_text()
    assert len(lines(folder / "samples.jsonl.1")) == 4 * 16
    assert sorted(p.name for p in (folder / "checkpoints").glob("set_aside_*"))
    told = lines(folder / "audit.jsonl")
    assert [(row["event"], row["step"]) for row in told] == [
        ("started", 0), *(("checkpoint", step) for step in (1, 2, 3, 4)), ("finished", 4),
        ("resumed", 2), ("checkpoint", 3), ("checkpoint", 4), ("finished", 4),
    ]  # fmt: skip
    first, again = told[0], told[6]
    assert first["config"]["steps"] == 4 and not first["config"]["resume"] and again["config"]["resume_step"] == 2
    assert first["devices"] == {"cpu": 8} and first["packages"]["jax"] and first["processes"] == 1
    with pytest.raises(UserError, match="holds no step 7"):
        a_run(folder, steps=9, resume=True, resume_step=7, **SETTINGS).train()


def test_prometheus_shows_the_run(tmp_path):
    port, seen = free_port(), []

    def reward(prompts, completions):
        with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=10) as reply:
            seen.append(reply.read().decode())
        return [1.0] * len(completions)

    changes = {"run_dir": str(tmp_path / "run"), "steps": 2, "eval.at_start": False, "log.prometheus_port": port}
    trainer = Trainer(load(TINY, RUN | changes), reward=reward)
    trainer.train()
    rewarded = trained_value(seen[1], "jrl_critic_score_mean")
    assert rewarded == 1.0 and trained_value(seen[1], "jrl_step") == 0
    assert "jrl_critic_score_mean" not in seen[0]  # there was no step yet
    assert 'activity="reward"' in seen[1] and 'step="1"' in seen[1]
    with pytest.raises(OSError):  # it ends with the run
        urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=2)


def test_where_metrics_cannot_go_is_told_before_the_model_is_looked_at(tmp_path, monkeypatch):
    port, missing = free_port(), {"run_dir": str(tmp_path / "run"), "model.path": str(tmp_path / "no model")}
    exporter = Exporter(port)
    with pytest.raises(UserError, match=f"config.log.prometheus_port={port}: cannot be served on"):
        Trainer(load(TINY, RUN | missing | {"log.prometheus_port": port}))
    exporter.close()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="config.log.wandb=mine: needs the package wandb"):
        Trainer(load(TINY, RUN | missing | {"log.wandb": "mine"}))
    with pytest.raises(UserError, match="no model"):  # otherwise it is the model
        Trainer(load(TINY, RUN | missing | {"log.prometheus_port": port}))


def trained_value(text: str, name: str) -> float:
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name + " ")))


def test_the_log_as_json(capsys):
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure(as_json=True)
        logging.getLogger("jrl").info("step %d", 3, extra={"fields": {"critic/score/mean": 0.5}})
        try:
            raise ValueError("no\nway")
        except ValueError:
            logging.getLogger("jrl").exception("it failed")
        first, second = map(json.loads, capsys.readouterr().err.splitlines())
        assert first["message"] == "step 3" and first["critic/score/mean"] == 0.5 and first["level"] == "info"
        assert first["host"] and first["pid"] and first["time"].endswith("Z")
        assert "ValueError: no\nway" in second["traceback"] and second["level"] == "error"
        assert isinstance(root.handlers[0].formatter, JsonLines)
    finally:
        root.handlers[:], root.level = before


def test_surroundings_and_audit_are_json(tmp_path):
    audit = Audit(tmp_path)
    audit.note("started", **surroundings())
    audit.note("finished", step=1)
    first, last = lines(tmp_path / "audit.jsonl")
    assert first["jrl"] and first["python"] and first["device_ids"] == list(range(8)) and last["event"] == "finished"


def test_wandb_keeps_one_run_over_a_resume(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    from jrl.wandb_log import ID, Wandb

    log = Wandb("jrl-tests", tmp_path, {"steps": 2})
    log.update(0, {"critic/score/mean": 1.0})
    log.close()
    first = (tmp_path / ID).read_text()
    Wandb("jrl-tests", tmp_path, {"steps": 2}).close()
    assert (tmp_path / ID).read_text() == first
    assert wandb.run is None and len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
