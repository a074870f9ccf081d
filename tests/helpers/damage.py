"""Damages checkpoints in every way that a disk, a network or a person can cause."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file

from parallelformers_ng.model.saving import shard


def save_intact(model: Any, folder: Path) -> dict[str, Path]:
    """Save the same weights as a sharded directory, as one file, and as several files with an index."""
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "several", max_shard_size="40KB")
    shard(str(folder / "one"), folder / "sharded", 2, max_shard_size="30KB")
    return {kind: folder / kind for kind in ("one", "several", "sharded")}


def truncate(path: Path, draw: random.Random) -> None:
    """Cut a file off at a random place."""
    os.truncate(path, draw.randrange(path.stat().st_size))


def remove(path: Path, draw: random.Random) -> None:
    """Delete a file."""
    path.unlink()


def flip_header(path: Path, draw: random.Random) -> None:
    """Flip a bit of the header of a safetensors file, or of an index."""
    data = bytearray(path.read_bytes())
    end = len(data) if path.suffix == ".json" else 8 + int.from_bytes(data[:8], "little")
    data[draw.randrange(end)] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def flip_weight(path: Path, draw: random.Random) -> None:
    """Flip a bit of a weight; only sharded directories have checksums that show the flipped bit."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(8 + int.from_bytes(data[:8], "little"), len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def reshape(path: Path, draw: random.Random) -> None:
    """Store a tensor with a wrong shape in an otherwise valid file."""
    tensors = load_file(path)
    name = draw.choice(sorted(tensors))
    tensors[name] = tensors[name].flatten()[:-1].clone()
    save_file(tensors, path, metadata={"format": "pt"})


DAMAGE: dict[str, list[tuple[Callable[[Path, random.Random], None], str]]] = {
    "sharded": [
        (truncate, "*.safetensors"), (remove, "*.safetensors"), (flip_header, "*.safetensors"),
        (flip_weight, "*.safetensors"), (reshape, "*.safetensors"), (flip_header, "*.index.json"),
        (truncate, "*.index.json"),
    ],
    "several": [
        (truncate, "*.safetensors"), (remove, "*.safetensors"), (flip_header, "*.safetensors"),
        (reshape, "*.safetensors"), (flip_header, "*.index.json"), (truncate, "*.index.json"),
    ],
    "one": [
        (truncate, "*.safetensors"), (remove, "*.safetensors"), (flip_header, "*.safetensors"),
        (reshape, "*.safetensors"),
    ],
}  # fmt: skip


class Damaged(NamedTuple):
    """A damaged checkpoint.

    Attributes:
        directory: path of the checkpoint, valid until the next one is made.
        damage: function that caused the damage.
        name: name of the damage, with its number.
    """

    directory: Path
    damage: Callable[[Path, random.Random], None]
    name: str


def damaged(kind: str, intact: Path, folder: Path, rounds: int) -> Iterator[Damaged]:
    """Yield copies of a checkpoint, one damage each; a round has every damage possible for its kind, 17 over all kinds.

    Args:
        kind: "one" or "several" safetensors files, or "sharded" for a directory of `save_sharded`.
        intact: path of the checkpoint.
        folder: empty directory; the copies are made in it one after another.
    """
    for seed in range(rounds):
        for damage, pattern in DAMAGE[kind]:
            draw = random.Random(seed)
            broken = folder / f"{kind}-{damage.__name__}-{seed}"
            shutil.copytree(intact, broken)
            damage(draw.choice(sorted(broken.glob(pattern))), draw)
            yield Damaged(broken, damage, broken.name)
            shutil.rmtree(broken)
