"""The page in a real browser: quiet console, no requests, no sideways scrolling, legible on a phone."""

import shutil
from dataclasses import replace
from threading import Thread

import pandas as pd
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from fedshift.cli.watch import PageServer
from fedshift.report.curves import CurvePoint
from fedshift.report.figures import FigurePanel
from fedshift.report.formatting import make_table
from fedshift.report.html import render_template
from fedshift.report.live_page import LiveView, render_live_page
from fedshift.report.page import render_page
from fedshift.report.report import Report, ReportTable
from fedshift.report.style import make_panel

pytestmark = pytest.mark.browser

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


@pytest.fixture(scope="module", params=[(12, 2), (5, 6)])
def crowded(request, make_study):
    """The page of methods, some with long names, over few clients, or over more so that methods are columns."""
    methods, clients = request.param
    names = [f"fedbn+fedprox(mu=0.00{digit})+fedadam" for digit in range(1, 5)] + [f"method_{n}" for n in range(8)]
    one = make_study({name: [{"a": 50 + n}] * 3 for n, name in enumerate(names[:methods])})
    sites = [f"hospital_{n}" for n in range(clients)]
    rows = pd.concat([one.rows.assign(client=site) for site in sites])
    return render_page(replace(one, rows=rows, clients=dict.fromkeys(sites, one.clients["a"]), samples={}))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("width", [1280, 400])
def test_page_fits_and_stays_quiet(opened, shown, width):
    page = opened(shown.page, width)
    assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert page.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_row_names_leave_room_for_values_on_a_phone(opened, crowded):
    shares = opened(crowded, 400).execute_script(
        "return [...document.querySelectorAll('.scroll table')].map(table => "
        "table.querySelector('tbody th').offsetWidth / table.parentElement.offsetWidth)"
    )
    assert 0.3 < max(shares) < 0.6


def test_a_wide_figure_of_the_diagnosis_stays_legible_on_a_phone(opened):
    figure, _ = make_panel("Samples", "class", "client")
    figure.set_figwidth(9)
    verdicts = make_table(("shift", "verdict"), [("label skew", "not named")])
    findings = ReportTable(file="findings", caption="shifts", text=verdicts, section="findings")
    panel = FigurePanel(name="wide", figure=figure, description="wide")
    page = opened(
        render_template(
            "diagnosis.html.j2", name="digits", clients=2, named=[], readings=["none"], shown="",
            report=Report(tables=(findings,), panels=(panel,)),
            command="fedshift sweep --data digits --methods " + ",".join(["fedavg"] * 20),
        ),
        400,
    )  # fmt: skip
    assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert page.execute_script(FONT_SIZES)[1] >= 9
    assert page.execute_script("const c = document.querySelector('.command'); return c.scrollWidth <= c.clientWidth")


PRINTED = """
const width = document.documentElement.clientWidth;
const height = (selector) => Math.max(...[...document.querySelectorAll(selector)].map((part) => part.offsetHeight));
const tables = [...document.querySelectorAll('table')].filter((table) => table.offsetHeight);
return {
  wide: tables.filter((table) => table.getBoundingClientRect().right > width).map((table) => table.className),
  metrics: height('details:not(.brief, .further, .source) table'),
  scopes: height('details.brief > summary'),
  further: height('details.further'),
};
"""
A4 = 718
"""Pixels between the default margins of a sheet."""


def test_on_paper_no_table_is_cut_and_folded_results_are_shown(opened, crowded, browser):
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page = opened(crowded, A4)
    page.execute_script("document.querySelectorAll('details').forEach((found) => { found.open = false; })")
    found = page.execute_script(PRINTED)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert found["wide"] == []
    assert found["metrics"] > 50
    assert found["scopes"] > 0
    assert found["further"] == 0


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


def read_state(browser) -> str:
    """Return what the page says, in one step: an element found first may be replaced before it is read."""
    return browser.execute_script("return document.getElementById('state').textContent")


def test_the_live_page_renews_itself_and_stays_when_its_server_ends(browser, study, make_study):
    class Page:
        version, text = '"1"', ""

        def read(self):
            return self.version, self.text.encode()

        def show(self, version, summary):
            view = LiveView(name="runs/a", state=f"state {version}", points=(CurvePoint({}, summary),))
            self.text, self.version = render_live_page(view, version, 1), version

    page = Page()
    page.show('"1"', make_study({"fedavg": [{"a": 50, "b": 240}]}))
    with PageServer(page, 0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        browser.get_log("browser")
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        assert browser.find_element("id", "state").text == 'state "1"'
        assert "fedbn" not in browser.find_element("tag name", "main").text
        page.show('"2"', study)
        WebDriverWait(browser, 30).until(lambda shown: read_state(shown) == 'state "2"')
        assert "fedbn" in browser.find_element("tag name", "main").text
        assert browser.execute_script("return document.querySelectorAll('main svg').length") == 4
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
        server.shutdown()
        thread.join()
    WebDriverWait(browser, 30).until(lambda shown: "has ended" in read_state(shown))
    assert "fedbn" in browser.find_element("tag name", "main").text
