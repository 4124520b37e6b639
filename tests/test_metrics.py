"""metrics.jsonl, TensorBoard and the console say the same, once for each step, whatever the numbers are."""

import io
import json
import math
import re
import struct
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from jrl.errors import UserError
from jrl.metrics import MetricsWriter, Timers, duration, read_metrics, response_metrics, safe_line, stats


def write(run_dir, steps, start=0, value=lambda step: float(step), tensorboard=False):
    writer = MetricsWriter(run_dir, tensorboard, 10, start, console=False)
    for step in steps:
        writer.log(step, {"critic/score/mean": value(step)})
    return writer


def lines(run_dir):
    """The file's rows by a strict reader: NaN and Infinity, which JSON does not have, are errors."""
    refuse = lambda text: pytest.fail(f"not JSON: {text}")  # noqa: E731
    return [json.loads(x, parse_constant=refuse) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events(run_dir):
    """{(tag, step): value} of all TensorBoard files, and the steps from which each of them purges."""
    scalars, purges = {}, []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # length, checksum, event, checksum
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.HasField("session_log"):
                purges.append(event.step)
            scalars |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
    return scalars, purges


# Files -----------------------------------------------------------------------------------------------------------------


def test_every_kind_of_number_is_written_exactly(tmp_path):
    writer = MetricsWriter(tmp_path, False, 1, console=False)
    numbers = {"python": 0.1, "int": 3, "numpy": np.float32(0.1), "integer": np.int64(7), "jax": jnp.float32(1.5), "bool": True}
    writer.log(0, numbers)
    row = lines(tmp_path)[0]  # before close: a killed run has its last step
    assert row == {"step": 0, "kind": "train", "python": 0.1, "int": 3, "numpy": float(np.float32(0.1)), "integer": 7,
                   "jax": 1.5, "bool": 1}  # fmt: skip
    writer.close()


def test_a_resumed_run_has_each_step_once(tmp_path):
    first = write(tmp_path, range(7))
    first.log_eval(5, {"val-core/x/acc/mean@4": 0.5})
    first.log_eval(7, {"val-core/x/acc/mean@4": 0.7})
    write(tmp_path, range(5, 9), start=5, value=lambda step: step + 100.0).close()
    train, evals = read_metrics(tmp_path)
    assert [row["step"] for row in train] == list(range(9))
    assert [row["critic/score/mean"] for row in train] == [0, 1, 2, 3, 4, 105, 106, 107, 108]
    # What was evaluated after 5 steps was evaluated before the checkpoint; the evaluation after 7 will come again.
    assert evals == [{"step": 5, "val-core/x/acc/mean@4": 0.5}]
    raw = [row["step"] for row in lines(tmp_path) if row["kind"] == "train"]
    assert len(raw) == len(set(raw))


def test_a_run_from_the_beginning_keeps_nothing(tmp_path):
    write(tmp_path, range(3)).log_eval(0, {"val": 1.0})
    write(tmp_path, range(1)).close()
    assert [row["step"] for row in lines(tmp_path)] == [0]


def test_a_line_cut_short_by_a_kill_is_dropped_on_resume(tmp_path):
    write(tmp_path, range(3)).close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert [row["step"] for row in read_metrics(tmp_path)[0]] == [0, 1]
    write(tmp_path, [2], start=2).close()
    assert [row["step"] for row in lines(tmp_path)] == [0, 1, 2]


def test_a_broken_line_elsewhere_is_named(tmp_path):
    write(tmp_path, range(3)).close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 1,', '"step": ,'))
    with pytest.raises(UserError, match="line 2"):
        write(tmp_path, [3], start=3)
    assert len(path.read_text().splitlines()) == 3, "a file that could not be read must not be replaced"


def test_of_repeated_evaluations_the_last_counts(tmp_path):
    writer = write(tmp_path, range(2))
    writer.log_eval(2, {"val": 0.1})
    writer.log_eval(2, {"val": 0.2})
    assert read_metrics(tmp_path)[1] == [{"step": 2, "val": 0.2}]


def test_not_finite_numbers_are_null_in_the_file_and_seen_on_the_console(tmp_path, capsys):
    writer = MetricsWriter(tmp_path, True, 2)
    bad = {"actor/entropy": math.nan, "actor/grad_norm": math.inf, "critic/score/mean": jnp.float32(-jnp.inf)}
    writer.log(0, {**bad, "actor/lr": 1e-6})
    writer.close()
    row = lines(tmp_path)[0]
    assert row == {"step": 0, "kind": "train", "actor/lr": 1e-6, **dict.fromkeys(bad)}
    shown = capsys.readouterr().err
    assert "entropy nan" in shown and "reward -inf" in shown
    assert "actor/grad_norm=inf" in shown, "a metric without a column is called out as well"
    assert "actor/lr" not in shown
    assert set(events(tmp_path)[0]) == {("actor/lr", 0)}


def test_tensorboard_holds_the_same_and_shows_a_resumed_step_once(tmp_path):
    first = write(tmp_path, range(4), tensorboard=True)
    first.log_eval(2, {"val": 0.25})
    first.close()
    assert events(tmp_path)[0] == {("critic/score/mean", s): float(s) for s in range(4)} | {("val", 2): 0.25}
    for path in (tmp_path / "tensorboard").iterdir():
        path.unlink()
    write(tmp_path, range(2, 5), start=2, tensorboard=True).close()
    scalars, purges = events(tmp_path)
    assert purges == [2], "TensorBoard hides what older files hold from that step on"
    assert scalars == {("critic/score/mean", s): float(s) for s in (2, 3, 4)} | {("val", 2): 0.25}


def test_tensorboard_is_optional(tmp_path):
    write(tmp_path, range(2)).close()
    assert not (tmp_path / "tensorboard").exists()


# The console -----------------------------------------------------------------------------------------------------------

STEP = {"critic/score/mean": 0.41234, "train/accuracy": 0.375, "actor/ppo_kl": 1.5e-4, "actor/entropy": 1.25,
        "response_length/mean": 12.34, "perf/throughput": 1431.4}  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr("jrl.metrics.time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


class Terminal(io.StringIO):
    def isatty(self):
        return True

    @property
    def text(self):
        """Without the colours, which are the writer's own."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())


def in_terminal(monkeypatch):
    """Called by the test itself: before it begins, pytest puts a stderr of its own in place."""
    out = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", out)
    return out


def test_without_a_terminal_a_step_is_one_plain_line_on_stderr(tmp_path, capsys, clock):
    writer = MetricsWriter(tmp_path, False, 60)
    clock.seconds = 2.0
    writer.log(11, STEP)
    out = capsys.readouterr()
    assert out.out == "", "stdout belongs to the summary"
    assert out.err == ("step 12/60 reward 0.412 accuracy 0.375 KL 1.50e-04 entropy 1.250 length 12.3 tokens/s 1,431 left 1m36s\n")


def test_a_metric_that_is_not_there_leaves_its_place_empty(tmp_path, capsys):
    MetricsWriter(tmp_path, False, 60).log(0, {"actor/kl_ref": 0.5, "actor/ppo_kl": 0.1})
    assert "reward - accuracy - KL 5.00e-01" in capsys.readouterr().err, "KL to the reference comes before ppo_kl"


def test_in_a_terminal_rows_stand_under_their_headings(tmp_path, monkeypatch):
    terminal = in_terminal(monkeypatch)
    writer = MetricsWriter(tmp_path, False, 100)
    for step in range(26):
        writer.log(step, STEP | {"actor/entropy": math.nan if step == 3 else 1.0})
    rows = [row for row in terminal.text.splitlines() if not row.startswith("not finite")]
    headings = [row for row in rows if "entropy" in row]
    assert len(headings) == 2 and len(rows) == 28, "the headings come again"
    for name, value in (("reward", "0.412"), ("accuracy", "0.375"), ("tokens/s", "1,431"), ("entropy", "1.000")):
        end = headings[0].index(name) + len(name)
        assert rows[1][:end].endswith(f" {value}")
    assert terminal.getvalue().count("\x1b[1;31m") == 2, "nan in its cell and called out below, in red"


def test_the_time_left_does_not_take_compilation_or_evaluation_for_a_usual_step(tmp_path, capsys, clock):
    writer = MetricsWriter(tmp_path, False, 100)
    for step, seconds in enumerate([300, 10, 10, 10]):
        clock.seconds += seconds
        writer.log(step, STEP)
        clock.seconds += 50
        writer.log_eval(step + 1, {"val": 0.0})
    shown = [row.split()[-1] for row in capsys.readouterr().err.splitlines() if row.startswith("step")]
    assert shown == ["8h15m", "4h13m", "16m10s", "16m00s"]  # 99 x 300, 98 x 155, 97 x 10, 96 x 10 seconds


def test_samples_cannot_command_the_terminal(tmp_path, monkeypatch):
    terminal = in_terminal(monkeypatch)
    hostile = "\x1b[2J\x1b]0;title\x07 [red]x[/red] :smile: \u2028 \u202e \ud800 \r done\nnext"
    MetricsWriter(tmp_path, False, 1).print_samples([(hostile, "fine", 1.0), ("short", "y" * 5000, 0.0)])
    text = terminal.text
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "\\x1b[2J" in text and "[red]x[/red] :smile:" in text and "\\u202e" in text and "\\ud800" in text
    assert "│ next\n" in text, "a line end stays one"
    assert "[4000 more characters]" in text and "reward 1\n" in text


def test_safe_line_leaves_ordinary_text_alone():
    assert safe_line("½ + 数 = é 🙂") == "½ + 数 = é 🙂"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (192, "3m12s"), (18240, "5h04m")])
def test_duration(seconds, text):
    assert duration(seconds) == text


# Timers and statistics -------------------------------------------------------------------------------------------------


def test_timers_add_up_until_they_are_collected(clock):
    timers = Timers()
    for seconds in (1.0, 2.5):
        with timers("gen"):
            clock.seconds += seconds
            with timers("reward"):
                clock.seconds += 0.5
    with pytest.raises(KeyError), timers("gen"):
        clock.seconds += 4
        raise KeyError
    clock.seconds += 1000
    assert timers.collect() == {"timing_s/gen": 8.5, "timing_s/reward": 1.0}
    assert timers.collect() == {}


def test_statistics():
    assert stats("a", np.array([1, 2, 6], np.int32)) == {"a/mean": 3.0, "a/max": 6.0, "a/min": 1.0}
    assert stats("a", np.array([], np.float32)) == {}
    assert response_metrics(np.array([3, 8, 8, 5]), 8) == {
        "response_length/mean": 6.0, "response_length/max": 8.0, "response_length/min": 3.0, "response_length/clip_ratio": 0.5,
    }  # fmt: skip
    assert response_metrics(np.array([], np.int32), 8) == {}
    mean = stats("a", np.full(100_000, 0.1, np.float32))["a/mean"]
    assert mean == pytest.approx(float(np.float32(0.1)), rel=1e-12), "summed in float64"
