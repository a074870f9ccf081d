"""Tests that answers about pictures equal transformers' answers, and that hostile pictures are refused undecoded."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers as tf
from PIL import Image

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.serving.model_kinds import kind_of
from parallelformers_ng.serving.run import _tokenizer, load
from parallelformers_ng.serving.serve_options import ServeOptions
from tests.helpers.server import Running, serving
from tests.helpers.serving_media import data_url, picture, save_idefics3, save_llava

NEW = 12


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def shown(address: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address, **more}}


@pytest.fixture(scope="module", params=[save_llava, save_idefics3], ids=["llava", "idefics3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def running(groups: Callable[[int], WorkerGroup], folder: Path) -> Iterator[Running]:
    kind = kind_of(str(folder))
    assert str(kind) == "text, with pictures in chats"
    processor = _tokenizer(str(folder), None, kind)
    media = folder / "media"
    (media / "inner").mkdir(parents=True)
    picture(seed=5).save(media / "a b.png")
    picture().save(folder / "secret.png")
    (media / "inner" / "link.png").symlink_to(folder / "secret.png")
    (media / "inner" / "good.png").symlink_to(media / "a b.png")
    with (
        parallelize(folder, workers=groups(2), dtype="float32", batching=True) as model,
        serving(model, processor, kind, media_folder=str(media), max_pixels=20_000, max_pictures=3) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def whole(folder: Path) -> Callable[..., str]:
    """Return a function that answers chats with transformers in one process."""
    processor = tf.AutoProcessor.from_pretrained(folder)
    model = tf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(messages: list[dict[str, Any]]) -> str:
        inputs = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        tokens = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        return processor.tokenizer.decode(tokens, skip_special_tokens=True)

    return answer


def ask(running: Running, *content: Any, status: int = 200, **more: Any) -> str:
    messages = [{"role": "user", "content": each} for each in content]
    body = {"messages": messages, "max_tokens": NEW, "temperature": 0, **more}
    with running.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    said = answer.json()
    return said["choices"][0]["message"]["content"] if status == 200 else said["error"]["message"]


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def test_answers_are_those_of_transformers(running, whole):
    one, other = picture(), picture(24, 50, seed=1)
    first, second = data_url(one), data_url(other, "JPEG", quality=95)
    decoded = Image.open(io.BytesIO(base64.b64decode(second.partition(",")[2])))
    told = [
        (
            ask(running, [shown(first), words("What is it?")]),
            user({"type": "image", "image": one}, words("What is it?")),
        ),
        (
            ask(running, [words("Compare "), shown(first, detail="high"), words(" and "), shown(second)]),
            user(
                words("Compare "), {"type": "image", "image": one}, words(" and "), {"type": "image", "image": decoded}
            ),
        ),
        (ask(running, [words("No picture.")]), user(words("No picture."))),
        (ask(running, "No picture."), user(words("No picture."))),
    ]
    assert [answer for answer, _ in told] == [whole(messages) for _, messages in told]
    assert len({answer for answer, _ in told}) == 3, "pictures and text have an effect"


def test_a_picture_of_an_earlier_turn_is_seen(running, whole):
    history = [
        {"role": "user", "content": [shown(data_url(picture())), words("Look.")]},
        {"role": "assistant", "content": "I do."},
        {"role": "user", "content": "And now?"},
    ]
    want = [
        *user({"type": "image", "image": picture()}, words("Look.")),
        {"role": "assistant", "content": [words("I do.")]},
        *user(words("And now?")),
    ]
    with running.client() as client:
        body = {"messages": history, "max_tokens": NEW, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == whole(want)


def test_requests_at_a_time_keep_their_answers(running, whole):
    pictures = [picture(seed=seed) for seed in range(4)]
    contents = [[shown(data_url(each)), words("What?")] for each in pictures] + [[words("Text alone.")]] * 4
    want = [whole(user({"type": "image", "image": each}, words("What?"))) for each in pictures]
    want += [whole(user(words("Text alone.")))] * 4
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda content: ask(running, content), contents)) == want


def test_streams_several_answers_and_responses(running):
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
    content = [shown(data_url(picture())), words("What?")]
    alone = ask(running, content)
    messages: Any = [{"role": "user", "content": content}]
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=NEW, temperature=0, n=2, stream=True
    )
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: alone, 1: alone}
    parts: Any = [{"type": "input_image", "image_url": data_url(picture())}, {"type": "input_text", "text": "What?"}]
    items: Any = [{"role": "user", "content": parts}]
    response = client.responses.create(model="tiny", input=items, max_output_tokens=NEW, temperature=0)
    assert response.output_text == alone


def test_only_files_of_the_media_folder_are_read(running, whole):
    want = whole(user({"type": "image", "image": picture(seed=5)}, words("What?")))
    media = Path(running.app._options.media_folder)
    for name in ("a%20b.png", "inner/good.png", "inner/../a%20b.png"):
        assert ask(running, [shown(f"file://{media}/{name}"), words("What?")]) == want
    for address in (
        f"file://{media}/inner/link.png",  # a symbolic link to a file outside the folder
        f"file://{media}/../secret.png",
        f"file://{media}/..%2fsecret.png",
        "file:///etc/passwd",
        f"file://{media}/absent.png",
        f"file://{media}/inner",
        f"file://{media}/a%00b.png",
        f"file://{media}",
    ):
        assert "does not exist in the folder" in ask(running, [shown(address)], status=400)


def bomb(width: int, height: int) -> str:
    """Return a small PNG whose header claims a large size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(file).decode()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([shown("http://127.0.0.1:1/a.png")], "the server does not download pictures"),
        ([shown("HTTPS://example.org/a.png")], "the server does not download pictures"),
        ([shown("/etc/passwd")], "the server does not download pictures"),
        ([shown("data:image/png,abc")], "not in base64"),
        ([shown("data:image/png;base64,#")], "not valid base64"),
        ([shown("data:image/png;base64,QUJD")], "is damaged"),
        ([shown("data:image/png;base64,")], "is damaged"),
        ([shown(bomb(60_000, 60_000))], "more than 20000 pixels"),
        ([shown(bomb(1, 15_000))], "a picture has 1 by 15000 pixels; the limit of the ratio is 200 to 1"),
        ([shown(bomb(150, 100))], "is damaged"),  # the file lacks some pixels
        ([shown(data_url(picture(100, 150))), shown(data_url(picture(100, 150)))], "more than 20000 pixels"),
        ([shown(data_url(picture(4, 4)))] * 4, "has 4 pictures; the limit is 3"),
        ([shown(data_url(picture(), "TIFF"))], "not in a known format (PNG"),
        ([words("<image>"), shown(data_url(picture()))], "refuses the pictures"),
        ([{"type": "input_audio", "input_audio": {}}], "reads text and pictures"),
        ([{"type": "image_url", "image_url": None}], "without the field 'image_url'"),
    ],
)  # fmt: skip
def test_invalid_pictures_are_refused(running, parts, message):
    said = ask(running, [*parts, words("What?")], status=400)
    assert message in said
    assert "object at" not in said


def test_address_alone_is_a_picture(running, whole):
    want = whole(user({"type": "image", "image": picture()}, words("What?")))
    assert ask(running, [{"type": "image_url", "image_url": data_url(picture())}, words("What?")]) == want


def test_picture_size_is_checked_before_decoding(running, monkeypatch):
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("the picture was decoded"))
    large, small = data_url(picture(200, 200)), data_url(picture())
    assert "more than 20000 pixels" in ask(running, [shown(small), shown(large)], status=400)


def test_pictures_of_others_than_the_user_are_refused(running):
    with running.client() as client:
        messages = [{"role": "system", "content": [shown(data_url(picture()))]}, {"role": "user", "content": "a"}]
        answer = client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert "role 'system' has a picture" in answer.json()["error"]["message"]


def test_tokenize_counts_the_tokens_of_pictures(running, folder):
    with running.client() as client:
        messages = [{"role": "user", "content": [shown(data_url(picture())), words("What?")]}]
        tokens = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    processor = tf.AutoProcessor.from_pretrained(folder)
    want = processor.apply_chat_template(
        user({"type": "image", "image": picture()}, words("What?")),
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    assert tokens == want["input_ids"][0].tolist()


def test_model_without_processor_is_served_as_text(groups, folder, tmp_path, caplog):
    for file in folder.iterdir():
        if file.is_file() and file.name not in ("processor_config.json", "preprocessor_config.json"):
            (tmp_path / file.name).symlink_to(file)
    options = ServeOptions(str(tmp_path), 2, device="cpu", dtype="float32")
    kind = kind_of(options.model)
    model, tokenizer = load(options, kind)
    assert "the server refuses pictures in requests" in caplog.text
    with model, serving(model, tokenizer, kind) as running:
        assert "the model reads text" in ask(running, [shown(data_url(picture()))], status=400)
        assert ask(running, "Hello")
