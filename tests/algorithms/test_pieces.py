"""The tables of algorithms: every name leads to a function, every choice is read, what does not fit is refused in a line."""

import inspect

import numpy as np
import pytest

from jrl.algorithms import pieces as lib
from jrl.algorithms.pieces import ARRAYS, call, settings, wanted
from jrl.algorithms.presets import ADVANTAGES, BASE, POLICY_LOSSES, PRESETS, TABLES, preset
from jrl.config import choose_pieces, default_config, flatten, load, override, validate, with_preset
from jrl.config_keys import KEYS
from jrl.errors import UserError


def config(**overrides):
    c = default_config()
    c.model.path, c.data.train = "random:tiny", "train.jsonl"
    for name, value in overrides.items():
        override(c, name.replace("__", "."), value)
    return c


def refusal(**overrides) -> str:
    with pytest.raises(UserError) as caught:
        c = config(**overrides)
        validate(c)
        choose_pieces(c)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Presets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_valid_config_whose_choices_are_read(name):
    c = config(algorithm__name=name)
    validate(c)
    chosen = choose_pieces(c)
    read = {x for fn in (chosen.advantage, chosen.policy_loss, chosen.filter, chosen.prepare) if fn for x in wanted(fn)}
    assert all(key in read or key in lib._TRAINERS for key in PRESETS[name]), "a choice that nothing reads"
    resolved = with_preset(c)
    assert {key: resolved.algorithm[key] for key in BASE} == preset(name)
    assert all(c.algorithm[key] is None for key in BASE), "the config itself is left as it was"
    assert flatten(with_preset(resolved)) == flatten(resolved)
    choose_pieces(resolved)


def test_every_choice_is_a_key_and_every_key_left_open_a_choice():
    open_keys = {name.removeprefix("algorithm.") for name, key in KEYS.items() if key.default is None}
    assert open_keys == BASE.keys() and all(choices.keys() <= BASE.keys() for choices in PRESETS.values())
    for choices in (BASE, *PRESETS.values()):
        for name, value in choices.items():
            key = KEYS[f"algorithm.{name}"]
            assert type(value) is key.kind and (not key.rule or key.rule.holds(value)), (name, value)


@pytest.mark.parametrize("kind", TABLES)
def test_every_name_leads_to_a_function_that_wants_what_there_is(kind):
    for name, piece in TABLES[kind].items():
        fn = lib.load(name, piece.path, {})
        assert fn.__doc__ and set(wanted(fn)) <= set(ARRAYS[kind]) | set(BASE), name
        assert piece.critic == ("values" in wanted(fn)) and piece.group == ("group_ids" in wanted(fn)), name
        if piece.prepare:
            assert set(wanted(lib.load(name, piece.prepare, {}))) <= {"old_logprobs", "advantages", "mask", "key", *BASE}


def test_each_key_beats_the_preset_whatever_the_order_and_can_be_given_back(tmp_path):
    for first, second in ((("name", "dapo"), ("clip_high", "0.5")), (("clip_high", "0.5"), ("name", "dapo"))):
        c = config(**{f"algorithm__{k}": v for k, v in (first, second)})
        assert with_preset(c).algorithm.clip_high == 0.5 and with_preset(c).algorithm.dynamic_sampling is True
    override(c, "algorithm.clip_high", "preset")
    assert with_preset(c).algorithm.clip_high == 0.28
    override(c, "algorithm.name", "grpo")
    assert with_preset(c).algorithm.clip_high == 0.2  # not the former preset's
    file = tmp_path / "c.py"
    file.write_text(
        "from jrl.config import default_config\ndef get_config():\n    c = default_config()\n"
        "    c.model.path, c.data.train = 'random:tiny', 'x.jsonl'\n    c.algorithm.clip_high = 'much'\n    return c\n"
    )
    with pytest.raises(UserError, match="config.algorithm.clip_high='much': expected a number"):
        load(str(file), {})


# What is refused ---------------------------------------------------------------------------------------------------------

KL = {"algorithm__kl_coef": 0.1}


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"algorithm__name": "rloo", "rollout__group_size": 1}, ["rollout.group_size=1", "advantage=rloo compares"]),
        ({"algorithm__name": "dapo", "rollout__group_size": 1}, ["rollout.group_size=1"]),
        ({"algorithm__lam": 0.9}, ["algorithm.lam=0.9: has no effect with advantage=grpo, policy_loss=ppo"]),
        ({"algorithm__name": "rloo", "algorithm__clip_low": 0.1}, ["algorithm.clip_low=0.1: has no effect", "reinforce"]),
        ({"algorithm__name": "gspo", "algorithm__dual_clip": 3.0}, ["algorithm.dual_clip=3.0: has no effect"]),
        ({"algorithm__max_refills": 9}, ["algorithm.max_refills=9: has no effect with dynamic_sampling=False"]),
        ({"algorithm__overlong_buffer": 0.5}, ["has no effect with overlong_penalty=0.0"]),
        ({"algorithm__resample_power": 1.0}, ["has no effect with resample=none"]),
        ({"algorithm__resample": "max_min", "algorithm__resample_power": 1.0}, ["has no effect with resample=max_min"]),
        ({"algorithm__advantage": "a2c"}, ["algorithm.advantage='a2c': must be gae, ", "FILE.py:FUNCTION"]),
        ({"algorithm__advantage": "nowhere.py:f"}, ["algorithm.advantage=nowhere.py:f: no such file"]),
        ({"algorithm__advantage": "nowhere:f"}, ["algorithm.advantage=nowhere:f: cannot be loaded: ModuleNotFoundError"]),
        ({"algorithm__advantage": "math:pi"}, ["algorithm.advantage=math:pi: pi is no function"]),
        ({"algorithm__policy_loss": "math:tau"}, ["tau is no function"]),
        ({"algorithm__policy_loss": "jrl.algorithms.policy_loss:kl_cov"}, ["selected is there for clip_cov and kl_cov alone"]),
        ({"algorithm__policy_loss": "jrl.algorithms.advantages:grpo"}, ["nobody knows its group_ids, rewards, valid"]),
        ({"algorithm__name": "gdpo", "algorithm__kl_in": "reward"} | KL, ["algorithm.kl_in='reward': gdpo"]),
        ({"algorithm__kl_in": "reward", "algorithm__kl_estimator": "k3+"} | KL, ["no gradient flows through the reward"]),
        ({"algorithm__kl_controller": "adaptive"}, ["there is no KL to control"]),
        ({"reference__refresh_steps": 5}, ["there is no reference"]),
        ({"algorithm__proximal": "rollout", "algorithm__rollout_is_cap": 2.0}, ["the ratio is to the rollout already"]),
        ({"algorithm__proximal": "rollout", "algorithm__rollout_rs": "token"}, ["the ratio is to the rollout already"]),
        (
            {"algorithm__proximal": "rollout", "algorithm__name": "rloo"},
            ["algorithm.proximal='rollout': has no effect", "no ratio"],
        ),
        ({"algorithm__rollout_is": "sequence"}, ["has no effect with algorithm.rollout_is_cap=0"]),
        ({"algorithm__name": "pf_ppo", "algorithm__replay_steps": 2}, ["its samples are of former policies"]),
        ({"algorithm__name": "clip_cov", "algorithm__cov_low": 9.0}, ["no covariance lies between"]),
        ({"algorithm__name": "vapo", "critic__policy_delay_steps": 100}, ["the policy would never learn"]),
    ],
    ids=lambda x: "-".join(f"{k.rpartition('__')[2]}={v}" for k, v in x.items())[:60] if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_refused_with_the_reason(overrides, parts):
    text = refusal(**overrides)
    assert all(part in text for part in parts), text


def test_a_dry_run_refuses_the_same(capsys):
    from jrl import main

    assert main.main(["--config=configs/tiny.py", "--config.algorithm.lam=0.9", "--dry_run"]) == 2
    assert "config.algorithm.lam=0.9: has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_advantage_goes_with_every_loss_filter_kl_and_aggregation(advantage, loss):
    base = {"algorithm__advantage": advantage, "algorithm__policy_loss": loss, "algorithm__dynamic_sampling": True}
    for aggregation in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        c = config(**base, algorithm__aggregation=aggregation, algorithm__kl_in="loss", algorithm__kl_coef=0.1)
        validate(c)
        assert choose_pieces(c).critic == ADVANTAGES[advantage].critic


def test_a_custom_function_may_have_settings_of_its_own_and_take_what_it_likes():
    def mine(rewards, gamma, *, scale=3.0, lens=None, **more):
        return rewards * scale, gamma, lens, more

    assert wanted(mine) == ("rewards", "gamma", "scale", "lens")
    given = settings(with_preset(config()).algorithm) | {"rewards": np.ones(2), "mask": 0}
    got = call(mine, given)
    assert got[0].tolist() == [3, 3] and got[1:] == (1.0, None, {})
    assert choose_pieces(config(), advantage=mine).advantage is mine
    with pytest.raises(UserError, match="^advantage strange: nobody knows its reward; there are rewards, "):
        choose_pieces(config(), advantage=lambda_named("strange", lambda reward: reward))


def lambda_named(name, fn):
    fn.__name__ = name
    return fn


def test_a_custom_function_says_by_its_parameters_what_the_run_needs():
    plain = choose_pieces(config(), advantage=lambda rewards, valid: rewards)
    critic = choose_pieces(config(), advantage=lambda token_rewards, values, mask: (values, values))
    greedy = choose_pieces(config(), advantage=lambda rewards, greedy_rewards: rewards - greedy_rewards)
    assert [(p.critic, p.greedy) for p in (plain, critic, greedy)] == [(False, False), (True, False), (False, True)]
    assert plain.linear and not choose_pieces(config(), policy_loss=lambda logprobs, advantages: -logprobs * advantages).linear


def test_arrays_have_one_meaning_in_all_places():
    shared = set(ARRAYS["advantage"]) & set(ARRAYS["filter"])
    assert all(ARRAYS["advantage"][name] == ARRAYS["filter"][name] for name in shared) and len(shared) == 7
    assert not set(BASE) & {name for arrays in ARRAYS.values() for name in arrays}, "a setting and an array of one name"
    assert inspect.signature(call).parameters.keys() == {"fn", "available"}
