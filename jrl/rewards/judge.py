"""A generative judge as a reward: `judge` in `reward.functions`, an OpenAI-compatible server in `reward.judge.url`.

Each sample is one chat completion at temperature 0: `reward.judge.template` with the prompt, the response and the reference
answer in it; of a prompt of several messages it is told who said which. The score is what the one group of
`reward.judge.pattern` finds, in the last place where it matches, as a judge that thinks aloud names other numbers first. A reply
without a score masks the sample, and so does a server that fails or is late.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jrl.errors import UserError
from jrl.rewards.model import Chats
from jrl.rewards.per_sample import PerSample
from jrl.rewards.remote import Service, address
from jrl.rewards.worker import RewardFailure

NAME = "judge"  # in reward.functions
_PLACES = re.compile(r"\{(prompt|completion|answer)\}")


def judge(options: Mapping[str, Any], chats: Chats) -> PerSample:
    """The runner for `reward.judge`.

    Raises:
      UserError: no such URL, no such variable in the environment, a template without a response, a pattern without one group.
    """
    url, key = address("reward.judge", options)
    template, pattern = options["template"], options["pattern"]
    if "{completion}" not in template:
        raise UserError(f"config.reward.judge.template={template[:60]!r}: lacks {{completion}}, where the response goes")
    try:
        score = re.compile(pattern)
    except re.error as error:
        raise UserError(f"config.reward.judge.pattern={pattern!r}: is no regular expression ({error})") from None
    if score.groups != 1:
        raise UserError(
            f"config.reward.judge.pattern={pattern!r}: has {score.groups} groups; the score is what its one group finds"
        )
    return PerSample([Judge(url, key, options, score, chats) for _ in range(options["parallel"])])


class Judge(Service):
    """Asks about one sample at a time."""

    def __init__(self, url: str, key: str, options: Mapping[str, Any], score: re.Pattern, chats: Chats):
        super().__init__(f"{url.rstrip('/')}/chat/completions", key, options["retries"])
        self._template, self._score, self._chats = options["template"], score, chats
        self._request = {"model": options["model"], "max_tokens": options["max_tokens"], "temperature": 0}

    def misfit(self, columns: Collection[str]) -> str:
        return "asks with a template that has {answer}" if "{answer}" in self._template and "answer" not in columns else ""

    def _scores(self, prompts: Sequence[str], completions: Sequence[str], /, **columns: list) -> list:
        until, answers = self._until, columns.get("answer") or [None] * len(prompts)
        return [self._ask(until, *sample) for sample in zip(prompts, completions, answers, strict=True)]

    def _ask(self, until: float, prompt: str, completion: str, answer: Any) -> float:
        said = [m for m in self._chats.of(prompt) if m["role"] != "system"]
        asked = "\n\n".join(m["content"] if len(said) == 1 else f"{m['role']}: {m['content']}" for m in said)
        parts = {"prompt": asked, "completion": completion, "answer": str(answer)}
        # In one go: what stands in the sample is not looked through for places again.
        text = _PLACES.sub(lambda place: parts[place[1]], self._template)
        body = self._request | {"messages": [{"role": "user", "content": text}]}
        answered = self._post(json.dumps(body).encode(), until)
        try:
            reply = json.loads(answered)["choices"][0]["message"]["content"] or ""
        except (ValueError, KeyError, IndexError, TypeError):
            raise RewardFailure("result", f"{self._url} answered {answered[:80]!r}, no chat completion") from None
        found = self._score.findall(reply)
        try:
            return float(found[-1])
        except (IndexError, ValueError):
            raise RewardFailure("result", f"no score in the judge's reply {reply[-80:]!r}") from None
