"""An OpenAI-compatible HTTP server over the rollout engine: python -m jrl.rollout.serve --model=PATH [--port=8000] [--help]

A mistake on the command line or in the model is one line on stderr and exit status 2. SIGTERM and SIGINT end the server in
order, with status 0: it takes no new requests, gives those under way `--grace_s` seconds, and answers the rest with an error.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from jrl.errors import UserError, entry_point
from jrl.serve.flags import Settings, parse

log = logging.getLogger("jrl")


def run(settings: Settings) -> None:
    """Serves until a signal ends it.

    Raises:
      UserError: the address or the model is not to be had, or a package is missing.
    """
    try:  # here, so that help and mistakes do not wait for jax to load
        from jrl.serve.server import LAST_WORDS_S, Server, listen
    except ModuleNotFoundError as error:
        raise UserError(f"the server needs the package {error.name}; pip install 'jrl[serve]'") from None
    sock = listen(settings.host, settings.port)
    server = Server(settings)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    log.info("listening on http://%s:%d, loading %s", host, sock.getsockname()[1], settings.model)
    asyncio.run(server.serve([sock]))
    ended = server.service.join(LAST_WORDS_S)
    if server.error is not None:
        raise server.error
    if not ended:  # it is in a call that nothing can interrupt, and that would crash while Python falls apart around it
        logging.shutdown()
        os._exit(0)


@entry_point
def main(args: Sequence[str]) -> None:
    """Serves until it is told to end."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)  # on stderr
    logging.getLogger("jrl").setLevel(logging.INFO)
    run(parse(args))


if __name__ == "__main__":
    sys.exit(main())
