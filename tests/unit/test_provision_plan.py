"""What is decided about a board before it is touched, and the texts that it is given."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from farm.errors import PermanentError, UsageError
from farm.inventory.board_types import require_board_type
from farm.provision import scripts, survey
from farm.provision.bundle import Bundle, BundleManifest
from farm.provision.bundle_build import find_agent_source
from farm.provision.layout import ROOT_PREFIX, AgentOptions, Layout, compute_digest, plan_layout, render_files
from farm.provision.plan import check_board, describe_span, plan_removals, plan_steps
from farm.provision.survey import BoardSurvey

NOW = 1_800_000_000.0
BOARD = BoardSurvey(
    arch="aarch64",
    os_name="Ubuntu 18.04",
    glibc="2.27",
    clock_s=NOW,
    free_bytes=4 << 30,
    writable=True,
    pythons={"3.11": "/usr/bin/python3.11"},
)
ROOT = Layout(ROOT_PREFIX, as_root=True, systemd=True)
BARE = Layout("/opt/elsewhere", as_root=True, systemd=False)
HUMBLE = Layout("/home/me/.local/share/tvm-farm-board", as_root=False, systemd=False, home="/home/me")
LAYOUTS = pytest.mark.parametrize("layout", [ROOT, BARE, HUMBLE], ids=["systemd", "supervisor", "login"])
BUNDLE = Bundle(pathlib.Path("x.tar"), BundleManifest("1.0", "aarch64", ("3.11",), "", 100 << 20, {}), 50 << 20)
KEY = BUNDLE.manifest.key
OPTIONS = AgentOptions("nano-01", "jetson-nano", 9090, 9190)


def settled(layout: Layout) -> BoardSurvey:
    files = render_files(layout, OPTIONS)
    return dataclasses.replace(
        BOARD,
        ours=True,
        current=KEY,
        versions=(KEY,),
        started=f"{KEY} {compute_digest(files)}",
        files={file.path: file.sha256 for file in files},
        user_exists=True,
        agent_pid=7,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "armv7l"}, "the board is armv7l"),
        ({"glibc": "2.23"}, "glibc 2.23, TVM's wheels need 2.27"),
        ({"glibc": ""}, "no glibc"),
        ({"lacks": ("flock", "tar")}, "lacks flock, tar"),
        ({"foreign": True}, "holds files that are not ours"),
        ({"writable": False}, "may not write"),
    ],
)
def test_a_board_that_cannot_have_an_agent(change: dict[str, object], message: str) -> None:
    """It is said why, before anything is sent."""
    with pytest.raises(PermanentError, match=message):
        check_board(dataclasses.replace(BOARD, **change), ROOT, NOW)  # type: ignore[arg-type]


def test_notes_tell_what_is_off_or_lacking() -> None:
    """A year behind is no reason not to install. Neither root nor sudo: no clock helper, no start at boot."""
    assert check_board(BOARD, ROOT, NOW + 30) == []
    (note,) = check_board(dataclasses.replace(BOARD, clock_s=NOW - 365.25 * 86400), ROOT, NOW)
    assert note.startswith("its clock is 1.0 years behind")
    assert [describe_span(seconds) for seconds in (5, 120, 7200, 172800)] == ["5 s", "2 min", "2 h", "2 days"]
    (note,) = check_board(BOARD, HUMBLE, NOW)
    assert "no clock helper" in note
    assert "boots" in note


@LAYOUTS
def test_a_settled_board_needs_nothing(layout: Layout) -> None:
    """Running it twice changes nothing."""
    assert not plan_steps(settled(layout), layout, BUNDLE, render_files(layout, OPTIONS)).needed


def test_a_bundle_that_is_still_to_be_made_is_on_no_board() -> None:
    """Its plan sends, installs and switches, on any board; an interpreter goes where there is none."""
    files = render_files(ROOT, OPTIONS)
    for board in (BOARD, settled(ROOT)):
        needed = plan_steps(board, ROOT, None, files).needed
        assert {"send", "install", "switch", "start", "finish"} <= needed
        assert "python" not in needed
    assert "python" in plan_steps(dataclasses.replace(BOARD, pythons={}), ROOT, None, files).needed


def test_an_empty_board_needs_everything_but_a_python() -> None:
    """Its own is used where it is new enough."""
    plan = plan_steps(BOARD, ROOT, BUNDLE, render_files(ROOT, OPTIONS))
    assert plan.needed == {"folder", "send", "install", "user", "services", "switch", "start", "finish"}
    assert (plan.python, plan.series) == ("/usr/bin/python3.11", "3.11")


def test_a_board_with_an_old_python_gets_the_bundles() -> None:
    """Where the bundle has none, `BundleCache` has refused it before."""
    manifest = dataclasses.replace(BUNDLE.manifest, managed_python="cpython-3.11.9-linux-aarch64-gnu")
    bundle = dataclasses.replace(BUNDLE, manifest=manifest)
    plan = plan_steps(dataclasses.replace(BOARD, pythons={}), ROOT, bundle, render_files(ROOT, OPTIONS))
    assert "python" in plan.needed
    assert (plan.python, plan.series) == ("", "3.11")


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ({"agent_pid": None}, {"start", "finish"}),
        ({"started": ""}, {"start", "finish"}),
        ({"files": {}}, {"services", "start", "finish"}),
        ({"current": "0.9-old", "versions": ("0.9-old", KEY)}, {"switch", "start", "finish"}),
        ({"pending": "0.9-old", "versions": ("0.9-old", KEY)}, {"start", "finish"}),
        ({"versions": (), "partial": (KEY,)}, {"send", "install", "finish"}),
        ({"left": ("incoming",)}, {"finish"}),
    ],
)
def test_only_what_is_left_is_done(change: dict[str, object], needed: set[str]) -> None:
    """A run continues where a cut-off one stopped."""
    found = dataclasses.replace(settled(ROOT), **change)  # type: ignore[arg-type]
    assert plan_steps(found, ROOT, BUNDLE, render_files(ROOT, OPTIONS)).needed == needed


def test_a_full_disk_is_seen_before_anything_is_sent() -> None:
    """Bytes and files; a board that has the version already needs no room."""
    files = render_files(ROOT, OPTIONS)
    with pytest.raises(PermanentError, match="the disk is full: 100 MiB free"):
        plan_steps(dataclasses.replace(BOARD, free_bytes=100 << 20), ROOT, BUNDLE, files)
    with pytest.raises(PermanentError, match="only 10 more files"):
        plan_steps(dataclasses.replace(BOARD, free_files=10), ROOT, BUNDLE, files)
    plan_steps(dataclasses.replace(settled(ROOT), free_bytes=0), ROOT, BUNDLE, files)


def test_one_old_version_is_kept() -> None:
    """The one that ran before; after a cut run that is the pending one. What never became whole goes."""
    found = dataclasses.replace(settled(ROOT), versions=("a", "b", KEY), current="b", partial=("c",))
    assert plan_removals(found, KEY) == ("a", "c")
    assert plan_removals(dataclasses.replace(found, current=KEY, pending="a"), KEY) == ("b", "c")
    assert plan_removals(dataclasses.replace(found, current=KEY), KEY) == ("b", "c")


@pytest.mark.parametrize("prefix", ["relative", "/opt", "/", "/opt/a b", "/opt/../etc", "/opt/" + "x" * 80, "/opt/a%b"])
def test_a_prefix_that_cannot_be(prefix: str) -> None:
    """What a shell, systemd or a socket's address would misread is refused, and so is a folder of the system's."""
    with pytest.raises(UsageError, match="cannot be the folder"):
        plan_layout(prefix, 0, False, False, "/root")


def test_installations_have_places_and_names_of_their_own() -> None:
    """Root's and sudo's under /opt, a login's below its home; units from a home would not be seen by systemd. Another
    prefix, other units, folders and users; the usual one has the plain names.
    """
    assert plan_layout("", 0, False, True, "/root") == Layout(ROOT_PREFIX, True, True, "/root")
    assert plan_layout("", 1000, True, True, "/home/me").systemd
    assert plan_layout("", 1000, False, True, "/home/me") == HUMBLE
    with pytest.raises(UsageError, match="cannot run from"):
        plan_layout("/home/me/farm", 0, False, True, "/root")
    assert ROOT.units == ("tvm-farm-clock-helper.service", "tvm-farm-agent.service")
    other = dataclasses.replace(ROOT, prefix="/srv/farm")
    assert not {*other.units, *other.outside, other.user} & {*ROOT.units, *ROOT.outside, ROOT.user}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("prefix", [ROOT_PREFIX, "/srv/farm"])
def test_filled_in_units_are_understood(tmp_path: pathlib.Path, prefix: str) -> None:
    """The service manager takes them without a complaint, under any prefix, and none names another installation."""
    layout = dataclasses.replace(ROOT, prefix=prefix)
    for file in render_files(layout, OPTIONS)[1:]:
        assert "/current/bin/python" in file.text
        text = file.text.replace(f"{prefix}/current/bin", str(pathlib.Path(sys.executable).parent))
        (tmp_path / pathlib.Path(file.path).name).write_text(text)
        if layout.suffix:
            assert "/opt/tvm-farm" not in text
            assert f"--group {layout.user}" in text or f"User={layout.user}" in text
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, tmp_path.glob("*.service"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env=os.environ | {"SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )
    assert not [line for line in done.stderr.splitlines() if "tvm-farm" in line]


def test_a_clock_helper_that_is_started_anew_leaves_the_agent_alone() -> None:
    """The agent wants the helper and comes after it; Requires= would have systemd end its sessions with the helper."""
    helper, agent = render_files(ROOT, OPTIONS)[1:]
    (wants,) = (line for line in agent.text.splitlines() if line.startswith("Wants="))
    assert pathlib.Path(helper.path).name in wants
    assert not {line.partition("=")[0] for line in agent.text.splitlines()} & {"Requires", "BindsTo", "PartOf"}


def test_commands_of_the_docs_find_the_agents_program() -> None:
    """It is not on a login's PATH: where a page runs it over SSH, it names the place where provisioning puts it."""
    docs = pathlib.Path(__file__).parents[2] / "docs"
    pattern = re.compile(r"farm board exec [^`\n]*-- (?:sudo )?(\S*device-agent)\b")
    found = [program for page in docs.rglob("*.md") for program in pattern.findall(page.read_text())]
    assert found
    assert set(found) == {ROOT.below("current/bin/device-agent")}


@LAYOUTS
def test_agents_listen_where_they_were_registered(layout: Layout) -> None:
    """On one port of the board's loopback, and they look for the tracker where the tunnel puts it."""
    text = render_files(layout, OPTIONS)[0].text
    for option in ("nano-01", "jetson-nano", "9090", "127.0.0.1:9190"):
        assert option in text
    assert "--host" not in text


def test_what_starts_on_a_board_is_compiled_when_it_is_installed() -> None:
    """An agent's user may not write bytecode: what is left out would be compiled anew by each start."""
    plan = plan_steps(BOARD, ROOT, BUNDLE, render_files(ROOT, OPTIONS))
    check = re.search(r"-I -c '(import device_agent[^']*)'", scripts.install_version(ROOT, BUNDLE.manifest, plan))
    code = check[1].replace(", tvm.rpc", "") + "; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    folder = find_agent_source()
    own = {".".join(path.relative_to(folder.parent).with_suffix("").parts) for path in folder.rglob("*.py")}
    simulated = {name for name in own if name.startswith(("farm.virtual.", "farm.virtual.emulated."))}
    entry = {name for name in own if name.endswith("__")}
    assert own - simulated - entry - set(done.stdout.split()) == set()


@LAYOUTS
def test_every_script_is_one_that_a_shell_reads(layout: Layout) -> None:
    """No script is sent to a board that its shell would refuse."""
    files = render_files(layout, OPTIONS)
    manifest = dataclasses.replace(BUNDLE.manifest, managed_python="cpython-3.11.9-linux-aarch64-gnu")
    plan = plan_steps(BOARD, layout, BUNDLE, files)
    texts = [
        scripts.make_folder(layout),
        scripts.make_incoming(layout),
        scripts.unpack(layout),
        scripts.install_python(layout, manifest),
        scripts.install_version(layout, manifest, plan),
        scripts.make_user(layout),
        scripts.write_files(layout, files),
        scripts.switch(layout, KEY),
        scripts.start(layout, "stamp", 9090, 10),
        scripts.roll_back(layout, KEY, 9090, 10),
        scripts.finish(layout, ["a", "b"]),
        scripts.clean_up(layout, KEY),
        scripts.uninstall(layout, files),
    ]
    for text in texts:
        done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, check=False, timeout=10)
        assert not done.stderr, text


@pytest.mark.parametrize(
    ("has_node", "made", "said"), [(True, True, "-a -G video tvm-farm"), (True, False, ""), (False, True, "")]
)
def test_the_account_that_was_made_may_use_the_gpu(
    tmp_path: pathlib.Path, has_node: bool, made: bool, said: str
) -> None:
    """It joins the group of the driver's device node, where there is one; another user's account is left alone."""
    for name, does in (("usermod", f'echo "$@" >{tmp_path}/said'), ("stat", "echo video")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    for name, is_there in (("node", has_node), ("made-user", made)):
        if is_there:
            (tmp_path / name).touch()
    (line,) = [each for each in scripts.start(ROOT, "stamp", 9090, 10).splitlines() if "usermod" in each]
    text = line.replace(scripts.GPU_NODE, str(tmp_path / "node"))
    path = f"{tmp_path}:/usr/bin:/bin"
    subprocess.run(["sh", "-eu", "-c", text], cwd=tmp_path, env={"PATH": path}, check=True, timeout=10)
    found = tmp_path / "said"
    assert (found.read_text().strip() if found.exists() else "") == said


def test_a_boards_answer_is_read() -> None:
    """Every fact; a Python that is too new or too old is not one."""
    text = (
        "arch=aarch64\nos=Ubuntu\nglibc=2.27\nclock=1800000000\nfree_kib=1000\nfree_files=\nwritable=1\n"
        "python=3.8 /usr/bin/python3\npython=3.10 /usr/bin/python3.10\npython=3.99 /usr/bin/python3.99\n"
        "ours=1\ncurrent=a\npending=none\nversion=a\nversion=b\npartial=c\nleft=incoming\n"
        "file=abc  /etc/x\nagent_pid=12\n"
    )
    found = survey.parse_survey(text)
    assert found.pythons == {"3.10": "/usr/bin/python3.10"}
    assert (found.versions, found.partial, found.pending, found.agent_pid) == (("a", "b"), ("c",), "none", 12)
    assert (found.free_bytes, found.free_files, found.files) == (1024000, None, {"/etc/x": "abc"})
    with pytest.raises(PermanentError, match="cannot be understood"):
        survey.parse_survey("hello")


def test_a_release_that_nobody_knows_is_no_obstacle() -> None:
    """An operator hears of it, and the board has its agent."""
    (note,) = check_board(
        dataclasses.replace(BOARD, l4t="36.9.0"), ROOT, NOW, require_board_type("jetson-orin-nano-8gb")
    )
    assert "newer than 36.5.0" in note
    found = survey._read("l4t=# R36 (release), REVISION: 4.7, GCID: 1, BOARD: generic\n")
    assert found["l4t"] == ["# R36 (release), REVISION: 4.7, GCID: 1, BOARD: generic"]
