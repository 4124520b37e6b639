"""The stages that learn from data as they stand, a row of a table each; RL's is `jrl.trainer`.

A stage says how a row of its data is read and encoded, how the sequences of a step become microbatches, which model learns, by
which loss, and which columns that loss reads. `jrl.supervised` is the loop around it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jrl.algorithms.presets import PREFERENCE_LOSSES
from jrl.data.chats import Item, Renderer, encode_conversations, encode_scored, encode_steps
from jrl.data.records import Columns, Read, Record, mismatched
from jrl.learner import Loss, Packing
from jrl.models import decoder
from jrl.packing import pack, pack_groups, pack_rows
from jrl.supervised_losses import kto_loss, preference_loss, reward_loss, sft_loss, step_loss
from jrl.types import Sequences

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Known:
    """What a model was asked about the sequences of a step before its update."""

    ref_logprobs: np.ndarray | None = None  # f32[N], sums over the tokens with loss
    kl: float = 0.0  # see `jrl.algorithms.preference.kto`


@dataclasses.dataclass(frozen=True)
class Stage:
    """See the module.

    Attributes:
      couple: what becomes of the records of a split before they are encoded.
      columns: f32[N, T] arrays of sequences, see `jrl.supervised_losses`.
      best: the held-out metric by which checkpoints are compared, and 1 where more is better, else -1.
      group: sequences of a row of the data.
      learned: of a row's sequences those that carry loss, the first ones.
      reference: the loss compares with the weights that training starts from.
    """

    read: Callable[[Columns], Read]
    encode: Callable[[Record, Renderer], Item]
    loss: Loss
    columns: Callable[[Sequences, Sequence[Item], Known], Arrays]
    packing: Packing
    best: tuple[str, int]
    model: Callable[..., Any] = decoder.Decoder
    couple: Callable[[list[Record]], list[Record]] = list
    group: int = 1
    learned: int = 1
    reference: bool = False

    @property
    def has_head(self) -> bool:
        """The model predicts tokens, by logits over the vocabulary."""
        return self.model is decoder.Decoder

    def rows(self, sequences: Sequences) -> np.ndarray:
        """The sequences that carry loss."""
        return np.flatnonzero(np.arange(len(sequences)) % self.group < self.learned)


def stage_of(config) -> Stage:
    """The stage that a config asks for."""
    if config.stage == "sft":
        return _sft(config)
    if config.stage == "dpo":
        return _pairs(config) if PREFERENCE_LOSSES[config.dpo.loss].paired else _kto(config)
    return _reward_model(config) if config.reward_model.of == "answers" else _step_reward_model()


def _sft(config) -> Stage:
    return Stage(
        read=lambda columns: columns.conversation, encode=_encode_turns if config.sft.turns == "all" else _encode_answers,
        loss=sft_loss(), columns=lambda sequences, items, known: {"weight": _shares(sequences.loss_mask)}, packing=pack_rows,
        best=("loss", -1),
    )  # fmt: skip


def _encode_turns(record: Record, renderer: Renderer) -> Item:
    return encode_conversations(record, renderer, all_turns=True)


def _encode_answers(record: Record, renderer: Renderer) -> Item:
    return encode_conversations(record, renderer, all_turns=False)


def _pairs(config) -> Stage:
    reference = PREFERENCE_LOSSES[config.dpo.loss].reference

    def columns(sequences: Sequences, items: Sequence[Item], known: Known) -> Arrays:
        arrays = _pair_columns(sequences, items)
        return arrays | ({"ref_logprobs": _at_answers(sequences, known.ref_logprobs)} if reference else {})

    return Stage(
        read=lambda columns: columns.pair, encode=_encode_answers, loss=preference_loss(config.dpo), columns=columns,
        packing=pack_groups, best=("accuracy", 1), group=2, learned=2, reference=reference,
    )  # fmt: skip


def _kto(config) -> Stage:
    def columns(sequences: Sequences, items: Sequence[Item], known: Known) -> Arrays:
        labels = np.repeat([item.facts["label"] for item in items], 2)
        mine = np.arange(len(sequences)) % 2 == 0
        return {
            "mask": sequences.loss_mask.astype(np.float32), "weight": _at_answers(sequences, mine / len(items)),
            "label": _at_answers(sequences, labels), "kl": _at_answers(sequences, known.kl),
            "ref_logprobs": _at_answers(sequences, known.ref_logprobs),
        }  # fmt: skip

    return Stage(
        read=lambda columns: columns.labelled, encode=_encode_answers, loss=kto_loss(config.dpo), columns=columns,
        packing=pack, best=("loss", -1), couple=mismatched, group=2, reference=True,
    )  # fmt: skip


def _reward_model(config) -> Stage:
    def columns(sequences: Sequences, items: Sequence[Item], known: Known) -> Arrays:
        margins = np.repeat([item.facts["margin"] for item in items], 2)
        return _pair_columns(sequences, items) | {"margin": _at_answers(sequences, margins)}

    return Stage(
        read=lambda columns: columns.pair, encode=encode_scored, loss=reward_loss(config.reward_model), columns=columns,
        packing=pack_groups, best=("accuracy", 1), model=decoder.RewardModel, group=2, learned=2,
    )  # fmt: skip


def _step_reward_model() -> Stage:
    def columns(sequences: Sequences, items: Sequence[Item], known: Known) -> Arrays:
        labels = np.zeros(sequences.tokens.shape, np.float32)
        labels[sequences.loss_mask] = np.concatenate([item.facts["labels"] for item in items])
        return {"weight": _shares(sequences.loss_mask), "label": labels}

    return Stage(
        read=lambda columns: columns.stepwise, encode=encode_steps, loss=step_loss(), columns=columns, packing=pack,
        best=("loss", -1), model=decoder.RewardModel,
    )  # fmt: skip


def _pair_columns(sequences: Sequences, items: Sequence[Item]) -> Arrays:
    return {
        "mask": sequences.loss_mask.astype(np.float32), "weight": _at_answers(sequences, 1 / len(items)),
        "better": _at_answers(sequences, np.arange(len(sequences)) % 2 == 0),
    }  # fmt: skip


def _shares(mask: np.ndarray) -> np.ndarray:
    """Each token's share in the mean over all that carry loss."""
    return (mask / max(mask.sum(), 1)).astype(np.float32)


def _at_answers(sequences: Sequences, values: Any) -> np.ndarray:
    """f32[N, T] with the number of each sequence at the first token after its prompt."""
    out = np.zeros(sequences.tokens.shape, np.float32)
    out[np.arange(len(sequences)), sequences.prompt_lens] = values
    return out
