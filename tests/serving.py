"""Servers of the tiny random model in threads of the test's process."""

import asyncio
import contextlib
import threading
import time

import httpx
import openai

from jrl.serve.flags import Settings
from jrl.serve.server import Server, listen

# Large pages, so that few programs are compiled.
WIDE = Settings(
    "random:tiny", name="tiny", api_key="secret", slots=4, max_tokens=96, max_new_tokens=80, page_size=32, decode_chunk=4,
    replica=1, max_samples=6, allow_weight_updates=True, warm_up_s=0,
)  # fmt: skip
NARROW = Settings(
    "random:tiny", name="tiny", slots=1, max_tokens=2048, page_size=512, decode_chunk=2, replica=1, max_waiting=1,
    max_body_bytes=2000, warm_up_s=0,
)  # fmt: skip
LONG = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}  # a thousand steps of the narrow server


class Running:
    """A server in a thread of this process."""

    def __init__(self, settings):
        sock = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self.server = Server(settings)
        self.key = settings.api_key
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve(sock)))

    async def _serve(self, sock):
        self.loop = asyncio.get_running_loop()
        await self.server.serve([sock])

    def client(self, **options):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=60, **options)

    def ready(self):
        wait_for(lambda: httpx.get(f"{self.url}/health").status_code == 200)

    def figures(self):
        """Name, with labels -> value."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def idle(self):
        now = self.figures()
        return now["jrl_requests_running"] == now["jrl_requests_waiting"] == now['jrl_pages{state="used"}'] == 0


def wait_for(condition, timeout_s=60):
    end = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@contextlib.contextmanager
def running(settings):
    it = Running(settings)
    it.thread.start()
    it.before = httpx.get(f"{it.url}/health", timeout=60)  # while the weights are being loaded
    it.refused = httpx.post(f"{it.url}/v1/completions", json={"model": "tiny", "prompt": "x"}, timeout=60)
    it.ready()
    yield it
    it.server.should_exit = True
    it.thread.join(30)
    assert not it.thread.is_alive() and it.server.service.join(30)
