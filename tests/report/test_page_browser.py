"""The page in a real browser: quiet console, no requests, no sideways scrolling, legible on a phone."""

import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from fedshift.report.page import render_page

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("pages")]

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
FONT_SIZES = """
const scale = (text) => { const m = text.getScreenCTM(); return Math.hypot(m.a, m.b); };
const texts = [...document.querySelectorAll("svg text")].map(
  (text) => parseFloat(getComputedStyle(text).fontSize) * scale(text));
const cells = [...document.querySelectorAll("td, th, p, li, figcaption, summary, pre")].map(
  (cell) => parseFloat(getComputedStyle(cell).fontSize));
return [texts.length, Math.min(...texts), Math.min(...cells)];
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page at a width in pixels and unfolds it."""

    def show(page, width):
        path = tmp_path / "report.html"
        path.write_text(page, encoding="utf-8")
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(path.as_uri())
        browser.execute_script("document.querySelectorAll('details').forEach((found) => { found.open = true; })")
        return browser

    return show


@pytest.mark.parametrize("width", [1280, 400])
def test_page_fits_and_stays_quiet(opened, shown, width):
    page = opened(shown.page, width)
    assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert page.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []


def test_the_page_of_many_clients_fits_a_phone(opened, make_crowd):
    page = opened(render_page(make_crowd(300, seeds=2)), 400)
    assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert page.execute_script(FONT_SIZES)[1] >= 9


def test_text_is_legible_on_a_phone(opened, plain):
    count, smallest_in_figures, smallest = opened(plain.page, 400).execute_script(FONT_SIZES)
    assert count > 50
    assert smallest_in_figures >= 9
    assert smallest >= 12


def test_images_are_shown(opened, plain):
    page = opened(plain.page, 1280)
    assert page.execute_script("return [...document.images].every((image) => image.naturalWidth > 0)")
    assert page.execute_script("return document.images.length") == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_contrast(opened, plain, browser, scheme):
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    page = opened(plain.page, 1280)
    for ink in ("--ink", "--muted", "--accent"):
        for ground in ("--paper", "--card", "--tint", "--warn"):
            assert contrast(*(color(page, name) for name in (ink, ground))) >= 4.5, (ink, ground)


def color(page, name):
    text = page.execute_script(f"return getComputedStyle(document.documentElement).getPropertyValue('{name}')").strip()
    return [int(text[place : place + 2], 16) / 255 for place in (1, 3, 5)]


def contrast(first, second):
    """Contrast ratio of WCAG 2.2."""
    light = sorted(
        sum(
            weight * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
            for weight, part in zip((0.2126, 0.7152, 0.0722), color, strict=True)
        )
        for color in (first, second)
    )
    return (light[1] + 0.05) / (light[0] + 0.05)
