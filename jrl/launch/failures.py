"""Who failed, and why, told from what the processes of a run left behind."""

import dataclasses
import signal
from collections.abc import Sequence
from typing import Any

MISTAKE = 2  # exit status of jrl.main after a mistake of the user's
# How processes end because another one did: the exit status of those that were told of it, and what the coordination service
# of JAX does to those that were not.
FOLLOWERS = (3, -signal.SIGABRT)
_WORDS = 5  # lines


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a run did not get to its end.

    Attributes:
      text: who and how, one line.
      last_words: what it wrote last.
      mistake: what the user has to change; starting again would not help.
      certain: False of a process that may have ended because of another one, or may answer again.
    """

    text: str
    last_words: Sequence[str] = ()
    mistake: str = ""
    certain: bool = True

    def told(self, what_now: str) -> str:
        return "\n".join([f"{self.text}; {what_now}", *(f"  | {line}" for line in self.last_words[-_WORDS:])])


def blame(names: Sequence[str], outcomes: Sequence[Any], leaving: bool) -> Failure | None:
    """The failure to act on, None while there is none.

    Args:
      names: of the processes.
      outcomes: of each its Report, or the exception that came instead.
      leaving: the run has been told to leave.
    """
    failures = [f for name, outcome in zip(names, outcomes, strict=True) if (f := _failure(name, outcome, leaving))]
    return min(failures, key=lambda f: (not f.mistake, not f.certain), default=None)


def _failure(name: str, outcome: Any, leaving: bool) -> Failure | None:
    if isinstance(outcome, Exception):
        # One that does not answer may do so again, or be found dead.
        return Failure(f"{name}: {outcome}", certain=getattr(outcome, "died", True))
    status, words = outcome.status, [line for line in outcome.last_words if line.strip()]
    if status is None:
        return None
    if status == 0:
        by = (outcome.summary or {}).get("interrupted")
        return Failure(f"{name} was told to leave by {by}, and did") if by and not leaving else None
    last = words[-1] if words else "it wrote nothing"
    if status == MISTAKE:
        return Failure(f"{name}: {last}", mistake=last.removeprefix("error: "))
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    return Failure(f"{name} {how}", words, certain=status not in FOLLOWERS)
