"""The endpoint: real HTTP over real sockets, from well-behaved and from hostile clients."""

from __future__ import annotations

import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from elastictrain.clock import ManualClock
from elastictrain.errors import ConfigError
from elastictrain.exporter import MAX_CONNECTIONS, MAX_REQUEST_BYTES, Exporter, start_exporter
from elastictrain.metrics import RunMetrics


class Health:
    problem: str | None = None

    def __call__(self) -> str | None:
        return self.problem


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def exporter(health: Health) -> Iterator[Exporter]:
    registry = CollectorRegistry()
    metrics = RunMetrics(registry, run_id="run-1", clock=ManualClock())
    metrics.committed(0, step=1, samples=4, seconds=0.1)
    exporter = start_exporter(registry, "127.0.0.1", 0, health=health)
    yield exporter
    exporter.close()


def get(exporter: Exporter, path: str, *, accept: str = "", method: str = "GET") -> tuple[int, str, bytes]:
    url = f"http://127.0.0.1:{exporter.port}{path}"
    request = urllib.request.Request(url, headers={"Accept": accept}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def connect(exporter: Exporter) -> socket.socket:
    return socket.create_connection(("127.0.0.1", exporter.port), timeout=10)


def read_all(sock: socket.socket) -> bytes:
    chunks = []
    while chunk := sock.recv(65_536):
        chunks.append(chunk)
    return b"".join(chunks)


def test_exporter_serves_text_or_openmetrics_when_asked(exporter: Exporter) -> None:
    status, content_type, body = get(exporter, "/metrics")
    assert (status, content_type.split(";")[0]) == (200, "text/plain")
    assert b'elastictrain_steps_total{rank="0",run="run-1"} 1.0\n' in body
    accept = "application/openmetrics-text; version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    status, content_type, body = get(exporter, "/metrics?x=1", accept=accept)
    assert (status, content_type.split(";")[0]) == (200, "application/openmetrics-text")
    assert any(family.name == "elastictrain_steps" for family in parse_openmetrics(body.decode()))
    assert exporter.url == f"http://127.0.0.1:{exporter.port}/metrics"


def test_exporter_health_follows_its_callback_when_asked(exporter: Exporter, health: Health) -> None:
    assert get(exporter, "/healthz")[::2] == (200, b"ok\n")
    health.problem = "1 of at least 2 workers"
    assert get(exporter, "/healthz")[::2] == (503, b"1 of at least 2 workers\n")


def test_exporter_refuses_other_paths_and_methods_when_asked(exporter: Exporter) -> None:
    assert get(exporter, "/nowhere")[0] == 404
    assert get(exporter, "/")[0] == 200
    assert get(exporter, "/metrics", method="POST")[0] == 405
    assert get(exporter, "/metrics", method="HEAD")[::2] == (200, b"")


def test_exporter_answers_a_request_that_comes_in_pieces(exporter: Exporter) -> None:
    with connect(exporter) as sock:
        for piece in (b"GE", b"T /healthz HT", b"TP/1.1\r\nHost: x\r", b"\n\r", b"\n"):
            sock.sendall(piece)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nok\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
        (b"hello\r\n", b"400"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /metrics SPDY/9\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"A" * 100, b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * (MAX_REQUEST_BYTES + 5000), b"431"),
    ],
)
def test_exporter_answers_400_and_hangs_up_when_the_request_is_garbage(
    exporter: Exporter, request_bytes: bytes, status: bytes
) -> None:
    with connect(exporter) as sock:
        sock.sendall(request_bytes)
        assert read_all(sock).split(b" ")[1] == status
    assert get(exporter, "/healthz")[0] == 200


def test_exporter_keeps_serving_when_more_clients_hang_than_it_has_places(exporter: Exporter) -> None:
    """Clients that connect and say nothing, or stop in the middle, or never read the answer."""
    hanging = []
    try:
        for number in range(3 * MAX_CONNECTIONS):
            sock = connect(exporter)
            sock.sendall((b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\n\r\n")[number % 3])
            hanging.append(sock)
            if number % 8 == 0:
                assert get(exporter, "/metrics")[0] == 200
        assert len(exporter._connections) <= MAX_CONNECTIONS
    finally:
        for sock in hanging:
            sock.close()
    assert get(exporter, "/metrics")[0] == 200


def test_exporter_drops_a_silent_client_when_its_time_is_up(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastictrain.exporter.REQUEST_DEADLINE_S", 0.1)
    with connect(exporter) as sock:
        sock.sendall(b"GET /metrics HTT")
        assert sock.recv(1) == b""


def test_exporter_survives_clients_that_reset(exporter: Exporter) -> None:
    for _ in range(20):
        sock = connect(exporter)
        sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
    assert get(exporter, "/metrics")[0] == 200


def test_exporter_serves_a_large_page_whole_when_the_client_reads_late() -> None:
    registry = CollectorRegistry()
    counter = Counter("big", "Large.", ["label"], registry=registry)
    for number in range(20_000):
        counter.labels(f"{number}" + "x" * 100).inc()
    exporter = start_exporter(registry)
    try:
        with connect(exporter) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert get(exporter, "/healthz")[0] == 200
            head, _, body = read_all(sock).partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}\r\n".encode() in head
        assert body.count(b"big_total{") == 20_000
    finally:
        exporter.close()


def test_exporter_answers_500_and_goes_on_when_a_callback_raises() -> None:
    def broken() -> str | None:
        raise OSError("the disk is on fire")

    exporter = start_exporter(CollectorRegistry(), health=broken)
    try:
        assert get(exporter, "/healthz")[::2] == (500, b"OSError: the disk is on fire\n")
        assert get(exporter, "/metrics")[0] == 200
    finally:
        exporter.close()


def test_exporter_leaves_no_socket_and_no_thread_when_closed() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    for _ in range(5):
        exporter = start_exporter(CollectorRegistry())
        with connect(exporter):
            assert get(exporter, "/healthz")[0] == 200
            exporter.close()
            exporter.close()
        with pytest.raises(ConnectionRefusedError):
            connect(exporter)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_exporter_takes_the_same_port_again_when_closed(exporter: Exporter) -> None:
    port = exporter.port
    assert get(exporter, "/healthz")[0] == 200
    exporter.close()
    again = start_exporter(CollectorRegistry(), port=port)
    assert again.port == port
    again.close()


def test_exporter_names_port_and_option_when_the_port_is_taken(exporter: Exporter) -> None:
    with pytest.raises(ConfigError, match=rf"port {exporter.port} .*in use.*--metrics-port") as raised:
        start_exporter(CollectorRegistry(), port=exporter.port)
    assert (raised.value.field, raised.value.seen) == ("port", exporter.port)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 65_536), ("127.0.0.1", -1), ("no.such.host.invalid", 0)])
def test_exporter_refuses_an_address_when_it_cannot_exist(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="--metrics-"):
        start_exporter(CollectorRegistry(), host, port)


def test_exporter_closes_cleanly_when_a_client_is_being_served_at_that_moment() -> None:
    """The thread may notice the end by itself, before it is woken."""
    for _ in range(50):
        exporter = start_exporter(CollectorRegistry())
        with connect(exporter) as sock:
            sock.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            exporter.close()
