"""Classes cross by name, and a name is imported only with the group's signature.

What is found out about a class is remembered, as the same few come with every message."""

from __future__ import annotations

import dataclasses
import functools
import hmac
import importlib
import sys
from typing import Any

from parallelformers_ng.errors import NotPortableError, ProtocolError

_REMEMBERED = 1024


def signature(key: bytes, purpose: str, data: bytes) -> bytes:
    """HMAC-SHA256 of `data`, bound to its `purpose` so that a signed class name is never a signed pickle."""
    return hmac.digest(key, purpose.encode() + b"\0" + data, "sha256")


def verify(key: bytes, purpose: str, data: bytes, signed: str) -> None:
    """Raise ProtocolError unless `signed` is the signature of `data`, in hexadecimal digits."""
    if not hmac.compare_digest(bytes.fromhex(signed), signature(key, purpose, data)):
        raise ProtocolError(f"the signature of a {purpose} is wrong; it was not read")


@functools.lru_cache(_REMEMBERED)
def signed_name(cls: type, key: bytes) -> list[str]:
    """The name of a class, and its signature in hexadecimal digits."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    return [name, signature(key, "class", name.encode()).hex()]


@functools.lru_cache(_REMEMBERED)
def signed_class(key: bytes, name: str, signed: str) -> type:
    """The class of a signed name.

    Raises:
        ProtocolError: the signature is wrong; nothing was imported.
        NotPortableError: the class is not to be found here.
    """
    verify(key, "class", name.encode(), signed)
    module, _, qualname = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing a module runs it, and it may raise anything
        raise NotPortableError(f"the class {name} cannot be imported in this process: {error}") from error
    return found


@functools.lru_cache(_REMEMBERED)
def is_model_output(cls: type) -> bool:
    """True for subclasses of transformers' ModelOutput, without importing transformers."""
    return any(
        base.__qualname__ == "ModelOutput" and base.__module__.startswith("transformers.") for base in cls.__mro__
    )


@functools.lru_cache(_REMEMBERED)
def field_defaults(cls: type) -> dict[str, Any]:
    """The fields of a dataclass, in order, each with its default value; `dataclasses.MISSING` where it has none, or one
    that is made anew each time."""
    return {field.name: field.default for field in dataclasses.fields(cls)}


@functools.lru_cache(_REMEMBERED)
def portable_fields(cls: type) -> dict[str, Any] | None:
    """`field_defaults` of a dataclass that the receiver can import and whose instances need no pickle, provided that
    the fields are all they hold; None for other classes."""
    importable = cls.__module__ != "__main__" and "<locals>" not in cls.__qualname__ and cls.__module__ in sys.modules
    if not (importable and dataclasses.is_dataclass(cls)):
        return None
    plain = (
        cls.__new__ is object.__new__ and cls.__reduce_ex__ is object.__reduce_ex__ and not hasattr(cls, "__setstate__")
    )
    return field_defaults(cls) if plain or is_model_output(cls) else None
