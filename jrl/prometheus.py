"""A run's numbers for Prometheus: the latest value of every metric, and what each process is doing.

Gauges are called as the metrics, after `jrl_`, with _ for what Prometheus does not allow: actor/pg_loss is `jrl_actor_pg_loss`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jrl.errors import UserError


class Exporter:
    """Serves on a port, in a thread, until `close`.

    Raises:
      UserError: the package is not there, or the port is taken.
    """

    def __init__(self, port: int):
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise UserError(f"config.log.prometheus_port={port}: needs prometheus-client; pip install 'jrl[serve]'") from None
        self._values: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, registry=registry)
        except OSError as error:
            raise UserError(f"config.log.prometheus_port={port}: cannot be served on ({error}); give another") from None

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The numbers of a step, which take the place of former ones of the same names."""
        self._values |= {name: float(value) for name, value in metrics.items()} | {"step": float(step)}

    def collect(self) -> Iterator[Any]:
        """Called by the registry for each request."""
        from prometheus_client.core import GaugeMetricFamily

        for name, value in sorted(self._values.items()):
            family = GaugeMetricFamily("jrl_" + re.sub(r"\W", "_", name), name)
            family.add_metric([], value)
            yield family
        yield from self._activities(GaugeMetricFamily)

    def _activities(self, gauge: Any) -> Iterator[Any]:
        from jrl.launch.cluster import states

        family = gauge(
            "jrl_activity_seconds", "how long each process has been doing this", labels=["process", "host", "activity", "step"]
        )
        for state in states():
            family.add_metric([str(state["process"]), state["host"], state["doing"], str(state["step"])], state["seconds"])
        yield family

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
