"""What the server's routes need of HTTP: errors in OpenAI's form, keys, bodies of limited size, event streams, departures."""

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from jrl.errors import UserError
from jrl.rollout.service import DeadlineExceeded, Unavailable
from jrl.serve.schema import BadRequest

log = logging.getLogger("jrl")

BODY_TIMEOUT_S = 30  # for a client to send its body
SEND_TIMEOUT_S = 60  # for a client to take one event
RETRY_AFTER_S = 1
DISCONNECTED = 499  # what proxies log for a client that has gone; nobody reads it


class ApiError(Exception):
    """An answer other than the one that was asked for."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = {401: {"WWW-Authenticate": "Bearer"}}.get(status, {})
        if status in (429, 503):
            self.headers = {"Retry-After": str(RETRY_AFTER_S)}

    def response(self) -> Response:
        return JSONResponse(self.body, self.status, self.headers)


def as_api_error(error: Exception) -> ApiError:
    """How a client hears of an exception; what is nobody's mistake is logged and not told in detail."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadRequest):
        return ApiError(400, str(error), "invalid_request_error", error.param, error.code)
    if isinstance(error, UserError):
        return ApiError(400, str(error), "invalid_request_error")
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), "server_error", code="unavailable")
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, str(error), "server_error", code="deadline_exceeded")
    if isinstance(error, ClientDisconnect):
        return ApiError(DISCONNECTED, "the client has gone", "invalid_request_error")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), "invalid_request_error")
    log.error("a request has failed", exc_info=error)
    return ApiError(500, "internal error; the server's log says more", "server_error")


def install_errors(app: FastAPI) -> None:
    """Every error of a route is answered in OpenAI's form."""

    async def answer(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    for kind in (ApiError, UserError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)


def key_check(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets requests with the key pass; all of them if there is none."""
    expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        # In constant time, so that the time of refusal does not tell how much of a guess was right.
        if expected is not None and not hmac.compare_digest(given, expected):
            raise ApiError(
                401, "a wrong API key or none; send the header Authorization: Bearer KEY", "invalid_request_error",
                code="invalid_api_key",
            )  # fmt: skip

    return check


async def read_body(request: Request, most: int) -> bytes:
    """The body, of at most so many bytes.

    Raises:
      ApiError: a longer body, or one that takes too long to come.
    """
    too_long = ApiError(413, f"the body is longer than {most} bytes", "invalid_request_error", code="request_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > most:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S} s", "invalid_request_error") from None
    return bytes(body)


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> bool:
    """Runs `work` to its end, or cancels it when the client goes.

    Returns:
      whether it came to its end; its exception, if that is one, is raised.
    """
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return doing.done()
    finally:
        doing.cancel()
        gone.cancel()


class EventStream(Response):
    """Server-sent events.

    Args:
      events: JSON objects, each an event. An exception among them becomes a last event of OpenAI's form.
      on_end: called once at the end with the outcome: "200", another status after an error, or "disconnected".
    """

    def __init__(self, events: AsyncIterator[dict[str, Any]], on_end: Callable[[str], None]):
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_end, self._outcome = events, on_end, "disconnected"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except TimeoutError:
            log.warning("a client took no event for %d s; its stream is closed", SEND_TIMEOUT_S)
        finally:
            self._on_end(self._outcome)

    async def _send_all(self, send: Send) -> None:
        async def put(text: str, more: bool = True) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await put(f"data: {json.dumps(event, separators=(',', ':'))}\n\n")
        except TimeoutError:
            raise
        except Exception as error:
            told = as_api_error(error)
            await put(f"data: {json.dumps(told.body)}\n\n", more=False)
            self._outcome = str(told.status)
        else:
            await put("data: [DONE]\n\n", more=False)
            self._outcome = "200"
