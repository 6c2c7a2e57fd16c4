"""Without a board at hand: a virtual one runs its own aarch64 code, and its packages are for the real one."""

from __future__ import annotations

from tests.acceptance.conftest import Home

OWN = {"FARM_VIRTUAL_CODE": "emulated"}


def test_a_virtual_board_leads_to_a_wheel_for_a_real_one(home: Home) -> None:
    """Tuned, compiled, checked against ONNX Runtime in the emulator, packed; a second measurement says the same."""
    assert home.run("board", "add", "nano-01", "--virtual", "jetson-nano", **OWN).code == 0
    done = home.run("tune", "tiny-cnn", "--board-type", "jetson-nano", "--trials", "8", "--json", **OWN)
    assert done.code == 0, done.err
    assert done.json()["trials"]["ok"] == 8
    artifact, wheels = home.path / "artifact", home.path / "wheels"
    wanted = ("model", "compile", "tiny-cnn", "--board-type", "jetson-nano", "--simulated", "--out", str(artifact))
    assert home.run(*wanted, **OWN).code == 0
    assert home.run("model", "verify", str(artifact), "--board", "nano-01", **OWN).code == 0
    packed = home.run("model", "package", str(artifact), "--format", "wheel", "--out", f"{wheels}/", **OWN)
    assert packed.code == 0, packed.err
    [wheel] = wheels.iterdir()
    assert wheel.name.endswith("_aarch64.whl")
    first, second = (
        home.run("model", "bench", str(artifact), "--board", "nano-01", "--json", **OWN).json() for _ in range(2)
    )
    assert first["models"] == second["models"]
    home.expect_no_processes()
