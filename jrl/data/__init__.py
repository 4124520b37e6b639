"""From files, hubs and generators to encoded prompts in a resumable order."""

from jrl.data.prompts import Prompt, encode
from jrl.data.sources import Example, load_examples
from jrl.data.splits import distinct, load_splits, overlap, split_by_question
from jrl.data.stream import PromptStream

__all__ = [
    "Example",
    "Prompt",
    "PromptStream",
    "distinct",
    "encode",
    "load_examples",
    "load_splits",
    "overlap",
    "split_by_question",
]
