"""Runs a server: loads the model, listens, and after SIGTERM completes the running requests."""

from __future__ import annotations

import asyncio
import gc
import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer

from parallelformers_ng.api import parallelize
from parallelformers_ng.checkpoint.location import base_of_adapter
from parallelformers_ng.errors import UnsupportedModelError, WorkerError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.serving.app import create_app
from parallelformers_ng.serving.engine import peft_names
from parallelformers_ng.serving.guard import AccessGuard, PatientProtocol
from parallelformers_ng.serving.listening import bound
from parallelformers_ng.serving.logs import log, set_up_logs
from parallelformers_ng.serving.model_kinds import Kind, kind_of
from parallelformers_ng.serving.serve_options import ServeOptions

_LEAVE_SECONDS = 2  # uvicorn then stops waiting for connections to close, which idle clients may keep open


class Server(uvicorn.Server):
    """HTTP server that completes running requests before it shuts down.

    After the first SIGTERM or Ctrl-C, the server refuses new requests with status 503. The server ends when the running
    requests are complete or the time limit `drain` has passed. A second signal ends the server immediately.
    """

    def __init__(self, app: AccessGuard, options: ServeOptions, abandon: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_level="error",  # uvicorn logs a warning for each bad request, so clients could fill the log
                ws="none",
                http=type("Protocol", (PatientProtocol,), {"seconds": options.client_timeout}),
                backlog=1024,
                server_header=False,
                h11_max_incomplete_event_size=64 << 10,
                timeout_graceful_shutdown=_LEAVE_SECONDS,
            )
        )
        self._app = app
        self._options = options
        self._abandon = abandon
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A signal handler may interrupt the event loop at any point, so the shutdown begins in the loop's next step.
        asyncio.get_running_loop().call_soon_threadsafe(self._begin_shutdown)

    def _begin_shutdown(self) -> None:
        if self._drain is not None:
            log.info("shutting down now")
            self._end()
            return
        self._app.draining = True
        log.info("shutting down: %d running requests may complete; new requests get status 503", self._app.in_flight)
        self._drain = asyncio.ensure_future(self._end_when_served())

    async def _end_when_served(self) -> None:
        try:
            async with asyncio.timeout(seconds := self._options.drain):
                while self._app.in_flight:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.info("shutting down: %d requests were not complete after %g s", self._app.in_flight, seconds)
        self._end()

    def _end(self) -> None:
        if self._app.in_flight:
            threading.Thread(target=self._abandon, daemon=True).start()  # ends the ranks, so requests fail
        self.should_exit = True


def serve(options: ServeOptions) -> int:
    """Load the model, listen, and serve until SIGTERM or Ctrl-C.

    The function also sets up the log. After the start, garbage collections skip all existing objects. At the end, the
    function stops the ranks.
    """
    set_up_logs(options.log_format, options.log_level)
    with bound(options) as listener:  # bind before the slow loading of the model, so that a used port fails fast
        kind = kind_of(options.model, options.revision)
        log.info("loading %s; output: %s", options.model, kind)
        model, tokenizer = load(options, kind)
        deployment = deployment_of(model)
        try:
            app = create_app(model, tokenizer, options, kind)
            app.metrics.restarts = lambda: deployment.incarnation
            warm_up(model)
            log.info("%s", started(model, options, listener.getsockname()[1]))
            Server(app, options, deployment.close).run([listener])
        finally:
            gc.unfreeze()  # undoes `gc.freeze()` in `warm_up`
            deployment.close()
    return 0


def load(options: ServeOptions, kind: Kind) -> tuple[Any, Any]:
    """Load and parallelize a model, and load its tokenizer.

    For a model that reads pictures or transcribes sound, the function returns the transformers processor instead of the
    tokenizer. If a processor for pictures cannot be loaded, the function logs a warning and returns the tokenizer.
    """
    source: Any = options.model
    arguments: dict[str, Any] = {}
    if options.model.endswith(".gguf"):
        source, tokenizer = _from_gguf(Path(options.model).expanduser(), options.dtype)
    else:
        base = base_of_adapter(options.model)
        has_tokenizer = base is None or (Path(options.model) / "tokenizer_config.json").is_file()
        tokenizer = _tokenizer(options.model if has_tokenizer else base, options.revision, kind)
        arguments["revision"] = options.revision
    if options.adapters:
        if not kind.writes_text:
            message = f"lora_modules is only for models that write text; the output of {options.model} is {kind}"
            raise UnsupportedModelError(message)
        names = peft_names(options)
        arguments["adapters"] = {names[name]: path for name, path in options.adapters.items()}
    device = options.device
    if device == "auto" and options.launcher == "local" and not torch.cuda.is_available():
        log.warning("the machine has no GPU: the ranks run on the CPU (--device cpu silences this warning)")
        device = "cpu"
    replicas = options.replicas if options.launcher == "local" else 1
    workers = {"device": device, "timeout": options.timeout, "launcher": options.launcher, "replicas": replicas}
    model = parallelize(
        source,
        options.num_gpus,
        dtype=options.dtype,
        fit=options.fit,
        quantize=options.quantize,
        workers=workers,
        batching=options.batching,
        model_class=kind.model_class,
        **arguments,
    )
    return model, tokenizer


def _tokenizer(name: str | None, revision: str | None, kind: Kind) -> Any:
    if kind.reads_pictures or kind.transcribes:
        try:
            processor = AutoProcessor.from_pretrained(name, revision=revision)
            for package in ("python_multipart", "soundfile", "soxr") if kind.transcribes else ():
                importlib.import_module(package)
            if hasattr(processor, "tokenizer"):  # `AutoProcessor` may return a bare tokenizer
                return processor
            why = f"{name} has no processor"
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            why = f"the processor cannot be loaded: {str(error).strip()}"
        if kind.transcribes:
            raise UnsupportedModelError(f"the server cannot serve {name}: {why}")
        log.warning("the server refuses pictures in requests: %s", why)
    return AutoTokenizer.from_pretrained(name, revision=revision)


def _from_gguf(path: Path, dtype: str | None) -> tuple[Any, Any]:
    """Load the model and the tokenizer of a GGUF file, with the quantized weights converted to floats."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        return AutoModelForCausalLM.from_pretrained(**source, dtype=dtype or "float32"), tokenizer
    except (ImportError, ValueError) as error:  # a package is missing, or transformers does not know the architecture
        raise UnsupportedModelError(f"transformers cannot read the GGUF file {path}: {error}") from None


def warm_up(model: Any) -> None:
    """Run the model once, so that the first client does not wait for one-time preparations.

    Then freeze all existing objects for the garbage collector. Large requests start full collections, which would
    otherwise take a quarter of a second and delay every answer.
    """
    prompt = torch.zeros(1, 1, dtype=torch.long)
    try:
        if getattr(model, "main_input_name", None) == "input_features":
            sound = torch.zeros(1, model.config.num_mel_bins, 2 * model.config.max_source_positions, dtype=model.dtype)
            model.generate(input_features=sound, max_new_tokens=2)
        elif model.can_generate():
            model.generate(input_ids=prompt, attention_mask=prompt + 1, max_new_tokens=2, do_sample=False)
        else:
            output = model(input_ids=prompt, attention_mask=prompt + 1)
            if getattr(output, "last_hidden_state", getattr(output, "logits", None)) is None:
                raise UnsupportedModelError(f"{type(model).__name__} returns neither token vectors nor scores nor text")
    except WorkerError as error:
        message = f"{type(model).__name__} cannot be served: the model fails with a prompt of one token: {error}"
        raise UnsupportedModelError(message) from error
    gc.collect()
    gc.freeze()


def started(model: Any, options: ServeOptions, port: int) -> str:
    """Return a line for the log with the address, the devices and the limits of a server that is ready."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    devices = ", ".join(deployment_of(model).device_names)
    key = "a key" if options.api_key else "no key"
    url = f"http://{host}:{port}"
    return (
        f"serving {options.name} on {url} with {key}; page: {url}/; API: {url}/v1;"
        f" {type(model).__name__} on ranks {devices};"
        f" {options.rows} rows, {options.waiting} waiting places, {options.max_tokens} tokens by default,"
        f" {options.timeout:g} s per request"
    )
