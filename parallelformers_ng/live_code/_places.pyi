from types import FunctionType
from typing import Any

def are_unchanged(
    tables: tuple[dict[str, Any], ...],
    keys: tuple[tuple[str, ...], ...],
    values: tuple[tuple[Any, ...], ...],
    sizes: tuple[int, ...],
    owners: tuple[type | None, ...],
    tags: bytearray,
    /,
) -> bool: ...
def have_parts(functions: tuple[FunctionType, ...], parts: tuple[Any, ...], /) -> bool: ...
