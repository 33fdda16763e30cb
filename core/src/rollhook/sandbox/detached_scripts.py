"""POSIX sh programs for commands that are started detached and looked after by short requests.

A command has a directory: `out` and `err` hold what it printed, `exit` its exit code once it has ended, `w`
and `pid` its wrapper's pid and its own, `in/` what it still has to read. Making that directory is what
starts it, so a start that is sent again starts nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from rollhook.sandbox import scripts

_LOOKS = "RH_LOOK"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

#: $1: pauses; $2, $3: bytes of out and err that are there already; $4: bytes of each to return at most;
#: $5: "end" to wait for the command's end alone, and to leave the sizes to who counts what arrives.
#: Waits until it has ended or printed more, then answers
_LOOK = r"""
running() {
  { read -r w < "$d/w" && IFS= read -r stat < "/proc/$w/stat"; } || return 1
  case ${stat##*) } in Z* | X*) return 1 ;; esac
}
sizes() {
  outs=0 errs=0
  [ -s "$d/out" ] || [ -s "$d/err" ] || return
  set -- $(wc -c "$d/out" "$d/err")
  outs=${1:-0} errs=${3:-0}
}
show() {
  if [ "$2" = 0 ]; then
    head -c "$most" "$1" | base64 -w 0 || head -c "$most" "$1" | base64 | tr -d '\n'
  else
    tail -c +$(($2 + 1)) "$1" | head -c "$most" | base64 -w 0 ||
      tail -c +$(($2 + 1)) "$1" | head -c "$most" | base64 | tr -d '\n'
  fi
}
pauses=$1 out=$2 err=$3 most=$4 until=$5 code=- broken=0 outs=? errs=?
for pause in $pauses end; do
  running && gone= || gone=1
  read -r code < "$d/exit" || code=-
  [ "$until" ] || sizes
  [ "$code" = - ] && [ "$gone" ] && code=137
  [ "$code" = - ] || break
  [ "$until" ] || { [ "$outs" -le "$out" ] && [ "$errs" -le "$err" ]; } || break
  [ "$pause" = end ] || sleep "$pause" || sleep 1
done
[ -e "$d/broken" ] && broken=1
printf '\nrollhook: %s %s %s %s\n' "$code" "$outs" "$errs" "$broken"
if [ "$until" ]; then [ -s "$d/out" ]; else [ "$outs" -gt "$out" ]; fi && show "$d/out" "$out"
echo
if [ "$until" ]; then [ -s "$d/err" ]; else [ "$errs" -gt "$err" ]; fi && show "$d/err" "$err"
printf '\nrollhook: end\n'
"""

#: feeds what is put into `in/` to the command; `end` there says that no more comes
_FEED = r"""
feed() {
  i=1 idle=0
  while :; do
    if [ -f "$d/in/$i" ]; then
      idle=0
      cat "$d/in/$i" || { : > "$d/broken"; exit; }
      rm -f "$d/in/$i"
      i=$((i + 1))
    elif [ -f "$d/in/end" ]; then
      [ -f "$d/in/$i" ] || exit
    else
      idle=$((idle + 1))
      [ "$idle" -lt 50 ] && pause=0.03 || pause=0.1
      sleep "$pause" || sleep 1
    fi
  done
}
feed > "$d/fifo" &
feeder=$!
"""

#: the leader of a session of its own: the command in the foreground, its exit code to a file.
#: $1: uid to become, "" for none; $2: gid; $3: user's name, "" for none asked; $4: home; $5, $6: pid and
#: birth of who waits for it, woken at the end, or at once where there is input to come
_RUN = r"""
d=@D@ feeder= waiter=$5 born=$6
wake() {
  IFS= read -r stat < "/proc/$waiter/stat" || return
  set -- ${stat##*) }
  [ "${20}" = "$born" ] && kill -9 "$waiter"
}
echo $$ > "$d/w"
@FEED@
(
  IFS= read -r stat < /proc/self/stat
  echo "${stat%% *}" > "$d/pid"
  uid=$1 gid=$2 user=$3
  [ "$user" ] && export "HOME=$4" "USER=$user" "LOGNAME=$user"
  cd -- @CWD@ || exit 126
@EXPORTS@
  set -- @ARGV@
  if [ "$uid" ]; then
    groups=--init-groups
    [ "$uid" = "$user" ] && groups=--clear-groups
    if setpriv --reuid 0 --help > /dev/null 2>&1; then
      set -- setpriv --reuid "$uid" --regid "$gid" "$groups" -- "$@"
    else
      set -- su -m -s /bin/sh "$user" -c 'exec "$@"' sh "$@"
    fi
  fi
  exec "$@"
) < @STDIN@ > "$d/out" 2> "$d/err"
code=$?
[ "$feeder" ] && kill -9 "$feeder"
echo "$code" > "$d/exit" || { mkdir -p -m 700 "$d" && echo "$code" > "$d/exit"; }
@WAKE@
"""

#: finds the account of $user; ends the script where there is none, or no way to become it
_ACCOUNT = r"""
while IFS=: read -r name x id group x path x; do
  if [ "$name" = "$user" ] || [ "$id" = "$user" ]; then
    uid=$id gid=$group home=$path user=$name
    break
  fi
done < /etc/passwd
case $uid$user in *[!0-9]*) ;; *) uid=$user gid=$user home=/ ;; esac
[ "$uid" ] || { printf '\nrollhook: nouser\n'; exit; }
while read -r name x me x; do [ "$name" = Uid: ] && break; done < /proc/self/status
if [ "$me" = "$uid" ]; then
  uid=
elif [ "$me" != 0 ]; then
  printf '\nrollhook: notroot\n'
  exit
fi
"""

#: making the directory is the start; who finds it there waits until its maker is so far. Its maker sleeps
#: until the command wakes it
_START = r"""@TITLE@
exec 2> /dev/null
d=@D@ user=@USER@ uid= gid= home= pauses=@PAUSES@
[ "$user" ] && {
@ACCOUNT@
}
if mkdir -m 700 "$d" || { mkdir -p -m 700 @BASE@ && mkdir -m 700 "$d"; }; then
  true > "$d/out"
  true > "$d/err"
  @PIPE@
  printf %s @RUN@ > "$d/run"
  (
    exec < /dev/null > /dev/null
    IFS= read -r stat < /proc/self/stat
    pid=${stat%% *}
    set -- ${stat##*) }
    set -- /bin/sh "$d/run" "$uid" "$gid" "$user" "$home" "$pid" "${20}"
    setsid -f "$@" || { setsid "$@" & }
    @EXPORT@
    exec sleep @SLEEP@
  )
  case $? in 0 | 137) pauses= ;; esac
fi
for pause in 0.02 0.05 0.1 0.2 0.5 1 1 1; do
  [ -s "$d/w" ] && break
  sleep "$pause" || sleep 1
done
@EXPORT@
set -- "$pauses" @LOOK_ARGS@
@LOOK@
@CLEAN@
"""

#: looks that are under way end first, with what they have started; they are no part of what is found.
#: Never stopped: what waits for them may stop with them
_CLEAR = r"""
started() {
  while IFS= read -r text || [ -n "$text" ]; do
    case $text in *@LOOKS@*) return 0 ;; esac
    text=
  done < "/proc/$1/environ"
  return 1
}
for round in 1 2 3 4 5 6 7 8 9; do
  found=
  for directory in /proc/[0-9]*; do
    pid=${directory#/proc/} line=
    [ "$pid" = $$ ] && continue
    IFS= read -r stat < "$directory/stat" || continue
    case ${stat##*) } in Z* | X*) continue ;; esac
    IFS= read -r line < "$directory/cmdline"
    case $line in *@TITLE@*) found="$found $pid" && continue ;; esac
    started "$pid" && found="$found $pid"
  done
  [ "$found" ] || break
  kill -9 $found
  [ "$round" = 1 ] || sleep 0.02
done
"""

_KILL = r"""
exec 2> /dev/null
@CLEAR@
up=$$ mine=
while [ "$up" -gt 1 ]; do
  IFS= read -r stat < "/proc/$up/stat" || break
  stat=${stat##*) }
  stat=${stat#* }
  up=${stat%% *}
  mine="$mine $up"
done
set -- @MARK@ @OWN@"$mine" @LOOKS@
"""


def pauses(seconds: float) -> str:
    """Return the words of a wait of about that long, short ones first."""
    found, left, step = [], seconds, 0.02
    while left > 0.001:
        pause = min(step, left)
        found.append(f"{pause:.2f}")
        left -= pause
        step = min(step * 1.5, 0.25)
    return " ".join(found)


def _title(base: str) -> str:
    """Return the first line of a script that may be found under way, by its command line."""
    return f": look {shlex.quote(base)}"


def _export(base: str) -> str:
    """Return the line after which what a script starts can be found by its environment."""
    return f"export {_LOOKS}={shlex.quote(base)}"


def helper(base: str) -> str:
    """Return the lines before a script of our own that is no part of what a sandbox runs."""
    return f"{_title(base)}\n{_export(base)}\n"


def look(directory: str, wait: float, out: int, err: int, most: int) -> str:
    """Return the script that answers what became of a command; see `parse` for its answer."""
    arguments = f"{shlex.quote(pauses(wait))} {out} {err} {most}"
    base = directory.rpartition("/")[0]
    head = f"{helper(base)}exec 2> /dev/null\nd={shlex.quote(directory)}"
    return f"{head}\nset -- {arguments}\n{_LOOK}"


def start(
    base: str,
    nonce: str,
    argv: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    user: str | None,
    stdin: bool,
    wait: float,
    most: int,
    finished: Sequence[str],
) -> str:
    """Return the script that starts a command once, and answers like `look` after at most `wait` seconds.

    `finished` are directories of commands that nobody looks at any more; they are removed.
    """
    directory = shlex.quote(f"{base}/{nonce}")
    odd = [f"{name}={value}" for name, value in env.items() if not _NAME.fullmatch(name)]
    exports = [
        f"  export {name}={shlex.quote(value)}" for name, value in env.items() if _NAME.fullmatch(name)
    ]
    run = _fill(
        _RUN,
        D=directory,
        FEED=f"{_FEED}wake" if stdin else "",
        WAKE="" if stdin else "wake",
        CWD=shlex.quote(cwd),
        STDIN='"$d/fifo"' if stdin else "/dev/null",
        EXPORTS="\n".join(exports),
        ARGV=shlex.join([*(["env", *odd] if odd else []), *argv]),
    )
    return _fill(
        _START,
        TITLE=_title(base),
        EXPORT=_export(base),
        D=directory,
        BASE=shlex.quote(base),
        USER=shlex.quote(user or ""),
        ACCOUNT=_ACCOUNT if user else ":",
        PIPE='mkdir "$d/in" && mkfifo "$d/fifo"' if stdin else "",
        SLEEP="5" if stdin else f"{wait:.2f}",
        PAUSES=shlex.quote(pauses(wait)),
        LOOK_ARGS=f"0 0 {most} end",
        LOOK=_LOOK,
        CLEAN=f"rm -rf {shlex.join(finished)}" if finished else "",
        RUN=shlex.quote(run),
    )


def prevent(base: str, nonce: str) -> str:
    """Return the script after which a start with this nonce that is still under way starts nothing."""
    made = shlex.quote(f"{base}/{nonce}")
    return f"{{ mkdir -p -m 700 {shlex.quote(base)}; mkdir -m 700 {made}; }} 2> /dev/null; :"


def feed(directory: str, number: int, encoded: str | None) -> str:
    """Return the script that gives chunk `number` to a command: base64 text, or what was put beside it."""
    name = shlex.quote(f"{directory}/in/{number}")
    made = f"printf %s {encoded} | base64 -d > {name}.new && " if encoded is not None else ""
    return f"{{ {made}mv -f {name}.new {name} || [ -f {name} ]; }} 2> /dev/null; :"


def end_of_input(directory: str) -> str:
    """Return the script that tells a command that no more input comes."""
    return f": > {shlex.quote(directory)}/in/end 2> /dev/null; :"


def kill_one(directory: str) -> str:
    """Return the script that kills the command itself."""
    return f'read -r pid < {shlex.quote(directory)}/pid && kill -9 "$pid"; :'


def kill_tree(base: str, mark: str, own_pids: frozenset[int]) -> str:
    """Return the script that kills what carries `mark`, sparing the processes that run this very script."""
    own = " ".join(str(pid) for pid in sorted(own_pids))
    looks = shlex.quote(f"{_LOOKS}={base}")
    clear = "" if mark else _fill(_CLEAR, TITLE=shlex.quote(_title(base)), LOOKS=looks)
    return _fill(_KILL, CLEAR=clear, MARK=shlex.quote(mark), OWN=shlex.quote(own), LOOKS=looks) + scripts.KILL


def _fill(template: str, **values: str) -> str:
    """Put values into a template, in one pass: a value may look like a placeholder."""
    return re.sub(r"@([A-Z_]+)@", lambda found: values[found[1]], template)
