"""Rewards by other packages' verifiers, one sample at a time: `fn(completion, **columns of the row) -> float`.

They parse whatever a policy writes with general-purpose tools (sympy, the tasks' own code) and can hang or run out of
memory, so `jrl.rewards.worker` loads this file by its path into a process that can be killed. It needs nothing of jrl.
"""

import functools
import json
import logging
import re
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_PREFIX = "reasoning_gym:"


def math_verify(completion: str, *, answer: Any, **_: Any) -> float:
    """1.0 if the reply's expression equals the answer's by https://github.com/huggingface/Math-Verify.

    The answer may be plain ("42"), LaTeX with or without dollars, a solution with \\boxed{...} or GSM8K's "#### 42".
    NaN if no expression can be found in it.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time-outs, by signals, are off
    text = str(answer).rpartition("####")[2].strip()
    right = parse(text, parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None)
    if answer is None or not right:
        return float("nan")
    return float(verify(right, parse(completion, parsing_timeout=None), timeout_seconds=None))


def reasoning_gym(
    completion: str,
    *,
    data_source: str,
    dataset_options: dict[str, Any],
    question: str,
    answer: Any,
    metadata: dict[str, Any],
    **_: Any,
) -> float:
    """The task's own `score_answer`, of what stands in the reply's last <answer> tags, or else of the whole reply."""
    tagged = _ANSWER.findall(completion)
    entry = {"question": question, "answer": answer, "metadata": metadata}
    dataset = _dataset(data_source.removeprefix(_PREFIX), json.dumps(dataset_options, sort_keys=True, default=list))
    return float(dataset.score_answer((tagged[-1] if tagged else completion).strip(), entry))


@functools.cache
def _dataset(name: str, options: str) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(name, **json.loads(options), size=1, seed=0)
