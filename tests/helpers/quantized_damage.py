"""Damages quantized checkpoints in every way that a disk, a network or a person can cause, chosen by seeds."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.helpers.quantized_checkpoints import EXPECTED

_LAYER = re.compile(r"(model|transformer)\.(layers|h)\.\d+\.[a-z_.]*(_proj|c_attn|c_proj|c_fc)")
_HARMLESS = (".weight_format", ".g_idx")
"""Tensors that old files lack, and group indices that are redundant for inputs in order."""


class Files:
    """A checkpoint to be damaged.

    Attributes:
        tensors: stored tensors by name.
        header: metadata of the file.
        config: contents of config.json.
        parts: names of the tensors that make up quantized weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with safe_open(path / "model.safetensors", "pt") as file:
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.header = file.metadata()
        self.config = json.loads((path / "config.json").read_text())
        self.parts = sorted(name for name in self.tensors if _LAYER.match(name) and self._is_part(name))

    def _is_part(self, name: str) -> bool:
        dtype = self.tensors[name].dtype
        plain = name.endswith((".weight", ".bias", "_bias")) and dtype.is_floating_point and dtype.itemsize > 1
        plain &= f"{name}.absmax" not in self.tensors
        return not plain and not name.endswith(_HARMLESS)

    @property
    def said(self) -> Any:
        return self.config["quantization_config"]

    def write(self) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, self.path / "model.safetensors", self.header)
        (self.path / "config.json").write_text(json.dumps(self.config))


def layer_of(name: str) -> str:
    """Return the layer that a part belongs to."""
    match = _LAYER.match(name)
    assert match is not None
    return match.group()


# Each function returns the text that the refusal must name besides the directory, or None if it does not apply.


def missing(files: Files, draw: random.Random) -> str | None:
    name = draw.choice(files.parts)
    del files.tensors[name]
    return layer_of(name)


def other_shape(files: Files, draw: random.Random) -> str | None:
    name = draw.choice(files.parts)
    flat = files.tensors[name].reshape(-1)
    files.tensors[name] = torch.cat([flat, flat]) if flat.numel() < 3 else flat[:-1].clone()
    return layer_of(name)


def other_type(files: Files, draw: random.Random) -> str | None:
    name = draw.choice(files.parts)
    tensor = files.tensors[name].float()
    floats = files.tensors[name].dtype.is_floating_point and not name.endswith(".weight")
    files.tensors[name] = tensor.to(torch.int16) if floats else tensor.double()
    return layer_of(name)


def extra(files: Files, draw: random.Random) -> str | None:
    name = draw.choice([name for name in files.parts if not name.endswith(".weight")])
    files.tensors[name.replace(layer_of(name), "model.norm")] = files.tensors[name].clone()
    return "model.norm"


def exchanged(files: Files, draw: random.Random) -> str | None:
    name = draw.choice(files.parts)
    ending = name.removeprefix(layer_of(name))
    shape = files.tensors[name].shape
    others = [other for other in files.parts if other.endswith(ending) and files.tensors[other].shape != shape]
    if not others or ending.endswith("weight_shape"):
        return None
    other = draw.choice(others)
    files.tensors[name], files.tensors[other] = files.tensors[other], files.tensors[name]
    return ""


def truncated(files: Files, draw: random.Random) -> str | None:
    path = files.path / "model.safetensors"
    os.truncate(path, draw.randrange(path.stat().st_size))
    return "model.safetensors"


def other_blocks(files: Files, draw: random.Random) -> str | None:
    """Change the block size where the format stores it: in the configuration, in the header, or in another tensor."""
    if files.said.get("weight_block_size"):
        files.said["weight_block_size"] = draw.choice([[8, 16], [7, 7], [0, 16], [16], "16"])
        return "weight"
    if "config_groups" in files.said:
        weights = files.said["config_groups"]["group_0"]["weights"]
        weights |= {"strategy": "group", "group_size": draw.choice([8, 24, 1])}
        return "_proj"
    described = [name for name in files.header if _LAYER.match(name)]
    if described:
        name = draw.choice(described)
        text = json.loads(files.header[name])
        text["_data"]["block_size"] = draw.choice([[1, 8], [2, 32], [1], [], None, "all"])
        files.header[name] = json.dumps(text)
        return layer_of(name)
    if "group_size" in files.said:
        files.said[draw.choice(["group_size", "bits"])] = draw.choice([0, 3, "all", None, 7])
        return ""
    states = [name for name in files.parts if ".quant_state." in name]
    if states:
        name = draw.choice(states)
        text = json.loads(bytes(files.tensors[name].tolist()))
        text[draw.choice([key for key in ("blocksize", "nested_blocksize") if key in text])] = draw.choice([16, 7, 0])
        files.tensors[name] = torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8)
        return layer_of(name)
    return None


def other_method(files: Files, draw: random.Random) -> str | None:
    methods = {"fp8", "mxfp4", "compressed-tensors", "bitsandbytes", "torchao", "awq", "gptq"} - {
        files.said["quant_method"]
    }
    files.said["quant_method"] = draw.choice(sorted(methods))
    return ""


def nothing_said(files: Files, draw: random.Random) -> str | None:
    if draw.random() < 0.5:
        del files.config["quantization_config"]
    else:
        files.config["quantization_config"] = draw.choice([{}, {"quant_method": None}, {"bits": 4}])
    return ""


def other_weight(files: Files, draw: random.Random) -> str | None:
    """Change the width of a layer's weight."""
    layer = layer_of(draw.choice(files.parts))
    rows = [name for name in files.parts if name.startswith(layer) and files.tensors[name].ndim > 1]
    if not rows or any(".quant_state." in name for name in files.parts):
        return None
    for name in rows:
        files.tensors[name] = files.tensors[name][:-1].clone()
    return layer


DAMAGES: tuple[Callable[[Files, random.Random], str | None], ...] = (
    missing, other_shape, other_type, extra, exchanged, truncated, other_blocks, other_method, nothing_said,
    other_weight,
)  # fmt: skip


class Damaged(NamedTuple):
    """A damaged checkpoint.

    Attributes:
        path: path of the checkpoint, valid until the next one is made.
        names: text that the refusal must name besides the path.
        what: name of the damage, with format and seed.
    """

    path: Path
    names: str
    what: str


def damaged(intact: Path, folder: Path, seeds: range) -> Iterator[Damaged]:
    """Yield copies of a checkpoint, one damage each, chosen by the seed among those that apply."""
    for seed in seeds:
        applied: str | None = None
        draw, turn = random.Random(f"{intact.name}-{seed}"), seed
        while applied is None:
            damage = DAMAGES[turn % len(DAMAGES)]
            broken = folder / f"{intact.name}-{damage.__name__}-{seed}"
            shutil.copytree(intact, broken, ignore=shutil.ignore_patterns(EXPECTED, "plain"))
            files = Files(broken)
            applied, turn = damage(files, draw), turn + 1
            if applied is not None:
                if damage is not truncated:
                    files.write()
                yield Damaged(broken, applied, broken.name)
            shutil.rmtree(broken)
