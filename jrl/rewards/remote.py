"""Rewards from a service: POST {"prompts": [..], "completions": [..], COLUMN: [..], ..} to a URL, which answers {"scores": [..]}.

A request has up to `batch_size` samples; a score is a number, or null where there is none. The deadline is kept whatever the
service does: a request that hangs is left to a thread of its own, and what arrives after it is thrown away.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jrl.errors import UserError
from jrl.rewards.per_sample import PerSample
from jrl.rewards.runners import Abandonable, Columns, Outcome
from jrl.rewards.worker import RewardFailure

PARALLEL = 4  # requests at a time
RETRY_S = 0.1  # before the first retry; twice as long before each one after it
_MOST_BYTES = 1 << 26  # of an answer
_TRY_AGAIN = (429, 502, 503, 504)


def remote(options: Mapping[str, Any]) -> PerSample:
    """The runner for `reward.remote`.

    Raises:
      UserError: no such URL, or no such variable in the environment.
    """
    url, key = address("reward.remote", options)
    return PerSample([Service(url, key, options["retries"]) for _ in range(PARALLEL)], options["batch_size"])


def address(section: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """The URL of a section of the config, and the key to send, empty for none.

    Raises:
      UserError: no such URL, or no such variable in the environment.
    """
    url, key_env = options["url"], options["key_env"]
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        name = section.rpartition(".")[2]
        raise UserError(f"config.{section}.url={url}: the reward {name} needs an address; give http://... or https://...")
    if key_env and not os.environ.get(key_env):
        raise UserError(f"config.{section}.key_env={key_env}: no such variable in the environment; export it")
    return url, os.environ[key_env] if key_env else ""


class Service:
    """Scores samples with one request at a time."""

    def __init__(self, url: str, key: str, retries: int):
        self._url, self._retries = url, retries
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._guard = Abandonable(self._scores)
        self._until = 0.0  # of the call that is under way

    def start(self) -> None:
        pass

    def run(self, prompts: Sequence[str], completions: Sequence[str], columns: Columns, timeout_s: float) -> Outcome:
        self._until = time.monotonic() + timeout_s
        return self._guard.run(prompts, completions, columns, timeout_s)

    def misfit(self, columns: Collection[str]) -> str:
        return ""

    def _scores(self, prompts: Sequence[str], completions: Sequence[str], /, **columns: list) -> list:
        until = self._until  # another call will have another one
        body = {**columns, "prompts": list(prompts), "completions": list(completions)}
        answer = self._post(json.dumps(body, default=_plain).encode(), until)
        try:
            return json.loads(answer)["scores"]
        except (ValueError, KeyError, TypeError):
            raise RewardFailure("result", f'{self._url} answered {answer[:80]!r}, not {{"scores": [..]}}') from None

    def _post(self, body: bytes, until: float) -> bytes:
        """The answer; where there was no connection, or the service was busy, it is asked again."""
        pause_s = RETRY_S
        for attempt in range(self._retries + 1):
            try:
                request = urllib.request.Request(self._url, body, self._headers)
                with _OPENER.open(request, timeout=max(until - time.monotonic(), 0.01)) as reply:
                    return reply.read(_MOST_BYTES)
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() >= until:  # the socket's time-out and the guard's are one: whoever sees it first, it is that
                    raise RewardFailure("timeout", f"{self._url} had not answered by the deadline ({error})") from None
                final = isinstance(error, urllib.error.HTTPError) and error.code not in _TRY_AGAIN
                if final or attempt == self._retries or time.monotonic() + pause_s > until:
                    raise
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("the last attempt returns or raises")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET, and take the key elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
