"""Checks the address, the model folder and the device before the slow import of torch."""

from __future__ import annotations

import errno
import importlib.util
import socket
from pathlib import Path

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.serving.serve_options import ServeOptions, read_text

_PACKAGES = {
    "fastapi": "serve", "uvicorn": "serve", "prometheus_client": "serve", "ray": "serve,ray", "peft": "serve,lora"
}  # fmt: skip
"""Packages that a server needs, and the extras of this package that install them."""
_DEVICES = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd")  # files in /dev that show an NVIDIA GPU, WSL or an AMD GPU


def bound(options: ServeOptions) -> socket.socket:
    """Return a TCP socket bound to the server's address. It refuses clients until the server listens on it."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if IPPROTO_TCP is named; without TCP_NODELAY, each answer comes 40 ms later.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except (OSError, UnicodeError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            why = f"port {options.port} of {options.host} is in use; set --port to another port, or 0 for any free port"
        else:
            reason = getattr(error, "strerror", None) or error
            why = f"the server cannot listen on --host {options.host} --port {options.port}: {reason}"
        raise ParallelError(why) from None
    return listener


def folder_of(name: str, *files: str, option: str = "") -> Path | None:
    """Return the local path of a model or an adapter; None if `name` is a name on the hub.

    A folder must have one of the `files`. `option` is the server option that contains `name`, for the error message.
    """
    what = f"{option}: the folder {name}" if option else f"the folder {name}"
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise ParallelError(
            f"{what} does not exist: {Path(name).parts[0]} is no home directory of this machine; write the"
            " whole path of the folder"
        ) from None
    is_path = name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith((".gguf", ".json"))
    if is_path and not path.exists():
        raise ParallelError(f"{what} does not exist; write a folder or a name on the Hugging Face hub")
    if path.is_dir() and not any((path / file).exists() for file in files):
        raise ParallelError(f"{what} is of another kind: it has no {files[0]}")
    return path if path.exists() else None


def _check_template(text: str, file: str) -> None:
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as error:
        # transformers adds the tag `generation` to Jinja, so this tag is no error.
        if "'generation'" not in str(error) and "'endgeneration'" not in str(error):
            raise ParallelError(f"chat_template is {file!r}, which is no template: {error}") from None


def check_at_once(options: ServeOptions) -> None:
    """Raise an error if the address, a folder, a file, a package or the device is missing, without importing torch."""
    bound(options).close()
    path = folder_of(options.model, "config.json", "adapter_config.json")
    for adapter in options.adapters.values():
        folder_of(adapter, "adapter_config.json", option="lora_modules")
    has_adapters = options.adapters or (path is not None and (path / "adapter_config.json").exists())
    for package, extra in _PACKAGES.items():
        is_needed = {"peft": has_adapters, "ray": options.launcher == "ray"}.get(package, True)
        if is_needed and importlib.util.find_spec(package) is None:
            raise ParallelError(
                f"serve needs {package}, which is not installed: pip install '.[{extra}]' in the folder of this library"
            )
    if options.chat_template is not None:
        _check_template(read_text(options.chat_template, "chat_template"), options.chat_template)
    for name in ("media_folder", "offload_folder"):
        folder = getattr(options, name)
        # A missing offload folder is no error, because it is created later.
        if folder is not None and not Path(folder).is_dir() and (name == "media_folder" or Path(folder).exists()):
            raise ParallelError(f"{name} is {folder!r}, which is no folder")
    gpus = [file for name in _DEVICES for file in Path("/dev").glob(name)]
    if options.device == "cuda" and not gpus:
        raise ParallelError("--device is cuda, but the machine has no GPU; use --device cpu to run on the processor")
