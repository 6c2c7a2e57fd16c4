"""Wrong input and broken surroundings: an exit code, a message that says what to do, and nothing on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from farm.store import Store
from farm.types.states import CampaignState
from tests.acceptance.conftest import FARM, Done, Home, new_home
from tests.unit.campaign_orders import make_order, submit


@pytest.fixture(scope="module")
def shared() -> Iterator[Home]:
    with new_home() as home:
        yield home


def refused(done: Done, code: int, *texts: str) -> None:
    assert done.code == code, done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    for text in texts:
        assert text in done.err


def write_model(path: pathlib.Path, operator: str, shape: list[int | str], domain: str = "") -> str:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape))
    node = helper.make_node(operator, ["x"], ["y"], name="the_node", domain=domain)
    opsets = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    onnx.save(helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets, ir_version=9), path)
    return str(path)


@pytest.mark.core
@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        (["quickstart", "--model", "gone.onnx"], 2, ["no such file: gone.onnx", "squeezenet1.1"]),
        (["quickstart", "--trials", "0"], 2, ["--trials must be at least 1, not 0"]),
        (["tune", "tiny-cnn", "--trials", "-1", "--json"], 2, ["--trials must be at least 1, not -1"]),
        (["tune", "tiny-cnn", "--trials", "many"], 2, ["--trials", "integer"]),
        (["tune"], 2, ["MODEL"]),
        (
            ["tune", "tiny-cnn", "--board-type", "jetson-nan"],
            2,
            ["unknown board type", "jetson-tx2, jetson-xavier-nx, local"],
        ),
        (["tune", "tiny-cnn", "--board-type", "jetson-nano", "--json"], 2, ["no board of type 'jetson-nano'"]),
        (["model", "show", "tiny-cnn", "--shape", "nope=1,3"], 2, ["no input 'nope'", "data (1, 3, 16, 16)"]),
        (["model", "show", "tiny-cnn", "--shape", "data"], 2, ["--shape", "data"]),
        (
            ["model", "quantize", "tiny-cnn", "--calibration", "nowhere", "--out", "x.onnx"],
            2,
            ["--calibration 'nowhere' is no folder", "random"],
        ),
        (
            ["model", "quantize", "tiny-cnn", "--calibration", "random", "--out", "no/such/x.onnx"],
            2,
            ["--out no/such/x.onnx: there is no folder"],
        ),
        (["record", "list", "--board-type", "toaster"], 2, ["unknown board type 'toaster'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and not value[0].startswith("no") else "",
)
def test_wrong_usage_is_refused_at_once(shared: Home, arguments: list[str], code: int, texts: list[str]) -> None:
    """A wrong argument ends the command with its exit code and a message that names it."""
    refused(shared.call(*arguments), code, *texts)


def test_an_operator_that_tvm_lacks_is_named(shared: Home) -> None:
    """The message names the operator and the node that cannot be imported."""
    path = write_model(shared.path / "odd.onnx", "StringNormalizer", [1, 4])
    refused(shared.run("tune", path), 2, "StringNormalizer", "the_node")
    # What else there is to say of the model is said, and where the operator is.
    done = shared.run("model", "show", path, "--json")
    assert done.code == 2
    assert "StringNormalizer" in done.err
    shown = json.loads(done.out)
    assert shown["outputs"][0]["name"] == "y"
    assert shown["obstacles"] == [
        {
            "operator": "StringNormalizer",
            "node": "the_node",
            "inputs": ["x"],
            "reason": "has no converter",
            "hint": "Prepare text before the model, and give it numbers.",
        }
    ]


def test_an_impossible_setting_is_named(shared: Home) -> None:
    """A FARM_ variable with an impossible value is named with it."""
    refused(shared.call("quickstart", "--json", FARM_BATCH="many"), 2, "FARM_BATCH", "many")


def test_a_traceback_is_shown_for_debug_alone(shared: Home) -> None:
    """`--debug` adds the traceback to the message."""
    done = shared.run("model", "show", "gone.onnx", "--debug")
    assert done.code == 2
    assert "Traceback" in done.err
    assert "no such file" in done.err


def test_a_file_in_place_of_the_home_is_said(home: Home) -> None:
    """FARM_HOME that is a file ends the command as unavailable and names the variable."""
    pathlib.Path(home.environment["FARM_HOME"]).write_text("")
    refused(home.run("record", "list", "--json"), 3, "FARM_HOME")


@contextlib.contextmanager
def read_only_folder() -> Iterator[pathlib.Path]:
    """A folder that cannot be written to: by its mode, or for root, who may write anywhere, by how it is mounted."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if os.getuid() != 0:
            folder.chmod(0o555)
            yield folder
            folder.chmod(0o755)
        elif subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", name], capture_output=True).returncode == 0:
            try:
                yield folder
            finally:
                subprocess.run(["umount", name], check=True)
        else:  # root without the right to mount: the kernel's own folder takes no files
            yield pathlib.Path("/proc")


def test_a_read_only_home_is_said(home: Home) -> None:
    """A FARM_HOME that cannot be written ends quickstart as unavailable before anything is started."""
    with read_only_folder() as folder:
        for place in (folder, folder / "deeper"):
            done = home.run("quickstart", "--model", "tiny-cnn", "--json", FARM_HOME=str(place))
            refused(done, 3, "FARM_HOME", str(place))


def test_a_report_that_cannot_be_written_is_said_first(home: Home) -> None:
    """An --out that cannot be written is refused before tuning begins."""
    (home.path / "taken").write_text("")
    with read_only_folder() as folder:
        for out in (home.path / "taken", folder / "report"):
            done = home.call("quickstart", "--out", str(out), "--json")
            refused(done, 2, f"nothing can be written to {out}", "another folder")


def run(home: Home, command: list[str], before: Callable[[], None] | None = None) -> Any:
    # Python would keep byte code that a limit cuts off.
    options: Any = {"env": home.environment | {"PYTHONDONTWRITEBYTECODE": "1"}, "text": True, "timeout": 60}
    return subprocess.run(command, preexec_fn=before, capture_output=True, **options)


@pytest.mark.core
def test_a_full_home_is_said(home: Home) -> None:
    """A disk without room for the store ends the command as unavailable and names FARM_HOME."""
    done = run(
        home, [str(FARM), "record", "list", "--json"], lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    )
    refused(Done(done.returncode, done.stdout, done.stderr, 0), 3, "FARM_HOME")


def test_campaigns_are_shown_on_a_full_disk(home: Home) -> None:
    """Who looks why a campaign stands still sees it as the store has it, though its end cannot be written down."""
    path = home.path / "home" / "farm.db"
    path.parent.mkdir()
    with Store(path) as store:
        submit(store, make_order())
        campaign = store.campaigns.fetch()[0]
        gone = {"host": socket.gethostname(), "pid": 2**22 + 1, "started_at": 1.0}
        assert store.campaigns.note(campaign.id, CampaignState.RUNNING, "", gone)
    for command in (["campaign", "list"], ["campaign", "show", campaign.name], ["sweep", "list"]):
        done = run(home, [str(FARM), *command], _let_no_file_grow)
        assert done.returncode == 0, done.stderr
    with Store(path) as store:
        assert store.campaigns.require(campaign.name).state is CampaignState.RUNNING
    assert home.run("campaign", "list").code == 0
    with Store(path) as store:
        assert store.campaigns.require(campaign.name).state is CampaignState.INTERRUPTED


def _let_no_file_grow() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def test_a_reader_that_leaves_early_is_no_error_to_talk_about(shared: Home) -> None:
    """`farm model zoo | head -1` prints a line and no traceback."""
    for options in ("", "--json"):
        pipes = f"'{FARM}' model zoo {options} | true; '{FARM}' model zoo {options} | head -1"
        done = run(shared, ["bash", "-c", pipes])
        assert len(done.stdout.splitlines()) == 1
        assert done.stderr == ""


@pytest.mark.core
def test_an_output_that_is_full_is_an_error(shared: Home) -> None:
    """`farm model zoo > /dev/full` fails and says why, in words."""
    with pathlib.Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [str(FARM), "model", "zoo", "--json"],
            env=shared.environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 3
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_what_is_known_without_a_farm_is_listed(home: Home) -> None:
    """The zoo and empty lists come as a table and as one JSON document."""
    assert "tiny-cnn" in home.run("model", "zoo").out
    assert "tiny-cnn" in [model["name"] for model in home.run("model", "zoo", "--json").json()]
    assert "no records yet" in home.run("record", "list").out
    assert home.run("record", "list", "--json").json() == []
    assert "no boards yet" in home.run("board", "list").out
    assert home.run("board", "list", "--json").json() == []
