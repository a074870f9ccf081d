"""Packages that are installed apart, so that no process that tests start finds them by itself."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "apart"


def find_packages() -> None:
    """Have this process find them, too."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
