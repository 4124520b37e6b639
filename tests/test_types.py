"""Sequences on the host: assembled, selected and joined without moving a token."""

import numpy as np
import pytest

from jrl.types import Batch, Completion, concatenate, make_rollout, take

PROMPTS = [np.array([5, 6, 7], np.int32), np.array([9], np.int32)]


def completion(request, sample, tokens, reason="eos", version=4):
    n = len(tokens)
    logprobs = -np.arange(1, n + 1, dtype=np.float32) - sample
    return Completion(request, sample, np.array(tokens, np.int32), logprobs, logprobs / 2, np.full(n, version, np.int32), reason)


@pytest.fixture
def rollout():
    # In the order in which an engine might finish them.
    done = [completion(1, 0, [20, 21], "length"), completion(0, 1, [30]), completion(0, 0, [40, 41, 42, 2], version=5)]
    return make_rollout(PROMPTS, done)


def batch(rollout, **extra):
    n = len(rollout)
    return Batch(rollout, np.empty(n, object), np.array(["a", "b", "c"][:n], object), np.arange(n, dtype=np.float32),
                 np.array([True, False, True][:n]), {"part": np.arange(n, dtype=np.float32)}, **extra)  # fmt: skip


def test_a_rollout_is_prompt_and_response_sorted_by_request_and_sample(rollout):
    assert rollout.tokens.shape == (3, 16) and rollout.tokens.dtype == np.int32
    expected = [[5, 6, 7, 40, 41, 42, 2], [5, 6, 7, 30], [9, 20, 21]]
    for row, tokens in enumerate(expected):
        assert rollout.tokens[row, : rollout.lens[row]].tolist() == tokens
        assert not rollout.tokens[row, rollout.lens[row] :].any()
    assert rollout.prompt_lens.tolist() == [3, 3, 1] and rollout.response_lens.tolist() == [4, 1, 2]
    assert [r.tolist() for r in rollout.responses()] == [[40, 41, 42, 2], [30], [20, 21]]
    assert rollout.prompt_index.tolist() == [0, 0, 1] == rollout.group_ids.tolist()
    assert rollout.stop_reasons.tolist() == ["eos", "eos", "length"]


def test_what_belongs_to_a_token_lies_at_its_place(rollout):
    steps = np.arange(16)
    mask = (steps >= rollout.prompt_lens[:, None]) & (steps < rollout.lens[:, None])
    np.testing.assert_array_equal(rollout.loss_mask, mask)
    assert rollout.logprobs[0, 3:7].tolist() == [-1, -2, -3, -4] and rollout.logprobs[1, 3] == -2
    assert rollout.sampler_logprobs[2, 1:3].tolist() == [-0.5, -1.0]
    assert set(rollout.versions[0, 3:7].tolist()) == {5} and set(rollout.versions[2, 1:3].tolist()) == {4}
    for x in (rollout.logprobs, rollout.sampler_logprobs, rollout.versions):
        assert not x[~mask].any()


def test_group_ids_may_be_given(rollout):
    done = [completion(1, 0, [20]), completion(0, 0, [30])]
    assert make_rollout(PROMPTS, done, np.array([7, 3])).group_ids.tolist() == [7, 3]


def test_take_selects_rows_of_everything(rollout):
    whole = batch(rollout, advantages=rollout.logprobs * 2)
    part = take(whole, np.array([2, 0]))
    assert len(part) == 2 == len(part.rollout) and part.rewards.tolist() == [2, 0] == part.reward_parts["part"].tolist()
    assert part.texts.tolist() == ["c", "a"] and part.rollout.lens.tolist() == [3, 7]
    np.testing.assert_array_equal(part.advantages, whole.advantages[[2, 0]])
    assert part.old_logprobs is None and len(whole) == 3
    assert len(take(whole, np.array([True, False, True]))) == 2


def test_concatenate_pads_to_the_longest(rollout):
    long = make_rollout(PROMPTS, [completion(1, 0, range(50, 90), "length")])
    assert long.tokens.shape == (1, 48)
    both = concatenate([batch(rollout, advantages=rollout.logprobs), batch(long, advantages=long.logprobs)])
    assert both.rollout.tokens.shape == (4, 48) == both.advantages.shape and both.rollout.loss_mask.dtype == bool
    assert both.rollout.responses()[3].tolist() == list(range(50, 90))
    assert [r.tolist() for r in both.rollout.responses()[:3]] == [r.tolist() for r in rollout.responses()]
    assert both.reward_parts["part"].tolist() == [0, 1, 2, 0] and both.values is None
    assert concatenate([rollout]) is rollout


def test_a_sequence_whose_reward_failed_carries_no_loss(rollout):
    mask = batch(rollout).loss_mask
    assert not mask[1].any()
    np.testing.assert_array_equal(mask[[0, 2]], rollout.loss_mask[[0, 2]])
