function __farm_completion
    set -l words (commandline -opc) (commandline -ct)
    set -l found (VARIABLE=fish farm $words[2..] 2>/dev/null)
    if test -n "$found"
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command farm --no-files --arguments '(__farm_completion)'
