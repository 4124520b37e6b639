"""samples.jsonl: every sampled sequence of every step, one line each."""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jrl import jsonl
from jrl.types import Batch

FILE = "samples.jsonl"


class SampleWriter:
    """Writes rollouts; a resumed run has each step once.

    Args:
      start_step: lines of this step and later ones are of a run that did not get to save them, and are dropped.
    """

    def __init__(self, run_dir: str | os.PathLike, start_step: int = 0):
        self._file = jsonl.Appender(pathlib.Path(run_dir) / FILE, lambda row: row["step"] < start_step)

    def write(self, step: int, batch: Batch, advantages: np.ndarray | None = None) -> None:
        """Appends all sequences of a batch. A step may write several batches, their group ids distinct.

        Args:
          advantages: f32[N, T], NaN in the rows of sequences that were not trained on; None where none was.
        """
        self._file.write(rows(step, batch, advantages))

    def close(self) -> None:
        self._file.close()


def rows(step: int, batch: Batch, advantages: np.ndarray | None = None) -> Iterator[dict[str, Any]]:
    """The lines of a batch.

    `prompt_tokens` and `tokens` are the ids that were sampled from and trained on, EOS included; `logprobs` are the
    learner's quantity, of `tokens`; `advantage` is the mean over the response's tokens; `version` is the oldest weights
    that chose one of them.
    """
    r = batch.rollout
    for i in range(len(batch)):
        prompt, response = slice(0, r.prompt_lens[i]), slice(r.prompt_lens[i], r.lens[i])
        yield {
            "step": step,
            "uid": batch.prompts[i].uid,
            "group": int(r.group_ids[i]),
            "prompt": batch.prompts[i].text,
            "completion": str(batch.texts[i]),
            "prompt_tokens": r.tokens[i, prompt],
            "tokens": r.tokens[i, response],
            "logprobs": _rounded(r.logprobs[i, response]),
            "reward": float(batch.rewards[i]),
            "reward_parts": {name: float(part[i]) for name, part in batch.reward_parts.items()},
            "advantage": None if advantages is None else _mean(advantages[i], batch.loss_mask[i]),
            "stop_reason": str(r.stop_reasons[i]),
            "version": min(r.versions[i, response].tolist(), default=None),
            "valid": bool(batch.valid[i]),
        }


def _mean(x: np.ndarray, mask: np.ndarray) -> float | None:
    if np.isnan(x).all():
        return None
    return round(float(np.mean(x[mask], dtype=np.float64)), 5) if mask.any() else 0.0


def _rounded(x: np.ndarray) -> np.ndarray:
    """To 5 digits after the point; in float64, where 0.1 prints as 0.1."""
    return np.round(np.asarray(x, np.float64), 5)


def read_samples(run_dir: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The lines of a run, in the order they were written.

    Raises:
      UserError: a broken line, with its number.
    """
    return jsonl.read(pathlib.Path(run_dir) / FILE)
