"""The order of prompts: each once per epoch, the same again after a resume at any point."""

import json

import pytest

from jrl.data import Prompt, PromptStream
from jrl.errors import UserError


def prompts(n, prefix="q"):
    return [Prompt((i,), f"{prefix}{i}", (), None, {}, f"{prefix}{i}") for i in range(n)]


def draw(stream, steps):
    return [[p.text for p in stream.next()] for _ in range(steps)]


def test_every_epoch_is_another_permutation():
    stream = PromptStream(prompts(10), 3, seed=0)
    flat = [text for step in draw(stream, 20) for text in step]
    epochs = [flat[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(epoch) == sorted(f"q{i}" for i in range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 6


def test_seeds_give_different_orders():
    orders = [draw(PromptStream(prompts(10), 5, seed), 2) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


# With 12 prompts and 4 a step: after 1 step inside the first epoch, after 3 at its border, after 4 inside the second.
@pytest.mark.parametrize("steps", [0, 1, 3, 4, 6])
def test_resumed_order_equals_the_unbroken_one(steps):
    unbroken = draw(PromptStream(prompts(12), 4, seed=7), steps + 7)[steps:]
    stopped = PromptStream(prompts(12), 4, seed=7)
    draw(stopped, steps)
    state = json.loads(json.dumps(stopped.state()))
    resumed = PromptStream(prompts(12), 4, seed=7)
    resumed.restore(state)
    assert draw(resumed, 7) == unbroken
    # Negative control: without the state the order begins anew.
    assert steps == 0 or draw(PromptStream(prompts(12), 4, seed=7), 7) != unbroken


def test_resume_after_draws_of_odd_sizes_that_cross_the_border():
    stream = PromptStream(prompts(10), 4, seed=0)
    for k in (4, 3, 1, 4):
        stream.next(k)
    resumed = PromptStream(prompts(10), 4, seed=0)
    resumed.restore(stream.state())
    assert draw(resumed, 5) == draw(stream, 5)
    assert stream.next(0) == []


def test_a_state_of_other_data_or_seed_is_refused():
    state = PromptStream(prompts(10), 4, seed=0).state()
    for others, seed in ((prompts(11), 0), (prompts(10, "r"), 0), (prompts(10), 1)):
        with pytest.raises(UserError, match="other training data"):
            PromptStream(others, 4, seed).restore(state)


def test_fewer_prompts_than_a_step_takes():
    with pytest.raises(UserError, match="rollout.prompts_per_step=4: there are 3 training examples"):
        PromptStream(prompts(3), 4, seed=0)
