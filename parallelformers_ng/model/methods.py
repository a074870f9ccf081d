"""Which methods and attributes of a parallelized model run on the workers, which in this process, which are refused.

`python -m parallelformers_ng.model.methods` prints it as docs/methods.md has it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Literal

Place = Literal["local", "forwarded", "generated", "refused", "saved"]

FORWARDED = {
    "forward": "a part whose output would be one worker's share of a result is refused",
    "generate": "the whole loop, on the workers; in this process where an argument cannot cross to them",
}
"""Runs on the workers; with a note."""

_CASTS = "casts weights that the workers hold; pass dtype= to parallelize"
_TRAINS = "is for training, and the workers compute without gradients"
_CHOSEN = "changes modules that live on the workers; choose it at from_pretrained"
_DRIVES = "drives the model's modules itself; call generate"
_CUT = "changes the shape of weights that are cut"
_DRAWS = "draws new weights"

REFUSED = {
    "resize_token_embeddings": _CUT,
    "resize_position_embeddings": _CUT,
    "init_weights": _DRAWS,
    "initialize_weights": _DRAWS,
    "post_init": _DRAWS,
    "load_state_dict": "writes weights that the workers hold",
    "load_adapter": "adds weights that the workers do not have",
    "add_adapter": "adds weights that the workers do not have",
    "delete_adapter": "removes weights that the workers hold",
    "enable_peft_hotswap": "prepares adapters, whose weights the workers do not have",
    "dequantize": "changes weights that the workers hold",
    "to_empty": "drops weights that the workers hold",
    "compile": 'compiles modules that have no weights here; pass decode="compile" to parallelize',
    "gradient_checkpointing_enable": _TRAINS,
    "activation_checkpointing_enable": _TRAINS,
    "enable_input_require_grads": _TRAINS,
    "set_attn_implementation": _CHOSEN,
    "set_experts_implementation": _CHOSEN,
    "set_use_kernels": _CHOSEN,
    "generate_batch": _DRIVES,
    "continuous_batching_context_manager": _DRIVES,
    "init_continuous_batching": _DRIVES,
    "push_to_hub": "writes files by itself; call save_pretrained, then upload the directory",
    "save_distributed_checkpoint": "writes weights by itself; call save_pretrained or save_sharded",
    "set_submodule": "replaces a part, and the parts are with the workers",
    "add_module": "adds a part, and the parts are with the workers",
    "register_module": "adds a part, and the parts are with the workers",
    "register_parameter": "adds a weight that the workers do not have",
    "register_buffer": "adds a tensor that the workers do not have",
    "set_extra_state": "writes state that the workers hold",
}
"""Method → why it is refused while the model is parallelized. `deparallelize()` comes before all of these."""

_IF_NOTHING_CHANGES = "done where it changes nothing, else refused"
_ENDS = "of the model: ends the parallelization, and says so; of a part: " + _IF_NOTHING_CHANGES

LOCAL = {
    # nn.Module: the tree
    **dict.fromkeys(("children", "modules", "named_children", "named_modules", "get_submodule"), "the modules"),
    **dict.fromkeys(
        ("parameters", "named_parameters", "get_parameter", "buffers", "named_buffers", "get_buffer"),
        "weights to read: values come from the workers when asked for; writing to one is refused",
    ),
    "apply": "calls the function on every module here; if it writes to a weight, that is refused",
    "state_dict": "gathers the weights",
    "requires_grad_": "the flags are this process's; they stay when the parallelization ends",
    "zero_grad": "the weights have no gradients",
    "train": "the workers' modules take the same mode",
    "eval": "the workers' modules take the same mode",
    "extra_repr": "also says how the module is cut",
    **dict.fromkeys(("half", "float", "double", "bfloat16", "type"), f"{_IF_NOTHING_CHANGES}: it {_CASTS}"),
    **dict.fromkeys(("ipu", "xpu", "mtia"), _IF_NOTHING_CHANGES),
    **dict.fromkeys(("to", "cuda", "cpu"), _ENDS),
    "share_memory": "the weights are in shared memory",
    "get_extra_state": "as without parallelization",
    **dict.fromkeys(
        ("register_forward_hook", "register_forward_pre_hook"),
        "runs on the workers, by value; refused where it would see one worker's share",
    ),
    **dict.fromkeys(
        ("register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"),
        f"refused: it {_TRAINS}",
    ),
    **dict.fromkeys(
        (
            "register_state_dict_pre_hook", "register_state_dict_post_hook", "register_load_state_dict_pre_hook",
            "register_load_state_dict_post_hook",
        ),
        "as without parallelization",
    ),
    **dict.fromkeys(("T_destination", "call_super_init", "dump_patches"), "as without parallelization"),
    # PreTrainedModel
    "save_pretrained": "writes an ordinary checkpoint, a tensor at a time",
    "from_pretrained": "of the class: gives an ordinary model",
    "device": "where inputs may be put and outputs come back: cpu",
    "dtype": "of the weights on the workers",
    **dict.fromkeys(
        (
            "tie_weights", "set_input_embeddings", "set_output_embeddings", "set_encoder", "set_decoder",
            "mark_tied_weights_as_initialized",
        ),
        _IF_NOTHING_CHANGES,
    ),
    **dict.fromkeys(
        (
            "get_input_embeddings", "get_output_embeddings", "get_position_embeddings", "get_encoder", "get_decoder",
            "base_model",
        ),
        "the module, whose work is done by the workers",
    ),
    "get_parameter_or_buffer": "a weight to read",
    "named_non_persistent_buffers": "weights to read",
    "retrieve_modules_from_names": "the modules",
    **dict.fromkeys(("num_parameters", "get_memory_footprint"), "of the whole model"),
    **dict.fromkeys(
        ("active_adapters", "set_adapter", "enable_adapters", "disable_adapters", "get_adapter_state_dict"),
        "as without parallelization: the model has no adapters",
    ),
    **dict.fromkeys(
        (
            "activation_checkpointing_disable", "gradient_checkpointing_disable", "disable_input_require_grads",
            "is_activation_checkpointing", "is_gradient_checkpointing", "supports_gradient_checkpointing",
        ),
        "as without parallelization: nothing is trained",
    ),
    "loss_function": "set here, it is used on the workers",
    **dict.fromkeys(
        (
            "add_model_tags", "model_tags", "base_model_prefix", "can_generate", "can_record_outputs", "config_class",
            "dummy_inputs", "ep_plan", "fsdp_plan", "fsdp_size", "generation_config_class", "get_compiled_call",
            "get_correct_attn_implementation", "get_correct_experts_implementation", "get_expanded_tied_weights_keys",
            "get_experts_implementation", "get_init_context", "init_parallel_plans", "input_modalities",
            "is_backend_compatible", "is_custom_code", "is_distributed_loading_by_transformers", "is_remote_code",
            "main_input_name", "maybe_distribute_model", "pp_plan", "prepare_distribute_model",
            "register_for_auto_class", "should_save_on_this_rank", "supports_context_parallel", "supports_pp_plan",
            "smart_apply", "supports_tp_plan", "tp_plan", "tp_size", "use_kernels",
            "warn_if_padding_and_no_attention_mask", "barrier_after_gathered_checkpoint_save",
            "gather_sharded_state_dict_for_save",
        ),
        "as without parallelization",
    ),
    # GenerationMixin
    "prepare_inputs_for_generation": "as without parallelization; `generate` calls it on the workers",
    **dict.fromkeys(
        (
            "adjust_generation_fn", "compute_transition_scores", "heal_tokens", "load_custom_generate",
            "output_modalities", "destroy_cached_continuous_batching_manager",
        ),
        "as without parallelization",
    ),
}  # fmt: skip
"""Answered in this process; with a note."""

_ACCESSORS = frozenset({"get_bias", "get_prefix_bias_name", "set_default_language"})
"""Methods of modelling code that compute nothing."""


def place_of(cls: type, name: str) -> Place:
    """Where method `name` of a module class runs while its model is parallelized.

    What modelling code defines computes with weights, so it is forwarded, accessors apart. What transformers and
    torch define for all models is bookkeeping and stays local, unless it changes weights.
    """
    if name in REFUSED:
        return "refused"
    if name == "generate":
        return "generated"
    if name == "save_pretrained":
        return "saved"
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
    if name.startswith("_") or name in LOCAL or name in _ACCESSORS or not (written_here and is_method):
        return "local"
    return "forwarded"


def public_methods(cls: type) -> list[str]:
    """Names of all public methods of a module class, inherited ones included."""
    return [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name, None))]


def table() -> str:
    """All of it, for people."""
    rows = [
        *((name, "runs on the workers", note) for name, note in FORWARDED.items()),
        *((name, "answered here", note) for name, note in LOCAL.items()),
        *((name, "refused", f"it {why}") for name, why in REFUSED.items()),
    ]
    lines = [f"| `{name}` | {place} | {note} |" for name, place, note in sorted(rows, key=lambda row: row[0].lower())]
    return "\n".join(
        [
            "# What a parallelized model does",
            "",
            "Every public method and attribute that `nn.Module`, `PreTrainedModel` and `GenerationMixin` give a model,",
            "and where it is dealt with while the model is parallelized. It holds for the model and for its parts",
            "(`model.get_encoder()`, a layer, an embedding). What the modelling code of a family adds",
            "(`get_image_features`, …) runs on the workers. What is refused raises a `ParallelError` and changes",
            "nothing; after `model.deparallelize()` the model is an ordinary one again.",
            "",
            "Attributes: setting one that a module has tells the workers; a parameter, a buffer or a sub-module cannot",
            "be replaced, added or deleted.",
            "",
            "| name | | |",
            "| --- | --- | --- |",
            *lines,
            "",
        ]
    )


@functools.cache
def generates(cls: Any, method: Callable) -> bool:
    """Whether a method calls `generate`, itself or by way of other methods of its class: it may then be given what
    `generate` may be given."""
    seen: set[Any] = set()

    def calls_generate(function: Any) -> bool:
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if code is None or code in seen:
            return False
        seen.add(code)
        return "generate" in code.co_names or any(
            calls_generate(inspect.getattr_static(cls, name, None)) for name in code.co_names
        )

    return calls_generate(method)


if __name__ == "__main__":
    print(table(), end="")
