"""What flows between the rooms. N sequences, T tokens, P prompts; everything here lives on the host, aligned by sequence.

A sequence is a prompt followed by its response, left-aligned, without padding before or between. Arrays indexed by token
have shape [N, T]: `x[n, t]` belongs to `tokens[n, t]` and is computed from `tokens[n, :t]`. The training state lives on the
devices and belongs to the learner (`jrl.learner.TrainState`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jrl.shapes import LENGTH_STEP, bucket

STOP_REASONS = ("eos", "length", "stop", "aborted")


@dataclasses.dataclass(frozen=True)
class Completion:
    """One response as the engine ends it. C tokens, the EOS included when there is one."""

    request: int  # position of the request in the call
    sample: int  # 0 .. samples - 1 of that request
    tokens: np.ndarray  # i32[C]
    logprobs: np.ndarray  # f32[C], log_softmax(logits / temperature) over the full vocabulary
    sampler_logprobs: np.ndarray  # f32[C], under the distribution really sampled
    versions: np.ndarray  # i32[C], which weights chose the token
    stop_reason: str  # one of STOP_REASONS; empty while it is under way
    best: tuple[np.ndarray, np.ndarray] | None = None  # i32[C, n] the likeliest tokens, f32[C, n] their logprobs
    prompt_logprobs: np.ndarray | None = None  # f32[prompt], at temperature 1; NaN for the first token


@dataclasses.dataclass(frozen=True)
class Sequences:
    """N prompts with their responses: what a learner is given, wherever they are from."""

    tokens: np.ndarray  # i32[N, T]
    prompt_lens: np.ndarray  # i32[N]
    lens: np.ndarray  # i32[N], prompt and response
    loss_mask: np.ndarray  # bool[N, T], which tokens carry loss
    group_ids: np.ndarray  # i32[N], groups may be ragged

    @property
    def response_lens(self) -> np.ndarray:
        return self.lens - self.prompt_lens

    def __len__(self) -> int:
        return len(self.lens)

    def responses(self) -> list[np.ndarray]:
        """The response tokens of each sequence."""
        return [row[p:n] for row, p, n in zip(self.tokens, self.prompt_lens, self.lens, strict=True)]


@dataclasses.dataclass(frozen=True)
class Rollout(Sequences):
    """N finished sequences; the loss mask tells which tokens the policy chose."""

    versions: np.ndarray  # i32[N, T]
    logprobs: np.ndarray  # f32[N, T], 0 outside the mask
    sampler_logprobs: np.ndarray  # f32[N, T]
    stop_reasons: np.ndarray  # str[N]
    prompt_index: np.ndarray  # i32[N], into the prompts of the step


@dataclasses.dataclass(frozen=True)
class Batch:
    """A scored rollout, and once `advantages` is filled in all that the losses need; None where an algorithm needs none."""

    rollout: Rollout
    prompts: np.ndarray  # object[N], the `jrl.data.Prompt` of each sequence
    texts: np.ndarray  # object[N], the response as text
    rewards: np.ndarray  # f32[N], of the whole sequence
    valid: np.ndarray  # bool[N], False where the reward failed: the sequence carries no loss
    reward_parts: dict[str, np.ndarray]  # f32[N] of each reward function, before its weight
    advantages: Any = None  # f32[N, T]
    old_logprobs: Any = None  # f32[N, T], the learner's, before the first update of the step
    ref_logprobs: Any = None  # f32[N, T]
    values: Any = None  # f32[N, T], the critic's, before its first update of the step
    returns: Any = None  # f32[N, T]
    penalized: Any = None  # f32[N], rewards less the penalties, such as a KL in the reward
    ids: Any = None  # i64[N], the number of each sequence in the run
    greedy_rewards: Any = None  # f32[N], of the greedy response to the same prompt
    unlearned: Any = None  # bool[N], sequences that count in every statistic and carry no loss

    @property
    def scored_mask(self) -> np.ndarray:
        """bool[N, T]: chosen by the policy, in a sequence whose reward is known."""
        return self.rollout.loss_mask & self.valid[:, None]

    @property
    def loss_mask(self) -> np.ndarray:
        """bool[N, T]: the tokens that carry loss."""
        return self.scored_mask if self.unlearned is None else self.scored_mask & ~self.unlearned[:, None]

    @property
    def truncated(self) -> np.ndarray:
        """bool[N]: cut off at the length limit."""
        return self.rollout.stop_reasons == "length"

    def __len__(self) -> int:
        return len(self.rollout)


def _map(fn: Callable[..., Any], *trees: Any) -> Any:
    """`fn` over the arrays of dataclasses and dicts of the same structure; None stays None."""
    first = trees[0]
    if first is None:
        return None
    if isinstance(first, Sequences | Batch):
        names = [f.name for f in dataclasses.fields(first)]
        return dataclasses.replace(first, **{n: _map(fn, *(getattr(t, n) for t in trees)) for n in names})
    if isinstance(first, dict):
        return {n: _map(fn, *(t[n] for t in trees)) for n in first}
    return fn(*trees)


def take(batch: Any, rows: np.ndarray) -> Any:
    """The same `Sequences`, `Rollout` or `Batch` with only the rows `rows`, in that order."""
    return _map(lambda x: x[rows], batch)


def concatenate(batches: list[Any]) -> Any:
    """Joins `Rollout`s or `Batch`es of different T; group ids are the caller's business and stay as they are."""

    def join(*parts):
        if parts[0].ndim == 2:
            width = max(p.shape[1] for p in parts)
            parts = [np.pad(p, ((0, 0), (0, width - p.shape[1]))) for p in parts]
        return np.concatenate(parts)

    return batches[0] if len(batches) == 1 else _map(join, *batches)


def make_rollout(prompts: list[np.ndarray], completions: list[Completion], group_ids: np.ndarray | None = None) -> Rollout:
    """Assembles completions, sorted by (request, sample), into one rollout; `prompts[c.request]` precedes completion c."""
    order = sorted(completions, key=lambda c: (c.request, c.sample))
    prompt_lens = np.array([len(prompts[c.request]) for c in order], np.int32)
    lens = prompt_lens + np.array([len(c.tokens) for c in order], np.int32)
    shape = (len(order), bucket(int(lens.max()), LENGTH_STEP))
    tokens, versions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    logprobs, sampler_logprobs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    mask = np.zeros(shape, bool)
    for row, c in enumerate(order):
        begin, end = prompt_lens[row], lens[row]
        tokens[row, :begin] = prompts[c.request]
        tokens[row, begin:end], versions[row, begin:end] = c.tokens, c.versions
        logprobs[row, begin:end], sampler_logprobs[row, begin:end] = c.logprobs, c.sampler_logprobs
        mask[row, begin:end] = True
    index = np.array([c.request for c in order], np.int32)
    return Rollout(
        tokens=tokens, prompt_lens=prompt_lens, lens=lens, loss_mask=mask, versions=versions, logprobs=logprobs,
        sampler_logprobs=sampler_logprobs, stop_reasons=np.array([c.stop_reason for c in order]), prompt_index=index,
        group_ids=index if group_ids is None else group_ids[index],
    )  # fmt: skip
