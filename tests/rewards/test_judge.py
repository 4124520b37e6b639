"""A judge asked over HTTP: what it is asked, how its score is read, and that it cannot stop a run."""

import json
import time

import pytest

from jrl.config import default_config
from jrl.data import Prompt
from jrl.errors import UserError
from jrl.rewards import RewardManager
from jrl.rewards.judge import judge
from jrl.rewards.model import Chats
from tests.runs import a_run
from tests.serving import WIDE, running

QUESTION = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 = {completion}?"})
PROMPTS = [Prompt((1,), "<rendered>", QUESTION, "4", {"answer": "4"}, "u")]


def options(url, **changes):
    section = default_config().reward.judge
    section.url, section.model = url, "m"
    for name, value in changes.items():
        section[name] = value
    return section.to_dict()


def manager(url, timeout_s=10.0, **changes):
    chats = Chats()
    chats.hold(PROMPTS)
    return RewardManager([("judge", judge(options(url, **changes), chats), 1.0)], timeout_s)


def score(it, completions):
    return it.score_prompts(PROMPTS * len(completions), completions, [1] * len(completions))


def says(text):
    return 200, json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def url_of(service):
    return f"http://127.0.0.1:{service.server_address[1]}/v1"


def test_the_template_is_filled_in_once_and_the_last_score_counts(service, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    service.reply = lambda body: says(f"Score: 1? No. Score: {len(body['messages'][0]['content'])}.5")
    it = manager(url_of(service), template="Q {prompt} R {completion} A {answer}", key_env="JUDGE_KEY", max_tokens=7)
    result = score(it, ["{answer}", "four"])
    bodies = sorted((body for body, _ in service.seen), key=lambda body: body["messages"][0]["content"])
    texts = [body["messages"][0]["content"] for body in bodies]
    assert texts == sorted(["Q 2 + 2 = {completion}? R four A 4", "Q 2 + 2 = {completion}? R {answer} A 4"])
    assert sorted(result.parts["judge"]) == sorted(len(text) + 0.5 for text in texts) and result.valid.all()
    assert result.parts["judge"][1] == len("Q 2 + 2 = {completion}? R four A 4") + 0.5  # in the order of the samples
    assert {k: bodies[0][k] for k in ("model", "max_tokens", "temperature")} == {"model": "m", "max_tokens": 7, "temperature": 0}
    assert all(headers["Authorization"] == "Bearer sesame" for _, headers in service.seen)


def test_of_a_prompt_of_several_messages_the_judge_is_told_who_said_which(service):
    service.reply = lambda body: says("Score: 1")
    talk = (*QUESTION, {"role": "assistant", "content": "5"}, {"role": "user", "content": "Sure?"})
    chats = Chats()
    chats.hold([Prompt((1,), "<rendered>", talk, None, {}, "u")])
    it = RewardManager([("judge", judge(options(url_of(service), template="{prompt}|{completion}"), chats), 1.0)], 10.0)
    assert it.score(["<rendered>"], ["4"], {}).valid.all()
    ((body, _),) = service.seen
    assert body["messages"][0]["content"] == "user: 2 + 2 = {completion}?\n\nassistant: 5\n\nuser: Sure?|4"


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (lambda body: says("I cannot tell."), "result"),
        (lambda body: (200, b"<html>"), "result"),
        (lambda body: (200, b'{"choices": []}'), "result"),
        (lambda body: (404, b"{}"), "error"),
        (lambda body: time.sleep(20) or says("Score: 3"), "timeout"),
    ],
    ids=["no score", "no json", "no choice", "refused", "late"],
)
def test_a_judge_that_fails_masks_its_sample_alone(service, reply, kind):
    service.reply = lambda body: says("Score: 3") if "fine" in body["messages"][0]["content"] else reply(body)
    began = time.monotonic()
    result = score(manager(url_of(service), timeout_s=1.0, retries=0), ["fine", "strange"])
    assert result.valid.tolist() == [True, False] and result.total.tolist() == [3, 0]
    assert result.failures == {f"judge/{kind}": 1} and time.monotonic() - began < 15


def test_mistakes_are_told_before_any_work(tmp_path):
    for changes, part in (
        ({"url": "localhost:80"}, "config.reward.judge.url=localhost:80: the reward judge needs an address"),
        ({"template": "{prompt}"}, "config.reward.judge.template='{prompt}': lacks {completion}"),
        ({"pattern": "("}, "is no regular expression"),
        ({"pattern": "(a)(b)"}, "has 2 groups"),
        ({"key_env": "NO_SUCH_KEY"}, "config.reward.judge.key_env=NO_SUCH_KEY"),
    ):
        with pytest.raises(UserError) as caught:
            judge(options("http://x/v1") | changes, Chats())
        assert part in str(caught.value)
    assert "{answer}" in judge(options("http://x/v1"), Chats()).misfit({"question"})
    with pytest.raises(UserError, match="config.reward.judge.url='': reward.functions names judge"):
        a_run(tmp_path / "run", reward__functions="judge")
    with pytest.raises(UserError, match="config.reward.judge.model='': reward.functions names judge"):
        a_run(tmp_path / "run", reward__functions="judge", reward__judge__url="http://x/v1")


@pytest.mark.slow
def test_the_server_of_this_package_can_be_the_judge(monkeypatch):
    """Its model says anything, so that no score is found in what it says; but it says it."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with running(WIDE) as server:
        changes = {"model": "tiny", "key_env": "JUDGE_KEY", "max_tokens": 24, "template": "{completion}"}
        nothing = score(manager(f"{server.url}/v1", 200.0, **changes, pattern="(no such text)"), ["a", "b"])
        refused = score(manager(f"{server.url}/v1", **changes | {"model": "other"}), ["a"])
    assert nothing.failures == {"judge/result": 2} and refused.failures == {"judge/error": 1}
