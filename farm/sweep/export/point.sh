#!/bin/sh
#@comments@
#
# Usage, as root on the board:
#   sh FILE set                      set the clocks; what was before is kept in /run
#   sh FILE restore                  put it back
#   sh FILE run COMMAND [ARGUMENT]   set, run the command, restore however it ends
# If something does not take, everything is put back and the exit code is 1. Do not run it while a farm's agent holds
# the clocks. After `kill -9` of a `run`, use `restore`.
set -u

ROOT=${ROOT-}
STATE=${STATE-$ROOT/run/@name@}
NVPMODEL=${NVPMODEL-nvpmodel}
CPUS=$ROOT/sys/devices/system/cpu
DEBUG=$ROOT/sys/kernel/debug

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "error: $*"
    exit 1
}

# Note what a file holds before it is written for the first time. A line is: VALUE PATH.
keep() {
    [ -e "$1" ] || fail "there is no $1 on this board"
    grep -q " $1\$" "$STATE" || printf '%s %s\n' "$(head -n 1 "$1")" "$1" >>"$STATE"
}

write() { printf '%s\n' "$2" >"$1" || fail "$1 does not take $2"; }

put() {
    keep "$1"
    write "$1" "$2"
    [ "$(head -n 1 "$1")" = "$2" ] || fail "$1 stays at $(head -n 1 "$1") and does not become $2"
}

# hold FOLDER LOW HIGH TABLE VALUE: close a clock's limits. Going down, the lower one must move first.
hold() {
    if [ -e "$1/$4" ]; then
        grep -qw "$5" "$1/$4" || fail "$1 has no clock $5; it has $(head -n 1 "$1/$4")"
    fi
    keep "$1/$2"
    keep "$1/$3"
    if [ "$5" -lt "$(head -n 1 "$1/$2")" ]; then
        write "$1/$2" "$5"
        write "$1/$3" "$5"
    else
        write "$1/$3" "$5"
        write "$1/$2" "$5"
    fi
    for limit in "$1/$2" "$1/$3"; do
        [ "$(head -n 1 "$limit")" = "$5" ] || fail "$limit is $(head -n 1 "$limit") and not $5: capped or in use?"
    done
}

# Folders of the CPUs' clocks, one for those that share one.
policies() {
    for cpu; do
        (cd -P "$CPUS/cpu$cpu/cpufreq" 2>/dev/null && pwd -P)
    done | sort -u
}

# hold_cpus KHZ CPU...
hold_cpus() {
    khz=$1
    shift
    found=$(policies "$@")
    [ -n "$found" ] || fail "CPUs $* have no clock that can be set: are they online?"
    for folder in $found; do
        hold "$folder" scaling_min_freq scaling_max_freq scaling_available_frequencies "$khz"
    done
}

keep_cpus() {
    for folder in $(policies "$@"); do
        keep "$folder/scaling_min_freq"
        keep "$folder/scaling_max_freq"
    done
}

# find_gpu [DEVICE...]: the folder of the GPU's clock.
find_gpu() {
    for device; do
        [ -d "$ROOT/sys/class/devfreq/$device" ] && printf '%s\n' "$ROOT/sys/class/devfreq/$device" && return
    done
    for folder in "$ROOT"/sys/class/devfreq/*; do
        name=
        [ ! -e "$folder/device/of_node/name" ] || name=$(tr -d '\000' <"$folder/device/of_node/name")
        case ${name:-${folder##*.}} in
            gpu | gm20b | gp10b | gv11b | ga10b) printf '%s\n' "$folder" && return ;;
        esac
    done
}

# hold_gpu HZ [DEVICE...]: a GPU without power would not keep its clock.
hold_gpu() {
    hz=$1
    shift
    gpu=$(find_gpu "$@")
    [ -n "$gpu" ] || fail "this board shows no GPU clock"
    if [ -e "$gpu/device/railgate_enable" ]; then
        put "$gpu/device/railgate_enable" 0
    elif [ -e "$gpu/device/power/control" ]; then
        put "$gpu/device/power/control" on
    fi
    hold "$gpu" min_freq max_freq available_frequencies "$hz"
}

keep_gpu() {
    gpu=$(find_gpu "$@")
    [ -n "$gpu" ] || return 0
    keep "$gpu/min_freq"
    keep "$gpu/max_freq"
}

# hold_memory HZ: firmware drops a rate that it does not have without an error.
hold_memory() {
    for cap in "$ROOT/sys/kernel/nvpmodel_emc_cap/emc_iso_cap" "$ROOT/sys/kernel/nvpmodel_clk_cap/emc"; do
        [ -e "$cap" ] || continue
        now=$(head -n 1 "$cap")
        [ "$now" -eq 0 ] || [ "$now" -ge "$1" ] || put "$cap" "$1"
    done
    if [ -e "$DEBUG/clk/override.emc/clk_state" ]; then
        keep "$DEBUG/clk/override.emc/clk_state"
        write "$DEBUG/clk/override.emc/clk_update_rate" "$1"
        write "$DEBUG/clk/override.emc/clk_state" 1
        rate=$DEBUG/tegra_bwmgr/emc_rate
    elif [ -e "$DEBUG/bpmp/debug/clk/emc/mrq_rate_locked" ]; then
        put "$DEBUG/bpmp/debug/clk/emc/mrq_rate_locked" 1
        write "$DEBUG/bpmp/debug/clk/emc/rate" "$1"
        write "$DEBUG/bpmp/debug/clk/emc/state" 1
        rate=$DEBUG/bpmp/debug/clk/emc/rate
    else
        fail "this board shows no memory clock: is debugfs mounted?"
    fi
    [ ! -e "$rate" ] || [ "$(head -n 1 "$rate")" = "$1" ] ||
        say "warning: the memory clock is $(head -n 1 "$rate") and not $1: raised for the CPU's clock, or capped"
}

# power_mode ID
power_mode() {
    before=$("$NVPMODEL" -q | sed -n '$p')
    case $before in
        '' | *[!0-9]*) fail "nvpmodel does not say which mode is set" ;;
    esac
    printf '%s nvpmodel\n' "$before" >>"$STATE"
    "$NVPMODEL" -m "$1" </dev/null || fail "nvpmodel did not set mode $1"
}

cores_on() {
    for cpu; do
        [ ! -e "$CPUS/cpu$cpu/online" ] || put "$CPUS/cpu$cpu/online" 1
    done
}

cores_off() {
    for cpu; do
        put "$CPUS/cpu$cpu/online" 0
    done
}

set_point() {
#@settings@
}

restore() {
    [ -e "$STATE" ] || fail "nothing to restore: there is no $STATE"
    # Twice: a limit may be refused until its counterpart has moved. A core that goes offline takes its clock along.
    sed -n 's/ nvpmodel$//p' "$STATE" | while read -r mode; do
        "$NVPMODEL" -m "$mode" </dev/null || say "error: nvpmodel did not set mode $mode again"
    done
    for pass in 1 2; do
        left=
        while read -r value file; do
            [ -e "$file" ] || continue
            { printf '%s\n' "$value" >"$file"; } 2>/dev/null
            [ "$(head -n 1 "$file")" = "$value" ] || left="$left $file"
        done <"$STATE"
    done
    if [ -n "$left" ]; then
        say "error: not as before after $pass tries:$left; kept in $STATE"
        return 1
    fi
    rm -f "$STATE"
}

# On any error until the point is set, and at the end of a command: restore everything.
give_back() {
    status=$?
    trap - EXIT
    trap '' INT TERM HUP
    restore || status=1
    exit "$status"
}

begin() {
    [ -n "$ROOT" ] || [ "$(id -u)" -eq 0 ] || fail "run this as root"
    (set -C && : >"$STATE") 2>/dev/null || fail "$STATE is there or cannot be written: set already? then \`restore\` first"
    trap give_back EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    set_point
}

run() {
    exec 3<&0
    "$@" <&3 3<&- &
    child=$!
    trap 'kill "$child" 2>/dev/null' INT TERM HUP
    wait "$child"
    code=$?
    # A signal ends `wait` early: wait again until the command itself has ended.
    while kill -0 "$child" 2>/dev/null; do
        wait "$child"
        code=$?
    done
    exit "$code"
}

case ${1-} in
    set)
        begin
        trap - EXIT INT TERM HUP
        ;;
    restore) restore ;;
    run)
        shift
        [ $# -gt 0 ] || fail "run what?"
        begin
        run "$@"
        ;;
    *)
        say "usage: sh $0 set | restore | run COMMAND [ARGUMENT]..."
        exit 2
        ;;
esac
