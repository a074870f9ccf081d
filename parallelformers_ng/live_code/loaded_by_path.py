"""Lets ranks import the modules that the program has loaded by path, which Python does not find by name."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

from parallelformers_ng.origins import is_library

Specs = dict[str, ModuleSpec]


def specs_by_path() -> Specs:
    """The specs of the program's modules that an import by name would not find, by name."""
    # A copy, because other threads may import modules meanwhile.
    modules = [(name, module) for name, module in [*sys.modules.items()] if name != "__main__" and not is_library(name)]
    return {name: module.__spec__ for name, module in modules if has_source(name) and is_loaded_by_path(name)}  # type: ignore[misc]


def has_source(name: str) -> bool:
    """Whether the file of a module still exists, and is Python code."""
    spec: Any = getattr(sys.modules.get(name), "__spec__", None)
    return type(getattr(spec, "loader", None)) is SourceFileLoader and os.path.isfile(spec.origin or "")


def is_loaded_by_path(name: str) -> bool:
    """Whether an import by name would not find the module that this process has imported."""
    file = getattr(sys.modules.get(name), "__file__", None)
    parent, _, _ = name.rpartition(".")
    path = getattr(sys.modules.get(parent), "__path__", None)
    # importlib.util.find_spec would return the spec of the loaded module.
    specs = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    try:
        spec = next((spec for spec in specs if spec is not None), None)
    except (OSError, EOFError, ImportError):  # a zip archive on the path has been deleted or replaced
        return True
    return spec is None or (file is not None and spec.origin != file)


class _Finder:
    """Finds the modules that the caller's program has loaded by path, before Python looks for others of these names."""

    specs: Specs = {}

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return cls.specs.get(name)


def extend_path(paths: list[str], specs: Specs) -> None:
    """Add the caller's import paths and specs to this rank's; the caller may have added them after the rank's start."""
    sys.path += [path for path in paths if path not in sys.path]
    _Finder.specs = specs
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    importlib.invalidate_caches()
