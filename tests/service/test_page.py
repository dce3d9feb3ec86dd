"""The page in a real browser: pictures, a streamed answer, a second one served from the cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.service.conftest import SAMPLES, random_png

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
#: nothing but the page itself may be asked for
QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
#: what the page complained about
PROBLEMS: list[str] = []
PHONE = {"width": 390, "height": 800}
#: the language replica may still be warming up
ANSWER_MS = 60_000


@pytest.fixture(scope="module")
def browser_page(service: str) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here; 'apt install chromium' brings one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport=PHONE)
        page.on("pageerror", lambda error: PROBLEMS.append(str(error)))
        page.on("console", lambda m: PROBLEMS.append(m.text) if m.type == "error" else None)
        page.goto(service)
        yield page
        browser.close()


def ask(page: Page, question: str) -> str:
    page.get_by_role("textbox", name="Question").fill(question)
    page.get_by_role("button", name="Ask").click()
    last = page.locator("#log li").last
    expect(last.locator("table.time")).to_be_visible(timeout=ANSWER_MS)
    return last.locator(".text").inner_text()


def test_a_person_asks_twice_and_sees_the_cache_work(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    truths = json.loads((SAMPLES / "samples.json").read_text())["captions"]
    name, truth = next(iter(truths.items()))
    unseen = tmp_path / "unseen.png"
    unseen.write_bytes(random_png(77))
    page.get_by_label("Pictures: drop, paste or choose").set_input_files([SAMPLES / name, unseen])
    expect(page.locator("#chosen img")).to_have_count(2)
    page.get_by_role("button", name="Remove unseen.png").click()
    expect(page.locator("#chosen img")).to_have_count(1)

    assert ask(page, "Describe the picture.") == truth
    caption = page.locator("#log figcaption").first
    assert caption.inner_text().split(",")[0] in {"encoded", "found"}  # other tests may have sent this sample

    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#log li")).to_have_count(0)
    page.get_by_label("Pictures: drop, paste or choose").set_input_files(SAMPLES / name)
    assert ask(page, "Describe the picture.") == truth
    expect(page.locator("#log figcaption").first).to_contain_text("found")
    expect(page.locator("#state")).to_contain_text("1 running")
    assert PROBLEMS == []


def test_a_new_picture_is_encoded_and_an_error_is_told(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    page.get_by_role("button", name="New chat").click()
    unseen, broken = tmp_path / "unseen.png", tmp_path / "broken.png"
    unseen.write_bytes(random_png(78))
    broken.write_bytes(random_png(79)[:300])
    page.get_by_label("Pictures: drop, paste or choose").set_input_files(unseen)
    ask(page, "Describe the picture.")
    expect(page.locator("#log figcaption").first).to_contain_text("encoded")

    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Pictures: drop, paste or choose").set_input_files(broken)
    page.get_by_role("textbox", name="Question").fill("Describe the picture.")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#log .error")).to_contain_text("cut short", timeout=ANSWER_MS)


def test_a_phone_shows_it_whole(browser_page: Page) -> None:
    """Nothing is wider than the screen, and every control has a name."""
    assert browser_page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    unnamed = browser_page.evaluate(
        """[...document.querySelectorAll('button, input, select')].filter(control =>
            !(control.labels?.length || control.getAttribute('aria-label') || control.textContent.trim())).length"""
    )
    assert unnamed == 0
