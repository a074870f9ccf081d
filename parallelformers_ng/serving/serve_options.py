"""Options of a server: from flags, from a file, or from both; flags win."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.options import (
    QUANTIZE_HELP,
    BatchingOptions,
    FitOptions,
    Number,
    Seconds,
    checked_seconds,
    read_options,
)
from parallelformers_ng.serving.logs import FORMATS, LEVELS


@dataclass(frozen=True)
class ServeOptions:
    """The model, the address and the limits of a server.

    Every field is a flag of `parallelformers-ng serve`, with dashes, and a word of the file that `--config` names. The
    text beside its type is the flag's help.
    """

    model: Annotated[str, "a model folder, a GGUF file or a name on the Hugging Face hub"] = ""
    num_gpus: Annotated[int | None, "number of ranks; by default all GPUs, or 2 CPU ranks if there is none"] = None
    replicas: Annotated[int, "groups of so many ranks; a request goes to the one with the least to do"] = 1
    revision: Annotated[str | None, "branch, tag or commit of a model on the hub"] = None
    dtype: Annotated[str | None, "float32, bfloat16 or float16; by default the model's"] = None
    quantize: Annotated[str | None, f"{QUANTIZE_HELP}; by default as the model has them"] = None
    strategy: Annotated[
        str, "tensor: a part of every layer on each rank; pipeline: some of the layers; tensor+pipeline; auto"
    ] = "tensor"
    tensor: Annotated[int | None, "ranks of each stage, for tensor+pipeline"] = None
    ratio: Annotated[list[Number], "relative share of each rank: 1 3; by default alike"] = field(default_factory=list)
    max_memory: Annotated[
        list[str], "weight budget of each device; cpu= is RAM for the overflow: 0=10GiB 1=10GiB cpu=64GiB"
    ] = field(default_factory=list)
    offload_folder: Annotated[str | None, "folder for weights that do not fit into RAM either"] = None
    cache: Annotated[str | None, "int8: keys and values in 8 bits; offload: on CUDA, in host memory"] = None
    device: Annotated[str, "auto, cpu or cuda"] = "auto"
    launcher: Annotated[str, "local, or ray: replicas on Ray Serve, their ranks on the hosts of its cluster"] = "local"
    ray_address: Annotated[str | None, "the Ray cluster; by default as ray.init() finds it or starts it"] = None
    autoscaling: Annotated[
        list[str], "with ray, in the place of replicas: Serve's settings, min_replicas=1 max_replicas=4"
    ] = field(default_factory=list)
    served_model_name: Annotated[str | None, "name of the model in requests and answers; by default the model's"] = None
    lora_modules: Annotated[
        list[str], "adapters of PEFT's, each a model of its own in requests: sql=adapters/sql chat=adapters/chat"
    ] = field(default_factory=list)
    chat_template: Annotated[str | None, "a file with a chat template, in the place of the tokenizer's own"] = None

    host: Annotated[str, "address to listen on; 0.0.0.0 is every address of the machine"] = "127.0.0.1"
    port: Annotated[int, "port to listen on; 0 takes a free one"] = 8000
    api_key: Annotated[
        str | None,
        "key that every request but /health must bring; better in the variable PARALLELFORMERS_API_KEY, unseen",
    ] = None
    cors: Annotated[
        list[str], "origins whose pages may call the server, as in https://example.org; none by default"
    ] = field(default_factory=list)

    open_probes: Annotated[bool, "/ready and /metrics need no key, as /health"] = False

    log_format: Annotated[str, "text or json, one line for each event"] = "text"
    log_level: Annotated[str, "debug, info, warning or error"] = "info"
    no_access_log: Annotated[bool, "no line for each request"] = False

    rows: Annotated[int, "sequences that a replica decodes at a time"] = 16
    waiting: Annotated[int, "sequences that may wait while all rows are taken; a further request gets 503"] = 64
    prefill_chunk: Annotated[int, "tokens of prompts that are run at a time, between steps of other rows"] = 128
    prefix_tokens: Annotated[int, "tokens whose keys and values are kept for prompts that begin alike"] = 4096
    cache_tokens: Annotated[int | None, "tokens of all rows together; by default what memory has room for"] = None
    max_tokens: Annotated[int, "tokens of an answer, if the request names no number"] = 1024
    max_prompt_tokens: Annotated[int | None, "tokens of a prompt; by default what the model has positions for"] = None
    max_choices: Annotated[int, "answers of one request: its n, for each of its prompts"] = 16
    max_stops: Annotated[int, "stop strings of one request"] = 16
    max_top_logprobs: Annotated[int, "alternatives to each token"] = 20
    max_inputs: Annotated[int, "texts of one request for embeddings"] = 256
    max_body_bytes: Annotated[
        int | None, "bytes of a request's body; by default 1 MiB, and 16 MiB if the model reads pictures or sound"
    ] = None
    media_folder: Annotated[str | None, "folder whose pictures requests may name, file:///path; by default none"] = None
    max_pictures: Annotated[int, "pictures of one request"] = 16
    max_pixels: Annotated[int, "pixels of all pictures of one request"] = 1 << 24
    max_audio_seconds: Annotated[Seconds, "seconds of sound of one request"] = 600.0
    timeout: Annotated[Seconds, "seconds for one request, the wait for a row included"] = 600.0
    client_timeout: Annotated[Seconds, "seconds that a client may take to send its request, or to read on"] = 30.0
    drain: Annotated[Seconds, "seconds that requests in flight have to complete after SIGTERM"] = 120.0

    def __post_init__(self) -> None:
        if not self.model:
            raise ParallelError("no model is named; give a folder or a name on the hub")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ParallelError(f"device is {self.device!r}; it takes 'auto', 'cpu' or 'cuda'")
        if self.launcher not in ("local", "ray"):
            raise ParallelError(f"launcher is {self.launcher!r}; it takes 'local' or 'ray'")
        for name in ("ray_address", "autoscaling"):
            if getattr(self, name) and self.launcher != "ray":
                raise ParallelError(f"{name} is {getattr(self, name)!r}; it acts with launcher 'ray' alone")
        for name, taken in (("log_format", FORMATS), ("log_level", LEVELS)):
            if getattr(self, name) not in taken:
                raise ParallelError(f"{name} is {getattr(self, name)!r}; it takes {', '.join(taken)}")
        if not 0 <= self.port < 1 << 16:
            raise ParallelError(f"port is {self.port}; it takes a number from 0 to 65535")
        for name in ("timeout", "client_timeout", "drain", "max_audio_seconds"):
            checked_seconds(getattr(self, name), name)
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ParallelError(f"{name} is {value}; it takes a number, at least {lowest}")
        _ = self.fit, self.adapters  # they are checked

    @property
    def name(self) -> str:
        """Return the clients' name of the model."""
        return self.served_model_name or self.model

    @property
    def adapters(self) -> dict[str, str]:
        """Folder, or name on the hub, of each adapter by its name in requests.

        Raises:
            ParallelError: a word of `lora_modules` is not NAME=PATH, or a name is taken.
        """
        paths: dict[str, str] = {}
        for word in self.lora_modules:
            name, _, path = word.partition("=")
            if not name or not path:
                raise ParallelError(f"lora_modules has {word!r}; it takes NAME=PATH, as in sql=adapters/sql")
            if name in paths or name == self.name:
                raise ParallelError(f"lora_modules names {name!r}, and another model has that name; choose another one")
            paths[name] = path
        return paths

    @property
    def fit(self) -> FitOptions:
        """How the model is laid over devices that are small, or unlike each other.

        Raises:
            ParallelError: a word has a value that it does not take.
        """
        sizes: dict[int | str, int | str] = {}
        for word in self.max_memory:
            device, is_there, size = word.partition("=")
            if not is_there:
                raise ParallelError(f"max_memory has {word!r}; it takes DEVICE=SIZE, as in 0=10GiB or cpu=64GiB")
            sizes[int(device) if device.isdecimal() else device] = size
        folder, cache = self.offload_folder, self.cache
        return FitOptions(self.strategy, self.tensor, self.ratio or None, sizes or None, folder, cache)

    @property
    def media_bytes(self) -> int:
        """Most bytes of a body, or of a file, with pictures or sound."""
        return self.max_body_bytes or 16 << 20

    @property
    def most_answers(self) -> int:
        """Most answers that are decoded or wait at a time."""
        return self.rows * (self.replicas if self.launcher == "local" else 1) + self.waiting

    @property
    def batching(self) -> BatchingOptions:
        """How calls share a batch. The server's own limit comes first: a call leaves the batch a moment after it
        leaves the server."""
        shared = {name: getattr(self, name) for name in _OF_BATCHES}
        return BatchingOptions(**{**shared, "waiting": 2 * self.most_answers})


_OF_BATCHES = ("rows", "waiting", "prefill_chunk", "prefix_tokens", "cache_tokens")
_LOWEST = {
    "replicas": 1, "rows": 1, "waiting": 1, "prefill_chunk": 1, "prefix_tokens": 0, "cache_tokens": 1, "max_tokens": 1,
    "max_prompt_tokens": 1, "max_choices": 1, "max_stops": 0,
    "max_top_logprobs": 0, "max_inputs": 1, "max_body_bytes": 1, "max_pictures": 0, "max_pixels": 1,
}  # fmt: skip


def read_serve_options(file: str | None, flags: Mapping[str, Any]) -> ServeOptions:
    """Options of a file, and flags, which count where both name a thing.

    Args:
        file: a TOML file with fields of `ServeOptions`, or None.
        flags: fields that were given as flags.

    Raises:
        ParallelError: an unknown word, or a value that a field does not take; the file and the word are named.
    """
    written: dict[str, Any] = {}
    if file is not None:
        try:
            with open(file, "rb") as opened:
                written = tomllib.load(opened)
        except tomllib.TOMLDecodeError as error:
            raise ParallelError(f"{file} is no TOML: {error}") from None
    return read_options(ServeOptions, {**written, **flags}, file or "serve")
