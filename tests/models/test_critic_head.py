"""Critics with a head of the user's own."""

import re

import numpy as np
import pytest

from jrl import UserError
from jrl.config import load
from jrl.models import decoder
from jrl.models.load import RANDOM
from jrl.plan import make_plan
from tests.critic_heads import TwoLayers
from tests.runs import TINY


class OneTooMany(TwoLayers):
    def __call__(self, hidden):
        return super().__call__(hidden)[..., None]


def test_a_critics_head_of_ones_own_is_what_its_class_says():
    arch = RANDOM["tiny"]
    params = decoder.critic_from_policy(arch, decoder.init_params(arch, 0), head=TwoLayers, seed=3)
    hidden = np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32)
    w, b = (np.asarray(params["value"]["first"][name]) for name in ("kernel", "bias"))
    expected = np.maximum(hidden @ w + b, 0) @ [1.0, -2.0, 0.5]
    np.testing.assert_allclose(decoder.value_head(params, hidden, arch, TwoLayers), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"OneTooMany makes \(2, 5, 1\) of hidden states \(2, 5, 64\); return one value"):
        decoder.value_head(params, hidden, arch, OneTooMany)


def test_a_critics_head_in_a_file_is_planned_for_and_needs_a_critic(tmp_path):
    (tmp_path / "head.py").write_text(HEAD)
    path = f"{tmp_path}/head.py:Wide"
    plans = [make_plan(load(f"{TINY}:ppo", more), RANDOM["tiny"], 1) for more in ({}, {"critic.head": path})]
    critic, wide = (plan.held_bytes["critic: parameters, float32"] for plan in plans)
    assert wide - critic == 4 * (64 * 1000 + 1000) - 4 * 65
    with pytest.raises(UserError, match="critic.head=.*: there is no critic with advantage=grpo"):
        load(TINY, {"critic.head": path})
    with pytest.raises(UserError, match=f"critic.head={re.escape(path)}r: cannot be loaded"):
        make_plan(load(f"{TINY}:ppo", {"critic.head": f"{path}r"}), RANDOM["tiny"], 1)


HEAD = """
from flax import nnx

class Wide(nnx.Module):
    def __init__(self, arch, rngs):
        self.layer = nnx.Linear(arch.hidden_size, 1000, rngs=rngs)

    def __call__(self, hidden):
        return self.layer(hidden).mean(-1)
"""
