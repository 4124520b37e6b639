"""Workers as one engine: every sample comes back once, whoever dies; the real ones on Ray as slow tests."""

import collections
import os
import signal
import threading
import time

import numpy as np
import pytest

from jrl.build import check_asynchrony
from jrl.config import load
from jrl.errors import UserError
from jrl.rollout.engine import EngineStats
from jrl.rollout.scheduler import Request
from jrl.rollout.workers import Worker, WorkerLost, Workers
from jrl.types import Completion
from tests.clusters import run_together
from tests.runs import RUN, TINY, a_run, lines, trained


class Counting:
    """An engine whose sample n takes 1 + n % 5 steps and is the tokens [n, version]."""

    def __init__(self):
        self.under_way, self.version, self.tickets, self.stats = {}, -1, 0, EngineStats()

    @property
    def idle(self):
        return not self.under_way

    def load(self, params, version, under_way):
        assert params == f"weights {version}"
        self.version = version

    def submit(self, requests):
        for request in requests:
            for sample in range(request.samples):
                self.under_way[self.tickets, sample] = [1 + (request.first_id + sample) % 5, request.first_id + sample]
            self.tickets += 1
        return list(range(self.tickets - len(requests), self.tickets))

    def reset_stats(self):
        self.stats = EngineStats()

    def step(self):
        done = []
        for (ticket, sample), entry in list(self.under_way.items()):
            entry[0] -= 1
            if not entry[0]:
                tokens = np.array([entry[1], self.version], np.int32)
                done.append(Completion(ticket, sample, tokens, tokens * 0.0, tokens * 0.0, tokens, "eos"))
                self.stats.decode_tokens += 2
                del self.under_way[ticket, sample]
        return done


class Mortal:
    """A remote in this process, which dies at a turn of its own choice: before the turn, or after it with its answer."""

    def __init__(self, number, dies_at=10**9, with_answer=False):
        self.worker, self.number, self.dies_at, self.with_answer = Worker(Counting(), lambda w: w), number, dies_at, with_answer
        self.turns, self.closed = 0, False

    def turn(self, weights, new):
        self.turns += 1
        if self.turns == self.dies_at and not self.with_answer:
            raise WorkerLost(f"worker {self.number}: gone")
        turn = self.worker.turn(*(weights or (None, -1)), new)
        if self.turns == self.dies_at:
            raise WorkerLost(f"worker {self.number}: gone")
        return turn

    def close(self):
        self.closed = True


def requests(count, samples=4):
    return [Request(np.ones(2, np.int32), samples, 9, 1.0, first_id=100 * i) for i in range(count)]


def all_of(workers, tickets, samples=4):
    """What comes back, by (request, sample)."""
    found, names = {}, {ticket: i for i, ticket in enumerate(tickets)}
    end = time.monotonic() + 20
    while not workers.idle:
        assert time.monotonic() < end
        for completion in workers.step():
            key = names[completion.request], completion.sample
            assert key not in found, "twice"
            found[key] = completion.tokens.tolist()
    assert found.keys() == {(i, s) for i in range(len(tickets)) for s in range(samples)}
    return found


@pytest.mark.parametrize("with_answer", [False, True])
@pytest.mark.parametrize("dies_at", [10**9, 1, 2, 4])
def test_every_sample_comes_back_once(dies_at, with_answer):
    made = []

    def make(number):
        # Of each number the first one dies.
        first = number not in [m.number for m in made]
        made.append(Mortal(number, dies_at if first else 10**9, with_answer))
        return made[-1]

    workers = Workers(make, 3, restarts=3)
    workers.load("weights 7", 7)
    found = all_of(workers, workers.submit(requests(10)))
    assert all(tokens == [100 * i + s, 7] for (i, s), tokens in found.items())
    workers.load("weights 8", 8)
    found = all_of(workers, workers.submit(requests(2)))
    assert all(tokens == [100 * i + s, 8] for (i, s), tokens in found.items())
    workers.close()
    lost = [m for m in made if m.turns >= dies_at and m.dies_at == dies_at]
    assert len(made) == 3 + len(lost) and all(m.closed for m in made)
    assert bool(lost) == (dies_at < 10**9)
    if not lost:  # the work is shared, and counted
        assert min(m.worker._engine.tickets for m in made) >= 3
        assert workers.stats.decode_tokens == 2 * (40 + 8)
    assert not [t for t in threading.enumerate() if t.name.startswith("worker ")]


def test_too_many_that_are_lost_end_it():
    workers = Workers(lambda number: Mortal(number, dies_at=1), 2, restarts=3)
    workers.load("weights 1", 1)
    workers.submit(requests(2))
    with pytest.raises(WorkerLost, match=r"worker .: gone; no more are replaced \(rollout.worker_restarts\)"):
        while True:
            workers.step()
    workers.close()


@pytest.mark.parametrize(
    ("refused", "told"), [(["1.1"], None), (["0.0"], "worker 0: no room"), (["1.1", "1.2"], "no more are replaced")]
)
def test_one_that_cannot_be_made(refused, told):
    """The first one ends it; one that takes another's place may be asked for again."""
    asked = collections.Counter()

    def make(number):
        asked[number] += 1
        name = f"{number}.{asked[number] - 1}"
        if name in refused:  # as its host dies, and as the cluster is full
            raise (WorkerLost if name == "1.2" else UserError)(f"worker {number}: no room")
        return Mortal(number, dies_at=1 if name == "1.0" else 10**9)

    workers = Workers(make, 2, restarts=2)
    workers.load("weights 1", 1)
    tickets = workers.submit(requests(4))
    if told:
        with pytest.raises((WorkerLost, UserError), match=told):
            while True:
                workers.step()
    else:
        assert len(all_of(workers, tickets)) == 16 and asked == {0: 1, 1: 3}
    workers.close()


def test_what_is_aborted_comes_back_to_nobody():
    workers = Workers(lambda number: Mortal(number), 2)
    workers.load("weights 1", 1)
    workers.submit(requests(6))
    workers.abort()
    assert workers.idle and workers.step() == []
    again = all_of(workers, workers.submit(requests(1)))
    assert len(again) == 4
    workers.close()


def test_several_processes_need_a_cluster_and_as_many_workers_each(tmp_path, monkeypatch):
    delivery = pytest.importorskip("jrl.launch.delivery")
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match="must share a Ray cluster: start one .* RAY_ADDRESS=HOST:6379"):
        delivery.connect(2)
    config = load(TINY, RUN | {"run_dir": str(tmp_path), "max_staleness": 1, "rollout.workers": 3})
    with pytest.raises(UserError, match=r"config.rollout.workers=3: .* give a multiple of 2, or 0"):
        check_asynchrony(config, {})


# On Ray ------------------------------------------------------------------------------------------------------------------

SETTINGS = {"eval__at_start": False, "eval__every_steps": 0, "steps": 5, "max_staleness": 1, "learner__mesh__fsdp": 8}


@pytest.mark.slow
def test_a_killed_worker_costs_nothing(tmp_path):
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=4, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    try:
        trainer = a_run(tmp_path / "run", rollout__workers=2, rollout__worker_cpus=1, **SETTINGS)
        engine = trainer.parts.engine
        killed = []

        def kill_one():
            while len([f for f in [tmp_path / "run" / "metrics.jsonl"] if f.exists() and f.read_text().count("train") >= 2]) < 1:
                time.sleep(0.05)
            pids = [int(p) for p in os.popen("pgrep -f ray::EngineActor").read().split()]
            os.kill(pids[0], signal.SIGKILL)
            killed.append(pids[0])

        thread = threading.Thread(target=kill_one, daemon=True)
        thread.start()
        trainer.train()
        assert killed and engine._left == 2  # one of three restarts was needed
        rows = lines(tmp_path / "run" / "samples.jsonl")
        uids = collections.Counter(row["uid"] for row in rows)
        assert len(rows) == 5 * 16 and set(uids.values()) == {4}  # each prompt in one step, with all its samples
        assert max(m["rollout/staleness_max"] for m in trained(tmp_path / "run")) <= 1
        # The first batch is what this process would have sampled.
        a_run(tmp_path / "turn", **(SETTINGS | {"max_staleness": 0, "steps": 1})).train()
        first = [row["tokens"] for row in rows if row["step"] == 0]
        assert first == [row["tokens"] for row in lines(tmp_path / "turn" / "samples.jsonl")]
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_workers_of_several_learner_processes(tmp_path, monkeypatch):
    """Weights are split over the devices of two processes, and each of two workers serves one of them."""
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=4, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    try:
        monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        run_together(tmp_path / "run", 2, 4, rollout__workers=2, algorithm__rollout_is_cap=2.0, **SETTINGS)
    finally:
        ray.shutdown()
    rows, told = lines(tmp_path / "run" / "samples.jsonl"), trained(tmp_path / "run")
    uids = collections.Counter(row["uid"] for row in rows)
    assert len(told) == 5 and len(rows) == 5 * 16 and set(uids.values()) == {4}
    most = [m["rollout/staleness_max"] for m in told]
    assert most[0] == 0 and max(most) == 1
    # The first batch is what one process would have sampled and learned, and later tokens are of weights that have arrived.
    a_run(tmp_path / "turn", **(SETTINGS | {"max_staleness": 0, "steps": 1})).train()
    assert [r["tokens"] for r in rows if r["step"] == 0] == [r["tokens"] for r in lines(tmp_path / "turn" / "samples.jsonl")]
    (alone,) = trained(tmp_path / "turn")
    assert told[0]["actor/pg_loss"] == pytest.approx(alone["actor/pg_loss"], abs=1e-6)
    assert told[0]["actor/grad_norm"] == pytest.approx(alone["actor/grad_norm"], rel=1e-4)
    later = [m["rollout_corr/logprob_abs_diff"] for m in told[1:] if "rollout_corr/logprob_abs_diff" in m]
    assert later and max(later) < 1e-4  # as the learner knows them: an Adam step between would be a hundred times that
