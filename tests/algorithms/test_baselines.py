"""Every advantage beside GRPO and GAE: by hand, against float64 loops over the formulas, and where it has to be exactly 0."""

import inspect

import jax
import numpy as np
import pytest

from jrl.algorithms import advantages as lib
from jrl.algorithms.advantages import decoupled_gae, gae, gdpo, gpg, grpo_passk, opo, remax, rloo, whitened_gae
from jrl.algorithms.advantages import reinforce_plus_plus as rfpp
from jrl.algorithms.advantages import reinforce_plus_plus_baseline as rfpp_baseline

RNG = np.random.default_rng(0)
IDS = RNG.permutation(np.repeat([1000, -1, 7, 0, 2], [1, 9, 2, 5, 7]))  # ragged groups of 1 to 9
VALID = RNG.random(24) < 0.85
REWARDS = RNG.integers(0, 4, 24).astype(np.float32) / 4  # with ties
REWARDS[IDS == 2] = 0.1  # a group of equal rewards whose mean rounds
LENS = RNG.integers(1, 9, 24)
MASK = (np.arange(12) >= 2) & (np.arange(12) < 2 + LENS[:, None]) & (np.arange(12) != 4)  # a tool token in between
FULL = MASK & VALID[:, None]


def by_groups(one):
    """out[i] = one(position in the group, its rewards, its lengths), over the valid responses, in float64."""
    out = np.zeros(24)
    for group in np.unique(IDS):
        rows = [i for i in range(24) if IDS[i] == group and VALID[i]]
        r, n = [float(REWARDS[i]) for i in rows], [int(LENS[i]) for i in rows]
        for place, i in enumerate(rows):
            out[i] = one(place, r, n) if len(rows) > 1 and len(set(r)) > 1 else 0.0
    return out


def spread(r):
    mean = sum(r) / len(r)
    return (sum((x - mean) ** 2 for x in r) / (len(r) - 1)) ** 0.5 + 1e-6


def best(place, r, _):
    first, second = sorted(r)[::-1][:2]
    return (first - second) / spread(r) if r[place] == first else 0.0


def taught_share():
    teaching = sum(len(set(REWARDS[(g == IDS) & VALID].tolist())) > 1 for g in IDS[VALID])
    return VALID.sum() / teaching


REFERENCES = {
    "rloo": (rloo, (), lambda i, r, n: r[i] - sum(x for j, x in enumerate(r) if j != i) / (len(r) - 1)),
    "opo": (opo, (LENS,), lambda i, r, n: r[i] - sum(x * w for x, w in zip(r, n, strict=True)) / sum(n)),
    "gpg": (gpg, (), lambda i, r, n: taught_share() * (r[i] - sum(r) / len(r))),
    "grpo_passk": (grpo_passk, (), best),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_response_is_compared_with_its_group(name):
    fn, more, one = REFERENCES[name]
    dirty = np.where(VALID, REWARDS, np.nan).astype(np.float32)
    got, expected = np.asarray(jax.jit(fn)(dirty, IDS, VALID, *more)), by_groups(one)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(fn(dirty, IDS, VALID, *more), expected, rtol=1e-4, atol=1e-5)
    assert (got[~VALID | (IDS == 1000) | (IDS == 2)] == 0).all() and np.count_nonzero(expected) >= 2
    # The negative control: the invalid responses' rewards would have counted.
    assert not np.allclose(fn(REWARDS, IDS, np.ones(24, bool), *more)[VALID], expected[VALID])


def test_by_hand():
    rewards, ids, valid = np.float32([1, 0, 0, 4, 2, 2]), np.array([0, 0, 0, 1, 1, 2]), np.ones(6, bool)
    np.testing.assert_allclose(rloo(rewards, ids, valid), [1, -0.5, -0.5, 2, -2, 0], rtol=1e-6)
    # Lengths 2, 1, 1 and 1, 3: baselines 2/4 and (4 + 6) / 4.
    np.testing.assert_allclose(opo(rewards, ids, valid, [2, 1, 1, 1, 3, 9]), [0.5, -0.5, -0.5, 1.5, -0.5, 0], rtol=1e-6)
    # 5 of 6 responses are in groups that teach.
    np.testing.assert_allclose(gpg(rewards, ids, valid), 1.2 * np.float32([2, -1, -1, 3, -3, 0]) / 3, rtol=1e-6)
    np.testing.assert_allclose(grpo_passk(rewards, ids, valid, False), [1, 0, 0, 2, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(grpo_passk(rewards, ids, valid), [3**0.5, 0, 0, 2**0.5, 0, 0], rtol=1e-5)
    two_best = np.float32([1, 1, 0, 4, 2, 2])
    assert not np.any(grpo_passk(two_best, ids, valid)[:3]) and grpo_passk(two_best, ids, valid)[3] > 0


# On tokens ------------------------------------------------------------------------------------------------------------


def whitened(x, mask=FULL):
    inside = x[mask]
    out = np.zeros(x.shape)
    out[mask] = (inside - inside.mean()) / np.sqrt(inside.var(ddof=1) + 1e-8)
    return out


TOKENS = np.where(MASK, RNG.normal(size=MASK.shape), np.nan).astype(np.float32)  # r_t, rubbish outside


def to_go(gamma, mask=FULL):
    out = np.zeros(mask.shape)
    for n, row in enumerate(mask):
        at = np.flatnonzero(row)
        for i, t in enumerate(at):
            out[n, t] = sum(gamma**k * float(TOKENS[n, u]) for k, u in enumerate(at[i:]))
    return out


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_whitens_the_reward_to_go(gamma):
    np.testing.assert_allclose(rfpp(TOKENS, FULL, gamma), whitened(to_go(gamma)), rtol=1e-3, atol=1e-4)
    assert not np.allclose(to_go(gamma), to_go(0.5)) and not np.allclose(rfpp(TOKENS, FULL, gamma), to_go(gamma), atol=0.1)


def test_reinforce_plus_plus_with_a_baseline():
    each = by_groups(lambda i, r, n: r[i] - sum(r) / len(r))
    expected = whitened(np.broadcast_to(each[:, None], FULL.shape))
    np.testing.assert_allclose(rfpp_baseline(REWARDS, IDS, VALID, FULL), expected, rtol=1e-3, atol=1e-4)
    # Whitened over tokens, of which long responses have more, and not over responses.
    assert (
        abs(expected[FULL].mean())
        < 1e-6
        < abs(np.mean([row[m].mean() for row, m in zip(expected, FULL, strict=True) if m.any()]))
    )


def test_remax_subtracts_the_greedy_reward():
    greedy = RNG.normal(size=24).astype(np.float32)
    expected = np.where(FULL, to_go(1.0) - greedy[:, None], 0)
    np.testing.assert_allclose(remax(TOKENS, greedy, FULL), expected, rtol=1e-4, atol=1e-5)
    by_hand = remax(np.float32([[0, 0, 3, 0]]), np.float32([1.0]), np.array([[False, True, True, False]]))
    np.testing.assert_array_equal(by_hand, [[0, 2, 2, 0]])


def test_gdpo_normalizes_each_reward_by_itself():
    small = RNG.integers(0, 3, 24).astype(np.float32) / 1000  # would be drowned in a sum
    parts, weights = {"right": REWARDS, "form": small}, {"right": 1.0, "form": 0.5}
    each = np.zeros(24)
    for name, weight in weights.items():
        for i in np.flatnonzero(VALID):
            r = [float(parts[name][j]) for j in range(24) if IDS[j] == IDS[i] and VALID[j]]
            each[i] += weight * (parts[name][i] - sum(r) / len(r)) / spread(r) if len(set(r)) > 1 else 0
    expected = whitened(np.broadcast_to(each[:, None], FULL.shape))
    got = gdpo(parts, weights, IDS, VALID, FULL)
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
    summed = lib.grpo(REWARDS + 0.5 * small, IDS, VALID)
    assert not np.allclose(whitened(np.broadcast_to(np.asarray(summed)[:, None], FULL.shape)), expected, atol=0.1)


# With a critic --------------------------------------------------------------------------------------------------------


def gae_sum(values, gamma, lams, mask=FULL):
    out = np.zeros(mask.shape)
    for n, row in enumerate(mask):
        at = np.flatnonzero(row)
        v = np.append(values[n, at].astype(float), 0)
        delta = [TOKENS[n, t] + gamma * v[i + 1] - v[i] for i, t in enumerate(at)]
        for i, t in enumerate(at):
            out[n, t] = sum((gamma * lams[n]) ** (j - i) * delta[j] for j in range(i, len(at)))
    return out


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_decoupled_gae_has_two_lambdas_and_adapts_the_policys(alpha):
    values = np.where(MASK, RNG.normal(size=MASK.shape), np.nan).astype(np.float32)
    counts = FULL.sum(axis=1)
    # alpha 1/2: of 1 token -1 and so 0, of 2 tokens 0, of 4 tokens 1/2, of 8 tokens 3/4
    lams = [min(max(1 - 1 / (alpha * max(n, 1)), 0), 1) if alpha else 0.8 for n in counts]
    assert not alpha or {0.0, 0.5} < set(lams)
    got = jax.jit(decoupled_gae, static_argnums=(3, 4, 5, 6))(TOKENS, values, FULL, 0.9, 0.8, 1.0, alpha)
    np.testing.assert_allclose(got[0], whitened(gae_sum(values, 0.9, lams)), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(got[1], np.where(FULL, gae_sum(values, 0.9, [1.0] * 24) + values, 0), rtol=1e-3, atol=1e-4)
    one = whitened_gae(TOKENS, values, FULL, 0.9, 0.8)
    np.testing.assert_allclose(one[0], whitened(gae_sum(values, 0.9, [0.8] * 24)), rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(one[1], gae(TOKENS, values, FULL, 0.9, 0.8)[1])
    assert not np.allclose(one[1], got[1], atol=0.01) and np.allclose(one[0], got[0]) == (not alpha)


def test_wrong_shapes_are_refused_rather_than_broadcast():
    for fn, name in ((rloo, "group_ids"), (gpg, "group_ids"), (grpo_passk, "group_ids")):
        with pytest.raises(ValueError, match=f"^{name} has shape"):
            fn(np.ones(3), np.zeros(2, int), np.ones(3, bool))
    with pytest.raises(ValueError, match="^lens has shape"):
        opo(np.ones(3), np.zeros(3, int), np.ones(3, bool), np.ones((3, 1)))
    with pytest.raises(ValueError, match="^greedy_rewards has shape"):
        remax(np.ones((2, 3)), np.ones(3), np.ones((2, 3), bool))


def test_every_function_names_its_source():
    public = [f for n, f in inspect.getmembers(lib, inspect.isfunction) if f.__module__ == lib.__name__ and n[0] != "_"]
    helpers = {"moments", "whiten", "reward_to_go", "whitened_gae"}
    assert all("arXiv" in f.__doc__ for f in public if f.__name__ not in helpers)
