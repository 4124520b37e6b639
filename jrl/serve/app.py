"""The routes: OpenAI's completions, chat completions and models; health, metrics, and new weights where that is allowed."""

import asyncio
import concurrent.futures
import functools
import pathlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jrl.rollout.service import Job, Service
from jrl.serve import replies
from jrl.serve.backend import Served
from jrl.serve.http import (
    DISCONNECTED,
    ApiError,
    EventStream,
    as_api_error,
    install_errors,
    key_check,
    read_body,
    unless_gone,
)
from jrl.serve.metrics import ServerMetrics
from jrl.serve.schema import BadRequest, ChatBody, CompletionBody, Encoder, LoadBody, parse
from jrl.serve.text import Pieces, make_decode


class Model:
    """The loaded model as the routes use it."""

    def __init__(self, served: Served):
        self.limits = served.limits
        self.encoder = Encoder(served.tokenizer, served.vocab_size, served.limits)
        self.pieces, self.decode = Pieces(served.tokenizer), make_decode(served.tokenizer)


class Api:
    """What the routes do.

    Args:
      name: of the model, as clients call it.
      served: the model behind it, None until it is loaded.
      body_bytes: the longest body.
      read_weights: a directory to parameters as the engine wants them, called in a thread; None where updates are not allowed.
    """

    def __init__(
        self,
        service: Service,
        metrics: ServerMetrics,
        name: str,
        served: Callable[[], Served | None],
        body_bytes: int,
        read_weights: Callable[[pathlib.Path], Any] | None = None,
    ):
        self.service, self.metrics, self.name, self._served = service, metrics, name, served
        self._loaded: Model | None = None
        self.body_bytes, self._read_weights = body_bytes, read_weights
        self._created = int(time.time())
        self._loading = asyncio.Lock()
        # One thread, so that a long prompt keeps neither the event loop waiting nor another thread out of the tokenizer.
        self._encoding = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="encode")

    # Generation ----------------------------------------------------------------------------------------------------

    async def complete(self, http: HttpRequest) -> Response:
        """POST /v1/completions"""
        return await self._timed("completions", http, CompletionBody)

    async def chat(self, http: HttpRequest) -> Response:
        """POST /v1/chat/completions"""
        return await self._timed("chat", http, ChatBody)

    async def _timed(self, endpoint: str, http: HttpRequest, kind: type[CompletionBody] | type[ChatBody]) -> Response:
        began = time.monotonic()
        done = lambda outcome: self.metrics.answered(endpoint, outcome, time.monotonic() - began)  # noqa: E731
        try:
            response: Response = await self._generate(http, parse(kind, await read_body(http, self.body_bytes)), done)
        except Exception as error:
            response = as_api_error(error).response()
        if not isinstance(response, EventStream):  # which ends later
            done("disconnected" if response.status_code == DISCONNECTED else str(response.status_code))
        return response

    async def _generate(self, http: HttpRequest, body: CompletionBody | ChatBody, done: Callable[[str], None]) -> Response:
        self._check_model(body.model)
        model = self._admit()
        encode = functools.partial(model.encoder.encode, body)
        requests = await asyncio.get_running_loop().run_in_executor(self._encoding, encode)
        self._admit()  # others may have come before it meanwhile
        job = self.service.submit(requests, body.stream)
        answer = _Answer(self.name, model, body, job, lambda: self.service.snapshot.version)
        if body.stream:

            def end(outcome: str) -> None:
                self.service.abort(job)
                done(outcome)

            return EventStream(answer.chunks(), end)
        try:
            stayed = await unless_gone(http.receive, answer.collect())
        finally:
            self.service.abort(job)  # of no effect on one that has come to its end
        return JSONResponse(answer.whole()) if stayed else Response(status_code=DISCONNECTED)

    def _admit(self) -> Model:
        """The model, if it is loaded and the queue has room."""
        model, waiting = self._model(), self.service.waiting
        if model is None or self.service.status != "ok":
            raise self.service.refusal()
        if waiting >= model.limits.waiting:
            message = f"{waiting} requests are waiting already; try again later"
            raise ApiError(429, message, "rate_limit_error", code="queue_full")
        return model

    def _model(self) -> Model | None:
        """The model, None until it is loaded."""
        if self._loaded is None and (served := self._served()) is not None:
            self._loaded = Model(served)
        return self._loaded

    def _check_model(self, name: str) -> None:
        if name != self.name:
            message = f"model={name}: is not served here; {self.name} is"
            raise ApiError(404, message, "invalid_request_error", "model", "model_not_found")

    # The rest --------------------------------------------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        """GET /v1/models"""
        return {"object": "list", "data": [self._entry()]}

    async def model(self, name: str) -> dict[str, Any]:
        """GET /v1/models/NAME"""
        self._check_model(name)
        return self._entry()

    def _entry(self) -> dict[str, Any]:
        model = self._model()
        longest = {"max_model_len": model.limits.sequence_tokens} if model else {}
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "jrl", **longest}

    async def health(self) -> Response:
        """GET /health"""
        status, (done, count) = self.service.status, self.service.warmed_up
        body = {"status": status, "weights_version": self.service.snapshot.version}
        if count:
            body["warm_up"] = {"compiled": done, "programs": count}
        return JSONResponse(body, 200 if status == "ok" else 503)

    async def figures(self) -> Response:
        """GET /metrics"""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def load_weights(self, http: HttpRequest) -> dict[str, Any]:
        """POST /v1/load_weights: reads a directory while generation goes on, then goes on with those weights."""
        body = parse(LoadBody, await read_body(http, self.body_bytes))
        assert self._read_weights is not None
        if self.service.status != "ok":
            raise self.service.refusal()
        path = pathlib.Path(body.path)
        if not path.is_dir():  # never a name that would be looked up and fetched from somewhere else
            raise BadRequest(f"path={path}: no such directory on the server; give one with config.json and safetensors", "path")
        if self._loading.locked():
            raise ApiError(409, "other weights are being loaded; try again later", "invalid_request_error", code="busy")
        async with self._loading:
            served = self.service.snapshot.version
            if body.version <= served:
                raise BadRequest(f"version={body.version}: must be above {served}, the one that is served", "version")
            params = await asyncio.to_thread(self._read_weights, path)
            await self.service.load(params, body.version)
        return {"version": body.version}


class _Answer:
    """The answer to one request, out of a job's news."""

    def __init__(self, name: str, model: Model, body: CompletionBody | ChatBody, job: Job, version: Callable[[], int]):
        self._name, self._body, self._job, self._version = name, body, job, version
        self._is_chat = isinstance(body, ChatBody)
        echo = isinstance(body, CompletionBody) and body.echo
        style = replies.Style(
            self._is_chat, body.scored, body.best, echo, response=body.max_tokens != 0, token_ids=body.return_token_ids
        )
        self._choices = [
            replies.Choice(request, model.decode, model.pieces, style) for request in job.requests for _ in range(body.n)
        ]
        self._parts: dict[int, replies.Part] = {}
        self._prompt_tokens = sum(len(request.tokens) for request in job.requests)
        self._tokens = 0  # generated
        self._id = ("chatcmpl-" if self._is_chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())

    async def _read(self) -> AsyncIterator[tuple[int, replies.Part]]:
        """(index of the choice, its next part)"""
        async for news in self._job.news():
            index = news.request * self._body.n + news.sample
            part = self._choices[index].part(news)
            self._tokens += part.tokens
            yield index, part

    async def collect(self) -> None:
        self._parts = {index: part async for index, part in self._read()}

    def whole(self) -> dict[str, Any]:
        """The answer after `collect`."""
        choices = [replies.whole_choice(index, part, self._is_chat) for index, part in sorted(self._parts.items())]
        if self._body.return_token_ids:
            for choice in choices:
                choice["prompt_token_ids"] = self._job.requests[choice["index"] // self._body.n].tokens.tolist()
        return self._frame("", choices) | {"usage": self._usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream."""
        begun: set[int] = set()
        usage = {"usage": None} if self._body.stream_options.include_usage else {}
        async for index, part in self._read():
            # Tokens whose text is held back are not worth an event unless something else is told of them.
            if part.text or part.finish_reason or part.logprobs or part.extra or index not in begun:
                choice = replies.choice_chunk(index, part, self._is_chat, first=index not in begun)
                begun.add(index)
                yield self._frame(".chunk", [choice]) | usage
        if usage:
            yield self._frame(".chunk", []) | {"usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        return replies.usage(self._prompt_tokens, self._tokens)

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": f"chat.completion{kind}" if self._is_chat else "text_completion",
            "created": self._created,
            "model": self._name,
            "system_fingerprint": f"weights-{self._version()}",
            "choices": choices,
        }


def make_app(api: Api, api_key: str | None, weight_updates: bool) -> FastAPI:
    """The application; health and metrics want no key, as their readers seldom have one."""
    app = FastAPI(title="jrl", docs_url=None, redoc_url=None, openapi_url=None)
    install_errors(app)
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(key_check(api_key))])
    v1.add_api_route("/models", api.models, methods=["GET"])
    v1.add_api_route("/models/{name:path}", api.model, methods=["GET"])
    v1.add_api_route("/completions", api.complete, methods=["POST"], response_model=None)
    v1.add_api_route("/chat/completions", api.chat, methods=["POST"], response_model=None)
    if weight_updates:
        v1.add_api_route("/load_weights", api.load_weights, methods=["POST"])
    app.include_router(v1)
    app.add_api_route("/health", api.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", api.figures, methods=["GET"], response_model=None)
    return app
