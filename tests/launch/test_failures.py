"""Who is to blame when processes end."""

import signal

import pytest

from jrl.launch.failures import blame
from jrl.launch.worker import Report

RUNS = Report([], None, [], None, True)
NAMES = ["process 0 on a", "process 1 on b", "process 2 on c"]


def ended(status, *words, summary=None):
    return Report([], status, list(words), summary, True)


def test_nobody_while_they_run_or_have_ended_well():
    assert blame(NAMES, [RUNS, RUNS, RUNS], False) is None
    assert blame(NAMES, [ended(0, summary={"steps": 3}), RUNS, ended(0)], False) is None


@pytest.mark.parametrize("follower", [ended(3, "another process is gone"), ended(-signal.SIGABRT, "fatal error")])
@pytest.mark.parametrize(
    ("first", "said"),
    [
        (ended(-signal.SIGKILL, "step 4/9"), "process 2 on c was ended by SIGKILL"),
        (ended(1, "Traceback", "ValueError: no"), "process 2 on c ended with exit status 1"),
        (RuntimeError("worker 2 on c: gone"), "process 2 on c: worker 2 on c: gone"),
    ],
)
def test_the_one_that_failed_not_those_that_followed(follower, first, said):
    failure = blame(NAMES, [follower, RUNS, first], False)
    assert failure.text == said and failure.certain and not failure.mistake


def test_a_follower_alone_is_not_yet_believed():
    failure = blame(NAMES, [RUNS, ended(3, "process 2 did not answer"), RUNS], False)
    assert failure.text == "process 1 on b ended with exit status 3" and not failure.certain


def test_a_mistake_outweighs_what_it_led_to():
    mistake = ended(2, "reading", "error: config.steps=0: must be at least 1")
    failure = blame(NAMES, [ended(1, "RuntimeError: connection refused"), mistake, RUNS], False)
    assert failure.mistake == "config.steps=0: must be at least 1"


def test_a_process_that_left_on_a_signal_from_elsewhere_has_not_finished():
    left = ended(0, summary={"interrupted": "SIGTERM", "steps": 4})
    assert "was told to leave by SIGTERM" in blame(NAMES, [left, ended(0), ended(0)], False).text
    assert blame(NAMES, [left, ended(0), ended(0)], True) is None


def test_what_it_wrote_last_is_told():
    failure = blame(NAMES, [ended(1, *(f"line {i}" for i in range(9)), "", "ValueError: no"), RUNS, RUNS], False)
    told = failure.told("restart 1 of 3").splitlines()
    assert told[0] == "process 0 on a ended with exit status 1; restart 1 of 3"
    assert told[1:] == ["  | line 5", "  | line 6", "  | line 7", "  | line 8", "  | ValueError: no"]
