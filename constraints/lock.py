"""Write the lock of `make ecosystem` out of a report of pip's: `make ecosystem-lock` runs it."""

from __future__ import annotations

import datetime
import json
import platform
import sys

HEAD = """\
# What `make ecosystem` installs, all packages pinned together; pip found them on {day} with Python {python} for
# requirements-ecosystem.txt. To renew it: `make ecosystem-lock`, then `make ecosystem`, and commit both files.
"""


def main() -> None:
    """Read the report from standard input, write the lock to standard output."""
    installed = [package["metadata"] for package in json.load(sys.stdin)["install"]]
    # The packages of CUDA come with some builds of torch alone, which pins them itself, as it does its local version.
    pins = {each["name"].lower(): each["version"].partition("+")[0] for each in installed}
    print(HEAD.format(day=datetime.date.today(), python=platform.python_version()), end="")
    for name, version in sorted(pins.items()):
        if not name.startswith(("nvidia-", "triton", "cuda-")) or name == "nvidia-ml-py":
            print(f"{name}=={version}")


if __name__ == "__main__":
    main()
