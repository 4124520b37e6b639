"""Preference losses against float64 NumPy written from the papers, against numbers worked by hand, and by what they promise."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algorithms import preference
from jrl.algorithms.presets import PREFERENCE_LOSSES

both = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
LOG2 = math.log(2)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


# The papers' formulas with probabilities in place of log-probabilities where they have these.
def dpo(w, lo, rw, rl, beta, e=0.0):
    p = (np.exp(w) / np.exp(rw) * np.exp(rl) / np.exp(lo)) ** beta
    p = p / (1 + p)  # that y_w is preferred
    return -(1 - e) * np.log(p) - e * np.log(1 - p)


REFERENCES = {
    "dpo": (preference.dpo, dpo, {"beta": 0.3}),
    "cdpo": (
        preference.dpo,
        lambda *a, beta, label_smoothing: dpo(*a, beta, label_smoothing),
        {"beta": 0.3, "label_smoothing": 0.1},
    ),
    "ipo": (
        preference.ipo,
        lambda w, lo, rw, rl, beta: (np.log(np.exp(w) * np.exp(rl) / (np.exp(lo) * np.exp(rw))) - 0.5 / beta) ** 2,
        {"beta": 0.3},
    ),
    "orpo": (
        preference.orpo,
        lambda w, lo, beta: -w - beta * np.log(sigmoid(np.log(np.exp(w) / (1 - np.exp(w)) / (np.exp(lo) / (1 - np.exp(lo)))))),
        {"beta": 0.3},
    ),
    "simpo": (
        preference.simpo,
        lambda w, lo, beta, gamma: -np.log(sigmoid(beta * w - beta * lo - gamma)),
        {"beta": 2.0, "gamma": 0.7},
    ),
}


def logprobs(count, seed=0):
    return [-np.random.default_rng((seed, i)).exponential(2.0, 50).astype(np.float32) - 0.01 for i in range(count)]


@both
@pytest.mark.parametrize("name", REFERENCES)
def test_losses_of_pairs_are_those_of_the_papers(name, compiled):
    fn, expected, options = REFERENCES[name]
    arrays = logprobs(4 if name in ("dpo", "cdpo", "ipo") else 2)
    call = functools.partial(fn, **options)
    loss, chosen, rejected = (jax.jit(call) if compiled else call)(*arrays)
    np.testing.assert_allclose(loss, expected(*(x.astype(np.float64) for x in arrays), **options), rtol=2e-5, atol=1e-6)
    # What the loss compares: the rewards' difference is its argument, so a larger one is a smaller loss (or nearer to IPO's gap).
    assert loss.shape == chosen.shape == rejected.shape == (50,)
    if name in ("dpo", "simpo"):
        order = np.argsort(chosen - rejected)
        assert (np.diff(np.asarray(loss)[order]) <= 1e-6).all()


@both
def test_kto_is_that_of_the_paper(compiled):
    logp, ref = logprobs(2)
    label = (np.arange(50) % 3 == 0).astype(np.float32)
    call = functools.partial(preference.kto, beta=0.3, desirable=1.3, undesirable=0.8)
    loss, rewards = (jax.jit(call) if compiled else call)(logp, ref, label, np.float32(0.4))
    ratio = logp.astype(np.float64) - ref
    value = np.where(label > 0, 1.3 * sigmoid(0.3 * (ratio - 0.4)), 0.8 * sigmoid(0.3 * (0.4 - ratio)))
    np.testing.assert_allclose(loss, np.where(label > 0, 1.3, 0.8) - value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rewards, 0.3 * ratio, rtol=1e-5)


def test_numbers_worked_by_hand():
    one = lambda *values: [np.array([v], np.float32) for v in values]  # noqa: E731
    near = functools.partial(pytest.approx, abs=1e-6)
    # h = (-1 - -2) - (-3 - -2) = 2; beta h = 1: -log sigmoid(1) = 0.3132617
    loss, chosen, rejected = preference.dpo(*one(-1, -3, -2, -2), 0.5)
    assert (loss[0], chosen[0], rejected[0]) == (near(0.3132617), near(0.5), near(-0.5))
    # 0.75 * 0.3132617 + 0.25 * 1.3132617
    assert preference.dpo(*one(-1, -3, -2, -2), 0.5, 0.25)[0][0] == near(0.5632617)
    assert preference.ipo(*one(-1, -3, -2, -2), 0.5)[0][0] == near(1.0)  # (2 - 1)^2
    assert preference.ipo(*one(-1, -3, -2, -2), 0.25)[0][0] == near(0.0)
    # odds of 1/2 are 1, of 1/5 1/4: -log(1/2) - log sigmoid(log 4) = log 2 + log(5/4)
    assert preference.orpo(*one(-LOG2, -math.log(5)), 1.0)[0][0] == near(LOG2 + math.log(1.25))
    assert preference.simpo(*one(-0.5, -1.5), 2.0, 2.0)[0][0] == near(LOG2)  # exactly at its margin
    # r - z = 0: half of the weight
    assert preference.kto(*one(-1, -2, 1), np.float32(1.0), 0.1, desirable=3.0)[0][0] == near(1.5)
    assert preference.kto(*one(-1, -2, 0), np.float32(1.0), 0.1, desirable=3.0)[0][0] == near(0.5)
    assert preference.bradley_terry(*one(2, 1, 1))[0] == near(LOG2)
    assert preference.bradley_terry(*one(2, 1, 1), centre=0.1)[0] == near(LOG2 + 0.9)
    assert preference.step_cross_entropy(*one(0, 0.3))[0] == near(LOG2)
    assert preference.mismatch_kl(*one(-1, -3)) == near(2.0) and preference.mismatch_kl(*one(-3, -1)) == 0


def test_at_the_reference_every_pair_counts_the_same():
    w, lo = logprobs(2)
    assert preference.dpo(w, lo, w, lo, 0.3)[0] == pytest.approx(np.full(50, LOG2), abs=1e-6)
    assert preference.ipo(w, lo, w, lo, 0.5)[0] == pytest.approx(np.ones(50), abs=1e-6)


GRADIENTS = {  # as the papers derive them, by the chosen and the rejected log-probability
    "dpo": (lambda w, lo: preference.dpo(w, lo, w - 0.5, lo + 0.5, 0.3)[0], lambda w, lo: -0.3 * sigmoid(-0.3)),
    "cdpo": (lambda w, lo: preference.dpo(w, lo, w - 0.5, lo + 0.5, 0.3, 0.1)[0], lambda w, lo: -0.3 * (sigmoid(-0.3) - 0.1)),
    "ipo": (lambda w, lo: preference.ipo(w, lo, w - 0.5, lo + 0.5, 0.3)[0], lambda w, lo: 2 * (1 - 1 / 0.6)),
    "simpo": (lambda w, lo: preference.simpo(w, lo, 2.0, 0.7)[0], lambda w, lo: -2 * sigmoid(-2 * (w - lo) + 0.7)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_push_the_chosen_up_and_the_rejected_down_by_as_much_and_leave_the_reference_alone(name):
    """The references are made of the policy's own numbers here: if they carried a gradient, it would be 0."""
    loss, expected = GRADIENTS[name]
    w, lo = logprobs(2)
    up, down = jax.grad(lambda a, b: loss(a, b).sum(), (0, 1))(jnp.asarray(w), jnp.asarray(lo))
    np.testing.assert_allclose(up, np.broadcast_to(expected(w.astype(np.float64), lo), 50), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(down, -np.asarray(up), rtol=1e-6)


def test_smoothed_labels_are_content_at_a_finite_gap_and_certain_ones_never():
    gaps = np.linspace(-20, 60, 4001, dtype=np.float32)
    zero = np.zeros_like(gaps)
    losses = {e: np.asarray(preference.dpo(gaps, zero, zero, zero, 0.3, e)[0]) for e in (0.0, 0.1)}
    best = gaps[losses[0.1].argmin()]
    assert sigmoid(0.3 * best) == pytest.approx(0.9, abs=2e-3)
    assert (np.diff(losses[0.0]) <= 0).all()


def test_extreme_log_probabilities_stay_finite():
    far = np.array([-1e4, -1e-9, 0.0, -1e4], np.float32)
    near = np.array([-1e-9, -1e4, 0.0, -1e4], np.float32)
    for fn in (lambda a, b: preference.orpo(a, b, 0.1)[0], lambda a, b: preference.simpo(a, b, 2.0, 0.5)[0],
               lambda a, b: preference.dpo(a, b, b, a, 0.1)[0], lambda a, b: preference.bradley_terry(a, b, 0 * a)):  # fmt: skip
        loss, gradients = fn(far, near), jax.grad(lambda a, b, fn=fn: fn(a, b).sum(), (0, 1))(far, near)
        assert np.isfinite(loss).all() and all(np.isfinite(g).all() for g in gradients)


def test_shapes_that_would_broadcast_are_refused():
    w, lo = logprobs(2)
    with pytest.raises(ValueError, match="rejected has shape"):
        preference.simpo(w, lo[:1], 2.0, 0.5)


def test_the_table_says_what_the_functions_take():
    for name, entry in PREFERENCE_LOSSES.items():
        parameters = inspect.signature(getattr(preference, name)).parameters
        assert set(entry.keys) <= parameters.keys()
        assert any(p.startswith("ref_") for p in parameters) == entry.reference
        assert ("rejected" in parameters) == entry.paired
