"""Start `owl-sap demo --serve`, search in the console and save a screenshot. Called by scripts/console-picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

SIZE = {"width": 1280, "height": 800}
SEARCH = "#/search/notifications?q=pump+loses+water+at+the+shaft+seal"
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
TIMEOUT_MS = 60_000


def main(chromium: str, picture: Path) -> None:
    command = [sys.executable, "-m", "app", "demo", "--serve", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo, sync_playwright() as playwright:
        try:
            assert demo.stdout is not None
            demo.stdout.readline()  # the report
            url = json.loads(demo.stdout.readline())["url"]
            browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
            page = browser.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")  # type: ignore[arg-type]
            page.set_default_timeout(TIMEOUT_MS)
            page.goto(f"{url}/{SEARCH}")
            expect(page.locator(".hit").first).to_be_visible(timeout=TIMEOUT_MS)
            page.reload()  # the first search filled the caches
            expect(page.locator(".hit").first).to_be_visible(timeout=TIMEOUT_MS)
            expect(page.locator("fieldset.filter").first).to_be_visible(timeout=TIMEOUT_MS)
            picture.parent.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=picture)
            browser.close()
        finally:
            demo.terminate()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
