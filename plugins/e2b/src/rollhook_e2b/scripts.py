"""Short POSIX sh programs that files are read and written with, and the text that E2B's `bash -l -c` gets."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

#: envd starts a login shell, whose profile sets PATH anew: what the image or the task said is put back
RESTORE = 'while IFS= read -r -d "" v; do case $v in PATH=*) export "$v" ;; esac; done < /proc/$$/environ'

#: $1 path, $2 most bytes, $3 most bytes to print: prints them as base64, or the size of a file for download
READ = r"""
[ -e "$1" ] || exit 44
[ -d "$1" ] && exit 45
[ -f "$1" ] || exit 46
size=$(wc -c < "$1") || exit 47
[ "$size" -le "$2" ] || { echo "$size"; exit 48; }
[ "$size" -le "$3" ] || { echo "$size"; exit 49; }
head -c $(($3 + 1)) < "$1" | base64
"""

#: $1 path, $2 mode, $3 base64
WRITE = r"""
[ -d "$1" ] && [ ! -L "$1" ] && exit 45
parent=${1%/*}/
mkdir -p -- "$parent" && new=$(mktemp "$parent.rollhook-XXXXXXXX") || exit 47
printf %s "$3" | base64 -d > "$new" && chmod "$2" "$new" && mv -fT -- "$new" "$1" && exit
rm -f -- "$new"
exit 47
"""

#: $1 path, $2 mode, $3 what was uploaded beside it
PLACE = r"""
if [ -d "$1" ] && [ ! -L "$1" ]; then rm -f -- "$3"; exit 45; fi
chmod "$2" "$3" && mv -fT -- "$3" "$1" && exit
rm -f -- "$3"
exit 47
"""

#: $1 working directory, $2 its user: makes it, and prints which processes are the service's own
PREPARE = r"""
if [ ! -d "$1" ]; then
  mkdir -p -- "$1" || exit 47
  [ -z "$2" ] || chown -- "$2" "$1" || exit 47
fi
for directory in /proc/[0-9]*; do
  pid=${directory#/proc/}
  [ "$pid" = $$ ] || echo "$pid"
done
"""


def login(mark: str, argv: Sequence[str]) -> str:
    """Return text for `bash -l -c` that runs `argv` in its place, and prints `mark` in a line before."""
    return f"{RESTORE}; printf '\\n%s\\n' {mark}; exec {shlex.join(argv)}"
