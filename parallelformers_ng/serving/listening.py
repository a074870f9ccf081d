"""Checks that can fail before torch is imported: the address, the folder of the model, the device."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.serving.serve_options import ServeOptions

_DEVICES = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd")  # of NVIDIA, of WSL, of AMD


def bound(options: ServeOptions) -> socket.socket:
    """Return a socket that has its address, and refuses clients until the server listens.

    Raises:
        ParallelError: another program has the address.
        OSError: the machine has no such address.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # By the named protocol asyncio knows a connection that shall not wait with small packets: 40 ms of each answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ParallelError(
                f"port {options.port} of {options.host} is in use; --port takes another, and 0 any that is free"
            ) from None
        raise
    return listener


def check_at_once(options: ServeOptions) -> None:
    """Raise an error if the server cannot start, as far as that is known without torch.

    Raises:
        ParallelError: there is no such folder, the address is taken, or there is no GPU.
    """
    bound(options).close()
    path = Path(options.model).expanduser()
    is_path = options.model.count("/") > 1 or options.model.startswith((".", "/", "~"))  # no name on the hub
    if is_path and not path.exists():
        raise ParallelError(f"there is no folder {options.model}; MODEL is a model folder or a name on the hub")
    if path.is_dir() and not (path / "config.json").exists() and not (path / "adapter_config.json").exists():
        raise ParallelError(f"the folder {options.model} has no config.json: it is no model")
    if options.device == "cuda" and not any(
        device_file for name in _DEVICES for device_file in Path("/dev").glob(name)
    ):
        raise ParallelError("--device is cuda, and the machine shows no GPU; --device cpu runs on the processor")
