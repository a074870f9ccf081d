"""Whether calls of a model type share a batch: by `batching/batch_proof.py`, then on another twin."""

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
"""Tokens before and after: other lengths than in the proof, which must hold for them, too."""
_SEED = 20
_NO_TEXT = {
    "bark", "clvp", "csm", "dia", "gradium_phonon_tts", "higgs_audio_v2", "musicgen", "musicgen_melody", "pocket_tts",
    "vibevoice",
}  # fmt: skip
"""Types that generate sounds."""
_SETTINGS: dict[str, dict[str, Any]] = {
    "fast_vlm": {"vision_config": SIGLIP},
    "perception_lm": {"vision_config": {**SIGLIP, "model_args": {"embed_dim": 1152}}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151652},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "xmod": {"default_language": "en_XX"},
}
"""Without which a default configuration generates no text here; SigLIP's tower stands for timm's, and sees nothing."""


@dataclass
class Sharing:
    """The verdict for one model type.

    Attributes:
        model_type, model_class: type and class of the model.
        status: "shares"; "wrong" (it was proven, but other calls have other tokens); "alone" (calls run in their turn);
            "encoder"; "no text" (it generates sounds, or by CTC, without a loop); "not from text" (transformers' own
            `generate` does not go from token ids alone); "unbuilt".
        reason: in words, unless it shares.
        in_pieces: prompts run side by side and in pieces.
    """

    model_type: str
    model_class: str
    status: str
    reason: str = ""
    in_pieces: bool = False


def shares(model_type: str) -> list[dict[str, Any]]:
    """The `Sharing` of the first class of a model type that generates, as a dictionary; none where none does."""
    found: list[Sharing] = []
    for name in generating_classes(model_type):
        found.append(_tried(model_type, getattr(transformers, name)))
        if found[-1].status != "unbuilt":
            return [asdict(found[-1])]
    return [asdict(each) for each in found[:1]]


def _tried(model_type: str, cls: Any) -> Sharing:
    found = Sharing(model_type, cls.__name__, "shares")
    if model_type in _NO_TEXT or cls.__name__.endswith("ForCTC"):
        found.status = "no text"
        return found
    try:
        config = configuration(model_type, CONFIG_MAPPING_NAMES[model_type], **_SETTINGS.get(model_type, {}))
        if not config.is_encoder_decoder and hasattr(config, "is_decoder"):
            config.is_decoder = True  # else transformers says that such a model is none to generate with
        twin = make_twin(cls, config)
    except Exception as error:  # the modelling code decides what it refuses
        found.status, found.reason = "unbuilt", f"{type(error).__name__}: {error}"
        if not isinstance(error, UnsupportedModelError) or not config.is_encoder_decoder:
            return found
    if config.is_encoder_decoder:
        found.status, found.reason = "encoder", "it has an encoder"
        return found
    found.reason, found.in_pieces = prove(cls, config)
    if found.reason:
        found.status = "alone"
        try:
            with torch.inference_mode():
                twin.model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
        except Exception as error:  # whatever a model of a kind of its own raises
            found.status, found.reason = "not from text", f"{type(error).__name__}: {error}"
    else:
        found.reason = why_alone(make_twin(cls, config, seed=_SEED).model, found.in_pieces, CALLS)
        found.status = "wrong" if found.reason else "shares"
    return found
