"""Defines the options of a server, and reads the options from flags and from a file; flags override the file."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.option_checks import check_devices, checked_seconds, read_options
from parallelformers_ng.options import DTYPES, SCHEMES, BatchingOptions, FitOptions, Number, Seconds


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server: model, address and limits.

    Every field is a flag of `parallelformers-ng serve`, with dashes, and a key of the TOML file of `--config`. The help
    of a flag is the text below.

    Attributes:
        model: model folder, GGUF file, or name on the Hugging Face hub.
        num_gpus: number of ranks; by default one for each GPU, or 2 CPU ranks without a GPU.
        replicas: number of replicas, each with num_gpus ranks; a request goes to the least busy one.
        revision: branch, tag or commit of the model on the hub; by default the main branch.
        dtype: data type: float32, bfloat16 or float16; by default the model's own data type.
        quantize: hold weights in int8, int4, fp8; by default the model's own quantization.
        strategy: tensor: each rank holds a part of every layer; pipeline: each rank holds some layers;
            tensor+pipeline; auto.
        tensor: number of ranks in each stage, for tensor+pipeline.
        ratio: relative share of each rank, such as 1 3; by default equal shares.
        max_memory: weight budget of each device, such as 0=10GiB 1=10GiB cpu=64GiB; cpu= is RAM for the overflow.
        offload_folder: folder for weights that exceed the memory of the devices and the RAM.
        cache: key/value cache as int8 (8 bits per value) or offload (CUDA: in host memory).
        device: device type: auto, cpu or cuda.
        launcher: local: ranks on this machine; ray: replicas on Ray Serve, ranks on the cluster.
        ray_address: address of the Ray cluster; by default ray.init() finds or starts one.
        autoscaling: autoscaling settings of Ray Serve instead of replicas, such as min_replicas=1 max_replicas=4.
        served_model_name: name of the model in requests and answers; by default MODEL.
        lora_modules: PEFT adapters with their names in requests, such as sql=adapters/sql chat=adapters/chat.
        chat_template: file with a chat template that replaces the tokenizer's own.
        host: address to listen on; 0.0.0.0 is all addresses of the machine.
        port: port to listen on; 0 is any free port.
        api_key: key for all requests except /health; the environment variable PARALLELFORMERS_API_KEY keeps the key
            secret.
        cors: origins whose web pages may call the server, such as https://example.org; by default no origin.
        open_probes: /ready and /metrics need no key.
        log_format: format of the log: text or json, with one line for each event.
        log_level: least severe level in the log: debug, info, warning or error.
        no_access_log: do not log a line for each request.
        rows: maximum number of sequences that a replica decodes together.
        waiting: maximum number of sequences that wait for a row; further requests get status 503.
        prefill_patience: approximate milliseconds that decoding rows wait for one prefill step.
        prefix_tokens: tokens in the cache for prompts with a common beginning; 0 turns it off.
        cache_tokens: maximum number of tokens in the key/value caches of all rows; by default limited by the free
            memory.
        max_tokens: maximum number of tokens in an answer if the request sets no limit.
        max_prompt_tokens: maximum tokens in a prompt; by default the limit of the model.
        max_choices: maximum number of answers of one request: n times the number of prompts.
        max_stops: maximum number of stop strings in one request.
        max_top_logprobs: maximum number of most likely tokens that logprobs return at each position.
        max_inputs: maximum number of texts or text pairs in one request for embeddings or scores.
        max_body_bytes: maximum bytes of a request body; by default 1 MiB, or 16 MiB if the model reads pictures or
            sound.
        media_folder: folder of pictures for file:///path URLs in requests; by default none.
        max_pictures: maximum number of pictures in one request.
        max_pixels: maximum number of pixels in all pictures of one request together.
        max_audio_seconds: maximum seconds of sound in one request.
        timeout: time limit of one request in seconds, including the wait for a row.
        client_timeout: time limit in seconds for a client to send its request, and to read each part of the answer.
        drain: time limit in seconds for running requests after SIGTERM.
    """

    model: str = ""
    num_gpus: int | None = None
    replicas: int = 1
    revision: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    strategy: str = "tensor"
    tensor: int | None = None
    ratio: list[Number] = field(default_factory=list)
    max_memory: list[str] = field(default_factory=list)
    offload_folder: str | None = None
    cache: str | None = None
    device: str = "auto"
    launcher: str = "local"
    ray_address: str | None = None
    autoscaling: list[str] = field(default_factory=list)
    served_model_name: str | None = None
    lora_modules: list[str] = field(default_factory=list)
    chat_template: str | None = None

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    cors: list[str] = field(default_factory=list)
    open_probes: bool = False

    log_format: str = "text"
    log_level: str = "info"
    no_access_log: bool = False

    rows: int = 16
    waiting: int = 64
    prefill_patience: int = 200
    prefix_tokens: int = 4096
    cache_tokens: int | None = None
    max_tokens: int = 1024
    max_prompt_tokens: int | None = None
    max_choices: int = 16
    max_stops: int = 16
    max_top_logprobs: int = 20
    max_inputs: int = 256
    max_body_bytes: int | None = None
    media_folder: str | None = None
    max_pictures: int = 16
    max_pixels: int = 1 << 24
    max_audio_seconds: Seconds = 600.0
    timeout: Seconds = 600.0
    client_timeout: Seconds = 30.0
    drain: Seconds = 120.0

    def __post_init__(self) -> None:
        if not self.model:
            raise ParallelError("no model is set; pass a model folder or a name on the Hugging Face hub")
        for name, value in vars(self).items():  # refuse "", which may come from an unset shell variable
            if value == "" or (isinstance(value, list) and "" in value):
                raise ParallelError(f"{name} is empty; set a value, or leave the option out")
        for name, allowed in _ALLOWED.items():
            if (value := getattr(self, name)) and value.removeprefix("torch.") not in allowed:
                raise ParallelError(f"{name} is {value!r}; set {' or '.join(map(repr, allowed))}")
        for name, (form, advice) in _FORMS.items():
            value = getattr(self, name)
            for word in [value] if isinstance(value, str) else value or ():
                if not form.fullmatch(word):
                    raise ParallelError(f"{name} {advice}" if name == "api_key" else f"{name} has {word!r}; {advice}")
        for name in ("ray_address", "autoscaling"):
            if getattr(self, name) and self.launcher != "ray":
                raise ParallelError(f"{name} is {getattr(self, name)!r}, which needs launcher 'ray'")
        if not 0 <= self.port < 1 << 16:
            raise ParallelError(f"port is {self.port}; set a number from 0 to 65535")
        for name in ("timeout", "client_timeout", "drain", "max_audio_seconds"):
            checked_seconds(getattr(self, name), name)
        for name, value in vars(self).items():
            lowest = 0 if name in _MAY_BE_ZERO else 1
            if type(value) is int and value < lowest:
                raise ParallelError(f"{name} is {value}; set a number of at least {lowest}")
        if self.cache == "offload" and self.device == "cpu":
            raise ParallelError("cache is 'offload', which needs CUDA devices; remove it, or set 'int8'")
        _ = self.adapters  # evaluated only for its error for an invalid value
        fit = self.fit
        count = self.num_gpus or (2 if self.device == "cpu" else None)
        if count is not None and self.launcher == "local":
            fit.parts(count)
            if fit.max_memory is not None and self.replicas == 1:
                check_devices(fit.max_memory, range(count))

    @property
    def name(self) -> str:
        return self.served_model_name or self.model

    @property
    def adapters(self) -> dict[str, str]:
        """Name of each adapter, as requests use it → its folder or its name on the hub."""
        paths: dict[str, str] = {}
        for word in self.lora_modules:
            name, path = word.split("=", 1)
            if name in paths or name == self.name:
                raise ParallelError(f"lora_modules has the name {name!r}, which another model has; choose another name")
            paths[name] = path
        return paths

    @property
    def fit(self) -> FitOptions:
        sizes: dict[int | str, int | str] = {}
        for device, size in (word.split("=", 1) for word in self.max_memory):
            sizes[int(device) if device.isdecimal() else device] = int(size) if size.isdecimal() else size
        folder, cache = self.offload_folder, self.cache
        return FitOptions(self.strategy, self.tensor, self.ratio or None, sizes or None, folder, cache)

    @property
    def media_bytes(self) -> int:
        """Maximum size in bytes of a request body or a picture file, for models that read pictures or sound."""
        return self.max_body_bytes or 16 << 20

    @property
    def max_answers(self) -> int:
        """Maximum number of answers that are decoded or wait at the same time; on Ray, the maximum of one replica."""
        return self.rows * (self.replicas if self.launcher == "local" else 1) + self.waiting

    @property
    def batching(self) -> BatchingOptions:
        waiting = 2 * self.max_answers  # twice as many, because calls leave the batch later than the server
        return BatchingOptions(self.rows, waiting, self.prefill_patience, self.prefix_tokens, self.cache_tokens)


_ALLOWED = {
    "dtype": ("auto", *DTYPES),
    "quantize": tuple(SCHEMES),
    "device": ("auto", "cpu", "cuda"),
    "launcher": ("local", "ray"),
    "log_format": ("text", "json"),
    "log_level": ("debug", "info", "warning", "error"),
}
_FORMS = {
    "api_key": (re.compile(r"[!-~]([ -~]*[!-~])?"), "takes ASCII characters, without white space at its ends"),
    "cors": (
        re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+"),
        "write an origin, such as https://example.org, or * for all origins",
    ),
    "max_memory": (re.compile(r"[^=]+=.+"), "write DEVICE=SIZE, such as 0=10GiB or cpu=64GiB"),
    "lora_modules": (re.compile(r"[^=]+=.+"), "write NAME=PATH, such as sql=adapters/sql"),
    "autoscaling": (re.compile(r"\w+=(\d+(\.\d*)?|\.\d+)"), "write NAME=NUMBER, such as min_replicas=1 max_replicas=4"),
}
"""Form of each word of an option, and advice; the key is secret, so its error does not show it."""
_MAY_BE_ZERO = ("port", "prefix_tokens", "max_stops", "max_top_logprobs", "max_pictures")


def option_texts() -> dict[str, str]:
    """Return the description of each option, from the section "Attributes" in the docstring of `ServeOptions`."""
    entries = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(ServeOptions) or "", re.MULTILINE)
    return {name: " ".join(text.split()).removesuffix(".") for name, text in entries}


def read_text(path: str, option: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ParallelError(f"{option} is {path!r}, which cannot be read: {reason}") from None


def read_serve_options(file: str | None, flags: Mapping[str, Any]) -> ServeOptions:
    """Read the options of a server from a file and from flags; flags override the file."""
    file_values: dict[str, Any] = {}
    if file is not None:
        try:
            file_values = tomllib.loads(read_text(file, "config"))
        except tomllib.TOMLDecodeError as error:
            raise ParallelError(f"{file} is not valid TOML: {error}") from None
    return read_options(ServeOptions, {**file_values, **flags}, file or "serve")
