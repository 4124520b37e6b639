"""Generation, in turn with learning or ahead of it: `InTurn` at `max_staleness` 0, `Ahead`, in a thread, above.

Ahead of it the engine never waits for the learner to finish a step. It samples groups for the batches to come, with
whichever weights were published last, and sequences that are under way when new ones come go on with these (each token
records its version), as in AReaL (arXiv:2505.24298).

How far ahead: when v steps are learned and published, groups of the batches up to number v + max_staleness may have been
started (batches count from 0), and batches take groups in the order in which they were started. So a group of batch b was
started with the weights of step b - max_staleness or later, whatever the lengths: no token is staler than that. The queue is
bounded by the same rule, max_staleness + 1 batches at most.
"""

import copy
import dataclasses
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.data import Prompt, PromptStream
from jrl.rollout.engine import Engine
from jrl.rollout.scheduler import Request
from jrl.rollout.workers import Workers
from jrl.types import Completion, Rollout, make_rollout

WAKE_S = 1.0  # how often a wait looks whether it has been given up


@dataclasses.dataclass
class Group:
    """A prompt that was drawn for training, and which of its responses are there."""

    prompt: Prompt
    first_id: int
    done: dict[int, Completion] = dataclasses.field(default_factory=dict)  # by sample


@dataclasses.dataclass
class _Ticket:
    """What becomes of the completions of one request to the engine."""

    place: Callable[[Completion], None]
    left: int  # samples that are not there yet


class InTurn:
    """An engine that generates when it is asked and that the learner waits for."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def start(self, batches: int) -> None:
        """Called before the first step."""

    def publish(self, params: Any, version: int) -> None:
        """Weights for the next tokens; the engine borrows them until `release`."""
        self.engine.load(params, version)

    def release(self) -> None:
        """The arrays that were published may be donated from now on."""
        self.engine.load(None, -1)

    def step_done(self) -> None:
        """A batch has been learned from, and its weights are published."""

    def generate(
        self, requests: list[Request], finished: Callable[[list[Completion]], None], check: Callable[[], None]
    ) -> list[Completion]:
        """As `Engine.generate`.

        Args:
          finished: called with what each step has finished.
          check: called in between; what it raises ends the generation.
        """

        def on_step(done: list[Completion]) -> None:
            check()
            finished(done)

        return self.engine.generate(requests, on_step=on_step)

    def interrupted(self) -> None:
        """What is under way is given up."""
        self.engine.abort()

    def snapshot(self, more: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What a checkpoint needs: what `more` says, and at the same moment as "ahead" what is generated and not taken, see
        `Ahead.resume`.
        """
        return more() | {"ahead": {}}

    def stop(self) -> None:
        """Called after the last step."""


class Ahead:
    """Runs an engine in a thread from `start` to `stop`, and closes it; its methods are called from another one.

    Args:
      draws: the prompts that this engine generates for, in order, and the number of the first sample of each; begun at the start.
      request: the request for some samples of a group: (group, first sample, how many).
      finished: called in the thread with a group's prompt and each of its responses.
      group_size: samples of a prompt.
      per_step: groups of a batch.
      copies: the learner donates the arrays that it publishes, so they have to be copied.
    """

    def __init__(
        self, engine: Engine | Workers, draws: Iterator[tuple[Prompt, int]], request: Callable[[Group, int, int], Request],
        finished: Callable[[Prompt, Completion], None], group_size: int, per_step: int, max_staleness: int, copies: bool,
    ):  # fmt: skip
        self.engine, self._draws, self._request, self._finished = engine, draws, request, finished
        self._group_size, self._per_step, self._max_staleness, self._copies = group_size, per_step, max_staleness, copies
        self.groups: deque[Group] = deque()  # started and not taken, in the order of their starts
        self._allowed = self._left = 0  # groups that may be started from now on, and that will be in all
        self._tickets: dict[int, _Ticket] = {}  # by the engine's number
        self._done: dict[int, dict[int, Completion]] = {}  # of a resumed run, by the numbers of groups' first samples
        self._asked: list[tuple[list[Request], list[Completion]]] = []  # beside training, with where to put what is made
        self._fresh: tuple[Any, int] | None = None
        self._error: BaseException | None = None
        self._ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)

    # The learner's side ----------------------------------------------------------------------------------------------------

    def resume(self, done: dict[int, dict[int, Completion]]) -> None:
        """Before the start: what a former process has generated and nobody has taken; only what is lacking is sampled.

        Args:
          done: by the number of a group's first sample, its completions by sample.
        """
        self._done = done

    def start(self, batches: int) -> None:
        """
        Args:
          batches: how many will be taken; no group is started beyond them.
        """
        self._left = batches * self._per_step
        self._allowed = (self._max_staleness + 1) * self._per_step
        self._thread.start()

    def publish(self, params: Any, version: int) -> None:
        """Weights for the next tokens."""
        params = jax.tree.map(jnp.copy, params) if self._copies else params
        with self._changed:
            self._fresh = params, version
            self._changed.notify_all()

    def release(self) -> None:
        """The engine has its own arrays."""

    def step_done(self) -> None:
        """A batch has been learned from, and its weights are published: one more may be started."""
        with self._changed:
            self._allowed += self._per_step
            self._changed.notify_all()

    def take(self, count: int, check: Callable[[], None], again: int = 0) -> list[Group]:
        """The next groups, in the order of their starts, complete; waits for them.

        Args:
          check: called while it waits; what it raises ends the waiting.
          again: of the groups taken for this batch, those that were dropped since the last call, in whose place others may be
            started.
        """
        with self._changed:
            self._allowed += again
            self._left += again
            self._changed.notify_all()
            self._wait(lambda: len(self.groups) >= count and all(self._complete(self.groups[i]) for i in range(count)), check)
            return [self.groups.popleft() for _ in range(count)]

    def generate(
        self, requests: list[Request], finished: Callable[[list[Completion]], None], check: Callable[[], None]
    ) -> list[Completion]:
        """As `InTurn.generate`, beside what is under way; `finished` is called at the end."""
        made: list[Completion] = []
        with self._changed:
            self._asked.append((requests, made))
            self._changed.notify_all()
            self._wait(lambda: len(made) == sum(r.samples for r in requests), check)
        finished(made)
        return made

    def interrupted(self) -> None:
        """What is under way goes on until the end."""

    def snapshot(self, more: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """As of `InTurn`."""
        with self._changed:
            return more() | {"ahead": {group.first_id: dict(group.done) for group in self.groups if group.done}}

    @property
    def ready(self) -> int:
        """Groups that are complete and not taken."""
        with self._changed:
            return sum(self._complete(group) for group in self.groups)

    def stop(self) -> None:
        """Ends the thread; what is under way is given up."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        self.engine.close()

    def _wait(self, there: Callable[[], bool], check: Callable[[], None]) -> None:
        while not there():
            if self._error is not None:
                raise RuntimeError("the rollout's thread has failed") from self._error
            check()
            self._changed.wait(WAKE_S)

    def _complete(self, group: Group) -> bool:
        return len(group.done) == self._group_size

    # The thread ------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self.engine.abort()

    def _turn(self) -> bool:
        """One step of the engine, with what has come in the meantime; False at the end."""
        engine = self.engine
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._ending:
                return False
            fresh, self._fresh = self._fresh, None
            if fresh:
                engine.load(*fresh, under_way=True)
            self._submit()
        finished = engine.step()
        with self._changed:
            for completion in finished:
                self._place(completion)
            self._changed.notify_all()
        return True

    def _has_work(self) -> bool:
        if self._ending or self._fresh:
            return True
        served = self.engine.params is not None
        return served and (not self.engine.idle or min(self._allowed, self._left) > 0 or bool(self._asked))

    def _submit(self) -> None:
        """Starts what may be started."""
        while min(self._allowed, self._left) > 0:
            group = Group(*next(self._draws))
            self.groups.append(group)
            group.done = self._done.pop(group.first_id, {})
            if group.done:
                for sample in sorted(set(range(self._group_size)) - group.done.keys()):
                    self._start(group, sample, 1)
            else:
                self._start(group, 0, self._group_size)
            self._allowed, self._left = self._allowed - 1, self._left - 1
        for requests, made in self._asked:
            for position, request in enumerate(requests):
                self._send(request, functools.partial(_append, made, position))
        self._asked = []

    def _start(self, group: Group, first: int, count: int) -> None:
        """Asks for some of a group's samples."""

        def place(completion: Completion) -> None:
            sample = first + completion.sample
            group.done[sample] = dataclasses.replace(completion, sample=sample)
            self._finished(group.prompt, completion)

        self._send(self._request(group, first, count), place)

    def _send(self, request: Request, place: Callable[[Completion], None]) -> None:
        [ticket] = self.engine.submit([request])
        self._tickets[ticket] = _Ticket(place, request.samples)

    def _place(self, completion: Completion) -> None:
        ticket = self._tickets[completion.request]
        ticket.place(completion)
        ticket.left -= 1
        if not ticket.left:
            del self._tickets[completion.request]


def _append(made: list[Completion], position: int, completion: Completion) -> None:
    made.append(dataclasses.replace(completion, request=position))


def draws(
    stream: PromptStream[Prompt], samples: Callable[[], int], group_size: int, per_step: int, mine: Container[int]
) -> Iterator[tuple[Prompt, int]]:
    """The prompts of the batches to come, and the number of the first sample of each.

    Args:
      stream, samples: where the run is when the first one is drawn; they follow with what is taken.
      mine: which of the `per_step` prompts of a batch are drawn, the others being other processes'.
    """
    ahead, first = copy.deepcopy(stream), samples()
    for number in itertools.count():
        [prompt] = ahead.next(1)
        if number % per_step in mine:
            yield prompt, first + number * group_size


def rollout_of(groups: Sequence[Group], first: int) -> tuple[Rollout, np.ndarray]:
    """The responses of complete groups, called `first`, `first` + 1, ..., and their numbers in the run i64[N]."""
    made = [dataclasses.replace(x, request=i) for i, group in enumerate(groups) for x in group.done.values()]
    prompts = [np.asarray(group.prompt.tokens, np.int32) for group in groups]
    ids = np.concatenate([group.first_id + np.arange(len(group.done)) for group in groups])
    return make_rollout(prompts, made, first + np.arange(len(groups), dtype=np.int32)), ids


def staleness(rollout: Rollout, published: Sequence[int]) -> dict[str, float]:
    """By how many published versions the weights that chose the tokens are behind the last ones, which learn from them."""
    behind = len(published) - np.searchsorted(published, rollout.versions[rollout.loss_mask], side="right")
    return {"staleness_mean": float(behind.mean()), "staleness_max": float(behind.max())}


# In a checkpoint -------------------------------------------------------------------------------------------------------

_ARRAYS = {"tokens": np.int32, "logprobs": np.float32, "sampler_logprobs": np.float32, "versions": np.int32}


def to_json(done: dict[int, dict[int, Completion]]) -> list[dict[str, Any]]:
    """A snapshot's "ahead"; float32 and the shortest decimal number that reads back as it are the same."""
    return [
        {"first_id": first, "sample": sample, "stop_reason": c.stop_reason}
        | {name: getattr(c, name).tolist() for name in _ARRAYS}
        for first, samples in done.items()
        for sample, c in samples.items()
    ]


def from_json(rows: Iterable[dict[str, Any]]) -> dict[int, dict[int, Completion]]:
    """What `to_json` made."""
    done: dict[int, dict[int, Completion]] = {}
    for row in rows:
        arrays: dict[str, Any] = {name: np.array(row[name], dtype) for name, dtype in _ARRAYS.items()}
        completion = Completion(request=0, sample=row["sample"], stop_reason=row["stop_reason"], **arrays)
        done.setdefault(row["first_id"], {})[row["sample"]] = completion
    return done
