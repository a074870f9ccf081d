"""Compares embeddings of trained weights with sentence-transformers, from a folder and from an offline cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from parallelformers_ng import parallelize
from parallelformers_ng.errors import CheckpointError, UnsupportedModelError
from parallelformers_ng.serving import run
from parallelformers_ng.serving.model_kinds import Kind, kind_of
from parallelformers_ng.serving.sentence_modules import MODES, Pooling, read_pooling
from parallelformers_ng.serving.serve_options import ServeOptions
from tests.checkpoint.test_hub import snapshot
from tests.helpers.real_weights import minilm, minilm_folder
from tests.helpers.server import save_served_model, serving, tiny_tokenizer

NAME = "org/tiny"
TEXTS = ["Hello", "A longer text of Many tokens, with a word or two more.", "x"]
OLD, NEW = "sentence_transformers.models", "sentence_transformers.sentence_transformer.modules"


@dataclass(frozen=True)
class Variant:
    """Configuration of a sentence-transformers model.

    Attributes:
        pooling: configuration of the Pooling module.
        following: names of the modules after the Pooling module.
        settings: configuration of the Transformer module.
        prompts: configuration of the prompts.
    """

    pooling: dict[str, Any]
    following: tuple[str, ...] = ()
    settings: dict[str, Any] | None = None
    prompts: dict[str, Any] | None = None


def older(*modes: str) -> dict[str, Any]:
    return {f"pooling_mode_{mode}": True for mode in modes}


VARIANTS = {
    "cls": Variant(older("cls_token"), ("Normalize",)),
    "mean": Variant(older("mean_tokens")),
    "max": Variant(older("max_tokens"), ("Dense", "Normalize")),
    "lasttoken": Variant(older("lasttoken"), ("Dense",)),
    "two at once": Variant(older("mean_tokens", "cls_token"), ("Normalize",)),
    "newer words": Variant({"pooling_mode": ["mean_sqrt_len_tokens", "weightedmean"]}, ("LayerNorm", "Dropout")),
    "a prompt": Variant(
        {"pooling_mode": "cls"}, (), None, {"prompts": {"q": "query: "}, "default_prompt_name": "q"}
    ),
    "lower case": Variant(older("mean_tokens"), (), {"max_seq_length": 20, "do_lower_case": True}),
}  # fmt: skip
WIDTH = 384


def write(folder: Path, variant: Variant, package: str = OLD) -> None:
    """Write MiniLM with the modules of a variant; the weights are symbolic links."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in minilm_folder().glob("*"):
        if file.is_file() and file.name not in ("modules.json", "sentence_bert_config.json"):
            (folder / file.name).symlink_to(file)
    put(folder / "sentence_bert_config.json", variant.settings or {"max_seq_length": 256, "do_lower_case": False})
    if variant.prompts is not None:
        (folder / "config_sentence_transformers.json").unlink()
        put(folder / "config_sentence_transformers.json", variant.prompts)
    kinds = ["Transformer", "Pooling", *variant.following]
    paths = ["", *(f"{at}_{kind}" for at, kind in enumerate(kinds[1:], start=1))]
    put(folder / "modules.json", [
        {"idx": at, "name": str(at), "path": path, "type": f"{package}.{kind}"}
        for at, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ])  # fmt: skip
    put(folder / paths[1] / "config.json", {"word_embedding_dimension": WIDTH, **variant.pooling})
    random = torch.Generator().manual_seed(3)
    for kind, path in zip(kinds[2:], paths[2:], strict=True):
        if kind == "Dense":
            weights = {
                "linear.weight": torch.randn(50, WIDTH, generator=random) / 20,
                "linear.bias": torch.rand(50, generator=random),
            }
            said = {"in_features": WIDTH, "out_features": 50, "bias": True}
            put(folder / path / "config.json", {**said, "activation_function": "torch.nn.modules.activation.Tanh"})
        elif kind == "LayerNorm":
            weights = {f"norm.{name}": torch.rand(2 * WIDTH, generator=random) for name in ("weight", "bias")}
            put(folder / path / "config.json", {"dimension": 2 * WIDTH})
        else:
            put(folder / path / "config.json", {})
            continue
        save_file(weights, folder / path / "model.safetensors")


def write_decoder(folder: Path) -> None:
    """Write a decoder with last-token pooling, like Qwen3-Embedding; the checkpoint has a language-model head."""
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 256
    save_served_model(folder, tokenizer)
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    put(folder / "modules.json", [
        {"idx": at, "name": str(at), "path": path, "type": f"{OLD}.{kind}"}
        for at, (kind, path) in enumerate(paths.items())
    ])  # fmt: skip
    put(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **older("lasttoken")})
    put(folder / "2_Normalize" / "config.json", {})


def put(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("variants")
    for name, variant in VARIANTS.items():
        write(home / name, variant)
    write_decoder(home / "decoder")
    return {name: home / name for name in (*VARIANTS, "decoder")}


@pytest.fixture(scope="module")
def wanted(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the embeddings of sentence-transformers for each variant."""
    out = tmp_path_factory.mktemp("wanted") / "embeddings.json"
    command = [sys.executable, "-m", "tests.helpers.sentence_reference", json.dumps(TEXTS), out, *folders.values()]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True)
    return {name: torch.tensor(vectors) for name, vectors in zip(folders, json.loads(out.read_text()), strict=True)}


@pytest.fixture(scope="module")
def model(groups: Callable[..., Any]) -> Iterator[Any]:
    whole, _ = minilm()
    with parallelize(whole, workers=groups(2)) as cut:
        yield cut


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a cache of an unreachable hub, and return the folder of a model's snapshot."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot(tmp_path, "main")


def embedded(model: Any, pooling: Pooling) -> torch.Tensor:
    _, tokenizer = minilm()
    with serving(model, tokenizer, Kind(pooling)) as running, running.client() as http:
        answer = http.post("/v1/embeddings", json={"input": TEXTS}).json()
    return torch.tensor([each["embedding"] for each in answer["data"]])


@pytest.mark.parametrize("name", VARIANTS)
def test_embeddings_are_those_of_sentence_transformers(name, folders, wanted, model):
    got = embedded(model, kind_of(str(folders[name])).pooling)
    assert torch.allclose(got, wanted[name], atol=1e-5), (got - wanted[name]).abs().max()


def test_a_decoder_is_pooled_at_its_last_token(folders, wanted):
    options = ServeOptions(model=str(folders["decoder"]), num_gpus=2, device="cpu")
    kind = kind_of(options.model)
    assert str(kind) == "embeddings pooled by lasttoken"
    model, tokenizer = run.load(options, kind)
    with model, serving(model, tokenizer, kind) as running, running.client() as http:
        answer = http.post("/v1/embeddings", json={"input": TEXTS})
        got = torch.tensor([each["embedding"] for each in answer.json()["data"]])
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 400
    assert torch.allclose(got, wanted["decoder"], atol=1e-5)


@pytest.mark.parametrize("name", ["cls", "max"])
def test_cached_model_is_pooled_like_its_folder(name, cache, wanted, model):
    write(cache, VARIANTS[name], NEW + ".any")  # newer releases of sentence-transformers write longer module paths
    got = embedded(model, kind_of(NAME).pooling)
    assert torch.allclose(got, wanted[name], atol=1e-5)


def test_cached_model_is_served_like_its_folder(cache, wanted, groups, monkeypatch):
    """The test loads a model by name like the command. The configuration names a class with a head."""
    write(cache, VARIANTS["cls"])
    config = json.loads((cache / "config.json").read_text())
    (cache / "config.json").unlink()
    put(cache / "config.json", {**config, "architectures": ["BertForMaskedLM"]})
    options = ServeOptions(model=NAME, num_gpus=1, device="cpu")
    kind = kind_of(options.model)
    model, tokenizer = run.load(options, kind)
    with model, serving(model, tokenizer, kind) as running, running.client() as http:
        answer = http.post("/v1/embeddings", json={"input": TEXTS}).json()
    got = torch.tensor([each["embedding"] for each in answer["data"]])
    assert torch.allclose(got, wanted["cls"], atol=1e-5)


def test_a_cache_that_does_not_tell_is_refused(cache):
    write(cache, VARIANTS["cls"])
    (cache / "modules.json").unlink()  # transformers does not download this file into the cache
    with pytest.raises(UnsupportedModelError, match=r"no record of modules\.json of org/tiny"):
        read_pooling(NAME)
    none = cache.parent.parent / ".no_exist" / cache.name
    none.mkdir(parents=True)
    (none / "modules.json").touch()
    assert read_pooling(NAME).modes == ("mean",)


def test_texts_longer_than_sentence_transformers_reads_are_refused(folders, model):
    _, tokenizer = minilm()
    with serving(model, tokenizer, Kind(read_pooling(str(folders["lower case"])))) as running, running.client() as http:
        assert http.post("/v1/embeddings", json={"input": "x " * 18}).status_code == 200
        refused = http.post("/v1/embeddings", json={"input": "x " * 19})
    assert refused.status_code == 400
    assert "21 tokens; the limit is 20" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        (Variant(older("cls_token"), ("CNN",)), "modules Transformer, Pooling, CNN"),
        (Variant({"pooling_mode_sum": True}), "pooling mode 'pooling_mode_sum'"),
        (Variant({"pooling_mode": "sum"}), "pooling mode 'sum'"),
        (Variant(older("cls_token"), (), {"transformer_task": "fill-mask"}), "transformer_task to 'fill-mask'"),
        (
            Variant(
                {"pooling_mode": "mean", "include_prompt": False},
                (),
                None,
                {"prompts": {"q": "query: "}, "default_prompt_name": "q"},
            ),
            "excludes its prompt 'query: '",
        ),
    ],
)
def test_unknown_modules_are_refused_by_name(variant, why, tmp_path):
    write(tmp_path, variant)
    with pytest.raises(UnsupportedModelError, match=why):
        kind_of(str(tmp_path))


def test_foreign_code_is_refused(tmp_path):
    write(tmp_path, VARIANTS["cls"], "custom_st.models")
    with pytest.raises(UnsupportedModelError, match=r"custom_st\.models\.Transformer"):
        kind_of(str(tmp_path))
    write_dense = {"activation_function": "os.system", "in_features": 1, "out_features": 1}
    write(tmp_path / "dense", VARIANTS["lasttoken"])
    put(tmp_path / "dense" / "2_Dense" / "config.json", write_dense)
    with pytest.raises(UnsupportedModelError, match=r"activation os\.system"):
        kind_of(str(tmp_path / "dense"))


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("modules.json", "[{", r"modules\.json is damaged"),
        ("modules.json", '[{"type": "sentence_transformers.models.Transformer"}]', "module without type or path"),
        ("1_Pooling/config.json", "[]", r"1_Pooling/config\.json contains a list"),
        ("2_Dense/model.safetensors", "{}", r"2_Dense/model\.safetensors is damaged"),
    ],
)
def test_damaged_files_are_named(file, text, why, tmp_path):
    write(tmp_path, VARIANTS["lasttoken"])
    (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=why):
        kind_of(str(tmp_path))


def test_missing_weight_is_named(tmp_path):
    write(tmp_path, VARIANTS["lasttoken"])
    save_file({"linear.bias": torch.ones(1)}, tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2_Dense/model\.safetensors has no linear\.weight"):
        kind_of(str(tmp_path))


def test_model_without_modules_uses_normalized_mean(tmp_path):
    write(tmp_path, VARIANTS["cls"])
    (tmp_path / "modules.json").unlink()
    vectors = kind_of(str(tmp_path)).pooling(torch.tensor([[[1.0, 0], [0, 1]]]), torch.ones(1, 2, dtype=torch.long))
    assert torch.allclose(vectors, torch.tensor([[0.5**0.5, 0.5**0.5]]))


@pytest.mark.parametrize("mode", MODES)
def test_pooling_ignores_padding(mode):
    states, mask = torch.randn(2, 4, 8), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    pooling = Pooling((mode,))
    assert torch.allclose(pooling(states, mask)[1:], pooling(states[1:, :2], mask[1:, :2]))
    assert torch.allclose(pooling(states, mask).norm(dim=-1), torch.ones(2))
