"""Checks whether calls of a model type share a batch, first by `batching/batch_proof.py`, then on another twin."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.batching.batch_proof import prove, why_alone
from parallelformers_ng.errors import UnsupportedModelError
from tests.zoo.catalogue import generating_classes
from tests.zoo.overrides import SIGLIP, configuration

CALLS = ((4, 4), (5, 19), (34, 9), (1, 13), (21, 30))
"""Numbers of tokens before and after: other ones than in the proof, which must hold for all."""
_SEED = 20
_NO_TEXT = {
    "bark", "clvp", "csm", "dia", "gradium_phonon_tts", "higgs_audio_v2", "musicgen", "musicgen_melody", "pocket_tts",
    "vibevoice",
}  # fmt: skip
"""Model types that generate sound."""
_SETTINGS: dict[str, dict[str, Any]] = {
    "fast_vlm": {"vision_config": SIGLIP},
    "perception_lm": {"vision_config": {**SIGLIP, "model_args": {"embed_dim": 1152}}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151652},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "xmod": {"default_language": "en_XX"},
}
"""Settings that default configurations need to generate text; SigLIP's tower replaces timm's, and gets no image."""


@dataclass
class Sharing:
    """The result for one model type.

    Attributes:
        model_type, model_class: names of the type and of the class.
        status: "shares"; "wrong" (proven, but other calls have other tokens); "alone" (calls run one by one);
            "encoder"; "no text" (it generates sound, or by CTC, without a loop); "not from text" (transformers' own
            `generate` needs more than token ids); "unbuilt".
        reason: explanation, unless it shares.
        in_chunks: whether prompts run side by side and in pieces.
    """

    model_type: str
    model_class: str
    status: str
    reason: str = ""
    in_chunks: bool = False


def shares(model_type: str) -> list[dict[str, Any]]:
    """Return the `Sharing` of a model type's first generating class, as a dictionary; an empty list without one."""
    results: list[Sharing] = []
    for name in generating_classes(model_type):
        results.append(_tried(model_type, getattr(transformers, name)))
        if results[-1].status != "unbuilt":
            return [asdict(results[-1])]
    return [asdict(each) for each in results[:1]]


def _tried(model_type: str, cls: Any) -> Sharing:
    result = Sharing(model_type, cls.__name__, "shares")
    if model_type in _NO_TEXT or cls.__name__.endswith("ForCTC"):
        result.status = "no text"
        return result
    try:
        config = configuration(model_type, CONFIG_MAPPING_NAMES[model_type], **_SETTINGS.get(model_type, {}))
        if not config.is_encoder_decoder and hasattr(config, "is_decoder"):
            config.is_decoder = True  # otherwise transformers refuses to generate
        twin = make_twin(cls, config)
    except Exception as error:  # modelling code may refuse anything
        result.status, result.reason = "unbuilt", f"{type(error).__name__}: {error}"
        if not isinstance(error, UnsupportedModelError) or not config.is_encoder_decoder:
            return result
    if config.is_encoder_decoder:
        result.status, result.reason = "encoder", "it has an encoder"
        return result
    result.reason, result.in_chunks = prove(cls, config)
    if result.reason:
        result.status = "alone"
        try:
            with torch.inference_mode():
                twin.model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
        except Exception as error:  # unusual models may raise anything
            result.status, result.reason = "not from text", f"{type(error).__name__}: {error}"
    else:
        result.reason = why_alone(make_twin(cls, config, seed=_SEED).model, result.in_chunks, CALLS)
        result.status = "wrong" if result.reason else "shares"
    return result
