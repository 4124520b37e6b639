"""Signs of life of the processes of a run, and the verdict when one of them gives none.

Every process says every `BEAT_S` seconds what it is doing, in the key-value store of JAX's coordination service, which
process 0 runs. Process 0 watches all, the others watch process 0. Who finds that one is silent, has failed, or keeps the
others waiting too long, writes the verdict; all read it and stop. Without this a collective waits for ever for a process
that is gone, or fails with a message that names none.
"""

import json
import logging
import os
import pathlib
import socket
import sys
import threading
import time
from typing import Any

from jrl import activity
from jrl.launch.recorder import Recorder

log = logging.getLogger("jrl")

BEAT_S = 2.0
LEAVE_S = 20.0  # that process 0 stays for the others to leave before it
TELL_S = 60.0  # between two lines that say whom the others wait for
VERDICT = "jrl/verdict"
STOPPED = 3  # exit status of a process that stops because another one did


def own_state(number: int) -> dict[str, Any]:
    """This process's sign of life.

    Args:
      number: of the sign.
    """
    doing, step, seconds = activity.current()
    return {
        "host": socket.gethostname(), "pid": os.getpid(), "number": number, "doing": doing, "step": step, "seconds": seconds,
    }  # fmt: skip


class Watch:
    """Beats, and looks after the others' beats, in a thread of its own, from `start` to `leave`.

    Args:
      client: of the coordination service.
      coordinator: HOST:PORT of it.
      silence_s: seconds without a beat after which a process counts as gone.
      wait_s: seconds that others may wait for a process that is alive.
      recorder: of this process.
    """

    def __init__(
        self, client: Any, index: int, count: int, coordinator: str, silence_s: float, wait_s: float, recorder: Recorder
    ):
        self.client, self.index, self.count, self.silence_s, self.wait_s = client, index, count, silence_s, wait_s
        host, _, port = coordinator.rpartition(":")
        self._coordinator = (host, int(port))
        self._board: pathlib.Path | None = None
        self._beats: dict[int, dict[str, Any]] = {}
        self._heard: dict[int, float] = {}  # when the beat was last another one
        self._told = time.monotonic()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self._recorder = recorder

    def start(self) -> None:
        self._beat(0)
        self._thread.start()

    def show(self, path: pathlib.Path) -> None:
        """From now on the state of all processes is kept in this file, by process 0."""
        self._board = path if self.index == 0 else None

    def leave(self) -> None:
        """The orderly end: nobody shall miss this process."""
        self._stop()
        self._recorder.fine()

    def die(self, status: int) -> None:
        """Ends the process now, without the handshakes that wait for those that are gone."""
        self._stop()
        if self.index == 0:
            self._let_others_leave()
        else:
            self._write(f"jrl/left/{self.index}", str(status))
        self._recorder.fine()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _let_others_leave(self) -> None:
        """Of process 0, with which the store goes: waits for those that live to read the verdict and to leave."""
        end = time.monotonic() + LEAVE_S
        while time.monotonic() < end:
            self._listen()
            now = time.monotonic()
            live = [i for i, heard in self._heard.items() if i and now - heard <= self.silence_s]
            if all(self._read(f"jrl/left/{i}") for i in live):
                return
            time.sleep(BEAT_S / 8)

    # Verdicts --------------------------------------------------------------------------------------------------------------

    def accuse(self, text: str) -> str:
        """Writes the verdict, unless there is one; returns the one that holds."""
        try:
            self.client.key_value_set(VERDICT, text)
        except Exception:  # there is one already, or no store any more
            return self.verdict() or text
        return text

    def verdict(self) -> str | None:
        """What has been found, if anything has."""
        return self._read(VERDICT)

    def await_verdict(self) -> str | None:
        """As `verdict`, after as long as it may take to find out that a process is silent."""
        end = time.monotonic() + self.silence_s + 3 * BEAT_S
        while time.monotonic() < end:
            if found := self.verdict():
                return found
            time.sleep(BEAT_S / 4)
        return None

    def states(self) -> list[dict[str, Any]]:
        """The last sign of life of each process that this one watches."""
        return [{"process": i, **beat} for i, beat in sorted(self._beats.items())]

    def name(self, index: int) -> str:
        """A process for messages."""
        beat = self._beats.get(index)
        return f"process {index} on {beat['host']} (pid {beat['pid']})" if beat else f"process {index}"

    def where(self, index: int) -> str:
        beat = self._beats.get(index)
        return f"in step {beat['step']}, {beat['doing']} for {beat['seconds']:.0f} s" if beat else "before its first sign of life"

    # The thread ------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        number = 0
        while not self._ending.wait(BEAT_S):
            number += 1
            self._beat(number)
            self._listen()
            found = self.verdict() or self._judge()
            if found:
                # The main thread may be inside a collective that will never end: it cannot be asked to leave.
                if not self._ending.wait(BEAT_S):  # unless it is leaving by itself, with the same verdict
                    print(f"error: {self.accuse(found)}; {self.name(self.index)} stops", file=sys.stderr, flush=True)
                    self._ending.set()
                    self.die(STOPPED)
                return
            self._report()

    def _beat(self, number: int) -> None:
        self._beats[self.index] = mine = own_state(number)
        self._heard[self.index] = time.monotonic()
        chief = f"{self.name(0)}, last heard of {self.where(0)}"
        state = {"who": self.name(self.index), "where": self.where(self.index), "coordinator": self._coordinator}
        self._recorder.tell(state | {"chief": chief, "first": self.index == 0})
        self._write(f"jrl/beat/{self.index}", json.dumps(mine))

    def _listen(self) -> None:
        """Reads the beats of those that this process watches."""
        now = time.monotonic()
        for other in range(self.count) if self.index == 0 else (0,):
            text = self._read(f"jrl/beat/{other}")
            beat = json.loads(text) if text else None
            self._heard.setdefault(other, now)
            if beat and beat["number"] != self._beats.get(other, {}).get("number"):
                self._beats[other], self._heard[other] = beat, now

    def _judge(self) -> str | None:
        now, watched = time.monotonic(), [i for i in self._heard if i != self.index]
        for other in watched:
            silence = now - self._heard[other]
            if silence > self.silence_s:
                return f"{self.name(other)} has not been heard of for {silence:.0f} s, last {self.where(other)}"
        waiting, busy = self._waiting()
        if waiting and busy and min(self._beats[i]["seconds"] for i in waiting) > self.wait_s and self.index == 0:
            late = "; ".join(f"{self.name(i)} {self.where(i)}" for i in busy)
            return f"hosts.wait_s={self.wait_s:g} is over, in which {len(waiting)} processes have waited for {late}"
        return None

    def _waiting(self) -> tuple[list[int], list[int]]:
        """Who waits, and who is waited for."""
        waits = {i: beat["doing"].startswith(activity.WAITING) for i, beat in self._beats.items()}
        return [i for i, w in waits.items() if w], [i for i, w in waits.items() if not w]

    def _report(self) -> None:
        """Of process 0: the board, and a line when others have waited long for the same ones."""
        if self.index:
            return
        waiting, busy = self._waiting()
        now = time.monotonic()
        longest = max((self._beats[i]["seconds"] for i in waiting), default=0.0)
        if busy and longest > TELL_S and now - self._told > TELL_S:
            late = "; ".join(f"{self.name(i)} {self.where(i)}" for i in busy)
            log.warning("%d of %d processes have waited up to %.0f s for %s", len(waiting), self.count, longest, late)
            self._told = now
        if self._board is not None:
            rows = [state | {"heard_s_ago": now - self._heard[state["process"]]} for state in self.states()]
            partial = self._board.with_suffix(".partial")
            partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
            partial.replace(self._board)

    def _write(self, key: str, value: str) -> None:
        try:
            self.client.key_value_set(key, value, allow_overwrite=True)
        except Exception as error:  # the store is with process 0, and may be gone
            log.debug("%s cannot be written: %s", key, error)

    def _read(self, key: str) -> str | None:
        try:
            return self.client.key_value_try_get(key)
        except Exception:  # absent, or the store is gone
            return None

    def _stop(self) -> None:
        self._ending.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * BEAT_S)
