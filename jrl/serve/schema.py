"""What clients may ask: the bodies of requests, checked key by key, and what they come to for the engine.

Keys are OpenAI's and a few that other servers have added (`top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`,
`return_token_ids`, `chat_template_kwargs`). A key whose value is null counts as absent; a key that is not listed here is an
error, since an answer that silently ignored it would be a wrong answer. Left out: tools, images, response formats, best_of.
"""

import dataclasses
import inspect
import secrets
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import pydantic
import pydantic_core
from pydantic import Field

from jrl.errors import UserError
from jrl.rollout.sampling import Sampling
from jrl.rollout.scheduler import Request
from jrl.serve.text import prompt_ids

MAX_STOPS = 16  # stop strings of one request
MAX_STOP_CHARACTERS = 1024  # of one of them; each token is compared with a text of this length
DEFAULT_NEW_TOKENS = 16  # of completions, as OpenAI's


# Keys that take values of several types.
FORMS = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text or a list of texts",
}


class BadRequest(UserError):
    """What is wrong with a request; `param` is its key, `code` OpenAI's word for the mistake if it has one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that a request may ask for."""

    prompt_tokens: int
    new_tokens: int
    sequence_tokens: int  # prompt and response together
    samples: int  # prompts times n
    waiting: int  # requests without a first token, of all clients together
    deadline_s: float


class _Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


Body = TypeVar("Body", bound=_Body)


class StreamOptions(_Body):
    include_usage: bool = False


class _Generation(_Body):
    """What completions and chat completions have in common. Ranges that have none here are checked by `Sampling.validate`."""

    model: str
    n: Annotated[int, Field(ge=1)] = 1
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    stop: str | list[str] = []
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""  # whom a client acts for: of no consequence here
    top_k: int = 0  # 0, and as other servers have it -1, for all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(_Generation):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = None  # how many likeliest tokens to report beside each token; 0 for the token's own logprob only

    @property
    def best(self) -> int:
        return self.logprobs or 0

    @property
    def scored(self) -> bool:
        """Logprobs are to be reported."""
        return self.logprobs is not None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def as_dict(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatBody(_Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    chat_template_kwargs: dict[str, bool | int | float | str] = {}  # for the template, such as enable_thinking

    @property
    def best(self) -> int:
        return self.top_logprobs

    @property
    def scored(self) -> bool:
        return self.logprobs


class LoadBody(_Body):
    path: str
    version: Annotated[int, Field(ge=0)]


def parse(kind: type[Body], raw: bytes) -> Body:
    """The body of a request.

    Raises:
      BadRequest: not a JSON object; a key that is missing, unknown, or has a value of another type or out of its range.
    """
    try:
        value = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    try:
        return kind.model_validate(_without_nulls(value))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"]))
        key = str(first["loc"][0])
        if key in FORMS:  # pydantic would complain of the first form alone
            raise BadRequest(f"{key}: must be {FORMS[key]}", key) from None
        what = "is not supported by this server" if first["type"] == "extra_forbidden" else first["msg"]
        raise BadRequest(f"{param}: {what}", key) from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(x) for key, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value


class SampleNumbers:
    """Numbers for the random draws of samples: a running count from a random start, so that no two requests share one."""

    def __init__(self):
        self._next = secrets.randbits(32)

    def take(self, count: int) -> int:
        """The first of `count` numbers that nobody else gets, modulo 2**32."""
        first = self._next
        self._next = (first + count) % 2**32
        return first


class Encoder:
    """From the body of a request to requests of the engine.

    Args:
      tokenizer: of `transformers`.
      vocab_size: of the model.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, limits: Limits):
        self.tokenizer, self.vocab_size, self.limits = tokenizer, vocab_size, limits
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._numbers = SampleNumbers()

    def encode(self, body: CompletionBody | ChatBody) -> list[Request]:
        """One request of the engine for each prompt, or for the messages as the tokenizer's template renders them.

        Raises:
          BadRequest
        """
        return self._chat(body) if isinstance(body, ChatBody) else self._completion(body)

    def _completion(self, body: CompletionBody) -> list[Request]:
        if body.max_tokens == 0 and not body.echo:
            raise BadRequest("max_tokens=0: leaves nothing to answer; ask for at least one token, or set echo", "max_tokens")
        given: Any = body.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        prompts = [prompt_ids(self.tokenizer, p) if isinstance(p, str) else p for p in given]
        wanted = DEFAULT_NEW_TOKENS if body.max_tokens is None else body.max_tokens
        # What echoes a prompt alone still decodes one token, which the answer leaves out.
        return self._requests(body, prompts, max(wanted, 1), "prompt", prompt_logprobs=body.echo and body.scored)

    def _chat(self, body: ChatBody) -> list[Request]:
        if body.top_logprobs and not body.logprobs:
            raise BadRequest(f"top_logprobs={body.top_logprobs}: wants logprobs to be true", "top_logprobs")
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if wanted == 0:
            raise BadRequest("max_tokens=0: leaves nothing to answer; ask for at least one token", "max_tokens")
        prompt = self._render(body)
        if wanted is None:  # as many as there is room for
            wanted = max(min(self.limits.new_tokens, self.limits.sequence_tokens - len(prompt)), 1)
        return self._requests(body, [prompt], wanted, "messages")

    def _render(self, body: ChatBody) -> list[int]:
        if not self.tokenizer.chat_template:
            raise BadRequest("messages: this model has no chat template; use /v1/completions", "messages")
        for name in body.chat_template_kwargs:
            if name in self._reserved:
                raise BadRequest(f"chat_template_kwargs: {name} cannot be set by a request", "chat_template_kwargs")
        messages = [message.as_dict() for message in body.messages]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **body.chat_template_kwargs
            )
        except Exception as error:  # jinja's errors and those that templates raise by themselves
            raise BadRequest(f"messages: the model's chat template refuses them ({error})", "messages") from None
        # A template writes its own BOS.
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _requests(
        self, body: CompletionBody | ChatBody, prompts: list[list[int]], new_tokens: int, key: str, prompt_logprobs: bool = False
    ) -> list[Request]:
        limits, samples = self.limits, len(prompts) * body.n
        if not 1 <= samples <= limits.samples:
            raise BadRequest(f"n={body.n}: {samples} samples in all; ask for 1 to {limits.samples}", "n" if prompts else key)
        sampling = self._sampling(body, prompt_logprobs)
        for prompt in prompts:
            self._check(prompt, new_tokens, key)
        first = self._numbers.take(samples) if body.seed is None else body.seed
        return [
            Request(
                np.array(prompt, np.int32), body.n, new_tokens, body.temperature, (first + i * body.n) % 2**32, body.ignore_eos,
                sampling, limits.deadline_s,
            )
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip

    def _check(self, prompt: list[int], new_tokens: int, key: str) -> None:
        limits = self.limits
        if not prompt:
            raise BadRequest(f"{key}: is empty; there must be at least one token to go on from", key)
        wrong = next((token for token in prompt if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise BadRequest(f"{key}: {wrong} is no token; ids go from 0 to {self.vocab_size - 1}", key)
        if len(prompt) > limits.prompt_tokens:
            message = f"{key}: {len(prompt)} tokens; this server takes prompts of at most {limits.prompt_tokens}"
            raise BadRequest(message, key, "context_length_exceeded")
        if new_tokens > limits.new_tokens:
            raise BadRequest(f"max_tokens={new_tokens}: this server gives at most {limits.new_tokens}", "max_tokens")
        if len(prompt) + new_tokens > limits.sequence_tokens:
            message = (
                f"{key}: {len(prompt)} tokens and max_tokens={new_tokens} are more than the {limits.sequence_tokens} that this "
                "server holds of one sequence; shorten the prompt or ask for fewer"
            )
            raise BadRequest(message, key, "context_length_exceeded")

    def _sampling(self, body: CompletionBody | ChatBody, prompt_logprobs: bool) -> Sampling:
        stops = body.stops
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
            raise BadRequest(f"stop: at most {MAX_STOPS} strings of at most {MAX_STOP_CHARACTERS} characters each", "stop")
        bias: Any = body.logit_bias  # JSON's keys are strings, which Sampling turns into ids
        try:
            sampling = Sampling(
                top_k=max(body.top_k, 0), top_p=body.top_p, min_p=body.min_p, min_tokens=body.min_tokens,
                repetition_penalty=body.repetition_penalty, presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty, logit_bias=bias, stop=stops, best=body.best,
                prompt_logprobs=prompt_logprobs,
            )  # fmt: skip
            sampling.validate(self.vocab_size)
        except UserError as error:
            message = str(error)
            key = message.partition("=")[0]
            if key == "best":  # what the engine calls it
                key = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
                message = message.replace("best", key, 1)
            raise BadRequest(message, key) from None
        return sampling
