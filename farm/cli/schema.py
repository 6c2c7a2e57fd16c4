"""`farm schema`: what campaign and fleet files may hold, as JSON Schema, for editors and other programs.

The files are checked by the models themselves; a schema says their keys and kinds, not what two of them mean together.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from farm.cli import output
from farm.errors import UsageError

# A file's kind -> the module and the model of its outermost keys.
KINDS = {
    "campaign": ("farm.campaign.spec", "CampaignSpec"),
    "fleet": ("farm.inventory.fleet_document", "Group"),
}
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


@output.command
def schema(
    kind: Annotated[str, typer.Argument(metavar="campaign|fleet", help="The kind of file.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="File to write, instead of stdout.")] = None,
) -> None:
    """Print the JSON Schema of campaign or fleet files, with which editors complete and check them.

    A file names it in its first line: `# yaml-language-server: $schema=campaign.schema.json`.
    """
    text = make_schema(kind)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


def make_schema(kind: str) -> str:
    """The schema of one kind of file, as text. Raises UsageError."""
    if kind not in KINDS:
        raise UsageError(f"there is no schema of {kind!r}", f"Known: {', '.join(KINDS)}.")
    module, name = KINDS[kind]
    model: Any = getattr(importlib.import_module(module), name)
    made = {"$schema": _DIALECT} | model.model_json_schema() | {"title": f"tvm-farm {kind} file"}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"
