"""The picture of the server's page, taken in Chromium while it serves the demo's model.

python -m benchmarks.page
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from transformers import AutoTokenizer

from parallelformers_ng import parallelize
from tests.serving import serving

ROOT = Path(__file__).parent.parent
MODEL = "examples/demo_model"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / MODEL)
    model = parallelize(ROOT / MODEL, 2, workers={"device": "cpu"}, batching=True)
    with serving(model, tokenizer, model=MODEL) as running, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1180, "height": 800})
        page.goto(running.url)
        page.get_by_label("Prompt").fill("And it came to pass in those days, that")
        for _ in range(2):  # so that the second has a history
            page.keyboard.press("Control+Enter")
            page.locator("#outcome", has_text="tokens in").wait_for(timeout=120_000)
        page.wait_for_timeout(1500)
        picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
        picture.quantize(64).save(ROOT / "docs/page.png", optimize=True)
        browser.close()
    model.deparallelize()


if __name__ == "__main__":
    main()
