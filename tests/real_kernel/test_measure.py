"""A campaign and a sweep on the board from start to end: what they measure there is slow, and what they say is not."""

from __future__ import annotations

from tests.real_kernel.conftest import NAME, PROVISION_TIMEOUT_S, TYPE, Site

CAMPAIGN = f"""\
name: real
models: tiny-cnn
boards: {{ types: {TYPE} }}
budget: {{ trials: 4 }}
search: {{ tuner: random }}
measure: {{ repeat: 2, min_repeat: 5ms, verify_top: 1 }}
"""


def test_a_campaign_and_a_sweep_of_a_small_model(provisioned: Site) -> None:
    """Candidates are measured, a winner is verified, clocks are swept, and nothing of it is called simulated."""
    home = provisioned.home
    (home.path / "real.yaml").write_text(CAMPAIGN)
    run = home.run("campaign", "run", "real.yaml", "--json", timeout_s=PROVISION_TIMEOUT_S, FARM_BATCH="2")
    assert run.code == 0, run.err
    shown = home.run("campaign", "show", "real", "--json").json()
    assert (shown["state"], shown["progress"]["counted"]) == ("finished", 4)
    assert any(each["median_s"] for each in shown["winners"])
    swept = home.run(
        *("sweep", "run", "tiny-cnn", "--board", NAME, "--cpu-freqs", "921.6MHz,1479MHz", "--cores", "0-3"),
        *("--exhaustive", "--window", "2s", "--json"),
        timeout_s=PROVISION_TIMEOUT_S,
    )
    # The times of an emulated processor may void the points: what they were measured on is what counts here.
    assert swept.code in (0, 1), swept.err
    document = swept.json()
    assert document["board"]["simulated"] is False
    assert document["grid"]["measured"] >= 1
