"""JetStream's gRPC server over the paged engine: python -m jrl.rollout.jetstream_serve --model=PATH [--port=9000] [--help]

A mistake on the command line or in the model, or a package that is missing, is one line on stderr and exit status 2. SIGTERM
and SIGINT end the server in order, with status 0: it takes no new requests, gives those under way `--grace_s` seconds, and
cancels the rest. A failure of the engine ends it with status 1.

Connections are neither encrypted nor authenticated, as JetStream has no means of either.
"""

import logging
import sys
from collections.abc import Sequence

from jrl.errors import entry_point
from jrl.rollout.jetstream.flags import parse


@entry_point
def main(args: Sequence[str]) -> int:
    """The exit status: 0, or 1 after a failure."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)  # on stderr
    logging.getLogger("jrl").setLevel(logging.INFO)
    settings = parse(args)
    from jrl.rollout.jetstream.server import run  # here, so that help and mistakes do not wait for jax to load

    return 0 if run(settings) else 1


if __name__ == "__main__":
    sys.exit(main())
