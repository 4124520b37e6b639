"""Rewards over HTTP, from a service that may do anything."""

import contextlib
import json
import logging
import socket
import threading
import time
import urllib.error

import numpy as np
import pytest

from jrl.config import default_config
from jrl.errors import UserError
from jrl.rewards import RewardManager
from jrl.rewards.remote import Service
from jrl.rewards.runners import MAX_ABANDONED
from jrl.rewards.worker import RewardFailure


def scores(values):
    return 200, json.dumps({"scores": values}).encode()


def manager(service, timeout_s=10.0, **options):
    section = default_config().reward
    section.remote.url = f"http://127.0.0.1:{service.server_address[1]}/score"
    for name, value in options.items():
        section.remote[name] = value
    return RewardManager([("remote", "remote", 1.0)], timeout_s, section)


def test_samples_go_in_batches_with_their_columns_and_come_back_in_order(service, monkeypatch):
    monkeypatch.setenv("SCORER", "sesame")
    service.reply = lambda body: scores([len(c) + a for c, a in zip(body["completions"], body["answer"], strict=True)])
    rewards = manager(service, batch_size=3, key_env="SCORER")
    texts = ["x" * i for i in range(8)]
    result = rewards.score([f"p{i}" for i in range(8)], texts, {"answer": np.arange(8) / 4, "other": [None] * 8})
    np.testing.assert_array_equal(result.total, np.arange(8) * 1.25)
    assert sorted(len(body["completions"]) for body, _ in service.seen) == [2, 3, 3]
    assert all(body.keys() == {"prompts", "completions", "answer"} for body, _ in service.seen)
    assert all(headers["Authorization"] == "Bearer sesame" for _, headers in service.seen)
    assert sorted(p for body, _ in service.seen for p in body["prompts"]) == [f"p{i}" for i in range(8)]


def test_busy_and_broken_connections_are_tried_again(service):
    answers = iter([(503, b""), (429, b""), scores([0.5])])
    service.reply = lambda body: next(answers)
    assert manager(service).score(["p"], ["x"], {}).total == [0.5]
    service.reply = lambda body: (503, b"")
    assert manager(service, retries=1).score(["p"], ["x"], {}).failures == {"remote/error": 1}
    assert len(service.seen) == 3 + 2
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    rewards = manager(service)  # built with a good address, which is then left
    rewards = manager(service, url=f"http://127.0.0.1:{port}/", retries=2)
    began = time.monotonic()
    assert rewards.score(["p"], ["x"], {}).failures == {"remote/error": 1}
    assert time.monotonic() - began > 0.3, "0.1 s and then 0.2 s of waiting"


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        ((200, b"<html>"), "result", "answered b'<html>'"),
        ((200, b"[1]"), "result", "scores"),
        (scores([1.0]), "result", "not 2 numbers"),
        (scores(["a", "b"]), "result", "not 2 numbers"),
        (scores([[1], [2]]), "result", "not 2 numbers"),
        ((500, b""), "error", "500"),
        ((302, b""), "error", "302"),
        ((404, b""), "error", "404"),
    ],
)
def test_garbage_masks_and_says_why(service, caplog, answer, kind, text):
    service.reply = lambda body: answer
    with caplog.at_level(logging.WARNING):
        result = manager(service, retries=0).score(["p"] * 2, ["x", "y"], {})
    assert not result.valid.any() and result.failures == {f"remote/{kind}": 2} and text in caplog.text


def test_null_masks_its_sample_only(service):
    service.reply = lambda body: scores([None, 2])
    result = manager(service).score(["p"] * 2, ["x", "y"], {})
    assert result.valid.tolist() == [False, True] and result.failures == {"remote/nan": 1}


def test_a_service_that_hangs_is_cut_off(service):
    gate = threading.Event()
    service.reply = lambda body: (gate.wait(20), (200, b""))[1]
    began = time.monotonic()
    result = manager(service, timeout_s=1.0, batch_size=2).score(["p"] * 4, ["x"] * 4, {})
    assert 0.9 < time.monotonic() - began < 15 and result.failures == {"remote/timeout": 4}
    gate.set()


def test_an_answer_that_the_socket_waits_for_in_vain_is_late_not_wrong(service):
    """As where the socket's time-out comes before the guard's."""
    gate = threading.Event()
    service.reply = lambda body: (gate.wait(20), (200, b""))[1]
    it = Service(f"http://127.0.0.1:{service.server_address[1]}/", "", retries=0)
    it._until = time.monotonic() + 0.2
    with pytest.raises(RewardFailure, match="had not answered by the deadline") as late:
        it._scores(["p"], ["x"])
    gate.set()
    service.reply = lambda body: (404, b"")
    it._until = time.monotonic() + 20
    with pytest.raises(urllib.error.HTTPError):
        it._scores(["p"], ["x"])
    assert late.value.kind == "timeout"


def test_a_service_that_drips_is_cut_off_and_left_alone_in_the_end(service):
    stop, calls = threading.Event(), []

    def trickle(connection):
        with contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.0 200 OK\r\n")
            while not stop.wait(0.05):
                connection.sendall(b"X")  # every byte resets the time-out of a socket

    def accept():
        with contextlib.suppress(OSError):
            while True:
                calls.append(1)
                threading.Thread(target=trickle, args=server.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        rewards = manager(service, timeout_s=0.2, url=f"http://127.0.0.1:{server.getsockname()[1]}/")
        for _ in range(MAX_ABANDONED + 3):
            assert rewards.score(["p"], ["x"], {}).failures == {"remote/timeout": 1}
        stop.set()
    assert len(calls) <= MAX_ABANDONED + 1, "one call waits for the next connection"


def test_addresses_and_keys_are_checked_at_once(service):
    for url in ("", "ftp://x/y", "http:///y", "scorer"):
        with pytest.raises(UserError, match="reward.remote.url=.*give http"):
            manager(service, url=url)
    with pytest.raises(UserError, match="reward.remote.key_env=NO_SUCH_KEY: no such variable"):
        manager(service, key_env="NO_SUCH_KEY")
