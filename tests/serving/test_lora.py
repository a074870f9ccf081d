"""Tests adapters by name: each answer equals PEFT's answer, alone and in a batch with other adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from parallelformers_ng import parallelize
from parallelformers_ng.cli import commands
from parallelformers_ng.errors import CheckpointError, ParallelError
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.serving.model_kinds import Kind
from parallelformers_ng.serving.run import load
from parallelformers_ng.serving.serve_options import ServeOptions
from tests.helpers.adapters import peft
from tests.helpers.server import Running, save_served_model, serving, tiny_tokenizer
from tests.zoo.build import randomise

TOKENIZER = tiny_tokenizer()
NAMES = ("base", "org/sql-v1.5", "chat")
PROMPT = "Hello, my name is"


def save_adapter(base: Path, folder: Path, seed: int, targets: list[str]) -> Path:
    """Save a random adapter for the model in a folder, and return the folder of the adapter."""
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    randomise(model, seed=seed).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    base = save_served_model(folder / "base", TOKENIZER)
    save_adapter(base, folder / "sql", 3, ["q_proj", "down_proj"])
    save_adapter(base, folder / "chat", 4, ["v_proj", "up_proj", "o_proj"])
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """Return the answers of transformers and PEFT in one process, by adapter name."""
    model: Any = LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
    texts = {"base": greedy(model)}
    for name, directory in (("org/sql-v1.5", "sql"), ("chat", "chat")):
        base = LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        texts[name] = greedy(peft.PeftModel.from_pretrained(base, folder / directory).eval())
    assert len(set(texts.values())) == 3
    return texts


def greedy(model: Any) -> str:
    ids = TOKENIZER(PROMPT, return_tensors="pt")["input_ids"]
    tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    return TOKENIZER.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def running(groups: Callable[[int], WorkerGroup], folder: Path) -> Iterator[Running]:
    adapters = {"adapter0": folder / "sql", "adapter1": folder / "chat"}
    words = [f"org/sql-v1.5={folder / 'sql'}", f"chat={folder / 'chat'}"]
    with (
        parallelize(folder / "base", workers=groups(2), dtype="float32", adapters=adapters, batching=True) as model,
        serving(model, TOKENIZER, model=str(folder / "base"), served_model_name="base", lora_modules=words) as server,
    ):
        yield server


def ask(running: Running, name: str | None, **more: Any) -> dict[str, Any]:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **more}
    with running.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_name_answers_as_its_adapter(running, expected):
    for name in (*NAMES, *reversed(NAMES)):
        answer = ask(running, name)
        assert (answer["model"], answer["choices"][0]["text"]) == (name, expected[name])
    assert ask(running, None)["choices"][0]["text"] == expected["base"]


def test_concurrent_requests_keep_their_adapters(running, expected):
    names = NAMES * 5
    with ThreadPoolExecutor(len(names)) as pool:
        texts = pool.map(lambda name: ask(running, name)["choices"][0]["text"], names)
        assert list(texts) == [expected[name] for name in names]


def test_prompt_likelihoods_are_those_of_the_adapter(running):
    told = {}
    for name in NAMES:
        answer = ask(running, name, echo=True, logprobs=0, max_tokens=1)
        told[name] = tuple(answer["choices"][0]["logprobs"]["token_logprobs"][1:-1])
    assert len(set(told.values())) == 3


def test_chats_and_responses_take_adapters(running, expected):
    with running.client() as client:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
        said = {name: client.post("/v1/chat/completions", json={"model": name, **chat}).json() for name in NAMES}
        assert [each["model"] for each in said.values()] == [*NAMES]
        assert len({each["choices"][0]["message"]["content"] for each in said.values()}) == 3
        body = {"model": "chat", "input": "Hi", "max_output_tokens": 16, "temperature": 0}
        response = client.post("/v1/responses", json=body).json()
        assert response["model"] == "chat"
        assert response["output"][0]["content"][0]["text"].startswith(said["chat"]["choices"][0]["message"]["content"])


def test_adapters_are_listed_unknown_names_refused(running):
    with running.client() as client:
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [
            ("base", None),
            ("org/sql-v1.5", "base"),
            ("chat", "base"),
        ]
        assert client.get("/v1/models/org/sql-v1.5").json() == cards[1]
        refused = client.post("/v1/completions", json={"model": "sql", "prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "'org/sql-v1.5'" in refused.json()["error"]["message"]
        assert client.get("/status").json()["models"] == [*NAMES]


def test_lora_modules_flag_loads_adapters(folder, expected):
    """The folder of the model is itself an adapter."""
    words = {"served_model_name": "org/sql-v1.5", "lora_modules": [f"chat={folder / 'chat'}"]}
    model, tokenizer = load(ServeOptions(str(folder / "sql"), 2, device="cpu", **words), Kind())
    with model, serving(model, tokenizer, model=str(folder / "sql"), **words) as running:
        for name in NAMES[1:]:
            assert ask(running, name)["choices"][0]["text"] == expected[name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat"], "lora_modules has 'chat'; write NAME=PATH"),
        (["chat=a", "chat=b"], "lora_modules has the name 'chat', which another model has"),
        (["tiny=a"], "lora_modules has the name 'tiny', which another model has"),
    ],
)
def test_wrong_words_are_refused(words, message):
    with pytest.raises(ParallelError, match=re.escape(message)):
        ServeOptions("tiny", lora_modules=words)


def test_an_adapter_of_another_model_is_refused(groups, folder, tmp_path):
    config = LlamaForCausalLM.from_pretrained(folder / "base").config
    config.num_hidden_layers = 3
    LlamaForCausalLM(config).save_pretrained(tmp_path / "deeper")
    save_adapter(tmp_path / "deeper", tmp_path / "strange", 5, ["q_proj"])
    config.hidden_size = 32
    LlamaForCausalLM(config).save_pretrained(tmp_path / "wider")
    save_adapter(tmp_path / "wider", tmp_path / "wide", 5, ["q_proj"])
    for name, message in (
        ("strange", "tensors are missing or not part of the model"),
        ("wide", "size mismatch"),
        ("absent", "absent"),
    ):
        with pytest.raises(CheckpointError, match=message):
            parallelize(folder / "base", workers=groups(2), adapters={"good": folder / "sql", "one": tmp_path / name})


def test_loaded_model_takes_no_adapters(groups, folder):
    with pytest.raises(ParallelError, match="add adapters to this LlamaForCausalLM with peft"):
        parallelize(
            LlamaForCausalLM.from_pretrained(folder / "base"), workers=groups(2), adapters={"a": folder / "sql"}
        )


def test_model_without_text_takes_no_adapters(tmp_path, capsys):
    from tests.serving.test_kinds import written

    flags = ["--port", "0", "--device", "cpu", "--lora-modules", "a=b"]
    assert commands.main(["serve", written(tmp_path, "BertModel"), *flags]) == 2
    assert "lora_modules is only for models that write text" in capsys.readouterr().err
