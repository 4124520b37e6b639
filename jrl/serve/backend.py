"""The model behind the server: weights, tokenizer and engine, as the flags ask for them."""

import dataclasses
import logging
import pathlib
from typing import Any

import jax

from jrl import platform
from jrl.errors import UserError
from jrl.models import hf
from jrl.models.arch import Arch
from jrl.models.load import load_model, read_arch
from jrl.models.unstack import worth_it
from jrl.rollout.engine import Engine
from jrl.rollout.weights import weight_publisher
from jrl.serve.flags import DEFAULT_TOKENS, Settings
from jrl.serve.schema import Limits
from jrl.serve.text import make_decode
from jrl.sharding.layout import Layout

log = logging.getLogger("jrl")


@dataclasses.dataclass(frozen=True)
class Served:
    """What the routes know of a model."""

    tokenizer: Any
    vocab_size: int
    limits: Limits


class Backend:
    """Model, tokenizer and engine; `make_engine` takes its time and belongs into the engine's thread."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._arch: Arch | None = None
        self.served: Served | None = None  # once loaded

    def make_engine(self) -> Engine:
        """An engine with its weights.

        Raises:
          UserError: naming the flag, its value and the remedy.
        """
        s = self._settings
        limits = make_limits(s, read_arch(s.model))  # before any weight is read
        self._layout, self._dtype = make_layout(s), platform.compute_dtype(s.dtype)
        model = load_model(s.model, self._layout, s.seed)
        platform.configure()  # only now: what loading leaves behind goes back to the system
        self._arch = model.arch
        engine = Engine(
            model.arch, self._layout, slots=s.slots, max_tokens=limits.sequence_tokens, eos_ids=model.eos_ids,
            page_size=s.page_size, num_pages=s.num_pages, decode_chunk=s.decode_chunk, dtype=self._dtype, seed=s.seed,
            attention=s.attention, kv=s.kv, unroll_layers=unrolled(s, limits.new_tokens), few_programs=s.warm_up_s > 0,
            decode_text=make_decode(model.tokenizer),
        )  # fmt: skip
        self._as_served = weight_publisher(model.arch, self._layout, self._layout, self._dtype, s.weights)
        engine.load(self._as_served(model.params), 0)
        self.served = Served(model.tokenizer, model.arch.vocab_size, limits)
        slots = s.slots * self._layout.batch_shards
        log.info("%s is loaded: %d sequences at once, of at most %d tokens", s.model, slots, limits.sequence_tokens)
        return engine

    def read_weights(self, directory: pathlib.Path) -> Any:
        """The parameters in a Hugging Face directory, as the engine wants them.

        Raises:
          UserError: what is there is another architecture, or cannot be read.
        """
        assert self._arch is not None
        arch = Arch.from_hf_config(hf.read_config(directory))
        for name in (field.name for field in dataclasses.fields(arch)):
            there, here = getattr(arch, name), getattr(self._arch, name)
            if there != here:
                raise UserError(f"path={directory}: another architecture, {name} is {there} and not {here}")
        try:
            return self._as_served(hf.load_hf(directory, arch, self._layout))
        except UserError:
            raise
        except Exception as error:  # the formats' own classes, for files that are cut short or no safetensors at all
            raise UserError(f"path={directory}: cannot be read ({error})") from None


def make_layout(settings: Settings) -> Layout:
    """All devices, or with a number of replicas given the first ones that these need.

    Raises:
      UserError: the devices are too few or cannot be divided.
    """
    s, devices = settings, jax.devices()
    try:
        chosen = devices if s.replica == -1 else devices[: s.replica * s.tensor]
        return Layout.rollout({"replica": s.replica, "tensor": s.tensor}, chosen)
    except UserError as error:
        raise UserError(f"--replica={s.replica} --tensor={s.tensor}: {error}") from None


def unrolled(settings: Any, new_tokens: int) -> bool:
    """Whether to decode without the scan over layers.

    Args:
      settings: of this server or of JetStream's.
      new_tokens: the most of a response.

    Raises:
      UserError: it is not to be had here.
    """
    try:
        return worth_it(settings.unroll_layers, jax.default_backend(), new_tokens)
    except UserError as error:
        raise UserError(f"--unroll_layers={settings.unroll_layers}: {error}") from None


def make_limits(settings: Settings, arch: Arch) -> Limits:
    """The limits of single requests.

    Raises:
      UserError: they contradict each other, or the model.
    """
    s = settings
    longest = s.max_tokens or min(arch.max_position, DEFAULT_TOKENS)
    if not 2 <= longest <= arch.max_position:
        raise UserError(f"--max_tokens={longest}: must be from 2 to the {arch.max_position} that the model was made for")
    for name in ("max_prompt_tokens", "max_new_tokens"):
        if getattr(s, name) >= longest:
            raise UserError(f"--{name}={getattr(s, name)}: leaves no room within --max_tokens={longest}; lower it")
    needed = -(-(longest - 1) // s.page_size) + 1  # the last token is never fed; the null page
    if s.num_pages and s.num_pages < needed:
        raise UserError(f"--num_pages={s.num_pages}: one sequence of {longest} tokens needs {needed}; allow more")
    return Limits(
        prompt_tokens=s.max_prompt_tokens or longest - 1, new_tokens=s.max_new_tokens or longest - 1, sequence_tokens=longest,
        samples=s.max_samples, waiting=s.max_waiting, deadline_s=s.deadline_s,
    )  # fmt: skip
