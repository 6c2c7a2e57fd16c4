# Says who logs in, and what is installed for the whole system at $prefix. Reads only.
say() { printf '%s=%s\n' "$1" "$2"; }
say uid "$(id -u)"; say home "${HOME:-/}"
if [ "$(id -u)" != 0 ]; then
  if ! command -v sudo >/dev/null; then say refused 'there is no sudo'
  elif said=$(sudo -n true 2>&1); then say sudo 1
  else say refused "$(printf %s "$said" | tr '\n' ' ')"; fi
fi
if [ -d /run/systemd/system ]; then say systemd 1; fi
if [ -f "$prefix/$marker" ]; then say standing "$(readlink "$prefix/current" 2>/dev/null | sed 's,^versions/,,')"; fi
