"""Rollout workers in processes of their own, as one engine: what one of them loses when it dies, another samples again.

`Workers` has the verbs of `jrl.rollout.engine.Engine` that generation ahead of learning uses (`load`, `submit`, `step`, `abort`),
and a thread for each worker that takes turns with it: what is new goes there, what is finished comes back. How a worker is
reached is the business of the `Remote`s that it is given (`jrl.launch.rollout` has Ray's).

A sample is one of a request: it is handed on once, whoever has finished it. A worker that dies is replaced by a new one, and
what it had not finished is submitted again; the random numbers are the samples' own, so under the same weights these are the
tokens that it would have made.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from jrl.errors import UserError
from jrl.rollout.engine import EngineStats, sum_stats
from jrl.rollout.scheduler import Request
from jrl.types import Completion

log = logging.getLogger("jrl")

WAKE_S = 0.2  # the longest that a step waits for something to finish


class WorkerLost(Exception):
    """A worker is gone, or cannot go on; the message says which one, where and why."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Samples of a request that a worker is to make."""

    ticket: int
    first: int  # the request's samples from here on
    request: Request


@dataclasses.dataclass(frozen=True)
class Turn:
    """What comes back from a worker."""

    finished: list[Completion]  # `request` is the ticket, `sample` that of the whole request
    idle: bool  # nothing is under way there
    stats: EngineStats  # since the turn before


class Remote(Protocol):
    """A worker as this process sees it; both methods are called in one thread."""

    def turn(self, weights: tuple[Any, int] | None, new: list[Piece]) -> Turn:
        """Loads weights, if there are any, takes new work, and goes on for one step of its engine.

        Raises:
          WorkerLost: no answer, whatever the reason.
        """

    def close(self) -> None: ...


@dataclasses.dataclass
class _Ask:
    """A request that has been submitted, and which of its samples have not come back."""

    request: Request
    missing: set[int]
    worker: int


class Workers:
    """
    Args:
      make: a new worker, by its number; raises WorkerLost, or UserError where there is no room for it.
      restarts: how many lost workers are replaced before the run is given up.
    """

    def __init__(self, make: Callable[[int], Remote], count: int, restarts: int = 3):
        self._make, self._left = make, restarts
        self.params: Any = None
        self.version = -1
        self.stats = EngineStats()
        self.compiled: tuple = ()  # its programs are the workers'
        self._weights: tuple[Any, int] | None = None
        self._tickets = 0
        self._asks: dict[int, _Ask] = {}
        self._new: list[list[Piece]] = [[] for _ in range(count)]
        self._finished: list[Completion] = []
        self._error: BaseException | None = None
        self._ending = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._serve, args=(i,), name=f"worker {i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    # As an engine ------------------------------------------------------------------------------------------------------------

    def load(self, params: Any, version: int, under_way: bool = True) -> None:
        """As `Engine.load`, of what the remotes hand to their workers as weights; each takes them up at its next step."""
        with self._changed:
            self.params, self.version, self._weights = params, version, (params, version)
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        return not self._asks and not self._finished

    def submit(self, requests: list[Request]) -> list[int]:
        """As `Engine.submit`; each request goes to the worker that has the fewest samples to make."""
        with self._changed:
            tickets = list(range(self._tickets, self._tickets + len(requests)))
            self._tickets += len(requests)
            for ticket, request in zip(tickets, requests, strict=True):
                load = [sum(len(a.missing) for a in self._asks.values() if a.worker == i) for i in range(len(self._new))]
                worker = load.index(min(load))
                self._asks[ticket] = _Ask(request, set(range(request.samples)), worker)
                self._new[worker].append(Piece(ticket, 0, request))
            self._changed.notify_all()
        return tickets

    def step(self) -> list[Completion]:
        """What has finished since the last call; waits a little if nothing has.

        Raises:
          WorkerLost: more of them than are replaced.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._error, timeout=WAKE_S)
            if self._error is not None:
                raise self._error
            finished, self._finished = self._finished, []
        return finished

    def abort(self) -> None:
        """Nobody waits for anything any more."""
        with self._changed:
            self._asks.clear()
            self._finished.clear()

    def reset_stats(self) -> None:
        self.stats = EngineStats()

    def close(self) -> None:
        """Ends the workers."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # A worker's thread -------------------------------------------------------------------------------------------------------

    def _serve(self, index: int) -> None:
        remote: Remote | None = None
        try:
            remote, loaded = self._make(index), -1  # who cannot be had to begin with is not waited for again
            while not self._ending:
                try:
                    if remote is None:
                        remote, loaded = self._make(index), -1
                    loaded = self._turn(index, remote, loaded)
                except (WorkerLost, UserError) as lost:
                    if remote is not None:
                        remote.close()
                    remote = None
                    self._take_back(index, lost)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            if remote is not None:
                remote.close()

    def _turn(self, index: int, remote: Remote, loaded: int) -> int:
        """One turn with a worker that has weights of the version `loaded`; the version that it has afterwards."""
        with self._changed:
            busy = lambda: any(ask.worker == index for ask in self._asks.values())  # noqa: E731
            self._changed.wait_for(lambda: self._ending or (self._weights and busy()))
            if self._ending or self._weights is None:
                return loaded
            weights = self._weights if self._weights[1] != loaded else None
            new, self._new[index] = self._new[index], []
        turn = remote.turn(weights, new)
        with self._changed:
            self.stats = sum_stats([self.stats, turn.stats])
            for completion in turn.finished:
                self._receive(completion)
            self._changed.notify_all()
        return loaded if weights is None else weights[1]

    def _receive(self, completion: Completion) -> None:
        ask = self._asks.get(completion.request)
        if ask is None or completion.sample not in ask.missing:
            return  # it was given up, or somebody else has made it
        ask.missing.discard(completion.sample)
        self._finished.append(completion)
        if not ask.missing:
            del self._asks[completion.request]

    def _take_back(self, index: int, lost: Exception) -> None:
        """What a lost worker has not finished waits for the one that takes its place."""
        with self._changed:
            self._left -= 1
            if self._left < 0:
                raise WorkerLost(f"{lost}; no more are replaced (rollout.worker_restarts)")
            asks = [(ticket, ask) for ticket, ask in self._asks.items() if ask.worker == index]
            self._new[index] = [
                Piece(ticket, sample, dataclasses.replace(ask.request, samples=1, first_id=ask.request.first_id + sample))
                for ticket, ask in asks
                for sample in sorted(ask.missing)
            ]
        count = sum(len(ask.missing) for _, ask in asks)
        log.warning("%s; a new one takes its place and samples %d responses again (%d more may be lost)", lost, count, self._left)


class Worker:
    """The other end: an engine that takes turns.

    Args:
      engine: `jrl.rollout.engine.Engine`, or anything with its verbs.
      place: makes of weights, as they came, what the engine loads.
    """

    def __init__(self, engine: Any, place: Callable[[Any], Any]):
        self._engine, self._place = engine, place
        self._pieces: dict[int, Piece] = {}  # by the engine's ticket
        self._left: dict[int, int] = {}  # samples of each that are under way

    def turn(self, weights: Any, version: int, new: list[Piece]) -> Turn:
        """See `Remote.turn`; `weights` of None leaves those that there are."""
        engine = self._engine
        if weights is not None:
            engine.load(self._place(weights), version, under_way=True)
        for piece, ticket in zip(new, engine.submit([piece.request for piece in new]), strict=True):
            self._pieces[ticket], self._left[ticket] = piece, piece.request.samples
        engine.reset_stats()
        finished = [self._named(completion) for completion in engine.step()]
        return Turn(finished, engine.idle, engine.stats)

    def _named(self, completion: Completion) -> Completion:
        piece = self._pieces[completion.request]
        self._left[completion.request] -= 1
        if not self._left[completion.request]:
            del self._pieces[completion.request], self._left[completion.request]
        return dataclasses.replace(completion, request=piece.ticket, sample=piece.first + completion.sample)
