"""The page on a real farm, in a real browser: six virtual boards, a campaign under way, a sweep that is over."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest

from farm.artifacts.artifact_folder import note_artifact
from farm.crew.health import Kind, Observation, decide_by
from farm.store import Store
from tests.acceptance.browser import Browser, open_browser
from tests.acceptance.conftest import Home, new_home, wait_until
from tests.integration.prometheus import prometheus_server
from tests.unit.artifacts import verified, write
from tests.web_store import fill_result

CAMPAIGN = """\
name: vision
models: [mlp, tiny-cnn]
boards: { types: jetson-nano }
budget: { trials: 20000 }
search: { tuner: random, ops: [dense, conv2d] }
measure: { repeat: 2, min_repeat: 5ms, verify_top: 1 }
"""
SWEEP = ("sweep", "run", "tiny-cnn", "--board", "nano-1", "--cores", "0", "--cpu-freqs", "403.2,921.6,1479")
WIDTHS = (1280, 800, 400)
# What is wrong with a page in its window: pixels of the smallest text and picture that a reader makes out.
LOOK = pathlib.Path(__file__).with_name("look.js").read_text()
# What happens is on the page within this, where the machine has the time.
LIVE_S = 2.0
ATTEMPTS = 6


@pytest.fixture(scope="module")
def farm() -> Iterator[Home]:
    """Services, the page, a sweep that has ended and a campaign that goes on."""
    with new_home() as home:
        (home.path / "vision.yaml").write_text(CAMPAIGN)
        assert home.run("board", "add", "nano", "--virtual", "jetson-nano", "--count", "6").code == 0
        try:
            up = home.run("up", "--web", "--wait", "90s")
            assert up.code == 0, up.err
            swept = home.run(*SWEEP, "--exhaustive", "--json")
            assert swept.code == 0, swept.err
            with open_store(home) as store:
                fill_result(store, 0.0224)
            home.start("campaign", "run", "vision.yaml")
            wait_until(lambda: home.count_trials() > 20, "the campaign to measure", 300.0)
            yield home
        finally:
            home.run("down", "--force")
            home.expect_no_processes()


@pytest.fixture(scope="module")
def browser(farm: Home) -> Iterator[Browser]:
    """One window for all tests."""
    with open_browser(farm.run("web", "--url").out.strip()) as browser:
        yield browser


def open_store(home: Home) -> Store:
    """The farm's store, as its other processes have it."""
    return Store(pathlib.Path(home.environment["FARM_HOME"]) / "farm.db")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/", "Last events"),
        ("/campaigns", "vision"),
        ("/campaigns/vision", "Who measured when"),
        ("/boards/nano-1", "Golden kernel"),
        ("/sweeps", "sweep 1"),
        ("/sweeps/1", "Latency against energy"),
        ("/records?simulated=true", "Records"),
        ("/results", "Faster than the best rival in 1 of 1 cases"),
        ("/artifacts", "farm model compile"),
        ("/sign-in", "Token"),
    ],
)
def test_pages(browser: Browser, path: str, text: str) -> None:
    """Each page says what it is for, logs no error in the console, and is accessible."""
    page = browser.open(path)
    assert text in page.inner_text("main")
    assert browser.list_barriers() == []
    assert browser.list_complaints() == []


def test_a_campaign_is_submitted_to_the_api(farm: Home) -> None:
    """With a token, the keys of a file are a campaign that the engine takes; its owner is the token's person."""
    url = farm.run("web", "--url").out.partition("/sign-in")[0].partition("?")[0].strip()
    file = {"name": "posted", "models": "mlp", "boards": {"types": "jetson-nano"}, "budget": {"trials": 2}}
    headers = {"authorization": f"Bearer {farm.run('web', 'token').out.strip()}", "content-type": "application/json"}
    place = urllib.parse.urljoin(url, "/api/v1/campaigns")
    order = urllib.request.Request(place, json.dumps(file).encode(), headers)
    with urllib.request.urlopen(order, timeout=120) as answer:
        assert json.load(answer)["budget"]["trials"] == 2
    assert farm.run("campaign", "cancel", "posted").code == 0


def test_pages_fit_their_window(farm: Home, browser: Browser) -> None:
    """At 1280, 800 and 400 px nothing scrolls sideways, each cell has its column's name and charts can be read."""
    reason = "the fan is replaced and its heat sink is glued on again, which takes until tomorrow at noon"
    assert farm.run("board", "hold", "nano-6", "--why", reason).code == 0
    note_artifact(pathlib.Path(farm.environment["FARM_HOME"]), write(farm.path / "tiny-cnn", verified=verified()))
    [(workload,)] = farm.rows("SELECT workload FROM campaign_workloads LIMIT 1")
    campaign, sweep, record = "/campaigns/vision", "/sweeps/1", f"/records/{workload}"
    lists = ("/", "/campaigns", "/sweeps", "/records?simulated=true", "/results", "/artifacts", "/docs", "/sign-in")
    faults, charts = [], {}
    try:
        for path in (*lists, campaign, "/boards/nano-1", sweep, record):
            page = browser.open(path)
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                found = page.evaluate(LOOK)
                faults += [f"{path} at {width} px: {fault}" for fault in found["faults"]]
                charts[path, width] = found["charts"]
    finally:
        browser.page.set_viewport_size({"width": 1440, "height": 900})
        assert farm.run("board", "release", "nano-6").code == 0
    assert faults == []
    assert all(charts[path, width] for path in (campaign, "/boards/nano-1", sweep) for width in WIDTHS)


def test_pause_by_the_keyboard_alone(farm: Home, browser: Browser) -> None:
    """An operator with the token signs in and pauses the campaign without a mouse; the campaign then stands still.

    This early, so that the campaign does not keep the machine busy during the tests below.
    """
    page = browser.open("/campaigns/vision")
    assert page.locator("button:has-text('Pause')").count() == 0
    _tab_to(browser, "a.sign")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/sign-in"))
    _tab_to(browser, "input[name=token]")
    page.keyboard.type(farm.run("web", "token").out.strip())
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/campaigns/vision$"))
    _tab_to(browser, "button[value=pause]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#head-vision .k-paused")
    assert farm.run("campaign", "show", "vision", "--json").json()["state"] == "paused"
    # Boards end what they measure; then they are given back.
    wait_until(lambda: farm.rows("SELECT count(*) FROM leases WHERE purpose != 'probe'") == [(0,)], "boards to be free")
    before = farm.count_trials()
    browser.open("/campaigns/vision")
    assert farm.count_trials() == before
    _open_budget(browser)
    assert farm.run("campaign", "show", "vision", "--json").json()["budget"]["trials"] == 21000
    assert browser.list_complaints() == []


def test_pages_are_read_without_scripts(browser: Browser) -> None:
    """What a page says is there before any script has run, pictures included."""
    context = browser.page.context.browser.new_context(java_script_enabled=False)  # type: ignore[union-attr]
    try:
        page = context.new_page()
        page.goto(f"{browser.url}/")
        assert page.locator("tr[id^='board-']").count() == 6
        page.goto(f"{browser.url}/sweeps/1")
        assert page.locator("#scatter .point").count() >= 3
        page.goto(f"{browser.url}/campaigns/vision")
        assert page.locator("svg.chart").count() >= 2
    finally:
        context.close()


def test_what_happens_is_on_the_page(farm: Home, browser: Browser) -> None:
    """A board that an operator takes out of service, and puts back, changes its line within two seconds."""
    page = browser.open("/")
    quickest = 1e9
    with open_store(farm) as store:
        for attempt in range(ATTEMPTS):
            kind, health = ((Kind.DRAIN, "maintenance"), (Kind.UNDRAIN, "suspect"))[attempt % 2]
            transition = store.boards.observe("nano-6", kind, "ana@desk", decide_by(Observation(kind, "new heat sink")))
            began = time.monotonic()
            assert transition.standing.health == health
            page.wait_for_selector(f"#board-nano-6.h-{health}, #board-nano-6.h-good")
            quickest = min(quickest, time.monotonic() - began)
            if quickest < LIVE_S and attempt % 2:
                break
    assert quickest < LIVE_S
    assert "nano-6" in page.inner_text("#events")
    assert browser.list_complaints() == []


def test_filters_live_in_the_address(browser: Browser) -> None:
    """What is typed into the filter is in the address, chooses among the boards, and is there after a reload."""
    page = browser.open("/")
    page.fill("input[name=text]", "nano-3")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"text=nano-3"))
    assert page.locator("tr[id^='board-']").count() == 1
    page.reload()
    assert page.input_value("input[name=text]") == "nano-3"
    browser.open("/?state=offline&board_type=jetson-tx2")
    assert "No board is meant by this" in page.inner_text("main")


def test_a_slider_moves_the_pick(browser: Browser) -> None:
    """A deadline that the slowest clocks do not keep: by the keyboard, at once, in words, and in the address."""
    page = browser.open("/sweeps/1")
    page.select_option("select[name=objective]", "power")
    page.wait_for_url(re.compile("objective=power"))
    page.wait_for_selector("#picked >> text=403.2 MHz")
    page.focus("#deadline")
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile(r"deadline=(?!0&)"))
    page.wait_for_function("() => !document.getElementById('picked').innerText.includes('Set a57 403.2 MHz')")
    assert "none" not in page.inner_text("output[for=deadline]")
    assert browser.list_complaints() == []


def test_prometheus_scrapes_the_same_farm(farm: Home, tmp_path: pathlib.Path) -> None:
    """A real one, by the example's configuration: six boards, and the trials of the campaign that the page shows."""
    address = urllib.parse.urlsplit(farm.run("status", "--json").json()["metrics"])
    assert address.port is not None
    with prometheus_server(tmp_path, address.port) as ask:
        wait_until(lambda: ask('tvm_farm_campaign_trials_total{campaign="vision"}'), "a scrape", 60.0)
        [boards] = ask("sum(tvm_farm_boards)")
        assert boards["value"][1] == "6"
        [trials] = ask('sum(tvm_farm_campaign_trials_total{campaign="vision"})')
        assert int(trials["value"][1]) > 20


def test_who_does_not_finish_holds_up_nobody(farm: Home, browser: Browser) -> None:
    """Requests that end in the middle, and watchers that read nothing, leave the page as quick as it was."""
    address = urllib.parse.urlsplit(browser.url)
    with contextlib.ExitStack() as stack:
        for number in range(40):
            sock = stack.enter_context(socket.create_connection((address.hostname or "", address.port or 0), 10.0))
            half = (b"GET / HTTP/1.1\r\nHost: 127", b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")[number % 2]
            sock.sendall(half)
        assert "Boards" in browser.open("/").inner_text("main")
    with socket.create_connection((address.hostname or "", address.port or 0), 10.0) as sock:
        sock.sendall(b"POST /api/v1/campaigns/vision/cancel HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{")
        assert b" 401 " in sock.recv(4096)
    assert farm.rows("SELECT wanted FROM fleet_campaigns")[0][0] != "cancel"


def _open_budget(browser: Browser) -> None:
    _tab_to(browser, "summary")
    browser.page.keyboard.press("Enter")
    browser.page.fill("input[name=trials]", "21000")
    browser.page.keyboard.press("Tab")
    browser.page.click("button[value=budget]")
    browser.page.wait_for_selector("#head-vision >> text=21,000")


def _tab_to(browser: Browser, selector: str) -> None:
    """Press Tab until the element has the focus."""
    for _ in range(80):
        browser.page.keyboard.press("Tab")
        if browser.page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    pytest.fail(f"Tab does not lead to {selector}")
