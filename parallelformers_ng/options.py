"""The options that `parallelize` takes in groups, each a dataclass, a dictionary of the same words, or neither."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from parallelformers_ng.errors import ParallelError, PlacementError, did_you_mean

Number = int | float
Seconds = int | float
_Options = TypeVar("_Options")


LAUNCHERS = ("auto", "local", "torchrun", "ray")


@dataclass(frozen=True)
class RayOptions:
    """The ranks' share of a Ray cluster.

    Attributes:
        address: address of the cluster. None: the connected cluster of this process, or else the one that
            `ray.init()` finds or starts, for as long as the workers run.
        cpus: CPUs of each rank, which are its threads, too.
        resources: further resources of each rank's bundle, in Ray's words: `{"memory": …}`, or names of your
            own.
        runtime_env: environment of the processes on the hosts, in Ray's form.
    """

    address: str | None = None
    cpus: Number = 1
    resources: dict[str, Any] = field(default_factory=dict)
    runtime_env: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.cpus > 0:
            raise ParallelError(f"ray: cpus is {self.cpus!r}; it takes a number, more than 0")


@dataclass(frozen=True)
class WorkerOptions:
    """Place of the workers, time limits, and restarts after deaths.

    Attributes:
        device: "cuda", "cpu", or "auto": CUDA where present, with "ray" in the cluster, else CPU.
        device_ids: the CUDA device of each rank, where this process starts them; by default 0, 1, 2, ….
        backend: backend of the collectives: "auto", "shared_memory", "gloo" or "nccl".
        timeout: seconds that a request may take.
        start_timeout: seconds until the workers must be ready.
        restart: start new workers when one died, if the weights are kept.
        max_restarts: more than this many within `restart_window` seconds, and the model stays down.
        restart_window: seconds.
        replicas: groups of `num_gpus` workers that have the whole model each; a call goes to the one with the least to
            do. They may take different devices; on CPU they share the cores and the memory of the weights.
        launcher: program that starts the workers. "local": this process, on this machine. "torchrun": they
            are on the nodes of the job, one for each process of it, and the process of rank 0 is the caller. "auto":
            "torchrun" in such a job, otherwise "local". "ray": they are on the hosts of a Ray cluster.
        ray: resources there, `RayOptions` or a dict of the same words; with "ray" alone.
        host_copy: on CUDA, keep a copy of the shards in host memory, from which workers can be restarted. On CPU that
            memory is the shards, and is always kept.
    """

    device: str = "auto"
    device_ids: list[int] | tuple[int, ...] | None = None
    backend: str = "auto"
    timeout: Seconds = 600.0
    start_timeout: Seconds = 120.0
    restart: bool = True
    max_restarts: int = 3
    restart_window: Seconds = 60.0
    replicas: int = 1
    launcher: str = "auto"
    ray: dict[str, Any] | RayOptions | None = None
    host_copy: bool = False

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise PlacementError(f"launcher is {self.launcher!r}; it takes one of {', '.join(map(repr, LAUNCHERS))}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise PlacementError(f"device is {self.device!r}; it takes 'auto', 'cpu' or 'cuda'")
        if self.ray is not None and self.launcher != "ray":
            raise ParallelError(f"ray is {self.ray!r}, and launcher is {self.launcher!r}; pass launcher='ray', too")
        for name in ("timeout", "start_timeout", "restart_window"):
            checked_seconds(getattr(self, name), name)
        if self.replicas < 1:
            raise ParallelError(f"replicas is {self.replicas}; it takes a number, at least 1")
        if self.max_restarts < 0:
            raise ParallelError(f"max_restarts is {self.max_restarts}; it takes a number, at least 0")


@dataclass(frozen=True)
class BatchingOptions:
    """How many calls of `generate` are decoded together, and what a call may ask for.

    Attributes:
        rows: sequences that are decoded at a time.
        waiting: calls that may wait while all rows are taken; a further one raises BatchingError.
        prefill_chunk: tokens of prompts that are run between two steps of the other rows, twice as many where
            there are none. Short prompts run side by side, longer ones in pieces.
        prefix_tokens: keys and values of so many tokens are kept of the sequences that were used last, for prompts that
            begin alike; 0 keeps none.
        cache_tokens: tokens that the caches of all rows may have together, padding counted; calls wait for room. None:
            as many as half of the memory has room for that is free when the first call runs.
        prompt_tokens, new_tokens: most tokens of a call's prompt, and most new ones;
            BatchingError beyond. None: any number.
    """

    rows: int = 16
    waiting: int = 256
    prefill_chunk: int = 128
    prefix_tokens: int = 4096
    cache_tokens: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "prefix_tokens" else 1
            if value is not None and value < least:
                raise ParallelError(f"batching: {name} is {value}; it takes a number, at least {least}")


BOTH = "tensor+pipeline"
STRATEGIES = ("tensor", "pipeline", BOTH, "auto")


@dataclass(frozen=True)
class FitOptions:
    """How a model is laid over devices that are small, or unlike each other.

    Attributes:
        strategy: "tensor": every rank holds a part of every layer. "pipeline": every rank holds some of the layers,
            which follow one another. "tensor+pipeline": every `tensor` ranks beside each other hold some of the layers,
            and each a part of these. "auto": "tensor" where that spreads the model, else "pipeline"; the plan says why.
        tensor: ranks of each stage, for "tensor+pipeline"; with ranks on several hosts by default as many as each has.
        ratio: for each rank, or each stage, how much it is to hold beside the others: `(1, 3)` gives the second three
            times the first.
        max_memory: weight budget of each device, by number; "cpu" is RAM for the overflow: bytes, or a size
            as text ("10GiB"). The devices of CPU ranks are the ranks. Layers without room on a device come before they
            run. Without "cpu", as much as is free.
        offload_folder: folder for weights without room in RAM.
        cache: how keys and values are kept: "int8", with a scale for each head and token, in about a quarter of the
            bytes of float32; "offload", on CUDA devices, in host memory but for the layer that runs. None: as the model
            computes them.
    """

    strategy: str = "tensor"
    tensor: int | None = None
    ratio: list[Number] | tuple[Number, ...] | None = None
    max_memory: dict[int | str, int | str] | None = None
    offload_folder: str | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.cache not in (None, "int8", "offload"):
            raise ParallelError(f"fit: cache is {self.cache!r}; it takes 'int8', 'offload' or None")
        if self.strategy not in STRATEGIES:
            known = ", ".join(map(repr, STRATEGIES))
            raise ParallelError(f"fit: strategy is {self.strategy!r}; it takes one of {known}")
        if self.tensor is not None and self.strategy != BOTH:
            raise ParallelError(
                f"fit: tensor is {self.tensor} and strategy {self.strategy!r}; strategy={BOTH!r} takes tensor=, the"
                " ranks of each stage, and no other does"
            )
        if self.tensor is not None and self.tensor < 2:
            raise ParallelError(f"fit: tensor is {self.tensor}; it takes 2 ranks at least. One is strategy='pipeline'")
        if self.ratio is not None and not all(0 < part < math.inf for part in self.ratio):
            raise ParallelError(f"fit: ratio is {self.ratio!r}; it takes numbers, each more than 0")

    @property
    def has_stages(self) -> bool:
        """Whether layers are computed by some ranks after others."""
        return self.strategy in ("pipeline", BOTH)

    @property
    def is_open(self) -> bool:
        """Whether it is not said yet how many ranks each stage has."""
        return self.strategy == BOTH and self.tensor is None

    def over(self, counts: Sequence[int]) -> FitOptions:
        """Return the same, with stages that lie within hosts of so many ranks where it is open. A ParallelError says
        that these have none of two ranks or more."""
        if not self.is_open or len(counts) == 1:
            return self
        tensor = math.gcd(*counts)
        if tensor == 1:
            raise ParallelError(
                f"fit: tensor is None, and hosts of {list(counts)} ranks have no stages of 2 or more; give another"
                " number of ranks, or take strategy='pipeline'"
            )
        return replace(self, tensor=tensor)

    def stages(self, world_size: int) -> int:
        """Return how many stages so many ranks make, 1 if all do every layer together.

        Raises:
            ParallelError: they make none, or one, or an unknown number.
        """
        if self.is_open:
            raise ParallelError(
                f"fit: tensor is None and strategy {BOTH!r}; give tensor=, the ranks of each stage. On several"
                " hosts the default is the ranks of a host"
            )
        width = self.tensor or 1
        if world_size % width or world_size == width > 1:
            raise ParallelError(
                f"fit: tensor is {width}, and {world_size} ranks make no stages of {width} each; give a multiple of it"
            )
        return world_size // width if self.has_stages else 1

    def parts(self, world_size: int) -> list[float]:
        """Return the fraction of the model for each rank, or for each stage, 1 in all; empty for equal fractions.

        Raises:
            ParallelError: `ratio` is for another number of them.
        """
        ratio = self.ratio or ()
        count, what = (self.stages(world_size), "stages") if self.has_stages else (world_size, "ranks")
        if self.ratio is not None and len(ratio) != count:
            raise ParallelError(f"fit: ratio has {len(ratio)} numbers, and there are {count} {what}; give one each")
        return [part / sum(ratio) for part in ratio] if len(set(ratio)) > 1 else []


@dataclass(frozen=True)
class QuantizeOptions:
    """The weights to quantize, and the scheme.

    Attributes:
        scheme: "int8": integers of 8 bits with a scale for each output, as torchao's `Int8WeightOnlyConfig()` makes
            them; "int4": of 4 bits with a scale for 32 inputs of an output, as `IntxWeightOnlyConfig(torch.int4,
            PerGroup(32))` does; "fp8": floats of 8 bits, e4m3, a scale for each output, as `Float8WeightOnlyConfig()`.
        group: how many inputs of an output share a scale; by default as the scheme says.
        skip: layers that stay in high precision, as paths beneath a block or from the model on, `*` for any one name
            (`["self_attn.o_proj", "mlp.*"]`); all that lies beneath one stays, too.
        embeddings: quantize the input embeddings and the output head, too.
        dequantize: dequantize weights of a checkpoint whose scheme nothing here computes with, each rank
            its own; then quantize them by `scheme`, if there is one.
    """

    scheme: str | None = None
    group: int | None = None
    skip: list[str] | tuple[str, ...] = ()
    embeddings: bool = False
    dequantize: bool = False

    def __post_init__(self) -> None:
        known = ", ".join(map(repr, SCHEMES))
        if self.scheme is None and (self.skip or self.embeddings or self.group or not self.dequantize):
            raise ParallelError(f"quantize: no scheme is given; it takes one of {known}")
        if self.scheme is not None and self.scheme not in SCHEMES:
            raise ParallelError(f"quantize: scheme is {self.scheme!r}; it takes one of {known}")
        if self.group is not None and (self.group < 2 or self.group % 2):
            raise ParallelError(f"quantize: group is {self.group}; it takes an even number of inputs, 32 say")

    @property
    def block(self) -> int | None:
        """How many inputs of an output share a scale; None for all of them."""
        return self.group or SCHEMES.get(str(self.scheme))


SCHEMES = {"int8": None, "int4": 32, "fp8": None}
"""How many inputs of an output share a scale, None for all of them."""
QUANTIZE_HELP = f"hold weights in {', '.join(SCHEMES)}"
"""Of `--quantize`, on every command."""

OF_A_MODEL = ("restart", "max_restarts", "restart_window", "replicas", "host_copy")
"""Options of workers that belong to a model and its weights, not to a group that serves one model after another."""


def check_switches(**switches: Any) -> None:
    """Raise ParallelError for an argument that is neither True nor False: a text such as "no" counts as true.

    Args:
        switches: arguments by name.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ParallelError(f"{name} is {value!r}; it takes True or False")


def read_options(cls: type[_Options], options: _Options | Mapping[str, Any] | None, argument: str) -> _Options:
    """Options as a dataclass, however they were given.

    Args:
        cls: the dataclass.
        options: an instance; a mapping from names to values; or None for the defaults.
        argument: the caller's name for it, for errors.

    Raises:
        ParallelError: an unknown name, or a value of another type; both are named.
    """
    if isinstance(options, cls):
        options = vars(options)  # a dataclass does not check its types by itself
    if options is None:
        return cls()
    if not isinstance(options, Mapping):
        raise ParallelError(f"{argument} is {options!r}; it takes {cls.__name__}(…) or a dict of the same words")
    known = get_type_hints(cls)
    for name in sorted(options, key=str):
        if name not in known:
            hint = did_you_mean(str(name), known) or f"; it takes {', '.join(known)}"
            raise ParallelError(f"{argument} has no option {name!r}{hint}")
    for name, value in options.items():
        if not _is_a(value, known[name]):
            raise ParallelError(f"{argument}: {name} is {value!r}; it takes {_words(known[name])}")
    return cls(**options)


def _is_a(value: Any, kind: Any) -> bool:
    """Return whether a value is of a type, as the options annotate it: a class, a union of types, a list, a
    dictionary, or a tuple of any length."""
    if kind is Any:
        return True
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):  # the second from Python 3.14 on
        return any(_is_a(value, each) for each in inner)
    if not isinstance(value, origin or kind):
        return False
    if origin is dict:
        return all(_is_a(key, inner[0]) and _is_a(item, inner[1]) for key, item in value.items())
    return all(_is_a(item, inner[0]) for item in value) if origin in (list, tuple) else True


def read_quantize(quantize: Any) -> QuantizeOptions | None:
    """Return the options of `quantize`, also from a scheme alone or from a config of torchao's; None for no
    quantization.

    Raises:
        ParallelError: they cannot be read, or torchao's config is of another scheme.
    """
    if quantize is None:
        return None
    if type(quantize).__module__.partition(".")[0] == "torchao":
        return _of_torchao(quantize)
    return read_options(QuantizeOptions, {"scheme": quantize} if isinstance(quantize, str) else quantize, "quantize")


def _of_torchao(config: Any) -> QuantizeOptions:
    """Return the options that stand for a config: it is told by its name and values, for torchao is not needed
    otherwise."""
    values = {name: str(value) for name, value in vars(config).items()}
    kind, granularity = type(config).__name__, type(getattr(config, "granularity", None)).__name__
    group = getattr(getattr(config, "granularity", None), "group_size", None)
    schemes = {
        ("Int8WeightOnlyConfig", None, None): "int8",
        ("Float8WeightOnlyConfig", "torch.float8_e4m3fn", None): "fp8",
        ("IntxWeightOnlyConfig", "torch.int4", "MappingType.SYMMETRIC"): "int4",
    }
    scheme = schemes.get((kind, values.get("weight_dtype"), values.get("mapping_type")))
    plain = values.get("scale_dtype", "None") == "None" and "HQQ" not in values.get("intx_choose_qparams_algorithm", "")
    if scheme is None or not plain or not (group or (granularity == "PerRow" and scheme != "int4")):
        raise ParallelError(
            f"quantize: {config} is of a scheme that ranks do not compute with; it takes Int8WeightOnlyConfig,"
            " Float8WeightOnlyConfig in float8_e4m3fn, both for rows or groups, and IntxWeightOnlyConfig of torch.int4"
            " for groups, symmetric, its scales in the data type of the weights"
        )
    return QuantizeOptions(scheme, group)


def checked_seconds(seconds: Any, name: str) -> Seconds:
    """`seconds`, or a ParallelError that names the argument."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ParallelError(f"{name} is {seconds!r}; it takes seconds, more than 0")
    return seconds


def _words(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("NoneType", "None")
