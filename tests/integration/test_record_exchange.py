"""Records leave the farm as MetaSchedule's files and come back; a script that knows no farm gets the same code."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import http.server
import json
import os
import pathlib
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from device_agent.protocol import Outcome, Status
from farm.errors import UnavailableError, UsageError
from farm.metaschedule import exchange, pull
from farm.search import traces, tvm_env, workloads
from farm.search.graph import canonical
from farm.search.tuners.decisions import Genome
from farm.search.tuners.schedule_space import ScheduleSpace
from farm.store import Store, sqlite
from farm.values import DEFAULT_POINT, Record, Trial, Workload

tvm = tvm_env.load()

ROOT = pathlib.Path(__file__).parents[2]

TARGET = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}

# As a recipient of the folder has it: TVM alone.
_STOCK = """
import json, sys
import numpy as np
import tvm, tvm_ffi
import tvm.s_tir.meta_schedule as ms
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock
folder = sys.argv[1]
database = ms.database.JSONDatabase(
    path_workload=f"{folder}/database_workload.json", path_tuning_record=f"{folder}/database_tuning_record.json"
)
for record in database.get_all_tuning_records():
    module = record.workload.mod
    schedule = database.query_schedule(module, record.target, "main")
    library = tvm.compile(RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=False)(schedule.mod), target=record.target)
    digest = int(tvm_ffi.structural_hash(schedule.mod)) & (2**64 - 1)
    print(json.dumps({"hash": f"{digest:016x}", "run_secs": [float(each) for each in record.run_secs]}))
assert not [name for name in sys.modules if name.split(".")[0] == "farm"]
"""


def make_workload(size: int = 14) -> Workload:
    from tvm import te, topi

    data = te.placeholder((1, size, size, 16), name="data")
    weight = te.placeholder((3, 3, 16, 32), name="weight")
    result = topi.nn.relu(topi.nn.conv2d_nhwc(data, weight, 1, [1, 1, 1, 1], 1))
    function = te.create_prim_func([data, weight, result]).with_attr("layout_free_buffers", [1])
    module = tvm.IRModule({"main": canonical.canonicalise(function)})
    key = workloads.workload_hash(module, TARGET, "graph/2")
    shapes = tuple((tuple(int(d) for d in p.shape), "float32") for p in module["main"].params)
    return Workload(
        key,
        f"conv2d_relu 3x3 {size}x{size}x16>32",
        1.8e6,
        1,
        shapes,
        workloads.canonical_json(module),
        TARGET,
        "graph/2",
    )


@pytest.fixture(scope="module")
def known() -> tuple[Workload, list[Any]]:
    """A workload, and three candidates of the farm's own search for it."""
    workload = make_workload()
    space = ScheduleSpace(workload)
    genomes: list[Genome] = space.ranked[:3]
    found = [each for each in space.evaluate([(genome, 0) for genome in genomes]) if each is not None]
    return workload, [space.describe(each) for each in found]


@pytest.fixture
def store(tmp_path: pathlib.Path, known: tuple[Workload, list[Any]]) -> Iterator[Store]:
    workload, candidates = known
    with Store(tmp_path / "farm.db") as store:
        number = store.campaigns.start("farm tune", "m", "", "local", 8, {})
        store.workloads.save(number, [workload])
        for rank, each in enumerate(candidates):
            outcome = Outcome(Status.OK, latency_s=(1e-3 * (rank + 1),), board="b")
            store.trials.add(Trial(number, workload.hash, each.hash, DEFAULT_POINT, 1, outcome, each.trace_json))
        best = candidates[0]
        store.records.save(
            Record(
                *(workload.hash, workload.name, "local", DEFAULT_POINT, "graph/2", best.hash, 1e-3, 1.8e6, 0.0, 1e-7),
                simulated=False,
                trace_json=best.trace_json,
                evidence={"samples": 30},
            )
        )
        yield store


def export(store: Store, folder: pathlib.Path) -> pathlib.Path:
    assert exchange.write_folder(store.imports.fetch_bundle(store.records.fetch()), folder) == 1
    return folder


def test_a_stock_script_gets_the_same_code(store: Store, tmp_path: pathlib.Path) -> None:
    """From the two files alone, TVM alone makes the very function that the farm measured, and compiles it."""
    folder = export(store, tmp_path / "out")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    script = tmp_path / "stock.py"
    script.write_text(_STOCK)
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    [record] = store.records.fetch()
    assert json.loads(done.stdout) == {"hash": record.candidate, "run_secs": [record.median_s]}


def test_another_farm_takes_all_of_it(store: Store, tmp_path: pathlib.Path) -> None:
    """Through the folder nothing is lost: what the other farm would write out again is the same."""
    folder = export(store, tmp_path / "out")
    with Store(tmp_path / "other.db") as other:
        bundle = exchange.read_folder(folder)
        assert bundle is not None
        assert other.imports.take_in(bundle, str(folder), "ann").records == 1
        again = export(other, tmp_path / "again")
    for name in (exchange.WORKLOADS, exchange.TUNING_RECORDS):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    mine, theirs = (json.loads((each / exchange.OURS).read_text()) for each in (folder, again))
    assert theirs["records"][0].pop("origin")["store"] == mine["store"]
    assert mine["records"][0].pop("origin") is None
    assert theirs["records"] == mine["records"]
    assert theirs["workloads"] == mine["workloads"]


def test_metaschedules_files_become_trials(store: Store, tmp_path: pathlib.Path) -> None:
    """Without the farm's own file they are candidates of a known function, for a search to begin from; no records."""
    folder = export(store, tmp_path / "out")
    [record] = store.records.fetch()
    (folder / exchange.OURS).unlink()
    found, trials = exchange.read_database(folder, "local", DEFAULT_POINT, simulated=False, pipeline="graph/2")
    assert [each.hash for each in found] == [record.workload]
    assert [(each.candidate, each.median_s) for each in trials] == [(record.candidate, record.median_s)]


def test_what_is_there_is_not_written_over(store: Store, tmp_path: pathlib.Path) -> None:
    """A folder with something in it is left alone, and a failed export leaves nothing under its name."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "mine").write_text("")
    bundle = store.imports.fetch_bundle(store.records.fetch())
    with pytest.raises(UsageError, match="exists already"):
        exchange.write_folder(bundle, folder)
    assert [each.name for each in folder.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "damage",
    [
        {"format": "tvm-farm records/9"},
        {"records": [{}]},
        {"store": ""},
        {"workloads": []},
        {"trials": [1]},
        {"models": {"x": 1}},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_a_damaged_file_is_refused(store: Store, tmp_path: pathlib.Path, damage: dict[str, Any]) -> None:
    """Nothing of it is believed; the error names the file."""
    bundle = store.imports.fetch_bundle(store.records.fetch())
    document = exchange.to_document(bundle) | damage
    (tmp_path / exchange.OURS).write_text(json.dumps(document))
    with pytest.raises(UsageError, match="holds no records"):
        exchange.read_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x", '{"input": ["llvm"], "config": {}, "result": []}\n{}', "log of AutoTVM"),
        ("x", '{"i": [["[]"]], "r": [[0.1]]}\n{}', "log of AutoTVM or AutoScheduler"),
        ("x", '["1", "AA=="]\n["2"]', "one of MetaSchedule's two files"),
        ("", "", "there is no"),
        (f"dir/{exchange.WORKLOADS}", "", f"it lacks {exchange.TUNING_RECORDS}"),
    ],
)
def test_files_of_others_are_named(tmp_path: pathlib.Path, name: str, text: str, said: str) -> None:
    """Another tuner's log, one file of two, and nothing at all: the error says which."""
    path = tmp_path / (name or "none")
    if name:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with pytest.raises(UsageError, match=said):
        exchange.read_folder(path.parent if "/" in name else path)


@pytest.mark.core
def test_a_workload_that_is_another_function_is_refused(store: Store, tmp_path: pathlib.Path) -> None:
    """Modules of two workloads exchanged: each would be measured, verified and recorded as the other."""
    bundle = store.imports.fetch_bundle(store.records.fetch())
    other = make_workload(7)
    [own] = bundle.workloads
    swapped = dataclasses.replace(own, module_json=other.module_json)
    others = (
        dataclasses.replace(own, arguments=(((1,), "float32"),)),
        dataclasses.replace(own, target={"kind": "llvm"}),
    )
    for found in (swapped, *others):
        with pytest.raises(UsageError, match=f"workload {own.hash} .*is invalid"):
            exchange.require_sound(dataclasses.replace(bundle, workloads=(found,)), "theirs")
    (tmp_path / exchange.OURS).write_text(
        json.dumps(exchange.to_document(dataclasses.replace(bundle, workloads=(swapped,))))
    )
    with pytest.raises(UsageError, match="its module is another function"):
        exchange.read_folder(tmp_path)
    exchange.require_sound(bundle, "theirs")


def test_a_trace_under_another_candidates_name_is_refused(store: Store, tmp_path: pathlib.Path) -> None:
    """Nor is a file taken whose objects have a key twice: readers differ in which one counts."""
    bundle = store.imports.fetch_bundle(store.records.fetch())
    [record] = bundle.records
    others = [each for each in store.trials.fetch() if each["candidate"] != record.candidate]
    forged = dataclasses.replace(record, trace_json=others[0]["trace_json"])
    path = tmp_path / exchange.OURS
    path.write_text(json.dumps(exchange.to_document(dataclasses.replace(bundle, records=(forged,)))))
    with pytest.raises(UsageError, match=f"candidate {record.candidate} makes another function"):
        exchange.read_folder(tmp_path)
    path.write_text('{"store": "x", ' + json.dumps(exchange.to_document(bundle))[1:])
    with pytest.raises(UsageError, match="a key twice"):
        exchange.read_folder(tmp_path)


def contain_itself(text: str) -> str:
    """A module's JSON in which an array holds the module."""
    graph = json.loads(text)
    last = max(number for number, node in enumerate(graph["nodes"]) if node["type"] == "ffi.Array")
    graph["nodes"][last]["data"].append(graph["root_index"])
    return json.dumps(graph)


def test_a_module_that_would_crash_its_reader_is_found_among_others() -> None:
    """A circle is named; so is what takes the process down that reads it, and the rest is judged all the same."""
    good, circular, deep = (make_workload(size) for size in (7, 14, 28))
    circular = dataclasses.replace(circular, module_json=contain_itself(circular.module_json))
    # A function of 1,900 levels is within what is checked, and may be beyond TVM's stack or not: either way it is no
    # module, and the process that reads it is not this one.
    graph = json.loads(deep.module_json)
    first = len(graph["nodes"])
    graph["nodes"] += [{"type": "ffi.Array", "data": [first + number - 1]} for number in range(1900)]
    deep = dataclasses.replace(deep, module_json=json.dumps(graph | {"root_index": len(graph["nodes"]) - 1}))
    found = traces.find_mismatched([good, circular, deep])
    assert found.keys() == {circular.hash, deep.hash}
    assert "does not come before it" in found[circular.hash]


def _call(home: pathlib.Path, *words: str) -> tuple[int, str]:
    """Return the exit code and what was said; of a success, its result alone."""
    command = [sys.executable, "-c", "from farm.cli.main import main; main()", *words]
    environment = os.environ | {"FARM_HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + ("" if "--json" in words else done.stderr)


def test_the_check_finds_and_removes_what_came_in_before(
    store: Store, known: tuple[Workload, list[Any]], tmp_path: pathlib.Path
) -> None:
    """`farm store check` names the workload; `--remove` forgets it with its record and trials, and others stay."""
    home = pathlib.Path(str(store.location)).parent
    workload, other = known[0], make_workload(7)
    number = store.campaigns.start("farm tune", "m2", "", "local", 8, {})
    store.workloads.save(number, [other])
    assert _call(home, "store", "check")[0] == 0
    with contextlib.closing(sqlite3.connect(home / "farm.db")) as connection, connection:
        connection.execute("UPDATE workloads SET arguments = '[7]' WHERE hash = ?", (workload.hash,))
    assert "its arguments are not those of its module" in _call(home, "store", "check")[1]
    with contextlib.closing(sqlite3.connect(home / "farm.db")) as connection, connection:
        connection.execute(
            "UPDATE workloads SET module_json = ? WHERE hash = ?", (contain_itself(workload.module_json), workload.hash)
        )
    code, said = _call(home, "store", "check")
    assert code == 1
    assert f"workload {workload.hash} ({workload.name}: its module cannot be read" in said
    assert "store check --remove" in said
    code, said = _call(home, "record", "export", str(tmp_path / "folder"))
    assert (code, workload.hash in said) == (2, True)
    code, said = _call(home, "store", "check", "--remove")
    assert (code, "removed 1 workloads with their records and 3 trials" in said) == (0, True)
    assert [row[0] for row in store.workloads.fetch_names()] == [other.hash]
    assert store.records.fetch() == []
    assert _call(home, "store", "check")[0] == 0
    trial = Trial(number, other.hash, "c", DEFAULT_POINT, 1, Outcome(Status.OK, latency_s=(1e-3,), board="b"), "[]")
    store.trials.add(trial)
    with contextlib.closing(sqlite3.connect(home / "farm.db")) as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute("DELETE FROM trials")


def test_what_the_farm_made_of_a_model_takes_the_place_of_another_function(
    store: Store, known: tuple[Workload, list[Any]]
) -> None:
    """A row that was imported first does not decide what a model of ours is tuned as."""
    own = known[0]
    with contextlib.closing(sqlite3.connect(str(store.location))) as connection, connection:
        connection.execute("UPDATE workloads SET module_json = '{}', arguments = '[]'")
    number = store.campaigns.start("farm tune", "m", "", "local", 8, {})
    store.workloads.save(number, [own])
    assert store.workloads.fetch_by_hash([own.hash]) == {own.hash: own}


@pytest.mark.parametrize(
    ("damage", "problem"),
    [("length", "another length than stated"), ("circle", "does not come before it"), ("nested", "line 1")],
)
def test_hostile_files_of_metaschedules_are_refused(
    store: Store, tmp_path: pathlib.Path, damage: str, problem: str
) -> None:
    """Before TVM sees them: a length that it would believe, a module that contains itself, brackets without end."""
    folder = export(store, tmp_path / "out")
    path = folder / exchange.WORKLOADS
    key, data = json.loads(path.read_text())
    text = base64.b64decode(data)[8:]
    if damage == "length":
        data = base64.b64encode((3 << 30).to_bytes(8, "little") + text).decode()
    elif damage == "circle":
        circle = contain_itself(text.decode()).encode()
        data = base64.b64encode(len(circle).to_bytes(8, "little") + circle).decode()
    path.write_text("[" * 100_000 if damage == "nested" else json.dumps([key, data]))
    with pytest.raises(UsageError, match=problem):
        exchange.read_database(folder, "local", DEFAULT_POINT, simulated=False, pipeline="graph/2")


def test_a_folder_without_records_is_none(tmp_path: pathlib.Path) -> None:
    """The error says what is looked for."""
    with pytest.raises(UsageError) as caught:
        exchange.read_folder(tmp_path)
    assert exchange.WORKLOADS in caught.value.hint


def run_farm(home: pathlib.Path, *arguments: str) -> str:
    code, said = _call(home, "record", *arguments)
    assert code == 0, said
    return said


def test_a_user_exports_merges_and_forgets(store: Store, tmp_path: pathlib.Path) -> None:
    """What the commands tell of records, one farm's and another's, agrees with what was kept."""
    [record] = store.records.fetch()
    [shown] = json.loads(run_farm(tmp_path, "list", "--workload", "conv2d", "--since", "1d", "--json"))
    assert (shown["candidate"], shown["origin"]) == (record.candidate, None)
    assert json.loads(run_farm(tmp_path, "list", "--workload", "softmax", "--json")) == []
    best = json.loads(run_farm(tmp_path, "show", record.workload[:6], "--top", "5", "--json"))["candidates"]
    assert [(each["rank"], each["record"]) for each in best] == [(1, True), (2, False), (3, False)]
    other = tmp_path / "other"
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    sqlite.copy_store(tmp_path / "farm.db", theirs / "farm.db")
    before = (theirs / "farm.db").read_bytes()
    assert json.loads(run_farm(other, "import", str(theirs / "farm.db"), "--json"))["records"] == 1
    assert [path.name for path in theirs.iterdir()] == ["farm.db"]
    assert (theirs / "farm.db").read_bytes() == before
    assert json.loads(run_farm(tmp_path, "export", str(tmp_path / "out"), "--json"))["records"] == 1
    assert json.loads(run_farm(other, "import", str(tmp_path / "out"), "--json"))["records"] == 0
    assert f"from the store {store.imports.fetch_identity()}" in run_farm(other, "show", record.workload[:6])
    assert json.loads(run_farm(other, "prune", "--imported", "--json"))["forgotten"] == 1
    assert json.loads(run_farm(other, "list", "--json")) == []


def test_records_are_pulled_from_a_file_and_a_url(store: Store, tmp_path: pathlib.Path) -> None:
    """One file holds records for another farm, which takes it from a disk or a URL; a wrong digest changes nothing."""
    [record] = store.records.fetch()
    path = tmp_path / "team.json.gz"
    assert json.loads(run_farm(tmp_path, "export", str(path), "--json"))["records"] == 1
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/team.json.gz"
        for wrong, said in (("#sha256=0", "SHA-256"), ("x", "cannot fetch"), (".part", ": the server answers 404 ")):
            with pytest.raises((UsageError, UnavailableError), match=said):
                pull.read_source(f"{url}{wrong}")
        bundle, _ = pull.read_source(f"{url}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}")
        server.shutdown()
    assert [each.candidate for each in bundle.records] == [record.candidate]
    other = tmp_path / "other"
    assert json.loads(run_farm(other, "import", str(path), "--json"))["records"] == 1
    assert json.loads(run_farm(other, "import", str(path), "--json"))["records"] == 0
    path.write_bytes(gzip.compress(b"[]"))
    with pytest.raises(UsageError, match="no records that can be read"):
        pull.read_source(str(path))
    with pytest.raises(UsageError, match="there is no nowhere"):
        pull.read_source("nowhere")


def test_a_download_has_one_deadline() -> None:
    """A server that sends a byte now and then is given up, and one that is not there is named in one sentence."""
    over = threading.Event()

    def trickle(server: socket.socket) -> None:
        with contextlib.suppress(OSError), server.accept()[0] as connection:
            while not over.wait(0.02):
                connection.sendall(b"H")

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        thread = threading.Thread(target=trickle, args=(server,))
        thread.start()
        with pytest.raises(UnavailableError, match="did not arrive"):
            pull._download(address, "", deadline_s=0.3)
        over.set()
        thread.join(10)
    with pytest.raises(UnavailableError, match=f"cannot fetch {address}: Connection refused\n"):
        pull._download(address, "")


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("https://1.1.1.1/x", "another protocol"),
        ("file:///etc/passwd", "another protocol"),
        ("http://127.0.0.1:9/x", "private network"),
        ("http://[::ffff:10.0.0.1]/x", "private network"),
        ("http://169.254.169.254/x", "private network"),
    ],
)
def test_redirects_stay_with_the_protocol_and_the_network(then: str, why: str) -> None:
    """From a public server into a private network no request is made."""
    assert pull.find_refusal("http://1.1.1.1/x", then).endswith(why)
    assert not pull.find_refusal("http://1.1.1.1/x", "http://8.8.8.8/x")


def test_the_farm_comes_with_records_of_the_zoo() -> None:
    """They are simulated and sound, and say so: no real board is served by one."""
    bundle, _ = pull.read_source(pull.SHIPPED)
    assert bundle.records
    assert all(each.simulated for each in bundle.records)
    exchange.require_sound(bundle, pull.SHIPPED, is_ours=False)
