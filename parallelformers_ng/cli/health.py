"""Checks whether the server of a container is ready: `python -m parallelformers_ng.cli.health`."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from parallelformers_ng.cli import commands, serve
from parallelformers_ng.serving.serve_options import ServeOptions, read_serve_options

_SECONDS = 8.0


def options_of(command: Sequence[str]) -> ServeOptions:
    """Read the options of a server from its command line, such as ["parallelformers-ng", "serve", "--port", "80"]."""
    parsed = commands._parser().parse_args(command[command.index("serve") :])
    return read_serve_options(parsed.config, serve.given_options(parsed))


def main() -> int:
    """Return 0 if the server, which is process 1 of the container, is ready; otherwise raise an error.

    The function reads the server's address and key from the command line of process 1 and from the environment.
    """
    options = options_of(Path("/proc/1/cmdline").read_text().split("\0")[:-1])
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    url = f"http://[{host}]:{options.port}/ready" if ":" in host else f"http://{host}:{options.port}/ready"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {options.api_key or ''}"})
    with urllib.request.urlopen(request, timeout=_SECONDS):
        return 0


if __name__ == "__main__":
    sys.exit(main())
