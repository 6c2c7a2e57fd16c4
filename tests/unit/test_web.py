"""The page and the API without a server: documents, who may what, what is refused, how others' texts are shown."""

from __future__ import annotations

import asyncio
import collections
import json
import math
import pathlib
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
import typer.testing
from fastapi.testclient import TestClient

from farm import settings as farm_settings
from farm.artifacts import artifact_folder
from farm.cli.main import make_app
from farm.errors import UsageError
from farm.store import Store
from farm.store.campaign_rows import TrialOutcome
from farm.types import campaigns, documents, states
from farm.values import Virtual
from farm.web import access, charts, now, orders, pages, work_pages
from farm.web import app as web_app
from farm.web.access import Access, read_token
from farm.web.live import MOST_WATCHERS, Hub
from farm.web.series import Course, Gauges, GoldenRuns, Reading, Stretches, read_outcome
from farm.web.serve import WebPlace
from tests import web_store
from tests.board_rows import make_row
from tests.unit.artifacts import write

PROBLEM = "application/problem+json"
SCRIPT = "<script>alert(1)</script>"
# Letters that would be read backwards from the mark on, and more of them than any page has room for.
HOSTILE = f"{SCRIPT}\u202egnp.exe\x1b[31m\"'&{'x' * 10_000}"
PAGES = ("/", "/campaigns", f"/campaigns/{web_store.CAMPAIGN}", "/boards/nano-01", "/sweeps", "/sweeps/1?beside=2")
ORDER = f"/api/v1/campaigns/{web_store.CAMPAIGN}/pause"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A FARM_HOME with boards in every state, a campaign under way, sweeps and records."""
    folder = tmp_path_factory.mktemp("home")
    with Store(folder / "farm.db") as store:
        web_store.fill(store, boards=24, trials=400)
    return folder


@pytest.fixture(scope="module")
def client(home: pathlib.Path) -> Iterator[TestClient]:
    """A user on this machine."""
    with make_client(home) as client:
        yield client


def make_client(home: pathlib.Path, *, private: bool = True) -> TestClient:
    """A client of the application of a home, as a browser on this machine or elsewhere would be."""
    settings = farm_settings.load({"FARM_HOME": str(home)})
    app = web_app.make_app(settings, Access(home, private=private, secure=False))
    return TestClient(app, base_url="http://localhost", follow_redirects=False, raise_server_exceptions=False)


def call(home: pathlib.Path, *words: str) -> Any:
    """What the command line prints with --json."""
    runner = typer.testing.CliRunner(env={"FARM_HOME": str(home)})
    done = runner.invoke(make_app(*words[:1]), [*words, "--json"])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("words", "path", "model"),
    [
        (("board", "list"), "/boards?limit=500", documents.BoardPage),
        (
            ("board", "list", "--board-type", "jetson-tx2", "--state", "leased", "--label", "rack=b"),
            "/boards?board_type=jetson-tx2&state=leased&label=rack%3Db",
            documents.BoardPage,
        ),
        (("board", "show", "nano-01"), "/boards/nano-01", documents.BoardInFull),
        (("result", "list", "--kind", "bench"), "/results?kind=bench", documents.ResultPage),
        (("sweep", "list"), "/sweeps", documents.SweepPage),
        (("sweep", "show", "1"), "/sweeps/1", documents.SweepInFull),
        (("record", "list", "--simulated"), "/records?simulated=true&limit=500", documents.RecordPage),
        (("record", "show", "re01eeeeeeeeeeee"), "/records/re01eeeeeeeeeeee", documents.WorkloadRecords),
        (("campaign", "list"), "/campaigns", campaigns.CampaignPage),
        (("model", "artifacts"), "/artifacts", documents.ArtifactPage),
        (("queue",), "/queue", documents.Queue),
        (("campaign", "show", web_store.CAMPAIGN), f"/campaigns/{web_store.CAMPAIGN}", campaigns.CampaignInFull),
    ],
)
def test_the_api_says_what_the_command_line_prints(
    home: pathlib.Path, client: TestClient, words: tuple[str, ...], path: str, model: type[pydantic.BaseModel]
) -> None:
    """Both documents are one, and are what the API's description says, without a field more or less."""
    printed, answer = call(home, *words), client.get(f"/api/v1{path}")
    assert answer.status_code == 200, answer.text
    document = answer.json()
    model.model_validate(document)
    answered = document.get("items", document)
    for each in (*answered, *printed) if words[:2] == ("board", "list") else ():
        if each["quarantine"]:
            each["quarantine"].pop("cooling_s")  # it grows
    assert answered == printed


@pytest.mark.parametrize(("kind", "key"), [("boards", "name"), ("events", "at")])
def test_lists_come_in_parts(client: TestClient, kind: str, key: str) -> None:
    """Following `next` leads through all of a list once."""
    whole = client.get(f"/api/v1/{kind}?limit=500").json()["items"]
    found, path = [], f"/api/v1/{kind}?limit=10"
    while path:
        page = client.get(path).json()
        found += page["items"]
        path = page["next"]
    assert [each[key] for each in found] == [each[key] for each in whole]
    assert page.get("total", 24) == 24


def test_the_api_describes_itself(client: TestClient) -> None:
    """OpenAPI names every route, its documents, and the problem that it may answer with."""
    described = client.get("/api/v1/openapi.json").json()
    assert {"/api/v1/boards", "/api/v1/campaigns/{name}", "/api/v1/campaigns/{name}/{order}"} <= set(described["paths"])
    assert all(path.startswith("/api/v1/") for path in described["paths"])
    assert "Problem" in described["components"]["schemas"]


PAGES += ("/records?simulated=true", "/records/re01eeeeeeeeeeee", "/artifacts", "/sign-in", "/docs")
PAGES += (f"/campaigns/{web_store.CAMPAIGN}?beside={web_store.CAMPAIGN}",)
PAGES += ("/results", "/results/compare?one=1&other=2")


@pytest.mark.parametrize("path", PAGES)
def test_pages_need_nothing_from_elsewhere(client: TestClient, path: str) -> None:
    """Each page is whole, loads only files of its own, and tells the browser to allow no others."""
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    sources = re.findall(r'(?:src|href|action)="([^"#?]*)', answer.text)
    assert not [each for each in sources if each and not each.startswith("/")]
    assert not re.search(r"<script(?! src=)|<style| style=| on\w+=", answer.text)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert client.get("/static/farm.js").headers["x-content-type-options"] == "nosniff"


def test_worst_boards_come_first(client: TestClient) -> None:
    """Boards that an operator must look at stand above those at work, each with its reason and last fault."""
    rows = re.findall(r'<tr id="board-([^"]+)" class="h-(\w+) s-(\w+)"', client.get("/").text)
    ranks = [("quarantined", "suspect", "good", "maintenance").index(health) for _, health, _ in rows]
    assert ranks == sorted(ranks)
    assert len(rows) == 24
    good = [state for _, health, state in rows if health == "good"]
    assert good[0] == "offline"
    text = client.get("/?health=quarantined").text
    assert "3 board-side faults within 10 min" in text
    assert 'value="quarantined"' in text or "<option selected>quarantined" in text


def test_why_a_campaign_stands_still(client: TestClient) -> None:
    """Boards that it might use and does not are counted by what keeps them."""
    text = client.get("/").text
    assert "2 quarantined" in text
    assert "waiting for candidates" in text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/boards/missing", 404),
        ("/api/v1/campaigns/missing", 404),
        ("/api/v1/sweeps/99", 404),
        ("/api/v1/sweeps/x", 422),
        (f"/api/v1/sweeps/{10**30}", 422),
        ("/api/v1/records/nothing", 404),
        ("/api/v1/records?since=yesterdayish", 422),
        ("/api/v1/records?board_type=vax", 422),
        (f"/api/v1/records?workload={'x' * 501}", 422),
        ("/api/v1/boards?limit=1000000", 422),
        ("/api/v1/boards?lmit=1", 422),
        ("/api/v1/results/99", 404),
        ("/api/v1/boards?offset=-1", 422),
        (f"/api/v1/boards?{'x' * 5000}", 414),
        ("/api/v1/nothing", 404),
    ],
)
def test_what_cannot_be_answered_is_a_problem(client: TestClient, path: str, status: int) -> None:
    """Unknown ids, impossible numbers, huge filters: a problem document that says what is wrong."""
    answer = client.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM)
    problem = documents.Problem.model_validate(answer.json())
    assert problem.status == status
    assert problem.detail
    assert len(answer.text) < 3000


@pytest.mark.parametrize("path", ["/boards/missing", "/sweeps/1?deadline=soon", "/sweeps/1?beside=x", "/?page=0"])
def test_pages_tell_people_what_is_wrong(client: TestClient, path: str) -> None:
    """What a person asked for in vain is a page, not a document."""
    answer = client.get(path)
    assert answer.status_code in (404, 422)
    assert "<h1>" in answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"sec-fetch-site": "same-origin"}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic x"}, 401),
        ({"origin": "http://elsewhere.example", "cookie": "farm_session=x"}, 403),
        ({"origin": "http://localhost", "cookie": "farm_session=x"}, 401),
        ({"sec-fetch-site": "cross-site", "cookie": "farm_session=x"}, 403),
        ({"cookie": "farm_session=x"}, 403),
        ({"host": "evil.example", "authorization": "Bearer TOKEN"}, 421),
    ],
)
def test_nobody_changes_anything_without_the_token(
    home: pathlib.Path, client: TestClient, headers: dict[str, str], status: int
) -> None:
    """No token, a wrong one, a page of another origin, a name that is not ours: refused, and nothing has changed."""
    headers = {name: value.replace("TOKEN", read_token(home)) for name, value in headers.items()}
    answer = client.post(ORDER, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM)
    with Store(home / "farm.db") as store:
        assert store.campaigns.require(web_store.CAMPAIGN).wanted == "run"


def test_a_script_without_the_token_is_told_what_to_send(client: TestClient) -> None:
    """Curl's plain POST gets 401 with the header to send, and the API's page says which role an order takes."""
    answer = client.post(ORDER)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert "Authorization: Bearer TOKEN, as `farm web token` prints it" in answer.json()["hint"]
    signing = client.post("/sign-in", data={"token": "x"})
    assert signing.status_code == 403
    assert "another site" not in signing.text
    page = client.get("/docs").text
    assert "<code>POST /api/v1/campaigns/{name}/{order}</code>" in page
    assert page.count('<th scope="row">') == sum(
        len(methods) for methods in client.get("/api/v1/openapi.json").json()["paths"].values()
    )
    [order] = [row for row in page.split("<tr>") if "POST /api/v1/boards/{name}/{order}" in row]
    assert "reason: string" in order
    assert "operator" in order


@pytest.mark.parametrize("host", ["[", "[::1", "]", "a[b]", "//", "localhost:x[", "[::1]x", "\\", "%5b"])
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/api/v1/boards", "/sign-in"])
def test_a_host_that_cannot_be_is_refused(client: TestClient, host: str, method: str, path: str) -> None:
    """A name in the Host header that is none of ours, or no name, is refused with 421."""
    assert client.request(method, path, headers={"host": host}).status_code == 421


def test_a_good_cookie_from_another_site_is_refused(home: pathlib.Path, client: TestClient) -> None:
    """Signing in gives a cookie that no script reads and no other site sends; a page elsewhere cannot use it."""
    signed = client.post(
        "/sign-in", data={"token": read_token(home), "to": "//evil.example"}, headers={"origin": "http://localhost"}
    )
    assert (signed.status_code, signed.headers["location"]) == (303, "/")
    cookie = signed.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    session = {"cookie": cookie.partition(";")[0]}
    client.cookies.clear()
    elsewhere = session | {"origin": "http://elsewhere.example"}
    order = "/api/v1/boards/nano-02/drain"
    assert client.post(order, json={"reason": "x"}, headers=elsewhere).status_code == 403
    here = session | {"origin": "http://localhost"}
    drained = client.post(order, json={"reason": "new fan"}, headers=here)
    assert (drained.status_code, drained.json()["health"]) == (200, "maintenance")
    documents.BoardInfo.model_validate(drained.json())
    read_token(home, renew=True)
    assert client.post("/api/v1/boards/nano-02/undrain", json={}, headers=here).status_code == 401


def test_orders(home: pathlib.Path, client: TestClient) -> None:
    """With the token in a header: a budget is changed, an impossible order and a huge body are refused."""
    token = {"authorization": f"Bearer {read_token(home)}"}
    path = f"/api/v1/campaigns/{web_store.CAMPAIGN}"
    changed = client.patch(f"{path}/budget", json={"trials": 130_000, "wall_clock_s": None}, headers=token)
    assert (changed.status_code, changed.json()["budget"]["trials"]) == (200, 130_000)
    assert changed.json()["budget"]["wall_clock_s"] is None
    assert client.patch(f"{path}/budget", json={"trials": 0}, headers=token).status_code == 422
    assert client.patch(f"{path}/budget", json={}, headers=token).status_code == 422
    assert client.post(f"{path}/explode", headers=token).status_code == 422
    wrong = client.post("/api/v1/boards/nano-03/drain", json={"reasn": "x"}, headers=token)
    assert (wrong.status_code, wrong.json()["detail"]) == (422, "reasn: there is no such field")
    file = {"name": "c", "boards": {"types": "jetson-nano"}, "budget": {"trials": 9}}
    for models, said in (("m.onnx", "models are of the zoo here"), ("resnet81", "no zoo model is called 'resnet81'")):
        wrong = client.post("/api/v1/campaigns", json=file | {"models": models}, headers=token)
        assert (wrong.status_code, said in wrong.json()["detail"]) == (422, True)
    assert client.post("/api/v1/boards/nano-03/drain", content=b"{" * 70_000, headers=token).status_code == 413
    assert client.post("/api/v1/boards/nano-03/drain", content=b"{half", headers=token).status_code == 422


def test_strangers_read_nothing(home: pathlib.Path) -> None:
    """Where other machines reach the server, reading needs the token too."""
    with make_client(home, private=False) as client:
        assert client.get("/api/v1/boards").status_code == 401
        assert client.get("/live").status_code == 401
        assert client.get("/").headers["location"] == "/sign-in"
        assert client.get("/sign-in").status_code == 200
        token = {"authorization": f"Bearer {read_token(home)}"}
        assert client.get("/api/v1/boards?limit=1", headers=token).status_code == 200


@pytest.mark.parametrize("options", [{"host": "0.0.0.0"}, {"host": "192.0.2.1", "cert": pathlib.Path("c")}])  # noqa: S104
def test_other_machines_are_not_served_without_tls(options: dict[str, Any]) -> None:
    """An address beyond loopback needs a certificate and its key."""
    with pytest.raises(UsageError):
        WebPlace(**options)


def test_hostile_texts_are_shown(tmp_path: pathlib.Path) -> None:
    """Names and reasons that others wrote are text: no markup, no controls, no letters turned around."""
    with Store(tmp_path / "farm.db") as store:
        web_store.fill(store, boards=4, trials=40)
        store.boards.register("bad", "jetson-nano", Virtual(), {"note": HOSTILE}, by=HOSTILE)
        store.boards.save_description("bad", {"cpu_model": HOSTILE, "board_type": HOSTILE}, simulated=True)
        store.events.add("campaign_failed", HOSTILE, HOSTILE)
        store.events.add("campaign_failed", web_store.CAMPAIGN, HOSTILE)
        campaign = store.campaigns.require(web_store.CAMPAIGN)
        with store.session.writing() as connection:
            from farm.store import schema

            connection.execute(schema.workloads.update().values(name=HOSTILE))
            connection.execute(schema.sweeps.update().values(model=HOSTILE))
            connection.execute(schema.results.update().values(model=HOSTILE, board=HOSTILE))
            order = campaign.order.model_dump(mode="json")
            order["models"][0]["name"] = HOSTILE
            for kind in order["types"]:
                for each in kind["workloads"]:
                    each["name"] = HOSTILE
            connection.execute(schema.fleet_campaigns.update().values(order=order, owner=HOSTILE))
    with make_client(tmp_path) as client:
        paths = ("/", "/boards/bad", "/campaigns", f"/campaigns/{web_store.CAMPAIGN}", "/sweeps", "/sweeps/1")
        for path in (
            *paths,
            "/records?simulated=true",
            "/artifacts",
            *PAGES[-2:],
            f"/?text={SCRIPT}",
            f"/boards/{SCRIPT}",
        ):
            text = client.get(path).text
            assert SCRIPT not in text, path
            assert "\u202e" not in text, path
            assert "\x1b" not in text, path


def test_what_changes_is_sent_in_pieces(home: pathlib.Path) -> None:
    """A look at the store gives the lines that changed since the last one, and no others."""
    from farm.crew.health import Kind, Observation, decide_by
    from farm.web.view import View

    view = View(farm_settings.load({"FARM_HOME": str(home)}), Access(home, private=True, secure=False))
    view.look()
    view.look()
    assert view.look() == [] or all(name.startswith(("campaign-", "head-")) for name, _ in view.look())
    with Store(home / "farm.db") as store:
        store.boards.observe("nano-04", Kind.DRAIN, "ana", decide_by(Observation(Kind.DRAIN, "new fan")))
    parts = dict(view.look())
    assert {"board-nano-04", "counts", "events"} <= parts.keys()
    assert not [name for name in parts if name.startswith("board-") and name != "board-nano-04"]
    assert "new fan" in parts["board-nano-04"]
    view.stores.close()


def test_a_watcher_that_never_reads_holds_up_nobody() -> None:
    """A client that is far behind has to reload its page, and others get every update meanwhile."""

    async def watch_both() -> tuple[list[str], list[str]]:
        numbers = iter(range(200))
        hub = Hub(lambda: [("counts", str(next(numbers)))])
        slow, quick = hub.watch(), hub.watch()
        await anext(slow), await anext(quick)
        got = []
        for _ in range(150):
            await hub._turn()
            got.append((await anext(quick)).raw_data or "")
        late = await anext(slow)
        await hub.end()
        assert hub.watchers == 2 <= MOST_WATCHERS
        await slow.aclose(), await quick.aclose()  # type: ignore[attr-defined]
        assert hub.watchers == 0
        return got, [late.event or ""]

    got, late = asyncio.run(watch_both())
    assert [json.loads(text)[0][1] for text in got] == [str(number) for number in range(150)]
    assert late == ["stale"]


def test_what_was_vendored_is_what_was_published() -> None:
    """Others' files are as their checksums, beside their licences."""
    import hashlib

    root = pathlib.Path(__file__).parents[2]
    for folder in (root / "farm/web/static/vendor", root / "tests/acceptance/axe"):
        lines = (folder / "SHA256SUMS").read_text().splitlines()
        assert lines
        for line in lines:
            digest, name = line.split()
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        assert list(folder.glob("*LICENSE"))


def test_roles_say_what_a_named_token_may(home: pathlib.Path, client: TestClient) -> None:
    """A reader changes nothing, a user campaigns of the same name, an operator all; changes name their person."""
    owner = web_store.OWNER.partition("@")[0]
    people = {
        "rita": access.Role.READER,
        "ulf": access.Role.USER,
        owner: access.Role.USER,
        "olga": access.Role.OPERATOR,
    }
    headers = {
        name: {"authorization": f"Bearer {access.add(home, name, role, 'test')}"} for name, role in people.items()
    }
    campaign, drain = f"/api/v1/campaigns/{web_store.CAMPAIGN}", "/api/v1/boards/nano-03/drain"

    def try_all(name: str) -> tuple[int, int]:
        changed = client.patch(f"{campaign}/budget", json={"trials": 140_000 + len(name)}, headers=headers[name])
        return changed.status_code, client.post(drain, json={"reason": "x"}, headers=headers[name]).status_code

    assert try_all("rita") == (403, 403)
    assert try_all("ulf") == (403, 403)
    assert client.post(f"{campaign}/cancel", headers=headers["ulf"]).status_code == 403
    assert web_store.OWNER in client.post(f"{campaign}/pause", headers=headers["ulf"]).json()["detail"]
    assert try_all(owner) == (200, 403)
    assert try_all("olga") == (200, 200)
    with Store(home / "farm.db") as store:
        changes = store.events.fetch_changes(3)
        assert [change.kind for change in changes] == ["drain", "campaign_budget", "campaign_budget"]
        assert [change.by.partition("@")[0] for change in changes] == ["olga", "olga", owner]
        assert changes[-1].subject == web_store.CAMPAIGN
    client.post("/api/v1/boards/nano-03/undrain", json={}, headers=headers["olga"])


def test_people_reserve_boards_and_end_what_is_theirs(
    home: pathlib.Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user reserves a free board and ends that; another user does not, an operator does; a reader reserves none."""
    monkeypatch.setattr(orders, "_WAIT_S", 0.0)
    roles = {"rob": access.Role.READER, "una": access.Role.USER, "udo": access.Role.USER, "otto": access.Role.OPERATOR}
    keys = {name: {"authorization": f"Bearer {access.add(home, name, role, 'test')}"} for name, role in roles.items()}
    with Store(home / "farm.db") as store:
        rows = store.boards.fetch()
    free, busy = (next(row.name for row in rows if is_leased == bool(row.lease)) for is_leased in (False, True))
    path, wanted = f"/api/v1/boards/{free}/reservation", {"for_s": 7200, "why": "debugging"}

    assert client.post(path, json=wanted, headers=keys["rob"]).status_code == 403
    board = client.post(path, json=wanted, headers=keys["una"]).json()
    documents.BoardInfo.model_validate(board)
    assert (board["lease"]["owner"].partition("@")[0], board["lease"]["purpose"]) == ("una", "reserved: debugging")
    assert client.post(path, json=wanted, headers=keys["udo"]).status_code == 503
    assert client.post(f"/api/v1/boards/{busy}/reservation", json=wanted, headers=keys["una"]).status_code == 503
    assert client.delete(f"/api/v1/boards/{busy}/reservation", headers=keys["otto"]).status_code == 422
    assert client.delete(path, headers=keys["udo"]).status_code == 403
    assert "End the reservation" in client.get(f"/boards/{free}", headers=keys["una"]).text
    assert "End the reservation" not in client.get(f"/boards/{free}", headers=keys["udo"]).text
    assert client.delete(path, headers=keys["una"]).json()["lease"] is None
    site = keys["udo"] | {"origin": "http://localhost"}
    form = {"order": "reserve", "hours": "2", "why": "x"}
    assert client.post(f"/boards/{free}/reservation", data=form, headers=site).status_code == 303
    assert client.post(f"/boards/{free}/reservation", data=form | {"hours": "-1"}, headers=site).status_code == 422
    assert client.delete(path, params={"reason": "needed"}, headers=keys["otto"]).json()["lease"] is None
    with Store(home / "farm.db") as store:
        last = store.events.fetch_changes(1)[0]
    assert (last.subject, last.by.partition("@")[0]) == (free, "otto")


def test_a_named_session_ends_with_its_token(home: pathlib.Path, client: TestClient) -> None:
    """Its cookie is the person's and of the role; another token of the name ends it, and so does removing the name."""
    who = web_store.OWNER.partition("@")[0]
    token, site = access.add(home, who, access.Role.USER, "test"), {"origin": "http://localhost"}
    order = {"order": "drain", "reason": ""}

    def sign_in(token: str) -> int:
        client.cookies.clear()
        return client.post("/sign-in", data={"token": token}, headers=site, follow_redirects=False).status_code

    assert sign_in(token) == 303
    assert client.post("/boards/nano-03/orders", data=order, headers=site).status_code == 403
    budget = {"order": "budget", "trials": "150000"}
    assert (
        client.post(
            f"/campaigns/{web_store.CAMPAIGN}/orders", data=budget, headers=site, follow_redirects=False
        ).status_code
        == 303
    )
    access.add(home, who, access.Role.OPERATOR, "test")
    assert client.post(f"/campaigns/{web_store.CAMPAIGN}/orders", data=budget, headers=site).status_code == 401
    assert sign_in(token) == 401
    access.remove(home, who)
    assert who not in (home / access.FILE).read_text()
    assert (home / access.FILE).stat().st_mode & 0o077 == 0
    client.cookies.clear()


def test_clocks_are_those_of_the_run() -> None:
    """A held clock, or the CPU's limit in force; what an idle board reads after a run is no clock of the run."""
    idle = {"cpu_freq_hz": {"0": 102_000_000}, "cpu_max_hz": {"0": 1_479_000_000}, "gpu_freq_hz": 76_800_000}
    row = TrialOutcome("b", 1.0, "default", {"after": idle})
    reading = read_outcome(row)
    assert reading is not None
    assert reading.clocks_hz == {"cpu": 1_479_000_000.0}
    point = {"cpu_freq_hz": {"a57": 921_600_000}, "gpu_freq_hz": 460_800_000}
    held = read_outcome(row._replace(outcome={"after": idle, "point": point}))
    assert held is not None
    assert held.clocks_hz == {"cpu": 921_600_000.0, "gpu": 460_800_000.0}


def test_clocks_are_not_shown_as_live_once_their_evidence_is_old(home: pathlib.Path) -> None:
    """A reading says when it was taken and is left out after a quarter of an hour, as are points of an engine that is
    gone or silent.
    """
    with Store(home / "farm.db") as store:
        (campaign,) = store.campaigns.fetch(over=False)
        boards = {each.name: each for each in store.boards.fetch() if each.lease}
    at = (campaign.progress or {})["at"]
    points = now.list_points([campaign], at + 5)
    assert points
    assert now.list_points([campaign], at + 3600) == {}
    assert now.list_points([campaign.model_copy(update={"engine": None})], at + 5) == {}

    name, board = next(iter(boards.items()))
    gauges = Gauges()
    read_at = board.lease.acquired_at + 1
    gauges._readings[name] = collections.deque([Reading(read_at, "a57=921600000", 52.0, None, {})])
    known = now.KnownOfBoards(GoldenRuns(), gauges, {}, {})
    fresh, old = (now.to_board_row(board, known, read_at + later) for later in (60, 3600))
    assert (fresh["held_at"], fresh["read_at"]) == (read_at, read_at)
    assert fresh["held"]
    assert (old["held"], old["held_at"], old["temperature_c"]) == ("", None, None)


def test_a_time_without_data_is_a_gap() -> None:
    """A line ends before a distance five times the usual one; a value alone between two gaps is a dot."""
    line = [(0.0, 1.0), (20.0, 2.0), (40.0, 1.0), (4000.0, 3.0), (8000.0, 2.0), (8020.0, 2.0)]
    assert [len(run) for run in charts.split_at_gaps(line)] == [3, 1, 2]
    whole, alone = charts.plan_times("power", "Power", "W", [("power", line)], ()).list_marks()
    assert sum(math.isnan(value) for value in whole.y) == 3
    assert alone.x == (4000.0,)


def test_pictures_of_a_board_share_their_time() -> None:
    """Power that only the first trials have is drawn over the same hour as clocks, at the same ticks."""
    readings = [Reading(1.8e9 + at, "", 40.0, 3.0 if at < 60 else None, {"cpu": 1.479e9}) for at in range(0, 3600, 20)]
    drawn = [str(picture) for _, picture in pages._draw_readings(readings)]
    ticks = [re.findall(r">(\d\d:\d\d:\d\d)<", picture) for picture in drawn]
    assert len(ticks) == 3
    assert len(ticks[0]) >= 3
    assert ticks[0] == ticks[1] == ticks[2]


def test_a_pace_adds_up_to_the_counted_trials(home: pathlib.Path) -> None:
    """Trials per minute times minutes are the campaign's counted trials; what else was measured is no pace."""
    with Store(home / "farm.db") as store:
        campaign = store.campaigns.require(web_store.CAMPAIGN)
        course = Course()
        course.update(store, campaign.id)
        every = sum(1 for _ in store.trials.fetch_since(campaign.id, 0))
    pace, minutes = course.pace(20)
    assert sum(pace) * minutes == pytest.approx(course.counted)
    assert 0 < course.counted < every


@pytest.mark.parametrize(("last_ms", "is_log"), [(1.01, False), (0.05, True)])
def test_a_course_is_logarithmic_where_it_spans_much(last_ms: float, is_log: bool) -> None:
    """A latency that hardly falls is drawn in plain milliseconds, one that falls twentyfold in decades."""
    chart = charts.plan_course([("tiny", [(1, 1.02), (8, last_ms)])], 9)
    assert charts.to_plot(chart)["log"] is is_log


@pytest.mark.parametrize(("state", "share"), [("running", 0.19), ("finished", None)])
def test_an_ended_campaign_has_no_share_that_is_left(home: pathlib.Path, state: str, share: float | None) -> None:
    """A campaign that its wall clock ended after 19 of 100 trials is over, not at 19 %."""
    with Store(home / "farm.db") as store:
        campaign = store.campaigns.require(web_store.CAMPAIGN)
    changes = {
        "state": states.CampaignState(state),
        "budget": campaigns.Budget(trials=100),
        "progress": {"counted": 19},
    }
    assert now.to_campaign_row(campaign.model_copy(update=changes), [])["share"] == share


def test_a_pause_is_no_idle_time(tmp_path: pathlib.Path) -> None:
    """The gap of a board in which its campaign was paused is a pause, also where something happened to the board."""
    with Store(tmp_path / "farm.db") as store:
        web_store.fill(store, boards=6, trials=40)
        campaign, now_s = store.campaigns.require(web_store.CAMPAIGN), time.time()
        store.events.add("campaign_paused", campaign.name, "by ana@desk")
        gap = {"nano-1": [(now_s - 1.0, now_s + 100.0)]}
        told = work_pages._explain_gaps(store, campaign, gap)
        course = Course(
            boards={"nano-1": Stretches(spans=[[now_s - 9.0, now_s - 1.0], [now_s + 100.0, now_s + 101.0]])}
        )
        course.began, course.ended = now_s - 9.0, now_s + 101.0
        [lane], _ = work_pages._list_lanes(store, campaign, course)
    assert told["nano-1"][0][2] == "paused: by ana@desk"
    assert ([each[2] for each in lane.pauses], lane.gaps) == (["paused: by ana@desk"], [])


def test_facts_of_a_board_are_words() -> None:
    """Bytes have units, ranges their clocks, tables the names in them; nothing is shown as Python prints it."""
    description = {
        "memory_bytes": 4_166_118_400,
        "cpu_freq_range_hz": {"0": [102_000_000, 1_479_000_000], "1": [102_000_000, 1_479_000_000]},
        "engine_versions": {"relax_vm": "0.27.0.post1"},
        "rails": ["POM_5V_IN", "POM_5V_GPU"],
        "simulated": True,
        "clocks": {
            "clusters": [{"name": "a57", "min_hz": 102_000_000, "max_hz": 1_479_000_000}],
            "memory": {"name": "memory", "min_hz": None, "max_hz": None},
            "power_mode": "MAXN",
        },
        "sensors": [{"rail": "POM_5V_IN", "driver": "ina3221-iio", "step_w": None}],
        "notes": [],
    }
    assert pages._list_facts(make_row(description=description)) == [
        ("memory", "4.17 GB"),
        ("cpu_freq_range", "102 to 1479 MHz"),
        ("engine_versions", "relax_vm 0.27.0.post1"),
        ("rails", "POM_5V_IN, POM_5V_GPU"),
        ("simulated", "yes"),
        ("clocks", "a57 102 to 1479 MHz, memory"),
        ("sensors", "POM_5V_IN (ina3221-iio)"),
    ]


def test_campaigns_stand_side_by_side(client: TestClient) -> None:
    """A campaign beside another shows both best latencies of each common workload; an unknown one is refused."""
    page = client.get(f"/campaigns/{web_store.CAMPAIGN}?beside={web_store.CAMPAIGN}").text
    ratios = re.findall(r'data-label="Ratio" class="n">([0-9.]+)<', page)
    assert ratios
    assert set(ratios) == {"1.000"}
    assert client.get(f"/campaigns/{web_store.CAMPAIGN}?beside=none").status_code == 404


def test_a_period_is_asked_for_on_the_page(client: TestClient) -> None:
    """A form's deadline beyond the period is no limit; another objective leaves the period out."""
    page = client.get("/sweeps/1?objective=period&period=40&deadline=900").text
    assert "every 40.0 ms the mean power is" in page
    assert "--deadline none --max-power none --period 40ms" in page
    assert "--objective energy" in client.get("/sweeps/1?objective=energy&period=40").text
    assert client.get("/api/v1/sweeps/1?period=40").json()["series"][-1]["pick"]["period"]["period_s"] == 0.04


def test_a_simulated_sweep_stands_beside_no_real_one(tmp_path: pathlib.Path) -> None:
    """The page offers sweeps of the same kind to stand beside one, and refuses others with the way to see both."""
    with Store(tmp_path / "farm.db") as store:
        web_store.fill(store, boards=4, trials=10)
        one, like, real = (web_store.fill_sweep(store, simulated=each) for each in (True, True, False))
    with make_client(tmp_path) as client:
        page = client.get(f"/sweeps/{one}?beside={like}")
        assert (page.status_code, f'value="{like}"' in page.text, f'value="{real}"' in page.text) == (200, True, False)
        refused = client.get(f"/sweeps/{one}?beside={real}")
    assert refused.status_code == 422
    assert f"farm sweep show {one} {real} --mixed" in refused.text


def test_artifacts_are_those_that_exist(home: pathlib.Path, client: TestClient, tmp_path: pathlib.Path) -> None:
    """What was compiled on this machine is listed with its folder until it is removed; what could be, apart."""
    folder = tmp_path / "tiny-nano"
    artifact_folder.note_artifact(home, write(folder))
    page = client.get("/artifacts").text
    listed, _, pending = page.partition("not compiled yet")
    assert str(folder) in listed
    assert str(folder) not in client.get("/artifacts?weights=fp16").text
    [row] = client.get("/api/v1/artifacts?device=cpu").json()["items"]
    assert (row["folder"], row["verified"]) == (str(folder), None)
    assert client.get("/api/v1/artifacts?board_type=x").status_code == 422
    assert "farm model compile" in pending
    shutil.rmtree(folder)
    assert artifact_folder.list_made_here(home) == []
    assert str(folder) not in client.get("/artifacts").text
