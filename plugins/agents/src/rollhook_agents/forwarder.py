"""Runs in a sandbox: takes HTTP requests on loopback and passes them on over stdin and stdout.

One JSON object a line. Out: `{"port": n}` once; for a request `{"id", "method", "path", "headers", "body"}`,
the body in base64; `{"id", "gone": true}` when a client has left. In: `{"id", "status", "headers"}`, then any
number of `{"id", "data"}` in base64, then `{"id", "end": true}`. Ends when its stdin does. Standard library
only, Python 3.8 or later: its text is given to a Python of the sandbox.
"""

import base64
import itertools
import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LONGEST = 16 << 20
KEPT = ("content-type", "anthropic-version", "x-api-key", "authorization", "accept")
answers: "dict[int, queue.Queue[dict[str, Any]]]" = {}
numbers = itertools.count(1)
writing = threading.Lock()


def say(**fields: Any) -> None:
    """Write one line."""
    with writing:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


class Forward(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Pass a GET on."""
        self.forward(b"")

    def do_POST(self) -> None:
        """Pass a POST on."""
        try:
            length = int(self.headers.get("Content-Length") or -1)
        except ValueError:
            length = -1
        if not 0 <= length <= LONGEST:
            self.close_connection = True
            self.send_error(411 if length < 0 else 413)
            return
        self.forward(self.rfile.read(length))

    def forward(self, body: bytes) -> None:
        """Pass a request on and give the client what comes back."""
        number = next(numbers)
        answers[number] = queue.Queue()
        headers = {name.lower(): value for name, value in self.headers.items() if name.lower() in KEPT}
        say(
            id=number,
            method=self.command,
            path=self.path,
            headers=headers,
            body=base64.b64encode(body).decode(),
        )
        try:
            head = answers[number].get()
            self.send_response(head["status"])
            for name, value in head["headers"].items():
                self.send_header(name, value)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while True:
                part = answers[number].get()
                data = base64.b64decode(part.get("data", ""))
                if data:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                if part.get("end"):
                    self.wfile.write(b"0\r\n\r\n")
                    return
        except OSError:
            self.close_connection = True
            say(id=number, gone=True)
        finally:
            del answers[number]

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


def main() -> None:
    """Serve until stdin ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Forward)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(port=server.server_address[1])
    for line in sys.stdin:
        part = json.loads(line)
        waiting = answers.get(part["id"])
        if waiting is not None:
            waiting.put(part)


if __name__ == "__main__":
    main()
