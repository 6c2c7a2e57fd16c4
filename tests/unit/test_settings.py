"""Settings from the environment."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from farm import settings
from farm.errors import UsageError


def test_settings_have_defaults_variables_and_meanings() -> None:
    """Nothing has to be set. Names are unique, begin with FARM_, and each says what it means. Zero build workers means
    one per core. Version 0.2 had virtual boards run this machine's code on request.
    """
    assert settings.load({}) == settings.Settings()
    fields = dataclasses.fields(settings.Settings)
    names = [field.metadata["env"] for field in fields]
    assert len(set(names)) == len(names)
    assert all(name.startswith("FARM_") for name in names)
    assert all(len(field.metadata["meaning"]) > 10 for field in fields)
    assert settings.load({"FARM_BUILD_WORKERS": "0"}).build_workers == 0
    with pytest.raises(UsageError, match="FARM_VIRTUAL_CODE is gone"):
        settings.load({"FARM_VIRTUAL_CODE": "native"})
    assert settings.load({"FARM_VIRTUAL_CODE": "emulated"}) == settings.Settings()


@pytest.mark.parametrize("field", dataclasses.fields(settings.Settings), ids=lambda field: field.name)
def test_every_variable_sets_its_setting(field: dataclasses.Field[object]) -> None:
    """The value of each variable arrives with the type of its default."""
    known = field.metadata["known"]
    text = known[-1] if known else {str: "/none", int: "7", float: "0.25"}[type(field.default)]
    loaded = settings.load({field.metadata["env"]: text})
    value = getattr(loaded, field.name)
    assert type(value) is type(field.default)
    assert str(value) == text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("FARM_BATCH", "many", "not a whole number"),
        ("FARM_BATCH", "2.5", "not a whole number"),
        ("FARM_BATCH", "0", "must be > 0"),
        ("FARM_BATCH", "-1", "must be > 0"),
        ("FARM_SEED", "-1", "must be >= 0"),
        ("FARM_BUILD_TIMEOUT_S", "soon", "not a number"),
        ("FARM_BUILD_TIMEOUT_S", "nan", "must be finite"),
        ("FARM_BUILD_TIMEOUT_S", "inf", "must be finite"),
        ("FARM_ISOLATION", "total", "exclusive, own-core, none"),
        ("FARM_TRACKER_PORT", "70000", "65535"),
    ],
)
def test_an_impossible_value_is_refused_by_name(name: str, text: str, words: str) -> None:
    """The message holds the variable, its value and what is wrong with it."""
    with pytest.raises(UsageError, match=words) as caught:
        settings.load({name: text})
    assert name in str(caught.value)
    assert text in str(caught.value)


def test_home_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """FARM_HOME may be relative, for processes in other folders too; without it the platform's data folder is used."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert settings.load({"FARM_HOME": "~/farm"}).home_path == tmp_path / "farm"
    here = pathlib.Path.cwd()
    assert settings.load({"FARM_HOME": "here"}).home_path == here / "here"
    loaded = settings.load({"FARM_HOME": "here", "FARM_SHARED": "shared"})
    monkeypatch.setenv("FARM_CORE_TYPES", "cores")
    folders = settings.find_folders()
    monkeypatch.chdir("/")  # as processes of the farm do
    assert loaded.home_path == settings.load({"FARM_HOME": str(here / "here")}).home_path
    assert loaded.builds_path == here / "shared" / "builds"
    assert folders["FARM_CORE_TYPES"] == str(here / "cores")
    assert settings.load({}).home_path == tmp_path / ".local/share/tvm-farm"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert settings.load({}).home_path == tmp_path / "data/tvm-farm"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("postgresql://me:secret@host/farm", "must not hold a password"),
        ("postgresql://me@host/farm?password=secret", "must not hold a password"),
        ("postgresql://me@host:many/farm", "is no URL"),
        ("mysql://me@host/farm", "cannot be at mysql"),
        ("/somewhere/farm.db", "is no URL of a PostgreSQL database"),
    ],
)
def test_a_store_that_cannot_be(text: str, words: str) -> None:
    """The URL of a store is PostgreSQL's, and holds nothing secret; no error repeats a password."""
    with pytest.raises(UsageError, match=words) as caught:
        settings.load({"FARM_STORE": text}).store_location  # noqa: B018
    assert "secret" not in str(caught.value)
