from typing import Any

def are_unchanged(
    tables: tuple[dict[str, Any], ...],
    keys: tuple[tuple[str, ...], ...],
    values: tuple[tuple[Any, ...], ...],
    counted: tuple[dict[str, Any], ...],
    sizes: tuple[int, ...],
    /,
) -> bool: ...
