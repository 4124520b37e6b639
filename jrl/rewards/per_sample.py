"""Rewards of single samples: scored side by side, from the moment that each sample is there, so before others are."""

import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jrl.rewards.runners import Columns, Failures, Outcome, all_failed
from jrl.rewards.worker import RewardFailure


class Scorer(Protocol):
    """A `Runner` that may have to be started first, which takes time."""

    def start(self) -> None: ...

    def run(self, prompts: Sequence[str], completions: Sequence[str], columns: Columns, timeout_s: float) -> Outcome: ...

    def misfit(self, columns: Collection[str]) -> str: ...


class Ticket:
    """One sample on its way, and in the end its reward, or why there is none."""

    def __init__(self, prompt: str, completion: str, row: Mapping[str, Any], timeout_s: float):
        self.prompt, self.completion, self.row, self.timeout_s = prompt, completion, row, timeout_s
        self.reward = math.nan
        self.failure: Failures | None = None
        self.done = threading.Event()
        self.awaited_from = self.deadline = math.inf  # once somebody waits for it


class PerSample:
    """A runner that spreads samples over several scorers; what they give depends on no order.

    Args:
      scorers: like ones, each used by one thread at a time.
      at_once: samples of one call of a scorer, at most.
      share: of the deadline, what one call may take; so that with 1/4 a sample that hangs costs others little.
    """

    def __init__(self, scorers: Sequence[Scorer], at_once: int = 1, share: float = 1.0):
        self._first, self._at_once, self._share = scorers[0], at_once, share
        self._free = list(reversed(scorers))  # the one used last is taken first: it has been started
        self._lock = threading.Lock()
        self._queue: deque[Ticket] = deque()
        self._early: dict[bytes, list[Ticket]] = {}

    def submit(self, prompt: str, completion: str, row: Mapping[str, Any], timeout_s: float) -> None:
        """Starts to score a sample that a later `run` will ask for. `row` has its columns."""
        ticket = Ticket(prompt, completion, _without_none(row), timeout_s)
        if key := _key(ticket):
            with self._lock:
                self._early.setdefault(key, []).append(ticket)
                self._enqueue([ticket])

    def run(self, prompts: Sequence[str], completions: Sequence[str], columns: Columns, timeout_s: float) -> Outcome:
        """Waits for the samples submitted before, and for those scored only now; the deadline starts here."""
        rows = [_without_none({name: values[i] for name, values in columns.items()}) for i in range(len(completions))]
        tickets = [Ticket(*sample, timeout_s) for sample in zip(prompts, completions, rows, strict=True)]
        with self._lock:
            early = [self._submitted(ticket) for ticket in tickets]
            self._enqueue([ticket for ticket, found in zip(tickets, early, strict=True) if found is None])
            tickets = [found or ticket for found, ticket in zip(early, tickets, strict=True)]
            now = time.monotonic()
            for ticket in tickets:
                ticket.awaited_from, ticket.deadline = now, now + timeout_s
            self._queue = deque(sorted(self._queue, key=lambda ticket: ticket.deadline))  # what nobody waits for can wait
        for ticket in tickets:
            ticket.done.wait()
        rewards = np.array([ticket.reward for ticket in tickets], np.float32)
        return rewards, [ticket.failure for ticket in tickets if ticket.failure]

    def misfit(self, columns: Collection[str]) -> str:
        return self._first.misfit(columns)

    def _submitted(self, ticket: Ticket) -> Ticket | None:
        key = _key(ticket)
        if not (found := self._early.get(key)):
            return None
        if len(found) == 1:
            del self._early[key]
        return found.pop()

    def _enqueue(self, tickets: Sequence[Ticket]) -> None:
        self._queue.extend(tickets)
        for _ in range(min(len(self._free), math.ceil(len(self._queue) / self._at_once))):
            threading.Thread(target=self._work, args=(self._free.pop(),), daemon=True).start()

    def _work(self, scorer: Scorer) -> None:
        """Scores what waits, with one scorer, until nothing does."""
        extra_s = 0.0  # spent on starting, which does not count
        while tickets := self._take(scorer):
            began = time.monotonic()
            try:
                scorer.start()
                now = time.monotonic()
                extra_s += max(now - max(began, tickets[0].awaited_from), 0.0)
                left_s = min(ticket.deadline for ticket in tickets) + extra_s - now
                if left_s <= 0:
                    raise RewardFailure("timeout", f"not reached in {tickets[0].timeout_s:g} s")
                limit_s = min(left_s, self._share * tickets[0].timeout_s)
                columns = {name: [t.row.get(name) for t in tickets] for name in dict.fromkeys(n for t in tickets for n in t.row)}
                texts = [t.prompt for t in tickets], [t.completion for t in tickets]
                outcome = scorer.run(*texts, columns, limit_s)
            except RewardFailure as failure:
                if failure.kind == "load":  # and would be so for all that follow
                    tickets += self._take_all()
                outcome = all_failed(len(tickets), failure)
            except BaseException as error:
                outcome = all_failed(len(tickets), RewardFailure("error", f"{type(error).__name__}: {error}"))
            rewards, failures = outcome
            for ticket, reward in zip(tickets, rewards, strict=True):
                ticket.reward = float(reward)
                ticket.failure = failures[0]._replace(samples=1) if failures else None
                ticket.done.set()

    def _take(self, scorer: Scorer) -> list[Ticket]:
        with self._lock:
            tickets = [self._queue.popleft() for _ in range(min(self._at_once, len(self._queue)))]
            if not tickets:
                self._free.append(scorer)
            return tickets

    def _take_all(self) -> list[Ticket]:
        with self._lock:
            tickets = list(self._queue)
            self._queue.clear()
            return tickets


def _without_none(row: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that a row lacks may be there as None, where another has them."""
    return {name: value for name, value in row.items() if value is not None}


def _key(ticket: Ticket) -> bytes:
    """Equal for samples that have equal rewards; empty where no such thing can be made, as its columns cannot be pickled."""
    try:
        return pickle.dumps((ticket.prompt, ticket.completion, sorted(ticket.row.items())))
    except Exception:
        return b""
