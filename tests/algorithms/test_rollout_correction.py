"""Truncated importance weights by hand, against NumPy, and what the policy loss makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algorithms.rollout_correction import (
    LEVELS,
    effective_sample_size,
    log_ratios,
    mismatch,
    rejection_mask,
    truncated_importance_weights,
)
from jrl.config import default_config, with_preset
from jrl.errors import UserError
from jrl.losses import finish, policy_loss

both = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])


@both
def test_weights_by_hand(compiled):
    # The learner finds a token 1, 1.5, 4 and 0.25 times as likely as the rollout did; twice is the most.
    old = np.log(np.array([[0.2, 0.3, 0.8, 0.1]], np.float32))
    rollout = np.log(np.array([[0.2, 0.2, 0.2, 0.4]], np.float32))
    fn = jax.jit(truncated_importance_weights, static_argnums=2) if compiled else truncated_importance_weights
    weights, truncated = fn(old, rollout, 2.0)
    np.testing.assert_allclose(weights, [[1.0, 1.5, 2.0, 0.25]], rtol=1e-6)
    assert np.asarray(truncated).tolist() == [[False, False, True, False]]
    assert weights.dtype == jnp.float32


def test_uncapped_weights_turn_means_over_the_rollout_into_means_over_the_learner():
    rng = np.random.default_rng(0)
    rollout, old = (rng.dirichlet(np.ones(8)) for _ in range(2))
    value = rng.standard_normal(8)
    log = lambda p: np.log(p)[None].astype(np.float32)  # noqa: E731
    means = [
        rollout @ (np.asarray(truncated_importance_weights(log(old), log(rollout), cap)[0][0]) * value) for cap in (1e9, 1.0)
    ]
    assert means[0] == pytest.approx(old @ value, rel=1e-5)
    assert means[1] != pytest.approx(old @ value, rel=1e-2)  # the bias that the cap costs


def test_no_gradient_flows_and_far_ratios_stay_finite():
    old, rollout = np.float32([[-1.0, -2.0]]), np.float32([[-1.5, -1.0]])
    total = lambda *x: truncated_importance_weights(*x, 2.0)[0].sum()  # noqa: E731
    for gradient in jax.grad(total, argnums=(0, 1))(old, rollout):
        assert not np.any(gradient)
    weights, _ = truncated_importance_weights(np.float32([[0.0, -500.0]]), np.float32([[-500.0, 0.0]]), 1e30)
    np.testing.assert_allclose(weights, [[np.exp(20.0), np.exp(-20.0)]], rtol=1e-5)
    with pytest.raises(ValueError, match=r"^rollout_logprobs has shape \(2,\)"):
        truncated_importance_weights(old, rollout[0], 2.0)


def loss_of(cap, logprobs, **columns):
    """(total, gradient by the logprobs, metrics) of the policy loss of one row of tokens."""
    algorithm = with_preset(default_config()).algorithm
    algorithm.rollout_is_cap = cap
    columns = {name: np.float32([[x]]) for name, x in columns.items()}
    packed = type("Packed", (), {"columns": columns})
    forward = type("Forward", (), {"logprobs": lambda self, params, packed: (params, jnp.zeros_like(params))})()
    call = jax.value_and_grad(lambda p: policy_loss(algorithm)(forward, p, packed), has_aux=True)
    (total, metrics), gradient = call(np.float32([[logprobs]]))
    return float(total), gradient[0, 0], {name: float(x) for name, x in metrics.items()}


@pytest.mark.parametrize("separate", [True, False], ids=["old logprobs", "one update"])
def test_the_policy_gradient_of_each_token_is_weighted(separate):
    old, rollout = np.log([0.2, 0.3, 0.8, 0.1]), np.log([0.2, 0.2, 0.2, 0.4])
    advantages, weight, share = [1.0, -2.0, 1.0, 3.0], [0.25] * 4, [1 / 3, 1 / 3, 1 / 3, 0.0]
    given = {"advantages": advantages, "weight": weight, "share": share, "rollout_logprobs": rollout}
    given |= {"old_logprobs": old} if separate else {}
    total, gradient, metrics = loss_of(2.0, old, **given)
    by_hand = -0.25 * np.array([1.0 * 1.0, 1.5 * -2.0, 2.0 * 1.0, 0.25 * 3.0])  # the ratio of the update is 1
    assert total == pytest.approx(by_hand.sum(), rel=1e-5) == metrics["pg_loss"]
    np.testing.assert_allclose(gradient, by_hand, rtol=1e-5)
    # Means over the tokens with a share, of which one of three is truncated.
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((1 + 1.5 + 2) / 3, rel=1e-5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3, rel=1e-5)
    plain, unweighted, reported = loss_of(0.0, old, **given)
    np.testing.assert_allclose(unweighted, -0.25 * np.array(advantages), rtol=1e-5)
    assert plain != pytest.approx(total) and not any("rollout_is" in name for name in reported)


# Levels, bounds, metrics --------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(1)
MASK = (np.arange(6) < np.array([[6], [1], [3], [0]])) & (np.arange(6) != 2)
OLD = -RNG.exponential(size=MASK.shape).astype(np.float32)
ROLLOUT = OLD - (RNG.normal(0, 0.1, MASK.shape) + [[0.25], [-0.5], [0.1], [0.0]]).astype(np.float32)


def ratios(level):
    """rho of every token in float64, row by row."""
    out = np.ones(MASK.shape)
    for n, row in enumerate(MASK):
        d = [float(OLD[n, t]) - float(ROLLOUT[n, t]) for t in np.flatnonzero(row)]
        whole = np.sum(d) if level == "sequence" else np.mean(d or [0])
        for t in range(6):
            out[n, t] = np.exp(float(OLD[n, t]) - float(ROLLOUT[n, t]) if level == "token" else whole)
    return out


@both
@pytest.mark.parametrize("level", LEVELS)
def test_weights_and_rejection_at_every_level(compiled, level):
    variant = (lambda fn, *static: jax.jit(fn, static_argnums=static)) if compiled else (lambda fn, *static: fn)
    rho = ratios(level)
    weights, truncated = variant(truncated_importance_weights, 2, 3)(OLD, ROLLOUT, 1.2, level, MASK)
    np.testing.assert_allclose(weights[MASK], np.minimum(rho, 1.2)[MASK], rtol=1e-4)
    np.testing.assert_array_equal(np.asarray(truncated)[MASK], (rho > 1.2)[MASK])
    keep = np.asarray(variant(rejection_mask, 2, 3, 4)(OLD, ROLLOUT, level, 0.8, 1.2, MASK))
    np.testing.assert_array_equal(keep[MASK], ((rho >= 0.8) & (rho <= 1.2))[MASK])
    assert 0 < keep[MASK].sum() < MASK.sum() and np.asarray(truncated)[MASK].sum() > 0
    if level != "token":  # one number a row
        assert all(len(set(np.asarray(weights)[n, row].tolist())) <= 1 for n, row in enumerate(MASK))
        dirty = np.where(MASK, OLD, OLD + 5)  # tool tokens and padding do not count
        np.testing.assert_array_equal(truncated_importance_weights(dirty, ROLLOUT, 1.2, level, MASK)[0][MASK], weights[MASK])


def test_levels_by_hand():
    old, rollout, mask = np.log([[0.4, 0.2]]), np.log([[0.2, 0.1]]), np.ones((1, 2), bool)  # each token twice as likely
    exp = lambda level: np.exp(log_ratios(old, rollout, level, mask))  # noqa: E731
    for level, rho in (("token", 2), ("sequence", 4), ("geometric", 2)):
        np.testing.assert_allclose(exp(level), [[rho, rho]], rtol=1e-6)
    with pytest.raises(UserError, match="use one of token, sequence, geometric"):
        log_ratios(old, rollout, "batch", mask)


def test_uncapped_sequence_weights_are_unbiased_and_the_others_are_not():
    """Two tokens of a vocabulary of three, the second depending on the first: means over sequences, exactly."""
    behaviour, target = RNG.dirichlet(np.ones(3), (4,)), RNG.dirichlet(np.ones(3), (4,))  # first token, then after each
    pairs = [(a, b) for a in range(3) for b in range(3)]
    value, ones = RNG.normal(size=9), np.ones((9, 2), bool)
    log = lambda p: np.log([[p[0, a], p[1 + a, b]] for a, b in pairs]).astype(np.float32)  # noqa: E731
    chance = lambda p: np.exp(log(p).sum(axis=1))  # noqa: E731
    truth = chance(target) @ value
    for level in LEVELS:
        rho = np.asarray(truncated_importance_weights(log(target), log(behaviour), 1e9, level, ones)[0])[:, 1]
        assert (chance(behaviour) @ (rho * value) == pytest.approx(truth, rel=1e-4)) == (level == "sequence")


def test_effective_sample_size_by_hand():
    share = np.full((2, 2), 0.25)
    assert float(effective_sample_size(np.full((2, 2), 3.0), share)) == pytest.approx(1)
    assert float(effective_sample_size([[4.0, 0], [0, 0]], share)) == pytest.approx(1 / 4)
    assert float(effective_sample_size(np.zeros((2, 2)), share)) == 0


def test_mismatch_metrics_equal_the_loops():
    by_token, by_sequence = mismatch(OLD, ROLLOUT, MASK)
    d = OLD.astype(float) - ROLLOUT
    expected = {"kl": -d, "k3_kl": np.exp(d) - 1 - d, "logprob_abs_diff": np.abs(d), "chi2_token": np.exp(2 * d) - 1}
    assert by_token.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(by_token[name], values, rtol=1e-3, atol=1e-6)
    for n, row in enumerate(MASK):
        if not row.any():
            continue
        whole = {
            "chi2_seq": np.exp(2 * d[n, row].sum()) - 1, "training_ppl": np.exp(-OLD[n, row].mean()),
            "rollout_ppl": np.exp(-ROLLOUT[n, row].mean()), "log_ppl_abs_diff": abs(d[n, row].mean()),
        }  # fmt: skip
        assert by_sequence.keys() == whole.keys()
        for name, value in whole.items():
            np.testing.assert_allclose(by_sequence[name][n], value, rtol=1e-3)
    assert not any(np.any(x) for x in mismatch(OLD, OLD, MASK)[0].values())  # the negative control


def test_the_mean_of_chi_square_and_kl_over_the_rollout_are_what_they_are_called():
    p, q = RNG.dirichlet(np.ones(8)), RNG.dirichlet(np.ones(8))  # the learner's and the rollout's
    by_token, _ = mismatch(np.log(p)[None], np.log(q)[None], np.ones((1, 8), bool))
    mean = {name: float(q @ np.asarray(x)[0]) for name, x in by_token.items()}
    kl = np.sum(q * np.log(q / p))
    assert mean["kl"] == pytest.approx(kl, rel=1e-4) and mean["k3_kl"] == pytest.approx(kl, rel=1e-4)
    assert mean["chi2_token"] == pytest.approx(np.sum((p - q) ** 2 / q), rel=1e-4)


# In the loss ------------------------------------------------------------------------------------------------------------


def corrected(rows_weight=0.1, **settings):
    """(gradient by the logprobs, metrics) of the policy loss on the rows above, the policy being the old one."""
    algorithm = with_preset(default_config()).algorithm
    algorithm.update(settings)
    weight = np.where(MASK, rows_weight, 0).astype(np.float32)
    columns = {"advantages": np.ones(MASK.shape), "weight": weight, "share": MASK / MASK.sum(), "old_logprobs": OLD}
    columns |= {"rollout_logprobs": ROLLOUT}
    packed = type("Packed", (), {"columns": {name: np.float32(x)[None] for name, x in columns.items()}})
    forward = type("Forward", (), {"logprobs": lambda self, params, packed: (params, jnp.zeros_like(params))})()
    gradient, metrics = jax.grad(lambda p: policy_loss(algorithm)(forward, p, packed), has_aux=True)(OLD[None])
    return np.asarray(gradient[0]), finish({name: float(x) for name, x in metrics.items()})


@pytest.mark.parametrize("level", LEVELS)
def test_truncation_and_masking_in_the_loss(level):
    """w and the bounds at each level, with the denominators of all tokens: a masked token counts and is 0."""
    gradient, metrics = corrected(rollout_is_cap=1.3, rollout_is=level, rollout_rs=level, rollout_rs_low=0.7, rollout_rs_high=1.4)
    rho = ratios(level)
    keep = (rho >= 0.7) & (rho <= 1.4)
    np.testing.assert_allclose(gradient[MASK], -0.1 * (np.minimum(rho, 1.3) * keep)[MASK], rtol=1e-4)
    assert not np.any(gradient[~MASK]) and 0 < keep[MASK].sum() < MASK.sum()
    capped = np.minimum(rho, 1.3)[MASK]
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(capped.mean() ** 2 / (capped**2).mean(), rel=1e-4)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - keep[MASK].mean(), rel=1e-4)
    np.testing.assert_allclose(corrected()[0][MASK], -0.1, rtol=1e-5)  # without any of it


def test_three_policies_meet_in_the_decoupled_objective():
    """-w min(r A, clip(r) A) with w = proximal / behaviour and r = current / proximal, by hand."""
    behaviour, proximal, current = np.log([0.2, 0.2, 0.2]), np.log([0.3, 0.1, 0.3]), np.log([0.45, 0.1, 0.31])
    given = {"advantages": [1.0, 1.0, -2.0], "weight": [1.0] * 3, "share": [1 / 3] * 3}
    given |= {"rollout_logprobs": behaviour, "old_logprobs": proximal}
    total, gradient, _ = loss_of(2.0, current, **given)
    r = np.exp(current - proximal)  # 1.5 is clipped at 1.2
    by_hand = 1.5 * -1.2 + 0.5 * -1.0 + 1.5 * 2 * r[2]
    assert total == pytest.approx(by_hand, rel=1e-5)
    np.testing.assert_allclose(gradient, [0, -0.5, 1.5 * 2 * r[2]], rtol=1e-5)
    # The negative control: with the behaviour policy as the proximal one the clip is elsewhere.
    coupled, _, _ = loss_of(0.0, current, **(given | {"old_logprobs": behaviour}))
    assert coupled == pytest.approx(-1.2 - 0.5 + 2 * 1.55, rel=1e-5) and abs(coupled - total) > 0.1
