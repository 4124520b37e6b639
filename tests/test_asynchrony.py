"""Generation beside learning: never staler than the bound, nothing lost or trained twice, and resumed with its queue."""

import copy
import itertools
import json
import signal
import threading
import time

import numpy as np
import pytest

from jrl.ahead import Ahead, from_json, to_json
from jrl.config import load
from jrl.errors import UserError
from jrl.rollout.scheduler import Request
from jrl.types import Completion
from tests.clusters import run_alone
from tests.runs import RUN, TINY, a_run, command, lines, start, trained

SETTINGS = {
    "eval__every_steps": 0, "pools__rollout": 4, "learner__mesh__fsdp": 4, "checkpoint__every_steps": 2,
    "rollout__decode_chunk": 4, "rollout__slots": 4,
}  # fmt: skip


def rows_of(folder, step=None):
    return [row for row in lines(folder / "samples.jsonl") if step in (None, row["step"])]


@pytest.mark.parametrize("staleness", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_no_token_is_staler_than_the_bound(tmp_path, staleness):
    """And every sample of the data's order is trained on once, whatever the order in which they were finished."""
    steps = 5
    trainer = a_run(tmp_path / "run", steps=steps, max_staleness=staleness, **SETTINGS)
    order = copy.deepcopy(trainer.parts.stream)
    trainer.train()
    told = trained(tmp_path / "run")
    most = [m["rollout/staleness_max"] for m in told]
    assert max(most) <= staleness and all(m["rollout/staleness_mean"] <= m["rollout/staleness_max"] for m in told)
    assert most[0] == 0 and max(most) > 0  # otherwise it was not asynchronous at all
    expected = [(step, prompt.uid) for step in range(steps) for prompt in order.next()]
    assert list(dict.fromkeys((row["step"], row["uid"]) for row in rows_of(tmp_path / "run"))) == expected
    if staleness == 1:
        return
    # Which sample has which number is as in a run in turn.
    a_run(tmp_path / "turn", steps=steps, **(SETTINGS | {"pools__rollout": 0, "learner__mesh__fsdp": 8})).train()
    ours, theirs = ([(r["step"], r["group"], r["uid"]) for r in rows_of(tmp_path / name)] for name in ("run", "turn"))
    assert ours == theirs
    first = lambda name: [r["tokens"] for r in rows_of(tmp_path / name, 0)]  # noqa: E731
    assert first("run") == first("turn")  # made by the first weights, with the same random numbers


def test_resumed_with_its_queue(tmp_path):
    """What was generated and not learned from at the checkpoint is learned from afterwards, as it was."""
    folder, settings = tmp_path / "run", SETTINGS | {"max_staleness": 2}
    trainer = a_run(folder, steps=4, **settings)
    trainer.train()
    before = {tuple(row["tokens"]) for step in (2, 3) for row in rows_of(folder, step)}
    # As if it had been killed after the checkpoint of step 2.
    later = a_run(folder, steps=4, resume=True, **settings)
    states = later.run.restore(2)
    done = later.generation._done
    assert states and 0 < len(done) <= 3 * 4 and min(done) >= 2 * 16  # of the batches after those of two steps
    kept = [tuple(x.tokens.tolist()) for first, samples in done.items() if first < 4 * 16 for x in samples.values()]
    assert kept and set(kept) <= before
    later.run.close()
    later.run.checkpoints.close()
    # And it goes on with them.
    again = a_run(folder, steps=4, resume=True, resume_step=2, **settings)
    again.train()
    after = {tuple(row["tokens"]) for step in (2, 3) for row in rows_of(folder, step)}
    assert set(kept) <= after
    uids = [row["uid"] for row in rows_of(folder)]
    assert len(uids) == 4 * 16 and all(uids.count(uid) == 4 for uid in uids)


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path):
    folder, settings = tmp_path / "run", SETTINGS | {"max_staleness": 1, "steps": 6}
    process = start(command(folder, **settings))
    while not (folder / "checkpoints" / "2").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.kill()
    process.communicate()
    run_alone(folder, 8, **settings, resume=True)
    assert [m["step"] for m in trained(folder)] == list(range(6))
    uids = [(row["step"], row["uid"]) for row in rows_of(folder)]
    assert len(uids) == 6 * 16 and len({uid for _, uid in uids}) == 6 * 4  # each prompt in one step, all its samples there
    assert max(m["rollout/staleness_max"] for m in trained(folder)) <= 1


@pytest.mark.slow
def test_dynamic_sampling_and_a_critic_beside_generation(tmp_path):
    a_run(
        tmp_path / "run", ":ppo", steps=3, max_staleness=1, algorithm__dynamic_sampling=True,
        algorithm__max_refills=2, pools__critic=1, pools__reference=1, **(SETTINGS | {"learner__mesh__fsdp": 2}),
    ).train()  # fmt: skip
    told = trained(tmp_path / "run")
    assert len(told) == 3 and max(m["rollout/staleness_max"] for m in told) <= 1
    assert all(np.isfinite(m["critic/vf_loss"]) for m in told)


@pytest.mark.slow
def test_a_signal_saves_and_leaves(tmp_path):
    folder = tmp_path / "run"
    process = start(command(folder, **(SETTINGS | {"steps": 40, "max_staleness": 1})))
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["interrupted"] == "SIGTERM"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_staleness": 1}, "give generation its own, pools.rollout=N, of the 8 devices, or 0"),
        ({"pools.rollout": 8}, "the learner needs one of each"),
        ({"pools.critic": 1}, "the run has no such model"),
        ({"max_staleness": 1, "algorithm.name": "remax", "pools.rollout": 2}, "compares with a greedy response"),
        ({"max_staleness": 1, "algorithm.replay_steps": 1, "algorithm.rollout_is_cap": 2.0}, "choose what is trained on"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, changes, told):
    from jrl.trainer import Trainer

    with pytest.raises(UserError, match=told):
        Trainer(load(TINY, RUN | {"run_dir": str(tmp_path / "run")} | changes))


# The queue by itself, on an engine of which every step is known ---------------------------------------------------------


class Slow:
    """An engine that finishes samples in an order of its own: request n takes `lengths[n % len(lengths)]` steps."""

    def __init__(self, lengths):
        self.lengths, self.under_way, self.version, self.params, self.tickets = lengths, {}, -1, None, 0
        self.started: list[tuple[int, int]] = []  # version, first_id

    @property
    def idle(self):
        return not self.under_way

    def load(self, params, version, under_way=False):
        self.params, self.version = params, version

    def submit(self, requests):
        for request in requests:
            for sample in range(request.samples):
                left = self.lengths[(request.first_id + sample) % len(self.lengths)]
                self.under_way[self.tickets, sample] = [left, request, []]
            self.started.append((self.version, request.first_id))
            self.tickets += 1
        return list(range(self.tickets - len(requests), self.tickets))

    def step(self):
        time.sleep(0.001)
        done = []
        for key, entry in list(self.under_way.items()):
            entry[0] -= 1
            entry[2].append(self.version)
            if entry[0] <= 0:
                versions = np.array(entry[2], np.int32)
                zeros = np.zeros(len(versions), np.float32)
                done.append(Completion(key[0], key[1], versions, zeros, zeros, versions, "eos"))
                del self.under_way[key]
        return done

    def abort(self):
        self.under_way.clear()

    def close(self):
        pass


def an_ahead(engine, max_staleness, per_step=2, samples=3):
    draws = ((type("Prompt", (), {"uid": str(n), "tokens": [1]})(), n * samples) for n in itertools.count())
    request = lambda group, sample, count: Request(np.ones(1, np.int32), count, 9, 1.0, group.first_id + sample)  # noqa: E731
    return Ahead(engine, draws, request, lambda *_: None, samples, per_step, max_staleness, copies=False)


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1, 1, 1, 1, 30], [7, 3, 25, 1]])
def test_the_bound_holds_whatever_the_lengths(staleness, lengths):
    """Batches in the order of starts; each group started at most `staleness` versions before it is learned from; dropped ones
    are replaced without breaking that."""
    engine = Slow(lengths)
    ahead = an_ahead(engine, staleness)
    ahead.start(batches=12)
    ahead.publish("weights", 0)
    seen, rng = [], np.random.default_rng(0)
    for step in range(12):
        batch, missing, dropped = [], 2, 0
        while missing:
            groups = ahead.take(missing, lambda: None, again=dropped)
            kept = [g for g in groups if step % 3 or rng.random() < 0.5]
            batch += kept
            missing = dropped = len(groups) - len(kept)
            seen += [int(g.prompt.uid) for g in groups]
        for group in batch:
            assert sorted(group.done) == [0, 1, 2]
            assert all(step - staleness <= v <= step for c in group.done.values() for v in c.versions)
        assert len(ahead.groups) <= (staleness + 1) * 2
        ahead.publish("weights", step + 1)
        ahead.step_done()
    ahead.stop()
    assert seen == list(range(len(seen)))  # each once, in order
    assert len(engine.started) == len(seen)  # and none for nothing


def test_a_failure_of_the_thread_is_the_learners():
    engine = Slow([1])
    engine.step = lambda: 1 / 0
    ahead = an_ahead(engine, 1)
    ahead.start(batches=2)
    ahead.publish("weights", 0)
    with pytest.raises(RuntimeError, match="rollout's thread has failed") as raised:
        ahead.take(1, lambda: None)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    ahead.stop()
    assert not [t for t in threading.enumerate() if t.name == "rollout" and t.is_alive()]


def test_the_queue_survives_json():
    engine = Slow([2, 30])
    ahead = an_ahead(engine, 3)
    ahead.start(batches=9)
    ahead.publish("weights", 0)
    while not any(g.done for g in ahead.groups):
        time.sleep(0.001)
    told = ahead.snapshot(lambda: {"more": 1})
    ahead.stop()
    assert told.pop("more") == 1 and any(0 < len(done) < 3 for done in told["ahead"].values())
    back = from_json(json.loads(json.dumps(to_json(told["ahead"]))))
    assert {first: done.keys() for first, done in back.items()} == {f: done.keys() for f, done in told["ahead"].items()}
    for first, done in told["ahead"].items():
        for sample, completion in done.items():
            for name in ("tokens", "logprobs", "sampler_logprobs", "versions", "stop_reason"):
                np.testing.assert_array_equal(getattr(back[first][sample], name), getattr(completion, name))
    # What is lacking is sampled anew, and nothing twice.
    engine = Slow([1])
    again = an_ahead(engine, 3)
    again.resume(back)
    again.start(batches=4)
    again.publish("weights", 1)
    taken = again.take(8, lambda: None)
    again.stop()
    assert [group.first_id for group in taken] == [3 * n for n in range(8)]
    for group in taken:
        old = told["ahead"].get(group.first_id, {})
        assert all(versions_of(group, sample) == ({0} if sample in old else {1}) for sample in range(3))


def versions_of(group, sample):
    return set(group.done[sample].versions.tolist())
