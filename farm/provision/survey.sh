# Says what a board is, and what is installed at $prefix; `agent_listens` is defined before. Reads only.
say() { printf '%s=%s\n' "$1" "$2"; }
say arch "$(uname -m)"
say kernel "$(uname -sr)"
say os "$(. /etc/os-release 2>/dev/null; echo "${PRETTY_NAME:-unknown}")"
say l4t "$(head -n 1 /etc/nv_tegra_release 2>/dev/null || dpkg-query -W -f '${Version}' nvidia-l4t-core 2>/dev/null)"
say glibc "$(getconf GNU_LIBC_VERSION 2>/dev/null | sed 's/.* //')"
say clock "$(date +%s)"
for tool in $tools; do command -v "$tool" >/dev/null || say lacks "$tool"; done
folder=$prefix
while [ ! -d "$folder" ]; do folder=${folder%/*}; folder=${folder:-/}; done
say free_kib "$(df -Pk "$folder" | awk 'NR==2 {print $4}')"
say free_files "$(df -Pi "$folder" | awk 'NR==2 && $2>0 {print $4}')"
if [ -w "$folder" ]; then say writable 1; fi
for python in $pythons; do
  found=$(command -v "$python") || continue
  version=$("$found" -I -c 'import sys, ctypes, sqlite3, ssl, zlib; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  say python "$version $found"
done
if grep -Eqs ' (0100007F|0+):'"$port"' 0+:0000 0A ' /proc/net/tcp /proc/net/tcp6; then say listening 1; fi
if [ -d "$models" ]; then say models 1; fi
cd "$prefix" 2>/dev/null || exit 0
if [ -f "$marker" ]; then say ours 1; elif [ -n "$(ls -A)" ]; then say foreign 1; fi
say current "$(readlink current 2>/dev/null | sed 's,^versions/,,')"
if [ -f pending ]; then say pending "$(cat pending)"; fi
say started "$(cat started 2>/dev/null || true)"
for version in versions/*; do
  if [ -f "$version/complete" ] && "$version/bin/python" -I -c '' 2>/dev/null; then say version "${version#versions/}"
  elif [ -d "$version" ]; then say partial "${version#versions/}"; fi
done
for left in incoming previous; do if [ -e "$left" ]; then say left "$left"; fi; done
for file in $files; do if [ -f "$file" ]; then say file "$(sha256sum "$file")"; fi; done
if [ -n "$user" ] && id "$user" >/dev/null 2>&1; then say user 1; fi
if agent_listens; then say agent_pid "$pid"; fi
