_farm_completion() {
    local IFS=$'\n'
    COMPREPLY=($(VARIABLE=bash farm "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _farm_completion farm
