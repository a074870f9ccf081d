"""Tests libraries that measure models: lm-eval on tasks of this file, and sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import numpy
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from sentence_transformers import SentenceTransformer

from tests.helpers.real_weights import minilm_folder

FACTS = [
    ("The capital of France is", "Paris", "Rome"), ("The capital of Italy is", "Rome", "Paris"),
    ("The opposite of hot is", "cold", "blue"), ("Two plus two is", "four", "nine"),
]  # fmt: skip
CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
KINDS = {
    "multiple_choice": 'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{label}}"\n',
    "generate_until": (
        'doc_to_target: " {{choices[label]}}"\n'
        'generation_kwargs: {until: ["."], max_gen_toks: 5, do_sample: false}\n'
        "metric_list: [{metric: exact_match}]\n"
    ),
    "loglikelihood_rolling": 'doc_to_target: "{{question}} {{choices[0]}}"\nmetric_list: [{metric: word_perplexity}]\n',
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """Return a folder with one task of each kind."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "facts.jsonl"
    rows = [{"question": text, "choices": [right, wrong], "label": 0} for text, right, wrong in FACTS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind, settings in KINDS.items():
        (folder / f"{kind}.yaml").write_text(CHOICE.format(name=f"facts_{kind}", data=data, kind=kind) + settings)
    return folder


def test_lm_eval(language_model, tasks) -> None:
    def results(model: Any) -> dict[str, Any]:
        harness = HFLM(pretrained=model, tokenizer=language_model.tokenizer, batch_size=2)
        names = [f"facts_{kind}" for kind in KINDS]
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        evaluated = lm_eval.simple_evaluate(harness, tasks=names, task_manager=manager, bootstrap_iters=0)
        return evaluated["samples"]

    got, want = language_model.both(results)
    for kind in KINDS:
        for mine, theirs in zip(got[f"facts_{kind}"], want[f"facts_{kind}"], strict=True):
            same(mine["resps"], theirs["resps"])


def same(got: Any, want: Any) -> None:
    """Assert that texts and choices are equal, and numbers to 1e-4."""
    if isinstance(want, list | tuple):
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            same(mine, theirs)
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=1e-4)
    else:
        assert got == want


@pytest.mark.parametrize("as_tensor", [True, False])
def test_sentence_transformers(encoder, as_tensor) -> None:
    texts = [" ".join(fact) for fact in FACTS]

    def embeddings(model: Any) -> Any:
        evaluated = SentenceTransformer(str(minilm_folder()), device="cpu")
        evaluated[0].auto_model = model
        return evaluated.encode(texts, convert_to_tensor=as_tensor, convert_to_numpy=not as_tensor, batch_size=2)

    got, want = encoder.both(embeddings)
    assert type(got) is type(want)
    numpy.testing.assert_allclose(numpy.asarray(got), numpy.asarray(want), atol=1e-4)


def test_sentence_transformers_parallelized_in_place(encoder, groups) -> None:
    from parallelformers_ng import parallelize
    from parallelformers_ng.model.parallelized import is_parallelized

    evaluated = SentenceTransformer(str(minilm_folder()), device="cpu")
    want = evaluated.encode(["w"], convert_to_tensor=True)
    with parallelize(evaluated.transformers_model, workers=groups(2), progress=False) as cut:
        torch.testing.assert_close(evaluated.encode(["w"], convert_to_tensor=True), want, rtol=1e-4, atol=1e-4)
        assert evaluated.to("cpu") is evaluated
        assert is_parallelized(cut)
    torch.testing.assert_close(evaluated.encode(["w"], convert_to_tensor=True), want, rtol=1e-4, atol=1e-4)
