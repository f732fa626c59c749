"""Requests to an etcd cluster that may be partly or wholly away: one connection at a time, back-off, the next member.

Everything here runs on the I/O thread.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from elastictrain.clock import Clock, Deadline
from elastictrain.errors import ConfigError, StoreError
from elastictrain.rendezvous.endpoint import Endpoint
from elastictrain.rendezvous.etcd.connection import Connection, Stream
from elastictrain.rendezvous.etcd.failures import Action, EtcdError
from elastictrain.rendezvous.etcd.probe import probe
from elastictrain.rendezvous.etcd.settings import ENDPOINT_OPTION, EtcdSettings
from elastictrain.rendezvous.trouble import Trouble

T = TypeVar("T")
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
# A member that is only slow gets more time with each attempt, up to so many times the first.
_MOST_PATIENCE = 4
_SHORTEST_ATTEMPT_S = 0.1
_CLUSTER = "etcd"


class Client:
    """Calls by method name. Before etcd has answered once, what the user must change is a ConfigError at once; after
    that nothing ends the client, because a run must outlive any trouble of its store."""

    def __init__(self, rpc: Any, settings: EtcdSettings, clock: Clock, on_trouble: Callable[[str], None]) -> None:
        self.rpc = rpc
        self._settings = settings
        self._clock = clock
        self._trouble = Trouble(clock, on_trouble, every_s=settings.report_every_s)
        self._join = Deadline.after("join time-out", settings.join_timeout_s, clock)
        # Each node begins with another member, so that not all burden the first.
        self._order = random.sample(settings.endpoints, len(settings.endpoints))
        self._connection: Connection | None = None
        self._num_connections = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._proven: set[str] = set()
        self._fatal: StoreError | ConfigError | None = None
        self._tried: set[Endpoint] = set()
        self._wrong: dict[Endpoint, ConfigError] = {}
        self._probing = asyncio.Lock()

    async def call(self, method: str, request: Any, *, deadline: Deadline | None = None) -> Any:
        """Ask until there is an answer or the deadline has passed, None for never. Safe only for idempotent requests.

        Raises EtcdError, retryable where the deadline ended it, and ConfigError or StoreError when all is in vain.
        """
        number = 0

        async def attempt() -> Any:
            nonlocal number
            timeout_s = self._settings.attempt_timeout_s * min(2**number, _MOST_PATIENCE)
            number += 1
            if deadline is not None:
                timeout_s = max(_SHORTEST_ATTEMPT_S, min(timeout_s, deadline.left_s(self._clock)))
            return await self.call_once(method, request, timeout_s=timeout_s)

        return await self.retry(attempt, deadline=deadline)

    async def call_once(self, method: str, request: Any, *, timeout_s: float) -> Any:
        """Ask once; twice where the login has expired. Raises as `call` does."""

        async def ask(connection: Connection) -> Any:
            return await connection.call(method, request, timeout_s=timeout_s)

        return await self._ask(method, ask)

    async def ask_stream(self, method: str, request: Any, *, timeout_s: float) -> Any:
        """Ask once by a stream of one request, and give the one answer to it. Raises as `call` does."""

        async def ask(connection: Connection) -> Any:
            stream = await connection.open_stream(method, request, timeout_s=timeout_s)
            try:
                await stream.finish_writing()
                return await stream.read(timeout_s)
            finally:
                stream.close()

        return await self._ask(method, ask)

    async def open_watch(self, request: Any, *, timeout_s: float) -> tuple[Stream, Any]:
        """Open a watch that stays, and wait for etcd's first answer to it. Raises as `call` does."""

        async def ask(connection: Connection) -> tuple[Stream, Any]:
            stream = await connection.open_stream("Watch", request, timeout_s=timeout_s)
            try:
                first = await stream.read(timeout_s)
                if first.canceled and first.compact_revision == 0:
                    # A watch is refused in words, not by a status; mostly because the login has expired.
                    refusal = f"the watch was refused: {first.cancel_reason or 'no reason given'}"
                    raise EtcdError(f"etcd at {connection.endpoint.address}: {refusal}", action=Action.LOGIN)
            except BaseException:
                stream.close()
                raise
            return stream, first

        opened: tuple[Stream, Any] = await self._ask("Watch", ask)
        return opened

    async def retry(self, attempt: Callable[[], Awaitable[T]], *, deadline: Deadline | None = None) -> T:
        """Repeat `attempt` with growing pauses while it raises a retryable StoreError, until the deadline."""

        def is_over(state: RetryCallState) -> bool:
            return deadline is not None and self._clock.now_s() + state.upcoming_sleep >= deadline.at_s

        try:
            return await attempt()  # as a rule it succeeds, and all that follows is not needed
        except StoreError as error:
            failures = [error]

        retrying = AsyncRetrying(
            stop=is_over,
            wait=wait_random_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
            retry=retry_if_exception(lambda error: isinstance(error, StoreError) and error.retryable),
            reraise=True,
        )

        async def awaited() -> T:  # tenacity looks at the function to decide whether it awaits the result
            if failures:
                raise failures.pop()
            return await attempt()

        try:
            return await retrying(awaited)
        except EtcdError as error:
            if deadline is None or not error.retryable:
                raise
            raise EtcdError(f"the {deadline.name} is over: {error}", action=error.action) from None

    @property
    def connection_number(self) -> int:
        """Number of the present connection; another one may lead to another state of the cluster."""
        return self._connect().number

    def give_up(self, connection: Connection) -> None:
        """Use another connection from now on; calls on this one fail and are made again by their owners."""
        if connection is self._connection:
            self._connection = None
            self._order.append(self._order.pop(0))
        if not connection.is_closed:
            connection.is_closed = True
            task = asyncio.get_running_loop().create_task(connection.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End every connection. Idempotent."""
        self._fatal = self._fatal or StoreError("the etcd store is closed", retryable=False)
        if self._connection is not None:
            self.give_up(self._connection)
        await asyncio.gather(*self._closing)

    def _connect(self) -> Connection:
        if self._connection is None:
            self._num_connections += 1
            try:
                self._connection = Connection(self.rpc, self._order[0], self._settings, number=self._num_connections)
            except EtcdError as error:
                self._trouble.failed(_CLUSTER, self._describe(error))
                raise
        return self._connection

    async def _ask(self, method: str, ask: Callable[[Connection], Awaitable[Any]]) -> Any:
        for is_last in (False, True):
            if self._fatal is not None:
                raise self._fatal
            connection, began_s = self._connect(), self._clock.now_s()
            try:
                answer = await ask(connection)
            except EtcdError as error:
                if error.action is Action.LOGIN:
                    connection.forget_login()
                    if not is_last:
                        continue
                raise await self._take_failure(connection, error, method, began_s) from None
            self._take_answer(connection, method)
            return answer
        raise AssertionError("unreachable")

    def _take_answer(self, connection: Connection, method: str) -> None:
        connection.last_answer_s = self._clock.now_s()
        self._proven.add(method)
        self._trouble.ended(_CLUSTER, f"etcd at {connection.endpoint.address} answers again")
        self._trouble.ended(method, f"etcd at {connection.endpoint.address} does {method} again")

    async def _take_failure(
        self, connection: Connection, error: EtcdError, method: str, began_s: float
    ) -> StoreError | ConfigError:
        """Do what the failure asks for, and give the error to raise."""
        if self._fatal is not None:
            return self._fatal
        subject, found = method, error
        if error.action is Action.RECONNECT:
            subject = _CLUSTER
            # A member that answered others meanwhile is slow, not gone: a new connection would only add to its work.
            if connection.last_answer_s < began_s:
                self.give_up(connection)
            if not self._proven:
                found = await self._diagnose(connection.endpoint, error)
        elif (error.action in (Action.CONFIG, Action.LOGIN) and not self._proven) or (
            error.action is Action.FORBIDDEN and method not in self._proven
        ):
            self._fatal = ConfigError(str(error), field=error.field)
        if self._fatal is not None:
            return self._fatal
        if found.retryable:
            self._trouble.failed(subject, self._describe(found))
        return found

    async def _diagnose(self, endpoint: Endpoint, error: EtcdError) -> EtcdError:
        """Before the first answer: find out whether the user has made a mistake, and give up when waiting is in vain.

        A mistake at one member only counts when no other member was better.
        """
        async with self._probing:
            finding = await probe(endpoint, self._settings) if self._fatal is None and not self._proven else None
            self._tried.add(endpoint)
            if finding is not None:
                self._wrong.pop(endpoint, None)
                if finding.field is not None:
                    self._wrong[endpoint] = finding.to_error(endpoint)
                error = EtcdError(f"etcd at {endpoint.address}: {finding.text}", action=Action.RECONNECT)
            if self._wrong and self._tried >= set(self._settings.endpoints) and not self._proven:
                self._fatal = self._fatal or next(iter(self._wrong.values()))
            if self._join.has_passed(self._clock) and not self._proven:
                waited = f"no etcd answered within the join time-out of {self._settings.join_timeout_s:g} s"
                self._fatal = self._fatal or StoreError(
                    f"{waited}: tried {self._settings.names}: {error}; check {ENDPOINT_OPTION}", retryable=False
                )
            return error

    def _describe(self, error: EtcdError) -> str:
        if not self._proven:
            limit = f"trying {self._settings.names} for up to {self._settings.join_timeout_s:g} s"
            return f"waiting for etcd: {error}; {limit}; check {ENDPOINT_OPTION} if this goes on"
        return f"{error}; training goes on, a change of membership waits; trying {self._settings.names}"
