"""Whether a model type gives, cut, what it gives whole; in one process, the ranks being threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import PolicyError, UnsupportedModelError
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.registry import select
from parallelformers_ng.sharding.twin import Twin, difference, make_twin, run
from tests.zoo.catalogue import model_classes
from tests.zoo.overrides import configuration

SEED = 20
"""Not that of the proofs: what was proven must hold for other weights and inputs."""

TOLERANCE = 1e-4


@dataclass
class Verdict:
    """What came out for one model type at one world size.

    Attributes:
        model_type, model_class: who.
        world_size: number of ranks.
        status: "equal", "wrong", "refused" or "skipped" (cannot be built or run whole).
        reason: in words, unless equal.
        source: where the policies came from.
        share: share of the cuttable bytes that are cut, 0 to 1.
        compared: what was compared: "forward", "parts", "tokens".
        seconds: what it took.
    """

    model_type: str
    model_class: str
    world_size: int
    status: str
    reason: str = ""
    source: str = ""
    share: float = 0.0
    compared: str = ""
    seconds: float = 0.0


def judge(model_type: str, world_sizes: tuple[int, ...] = (2,)) -> list[dict[str, Any]]:
    """Verdicts on one model type, as dictionaries, one for each world size."""
    config_name, class_name = model_classes()[model_type]
    start = time.monotonic()
    try:
        config: PreTrainedConfig = configuration(model_type, config_name)
        twin = make_twin(getattr(transformers, class_name), config, seed=SEED)
    except Exception as error:  # anything that stops a model from running whole is no matter of cutting it
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        return [
            asdict(Verdict(model_type, class_name, size, "skipped", reason, seconds=time.monotonic() - start))
            for size in world_sizes
        ]
    verdicts = []
    for size in world_sizes:
        start = time.monotonic()
        verdict = Verdict(model_type, class_name, size, "equal")
        _compare(twin, verdict)
        verdict.seconds = round(time.monotonic() - start, 2)
        verdicts.append(asdict(verdict))
    return verdicts


def _compare(twin: Twin, verdict: Verdict) -> None:
    size = verdict.world_size
    try:
        selection = select(twin.model, world_size=size)
        plan = build_plan(twin.model, size, selection)
    except (UnsupportedModelError, PolicyError) as error:
        verdict.status, verdict.reason = "refused", str(error)[:400]
        return
    verdict.source, verdict.share = plan.source, round(plan.cut_share, 4)

    def ranks(body: Callable[[Any], Any]) -> list[Any]:
        return run_ranks(size, lambda communicator: body(cut(twin.model, plan, communicator.rank, communicator)))

    compared = []
    try:
        for probe in twin.probes:
            with torch.no_grad():
                results = ranks(lambda share, probe=probe: _run(share, probe.path, probe.inputs))
            for got in results:
                gaps = [difference(g, w) for g, w in zip(got, probe.wanted, strict=True)]
                if max(gaps, default=0.0) > TOLERANCE:
                    verdict.status, verdict.reason = "wrong", f"{probe.path or 'forward'}: differs by {max(gaps):.2g}"
                    return
            compared.append("parts" if probe.path else "forward")
        tokens = _tokens(twin, twin.model)
        if tokens is not None:
            if not all(torch.equal(got, tokens) for got in ranks(lambda share: _tokens(twin, share, strict=True))):
                verdict.status, verdict.reason = "wrong", "generates other tokens"
                return
            compared.append("tokens")
    except Exception as error:  # a rank that raises where the whole model does not is as wrong as other numbers
        verdict.status, verdict.reason = "wrong", f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    verdict.compared = ", ".join(dict.fromkeys(compared))


def _run(share: Any, path: str, inputs: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        return run(share.get_submodule(path), inputs)


def _tokens(twin: Twin, model: Any, strict: bool = False) -> torch.Tensor | None:
    """Greedy tokens; None for a model that does not generate from the inputs of its forward."""
    if twin.probes[0].path or not model.can_generate():
        return None
    inputs = {n: v for n, v in twin.probes[0].inputs.items() if not n.startswith("decoder_")}
    try:
        tokens = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False, num_beams=1)
    except Exception:
        if strict:
            raise
        return None
    return tokens if isinstance(tokens, torch.Tensor) else None
