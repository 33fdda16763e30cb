"""Small POSIX sh programs that the core runs inside a sandbox whose backend has no shortcut.

They use shell builtins, and `tr` and `rm` where the image has them. A process belongs to a command when
its environment carries the command's mark or when it descends from one that does. Threads of the kernel
(flag PF_KTHREAD), which a virtual machine shows, belong to nobody: they cannot be killed. A process calls
itself what it likes, line breaks included, and with other threads it goes on when its first is a zombie.
"""

from __future__ import annotations

from collections.abc import Sequence

MARK = "ROLLHOOK_EXEC"

#: $1: mark to look for in environments, empty for every process; $2: pids never to touch, space separated;
#: $3: what stands in the environment of processes that are killed and not named, if any.
#: Prints `pid<TAB>command` once per killed process and `left N` at the end. Ends with 0 when none is left.
KILL = r"""
mark=$1 own=" $2 $$ " unnamed=$3 seen=" " round=0 paused=
carries() {
  while IFS= read -r text || [ -n "$text" ]; do
    case $text in *"$2"*) return 0 ;; esac
    text=
  done 2>/dev/null < "/proc/$1/environ"
  return 1
}
runs() {
  stat=
  { while IFS= read -r line; do stat="$stat $line"; done < "/proc/$1/stat"; } 2>/dev/null || return
  set -- ${stat##*) }
  [ $# -ge 18 ] || return
  case $1 in
    X) return 1 ;;
    Z) [ "${18}" -gt 1 ] || return ;;
  esac
  parent=$2
  [ $(($7 & 0x200000)) -eq 0 ]
}
find_targets() {
  rows= found=" "
  for directory in /proc/[0-9]*; do
    pid=${directory#/proc/}
    case $own in *" $pid "*) continue ;; esac
    runs "$pid" || continue
    if [ -z "$mark" ] || carries "$pid" "$mark"; then found="$found$pid "; else rows="$rows$pid:$parent "; fi
  done
  grown=$mark
  while [ -n "$grown" ]; do
    grown=
    for row in $rows; do
      case $found in *" ${row%:*} "*) continue ;; esac
      case $found in *" ${row#*:} "*) found="$found${row%:*} " grown=1 ;; esac
    done
  done
}
while [ $round -lt 50 ]; do
  find_targets
  [ "$found" = " " ] && { echo "left 0"; exit 0; }
  for pid in $found; do
    case $seen in
      *" $pid "*) ;;
      *)
        seen="$seen$pid "
        [ "$unnamed" ] && carries "$pid" "$unnamed" && continue
        name=$( { tr '\0\n\t' '   ' < "/proc/$pid/cmdline"; } 2>/dev/null) || name=
        [ "$name" ] || [ "$paused" ] || { sleep 0.02 && paused=1; }
        [ "$name" ] || runs "$pid" || continue
        printf '%s\t%.500s\n' "$pid" "$name"
        ;;
    esac
  done
  kill -9 $found 2>/dev/null
  round=$((round + 1))
  [ $round -gt 5 ] && sleep 0.02
done
set -- $found
echo "left $#"
exit 1
"""

#: $@: paths to remove with all that is below them; prints those that existed, NUL-free names only by count.
REMOVE = r"""
for path in "$@"; do
  if [ -e "$path" ] || [ -L "$path" ]; then
    echo 1
    rm -rf -- "$path" || exit 1
  else
    echo 0
  fi
done
"""


def kill_argv(mark: str, own_pids: frozenset[int]) -> list[str]:
    """Return the argv that kills what carries `mark` (empty: everything) but `own_pids`."""
    return ["/bin/sh", "-c", KILL, "rollhook-kill", mark, " ".join(str(pid) for pid in sorted(own_pids))]


def remove_argv(paths: Sequence[str]) -> list[str]:
    """Return the argv that removes `paths`."""
    return ["/bin/sh", "-c", REMOVE, "rollhook-remove", *paths]


def parse_killed(stdout: bytes) -> tuple[list[tuple[int, str]], int]:
    """Return the killed processes and how many are left, from the output of `KILL`."""
    killed: list[tuple[int, str]] = []
    left = -1
    for line in stdout.decode("utf-8", "replace").splitlines():
        if line.startswith("left "):
            left = int(line[5:])
            continue
        pid, _, command = line.partition("\t")
        if pid.isdecimal():
            killed.append((int(pid), command.strip()))
    return killed, left
