"""How a client comes to a connection, again and again: it waits its turn, tells people, or becomes the server itself.

Everything here runs on the client's thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

from elastictrain.clock import Clock, Deadline
from elastictrain.errors import ConfigError, StoreError
from elastictrain.rendezvous.secret import Secret
from elastictrain.rendezvous.served.hosting import Hosting
from elastictrain.rendezvous.served.link import Link, LinkError, open_link
from elastictrain.rendezvous.served.past import LeaseTerms, Offer, View
from elastictrain.rendezvous.served.settings import ENDPOINT_OPTION, ServedSettings
from elastictrain.rendezvous.served.wire import WireError
from elastictrain.rendezvous.trouble import Trouble

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
# How long the owner of a port that this node was to have may take to show that it is a store of ours.
_TAKEN_PATIENCE_S: Final = 10.0
_SUBJECT = "store"


class Connecting:
    """Before the store has answered once, what the user must change is a ConfigError at once; after that nothing ends
    it but a run that has gone on without this node, because a run must outlive any trouble of its store."""

    def __init__(
        self,
        settings: ServedSettings,
        clock: Clock,
        *,
        secret: Secret | None,
        session: str,
        hosting: Hosting | None,
        on_trouble: Callable[[str], None],
        find_past: Callable[[], tuple[list[View], list[LeaseTerms]]],
    ) -> None:
        self._settings, self._clock, self._secret, self._session = settings, clock, secret, session
        self._hosting = hosting
        self._find_past = find_past
        self._trouble = Trouble(clock, on_trouble, every_s=settings.report_every_s)
        self._join = Deadline.after("join time-out", settings.join_timeout_s, clock)
        self._taken = Deadline.after("patience with the owner of the port", _TAKEN_PATIENCE_S, clock)
        self._store: str | None = None
        self._lineage: tuple[str, ...] = ()
        self._host = ""
        self.is_ending = False
        """The node goes: it serves nobody any more."""

    @property
    def address(self) -> str:
        return self._settings.endpoint.address

    async def retry(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Repeat `attempt` with growing pauses while it raises a retryable StoreError."""

        async def awaited() -> None:  # tenacity looks at the function to decide whether it awaits the result
            await attempt()

        retrying = AsyncRetrying(
            wait=wait_random_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
            retry=retry_if_exception(lambda error: isinstance(error, StoreError) and error.retryable),
            reraise=True,
        )
        await retrying(awaited)

    async def connect(self) -> Link:
        """Connect once, and be ready for requests. Raises StoreError, retryable or not, or ConfigError."""
        try:
            link = await self._open()
            try:
                await self._become_ready(link)
            except BaseException:
                link.close()
                raise
        except (LinkError, WireError) as error:
            raise self.failed(error) from None
        except ConfigError as error:
            if self._store is None:
                raise
            raise self.failed(error) from None
        self._trouble.ended(_SUBJECT, f"the store at {self.address} answers again")
        return link

    def failed(self, error: Exception) -> StoreError:
        """Note a failure, tell people when it is time, and give the error to raise."""
        if self._store is None and self._join.has_passed(self._clock):
            return StoreError(
                f"no store answered at {self.address} within the join time-out of {self._settings.join_timeout_s:g} s: "
                f"{error}; start the node that serves it, or check {ENDPOINT_OPTION}",
                retryable=False,
            )
        self._trouble.failed(_SUBJECT, self._describe(error))
        return error if isinstance(error, LinkError) else LinkError(str(error))

    # ---------------------------------------------------------------- inside

    async def _open(self) -> Link:
        timeout_s = self._settings.read_timeout_s
        own = self._hosting.own_endpoint if self._hosting is not None else None
        try:
            return await open_link(own or self._settings.endpoint, self._secret, timeout_s=timeout_s)
        except LinkError as error:
            hosting = self._hosting
            if hosting is None or self.is_ending:
                raise
            if error.is_refused and hosting.try_serve():
                return await open_link(
                    hosting.own_endpoint or self._settings.endpoint, self._secret, timeout_s=timeout_s
                )
            if self._store is None and hosting.was_taken and self._taken.has_passed(self._clock):
                raise ConfigError(
                    f"{ENDPOINT_OPTION}: expected a port that is free on this machine, seen {self.address} taken by "
                    f"something that does not answer as elastictrain's store ({error}); give another port, the same on "
                    "every node",
                    field=ENDPOINT_OPTION,
                ) from None
            raise

    async def _become_ready(self, link: Link) -> None:
        """Say who this is, and what it remembers when the store is another one than before."""
        limit_s = self._settings.read_timeout_s
        link.write({"op": "open", "session": self._session, "known": self._store})
        link.expect(limit_s)
        answer = await link.read()
        link.heard()
        if answer.get("wants_past") is True and self._store is not None:
            views, leases = self._find_past()
            offer = Offer(
                session=self._session,
                store=self._store,
                lineage=self._lineage,
                host=self._host,
                views=tuple(views),
                leases=tuple(leases),
            )
            link.write(offer.to_json())
        store, within_s = str(answer.get("store")), answer.get("within_s")
        link.expect(limit_s + (float(within_s) if isinstance(within_s, int | float) else 0.0))
        answer = await link.read()
        link.heard()
        if answer.get("op") == "refused":
            raise StoreError(
                f"the store at {self.address} was started anew, and the run has begun again there without this node, "
                "which came back too late: start this node again",
                retryable=False,
            )
        try:
            self._lineage, self._host = tuple(map(str, answer["lineage"])), str(answer["host"])
        except (KeyError, TypeError):
            raise WireError("a store that is not ready") from None
        self._store = store

    def _describe(self, error: Exception) -> str:
        if self._store is None:
            limit = f"trying for up to {self._settings.join_timeout_s:g} s"
            hint = f"check {ENDPOINT_OPTION}, and that the node which serves it runs, if this goes on"
            return f"waiting for the store at {self.address}: {error}; {limit}; {hint}"
        return (
            f"the store at {self.address} is away: {error}; no node can join or be replaced until the node that serves "
            "it is back; trying on"
        )
