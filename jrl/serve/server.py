"""The server's life: it starts with the engine's thread, listens while the weights are loaded, and ends in order."""

import logging
import socket
from types import FrameType

import uvicorn

from jrl.errors import UserError
from jrl.rollout.service import Service
from jrl.serve.app import Api, make_app
from jrl.serve.backend import Backend
from jrl.serve.flags import Settings
from jrl.serve.metrics import ServerMetrics

log = logging.getLogger("jrl")

LAST_WORDS_S = 5  # for clients to hear of the end after the time of grace


class Server(uvicorn.Server):
    """Ends in order on the first signal, at once on a second one.

    `error` is what kept the model from being loaded, if something did.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.error: BaseException | None = None
        backend = Backend(settings)
        self.service = Service(
            backend.make_engine, lambda seconds: metrics.first_token(seconds), self._failed, settings.warm_up_s
        )
        metrics = ServerMetrics(lambda: self.service.snapshot)
        read_weights = backend.read_weights if settings.allow_weight_updates else None
        api = Api(self.service, metrics, settings.name, lambda: backend.served, settings.max_body_bytes, read_weights)
        super().__init__(
            uvicorn.Config(
                make_app(api, settings.api_key, settings.allow_weight_updates), log_level="warning", access_log=False,
                log_config=None,  # uvicorn's would close the handlers that others have set up
                lifespan="off", timeout_graceful_shutdown=round(settings.grace_s) + LAST_WORDS_S,
            )
        )  # fmt: skip

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.start()
        try:
            await super().serve(sockets)
        finally:
            self.service.stop(0)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's own would raise the signal again in the end, and the exit status would not be 0."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.service.stop(self.settings.grace_s)

    def _failed(self, error: BaseException) -> None:
        """In the engine's thread. Without a model there is nothing to serve; later the server stays, unhealthy."""
        if self.service.engine is None:
            self.error, self.should_exit = error, True
        else:
            log.error("the engine has failed", exc_info=error)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
      UserError: the address is not to be had.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--host={host} --port={port}: cannot be listened on ({reason}); choose another") from None
