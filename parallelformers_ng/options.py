"""Defines the option groups of `parallelize`. A caller passes each as a dataclass, a dictionary or None."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parallelformers_ng.errors import ParallelError, PlacementError
from parallelformers_ng.option_checks import Seconds, check_number, checked_seconds, read_options, sizes_in_bytes

Number = int | float
LAUNCHERS = ("auto", "local", "torchrun", "ray")


@dataclass(frozen=True)
class RayOptions:
    """The resources of a Ray cluster that the ranks use.

    Attributes:
        address: address of the cluster. None: the cluster to which this process is connected, or without a connection
            the cluster that `ray.init()` finds or starts until the workers end.
        cpus: number of CPUs, and of threads, of each rank.
        resources: further resources of each rank's Ray bundle, by Ray's names (`{"memory": …}`) or custom names.
        runtime_env: Ray's `runtime_env` for the processes on the hosts.

    Raises:
        ParallelError: `cpus` is not more than 0.
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
    """Devices, launcher, time limits and restarts of the workers.

    Attributes:
        device: "cuda", "cpu" or "auto". "auto": CUDA if this machine, or with `launcher="ray"` the Ray cluster, has
            CUDA devices; otherwise CPU.
        device_ids: CUDA device number of each rank, if this process starts the workers; by default 0, 1, 2, ….
        backend: backend of the collectives: "auto", "shared_memory", "gloo" or "nccl".
        timeout: most seconds of one request.
        start_timeout: most seconds until all workers are ready.
        restart: start new workers after a worker died, if the caller keeps a copy of the weights.
        max_restarts: most restarts within `restart_window`; one more death in this time ends the group for good.
        restart_window: seconds over which `max_restarts` counts.
        replicas: number of groups of `num_gpus` workers, each with the whole model. A call goes to the replica with the
            least work. Replicas use different CUDA devices; CPU replicas share cores and the memory of the weights.
        launcher: program that starts the workers. "local": this process, on this machine. "torchrun": each process of
            the torchrun job is one worker, and the process of rank 0 is also the caller. "auto": "torchrun" inside a
            torchrun job, otherwise "local". "ray": a Ray cluster starts the workers on its hosts.
        ray: resources of the ranks in the Ray cluster, as `RayOptions` or a dict of its fields; needs `launcher="ray"`.
        host_copy: on CUDA, keep a copy of the shards in host memory, from which workers can be restarted. CPU workers
            always keep their shards in host memory.

    Raises:
        PlacementError: `launcher` or `device` has an unknown value.
        ParallelError: `ray` is set and `launcher` is not "ray", or a number is too small.
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
        check_number(self.replicas, "replicas", 1)
        check_number(self.max_restarts, "max_restarts", 0)


@dataclass(frozen=True)
class BatchingOptions:
    """Limits of a batch of `generate` calls, and of each call.

    Attributes:
        rows: most sequences that are decoded together.
        waiting: most calls that wait while all rows are in use; a further call raises BatchingError.
        prefill_patience: approximate milliseconds that decoding rows wait for one prefill step of new prompts. Short
            prompts run together; a longer prompt runs in chunks (chunked prefill). The measured speed of earlier
            prompts decides the length of a chunk. A call that waits for its whole answer, without a streamer or stop
            strings, waits longer: for up to four wide passes of prompts. If no row runs, a call waits at most half of
            the patience, so that calls from other threads can start in the same batch.
        prefix_tokens: tokens whose keys and values are kept from recent sequences, for prompts that begin with the
            same tokens; 0 keeps no keys and values.
        cache_tokens: most tokens in the caches of all rows; calls wait until the tokens that they may need fit. On CPU
            a row counts its own tokens. On devices, and in caches with sliding windows or states, every row counts the
            tokens of the longest row. None: the tokens that fit in half of the memory that is free when the first call
            runs.
        prompt_tokens, new_tokens: most prompt tokens and most new tokens of a call; a longer call raises
            BatchingError. None: no limit.

    Raises:
        ParallelError: a number is less than 1, or `prefix_tokens` is less than 0.
    """

    rows: int = 16
    waiting: int = 256
    prefill_patience: int = 200
    prefix_tokens: int = 4096
    cache_tokens: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_number(value, f"batching: {name}", 0 if name == "prefix_tokens" else 1)


DTYPES = ("float16", "bfloat16", "float32", "float64")
BOTH = "tensor+pipeline"
STRATEGIES = ("tensor", "pipeline", BOTH, "auto")


@dataclass(frozen=True)
class FitOptions:
    """Strategy and memory limits for devices that are small or of different sizes.

    Attributes:
        strategy: "tensor": every rank holds a part of every layer. "pipeline": every rank holds some consecutive
            layers. "tensor+pipeline": every stage of `tensor` ranks holds some consecutive layers, and each of its
            ranks a part of every such layer. "auto": "tensor" if that spreads the model, otherwise "pipeline"; the plan
            says why. With custom policies, `quantize` or `cache`, "auto" is "tensor".
        tensor: ranks of each stage, for "tensor+pipeline"; by default, on several hosts, the ranks of each host.
        ratio: relative share of each rank, or of each stage: `(1, 3)` gives the second rank three times the weights
            of the first.
        max_memory: weight budget of each device, by device number (by rank for CPU ranks), in bytes or as text
            ("10GiB"). "cpu" is the RAM for the overflow; by default all free RAM. Weights without room on a device are
            copied to the device before their layer runs.
        offload_folder: folder for weights without room in RAM.
        cache: storage of keys and values. "int8": 8-bit integers with a scale for each head and token, about a
            quarter of the bytes of float32. "offload", on CUDA devices: in host memory, except for the running
            layer. None: in the model's data type.

    Raises:
        ParallelError: `cache` or `strategy` has an unknown value; `tensor` is less than 2, or comes without
            "tensor+pipeline"; or a number of `ratio` is not positive and finite.
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
                f"fit: tensor is {self.tensor} and strategy {self.strategy!r}; only strategy={BOTH!r} takes tensor=,"
                " the ranks of each stage"
            )
        if self.tensor is not None and self.tensor < 2:
            raise ParallelError(
                f"fit: tensor is {self.tensor}; it takes at least 2 ranks. For 1 rank, pass strategy='pipeline'"
            )
        if self.ratio is not None and not all(0 < part < math.inf for part in self.ratio):
            raise ParallelError(f"fit: ratio is {self.ratio!r}; it takes numbers, each more than 0")
        if self.offload_folder is not None and self.max_memory is None:
            raise ParallelError(
                "fit: offload_folder is for weights that do not fit in max_memory; give max_memory as well"
            )
        if self.cache is not None and self.has_stages:
            raise ParallelError(f"cache is for strategy='tensor' so far, but fit's strategy is {self.strategy!r}")
        sizes_in_bytes(self.max_memory or {})  # raises an error for an invalid size

    @property
    def has_stages(self) -> bool:
        """Whether the strategy divides the layers among stages; False for "auto"."""
        return self.strategy in ("pipeline", BOTH)

    @property
    def is_open(self) -> bool:
        """Whether the strategy is "tensor+pipeline" and the number of ranks of each stage is not set yet."""
        return self.strategy == BOTH and self.tensor is None

    def over(self, counts: Sequence[int]) -> FitOptions:
        """Return the same options with `tensor` set so that each stage is on one host.

        The method returns `self` if `is_open` is False, or if all ranks are on one host.

        Args:
            counts: number of ranks of each host.

        Raises:
            ParallelError: the numbers of ranks have no common divisor above 1.
        """
        if not self.is_open or len(counts) == 1:
            return self
        tensor = math.gcd(*counts)
        if tensor == 1:
            raise ParallelError(
                f"fit: tensor is None, and hosts of {list(counts)} ranks cannot be divided into equal stages of 2 or"
                " more; give another number of ranks, or pass strategy='pipeline'"
            )
        return replace(self, tensor=tensor)

    def stages(self, world_size: int) -> int:
        """Return the number of stages of `world_size` ranks; 1 if the strategy has no stages.

        Raises:
            ParallelError: `tensor` is not set, does not divide `world_size`, or equals `world_size`: a single stage.
        """
        if self.is_open:
            raise ParallelError(
                f"fit: tensor is None and strategy {BOTH!r}; give tensor=, the ranks of each stage. On several"
                " hosts the default is the ranks of a host"
            )
        width = self.tensor or 1
        if world_size % width or world_size == width > 1:
            raise ParallelError(
                f"fit: tensor is {width}, and {world_size} ranks make no stages of {width} ranks; num_gpus must be a"
                f" multiple of {width}, at least {2 * width}"
            )
        return world_size // width if self.has_stages else 1

    def parts(self, world_size: int) -> list[float]:
        """Return the fraction of the model for each rank, or for each stage; the sum is 1. Empty for equal fractions.

        Args:
            world_size: number of ranks.

        Raises:
            ParallelError: `ratio` has more or fewer numbers than there are ranks or stages, or `world_size` ranks
                cannot be divided into stages.
        """
        ratio = self.ratio or ()
        count, unit = (self.stages(world_size), "stages") if self.has_stages else (world_size, "ranks")
        if self.ratio is not None and len(ratio) != count:
            raise ParallelError(f"fit: ratio has {len(ratio)} numbers, and there are {count} {unit}; give one each")
        return [part / sum(ratio) for part in ratio] if len(set(ratio)) > 1 else []


@dataclass(frozen=True)
class QuantizeOptions:
    """The weights to quantize, and the quantization scheme.

    Attributes:
        scheme: "int8": 8-bit integers with a scale for each output, the format of torchao's `Int8WeightOnlyConfig()`.
            "int4": 4-bit integers with a scale for every 32 inputs of an output, the format of
            `IntxWeightOnlyConfig(torch.int4, PerGroup(32))`. "fp8": 8-bit e4m3 floats with a scale for each output,
            the format of `Float8WeightOnlyConfig()`.
        group: number of inputs of an output that share a scale; by default the scheme's number.
        skip: paths of layers that stay in high precision, from a block or from the model on, with `*` for any one name
            (`["self_attn.o_proj", "mlp.*"]`). Submodules of a skipped layer are skipped, too.
        embeddings: quantize the input embeddings and the output head, too.
        dequantize: dequantize a checkpoint whose scheme no kernel supports; then quantize the weights by `scheme`, if
            set. Each rank dequantizes its own shards.

    Raises:
        ParallelError: `scheme` is unknown; `scheme` is None, but other fields than `dequantize` are set, or
            `dequantize` is False; or `group` is no even number of at least 2.
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
            raise ParallelError(f"quantize: group is {self.group}; it takes an even number of inputs, for example 32")

    @property
    def block(self) -> int | None:
        """Number of inputs of an output that share a scale; None if each output has one scale, or without a scheme."""
        return self.group or SCHEMES.get(str(self.scheme))


SCHEMES = {"int8": None, "int4": 32, "fp8": None}
"""Scheme → number of inputs of an output that share a scale; None for all inputs."""


def read_quantize(quantize: Any) -> QuantizeOptions | None:
    """Convert the argument `quantize` of `parallelize` to `QuantizeOptions`; None means no quantization."""
    if quantize is None:
        return None
    if type(quantize).__module__.partition(".")[0] == "torchao":
        return _of_torchao(quantize)
    return read_options(QuantizeOptions, {"scheme": quantize} if isinstance(quantize, str) else quantize, "quantize")


def _of_torchao(config: Any) -> QuantizeOptions:
    # Compare the name of the config's class, so that this library need not import torchao.
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
            f"quantize: the scheme of {config} is one that ranks cannot compute with; pass Int8WeightOnlyConfig or"
            " Float8WeightOnlyConfig(float8_e4m3fn) for rows or groups, or IntxWeightOnlyConfig(torch.int4) for groups,"
            " symmetric, with scales in the data type of the weights"
        )
    return QuantizeOptions(scheme, group)
