"""Reads the modules of a sentence-transformers model from a folder or the hub, and pools the vectors of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from parallelformers_ng.checkpoint.files import open_file
from parallelformers_ng.errors import CheckpointError, UnsupportedModelError

_ARCHITECTURES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_TRANSFORMER: dict[str, Any] = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
    "processing_kwargs": {},
    "tokenizer_name_or_path": None,
}
"""Supported settings of the Transformer module, with the only supported value of each setting."""
_OLDER = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older names of the pooling modes, in the order in which the vectors of several modes are concatenated."""
_HARMLESS = ("unpad_inputs", "backend")
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "ELU", "LeakyReLU", "Softplus", "Mish")


MODES = tuple(_OLDER.values())

Module = Callable[[torch.Tensor], torch.Tensor]
"""Function from vectors `[texts, width]` to vectors `[texts, new width]`."""


@dataclass(frozen=True)
class Pooling:
    """Pooling of a model's token vectors to one vector per text, and the sentence-transformers modules after it.

    Attributes:
        modes: pooling modes from `MODES`, as in sentence-transformers; the vectors of several modes are concatenated.
        modules: modules that run after the pooling, in order.
        prompt: text to put before each input.
        lower_case: whether inputs are lower-cased.
        max_tokens: maximum number of tokens in a text; None for the limit of the model.
    """

    modes: Sequence[str] = ("mean",)
    modules: Sequence[Module] = field(default_factory=lambda: [normalize])
    prompt: str = ""
    lower_case: bool = False
    max_tokens: int | None = None

    def __call__(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Compute one vector for each text, float32 `[texts, width]`.

        Args:
            states: output of the last layer, `[texts, tokens, width]`, padded on the right.
            mask: attention mask `[texts, tokens]`, 1 for a token and 0 for padding.
        """
        states = states.float()
        pooled = torch.cat([_pool(mode, states, mask) for mode in self.modes], -1)
        for module in self.modules:
            pooled = module(pooled)
        return pooled


def normalize(vectors: torch.Tensor) -> torch.Tensor:
    """Scale vectors `[…, width]` to Euclidean length 1; zero vectors stay zero."""
    return torch.nn.functional.normalize(vectors, dim=-1)


def _pool(mode: str, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    tokens = mask[..., None].to(states.dtype)
    if mode == "cls":
        return states[:, 0]
    if mode == "lasttoken":
        return states[torch.arange(len(states)), mask.sum(1) - 1]
    if mode == "max":
        return states.masked_fill(tokens == 0, -torch.inf).amax(1)
    if mode == "weightedmean":
        tokens = tokens * torch.arange(1, states.shape[1] + 1, dtype=states.dtype)[:, None]
    counts = tokens.sum(1)
    return (states * tokens).sum(1) / (counts.sqrt() if mode == "mean_sqrt_len_tokens" else counts)


class SentenceFiles:
    """Reader of a model's files in a folder or on the Hugging Face hub."""

    def __init__(self, name: str, revision: str | None = None) -> None:
        self.name = name
        self._revision = revision

    def find(self, file: str) -> Path | None:
        """Find a file, and download it from the hub; None if the model does not have the file."""
        if Path(self.name).is_dir():
            path = Path(self.name) / file
            return path if path.is_file() else None
        cached = try_to_load_from_cache(self.name, file, revision=self._revision)
        if cached is not None and not isinstance(cached, str):  # the hub's cache knows that the file does not exist
            return None
        try:
            return Path(hf_hub_download(self.name, file, revision=self._revision))
        except LocalEntryNotFoundError:
            raise UnsupportedModelError(
                f"the hub cannot be reached, and its cache has no record of {file} of {self.name};"
                f" run `hf download {self.name}` with a connection, or serve the model's folder"
            ) from None
        except EntryNotFoundError:
            return None

    def unsupported(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.name} {what}, which the server does not support")

    def json(self, file: str, kind: type = dict, setting: str = "") -> Any:
        """Read a JSON file of type `kind`. A missing file gives None, or an error that names `setting` if it is set."""
        path = self.find(file)
        if path is None and setting:
            raise UnsupportedModelError(f"{self.name} has no {file}, which names the {setting}")
        if path is None:
            return None
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        if not isinstance(content, kind):
            raise CheckpointError(f"{path} contains a {type(content).__name__}, not a {kind.__name__}")
        return content

    def tensors(self, folder: str, *needed: str) -> dict[str, torch.Tensor]:
        """Read a module's weights from its folder: name → float32 CPU tensor. The names `needed` must exist."""
        path = self.find(f"{folder}/model.safetensors") or self.find(f"{folder}/pytorch_model.bin")
        if path is None:
            raise UnsupportedModelError(f"{self.name} has no weights in {folder}")
        file = open_file(path)
        if missing := [name for name in needed if name not in file.entries]:
            raise CheckpointError(f"{path} has no {', '.join(missing)}")
        return {name: file.tensor(name).float() for name in file.entries}


def read_pooling(name: str, revision: str | None = None) -> Pooling:
    """Read how a model pools token vectors, from the files that `SentenceTransformer.save_pretrained` writes.

    Without `modules.json`, the pooling is the mean, normalized to length 1.
    """
    files = SentenceFiles(name, revision)
    listed = files.json("modules.json", list)
    if listed is None:
        return Pooling()
    for module in listed:
        if not isinstance(module, dict) or not all(isinstance(module.get(key), str) for key in ("type", "path")):
            raise CheckpointError(f"modules.json of {name} has a module without type or path: {module}")
        if not module["type"].startswith("sentence_transformers."):
            message = f"{name} has the module {module['type']}, which is not a module of sentence-transformers"
            raise UnsupportedModelError(message)
    kinds = [module["type"].rpartition(".")[2] for module in listed]
    if kinds[:2] != ["Transformer", "Pooling"] or not set(kinds[2:]) <= _FOLLOWING.keys() | {"Dropout"}:
        supported = f"Transformer, Pooling, then any of {', '.join(_FOLLOWING)} and Dropout"
        raise UnsupportedModelError(f"{name} has the modules {', '.join(kinds)}; the server supports {supported}")
    if listed[0]["path"]:
        raise UnsupportedModelError(
            f"{name} has its Transformer in the folder {listed[0]['path']!r}; save it again with a newer release of"
            " sentence-transformers, which saves the Transformer in the top folder"
        )
    pooling = files.json(f"{listed[1]['path']}/config.json", setting="pooling mode")
    following = [_FOLLOWING[kind](files, module["path"])
                 for kind, module in zip(kinds[2:], listed[2:], strict=True) if kind in _FOLLOWING]  # fmt: skip
    lower_case, most = _transformer_settings(files)
    config = files.json("config_sentence_transformers.json") or {}
    prompt = (config.get("prompts") or {}).get(config.get("default_prompt_name")) or ""
    if prompt and not pooling.get("include_prompt", True):
        raise files.unsupported(f"excludes its prompt {prompt!r} from the pooling")
    return Pooling(_modes(pooling, name), following, prompt, lower_case, most)


def _modes(config: dict[str, Any], name: str) -> list[str]:
    """Read the pooling modes from the configuration of a Pooling module: `pooling_mode`, or older `pooling_mode_…`."""
    chosen = config.get("pooling_mode")
    if chosen is None:
        older = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
        chosen = sorted((_OLDER.get(key, key) for key in older), key=[*_OLDER.values(), *older].index) or "mean"
    modes = [chosen] if isinstance(chosen, str) else list(chosen)
    for mode in modes:
        if mode not in MODES:
            raise UnsupportedModelError(f"{name} has the pooling mode {mode!r}; the server supports {', '.join(MODES)}")
    return modes


def _transformer_settings(files: SentenceFiles) -> tuple[bool, int | None]:
    """Read (`do_lower_case`, `max_seq_length`) of the Transformer module of sentence-transformers."""
    configs = (files.json(f"sentence_{name}_config.json") for name in _ARCHITECTURES)
    config: dict[str, Any] = next((settings for settings in configs if settings is not None), {})
    for key, value in config.items():
        if key in ("max_seq_length", "do_lower_case", *_HARMLESS) or not value:
            continue
        if key not in _TRANSFORMER or value != _TRANSFORMER[key]:
            raise files.unsupported(f"sets {key} to {value!r} for the Transformer module of sentence-transformers")
    return bool(config.get("do_lower_case")), config.get("max_seq_length")


def _dense(files: SentenceFiles, folder: str) -> Module:
    config, weights = files.json(f"{folder}/config.json", setting="activation"), files.tensors(folder, "linear.weight")
    path = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = path.rpartition(".")[2]
    if not path.startswith("torch.nn.") or activation not in _ACTIVATIONS:
        raise files.unsupported(f"has the activation {path} in {folder}")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise files.unsupported(f"sets {key} to {config[key]!r} in {folder}")
    act, weight, bias = getattr(torch.nn, activation)(), weights["linear.weight"], weights.get("linear.bias")
    return lambda vectors: act(torch.nn.functional.linear(vectors, weight, bias))


def _layer_norm(files: SentenceFiles, folder: str) -> Module:
    weights = files.tensors(folder, "norm.weight", "norm.bias")
    weight, bias = weights["norm.weight"], weights["norm.bias"]
    return lambda vectors: torch.nn.functional.layer_norm(vectors, weight.shape, weight, bias)


_FOLLOWING = {"Dense": _dense, "LayerNorm": _layer_norm, "Normalize": lambda files, folder: normalize}
"""Functions that load the modules after the pooling, by the name of the module."""
