"""JetStream's modules, made to work beside current packages; whoever wants one of them imports it from here.

JetStream (https://github.com/google/JetStream) is archived, and its last release, the only one that is supported, has these
faults. All of them are put right within JetStream's own modules; `jax`, and the rest of the process, stay as they are.

- It imports seqio, which brings TensorFlow along, for two base classes that are of no use here: a stub stands in for it
  while JetStream is imported, if it is not installed.
- `orchestrator` turns the root logger to DEBUG and has it write to stdout: both are undone.
- `orchestrator.delete_pytree` calls `jax.tree_map`, which no longer exists.
- `orchestrator.JetThread` kills the process when a thread fails: now the failure is logged, and the driver is not live any more.
- `token_utils.pad_tokens` fails for a list of ids that wants no BOS, and with it the driver; and ids that clients send get a BOS
  whatever the tokenizer says. Now they get none where the tokenizer's `bos_id` is None.
- `async_multifuture` fails where the event loop of whoever asked is closed, be it just after the last token, and with it the
  driver: now nobody is told.
- Text is joined from the texts of single tokens, and only tokens of one byte may be part of a character. Here the bytes that
  are no characters by themselves are surrogates, as Python's "surrogateescape" makes them, and any number of them may be.
"""

import contextlib
import importlib.metadata
import importlib.util
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jrl.errors import UserError

VERSION = "0.2.2"
REMEDY = f"pip install 'jrl[jetstream]' && pip install --no-deps google-jetstream=={VERSION}"

log = logging.getLogger("jrl")


def check_installed() -> None:
    """Raises UserError, with the remedy, if JetStream is missing or of another version."""
    try:
        found = importlib.metadata.version("google-jetstream")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"serving with JetStream needs the package google-jetstream; {REMEDY}") from None
    if found != VERSION:
        raise UserError(f"google-jetstream {found} is installed, and only {VERSION} is supported; {REMEDY}")


@contextlib.contextmanager
def _seqio_present() -> Iterator[None]:
    """A stub takes seqio's place meanwhile, if there is none."""
    if importlib.util.find_spec("seqio") is not None:
        yield
        return
    vocabularies: Any = types.ModuleType("seqio.vocabularies")
    vocabularies.Vocabulary = vocabularies.SentencePieceVocabulary = type("Vocabulary", (), {})
    stubs = {"seqio": types.ModuleType("seqio"), "seqio.vocabularies": vocabularies}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


check_installed()
try:
    with _seqio_present(), _root_logger_kept():
        from jetstream.core import config_lib, orchestrator, server_lib
        from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
        from jetstream.core.utils.async_multifuture import AsyncMultifuture
        from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2
except ModuleNotFoundError as error:
    raise UserError(f"serving with JetStream needs the package {error.name}; {REMEDY}") from None

__all__ = [
    "config_lib", "engine_api", "jetstream_pb2", "jetstream_pb2_grpc", "orchestrator", "server_lib", "token_utils",
    "tokenizer_api", "tokenizer_pb2",
]  # fmt: skip


def delete_pytree(tree: Any) -> None:
    """Frees a tree's arrays: the driver holds on to what was prefilled until the request has ended."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


class DriverThread(threading.Thread):
    """One of a driver's threads; its failure is logged and seen in the driver's `live`, which the health check tells."""

    def __init__(self, *, target: Any, **options: Any):
        super().__init__(target=target, **options)
        self.driver = target.func.__self__  # of the partial of a bound method

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            if self.driver.live:  # else it was stopped, and a thread may find what it needs gone
                log.error("JetStream's thread %s has failed, and nothing will be served any more", self.name, exc_info=error)
            self.driver.live = False


def _without_bos(pad: Callable) -> Callable:
    def pad_tokens(tokens: Any, bos_id: int | None, pad_id: int, is_bos: bool = True, **options: Any) -> Any:
        return pad(np.asarray(tokens, np.int32), bos_id, pad_id, is_bos=is_bos and bos_id is not None, **options)

    return pad_tokens


def _unless_closed(tell: Callable) -> Callable:
    def method(future: Any, *args: Any) -> None:
        try:
            tell(future, *args)
        except RuntimeError:
            if not future._loop.is_closed():
                raise

    return method


def ends_unfinished(text: str) -> bool:
    """Whether a token's text ends in a byte that is no character by itself, so that what follows may complete it."""
    return "\udc80" <= text[-1:] <= "\udcff"


def join_tokens(texts: Iterable[str]) -> str:
    """The text of tokens in a row; bytes that are no character even together become U+FFFD."""
    return "".join(texts).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


orchestrator.delete_pytree, orchestrator.JetThread = delete_pytree, DriverThread
token_utils.pad_tokens = _without_bos(token_utils.pad_tokens)
AsyncMultifuture.add_result = _unless_closed(AsyncMultifuture.add_result)
AsyncMultifuture.set_exception = _unless_closed(AsyncMultifuture.set_exception)
token_utils.is_byte_token, token_utils.text_tokens_to_str = ends_unfinished, join_tokens
