"""Tests an index that names files in sub-folders of the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from parallelformers_ng import parallelize
from parallelformers_ng.errors import CheckpointError


def _saved(folder: Path, names: tuple[str, str]) -> GPT2LMHeadModel:
    """Save a model in two files with these names in the index."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, bos_token_id=0, eos_token_id=0))
    model.config.save_pretrained(folder)
    parts: list[dict[str, torch.Tensor]] = [{}, {}]
    for number, (name, tensor) in enumerate(model.transformer.state_dict(prefix="transformer.").items()):
        parts[number % 2][name] = tensor.clone()
    for name, part in zip(names, parts, strict=True):
        (folder / name).parent.mkdir(exist_ok=True)
        save_file(part, folder / name, {"format": "pt"})
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return model.eval()


def test_files_in_sub_folders(tmp_path: Path, groups) -> None:
    plain = _saved(tmp_path, ("b/weights.safetensors", "a/weights.safetensors"))
    model = parallelize(str(tmp_path), workers=groups(2))
    try:
        ids = torch.tensor([[1, 5, 9]])
        with torch.no_grad():
            assert torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-5)
    finally:
        model.deparallelize()


def test_files_outside_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("../weights.safetensors", str(tmp_path / "weights.safetensors")):
        _saved(folder, ("weights.safetensors", name))
        with pytest.raises(CheckpointError, match="outside its directory"):
            parallelize(str(folder), 2)
