"""The report in a real browser: nothing is fetched, nothing fails, the numbers are there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from learned_runs import learn, write_world

CHROMIUM = os.environ.get("ATLAS_CHROMIUM")  # where it is set, a test that cannot run fails
FOUND = CHROMIUM or shutil.which("chromium") or ""
DRIVER = shutil.which("chromedriver", path=f"{Path(FOUND).parent}:{os.environ['PATH']}")

if not CHROMIUM:
    for module in ("altair", "vl_convert", "selenium"):
        pytest.importorskip(module)
pytestmark = pytest.mark.skipif(
    not CHROMIUM and not (FOUND and DRIVER),
    reason="ATLAS_CHROMIUM names no Chromium, and chromium with chromedriver is not on the path",
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)
DRAWN = "return document.documentElement.dataset.drawn === 'yes'"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs, and the page of both beside them."""
    from atlas_cli.cli.app import main

    root = tmp_path_factory.mktemp("report")
    world = write_world(root / "world")
    found = [
        learn(world, "fit", root / "fit"),
        learn(world, "tta", root / "tta", "--select", "last"),
    ]
    assert main(["report", *map(str, found), "-o", str(root / "report.html")]) == 0
    return found


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The report, opened and drawn."""
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    assert DRIVER, "there is no chromedriver beside Chromium"
    options = webdriver.ChromeOptions()
    options.binary_location = FOUND
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        browser.get((runs[0].parent / "report.html").as_uri())
        WebDriverWait(browser, 60).until(lambda b: b.execute_script(DRAWN))
        yield browser
    finally:
        browser.quit()


def cells(page: Any, label: str, number: int = 0) -> list[list[str]]:
    """What the number-th table with a label shows, folded or not."""
    return page.execute_script(
        "const table = document.querySelectorAll(`table[aria-label='${arguments[0]}']`)"
        "[arguments[1]]; return [...table.tBodies[0].rows].map("
        "row => [...row.cells].map(cell => cell.textContent))",
        label,
        number,
    )


def test_nothing_is_fetched_and_nothing_is_said_on_the_console(page):
    assert page.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    mine = [request for request in sent if request["documentURL"] == page.current_url]
    addresses = [request["request"]["url"] for request in mine]
    assert addresses  # the measurement itself works
    assert {address.partition(":")[0] for address in addresses} <= {"file", "data"}


def test_every_chart_is_drawn(page):
    figures = page.find_elements("css selector", "figure.chart")
    assert len(figures) > 20
    assert all(figure.find_elements("css selector", "svg") for figure in figures)


@pytest.mark.parametrize(("number", "measure"), [(0, "accuracy"), (1, "agreement")])
def test_the_tables_hold_the_numbers_of_the_metrics(page, runs, number: int, measure: str):
    rows = [json.loads(line) for line in (runs[number] / "metrics.jsonl").read_text().splitlines()]
    keys = ("stage", "number", "epoch", "loss", measure, "rate")
    wanted = [[row[k] if k == "stage" else f"{row[k]:.6g}" for k in keys] for row in rows]
    assert cells(page, "metrics", number) == wanted


def test_the_table_of_runs_compares_them(page, runs):
    result = json.loads((runs[0] / "result.json").read_text())
    fit, tta = cells(page, "runs")
    assert fit[2:4] == [f"{100 * result[key]:.2f} %" for key in ("zero_shot", "learned")]
    assert (fit[4], tta[4], tta[2:4]) == ("fit", "tta", ["", ""])


def test_hovering_a_cell_shows_vector_block_and_value(page, runs):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    table = json.loads((runs[0] / "coefficients.json").read_text())
    block = "visual.transformer.resblocks.1.mlp.c_fc.weight"
    mark = f"path[aria-label*='vector: <cars>; block: {block};']"
    cell = page.find_elements("css selector", mark)[0]
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", cell)
    ActionChains(page).move_to_element(cell).perform()
    found = WebDriverWait(page, 10).until(
        lambda b: b.find_element("css selector", "#vg-tooltip-element.visible").text
    )
    shown = found.replace("−", "-").split()  # noqa: RUF001 (Vega writes a true minus)
    value = f"{table['<cars>'][block]:.4f}"
    assert shown == ["vector", "<cars>", "block", block, "coefficient", value]


def test_a_click_on_a_head_sorts_by_numbers_and_a_second_one_turns_it(page):
    head = page.find_element("css selector", "table[aria-label='vectors'] th:nth-child(3) button")
    before = [float(row[2]) for row in cells(page, "vectors")]
    head.click()
    assert [float(row[2]) for row in cells(page, "vectors")] == sorted(before)
    head.click()
    assert [float(row[2]) for row in cells(page, "vectors")] == sorted(before, reverse=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways_in_light_and_dark(page, scheme: str):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    assert page.execute_script("return document.documentElement.scrollWidth") == 390
    ground, ink = page.execute_script(
        "const style = getComputedStyle(document.body);"
        "const text = getComputedStyle(document.querySelector('svg text'));"
        "return [style.backgroundColor, text.fill]"
    )
    dark = {"light": False, "dark": True}[scheme]
    assert (brightness(ground) < 80, brightness(ink) > 170) == (dark, dark)
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def brightness(colour: str) -> float:
    """The mean of rgb(r, g, b)."""
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) / 3
