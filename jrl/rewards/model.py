"""A reward model as a reward: `reward_model` in `reward.functions`, its directory in `reward.model.path`.

It may be another family of another tokenizer than the policy, so what it reads is the conversation as text, rendered anew with
its own chat template; the policy's end of turn is not copied, a response that was cut off is read as if it had ended. Its
mesh is `reward.mesh`. No deadline holds for it: it works on this run's own devices.

A process reward model, which its config.json says it is, scores each line of a response as it scored steps in training, and the
reward is the probability that the least likely of them is right, as in Math-Shepherd (arXiv:2312.08935). The product of all, by
which "Let's Verify Step by Step" (arXiv:2305.20050) ranks solutions, falls with each further step, so that a policy would learn
to take few. A response without a step gets 0.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from jrl.data.chats import Encoded, Item, Renderer, assemble, encode_scored, encode_steps, steps_of
from jrl.data.records import Record
from jrl.data.sources import Message
from jrl.errors import UserError
from jrl.learner import Forward, Learner
from jrl.models import decoder
from jrl.models.load import OpenModel, open_model
from jrl.rewards.runners import Columns, Failures, Outcome
from jrl.shapes import LENGTH_STEP, bucket
from jrl.sharding.layout import Layout

NAME = "reward_model"  # in reward.functions


class Chats:
    """The messages of prompts by their rendered text, which is what rewards are handed."""

    def __init__(self) -> None:
        self._messages: dict[str, tuple[Message, ...]] = {}

    def hold(self, prompts: Sequence[Any]) -> None:
        """Those of these prompts, in place of any before.

        Args:
          prompts: `jrl.data.Prompt`s.
        """
        self._messages = {prompt.text: prompt.messages for prompt in prompts}

    def of(self, text: str) -> tuple[Message, ...]:
        """A text that is not of these prompts is one message of the user."""
        return self._messages.get(text, ({"role": "user", "content": text},))


class ModelReward:
    """Scores samples with a reward model, in batches; `load` comes before the first.

    Attributes:
      of_all: its mesh spans the processes of a run, so all of them score all samples together.

    Args:
      forward: makes the model's forward pass from its architecture and layout.
      microbatch_tokens: padded tokens of one pass, per data shard.

    Raises:
      UserError: no reward model is at the path.
    """

    of_all = True

    def __init__(
        self, path: str, layout: Layout, forward: Callable[[Any, Layout], Forward], microbatch_tokens: int, chats: Chats
    ):
        self._found, self._layout, self._chats = open_reward_model(path), layout, chats
        arch, tokenizer = self._found.arch, self._found.tokenizer
        self.learner = Learner(NAME, forward(arch, layout), layout, decoder.RewardModel, microbatch_tokens)
        self._renderer = Renderer.make(tokenizer, self._found.eos_ids, "", bool(getattr(tokenizer, "chat_template", None)))
        self._params: Any = None

    def load(self) -> None:
        """Reads the weights."""
        self._params = self._found.load(self._layout).params

    def run(self, prompts: Sequence[str], completions: Sequence[str], columns: Columns, timeout_s: float) -> Outcome:
        """f32[N]; NaN for a conversation that is longer than the model's positions, or that its template refuses."""
        del columns, timeout_s
        rewards, most, why = np.full(len(completions), np.nan, np.float32), self._found.arch.max_position, ""
        items, order = [], []
        for prompt in dict.fromkeys(prompts):
            mine = [n for n, other in enumerate(prompts) if other == prompt]
            try:
                sequences = self._encode(prompt, [completions[n] for n in mine])
            except UserError as error:
                why = str(error)
                continue
            fitting = [(n, s) for n, s in zip(mine, sequences, strict=True) if len(s.tokens) <= most]
            if len(fitting) < len(mine):
                why = f"the conversation has more than the {most - 1} tokens that the reward model reads"
            if fitting:
                items.append(Item("", tuple(s for _, s in fitting), {}))
                order += [n for n, _ in fitting]
        if items:
            rewards[order] = self._scores(items)
        failed = int(np.isnan(rewards).sum())
        return rewards, [Failures("error", failed, why)] if why else []

    def misfit(self, columns: Collection[str]) -> str:
        return ""

    def _encode(self, prompt: str, completions: Sequence[str]) -> tuple[Encoded, ...]:
        # An empty system message stands there for the policy's template alone.
        asked = tuple(m for m in self._chats.of(prompt) if m["role"] != "system" or m["content"])
        if self._found.scores == "steps":
            records = (Record("sample", asked, (), {"steps": steps_of(text)}) for text in completions)
            return tuple(s for record in records for s in encode_steps(record, self._renderer).sequences)
        chats = tuple((*asked, {"role": "assistant", "content": text}) for text in completions)
        return encode_scored(Record("sample", asked, chats, {}), self._renderer).sequences

    def _scores(self, items: list[Item]) -> np.ndarray:
        longest = max(len(s.tokens) for item in items for s in item.sequences)
        sequences = assemble(items, bucket(longest, LENGTH_STEP))
        scores, places = self.learner.run("values", self._params, sequences)[0], sequences.loss_mask
        if self._found.scores == "answers":
            return np.sum(scores, axis=1, where=places)
        least = np.min(scores, axis=1, where=places, initial=np.inf)
        return np.where(places.any(axis=1), (1 + np.tanh(least / 2)) / 2, 0.0)  # the sigmoid, written so that nothing overflows


def open_reward_model(path: str) -> OpenModel:
    """`open_model` of a model that puts out a score.

    Raises:
      UserError: also for a language model.
    """
    try:
        found = open_model(path)
    except UserError as error:
        told = str(error).removeprefix("config.").removeprefix(f"model.path={path}: ")
        raise UserError(f"config.reward.model.path={path}: {told}") from None
    if not found.scores:
        raise UserError(
            f"config.reward.model.path={path}: is a language model, which has no score; train one on pairs with"
            " --config.stage=reward_model, or give a sequence classifier of transformers with one label"
        )
    return found
