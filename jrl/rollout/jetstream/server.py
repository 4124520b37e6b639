"""JetStream's gRPC server over engines of this package: how they are made, and how the server ends.

A replica is an engine of JetStream's. They share its queue of prompts; where some only cache prompts, their pages go to the
others. Left out: weight updates over gRPC, for which JetStream's protocol has no call. Within the process, assign to the
`weights` of every engine.
"""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Sequence
from types import FrameType

import jax

from jrl import platform
from jrl.errors import UserError
from jrl.models.load import load_model, read_arch
from jrl.rollout.jetstream.compat import config_lib, server_lib
from jrl.rollout.jetstream.engine import JetStreamEngine, Weights
from jrl.rollout.jetstream.flags import Settings, make_lengths
from jrl.rollout.weights import weight_publisher
from jrl.serve.backend import unrolled
from jrl.sharding.layout import Layout

log = logging.getLogger("jrl")

LOOK_S = 1.0  # between two looks at whether the driver is alive


def make_engines(settings: Settings) -> list[JetStreamEngine]:
    """Engines with their weights, on `--tensor` devices each.

    Raises:
      UserError: naming the flag, its value and the remedy.
    """
    s = settings
    max_tokens, max_prefill = make_lengths(s, read_arch(s.model))  # before any weight is read
    unroll = unrolled(s, s.max_new_tokens or max_tokens)
    layouts, dtype = _layouts(s), platform.compute_dtype(s.dtype)
    model = load_model(s.model, layouts[0], s.seed)
    platform.configure()  # only now: what loading leaves behind goes back to the system
    engines = []
    for index, layout in enumerate(layouts):
        as_served = weight_publisher(model.arch, layouts[0], layout, dtype, s.weights)
        engines.append(
            JetStreamEngine(
                model.arch, layout, model.tokenizer, model.eos_ids, Weights(as_served(model.params)),
                slots=s.slots, max_tokens=max_tokens, max_prefill_length=max_prefill, samples_per_slot=s.samples_per_slot,
                max_new_tokens=s.max_new_tokens, page_size=s.page_size, dtype=dtype, temperature=s.temperature,
                seed=s.seed + index, attention=s.attention, kv=s.kv, unroll_layers=unroll,
            )
        )  # fmt: skip
    return engines


def _layouts(settings: Settings) -> list[Layout]:
    s, devices = settings, jax.devices()
    count = len(devices) // s.tensor if s.replica == -1 else s.replica
    if not 0 < count * s.tensor <= len(devices):
        raise UserError(f"--replica={s.replica} --tensor={s.tensor}: there are {len(devices)} devices; use fewer")
    if s.prefill_replica and s.prefill_replica >= count:
        raise UserError(f"--prefill_replica={s.prefill_replica}: leaves none of {count} engines to decode; lower it")
    try:
        return [Layout.rollout({"tensor": s.tensor}, devices[i * s.tensor : (i + 1) * s.tensor]) for i in range(count)]
    except UserError as error:
        raise UserError(f"--tensor={s.tensor}: {error}") from None


def make_config(engines: Sequence[JetStreamEngine], prefill: int = 0) -> config_lib.ServerConfig:
    """JetStream's configuration of engines that exist; the first `prefill` of them only cache prompts, 0 for none."""
    slices = tuple(f"jrl={engine.mesh.size}" for engine in engines)
    makers = tuple(lambda devices, engine=engine: engine for engine in engines)
    if not prefill:
        return config_lib.ServerConfig(interleaved_slices=slices, interleaved_engine_create_fns=makers)
    return config_lib.ServerConfig(
        prefill_slices=slices[:prefill], generate_slices=slices[prefill:],
        prefill_engine_create_fns=makers[:prefill], generate_engine_create_fns=makers[prefill:],
    )  # fmt: skip


def start(
    engines: Sequence[JetStreamEngine], host: str, port: int, *, prefill: int = 0, metrics_port: int = 0
) -> server_lib.JetStreamServer:
    """A server that answers on an address; `stop` ends it.

    Args:
      prefill: how many of the engines, the first ones, only cache prompts.
      metrics_port: of Prometheus' metrics, 0 for none.
    """
    server_lib._HOST = f"[{host}]" if ":" in host else host  # by itself it listens on all addresses
    return server_lib.run(
        port=port,
        config=make_config(engines, prefill),
        devices=[device for engine in engines for device in engine.mesh.devices.flat],
        jax_padding=False,
        metrics_server_config=config_lib.MetricsServerConfig(port=metrics_port) if metrics_port else None,
    )


def stop(server: server_lib.JetStreamServer, grace_s: float) -> None:
    """Refuses what comes, gives what is under way so many seconds, then ends the server's threads."""
    ended = server._grpc_server.stop(grace_s)  # JetStream would stop the driver first, and then wait for nothing
    asyncio.run_coroutine_threadsafe(ended, server._loop).result()
    server.stop()


def find_port(flag: str, host: str, port: int) -> int:
    """The port, or one that is free for 0. gRPC itself would share a port with another server, and never say.

    Raises:
      UserError: the address is not to be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as sock:
            return sock.getsockname()[1]
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--host={host} --{flag}={port}: cannot be listened on ({reason}); choose another") from None


def run(settings: Settings) -> bool:
    """Serves until SIGTERM or SIGINT; False if the driver has failed instead.

    Raises:
      UserError: the address or the model is not to be had.
    """
    s = settings
    port = find_port("port", s.host, s.port)
    if s.metrics_port:
        find_port("metrics_port", "0.0.0.0", s.metrics_port)
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    engines = make_engines(s)

    def ask(number: int, frame: FrameType | None) -> None:
        del number, frame
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    server = start(engines, s.host, port, prefill=s.prefill_replica, metrics_port=s.metrics_port)
    log.info("%s is served on %s:%d, %d sequences at once", s.model, s.host, port, _capacity(engines[s.prefill_replica :]))
    while not asked.wait(LOOK_S) and server._driver.live:
        pass
    stop(server, s.grace_s if server._driver.live else 0)
    return asked.is_set()


def _capacity(engines: Sequence[JetStreamEngine]) -> int:
    return sum(engine.max_concurrent_decodes * engine.samples_per_slot for engine in engines)


def _leave(number: int, frame: FrameType | None) -> None:
    """While the weights are loaded there is nothing to end in order."""
    del number, frame
    raise SystemExit(0)
