"""What tests of rewards over HTTP share."""

import contextlib
import http.server
import json
import threading

import pytest


@pytest.fixture
def service():
    """A server whose `reply(body) -> (status, bytes)` a test sets; it keeps the requests."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.seen.append((body, dict(self.headers)))
            status, answer = server.reply(body)
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.seen, server.reply = True, [], None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
