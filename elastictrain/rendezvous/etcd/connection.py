"""One gRPC channel to one member of an etcd cluster, and the login that goes with it."""

from __future__ import annotations

import asyncio
import math
import os
import ssl
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from elastictrain.errors import ConfigError
from elastictrain.rendezvous.endpoint import Endpoint
from elastictrain.rendezvous.etcd.failures import Action, EtcdError, failed_call
from elastictrain.rendezvous.etcd.settings import CONF_OPTION, EtcdSettings

_MAX_MESSAGE_BYTES = 128 * 1024 * 1024
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 6000),  # below 5 s etcd answers GOAWAY too_many_pings and ends the watches
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 2000),  # the one that finds a hung member; its default is a minute
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the back-off of the one given up
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_http_proxy", 0),  # a proxy for the outside world does not lead to the cluster's own etcd
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
)
_METHODS = {
    "KV": ("Range", "Txn"),
    "Lease": ("LeaseGrant", "LeaseRevoke", "LeaseTimeToLive", "LeaseKeepAlive"),
    "Watch": ("Watch",),
    "Auth": ("Authenticate",),
}


class Connection:
    """A channel to one member. Made, used and closed on the I/O thread.

    One member at a time, and another channel for the next: a channel of several addresses checks every certificate
    against one and the same name, takes no names but addresses, and never asks DNS again for a member that moved.
    """

    def __init__(self, rpc: Any, endpoint: Endpoint, settings: EtcdSettings, *, number: int) -> None:
        self.endpoint = endpoint
        self.number = number
        self.is_closed = False
        self.last_answer_s = -math.inf
        self._rpc = rpc
        self._settings = settings
        self._token: str | None = None if settings.user is not None else ""
        self._login_lock = asyncio.Lock()
        target = f"dns:///{endpoint.address}"
        self._channel: Any
        if settings.protocol == "https":
            self._channel = grpc.aio.secure_channel(target, _read_credentials(settings), options=_OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._methods: dict[str, Any] = {}
        for service, names in _METHODS.items():
            stub = getattr(rpc, f"{service}Stub")(self._channel)
            self._methods.update({name: getattr(stub, name) for name in names})

    async def call(self, method: str, request: Any, *, timeout_s: float) -> Any:
        """Send one request and wait for its answer. Raises EtcdError."""
        metadata = await self._metadata(timeout_s)
        failure: BaseException
        try:
            return await self._method(method)(request, timeout=timeout_s, metadata=metadata)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            failure = self.explain(error)
        # Raised here, so that gRPC's own error, whose traceback holds the channel, is not kept as its context.
        raise failure

    async def open_stream(self, method: str, request: Any, *, timeout_s: float) -> Stream:
        """Open a stream and send its first request. Raises EtcdError."""
        metadata = await self._metadata(timeout_s)
        try:
            stream = Stream(self, self._method(method)(metadata=metadata))
        except grpc.aio.UsageError as error:
            raise self.explain(error) from None
        await stream.write(request, timeout_s=timeout_s)
        return stream

    def forget_login(self) -> None:
        """Make the next call log in again."""
        if self._settings.user is not None:
            self._token = None

    async def close(self) -> None:
        """End the channel and every call on it."""
        self.is_closed = True
        # Tracebacks of errors that somebody keeps lead here: they must not keep the channel and its descriptors.
        channel, self._channel, self._methods = self._channel, None, {}
        if channel is not None:
            await channel.close()

    def _method(self, name: str) -> Any:
        if name not in self._methods:
            raise grpc.aio.UsageError("the channel is closed")
        return self._methods[name]

    async def _metadata(self, timeout_s: float) -> tuple[tuple[str, str], ...]:
        # A member without a leader refuses at once instead of keeping the call until it times out.
        wanted = (("hasleader", "true"),)
        if self._token is None:
            async with self._login_lock:
                if self._token is None:
                    self._token = await self._log_in(timeout_s)
        return (*wanted, ("token", self._token)) if self._token else wanted

    async def _log_in(self, timeout_s: float) -> str:
        """Give a new token, "" where etcd has authentication switched off."""
        request = self._rpc.AuthenticateRequest(name=self._settings.user, password=_read_password(self._settings))
        failure: BaseException
        try:
            answer = await self._method("Authenticate")(request, timeout=timeout_s)
            return str(answer.token)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            failure = self.explain(error)
        if isinstance(failure, EtcdError) and failure.action is Action.NO_LOGIN:
            return ""
        raise failure

    def explain(self, error: BaseException) -> BaseException:
        """Give the error to raise for one of gRPC's; a call that ended with its channel is told from a task's end."""
        if isinstance(error, grpc.aio.AioRpcError):
            return failed_call(self.endpoint.address, error.code().name, error.details() or "")
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            return asyncio.CancelledError()
        return EtcdError(f"etcd at {self.endpoint.address}: the connection was given up", action=Action.RECONNECT)


class Stream:
    """A stream of requests and answers on a Connection."""

    def __init__(self, connection: Connection, call: Any) -> None:
        self.connection = connection
        self._call = call
        self._is_closed = False

    async def write(self, request: Any, *, timeout_s: float) -> None:
        """Send a request. Raises EtcdError."""
        await self._guard(self._call.write(request), timeout_s)

    async def finish_writing(self) -> None:
        """Tell the server that no request follows. Raises EtcdError."""
        await self._guard(self._call.done_writing(), None)

    async def read(self, timeout_s: float | None = None) -> Any:
        """Wait for the next answer, by default for ever. Raises EtcdError when there is none any more."""
        answer = await self._guard(self._call.read(), timeout_s)
        if answer is grpc.aio.EOF:
            code, details = await self._call.code(), await self._call.details()
            name = "UNAVAILABLE" if code is grpc.StatusCode.OK else code.name
            raise failed_call(self.connection.endpoint.address, name, details or "the stream has ended")
        return answer

    def close(self) -> None:
        """End the stream. A `read` that waits raises EtcdError."""
        self._is_closed = True
        self._call.cancel()

    async def _guard(self, operation: Any, timeout_s: float | None) -> Any:
        address = self.connection.endpoint.address
        failure: BaseException
        try:
            if timeout_s is None:
                return await operation
            async with asyncio.timeout(timeout_s):
                return await operation
        except TimeoutError:
            self._call.cancel()
            failure = failed_call(address, "DEADLINE_EXCEEDED", "")
        except asyncio.InvalidStateError:
            failure = failed_call(address, "UNAVAILABLE", "the stream has ended")
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            failure = self.connection.explain(error)
        if self._is_closed and isinstance(failure, EtcdError):
            failure = EtcdError(f"etcd at {address}: the stream was closed", action=Action.RETRY)
        raise failure


def _read_credentials(settings: EtcdSettings) -> Any:
    """Read the certificates, anew for each connection: those of a long run are renewed under it."""
    authority = settings.cacert
    if authority is None:
        # The authorities that this machine trusts, as every other program on it; gRPC would take its own list.
        found = ssl.get_default_verify_paths().cafile
        authority = found if found and os.path.exists(found) else None
    try:
        roots, key, cert = (
            Path(name).read_bytes() if name else None for name in (authority, settings.key, settings.cert)
        )
    except OSError as error:
        raise EtcdError(
            f"{CONF_OPTION}: cannot read {error.filename} ({error.strerror})", action=Action.RETRY
        ) from None
    return grpc.ssl_channel_credentials(roots, key, cert)


def _read_password(settings: EtcdSettings) -> str:
    if settings.password_file is None:
        return settings.password.reveal() if settings.password is not None else ""
    try:
        return read_password_file(settings.password_file)
    except ConfigError as error:
        raise EtcdError(str(error), action=Action.RETRY) from None


def read_password_file(path: str) -> str:
    """Read the password of a file's first line. Raises ConfigError."""
    field = f"{CONF_OPTION} password_file"
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "no text"
        raise ConfigError(f"{field}: expected a file with the password, seen {path} ({what})", field=field) from None
    if not lines or not lines[0]:
        raise ConfigError(f"{field}: expected a file with the password, seen {path} (empty)", field=field)
    return lines[0]
