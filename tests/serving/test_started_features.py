"""Tests features of the server as a user starts them: with flags of the command, in a separate process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from transformers import LlamaForCausalLM

from tests.helpers.adapters import peft
from tests.helpers.server import save_served_model, tiny_tokenizer
from tests.serving.test_command import command
from tests.serving.test_lora import PROMPT, greedy, save_adapter

pytestmark = pytest.mark.slow
TEMPLATE = "{% for message in messages %}<<{{ message.content }}>>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, an adapter, a chat template, and peft alone for the import path of the command."""
    folder = tmp_path_factory.mktemp("started")
    save_adapter(save_served_model(folder / "base"), folder / "sql", 3, ["q_proj", "down_proj"])
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "media").mkdir()
    (folder / "site-packages").mkdir()
    package = Path(peft.__file__).parent
    for each in (package, *package.parent.glob("peft-*")):
        (folder / "site-packages" / each.name).symlink_to(each)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """Return the answers of transformers and PEFT in this process."""
    base = LlamaForCausalLM.from_pretrained(folder / "base", dtype="float32").eval()
    return {"base": greedy(base), "sql": greedy(peft.PeftModel.from_pretrained(base, folder / "sql").eval())}


def started_flags(folder: Path) -> list[str]:
    return [
        *("--served-model-name", "base", "--lora-modules", f"sql={folder / 'sql'}"),
        *("--chat-template", str(folder / "template.jinja"), "--media-folder", str(folder / "media")),
        *("--cors", "https://example.org", "--open-probes", "--max-choices", "2", "--max-stops", "1"),
        *("--max-prompt-tokens", "40", "--max-tokens", "3", "--prefix-tokens", "0", "--log-format", "json"),
    ]


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    """Yield a client of a server with many flags."""
    variables = {"PYTHONPATH": str(folder / "site-packages"), "PARALLELFORMERS_API_KEY": "the key"}
    with command(folder / "base", *started_flags(folder), **variables) as (_, client, _):
        yield client


def text(client: httpx.Client, **fields: object) -> str:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_adapters_answer_by_name(client, expected):
    assert {name: text(client, model=name) for name in expected} == expected


def test_key_is_needed(client):
    for authorization in ("", "Bearer", "Bearer x", "Basic Og=="):
        assert client.get("/v1/models", headers={"Authorization": authorization}).status_code == 401
    for path in ("/health", "/ready", "/metrics"):
        answer = client.head(path, headers={"Authorization": ""})
        assert (answer.status_code, answer.text) == (200, "")
        assert int(answer.headers["content-length"]) > 0


def test_limits_template_and_origins_act(client):
    assert client.post("/v1/completions", json={"prompt": "x", "n": 3}).status_code == 400
    assert client.post("/v1/completions", json={"prompt": "x", "stop": ["a", "b"]}).status_code == 400
    assert client.post("/v1/completions", json={"prompt": "x" * 41}).status_code == 400
    assert client.post("/v1/completions", json={"prompt": "x"}).json()["usage"]["completion_tokens"] <= 3
    said = client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()["tokens"]
    assert tiny_tokenizer().decode(said) == "<<Hi>>"
    allowed = client.get("/v1/models", headers={"Origin": "https://example.org"}).headers
    assert allowed["access-control-allow-origin"] == "https://example.org"


def test_folder_of_an_adapter_is_served(folder, expected):
    with command(folder / "sql", PYTHONPATH=str(folder / "site-packages")) as (_, client, line):
        assert "PeftModelForCausalLM on ranks cpu:0, cpu:1" in line
        assert text(client) == expected["sql"]


LAYOUTS = (
    "--strategy pipeline --max-memory 0=230KB 1=230KB cpu=1GiB --offload-folder {folder}/offload --dtype float32",
    "--cache int8 --ratio 1 3 --replicas 2 --dtype bfloat16 --quantize int8 --cache-tokens 4096",
)


@pytest.mark.parametrize("flags", LAYOUTS)
def test_layouts_answer(folder, expected, flags):
    with command(folder / "base", *flags.format(folder=folder).split()) as (_, client, _):
        written = text(client)
        assert written == expected["base"] if "float32" in flags else written
