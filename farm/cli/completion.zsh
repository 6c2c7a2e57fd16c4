#compdef farm
_farm_completion() {
    local -a found
    found=(${(f)"$(VARIABLE=zsh farm "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then _describe farm found; else _files; fi
}
compdef _farm_completion farm
