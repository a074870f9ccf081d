"""Checks the address, the model folder and the device before the slow import of torch."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.serving.serve_options import ServeOptions

_DEVICES = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd")  # device files of NVIDIA, WSL and AMD


def bound(options: ServeOptions) -> socket.socket:
    """Return a bound TCP socket; the socket refuses clients until the server listens. The caller closes the socket.

    Args:
        options: options with the host and the port. A host with a colon is an IPv6 address.

    Raises:
        ParallelError: another program uses the port.
        OSError: the machine does not have the address, or this user may not use the port.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio sends small packets without a delay only if the protocol is named; the delay is 40 ms for each answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ParallelError(
                f"port {options.port} of {options.host} is in use; set --port to another port, or 0 for any free port"
            ) from None
        raise
    return listener


def check_at_once(options: ServeOptions) -> None:
    """Raise an error if the address, the model folder or the device is invalid. The checks do not import torch.

    Raises:
        ParallelError: the port is in use, or the folder is missing or is not a model folder. Or the folder begins with
            `~` and the name of a user that does not exist. Or `device` is "cuda", but the machine has no device file of
            a GPU.
        OSError: the machine does not have the address, or this user may not use the port.
    """
    bound(options).close()
    try:
        path = Path(options.model).expanduser()
    except RuntimeError:
        raise ParallelError(
            f"the folder {options.model} does not exist: {Path(options.model).parts[0]} is no home directory of this"
            " machine; write the whole path of the model folder"
        ) from None
    is_path = options.model.count("/") > 1 or options.model.startswith((".", "/", "~"))  # not a name on the hub
    if is_path and not path.exists():
        raise ParallelError(
            f"the folder {options.model} does not exist; MODEL is a model folder or a name on the Hugging Face hub"
        )
    if path.is_dir() and not (path / "config.json").exists() and not (path / "adapter_config.json").exists():
        raise ParallelError(f"the folder {options.model} is not a model folder: it has no config.json")
    if options.device == "cuda" and not any(
        device_file for name in _DEVICES for device_file in Path("/dev").glob(name)
    ):
        raise ParallelError("--device is cuda, but the machine has no GPU; use --device cpu to run on the processor")
