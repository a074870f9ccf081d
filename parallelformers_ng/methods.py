"""Which methods of a parallelized model run here, which on the workers, and which are refused."""

from __future__ import annotations

import types
from typing import Literal

Place = Literal["local", "forwarded", "refused"]

FORWARDED = frozenset({"forward", "generate"})

REFUSED = {
    "resize_token_embeddings": "changes the shape of weights that are cut",
    "resize_position_embeddings": "changes the shape of weights that are cut",
    "set_input_embeddings": "replaces weights that are cut",
    "set_output_embeddings": "replaces weights that are cut",
    "set_encoder": "replaces weights that are cut",
    "set_decoder": "replaces weights that are cut",
    "tie_weights": "replaces weights that are cut",
    "init_weights": "draws new weights",
    "initialize_weights": "draws new weights",
    "post_init": "draws new weights",
    "load_state_dict": "writes weights that the workers hold",
    "load_adapter": "adds weights that the workers do not have",
    "add_adapter": "adds weights that the workers do not have",
    "delete_adapter": "removes weights that the workers hold",
    "dequantize": "changes weights that the workers hold",
    "half": "casts weights that the workers hold; pass dtype= to parallelize",
    "float": "casts weights that the workers hold; pass dtype= to parallelize",
    "double": "casts weights that the workers hold; pass dtype= to parallelize",
    "bfloat16": "casts weights that the workers hold; pass dtype= to parallelize",
    "type": "casts weights that the workers hold; pass dtype= to parallelize",
    "to_empty": "drops weights that the workers hold",
    "compile": "compiles modules that have no weights here",
    "share_memory": "moves weights that the workers hold",
    "gradient_checkpointing_enable": "is for training, and the workers compute without gradients",
    "activation_checkpointing_enable": "is for training, and the workers compute without gradients",
    "enable_input_require_grads": "is for training, and the workers compute without gradients",
    "set_attn_implementation": "changes modules that live on the workers; choose it at from_pretrained",
    "set_experts_implementation": "changes modules that live on the workers; choose it at from_pretrained",
    "set_use_kernels": "changes modules that live on the workers; choose it at from_pretrained",
    "generate_batch": "drives the model's modules itself; call generate",
    "continuous_batching_context_manager": "drives the model's modules itself; call generate",
    "init_continuous_batching": "drives the model's modules itself; call generate",
    "push_to_hub": "writes files by itself; call save_pretrained, then upload the directory",
}
"""Method → why it is refused while the model is parallelized. `deparallelize()` comes before all of these."""

_ACCESSORS = frozenset(
    {
        "get_input_embeddings", "get_output_embeddings", "get_position_embeddings", "get_encoder", "get_decoder",
        "get_bias", "get_prefix_bias_name", "set_default_language", "prepare_inputs_for_generation", "can_generate",
    }
)  # fmt: skip


def place_of(cls: type, name: str) -> Place:
    """Where method `name` of the model class `cls` runs while a model of it is parallelized.

    What the modelling code defines computes with weights, so it is forwarded, accessors apart. What transformers and
    torch define for all models is bookkeeping and stays local, unless it changes weights.
    """
    if name in REFUSED:
        return "refused"
    if name in FORWARDED:
        return "forwarded"
    defining = next((parent for parent in cls.__mro__ if name in vars(parent)), object)
    package = defining.__module__.partition(".")[0]
    written_here = defining.__module__.startswith("transformers.models.") or package not in (
        "transformers",
        "torch",
        "builtins",
    )
    is_method = isinstance(vars(defining).get(name), types.FunctionType)
    if name.startswith("_") or name in _ACCESSORS or not (written_here and is_method):
        return "local"
    return "forwarded"


def public_methods(cls: type) -> list[str]:
    """Names of all public methods of a model class, inherited ones included."""
    return [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name, None))]
