"""One thread that owns an engine, and a queue in front of it.

The engine belongs to one thread, the clients to an event loop in another. They meet in two places: a queue of commands
that the engine's thread reads between steps, and each job's own queue of news, filled through `call_soon_threadsafe`. An
exception in the engine's thread ends every job with `EngineFailed` and refuses what comes later; nothing waits for ever.
"""

import asyncio
import concurrent.futures
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from jrl.errors import UserError
from jrl.rollout.engine import Engine
from jrl.rollout.scheduler import Request
from jrl.rollout.warmup import warm_up
from jrl.types import Completion

log = logging.getLogger("jrl")

TELL_S = 10  # between two lines of the log about a warm-up


class Unavailable(Exception):
    """The engine is not there yet, or no longer."""


class EngineFailed(Exception):
    """The engine's thread has ended with an error."""


class DeadlineExceeded(Exception):
    """The engine has given up a request whose time was over."""


class Job:
    """Requests that belong together, and the news of their samples. Made by `Service.submit`.

    Args:
      stream: news come as tokens are sampled; otherwise each sample once, when it has ended.
      loop: where the news are read.
    """

    def __init__(self, requests: Sequence[Request], stream: bool, loop: asyncio.AbstractEventLoop):
        self.requests, self.stream, self._loop = list(requests), stream, loop
        self._news: asyncio.Queue[Completion | Exception] = asyncio.Queue()
        self.samples = sum(request.samples for request in self.requests)
        # What follows belongs to the engine's thread.
        self.left = self.samples  # that have not ended
        self.tickets: list[int] = []
        self.sent: dict[tuple[int, int], int] = {}  # tokens of each sample that the news have told
        self.submitted_at = time.monotonic()
        self.first_token_at: float | None = None

    async def news(self) -> AsyncIterator[Completion]:
        """Parts of completions until all have ended: `request` is the position among the job's requests, arrays hold new tokens.

        The stop reason is empty in all parts of a sample but its last.

        Raises:
          UserError: a request that can never run.
          Unavailable, EngineFailed, DeadlineExceeded
        """
        left = self.samples
        while left:
            news = await self._news.get()
            if isinstance(news, Exception):
                raise news
            left -= news.stop_reason != ""
            yield news

    def tell(self, news: Completion | Exception) -> None:
        """Called in the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)
        except RuntimeError:  # the loop is closed: nobody listens any more
            log.debug("news of a job after its event loop has ended")


@dataclasses.dataclass(frozen=True)
class _Abort:
    job: Job


@dataclasses.dataclass(frozen=True)
class _Load:
    params: Any
    version: int
    done: concurrent.futures.Future


@dataclasses.dataclass(frozen=True)
class _Stop:
    at: float  # time.monotonic() when what is under way is aborted


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The engine's figures after its last step."""

    version: int = -1  # of the weights
    waiting: int = 0  # requests without a first token
    running: int = 0  # the others
    prompt_tokens: int = 0  # of accepted requests, since the start
    generated_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    pages: dict[str, int] = dataclasses.field(default_factory=lambda: {"free": 0, "used": 0, "cached": 0})


class Service:
    """Runs an engine in a thread of its own.

    Args:
      make_engine: called in that thread; the engine comes with its weights.
      on_first_token: called in that thread with the seconds from submission to the first token of a job.
      on_failure: called in that thread with the error that ended it.
      warm_up_s: for so many seconds, in that thread too and before anything is accepted, programs are compiled; 0 for none,
        and for an engine that is not made with `few_programs`.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        on_first_token: Callable[[float], None] = lambda seconds: None,
        on_failure: Callable[[BaseException], None] = lambda error: None,
        warm_up_s: float = 0.0,
    ):
        self._warm_up_s = warm_up_s
        self.warmed_up = (0, 0)  # programs compiled, of how many, before the first request
        self._make_engine, self._on_first_token, self._on_failure = make_engine, on_first_token, on_failure
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()  # its put may be called in a signal handler
        self._jobs: dict[int, tuple[Job, int]] = {}  # ticket -> job, position of the request in it
        self._waiting: set[Job] = set()  # without a first token
        self._ends_at: float | None = None
        self._prompt_tokens = 0
        self._closing = threading.Lock()  # between a last submission and the end of the thread
        self.status = "loading"  # then "ok", then "stopping" or "failed"
        self.snapshot = Snapshot()
        self.engine: Engine | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called from the event loop ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs without a first token."""
        return len(self._waiting)

    def submit(self, requests: Sequence[Request], stream: bool) -> Job:
        """Queues requests; `Job.news` says what becomes of them.

        Raises:
          Unavailable: the weights are not loaded, or the service is about to end.
          EngineFailed
        """
        job = Job(requests, stream, asyncio.get_running_loop())
        self._waiting.add(job)
        try:
            self._put(job)
        except Exception:
            self._waiting.discard(job)
            raise
        return job

    def abort(self, job: Job) -> None:
        """Ends a job; its news are not heard any more. Does nothing to one that has ended."""
        self._inbox.put(_Abort(job))

    async def load(self, params: Any, version: int) -> None:
        """Serves other weights, which lie where the engine wants them; what is under way goes on with them."""
        done: concurrent.futures.Future = concurrent.futures.Future()
        self._put(_Load(params, version, done))
        await asyncio.wrap_future(done)

    def stop(self, grace_s: float) -> None:
        """Refuses what comes, ends what is under way after so many seconds at the latest, then the thread."""
        self._inbox.put(_Stop(time.monotonic() + grace_s))

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, waiting for it for some time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, command: Job | _Load) -> None:
        with self._closing:
            if self.status != "ok":
                raise self.refusal()
            self._inbox.put(command)

    def refusal(self) -> Exception:
        if self.status == "failed":
            return EngineFailed("the engine has failed; the log says why")
        reason = "the weights are not loaded yet" if self.status == "loading" else "the server is shutting down"
        return Unavailable(f"{reason}; try again later")

    # The engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._make_engine()
            if self._warm_up_s:
                self._warm_up(engine)
            self.engine = engine
            self._set_status("ok")
            self._look(engine)
            while not self._over(engine):
                self._take_commands(engine)
                if not engine.idle:
                    self._step(engine)
                self._look(engine)
            self._set_status("stopping")
        except BaseException as error:  # whatever it was, nobody may be left waiting
            self._set_status("failed")
            self._on_failure(error)
        finally:
            self._refuse_rest()

    def _warm_up(self, engine: Engine) -> None:
        """Until all is compiled, time is up, or the service is to end."""
        began = told = time.monotonic()
        for self.warmed_up in warm_up(engine):
            now, (done, count) = time.monotonic(), self.warmed_up
            last = done == count or now - began >= self._warm_up_s or not self._inbox.empty()
            if last or now - told >= TELL_S:
                log.info("warm-up: %d of %d programs compiled in %.0f s", done, count, now - began)
                told = now
            if last:
                if done < count:
                    log.info("warm-up: the other %d are compiled when a request needs them", count - done)
                return

    def _set_status(self, status: str) -> None:
        with self._closing:
            self.status = status

    def _over(self, engine: Engine) -> bool:
        return self._ends_at is not None and (engine.idle or time.monotonic() >= self._ends_at)

    def _take_commands(self, engine: Engine) -> None:
        """All that have come; with nothing to generate, waits for one."""
        wait = engine.idle
        while True:
            try:
                command = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            match command:
                case Job():
                    self._submit(engine, command)
                case _Abort(job):
                    if job.left:
                        self._forget(job)
                        engine.abort(job.tickets)
                case _Load(params, version, done):
                    if done.set_running_or_notify_cancel():  # False: who asked for it has gone
                        try:
                            engine.load(params, version, under_way=True)
                        except BaseException as error:  # which ends this thread
                            done.set_exception(EngineFailed(f"the weights cannot be served: {type(error).__name__}: {error}"))
                            raise
                        done.set_result(None)
                case _Stop(at):
                    self._set_status("stopping")
                    self._ends_at = at

    def _submit(self, engine: Engine, job: Job) -> None:
        try:
            job.tickets = engine.submit(job.requests)
        except UserError as error:
            self._waiting.discard(job)
            job.tell(error)
            return
        self._prompt_tokens += sum(len(request.tokens) for request in job.requests)
        self._jobs |= {ticket: (job, position) for position, ticket in enumerate(job.tickets)}

    def _forget(self, job: Job) -> None:
        self._waiting.discard(job)
        for ticket in job.tickets:
            self._jobs.pop(ticket, None)

    def _step(self, engine: Engine) -> None:
        finished = engine.step()
        # A job that is neither read as it goes nor still without a first token needs no look at what is under way.
        if self._waiting or any(job.stream for job, _ in self._jobs.values()):
            for completion in engine.running():
                self._progress(completion)
        for completion in finished:
            self._finish(engine, completion)

    def _progress(self, completion: Completion) -> None:
        entry = self._jobs.get(completion.request)
        if entry is None or not len(completion.tokens):
            return
        job, position = entry
        self._note_first(job)
        if job.stream:
            self._tell(job, position, completion)

    def _finish(self, engine: Engine, completion: Completion) -> None:
        entry = self._jobs.get(completion.request)
        if entry is None:
            return
        job, position = entry
        if completion.stop_reason == "aborted":  # by nobody but its deadline
            self._forget(job)
            engine.abort(job.tickets)
            job.tell(DeadlineExceeded("the request took longer than this server allows"))
            return
        self._note_first(job)
        self._tell(job, position, completion)
        job.left -= 1
        if not job.left:
            self._forget(job)

    def _note_first(self, job: Job) -> None:
        if job.first_token_at is None:
            job.first_token_at = time.monotonic()
            self._waiting.discard(job)
            self._on_first_token(job.first_token_at - job.submitted_at)

    @staticmethod
    def _tell(job: Job, position: int, completion: Completion) -> None:
        """Tells what is new of a sample."""
        begin = job.sent.get((position, completion.sample), 0)
        if begin == len(completion.tokens) and not completion.stop_reason:
            return
        job.sent[position, completion.sample] = len(completion.tokens)
        names = ("tokens", "logprobs", "sampler_logprobs", "versions")
        new: dict[str, Any] = {name: getattr(completion, name)[begin:] for name in names}
        if completion.best is not None:
            new["best"] = (completion.best[0][begin:], completion.best[1][begin:])
        job.tell(dataclasses.replace(completion, request=position, **new))

    def _look(self, engine: Engine) -> None:
        pages = [replica.pages for replica in engine.scheduler.replicas]
        running = sum(job.first_token_at is not None for job in {job for job, _ in self._jobs.values()})
        self.snapshot = Snapshot(
            version=engine.version, waiting=len(self._waiting), running=running, prompt_tokens=self._prompt_tokens,
            generated_tokens=engine.stats.decode_tokens, prefix_hit_tokens=engine.stats.hit_tokens,
            preemptions=engine.stats.preemptions,
            pages={kind: sum(getattr(p, kind) for p in pages) for kind in ("free", "used", "cached")},
        )  # fmt: skip

    def _refuse_rest(self) -> None:
        """After the end: everybody who waits hears of it. Nobody can be added, since the status is not "ok"."""
        for job in self._waiting | {job for job, _ in self._jobs.values()}:
            self._forget(job)
            job.tell(self.refusal())
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, _Load) and command.done.set_running_or_notify_cancel():
                command.done.set_exception(self.refusal())
