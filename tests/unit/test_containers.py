"""The recipes of images and what runs them: pinned, without root, as published schemas and our own commands have it."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from device_agent.options import make_parser
from farm.cli.main import make_app

ROOT = pathlib.Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCHEMAS = pathlib.Path(__file__).with_name("schemas")
RECIPE = DEPLOY / "images" / "Containerfile"
IMAGES = ("coordinator", "builder", "agent")
# Of KubeRay's own definition (a megabyte) only these keys are used; its pods are Kubernetes' pods.
KUBERAY = {"headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling", "autoscalerOptions", "rayVersion"}
GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def read_stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage of the recipe, by its name, with those of the stage that it begins from."""
    stages: dict[str, list[tuple[str, str]]] = {"": []}
    current = stages[""]
    for line in re.sub(r"(?m)^#.*\n", "", RECIPE.read_text()).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = stages[name] = list(stages.get(base, []))
        if word:
            current.append((word, rest.strip()))
    return stages


def find_last(stage: list[tuple[str, str]], word: str) -> str:
    return [rest for name, rest in stage if name == word][-1]


def run_by(stage: list[tuple[str, str]]) -> list[list[str]]:
    commands = [json.loads(rest[rest.index("[") :]) for word, rest in stage if word in ("CMD", "ENTRYPOINT")]
    return [*commands, json.loads(find_last(stage, "HEALTHCHECK").partition("CMD ")[2])]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_no_root_and_says_how_it_is(image: str) -> None:
    """It runs as a number that is not root's, with a health check, and ends by a signal that we obey."""
    stage = read_stages()[image]
    assert re.fullmatch(r"[1-9]\d{4}:[1-9]\d{4}", find_last(stage, "USER"))
    assert "--timeout=" in find_last(stage, "HEALTHCHECK")
    assert find_last(stage, "STOPSIGNAL") == "SIGTERM"
    last_root = max(number for number, (word, _) in enumerate(stage) if word in ("RUN", "COPY"))
    assert last_root < [word for word, _ in stage].index("USER")


def test_what_an_image_is_made_of_is_pinned() -> None:
    """Wheels come by hash, nothing by an address; bases and what is copied are named here and exist."""
    stages = read_stages()
    for word, rest in (each for stage in stages.values() for each in stage):
        assert word != "ADD"
        assert "://" not in rest
        if word == "FROM":
            assert rest.split(" ")[0] in ("${BASE}", *stages)
        if word == "COPY" and not rest.startswith("--from="):
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
        for command in re.findall(r"pip (?:install|download) [^&]*", rest) if word == "RUN" else ():
            assert "--require-hashes --requirement requirements/" in command or "--no-index" in command
            assert "--no-index" in command or "--only-binary=:all: --no-deps" in command
    assert re.fullmatch(r"BASE=[a-z]+:[a-z0-9.-]+", find_last(stages[""], "ARG")), "a name without a host"


def test_images_run_commands_that_there_are() -> None:
    """What an image starts and asks of itself is what the command lines take."""
    farm = [words[1:] for image in IMAGES for words in run_by(read_stages()[image]) if words[0] == "farm"]
    assert len(farm) == 2
    for words in farm:
        make_app(words[0])  # raises for no command
        context = typer_command(words[0]).make_context(words[0], words[1:])
        assert context.args == []
    serve = run_by(read_stages()["agent"])[0]
    assert serve[:3] == ["python3", "-m", "device_agent"]
    assert make_parser().parse_args(serve[3:]).command == "serve"


def typer_command(name: str) -> Any:
    """A command of the farm's, as click has it."""
    import typer

    group: Any = typer.main.get_command(make_app(name))
    return group.commands[name]


def definition(name: str) -> Any:
    schemas = json.loads((SCHEMAS / "kubernetes.json").read_text())
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": schemas["$defs"]})


def read_kubernetes() -> Iterator[dict[str, Any]]:
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def find_pods(thing: dict[str, Any]) -> list[dict[str, Any]]:
    spec = thing["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]] if thing["kind"] == "RayCluster" else [spec]
    return [group["template"] for group in groups if "template" in group]


def test_kubernetes_takes_what_is_described() -> None:
    """Objects are as Kubernetes' published schemas have them, KubeRay's pods too; an unknown key is found out."""
    kinds = []
    for thing in read_kubernetes():
        kinds.append(thing["kind"])
        if thing["apiVersion"] == "ray.io/v1":
            assert set(thing["spec"]) <= KUBERAY
            for group in (thing["spec"]["headGroupSpec"], *thing["spec"]["workerGroupSpecs"]):
                assert set(group) <= GROUP
                assert all(isinstance(value, str) for value in group["rayStartParams"].values())
                definition("io.k8s.api.core.v1.PodTemplateSpec").validate(group["template"])
            continue
        group = "apps" if thing["apiVersion"] == "apps/v1" else "core"
        check = definition(f"io.k8s.api.{group}.v1.{thing['kind']}")
        check.validate(thing)
        assert not check.is_valid(thing | {"spec": thing["spec"] | {"replica": 1}})
    assert sorted(kinds) == ["RayCluster", "Service", "StatefulSet"]


def test_pods_have_no_root_and_no_more_than_they_need() -> None:
    """Every container is one of our images, without root and capabilities; mounts name volumes that there are."""
    for thing in read_kubernetes():
        for pod in (template["spec"] for template in find_pods(thing)):
            assert pod["securityContext"]["runAsNonRoot"] is True
            claimed = [each["metadata"]["name"] for each in thing["spec"].get("volumeClaimTemplates", ())]
            volumes = {each["name"] for each in pod["volumes"]} | set(claimed)
            for container in pod["containers"]:
                assert container["image"].removeprefix("localhost/tvm-farm-") in IMAGES
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert {each["name"] for each in container["volumeMounts"]} <= volumes


def test_compose_takes_what_is_described() -> None:
    """The file is as the Compose specification has it; its services are our images, and PostgreSQL's."""
    document = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    check = jsonschema.Draft7Validator(json.loads((SCHEMAS / "compose.json").read_text()))
    check.validate(document)
    assert not check.is_valid(document | {"service": {}})
    images = {name: service["image"] for name, service in document["services"].items()}
    assert images.pop("postgresql").startswith("${POSTGRES_IMAGE:-postgres:")
    assert images == {name: f"localhost/tvm-farm-{name}" for name in ("coordinator", "builder")}
    for service in document["services"].values():
        assert set(service.get("secrets", ())) <= set(document["secrets"])
        named = [each for each in service.get("volumes", ()) if not each.startswith(("$", "/", ".", "~"))]
        assert {each.partition(":")[0] for each in named} <= set(document["volumes"])
