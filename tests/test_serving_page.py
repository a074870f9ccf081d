"""The page of a server as a person uses it: in Chromium, with a keyboard, in light and dark."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parallelformers_ng.runtime.group import WorkerGroup
from tests.patience import PROMPTLY
from tests.serving import Running, ScriptedModel, serving, serving_on, tiny_tokenizer

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the page is tested in Chromium (Debian: apt-get install chromium)"),
]
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # As root in a container there is no sandbox to be had.
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that says nothing to the console, and fetches nothing from elsewhere."""
    wrong: list[str] = []
    page = browser.new_page()
    page.set_default_timeout(PROMPTLY * 1000)
    page.on("console", lambda message: wrong.extend([message.text] * ("Failed to load" not in message.text)))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: wrong.extend([asked.url] * ("127.0.0.1" not in asked.url)))
    yield page
    page.close()
    assert wrong == []


def shows(page: Any, place: str, text: str) -> None:
    page.locator(place, has_text=text).wait_for()


@pytest.fixture(scope="module")
def running(groups: Callable[[int], WorkerGroup]) -> Iterator[Running]:
    with serving_on(groups(2), TOKENIZER) as found:
        yield found


def test_a_prompt_is_answered_and_the_ranks_and_the_plan_are_shown(running, page):
    page.goto(running.url)
    shows(page, "h1", "tiny")
    page.get_by_label("Prompt").fill("Hello")
    page.get_by_label("Tokens at most").fill("12")
    page.keyboard.press("Control+Enter")
    shows(page, "#outcome", "12 tokens in")
    assert page.inner_text("#answer")
    shows(page, "#ranks", "1 (cpu:1)")
    shows(page, "#plan-text", "LlamaForCausalLM")
    assert page.locator("#picture rect").count() == 2 * page.locator("#plan-rows tr").count() > 0


def test_the_page_is_for_everybody(running, page):
    axe = pytest.importorskip("axe_core_python.sync_playwright").Axe()
    page.goto(running.url)
    shows(page, "#plan-text", "LlamaForCausalLM")
    shows(page, "#ranks", "cpu:0")
    page.locator("summary").click()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert [(found["id"], found["help"]) for found in axe.run(page)["violations"]] == []
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it fits a narrow screen"


def test_an_answer_streams_and_escape_stops_it(page):
    model = ScriptedModel(TOKENIZER, "It says so. " * 20, holds=True)
    with serving(model, TOKENIZER) as running:
        page.goto(running.url)
        page.get_by_label("Prompt").fill("Hello")
        page.get_by_role("button", name="Generate").click()
        running.until(lambda: model.asked)
        assert page.locator("#answer").get_attribute("aria-busy") == "true"
        page.keyboard.press("Escape")
        shows(page, "#outcome", "Stopped.")
        running.until(lambda: model.cancelled == 1)
        model.release(running)
        page.get_by_label("Tokens at most").fill("23")
        page.get_by_role("button", name="Generate").click()
        shows(page, "#outcome", "23 tokens in")
        assert page.inner_text("#answer") == "It says so. It says so."


def test_what_goes_wrong_is_said(page):
    with serving(ScriptedModel(TOKENIZER), TOKENIZER, max_prompt_tokens=30) as running:
        page.goto(running.url)
        page.get_by_label("Prompt").fill("Hello, this is too long")
        page.keyboard.press("Control+Enter")
        shows(page, "#outcome.wrong", "may have 30")


def test_the_key_is_asked_for_once(browser):
    with serving(ScriptedModel(TOKENIZER, "It says so."), TOKENIZER, api_key="the key") as running:
        context = browser.new_context(http_credentials={"username": "", "password": "the key"})
        page = context.new_page()
        page.goto(running.url)
        shows(page, "h1", "tiny")
        page.get_by_label("Prompt").fill("Hello")
        page.keyboard.press("Control+Enter")
        shows(page, "#answer", "It says so.")
        context.close()
