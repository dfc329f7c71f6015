"""The report in a real browser: nothing is fetched, nothing fails, the numbers are there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import TIMEOUT, write_images
from learned_runs import learn, write_world

CHROMIUM = os.environ.get("ATLAS_CHROMIUM")  # where it is set, a test that cannot run fails
# Names of browsers, and of the program by which selenium drives them.
DRIVERS = {
    "chromium": "chromedriver",
    "chromium-browser": "chromedriver",
    "google-chrome": "chromedriver",
    "google-chrome-stable": "chromedriver",
    "chrome": "chromedriver",
    "firefox": "geckodriver",
    "firefox-esr": "geckodriver",
}
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)
DRAWN = "return document.documentElement.dataset.drawn === 'yes'"
FETCHED = "return performance.getEntriesByType('resource').map(entry => entry.name)"


@dataclass(frozen=True)
class Browser:
    program: str
    driver: str

    @property
    def is_chromium(self) -> bool:
        return "geckodriver" not in Path(self.driver).name


def find_browser() -> Browser | None:
    """The browser that ATLAS_CHROMIUM names, or the first on the path that has its driver."""
    for name, driver in {CHROMIUM: "chromedriver"}.items() if CHROMIUM else DRIVERS.items():
        if program := shutil.which(name):
            places = f"{Path(program).parent}:{os.environ['PATH']}"
            if found := shutil.which(driver, path=places):
                return Browser(program, found)
    return None


@contextmanager
def opened(browser: Browser, page: Path, profile: Path) -> Iterator[Any]:
    """The page in a browser without a window, with all charts drawn."""
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    if browser.is_chromium:
        options: Any = webdriver.ChromeOptions()
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service: Any = webdriver.ChromeService(browser.driver)
        start: Any = webdriver.Chrome
    else:
        options = webdriver.FirefoxOptions()
        options.add_argument("-headless")
        service, start = webdriver.FirefoxService(browser.driver), webdriver.Firefox
    options.binary_location = browser.program
    window = start(options, service)
    try:
        window.get(page.as_uri())
        WebDriverWait(window, TIMEOUT).until(lambda w: w.execute_script(DRAWN))
        yield window
    finally:
        window.quit()


def test_a_browser_shows_the_report(call, tmp_path: Path):
    browser = find_browser()
    missing = [name for name in ("altair", "vl_convert", "selenium") if not find_spec(name)]
    if browser is None or missing:
        reason = f"not installed: {', '.join(missing) or 'a browser with its driver'}"
        assert not CHROMIUM, f"ATLAS_CHROMIUM is set, but {reason}"
        pytest.skip(f"{reason}; chromium with chromedriver or firefox with geckodriver will do")
    world = write_world(tmp_path / "world")
    runs = [
        learn(world, "fit", tmp_path / "fit"),
        learn(world, "tta", tmp_path / "tta", "--select", "last"),
    ]
    report = tmp_path / "report.html"
    pictured = [learn_from_splits(call, world, tmp_path / name, rate) for name, rate in RATES]
    (tmp_path / "scores.json").write_text(
        call("eval", world / "base", "--data", world / "photos", "--json", "-q").out
    )
    assert call("report", *runs, *pictured, tmp_path / "scores.json", "-o", report).code == 0
    assert report.stat().st_size < 5e6
    with opened(browser, report, tmp_path / "profile") as page:
        assert page.execute_script(FETCHED) == []
        every_chart_is_drawn(page)
        tables_hold_the_numbers_of_the_metrics(page, runs)
        the_table_of_runs_compares_them(page, runs)
        pictures_are_within_the_page(page, runs[0], pictured)
        confused_classes_are_counted(page, pictured)
        scores_of_eval_are_those_of_its_json(page, tmp_path / "scores.json")
        hovering_a_cell_shows_vector_block_and_value(page, runs)
        a_click_on_a_head_sorts_and_a_second_one_turns_it(page)
        if browser.is_chromium:  # its driver reads the console and the network, and has phones
            nothing_is_fetched_and_nothing_is_said_on_the_console(page)
            a_phone_shows_it_without_scrolling_sideways(page, dark=False)
            a_phone_shows_it_without_scrolling_sideways(page, dark=True)


RATES = (("one", "0.3"), ("two", "3"))


def learn_from_splits(call: Any, world: Path, folder: Path, rate: str) -> Path:
    """A run on images with a test split, which are pictured."""
    for split in ("train", "test"):
        write_images(world / "split" / split, ("cat", "dog"), 12, seed=len(split))
    models = ("--model", world / "base", "--vectors", world / "v")
    quick = ("--batch-size", "8", "--epochs", "2", "--min-steps", "2", "--lr", rate, "--quiet")
    assert call("fit", world / "split", *models, *quick, "-o", folder).code == 0
    return folder


def pictures_are_within_the_page(page: Any, untested: Path, pictured: list[Path]) -> None:
    """Every picture is drawn from the page itself, and as many as the files say."""
    found = page.execute_script(
        "return [...document.images].map(i => [i.src.slice(0, 15), i.naturalWidth])"
    )
    assert {source for source, _ in found} == {"data:image/jpeg"}
    assert min(width for _, width in found) > 0
    wanted, told = len((untested / "images.jsonl").read_text().splitlines()), []
    for folder in pictured:
        lines = [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]
        tested = [row for row in lines if "learned" in row]
        told.append([row["learned"] for row in tested])
        changed = sum(
            (r["learned"] == r["label"]) != (r["zero_shot"] == r["label"]) for r in tested
        )
        wanted += len(lines) - len(tested) + changed
    wanted += sum(one != two for one, two in zip(*told, strict=True))  # where runs differ
    assert len(found) == wanted > 48
    rows = {row[0]: row for row in cells(page, "runs")}
    for folder in pictured:
        (test,) = json.loads((folder / "result.json").read_text())["test"]
        shown = [f"{test[key]:.2f} %" for key in ("zero_shot", "learned")]
        assert rows[str(folder)][2:4] == shown


def confused_classes_are_counted(page: Any, pictured: list[Path]) -> None:
    for folder in pictured:
        lines = [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]
        rows = [row for row in lines if "learned" in row]
        shown = cells(page, f"confused classes of {folder}")
        assert shown
        for label, taken_for, *counts in shown:
            for when, count in zip(("zero_shot", "learned"), counts, strict=True):
                found = [r for r in rows if (r["label"], r[when]) == (label, taken_for)]
                assert len(found) == int(count)


def scores_of_eval_are_those_of_its_json(page: Any, file: Path) -> None:
    (score,) = json.loads(file.read_text())["results"]
    (row,) = cells(page, f"scores of {file}")
    assert f"{score['top1']:.2f} %" in row


def cells(page: Any, label: str, number: int = 0) -> list[list[str]]:
    """What the number-th table with a label shows, folded or not."""
    return page.execute_script(
        "const table = document.querySelectorAll(`table[aria-label='${arguments[0]}']`)"
        "[arguments[1]]; return [...table.tBodies[0].rows].map("
        "row => [...row.cells].map(cell => cell.textContent))",
        label,
        number,
    )


def every_chart_is_drawn(page: Any) -> None:
    figures = page.find_elements("css selector", "figure.chart")
    assert len(figures) > 20
    assert all(figure.find_elements("css selector", "svg") for figure in figures)


def tables_hold_the_numbers_of_the_metrics(page: Any, runs: list[Path]) -> None:
    for number, measure in enumerate(("top1_percent", "agreement_percent")):
        lines = (runs[number] / "metrics.jsonl").read_text().splitlines()
        keys = ("stage", "number", "epoch", "loss", "rate", measure)
        rows = [json.loads(line) for line in lines]
        wanted = [[row[k] if k == "stage" else f"{row[k]:.6g}" for k in keys] for row in rows]
        assert cells(page, "metrics", number) == wanted


def the_table_of_runs_compares_them(page: Any, runs: list[Path]) -> None:
    result = json.loads((runs[0] / "result.json").read_text())
    fit, tta, *_ = cells(page, "runs")
    scores = [f"{result[key]:.2f} %" for key in ("zero_shot", "learned")]
    assert fit[4:8] == ["training", *scores, "fit"]
    assert tta[2:8] == ["", "", "", "", "", "tta"]


def hovering_a_cell_shows_vector_block_and_value(page: Any, runs: list[Path]) -> None:
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


def a_click_on_a_head_sorts_and_a_second_one_turns_it(page: Any) -> None:
    head = page.find_element("css selector", "table[aria-label='vectors'] th:nth-child(3) button")
    before = [float(row[2]) for row in cells(page, "vectors")]
    head.click()
    assert [float(row[2]) for row in cells(page, "vectors")] == sorted(before)
    head.click()
    assert [float(row[2]) for row in cells(page, "vectors")] == sorted(before, reverse=True)


def nothing_is_fetched_and_nothing_is_said_on_the_console(page: Any) -> None:
    assert page.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    mine = [request for request in sent if request["documentURL"] == page.current_url]
    addresses = [request["request"]["url"] for request in mine]
    assert addresses  # the measurement itself works
    assert {address.partition(":")[0] for address in addresses} <= {"file", "data"}


def a_phone_shows_it_without_scrolling_sideways(page: Any, *, dark: bool) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    assert page.execute_script("return document.documentElement.scrollWidth") == 390
    ground, ink = page.execute_script(
        "const style = getComputedStyle(document.body);"
        "const text = getComputedStyle(document.querySelector('svg text'));"
        "return [style.backgroundColor, text.fill]"
    )
    assert (brightness(ground) < 80, brightness(ink) > 170) == (dark, dark)
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def brightness(colour: str) -> float:
    """The mean of rgb(r, g, b)."""
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) / 3
