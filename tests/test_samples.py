"""samples.jsonl has every sampled sequence once, as it was, one line each."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.samples import SampleWriter, read_samples
from jrl.types import Batch, Completion, make_rollout

HOSTILE = 'a\nb\r\n\u2028\u2029\x85\x0b\x00"\\ </script><script>alert(1)</script> \ud800 🙂 {"step": 9}'


def make_batch(texts=("one", "two", "three", "four"), first_group=0):
    """Two prompts with two samples each, of different lengths."""
    rng = np.random.default_rng(0)
    prompts = [SimpleNamespace(text=f"prompt {i}", uid=f"u{i}", tokens=np.arange(3 + i, dtype=np.int32)) for i in range(2)]
    completions = []
    for row in range(4):
        n = 2 + row
        logprobs = -rng.random(n, np.float32)
        completions.append(
            Completion(row // 2, row % 2, np.arange(10, 10 + n, dtype=np.int32), logprobs, logprobs, np.full(n, 7, np.int32),
                       "eos" if row % 2 else "length")
        )  # fmt: skip
    rollout = make_rollout([p.tokens for p in prompts], completions, first_group + np.arange(2, dtype=np.int32))
    objects, names = np.empty(4, object), np.empty(4, object)
    objects[:], names[:] = [prompts[i] for i in rollout.prompt_index], list(texts)
    rewards = np.array([1.0, 0.1, 0.0, 0.5], np.float32)
    return Batch(rollout, objects, names, rewards, np.array([True, True, True, False]), {"match": rewards * 2, "short": rewards})


def written(run_dir):
    return list(read_samples(run_dir))


def test_a_line_says_what_the_batch_says(tmp_path):
    batch = make_batch()
    advantages = np.where(batch.loss_mask, np.array([[0.1], [-0.3], [2.0], [9.0]]), 77.0).astype(np.float32)
    writer = SampleWriter(tmp_path)
    writer.write(3, batch, advantages)
    rows = written(tmp_path)  # before close: flushed
    assert [list(row) for row in rows] == 4 * [
        ["step", "uid", "group", "prompt", "completion", "prompt_tokens", "tokens", "logprobs", "reward", "reward_parts",
         "advantage", "stop_reason", "version", "valid"]
    ]  # fmt: skip
    for i, row in enumerate(rows):
        p, n = batch.rollout.prompt_lens[i], batch.rollout.lens[i]
        assert row["step"] == 3 and row["uid"] == f"u{i // 2}" and row["group"] == i // 2 and row["version"] == 7
        assert row["prompt_tokens"] == batch.rollout.tokens[i, :p].tolist()
        assert row["tokens"] == batch.rollout.tokens[i, p:n].tolist() == list(range(10, 12 + i)), "trained ids, EOS included"
        assert row["reward"] == float(batch.rewards[i])
        np.testing.assert_allclose(row["logprobs"], batch.rollout.logprobs[i, p:n], atol=5.1e-6)
        assert all(len(str(x)) <= 8 for x in row["logprobs"]), "5 digits"
    assert [row["completion"] for row in rows] == ["one", "two", "three", "four"]
    assert [row["stop_reason"] for row in rows] == ["length", "eos", "length", "eos"]
    assert [row["advantage"] for row in rows] == [0.1, -0.3, 2.0, 0.0], "over the response alone; none where the reward failed"
    assert [row["valid"] for row in rows] == [True, True, True, False]
    assert rows[0]["reward_parts"] == {"match": 2.0, "short": 1.0}
    writer.close()


def test_hostile_text_stays_on_its_line_and_comes_back_as_it_was(tmp_path):
    SampleWriter(tmp_path).write(0, make_batch(texts=[HOSTILE, "\n", "", "\u2028"]))
    content = (tmp_path / "samples.jsonl").read_text(encoding="ascii")
    assert len(content.splitlines()) == 4, "not even a reader that splits at every Unicode line end sees more"
    assert [row["completion"] for row in written(tmp_path)] == [HOSTILE, "\n", "", "\u2028"]
    naive = json.dumps({"completion": HOSTILE}, ensure_ascii=False)
    assert len(naive.splitlines()) > 1, "the control: unescaped, the text does break lines"


def test_a_resumed_run_has_each_step_once(tmp_path):
    writer = SampleWriter(tmp_path)
    for step in range(4):
        writer.write(step, make_batch(texts=[f"old {step}"] * 4))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 4, "uid": "u')  # the process was killed here
    again = SampleWriter(tmp_path, start_step=2)
    for step in range(2, 5):
        again.write(step, make_batch(texts=[f"new {step}"] * 4))
    rows = written(tmp_path)
    assert [row["step"] for row in rows] == [step for step in range(5) for _ in range(4)]
    assert [rows[4 * step]["completion"] for step in range(5)] == ["old 0", "old 1", "new 2", "new 3", "new 4"]


def test_several_batches_of_a_step_and_sequences_that_were_not_trained_on(tmp_path):
    writer = SampleWriter(tmp_path)
    writer.write(0, make_batch())
    writer.write(0, make_batch(first_group=2))
    rows = written(tmp_path)
    assert [row["group"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(row["advantage"] is None for row in rows)


def test_not_finite_numbers_are_null(tmp_path):
    batch = make_batch()
    batch.rewards[0], batch.reward_parts["match"][1] = np.nan, np.inf
    batch.rollout.logprobs[2, batch.rollout.prompt_lens[2]] = -np.inf
    SampleWriter(tmp_path).write(0, batch)
    text = (tmp_path / "samples.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    rows = written(tmp_path)
    assert rows[0]["reward"] is None and rows[1]["reward_parts"]["match"] is None and rows[2]["logprobs"][0] is None
    assert rows[2]["logprobs"][1] is not None


def test_a_broken_line_is_named(tmp_path):
    SampleWriter(tmp_path).write(0, make_batch())
    path = tmp_path / "samples.jsonl"
    content = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*content[:2], "oops\n", *content[2:]]))
    with pytest.raises(UserError, match="samples.jsonl, line 3"):
        SampleWriter(tmp_path, start_step=1)


def test_a_run_without_samples_reads_as_none(tmp_path):
    assert written(tmp_path) == []
