"""Implements `parallelize(decode="cuda_graphs")`: records a decode step once, and replays it without Python.

The prefill is not recorded. Among later steps with equal argument shapes, the first step runs normally and is checked
for operators that cannot be recorded. The second step is recorded, and the recording is used from then on, also in
later calls. A recording uses fixed memory: buffers for arguments, and a cache whose memory is reused.

Batches are padded to buckets of 1, 2, 4, 8, … rows. A cache has memory for all rows of its bucket. A call with fewer
rows uses the first rows: the prefill and the reordering of beams see a view of the call's rows, while the recorded
step computes all rows. Rows do not influence each other, and the results of unused rows are discarded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn.modules import module as torch_module

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.shared_result import agreed
from parallelformers_ng.cuda_graphs.captured_step import CapturedStep, Forward
from parallelformers_ng.cuda_graphs.kernel_trial import KernelTrial
from parallelformers_ng.cuda_graphs.recorder import CaptureCheck, CudaRecorder, StepArguments, Uncapturable
from parallelformers_ng.cuda_graphs.static_caches import LENGTH_STEP, ReusableCache, bucket_of, unsupported_layer
from parallelformers_ng.errors import GroupError
from parallelformers_ng.sharding.cache_names import CACHE

# A model that needs more CUDA graphs for one cache has a Python number in its arguments that changes in each step.
MAX_KINDS_OF_STEP = 64


class CapturedSteps:
    """The CUDA graphs of one rank's decode steps. In each step, either all ranks use a graph, or no rank does.

    Attributes:
        trial: decides whether Triton kernels compute the steps; None if the model has no layers for these kernels.
        reason: why the last step did not use a CUDA graph, or "".
    """

    def __init__(self, recorder: CudaRecorder, communicator: Communicator) -> None:
        self.reason = ""
        self.recorder = recorder
        self.trial: KernelTrial | None = None
        self._communicator = communicator
        self._caches: dict[int, ReusableCache] = {}  # the key is the number of rows, a power of two
        self._current: ReusableCache | None = None
        communicator.before_reset(self.forget)

    def forget(self) -> None:
        """Destroy all CUDA graphs and caches, because collectives or modules that the graphs contain have changed."""
        for cache in self._caches.values():
            cache.release()
        self._caches.clear()
        self._current = None

    @contextlib.contextmanager
    def capturing(self, model: Any) -> Iterator[None]:
        """Inside the `with` block, run the decode steps of `model.generate` over a static cache as CUDA graphs.

        The block sets `forward` and `_prepare_static_cache` on the model object. If the steps cannot be recorded,
        `reason` says why, and the model runs as usual.
        """
        self.reason = _model_obstacle(model)
        if self.reason:
            yield
            return
        prepare, forward = model._prepare_static_cache, model.forward

        def prepare_reusable(**options: Any) -> Any:
            return self._prepare_cache(model, prepare, options)

        @functools.wraps(forward)
        def forward_captured(*args: Any, **kwargs: Any) -> Any:
            reusable = self._current
            if reusable is None or kwargs.get(CACHE) is not reusable.cache or not reusable.is_begun:
                return forward(*args, **kwargs)
            return self._step(reusable, forward, args, kwargs)

        model._prepare_static_cache, model.forward = prepare_reusable, forward_captured
        self.reason = "no static cache was made for this model"  # `prepare_reusable` removes this reason
        try:
            yield
        finally:
            del model._prepare_static_cache, model.forward
            self._current = None

    def rows_held(self, rows: int, tokens: int) -> int:
        """Return the number of rows of the smallest existing cache with room for `rows` rows of `tokens` tokens; 0
        if there is none."""
        return min((each for each, cache in self._caches.items() if each >= rows and cache.length >= tokens), default=0)

    def cache(self, rows: int, tokens: int, length: int, make: Callable[[], Any]) -> ReusableCache | None:
        """Return a reusable cache with room for `rows` rows, rounded up to a power of two, and `tokens` tokens.

        If no existing cache is large enough, `make` makes a static cache of `length` tokens. If a layer of the new
        cache is not supported, the result is None, and `reason` says why.
        """
        self.reason = ""
        bucket = bucket_of(rows)
        earlier = self._caches.get(bucket)
        if earlier is None or earlier.length < tokens:
            if earlier is not None:
                self._caches.pop(bucket).release()  # the new cache may need the memory of the old one
            cache = make()
            if layer := unsupported_layer(cache):
                self.reason = f"the cache of this model has a {layer}"
                return None
            self._caches[bucket] = ReusableCache(cache, length)
        return self._caches[bucket]

    def run(self, model: Any, reusable: ReusableCache, arguments: dict[str, Any]) -> Any:
        """Run one decode step over a cache that the method `cache` returned, by a CUDA graph if possible.

        Raises GroupError or torch.distributed.DistBackendError if a collective between the ranks has failed. If
        recording fails in another way, the step runs without a graph, and `reason` says why.

        Args:
            arguments: keyword arguments of the model, with `input_ids` `[rows, 1]` and the cache.
        """
        self.reason = _model_obstacle(model)
        if self.reason:
            return model(**arguments)
        self._current = reusable
        return self._step(reusable, model.forward, (), arguments)

    def _prepare_cache(self, model: Any, prepare: Callable[..., Any], options: dict[str, Any]) -> Any:
        # transformers calls this function once in each call of `generate`, after it has computed all lengths.
        tokens = options["max_cache_len"]
        length = -(-tokens // LENGTH_STEP) * LENGTH_STEP

        def make() -> Any:
            model._previous_max_cache_length = -1  # otherwise transformers takes the longest earlier length
            return prepare(**{**options, "max_cache_len": length})

        reusable = self.cache(options["batch_size"], tokens, length, make)
        if reusable is None:
            return make()
        self._current = reusable
        return reusable.renew()

    def _step(self, reusable: ReusableCache, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            ids = kwargs.get("input_ids")
            if args or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] != 1:
                raise Uncapturable("a step has more than one token per row")
            if not reusable.is_filled:
                raise Uncapturable("a layer of the cache stays empty")
            arguments = StepArguments(kwargs, reusable.cache)
        except Uncapturable as error:
            self.reason = str(error)
            return forward(*args, **kwargs)
        if self.trial is None:
            return self._known_step(reusable, forward, arguments)
        if self.trial.mode is None and not reusable.phase:  # a trial would change the token counts of windows
            counts = [layer.cumulative_length for layer in reusable.layers]
            self.trial.decide(lambda: forward(**kwargs), reusable.snapshot, counts)
        with self.trial.computing():
            return self._known_step(reusable, forward, arguments)

    def _known_step(self, reusable: ReusableCache, forward: Forward, arguments: StepArguments) -> Any:
        steps: dict[Any, CapturedStep | str | None] = reusable.steps
        kwargs = arguments.given
        width = min(reusable.rows, bucket_of(arguments.rows)) if arguments.can_be_padded else arguments.rows
        key = (width, reusable.phase, arguments.key(width))
        if key not in steps and len(steps) < MAX_KINDS_OF_STEP:
            output, steps[key] = self._warm_up(reusable, forward, kwargs)
            return output
        step = steps.get(key, f"more than {MAX_KINDS_OF_STEP} kinds of step")
        if step is None:
            step = steps[key] = self._record(reusable, forward, arguments, width)
        if isinstance(step, str):
            self.reason = step
            return forward(**kwargs)
        if step.proofs_left:
            output, difference = step.prove(forward, arguments)
            if difference := self._agreed(difference):
                self.reason = steps[key] = difference
            return output
        return step.run(arguments)

    def _warm_up(self, reusable: ReusableCache, forward: Forward, kwargs: dict[str, Any]) -> tuple[Any, str | None]:
        with CaptureCheck() as check:
            output = self.recorder.warm_up(lambda: forward(**kwargs))
        failure = self._agreed(check.found or _odd_output(output, reusable.cache))
        self.reason = failure or self.reason
        return output, failure or None

    def _record(
        self, reusable: ReusableCache, forward: Forward, arguments: StepArguments, width: int
    ) -> CapturedStep | str:
        step, failure = None, ""
        try:
            step = CapturedStep(forward, arguments, reusable, width, self.recorder, self._communicator)
        except GroupError:
            raise
        except Exception as last:  # a failed recording raises many types of errors
            error: BaseException = last
            while error.__context__ is not None:  # a failed capture raises a second error at its end
                error = error.__context__
            failure = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        failure = self._agreed(failure)
        assert failure or step is not None
        return failure or step  # type: ignore[return-value]

    def _agreed(self, failure: str) -> str:
        """Return, on all ranks, the failure of the first rank with a failure, so that all ranks decide alike."""
        assert self._current is not None
        return agreed(self._communicator, self._current.layers[0].keys.device, lambda: failure)


def _odd_output(output: Any, cache: Any) -> str:
    """Describe outputs of a step, other than logits and the cache, that a CUDA graph cannot return; "" if there are
    none."""
    more = sorted(set(output.keys()) - {"logits", CACHE})
    if output.get(CACHE, cache) is not cache:
        more.append("another cache")
    return f"the output of a step has {', '.join(more)}" if more else ""


def _model_obstacle(model: Any) -> str:
    if "forward" in vars(model) or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "the model's forward was replaced"
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            # Hooks of transformers only record outputs that the caller requested, so they change no step.
            if not getattr(hook, "__module__", "").startswith("transformers."):
                return f"{type(module).__name__} has a forward hook"
    return ""
