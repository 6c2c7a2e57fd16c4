"""`farm completion SHELL`: the shell's script. `completing.py` answers it."""

from __future__ import annotations

from typing import Annotated

import typer

from farm.cli import output
from farm.cli.completing import VARIABLE
from farm.errors import UsageError

# Each passes the words up to the cursor. Without an answer the shell completes file names.
_SCRIPTS = {
    "bash": """\
_farm_completion() {
    local IFS=$'\\n'
    COMPREPLY=($(VARIABLE=bash farm "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _farm_completion farm
""",
    "zsh": """\
#compdef farm
_farm_completion() {
    local -a found
    found=(${(f)"$(VARIABLE=zsh farm "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then _describe farm found; else _files; fi
}
compdef _farm_completion farm
""",
    "fish": """\
function __farm_completion
    set -l words (commandline -opc) (commandline -ct)
    set -l found (VARIABLE=fish farm $words[2..] 2>/dev/null)
    if test -n "$found"
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command farm --no-files --arguments '(__farm_completion)'
""",
}


@output.command
def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell to write it for.")],
) -> None:
    """Print what makes a shell complete commands, options, and names of boards, board types, campaigns and models.

    For bash: `source <(farm completion bash)`, in ~/.bashrc for always.
    """
    if shell not in _SCRIPTS:
        raise UsageError(f"there is no completion for {shell!r}", f"Known: {', '.join(_SCRIPTS)}.")
    print(_SCRIPTS[shell].replace("VARIABLE", VARIABLE), end="")
