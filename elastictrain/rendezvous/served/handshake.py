"""The first words of a connection, by which both sides prove that they know the secret, without saying it. No socket.

    client   hello   version, nonce, whether it has a secret
    server   hello   the same of its own
    client   proof   HMAC(secret, "client proves", both nonces)     (only with a secret)
    server   proof   HMAC(secret, "server proves", both nonces)     or a refusal

Nonces are drawn anew for each connection, so a proof that was overheard is worth nothing on another one. Each direction
then gets a key of its own, made of the secret and both nonces, by which its frames are marked.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Any

from elastictrain.rendezvous.secret import Secret
from elastictrain.rendezvous.served.wire import PROTOCOL_VERSION, Seal, WireError

NONCE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Hello:
    """One side's first message."""

    nonce: bytes
    has_secret: bool
    version: int = PROTOCOL_VERSION

    @classmethod
    def make(cls, secret: Secret | None) -> Hello:
        return cls(secrets.token_bytes(NONCE_BYTES), secret is not None)

    def to_json(self) -> dict[str, Any]:
        return {"op": "hello", "version": self.version, "nonce": self.nonce.hex(), "has_secret": self.has_secret}

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> Hello:
        """Raises WireError."""
        try:
            if message["op"] != "hello":
                raise ValueError(message["op"])
            nonce = bytes.fromhex(message["nonce"])
            if len(nonce) != NONCE_BYTES:
                raise ValueError(len(nonce))
            return cls(nonce, message["has_secret"] is True, int(message["version"]))
        except (KeyError, TypeError, ValueError):
            raise WireError("a first message that is no hello") from None


@dataclass(frozen=True, slots=True)
class Handshake:
    """What follows from both hellos where both sides have a secret."""

    secret: Secret
    client: Hello
    server: Hello

    def proof_of(self, side: str) -> str:
        """What `side` ("client" or "server") has to say."""
        return self._derive(f"{side} proves").hex()

    def is_proven(self, side: str, proof: object) -> bool:
        return isinstance(proof, str) and hmac.compare_digest(self.proof_of(side).encode(), proof.encode())

    def seal_of(self, side: str) -> Seal:
        """What marks the frames that `side` sends."""
        return Seal(self._derive(f"{side} sends"))

    def _derive(self, purpose: str) -> bytes:
        text = b"elastictrain store 1\0" + purpose.encode() + b"\0" + self.client.nonce + self.server.nonce
        return hmac.digest(self.secret.reveal().encode(errors="surrogateescape"), text, "sha256")
