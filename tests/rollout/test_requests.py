"""What requests may ask for, through the whole engine; and a storm of them, against a dense model of whole sequences."""

import dataclasses

import jax
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rollout.sampling import Sampling
from jrl.rollout.scheduler import Request
from tests import dense
from tests.rollout.test_engine import prompt
from tests.test_invariants import ARCH, EOS, make_engine, make_params

VOCAB = ARCH.vocab_size


def text_of(tokens):
    return "".join(chr(32 + t % 90) for t in tokens)


@pytest.fixture(scope="module")
def engine():
    return make_engine(decode_text=text_of, slots=8)


@pytest.fixture(scope="module")
def params():
    return dense.float64(make_params())


def ask(length=9, samples=1, new=16, temperature=1.0, first_id=0, ignore_eos=True, **sampling):
    return Request(prompt(length), samples, new, temperature, first_id, ignore_eos, Sampling(**sampling))


def one(engine, request):
    (completion,) = engine.generate([request])
    return completion


def logprobs_after(params, request, tokens):
    """f64[C, V] at the request's temperature: what the dense model expects before each token of a response."""
    out = dense.next_token_logprobs(ARCH, params, np.append(request.tokens, tokens), request.temperature or 1.0)
    return out[len(request.tokens) - 1 : len(request.tokens) - 1 + len(tokens)]


def test_requests_of_all_kinds_share_a_batch_and_none_changes_another(engine):
    kinds = [
        ask(first_id=0), ask(first_id=1, top_k=3), ask(first_id=2, top_p=0.3), ask(first_id=3, min_p=0.5), ask(first_id=4),
        ask(first_id=5, repetition_penalty=2.0), ask(first_id=6, logit_bias={7: 50.0}), ask(first_id=7, temperature=0.0),
    ]  # fmt: skip
    together = sorted(engine.generate(kinds), key=lambda c: c.request)
    for i, request in enumerate(kinds):
        alone = one(engine, request)
        np.testing.assert_array_equal(together[i].tokens, alone.tokens, err_msg=str(i))
        np.testing.assert_allclose(together[i].sampler_logprobs, alone.sampler_logprobs, atol=1e-4)
    assert (together[6].tokens == 7).all() and len({c.tokens.tobytes() for c in together}) == len(kinds)


def test_logprobs_are_the_learners_and_sampler_logprobs_those_of_the_cut_distribution(engine, params):
    request = ask(temperature=0.7, top_k=4, samples=6, new=12)
    for c in engine.generate([request]):
        logp = logprobs_after(params, request, c.tokens)
        chosen = np.take_along_axis(logp, c.tokens[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(c.logprobs, chosen, atol=1e-4)
        best = np.sort(logp, axis=1)[:, -4:]
        assert (chosen >= best[:, 0] - 1e-5).all()
        np.testing.assert_allclose(c.sampler_logprobs, chosen - np.log(np.exp(best).sum(axis=1)), atol=1e-3)
        assert (c.sampler_logprobs > c.logprobs).all()


def test_top_k_of_one_is_greedy_at_any_temperature(engine):
    greedy = one(engine, ask(temperature=0.0))
    np.testing.assert_array_equal(one(engine, ask(temperature=1.5, top_k=1)).tokens, greedy.tokens)
    assert (one(engine, ask(temperature=1.5)).tokens != greedy.tokens).any()


def test_allowed_tokens_and_min_tokens(engine):
    allowed = (5, 9, 200, EOS[0])
    c = one(engine, ask(new=12, allowed_tokens=allowed, ignore_eos=False, min_tokens=6))
    assert set(c.tokens.tolist()) <= set(allowed) and len(c.tokens) >= 6
    soon = [one(engine, ask(new=12, allowed_tokens=allowed, ignore_eos=False, first_id=i)) for i in range(6)]
    assert min(len(c.tokens) for c in soon) < 6


def test_a_stop_string_ends_the_response_with_the_token_that_completes_it(engine):
    free = one(engine, ask())
    stop = text_of(free.tokens[3:6])  # over the border of a decode call, which makes 5 tokens
    c = one(engine, ask(stop=stop))
    end = next(n for n in range(1, 17) if stop in text_of(free.tokens[:n]))
    assert (c.stop_reason, len(c.tokens)) == ("stop", end) and end <= 6
    np.testing.assert_array_equal(c.tokens, free.tokens[:end])
    assert len(c.logprobs) == len(c.versions) == end
    never = one(engine, ask(stop="no such text"))
    assert never.stop_reason == "length" and len(never.tokens) == 16


def test_stop_ids_end_a_response_even_where_the_eos_is_ignored(engine):
    free = one(engine, ask())
    c = one(engine, ask(stop_ids=(int(free.tokens[7]),)))
    assert c.stop_reason == "stop" and len(c.tokens) == free.tokens.tolist().index(free.tokens[7]) + 1


def test_the_likeliest_tokens_and_their_logprobs(engine, params):
    request = ask(best=3, temperature=0.8)
    c = one(engine, request)
    logp = logprobs_after(params, request, c.tokens)
    tokens, logprobs = c.best
    assert tokens.shape == logprobs.shape == (16, 3)
    np.testing.assert_allclose(logprobs, -np.sort(-logp, axis=1)[:, :3], atol=1e-4)
    np.testing.assert_allclose(logprobs, np.take_along_axis(logp, tokens, axis=1), atol=1e-4)
    assert one(engine, ask()).best is None


@pytest.mark.parametrize("length", [1, 9, 40])
def test_prompt_logprobs(engine, params, length):
    request = ask(length, new=2, prompt_logprobs=True)
    c = one(engine, request)
    logp = dense.next_token_logprobs(ARCH, params, request.tokens, 1.0)
    assert np.isnan(c.prompt_logprobs[0]) and len(c.prompt_logprobs) == length
    expected = np.take_along_axis(logp[: length - 1], request.tokens[1:, None], axis=1)[:, 0]
    np.testing.assert_allclose(c.prompt_logprobs[1:], expected, atol=1e-4)
    assert one(engine, ask(length, new=2)).prompt_logprobs is None


@pytest.mark.parametrize(
    ("sampling", "says"),
    [({"top_p": 0.0}, "top_p=0.0"), ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"), ({"allowed_tokens": ()}, "allowed_tokens")],
)
def test_what_no_sampler_can_do_is_refused_and_nothing_of_the_call_is_queued(engine, sampling, says):
    with pytest.raises(UserError, match=f"request .*{says}"):
        engine.submit([ask(), ask(**sampling)])
    assert engine.idle
    with pytest.raises(UserError, match="no tokenizer"):
        make_engine().submit([ask(stop="x")])


def test_a_deadline_ends_what_is_under_way_and_leaves_the_rest(engine):
    tickets = engine.submit([dataclasses.replace(ask(new=40, samples=2), deadline_s=0.0), ask(new=8)])
    done = []
    while not engine.idle:
        done += engine.step()
    late = [c for c in done if c.request == tickets[0]]
    assert [c.stop_reason for c in late] == ["aborted"] * 2 and all(len(c.tokens) < 40 for c in late)
    assert [len(c.tokens) for c in done if c.request == tickets[1]] == [8]


def test_what_is_under_way_can_be_watched_and_aborted(engine):
    whole = one(engine, ask(new=30))
    tickets = engine.submit([ask(new=30), ask(length=11, new=30, first_id=1)])
    engine.step()
    seen = {c.request: c for c in engine.running()}
    assert seen.keys() == set(tickets) and seen[tickets[0]].stop_reason == ""
    np.testing.assert_array_equal(seen[tickets[0]].tokens, whole.tokens[:5])
    (gone,) = engine.abort(tickets[:1])
    assert gone.request == tickets[0] and gone.stop_reason == "aborted" and len(gone.tokens) == 5
    left = []
    while not engine.idle:
        left += engine.step()
    assert [c.request for c in left] == tickets[1:] and len(left[0].tokens) == 30


def test_new_weights_under_way_are_told_token_by_token(engine):
    before = one(engine, ask(new=20))
    old = engine.params
    engine.submit([ask(new=20)])
    engine.step()
    engine.load(jax.tree.map(lambda x: x * 0.9, old), 8, under_way=True)
    done = []
    while not engine.idle:
        done += engine.step()
    engine.load(old, 3)
    (c,) = done
    assert c.versions.tolist() == [3] * 5 + [8] * 15
    np.testing.assert_array_equal(c.tokens[:5], before.tokens[:5])
    assert (c.tokens != before.tokens).any()
    again = one(engine, ask(new=20))  # nothing that the other weights have cached is used
    np.testing.assert_array_equal(again.tokens, before.tokens)


def test_a_storm(params):
    """Shared beginnings, preemptions, aborts, new weights: every token that is told has the learner's logprob."""
    engine = make_engine(num_pages=12, slots=6)
    rng, asked, done = np.random.default_rng(5), {}, []
    weights, version = {3: engine.params}, 3
    beginnings = [prompt(17, 1), prompt(8, 2)]
    for _ in range(50):
        if rng.random() < 0.7:
            begin = beginnings[rng.integers(2)][: rng.integers(1, 18)]
            tokens = np.append(begin, rng.integers(3, 260, rng.integers(0, 6))).astype(np.int32)
            how = {"temperature": float(rng.choice([0.0, 0.7, 1.2])), "ignore_eos": bool(rng.integers(2))}
            samples, new, first_id = (int(rng.integers(1, most)) for most in (5, 30, 1 << 30))
            request = Request(tokens, samples, new, first_id=first_id, **how)
            asked |= dict(zip(engine.submit([request]), [request], strict=True))
        if rng.random() < 0.1 and asked:
            done += engine.abort([max(asked)])
        if rng.random() < 0.05:
            version += 1
            scale = 1 + 0.02 * version
            weights[version] = jax.tree.map(lambda x, scale=scale: x * scale, weights[3])
            engine.load(weights[version], version, under_way=True)
        done += engine.step()
    while not engine.idle:
        done += engine.step()
    assert sorted((c.request, c.sample) for c in done) == [(t, i) for t, r in asked.items() for i in range(r.samples)]
    assert engine.stats.preemptions > 3 and engine.stats.hit_tokens > 50 and version > 3
    pages = engine.scheduler.replicas[0].pages
    assert pages.used == 0 and any(c.stop_reason == "aborted" for c in done)
    exact = {v: dense.float64(w) for v, w in weights.items()}
    pure = [c for c in done if len(c.tokens) and len(set(c.versions.tolist())) == 1]
    assert len(pure) > 40
    for c in pure:
        request = asked[c.request]
        logp = logprobs_after(exact[int(c.versions[0])], request, c.tokens)
        np.testing.assert_allclose(c.logprobs, np.take_along_axis(logp, c.tokens[:, None], axis=1)[:, 0], atol=1e-4)
    other = logprobs_after(exact[version], asked[pure[0].request], pure[0].tokens)
    assert np.abs(np.take_along_axis(other, pure[0].tokens[:, None], axis=1)[:, 0] - pure[0].logprobs).max() > 1e-3
