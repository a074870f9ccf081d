"""Takes the picture of the server's page in Chromium, while the server runs a model of SmolLM2-135M's shape.

python -m benchmarks.page
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from parallelformers_ng import parallelize
from tests.helpers.real_weights import smollm2
from tests.helpers.server import serving

PICTURE = Path(__file__).parent.parent / "docs/page.png"
MESSAGES = ("What is the capital of France?", "Give me three short tips for a visit, as a list.")


def main() -> None:
    model, tokenizer = smollm2()
    parallelize(model, 2, workers={"device": "cpu"}, batching=True)
    with serving(model, tokenizer, model="SmolLM2-135M-Instruct") as running, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.goto(running.url)
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Tokens at most").fill("160")
        for number, message in enumerate(MESSAGES, start=1):
            page.get_by_label("Your message").fill(message)
            page.keyboard.press("Enter")
            page.locator(".turn.assistant button").nth(number - 1).wait_for(timeout=120_000)
        page.wait_for_timeout(1500)
        picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
        picture.quantize(64).save(PICTURE, optimize=True)
        browser.close()
    model.deparallelize()


if __name__ == "__main__":
    main()
