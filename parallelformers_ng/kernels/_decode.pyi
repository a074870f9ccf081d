from typing import Any

HAS_TILES: int
HAS_PAIRS: int
MAX_STEPS: int
NEXT_BYTES: int

def linear(
    x: int,
    weight: int,
    scales: int,
    bias: int,
    weight_stride: int,
    group: int,
    out: int,
    rows: int,
    in_features: int,
    out_features: int,
    kind: int,
    /,
) -> None: ...
def rms_norm(x: int, weight: int, out: int, rows: int, width: int, kind: int, epsilon: float, /) -> None: ...
def attention(*addresses_sizes_and_scale: float) -> None: ...
def attention_half(*addresses_sizes_and_floats: float) -> None: ...
def feed_half(*addresses_sizes_and_epsilon: float) -> None: ...
def still_contain(dictionaries: list[Any], keys: list[str], values: list[Any], /) -> bool: ...
def use_threads(threads: int, /) -> None: ...
def decoder_layers(kernel: Any, sum_kind: int, layers: bytes, x: int, /, *caches_and_steps: Any) -> int: ...
