"""A served store for tests: its server in this process or in one of its own, and clients of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from waiting import wait_until

from elastictrain.clock import SystemClock
from elastictrain.rendezvous.endpoint import Endpoint
from elastictrain.rendezvous.secret import Secret
from elastictrain.rendezvous.served.hosting import Hosting
from elastictrain.rendezvous.served.served_store import ServedStore, make_session
from elastictrain.rendezvous.served.server import StoreServer
from elastictrain.rendezvous.served.settings import ServedSettings

CLOCK = SystemClock()
LOCALHOST = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((LOCALHOST, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def settings_of(port: int, **rest: Any) -> ServedSettings:
    return ServedSettings(endpoint=Endpoint(LOCALHOST, port), **rest)


def serve(port: int = 0, *, secret: str | None = None, gather_s: float = 0.0, host: str = "host", **rest: Any) -> Any:
    """A server in a thread of this process; `port` of the result tells where."""
    listener = socket.create_server((LOCALHOST, port))
    found: int = listener.getsockname()[1]
    report = rest.pop("report", lambda line: None)
    hidden = None if secret is None else Secret(secret)
    server = StoreServer([listener], secret=hidden, host=host, clock=CLOCK, report=report, gather_s=gather_s, **rest)
    server.port = found  # type: ignore[attr-defined]
    return server


def connect(port: int, *, secret: str | None = None, hosting: Hosting | None = None, **rest: Any) -> ServedStore:
    session = rest.pop("session", None) or make_session()
    on_trouble: Callable[[str], None] = rest.pop("on_trouble", lambda line: None)
    hidden = None if secret is None else Secret(secret)
    return ServedStore(
        settings_of(port, **rest), CLOCK, secret=hidden, session=session, on_trouble=on_trouble, hosting=hosting
    )


class ServerProcess:
    """A server in a process of its own, at a port that stays the same over restarts. Each one begins empty."""

    def __init__(self, *, gather_s: float = 1.0, secret: str | None = None) -> None:
        self.port = free_port()
        self._words = [str(self.port), str(gather_s), secret or ""]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, *self._words], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline()) == {"port": self.port}

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def stop(self) -> None:
        """Stop the process, and wait until it stands still."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def resume(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()


@contextlib.contextmanager
def run_server(**options: Any) -> Iterator[ServerProcess]:
    server = ServerProcess(**options)
    try:
        yield server
    finally:
        server.kill()


def main() -> None:
    port, gather_s, secret = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] or None
    server = serve(port, secret=secret, gather_s=gather_s)
    print(json.dumps({"port": server.port}), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
