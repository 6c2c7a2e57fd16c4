"""Without a board at hand: a virtual one runs its own aarch64 code, and its packages are for the real one."""

from __future__ import annotations

from tests.acceptance.conftest import Home


def test_a_virtual_board_leads_to_a_wheel_for_a_real_one(home: Home) -> None:
    """One command: boards made, tuned, compiled, checked against ONNX Runtime in the emulator, packed. A second
    measurement says the same.
    """
    out = home.path / "packages"
    wanted = ("tune", "tiny-cnn", "--board-type", "jetson-nano", "--virtual", "--trials", "8")
    done = home.run(*wanted, "--compile", str(out), "--json")
    assert done.code == 0, done.err
    document = done.json()
    assert document["trials"]["ok"] == 8
    assert {each["name"] for each in document["boards"]} <= {"virtual-jetson-nano-1", "virtual-jetson-nano-2"}
    [made] = document["artifacts"]
    assert made["matches"]
    [wheel] = out.glob("*.whl")
    assert (str(wheel), wheel.name.endswith("_aarch64.whl")) == (made["package"], True)
    first, second = (
        home.run("model", "bench", made["folder"], "--board", "virtual-jetson-nano-1", "--json").json()
        for _ in range(2)
    )
    assert first["models"] == second["models"]
    # A model of the core has no first-time costs, so no first inference is reported.
    assert {each["first_s"] for each in first["models"][0]["variants"].values() if each["latency_s"]} == {None}
    home.expect_no_processes()
