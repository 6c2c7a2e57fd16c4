"""Campaign files: what they may say, and what is said when they are wrong."""

from __future__ import annotations

import pathlib

import pytest

from device_agent.protocol import EVERY_CLUSTER
from farm.campaign.plan_models import read_models
from farm.campaign.spec import CampaignFile, PointSpec, read_campaign
from farm.errors import UsageError

ROOT = pathlib.Path(__file__).parents[2]

GOOD = """\
name: nightly
models: [mlp]
boards: {types: [jetson-nano]}
budget: {trials: 100}
"""


def read(folder: pathlib.Path, text: str) -> CampaignFile:
    path = folder / "campaign.yaml"
    path.write_text(text)
    return read_campaign(path)


def refuse(folder: pathlib.Path, text: str) -> list[str]:
    """What is said of a campaign file with this text, line by line, without the file's name."""
    with pytest.raises(UsageError) as caught:
        read(folder, text)
    return [line.removeprefix(f"{folder / 'campaign.yaml'} ") for line in caught.value.message.splitlines()]


def test_the_example_can_be_read() -> None:
    """The example that comes with the farm says what it seems to say."""
    spec = read_campaign(ROOT / "inventory" / "campaign.example.yaml").spec
    assert [model.called for model in spec.models] == ["resnet18", "mobilenet_v2"]
    assert (spec.boards.types, spec.boards.labels) == (("jetson-nano", "jetson-tx2"), {"site": "lab"})
    assert spec.operating_points == (
        PointSpec(),
        PointSpec(power_mode="MAXN"),
        PointSpec(cpu_freq_hz={EVERY_CLUSTER: 1_428_000_000}),
    )
    assert (spec.budget.wall_clock, spec.budget.board_hours, spec.budget.per_workload) == (21600.0, 20.0, 512)
    assert (spec.search.ops, spec.search.loss, spec.search.seed) == ((), "rank", 7)
    assert (spec.measure.min_repeat, spec.measure.timeout, spec.measure.verify_top) == (0.1, 10.0, 3)


def test_little_is_enough(tmp_path: pathlib.Path) -> None:
    """Name, models, boards and one limit make a campaign; one model, type or point needs no list."""
    spec = read(tmp_path, GOOD).spec
    assert spec.operating_points == (PointSpec(),)
    assert spec.search.tuner == "xgb"
    assert spec.search.warm_start
    short = GOOD.replace("[mlp]", "mlp").replace("[jetson-nano]", "jetson-nano") + "operating_points: default\n"
    assert read(tmp_path, short).spec == spec


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("default", PointSpec()),
        ("{cpu_freq_hz: {a57: 1000000}, gpu_freq_hz: 5}", PointSpec(cpu_freq_hz={"a57": 1_000_000}, gpu_freq_hz=5)),
        ("{cores: [0, 2]}", PointSpec(cores=(0, 2))),
        ("{cores: '0,3-5'}", PointSpec(cores=(0, 3, 4, 5))),
        ("{power_mode: 5W, memory_freq_hz: 204000000}", PointSpec(power_mode="5W", memory_freq_hz=204_000_000)),
    ],
)
def test_points(tmp_path: pathlib.Path, written: str, expected: PointSpec) -> None:
    """A point is `default` or any of the clocks; cores are written as a list or as the kernel writes them."""
    assert read(tmp_path, GOOD + f"operating_points: [{written}]\n").spec.operating_points == (expected,)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("budget", "budgets", "line 4: unknown key budgets; did you mean budget?"),
        ("trials", "trails", "line 4: unknown key budget.trails; did you mean trials?"),
        ("{trials: 100}", "{}", "line 4: budget: a budget needs a limit: trials, wall_clock, board_hours, per_"),
        ("100", "0", "line 4: budget.trials: it must be at least 1 (it is 0)"),
        ("100", "true", "line 4: budget.trials: it must be a whole number"),
        ("trials: 100", "wall_clock: 0h", "line 4: budget.wall_clock: it must be a duration above 0"),
        ("trials: 100", "wall_clock: 7200", "line 4: budget.wall_clock: '7200' has no unit: 7200s, 7200ms or 7200m?"),
        ("trials: 100", "wall_clock: soon", "line 4: budget.wall_clock: it must be a duration above 0"),
        ("trials: 100", "wall_clock: [6]", "line 4: budget.wall_clock: a duration is needed here"),
        ("trials: 100", "board_hours: 0", "line 4: budget.board_hours: it must be more than 0"),
        ("trials: 100", "board_hours: .inf", "line 4: budget.board_hours: it must be a finite number"),
        ("trials: 100", "per_workload: -1", "line 4: budget.per_workload: it must be at least 1"),
        ("nightly", "../nightly", "line 1: name: it must be up to 63 letters, digits"),
        ("name: nightly\n", "", "line 1: the key name is missing"),
        ("[mlp]", "[]", "line 2: models: at least one is needed here"),
        ("[mlp]", "[mpl]", "line 2: models.0: no zoo model is called 'mpl'; there are squeezenet1.1"),
        ("[mlp]", "[mlp, {zoo: mlp}]", "line 2: two models are called mlp; give one of them a `name` of its own"),
        ("[mlp]", "[a/x.onnx, x.tflite]", "line 2: two models are called x"),
        ("[mlp]", "[{zoo: mlp, path: m.onnx}]", "line 2: models.0: a model is a name from the zoo, or has one of"),
        ("[mlp]", "[{zoo: mlp, batch: 0}]", "line 2: models.0.batch.0: it must be at least 1"),
        ("[mlp]", "[{zoo: mlp, batch: [2, 2]}]", "line 2: models.0: the batch 2 is given twice"),
        (
            "[mlp]",
            "[{zoo: mlp, shape: {data: [8, 64]}, batch: [1, 4]}]",
            "line 2: models.0: the shape of data begins with 8, which is not among the batches",
        ),
        ("[jetson-nano]", "[]", "line 3: boards.types: at least one is needed here"),
        ("[jetson-nano]", "[a, a]", "line 3: boards.types: the type a is named twice"),
        ("{types", "{labels: {rack: 1}, types", "line 3: boards.labels.rack: text is needed here; write it in quotes"),
    ],
)
def test_wrong_keys_and_values(tmp_path: pathlib.Path, old: str, new: str, message: str) -> None:
    """Each mistake is reported with its line and key."""
    assert message in "\n".join(refuse(tmp_path, GOOD.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("operating_points: [defalt]", "operating_points.0: a point is `default` or clocks; a power mode is written"),
        ("operating_points: [null]", "operating_points.0: a point without clocks is written `default`"),
        ("operating_points: []", "operating_points: at least one is needed here"),
        ("operating_points: [default, {}]", "this operating point is listed twice"),
        ("operating_points: [{power: MAXN}]", "unknown key operating_points.0.power; did you mean power_mode?"),
        ("operating_points: [{cpu_freq_hz: 1.4GHz}]", "operating_points.0.cpu_freq_hz: whole Hz are needed here"),
        ("operating_points: [{cpu_freq_hz: 0}]", "operating_points.0.cpu_freq_hz.*: it must be more than 0"),
        ("operating_points: [{cores: 4}]", "operating_points.0.cores: CPU numbers are needed here"),
        ("operating_points: [{cores: some}]", "operating_points.0.cores: it names no CPUs"),
        ("operating_points: [{cores: []}]", "operating_points.0.cores: at least one is needed here"),
        ("search: {tuner: ga, loss: rank}", "search: loss has no meaning for the tuner ga"),
        (
            "search: {tuner: xbg}",
            "search.tuner: it must be 'random', 'ga', 'xgb', 'droplet' or 'grid' (it is 'xbg'); did you mean xgb?",
        ),
        ("search: {ops: [all, dense]}", "search: ops are `all` or operators, not both"),
        ("search: {early_stopping: 0}", "search.early_stopping: it must be at least 1"),
        ("measure: {min_repeat: 0ms}", "measure.min_repeat: it must be a duration above 0"),
        ("measure: {repeats: 3}", "unknown key measure.repeats; did you mean repeat?"),
    ],
)
def test_wrong_sections(tmp_path: pathlib.Path, more: str, message: str) -> None:
    """The same holds for the sections that may be left out; each of these is on line 5."""
    assert f"line 5: {message}" in "\n".join(refuse(tmp_path, GOOD + more + "\n"))


def test_all_mistakes_are_told_at_once(tmp_path: pathlib.Path) -> None:
    """Mistakes come in the order of their lines, all in one error."""
    told = refuse(
        tmp_path, "name: -n\nmodels:\n  - mlp\n  - nil\nboards:\n  types: a\n  label: {}\nbudget: {trials: 0}\n"
    )
    assert [line.partition(":")[0] for line in told] == ["line 1", "line 4", "line 7", "line 8"]


def test_batches_are_models_of_their_own(tmp_path: pathlib.Path) -> None:
    """Each batch makes a variant with the batch in the first place of every input, in place of any earlier value."""
    models, faults = read_models(
        read(tmp_path, GOOD.replace("[mlp]", "[{zoo: mlp, shape: {data: [1, 64]}, batch: [1, 4]}, tiny-cnn]"))
    )
    assert not faults
    assert [(each.name, each.inputs[0].static_shape) for each in models] == [
        ("mlp batch 1", (1, 64)),
        ("mlp batch 4", (4, 64)),
        ("tiny-cnn", (1, 3, 16, 16)),
    ]
    assert models[0].source.sha256 == models[1].source.sha256
    assert models[1].least_bytes - models[0].least_bytes == 3 * 64 * 4


def test_models_are_sought_beside_the_file(tmp_path: pathlib.Path) -> None:
    """A relative path starts at the campaign file's folder; a missing model, or no model, is reported as such."""
    from farm.models import zoo

    (tmp_path / "own.onnx").write_bytes(zoo.ZOO["mlp"].build())
    (tmp_path / "text.onnx").write_text("hello")
    models, faults = read_models(
        read(tmp_path, GOOD.replace("[mlp]", "[own.onnx, gone.onnx, {path: text.onnx}, ~missing-user/m.onnx]"))
    )
    assert [each.name for each in models] == ["own"]
    assert [place for place, _ in faults] == [("models", 1), ("models", 2), ("models", 3)]
    assert "gone: no such file" in faults[0][1]
    assert "is not an ONNX file" in faults[1][1]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{zoo: mlp, shape: {dta: [1, 64]}}", "the model has no input 'dta'. Its inputs: data (1, 64) float32."),
        ("{zoo: mlp, shape: {data: [1, 65]}}", "shape data=1,65 changes a dimension that the model fixes"),
        ("{zoo: mlp, shape: {data: [1, 65]}, batch: 4}", "shape data=4,65 changes a dimension that the model fixes"),
        ("{zoo: mlp, shape: {data: []}, batch: 2}", "has 0 dimensions"),
    ],
)
def test_shapes_that_a_model_cannot_have(tmp_path: pathlib.Path, model: str, message: str) -> None:
    """A shape is checked against the model's own, in the words of the file and not of an option."""
    _, faults = read_models(read(tmp_path, GOOD.replace("[mlp]", f"[{model}]")))
    assert message in faults[0][1]
    assert "--" not in faults[0][1]
