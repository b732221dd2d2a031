"""Screenshots of the example report for the docs: `python -m tests.report.screenshots docs/images`."""

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.report.browser import launch
from tests.report.example_pages import example_pages

SHOTS = {
    "report-light": ("report", 1280, 900, "light"),
    "report-dark": ("report", 1280, 900, "dark"),
    "report-narrow": ("report", 400, 900, "light"),
}


def main(folder: Path) -> None:
    """Write each screenshot into `folder`, as PNG files of less than 250 kB."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        for name, page in example_pages().items():
            page.write(Path(scratch) / f"{name}.html")
        browser = launch(playwright)
        for shot, (name, width, height, colours) in SHOTS.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=colours)
            page = context.new_page()
            page.goto((Path(scratch) / f"{name}.html").as_uri())
            page.screenshot(path=folder / f"{shot}.png")
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto((Path(scratch) / "report.html").as_uri())
        page.locator("#section-stability-runs .plots").screenshot(path=folder / "report-plots.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
