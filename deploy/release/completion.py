"""Write farm/cli/completing.json from the commands themselves: what `farm/cli/completing.py` answers shells from.

One thing has one name in all commands (docs/commands.md), so an option's name, or what stands for an argument, says
what its values are.
"""

from __future__ import annotations

import json
import re
import typing
from typing import Any

import typer.main

from farm.cli import main
from farm.cli.completing import TABLE
from farm.inventory.board_types import load_board_types
from farm.models.zoo import ZOO

_OPTIONS = {"--board": "boards", "--model": "models", "--board-type": "types", "--campaign": "campaigns"}
# Of arguments called NAME: by noun.
_NAMED = {"board": "boards", "campaign": "campaigns"}


def make_table() -> dict[str, Any]:
    """The commands with their options and arguments, and the names that are known without a store."""
    whole: Any = typer.main.get_command(main.make_app())
    lines = {name: entry.line for name, entry in main._COMMANDS.items()}
    commands = {name: _describe(whole.commands[name], lines[name], name) for name in lines}
    top = _describe(whole, "", "") | {"commands": commands}
    return {"commands": top, "names": {"models": list(ZOO), "types": sorted(load_board_types())}}


def _describe(command: Any, line: str, noun: str) -> dict[str, Any]:
    node: dict[str, Any] = {"help": line}
    if verbs := getattr(command, "commands", None):
        node["commands"] = {
            verb: _describe(each, _first_sentence(each.help), noun) for verb, each in verbs.items() if not each.hidden
        }
    given = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    node["options"] = [_describe_option(each) for each in given]
    node["options"].append({"names": ["--help", "-h"], "help": "Show this message and exit."})
    arguments = [_find_kind(each, noun) for each in command.params if each.param_type_name == "argument"]
    return node | ({"arguments": arguments} if any(arguments) else {})


def _describe_option(option: Any) -> dict[str, Any]:
    said = {"names": [*option.opts, *option.secondary_opts], "help": _first_sentence(option.help)}
    if option.is_flag or option.count:
        return said
    kind = next((_OPTIONS[name] for name in option.opts if name in _OPTIONS), "") or _find_choices(option)
    # "files": the shell's own completion, which starts where nothing is found.
    return said | {"takes": kind or "files"}


def _find_kind(argument: Any, noun: str) -> str:
    metavar = str(argument.metavar or "")
    if metavar.startswith("MODEL"):
        return "models"
    return _NAMED.get(noun, "") if metavar.startswith("NAME") else _find_choices(argument)


def _find_choices(parameter: Any) -> str:
    words = [each for each in typing.get_args(parameter.type_descriptor.annotation) if isinstance(each, str)]
    metavar = str(parameter.metavar or "|".join(words))
    return metavar if re.fullmatch(r"[a-z0-9-]+(\|[a-z0-9-]+)+", metavar) else ""


def _first_sentence(text: str | None) -> str:
    return re.split(r"(?<=[.;:]) ", " ".join((text or "").split()), maxsplit=1)[0].rstrip(".;:")


def make_text() -> str:
    """Return the file's text."""
    return json.dumps(make_table(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TABLE.write_text(make_text(), encoding="utf-8")
