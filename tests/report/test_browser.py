"""Report in a browser: each page renders, can be filtered, fits the screen, and is accessible."""

import os

import pytest

from tests.report.browser import find_chromium, launch

REQUIRED = os.environ.get("STACKWISE_REQUIRE_BROWSER") == "1"
NAMES = ("report", "gate", "comparison", "search", "quality", "models")


def _missing():
    """Return what the tests of this file lack, or an empty string."""
    if find_chromium() is None:
        return "no Chromium: apt-get install chromium, or set STACKWISE_CHROMIUM to its path"
    try:
        import axe_playwright_python
        import playwright
    except ImportError as error:
        return f"{error}: pip install 'stackwise[dev]'"
    del axe_playwright_python, playwright
    return ""


@pytest.fixture(scope="module")
def browser():
    if reason := _missing():
        pytest.fail(reason, pytrace=False) if REQUIRED else pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(browser, tmp_path_factory):
    """The path of each example page."""
    from tests.report.example_pages import example_pages

    folder = tmp_path_factory.mktemp("pages")
    paths = {}
    for name, page in example_pages().items():
        paths[name] = folder / f"{name}.html"
        page.write(paths[name])
    return paths


@pytest.fixture
def show(browser, files):
    """Return a function that shows an example page and returns it; errors of the console are failures."""
    errors, contexts = [], []

    def show_page(name="report", *, width=1280, colours="light", scripts=True):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=colours, java_script_enabled=scripts
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(("file:", "data:")) else errors.append(request.url)
            ),
        )
        page.goto(files[name].as_uri())
        return page

    yield show_page
    for context in contexts:
        context.close()
    assert errors == []


@pytest.mark.parametrize("name", NAMES)
def test_every_section_renders(show, name):
    page = show(name)
    headings = page.locator("main h2").all_inner_texts()
    assert headings
    for section in page.locator("main > .wrap > section").all():
        assert section.bounding_box()["height"] > 40
    for svg in page.locator("figure svg").all():
        assert svg.bounding_box()["height"] > 100
    assert page.locator("main :is(article, tbody tr, figure)").count() > 0
    assert page.locator("[data-entry][hidden], main .scroll[hidden]").count() == 0
    assert page.get_by_text("No result matches the filter.").is_hidden()
    assert page.title().startswith(page.locator(".verdict").inner_text())


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_overflows(show, name, width):
    page = show(name, width=width)
    page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Elements may be wider only inside a region that scrolls by itself.
    wide = page.evaluate(
        "width => [...document.body.querySelectorAll('*')]"
        ".filter(e => !e.closest('.scroll, .skip') && e.getBoundingClientRect().right > width + 1)"
        ".map(e => e.outerHTML.slice(0, 80))",
        width,
    )
    assert wide == []


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_axe_finds_no_violation(show, name, colours):
    from axe_playwright_python.sync_playwright import Axe

    page = show(name, colours=colours)
    page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
    found = Axe().run(page).response["violations"]
    assert [(each["id"], [node["html"][:90] for node in each["nodes"]]) for each in found] == []


def test_colours_follow_the_mode_of_the_system(show):
    grounds = {
        colours: show(colours=colours).evaluate("getComputedStyle(document.body).backgroundColor")
        for colours in ("light", "dark")
    }
    assert grounds["light"] != grounds["dark"]


def test_search_keeps_only_results_with_all_words(show):
    page = show()
    page.get_by_label("Search").fill("causality leaky_gpt")
    visible = page.locator("[data-entry]:visible").all_inner_texts()
    assert visible
    assert all("causality" in text and "leaky_gpt" in text for text in visible)
    assert page.get_by_role("status").inner_text().startswith(f"{len(visible)} of ")


def test_search_opens_folded_sections_and_closes_them_again(show):
    page = show()
    fold = page.locator("#section-passed-checks details")
    assert not fold.evaluate("fold => fold.open")
    page.get_by_label("Search").fill(fold.locator("tbody td").first.text_content())
    assert fold.evaluate("fold => fold.open")
    page.get_by_label("Search").fill("")
    assert not fold.evaluate("fold => fold.open")


def test_search_without_a_match_says_so(show):
    page = show()
    page.get_by_label("Search").fill("no such test")
    assert page.get_by_text("No result matches the filter.").is_visible()
    assert page.locator("main section:visible").count() == 0


@pytest.mark.parametrize(
    "label, status", [("Failed", "failed"), ("Warnings", "warning"), ("Passed", "passed")]
)
def test_filter_hides_results_of_a_status(show, label, status):
    page = show()
    page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
    entries = page.locator(f"[data-entry][data-status='{status}']:visible")
    assert entries.count() > 0
    page.get_by_role("checkbox", name=label).uncheck()
    assert entries.count() == 0
    page.get_by_role("checkbox", name=label).check()
    assert entries.count() > 0


def test_keyboard_reaches_the_filter_after_the_links(show):
    page = show()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.value"))
    assert "search" in reached
    assert reached.index("search") < reached.index("failed") < reached.index("passed")


def test_keyboard_opens_a_folded_section(show):
    page = show()
    page.locator("#section-passed-checks summary").focus()
    page.keyboard.press("Enter")
    assert page.locator("#section-passed-checks table").is_visible()


def test_page_is_complete_without_scripts(show):
    page = show(scripts=False)
    assert page.locator("#filter").is_hidden()
    assert page.locator("article").first.is_visible()
    page.locator("#section-passed-checks summary").click()
    assert page.locator("#section-passed-checks table").is_visible()


def test_print_opens_folded_sections(show):
    page = show()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0


def test_print_without_scripts_shows_folded_sections(show):
    page = show(scripts=False)
    page.emulate_media(media="print")
    assert page.locator("#section-passed-checks table").bounding_box()["height"] > 400
    assert page.get_by_role("navigation").is_hidden()


@pytest.mark.parametrize("name", NAMES)
def test_print_fits_the_paper(show, name):
    page = show(name, width=720, scripts=False)
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.scrollWidth") <= 720


def test_print_is_light_in_dark_mode(show):
    page = show(colours="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
