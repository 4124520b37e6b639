"""The command line of JetStream's server."""

import dataclasses
from collections.abc import Sequence

from jrl.errors import UserError
from jrl.flags import check_values, read_flags
from jrl.models.arch import Arch
from jrl.serve import flags as serve_flags

PREFILL_LENGTHS = tuple(2**n for n in range(4, 16))  # tokens; JetStream pads every prompt to one of these


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags; 0 stands for a default that depends on the model."""

    model: str
    host: str = "127.0.0.1"
    port: int = 9000
    metrics_port: int = 0
    slots: int = 8
    samples_per_slot: int = 1
    max_tokens: int = 0
    max_prefill_length: int = 0
    max_new_tokens: int = 0
    temperature: float = 0.0
    grace_s: float = 10.0
    page_size: int = 16
    replica: int = -1
    prefill_replica: int = 0
    tensor: int = 1
    dtype: str = "auto"
    weights: str = "same"
    kv: str = "same"
    attention: str = "auto"
    unroll_layers: str = "off"
    seed: int = 0


ABOUT_ALL = "Serves a language model over gRPC, through JetStream's orchestrator."
ABOUT = serve_flags.ABOUT | {
    "metrics_port": "where Prometheus finds JetStream's metrics, on all of this machine's addresses; 0 for nowhere",
    "slots": "prompts decoded at once, per replica",
    "samples_per_slot": "responses to each prompt",
    "max_prefill_length": "the longest prompt, a power of two; of longer ones the end counts; by default half of --max_tokens",
    "max_new_tokens": "the longest response, whatever a client asks for; by default as --max_tokens allows",
    "temperature": "of all sampling; 0 is greedy",
    "replica": "engines, each with a copy of the weights; -1 for as many as the devices allow",
    "prefill_replica": "of these engines, those that only cache prompts, for the others to decode; 0 for all of them do both",
    "seed": "of every sample's random numbers",
}
LEAST = {
    "port": 0, "metrics_port": 0, "slots": 1, "samples_per_slot": 1, "max_tokens": 0, "max_prefill_length": 0,
    "max_new_tokens": 0, "temperature": 0, "grace_s": 0, "page_size": 1, "replica": -1, "prefill_replica": 0, "tensor": 1,
}  # fmt: skip


def parse(args: Sequence[str]) -> Settings:
    """The settings that the command line asks for.

    Raises:
      UserError: a flag that does not exist, lacks its value, or has a value of another type or out of its range.
    """
    settings = read_flags(Settings, "python -m jrl.rollout.jetstream_serve", ABOUT_ALL, ABOUT, args)
    check_values(settings, LEAST, serve_flags.CHOICES)
    return settings


def make_lengths(settings: Settings, arch: Arch) -> tuple[int, int]:
    """`max_tokens` and `max_prefill_length` for a model.

    Raises:
      UserError: they contradict each other, or the model.
    """
    longest = settings.max_tokens or min(arch.max_position, serve_flags.DEFAULT_TOKENS)
    least, most = PREFILL_LENGTHS[0], PREFILL_LENGTHS[-1]
    if not least < longest <= arch.max_position:
        raise UserError(f"--max_tokens={longest}: must be above {least}, and at most the model's {arch.max_position}")
    prompt = settings.max_prefill_length or max(n for n in PREFILL_LENGTHS if n <= max(longest // 2, least))
    if prompt not in PREFILL_LENGTHS or prompt >= longest:
        raise UserError(
            f"--max_prefill_length={prompt}: must be a power of two from {least} to {most}, below --max_tokens={longest}"
        )
    return longest, prompt
