"""A text that nobody may see by accident. Pure."""

from __future__ import annotations

from typing import NoReturn


class Secret:
    """A text that shows itself only when asked to: no repr, message, log, traceback or file carries it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __deepcopy__(self, memo: object) -> Secret:
        return self  # it cannot change; dataclasses.asdict copies what it lists

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not written anywhere")
