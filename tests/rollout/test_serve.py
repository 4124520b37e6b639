"""The HTTP server, driven by the `openai` client: a real server on a socket, the tiny random model behind it.

A second engine with the same weights says what the answers must be.
"""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import numpy as np
import openai
import pytest

from jrl.models.hf import save_hf
from jrl.rollout.sampling import Sampling
from jrl.rollout.scheduler import Request
from jrl.rollout.service import EngineFailed
from jrl.serve.backend import Backend
from tests.serving import LONG, NARROW, WIDE, running, wait_for

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def wide():
    with running(WIDE) as it:
        yield it


@pytest.fixture(scope="module")
def narrow():
    with running(NARROW) as it:
        yield it


@pytest.fixture(scope="module")
def backend():
    return Backend(WIDE)


@pytest.fixture(scope="module")
def engine(backend):
    return backend.make_engine()


@pytest.fixture(scope="module")
def tokenizer(engine, backend):
    return backend.served.tokenizer


def generate(engine, tokens, samples=1, max_new_tokens=40, temperature=1.0, first_id=0, ignore_eos=False, **sampling):
    tokens, sampling = np.array(tokens, np.int32), Sampling(**sampling)
    asked = Request(tokens, samples, max_new_tokens, temperature, first_id, ignore_eos, sampling)
    return sorted(engine.generate([asked]), key=lambda c: c.sample)


def text_of(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True)


FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


# Answers are the engine's ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_tokens", [False, True])
def test_a_greedy_completion_is_the_engines(wide, engine, tokenizer, as_tokens):
    tokens = tokenizer(PROMPT)["input_ids"]
    want = generate(engine, tokens, temperature=0)[0]
    got = wide.client().completions.create(
        model="tiny", prompt=tokens if as_tokens else PROMPT, max_tokens=40, temperature=0, extra_body={"return_token_ids": True}
    )
    choice = got.choices[0]
    assert choice.token_ids == want.tokens.tolist() and choice.prompt_token_ids == tokens
    assert choice.token_versions == [0] * len(want.tokens) and got.system_fingerprint == "weights-0"
    assert choice.text == text_of(tokenizer, want.tokens) and choice.finish_reason == FINISH[want.stop_reason]
    assert choice.logprobs is None and (got.model, got.object) == ("tiny", "text_completion")
    n, c = len(tokens), len(want.tokens)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (n, c, n + c)


def test_samples_and_their_logprobs_are_the_engines(wide, engine, tokenizer):
    tokens = tokenizer(PROMPT)["input_ids"]
    options = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 10, "ignore_eos": False}
    shared = {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.1}
    got = wide.client().completions.create(
        model="tiny", prompt=[PROMPT, PROMPT], n=3, max_tokens=40, temperature=0.8, seed=70, logprobs=3, logit_bias={"100": 2.5},
        extra_body=options | {"return_token_ids": True}, **shared,
    )  # fmt: skip
    assert [c.index for c in got.choices] == list(range(6)) and got.usage.prompt_tokens == 2 * len(tokens)
    del options["ignore_eos"]
    for first, choices in ((70, got.choices[:3]), (73, got.choices[3:])):
        want = generate(engine, tokens, 3, 40, 0.8, first, logit_bias={100: 2.5}, best=3, **options, **shared)
        for choice, c in zip(choices, want, strict=True):
            assert choice.token_ids == c.tokens.tolist() and choice.text == text_of(tokenizer, c.tokens)
            np.testing.assert_allclose(choice.logprobs.token_logprobs, c.logprobs, atol=1e-5)
            assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(c.tokens)
            for row, best, logprob in zip(choice.logprobs.top_logprobs, c.best[1], c.logprobs, strict=True):
                np.testing.assert_allclose(sorted(row.values()), sorted({*best, logprob}), atol=1e-5)
    assert len({tuple(c.token_ids) for c in got.choices}) == 6


def test_a_chat_is_the_engines_answer_to_the_rendered_template(wide, engine, tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Grüß dich"}]}]
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüß dich<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    want = generate(engine, tokens, 2, 30, 1.0, 5, best=2)
    got = wide.client().chat.completions.create(
        model="tiny", messages=messages, n=2, max_completion_tokens=30, seed=5, logprobs=True, top_logprobs=2
    )
    assert got.object == "chat.completion" and got.usage.prompt_tokens == len(tokens)
    for choice, c in zip(got.choices, want, strict=True):
        assert choice.message.role == "assistant" and choice.message.content == text_of(tokenizer, c.tokens)
        assert choice.finish_reason == FINISH[c.stop_reason]
        rows = choice.logprobs.content
        np.testing.assert_allclose([row.logprob for row in rows], c.logprobs, atol=1e-5)
        np.testing.assert_allclose([[x.logprob for x in row.top_logprobs] for row in rows], c.best[1], atol=1e-5)
        alone = [tokenizer.convert_ids_to_tokens(int(t)) for t in c.tokens]
        plain = [(row.token, name) for row, name in zip(rows, alone, strict=True) if name and name.isascii() and "<" not in name]
        assert plain and all(token == name for token, name in plain)


def test_without_a_seed_two_requests_differ(wide):
    ask = lambda **seed: wide.client().completions.create(model="tiny", prompt="x", max_tokens=20, **seed).choices[0].text  # noqa: E731
    assert ask() != ask() and ask(seed=3) == ask(seed=3) != ask(seed=4)


def test_echo_gives_the_prompt_and_its_logprobs(wide, engine, tokenizer):
    tokens = tokenizer("Grüße")["input_ids"]
    want = generate(engine, tokens, 1, 4, 1.0, 9, prompt_logprobs=True)[0]
    ask = lambda **k: wide.client().completions.create(  # noqa: E731
        model="tiny", prompt="Grüße", echo=True, logprobs=0, seed=9, **k
    ).choices[0]  # fmt: skip
    got = ask(max_tokens=4)
    assert got.text == "Grüße" + text_of(tokenizer, want.tokens)
    assert got.logprobs.token_logprobs[0] is None
    np.testing.assert_allclose(got.logprobs.token_logprobs[1:], [*want.prompt_logprobs[1:], *want.logprobs], atol=1e-5)
    assert got.logprobs.text_offset[: len(tokens) + 1] == [0, 1, 2, 2, 3, 3, 4, 5] and got.logprobs.top_logprobs is None
    alone = ask(max_tokens=0)
    assert alone.text == "Grüße" and len(alone.logprobs.tokens) == len(tokens) and alone.finish_reason == "length"


# Streams ------------------------------------------------------------------------------------------------------------------


def test_a_streamed_completion_is_the_unstreamed_one_in_parts(wide):
    ask = {"model": "tiny", "prompt": PROMPT, "n": 2, "max_tokens": 60, "seed": 11, "logprobs": 3}
    ask |= {"extra_body": {"return_token_ids": True}}
    whole = wide.client().completions.create(**ask)
    events = list(wide.client().completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert events[-1].choices == [] and events[-1].usage == whole.usage and all(e.usage is None for e in events[:-1])
    assert len(events) > 2 * 60 / 4 / 2  # a part for every few tokens
    assert len({e.id for e in events}) == 1
    for choice in whole.choices:
        parts = [c for e in events for c in e.choices if c.index == choice.index]
        assert "".join(p.text for p in parts) == choice.text
        assert [t for p in parts for t in p.token_ids] == choice.token_ids
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for p in parts for x in getattr(p.logprobs, name)] == getattr(choice.logprobs, name), name
        assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]


def test_a_streamed_chat_is_the_unstreamed_one_in_whole_characters(wide, tokenizer):
    letter = tokenizer("é")["input_ids"]
    ask = {
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "seed": 2,
        "logit_bias": {str(t): 100 for t in letter}, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = wide.client().chat.completions.create(**ask).choices[0]
    events = list(wide.client().chat.completions.create(**ask, stream=True))
    deltas = [e.choices[0].delta for e in events]
    assert [d.role for d in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(d.content for d in deltas) == whole.message.content and events[-1].choices[0].finish_reason == "length"
    assert not any(e.usage for e in events)
    # Two bytes in any order: where they are the letter, the stream has not torn it.
    assert sum(d.content.count("é") for d in deltas) == whole.message.content.count("é") > 3


def test_stop_strings_end_the_text_before_them(wide, engine, tokenizer):
    tokens = tokenizer(PROMPT)["input_ids"]
    shared = {"logit_bias": {t: 100 for t in tokenizer("abcd")["input_ids"]}}  # so that the text is text
    want = generate(engine, tokens, 1, 60, 1.0, 4, True, **shared)[0]
    text = text_of(tokenizer, want.tokens)
    assert set(text) == set("abcd")
    stop = text[20:25]  # over several tokens
    ask = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "seed": 4, "stop": [stop, "never"]}
    ask |= {"logit_bias": {str(t): b for t, b in shared["logit_bias"].items()}}
    ask |= {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    got = wide.client().completions.create(**ask).choices[0]
    begin = text.index(stop)
    assert got.text == text[:begin] and got.finish_reason == "stop"
    assert got.token_ids == want.tokens[: begin + 5].tolist()  # what was sampled, the stop string included
    events = list(wide.client().completions.create(**ask, stream=True))
    assert "".join(e.choices[0].text for e in events) == got.text and events[-1].choices[0].finish_reason == "stop"
    late = wide.client().completions.create(**{**ask, "extra_body": {"ignore_eos": True, "min_tokens": 59}}).choices[0]
    assert len(late.text) > len(got.text)


# Refusals -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param", "part"),
    [
        ({"max_tokens": 81}, "max_tokens", "at most 80"),
        ({"prompt": "x" * 300}, "prompt", "at most 95"),
        ({"prompt": "x" * 50, "max_tokens": 50}, "prompt", "more than the 96"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": []}, "prompt", "0 samples"),
        ({"prompt": ["x", [1]]}, "prompt", "a list of texts"),
        ({"prompt": [1, 264]}, "prompt", "264 is no token"),
        ({"n": 7}, "n", "ask for 1 to 6"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"max_tokens": 0}, "max_tokens", "nothing to answer"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "numbers by token id"),
        ({"logit_bias": {"264": 1}}, "logit_bias", "is no token"),
        ({"stop": [""]}, "stop", "at least one character"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"stream_options": {"chunks": 1}}, "stream_options", "not supported"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_the_key(wide, change, param, part):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1} | change
    got = httpx.post(f"{wide.url}/v1/completions", json=body, headers={"Authorization": "Bearer secret"})
    error = got.json()["error"]
    assert got.status_code == 400 and error["type"] == "invalid_request_error" and error["param"] == param, error
    assert part in error["message"] and "\n" not in error["message"]


def test_other_mistakes_of_clients(wide):
    client = wide.client()
    with pytest.raises(openai.NotFoundError, match="tiny is"):
        client.completions.create(model="large", prompt="x")
    chat = lambda **k: client.chat.completions.create(model="tiny", max_tokens=1, **k)  # noqa: E731
    hi = [{"role": "user", "content": "hi"}]
    for more in ({"messages": []}, {"messages": [{"role": "tool", "content": "x"}]}, {"messages": hi, "top_logprobs": 1},
                 {"messages": hi, "tools": [{"type": "function", "function": {"name": "f"}}]},
                 {"messages": hi, "extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}):  # fmt: skip
        with pytest.raises(openai.BadRequestError):
            chat(**more)
    assert chat(messages=hi, extra_body={"tools": None, "chat_template_kwargs": {"enable_thinking": False}}).choices
    post = lambda body: httpx.post(  # noqa: E731
        f"{wide.url}/v1/completions", content=body, headers={"Authorization": "Bearer secret"}
    )
    for body in (b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"model":"tiny","prompt":"x","temperature":NaN}'):
        got = post(body)
        assert got.status_code == 400 and got.json()["error"]["message"], body[:20]
    assert httpx.get(f"{wide.url}/nowhere").json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{wide.url}/v1/completions", headers={"Authorization": "Bearer secret"}).status_code == 405


def test_the_key_is_wanted_for_everything_but_health_and_metrics(wide, narrow):
    with pytest.raises(openai.AuthenticationError) as caught:
        openai.OpenAI(base_url=f"{wide.url}/v1", api_key="secre", max_retries=0).models.list()
    assert caught.value.body["code"] == "invalid_api_key"
    for value in ("", "secret", "Bearer secrets", "Bearer s\xe9cret".encode()):
        headers = {"Authorization": value}
        for method, path in (("GET", "models"), ("POST", "completions"), ("POST", "chat/completions"), ("POST", "load_weights")):
            assert httpx.request(method, f"{wide.url}/v1/{path}", headers=headers).status_code == 401
    for path in ("health", "metrics"):
        assert httpx.get(f"{wide.url}/{path}").status_code == 200
    listed = wide.client().models.list().data
    assert [m.id for m in listed] == ["tiny"] and wide.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        wide.client().models.retrieve("other/model")
    assert narrow.client().models.list().data  # no key, none wanted


def test_before_the_weights_are_loaded_the_server_says_so(wide):
    assert wide.before.status_code == 503 and wide.before.json()["status"] == "loading"
    now = httpx.get(f"{wide.url}/health")
    assert now.status_code == 200 and now.json()["status"] == "ok"


def test_a_long_body_is_refused_whether_it_says_its_length_or_not(narrow):
    body = json.dumps({"model": "tiny", "prompt": "x" * 3000}).encode()

    def unannounced():
        for i in range(0, len(body), 500):
            yield body[i : i + 500]

    for content in (body, unannounced()):
        got = httpx.post(f"{narrow.url}/v1/completions", content=content)
        assert got.status_code == 413 and got.json()["error"]["code"] == "request_too_large"
    assert narrow.refused.status_code == 503  # before the weights were there; the next test needs the server idle
    assert narrow.idle()


def test_a_full_queue_is_a_429(narrow):
    client = narrow.client()
    first = client.completions.create(model="tiny", prompt="x", stream=True, **LONG)
    next(iter(first))  # it has the only slot
    second = client.completions.create(model="tiny", prompt="y", stream=True, **LONG)  # waits for it
    wait_for(lambda: narrow.figures()["jrl_requests_waiting"] == 1)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="tiny", prompt="z", max_tokens=1)
    assert caught.value.response.headers["Retry-After"] == "1" and caught.value.body["code"] == "queue_full"
    first.close()
    second.close()
    wait_for(narrow.idle)
    assert client.completions.create(model="tiny", prompt="z", max_tokens=1).usage.completion_tokens == 1


def test_a_crowd_that_comes_at_once_does_not_get_past_the_limit(narrow):
    wait_for(narrow.idle)
    body = {"model": "tiny", "prompt": "x" * 1000, "max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(12) as pool:
        codes = list(pool.map(lambda _: httpx.post(f"{narrow.url}/v1/completions", json=body, timeout=60).status_code, range(12)))
    assert {200, 429} == set(codes) and 1 <= codes.count(200) < 12
    wait_for(narrow.idle)


# Clients that go, clients together ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_pages(narrow, stream):
    wait_for(narrow.idle)
    before = narrow.figures()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    if stream:
        with httpx.stream("POST", f"{narrow.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()  # which closes the response when nobody holds it any more
            next(lines)
            wait_for(lambda: narrow.figures()['jrl_pages{state="used"}'] > 0)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{narrow.url}/v1/completions", json=body, timeout=httpx.Timeout(0.3))
    wait_for(narrow.idle)
    after = narrow.figures()
    made = after["jrl_generated_tokens_total"] - before["jrl_generated_tokens_total"]
    assert 0 < made < 2000  # it did not run to its end
    name = 'jrl_requests_total{endpoint="completions",outcome="disconnected"}'
    wait_for(lambda: narrow.figures().get(name, 0) == before.get(name, 0) + 1)
    total = sum(after[f'jrl_pages{{state="{s}"}}'] for s in ("free", "used", "cached"))
    assert total == narrow.server.service.engine.scheduler.replicas[0].pages.num_pages - 1


def test_clients_at_once_get_what_each_would_get_alone(wide, engine, tokenizer):
    def ask(i):
        stream = wide.client().completions.create(model="tiny", prompt=PROMPT[: 4 + i], max_tokens=50, seed=100 * i, stream=True)
        return "".join(event.choices[0].text for event in stream)

    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(ask, range(6)))
    for i, text in enumerate(got):
        want = generate(engine, tokenizer(PROMPT[: 4 + i])["input_ids"], 1, 50, 1.0, 100 * i)[0]
        assert text == text_of(tokenizer, want.tokens)
    wait_for(wide.idle)


# Figures, weights, the end ----------------------------------------------------------------------------------------------------


def test_metrics(wide):
    before = wide.figures()
    long = "The same beginning, long enough for whole pages; as said, whole pages."
    for _ in range(2):
        wide.client().completions.create(model="tiny", prompt=long, max_tokens=7, extra_body={"ignore_eos": True})
    wait_for(wide.idle)
    now = wide.figures()
    more = lambda name: now[name] - before.get(name, 0)  # noqa: E731
    assert more("jrl_prompt_tokens_total") == 2 * len(long) and more("jrl_generated_tokens_total") == 14
    assert more("jrl_prefix_cache_hit_tokens_total") == 64
    assert more("jrl_time_to_first_token_seconds_count") == 2
    assert more('jrl_request_seconds_count{endpoint="completions"}') == 2
    assert more('jrl_requests_total{endpoint="completions",outcome="200"}') == 2
    assert now['jrl_pages{state="cached"}'] > 0 and now['jrl_pages{state="used"}'] == 0
    assert "# TYPE jrl_pages gauge" in httpx.get(f"{wide.url}/metrics").text


def test_new_weights_are_served_from_the_next_token_on(wide, narrow, engine, backend, tokenizer, tmp_path):
    arch, old = backend._arch, engine.params
    new = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), old)
    for name, params in (("new", new), ("old", old)):
        save_hf(tmp_path / name, arch, params)
    headers = {"Authorization": "Bearer secret"}
    load = lambda **body: httpx.post(f"{wide.url}/v1/load_weights", json=body, headers=headers, timeout=60)  # noqa: E731
    ask = lambda: wide.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)  # noqa: E731
    before = ask()
    assert load(path=str(tmp_path / "new"), version=5).json() == {"version": 5}
    engine.load(new, 5)
    want = generate(engine, tokenizer(PROMPT)["input_ids"], 1, 20, 0.0)[0]
    after = ask()
    assert after.choices[0].text == text_of(tokenizer, want.tokens) != before.choices[0].text
    assert after.system_fingerprint == "weights-5" and wide.figures()["jrl_weights_version"] == 5
    (tmp_path / "bad").mkdir()
    (tmp_path / "cut").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "cut" / file).write_bytes((tmp_path / "new" / file).read_bytes()[:2000])
    other = json.loads((tmp_path / "new" / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(other))
    faults = {"nowhere": "no such directory", "bad": "no config.json", "cut": "cannot be read", "other": "num_layers"}
    for name, part in faults.items():
        got = load(path=str(tmp_path / name), version=9)
        assert got.status_code == 400 and part in got.json()["error"]["message"], got.text
    assert load(path=str(tmp_path / "old"), version=5).json()["error"]["param"] == "version"
    assert load(path=str(tmp_path / "old"), version=6).status_code == 200
    engine.load(old, 6)
    assert ask().choices[0].text == before.choices[0].text
    assert httpx.post(f"{narrow.url}/v1/load_weights", json={"path": "x", "version": 1}).status_code == 404  # not asked for


def test_an_engine_that_fails_is_told_to_everybody():
    with running(NARROW) as it:
        stream = it.client().completions.create(model="tiny", prompt="x", stream=True, **LONG)
        next(iter(stream))
        with pytest.raises(EngineFailed, match="the weights cannot be served: KeyError"):
            asyncio.run_coroutine_threadsafe(it.server.service.load({"no": "weights"}, 1), it.loop).result(30)
        with pytest.raises(openai.APIError, match="internal error"):
            list(stream)
        with pytest.raises(openai.InternalServerError):
            it.client().completions.create(model="tiny", prompt="x")
        health = httpx.get(f"{it.url}/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
