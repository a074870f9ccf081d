"""Finds packages in a separate folder, which processes started by tests do not see by default."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "apart"


def find_packages() -> None:
    """Add the folder to this process's import path."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
