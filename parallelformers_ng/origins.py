"""Tells the user's code from the code of libraries."""

from __future__ import annotations

import sys
import types
from importlib.machinery import PathFinder
from typing import Any

CORE = frozenset({"parallelformers_ng", "torch", "transformers"})
"""Packages that are the same on every rank, and libraries also if they are installed from a checkout."""
KNOWN = CORE | sys.stdlib_module_names | {
    "accelerate", "peft", "bitsandbytes", "torchao", "numpy", "einops", "huggingface_hub", "safetensors", "tokenizers",
    "tqdm", "packaging", "filelock", "regex", "yaml", "PIL", "jinja2", "httpx", "requests", "triton", "scipy",
    "sentencepiece", "kernels", "timm", "ray", "fsspec", "typing_extensions",
}  # fmt: skip
"""Packages that transformers and its models use."""


def package_of(part: Any) -> str:
    """Top-level package of a module, a class or a function; "" if `part` has no module name."""
    name = part.__name__ if isinstance(part, types.ModuleType) else getattr(part, "__module__", None)
    if isinstance(part, types.FunctionType):
        name = part.__globals__.get("__name__", name)
    return str(name or "").partition(".")[0]


def is_library(module: str) -> bool:
    """Whether a module is library code, not the user's: in the standard library, `CORE`, or `site-packages`."""
    package = module.partition(".")[0]
    if package in CORE or package in sys.stdlib_module_names:
        return True
    loaded: Any = sys.modules.get(module) or sys.modules.get(package)
    if loaded is None and package:  # a rank gets classes of packages that only the caller has imported
        found = PathFinder.find_spec(package)
        loaded = found and types.SimpleNamespace(__file__=found.origin, __path__=found.submodule_search_locations or ())
    # The file of an editable install is not in site-packages. A namespace package has no `__file__`, only `__path__`.
    file = getattr(loaded, "__file__", None) or next(iter(getattr(loaded, "__path__", ())), "")
    is_installed = "/site-packages/" in file or "/dist-packages/" in file
    return is_installed and package != "__main__"  # `__main__` is the user's, even if pytest runs it


def is_known(part: Any) -> bool:
    """Whether a module, class or function belongs to a package in `KNOWN`, for whose code the policies are written.

    Code of other libraries may compute anything, so the checks for custom modeling code treat it like the user's code.
    """
    return package_of(part) in KNOWN
