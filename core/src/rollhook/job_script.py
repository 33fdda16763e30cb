"""The script that a launcher runs on a node: environment, probes, the job's own script, log and exit code.

Two files: `job.sh`, and `entry.sh` with the job's own text, so that whatever that does (`set -e`, `exit`) its
exit code is kept. Under the job's directory appear `logs/driver.log`, `signalled` (the first signal that the
job was sent) and, last, `exit_code`.

Signals go to `job.sh` alone: INT and USR1 ask the job to stop by its stop signal, TERM cancels it. After the
job's grace it is sent TERM, and ten seconds later KILL. Where a scheduler signals every process by itself,
ROLLHOOK_TELLS_ALL=1 keeps the script from sending them the same signal again. Its own names begin with
`_rh_`: the environment and the setup share its shell, and may have a variable `child` or a function `run`.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from rollhook.errors import UsageError
from rollhook.launcher import Handle, Job, JobStatus, State
from rollhook.secrets import Secret

#: below the job's directory: where the plan's files are
FILES = "job"
SCRIPT, ENTRY = "job.sh", "entry.sh"
#: below the job's directory, written by the script
LOG, EXIT_CODE, SIGNALLED = "logs/driver.log", "exit_code", "signalled"

#: what a job that ignores its stop signal and then TERM is given before KILL
KILL_SECONDS = 10
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_TEMPLATE = """\
#!/usr/bin/env bash
# Job {id}. Written by Rollhook; what the job itself does is in {entry}.
if [ -n "$(trap -p INT)" ] && [ -z "${{ROLLHOOK_SIGNALS:-}}" ] && command -v python3 >/dev/null; then
    export ROLLHOOK_SIGNALS=default  # a shell cannot trap what was ignored when it began
    exec python3 -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp("bash", ["bash", *sys.argv[1:]])' "${{BASH_SOURCE[0]}}" "$@"
fi
unset ROLLHOOK_SIGNALS
set -uo pipefail
export ROLLHOOK_RUN_ID={run_id} ROLLHOOK_ATTEMPT="${{ROLLHOOK_ATTEMPT:-{attempt}}}"
[ -n "${{ROLLHOOK_JOB_DIR:-}}" ] || ROLLHOOK_JOB_DIR={directory}
export ROLLHOOK_JOB_DIR
export ROLLHOOK_JOB_FILES="${{ROLLHOOK_JOB_FILES:-$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)}}"

_rh_child="" _rh_told="" _rh_watchdog="" _rh_doing="" _rh_tee="" _rh_all=${{ROLLHOOK_TELLS_ALL:-}}
unset ROLLHOOK_TELLS_ALL
_rh_fail() {{ echo "rollhook: $1" >&2; _rh_doing=""; exit 1; }}
fail() {{ _rh_fail "$1"; }}
_rh_tell() {{  # RECEIVED SENT: to the job and all below it
    [ -n "$_rh_told" ] || echo "$1" > "$ROLLHOOK_JOB_DIR/{signalled}"
    _rh_told=$2
    [ -n "$_rh_child" ] || return
    [ "$_rh_all$1" = "1$2" ] || kill -s "$2" -- "-$_rh_child" 2>/dev/null
    [ -n "$_rh_watchdog" ] || {{ set -m; _rh_watch & _rh_watchdog=$!; set +m; }}
}}
_rh_listen() {{
    trap '_rh_tell INT {stop_signal}' INT
    trap '_rh_tell USR1 {stop_signal}' USR1
    trap '_rh_tell TERM TERM' TERM
}}
_rh_watch() {{
    exec >/dev/null 2>&1 3>&- 4>&-
    sleep {grace}
    kill -s TERM -- "-$_rh_child"
    sleep {kill}
    kill -s KILL -- "-$_rh_child"
}}
_rh_run() {{  # COMMAND...: in a process group of its own, which signals go to and which ends with it
    [ -z "$_rh_told" ] || exit 143
    set -m; "$@" </dev/null & _rh_child=$!; set +m
    [ -z "$_rh_told" ] || kill -s "$_rh_told" -- "-$_rh_child" 2>/dev/null
    local _rh_code _rh_again
    while :; do
        wait "$_rh_child"
        _rh_code=$?
        kill -0 "$_rh_child" 2>/dev/null || break
    done
    wait "$_rh_child" 2>/dev/null  # a signal may have cut short the wait in which it ended
    _rh_again=$?
    [ "$_rh_again" -eq 127 ] || _rh_code=$_rh_again
    kill -s KILL -- "-$_rh_child" 2>/dev/null
    _rh_child=""
    return "$_rh_code"
}}
_rh_finish() {{  # CODE: let the log drain, then keep the code
    trap '' INT TERM USR1
    [ -z "$_rh_doing" ] || echo "rollhook: the job ended in its $_rh_doing, with exit code $1" >&2
    [ -z "$_rh_watchdog" ] || kill -s KILL -- "-$_rh_watchdog" 2>/dev/null
    exec 1>&3 2>&4
    for ((_rh_i = 0; _rh_i < 50; _rh_i++)); do kill -0 "$_rh_tee" 2>/dev/null || break; sleep 0.1; done
    printf '%s\\n' "$1" > "$ROLLHOOK_JOB_DIR/.{exit_code}.tmp"
    mv -f "$ROLLHOOK_JOB_DIR/.{exit_code}.tmp" "$ROLLHOOK_JOB_DIR/{exit_code}"
}}

mkdir -p "$ROLLHOOK_JOB_DIR/logs" && rm -f "$ROLLHOOK_JOB_DIR/{exit_code}" "$ROLLHOOK_JOB_DIR/{signalled}" ||
    _rh_fail "$ROLLHOOK_JOB_DIR cannot be written on $HOSTNAME"
_rh_listen
exec 3>&1 4>&2
# the log outlives every signal and whoever reads the output
exec > >(trap '' INT TERM USR1 HUP PIPE; exec tee -a "$ROLLHOOK_JOB_DIR/{log}" >&3 2>&4) 2>&1
_rh_tee=$!
trap '_rh_finish $?' EXIT

{environment}{setup}{probes}_rh_run bash "$ROLLHOOK_JOB_FILES/{entry}"
exit $?
"""

#: after the setup, which may have set traps of its own
_AGAIN = "_rh_listen; trap '_rh_finish $?' EXIT\n"


def script_files(job: Job) -> dict[str, str]:
    """Return the files that every launcher delivers for a job: path below its directory -> text.

    Raises UsageError for what is no name of an environment variable.
    """
    files = {f"{FILES}/{name}": text for name, text in job.files.items()}
    entry = job.script if job.script.endswith("\n") else job.script + "\n"
    return files | {f"{FILES}/{SCRIPT}": _render(job), f"{FILES}/{ENTRY}": entry}


def read_exit_code(directory: str | Path) -> int | None:
    """Return the exit code that a job left in its directory; None while there is none."""
    try:
        return int((Path(directory) / EXIT_CODE).read_text())
    except (OSError, ValueError):
        return None


def signalled(directory: str | Path) -> str:
    """Return the name of the first signal that the job was sent, e.g. `INT`; empty if it was sent none."""
    try:
        return (Path(directory) / SIGNALLED).read_text().strip()
    except OSError:
        return ""


def ended_state(code: int, *, stopped_code: int | None, asked: bool) -> State:
    """Return how a job ended that left an exit code; `asked`: it was told to stop (see `signalled`).

    A job with a `stopped_code` says itself whether it was stopped; of another one that was told to, it is
    believed whatever its code, so that what was cut short is never a success.
    """
    if stopped_code is None:
        return "stopped" if asked else "succeeded" if code == 0 else "failed"
    if code in (0, stopped_code):
        return "succeeded" if code == 0 else "stopped"
    return "stopped" if asked and code > 128 else "failed"


def left_status(handle: Handle) -> JobStatus | None:
    """Return how a job ended, by what it left in its directory; None while it has left no exit code."""
    code = read_exit_code(handle.directory)
    if code is None:
        return None
    sent = signalled(handle.directory)
    state = ended_state(code, stopped_code=handle.stopped_code, asked=bool(sent))
    why = f"its script ended with exit code {code}" + (f" after signal {sent}" if sent else "")
    return JobStatus(state, why, code)


def record_killed(directory: str | Path) -> None:
    """Record that a job was killed on request; its script could not. An exit code that is there is kept."""
    if read_exit_code(directory) is None:
        (Path(directory) / SIGNALLED).write_text("KILL\n")
        (Path(directory) / EXIT_CODE).write_text("137\n")


async def read_log(
    directory: str | Path, ended: Callable[[], Awaitable[bool]], *, follow: bool = False, poll: float = 0.3
) -> AsyncIterator[bytes]:
    """Give a job's log from its beginning, for `Launcher.logs` where the directory is seen.

    With `follow` until `ended` has said so and the log has been read to its end.
    """
    path, position = Path(directory) / LOG, 0
    while True:
        last = not follow or await ended()
        while data := await asyncio.to_thread(_read_from, path, position):
            position += len(data)
            yield data
        if last:
            return
        await asyncio.sleep(poll)


def _read_from(path: Path, position: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read(1 << 20)
    except FileNotFoundError:
        return b""


def environment_lines(job: Job) -> list[str]:
    """Return the lines of bash that set a job's environment; where a secret is missing they call `fail TEXT`.

    Raises UsageError for what is no name of an environment variable.
    """
    for name in (*job.env, *job.secrets):
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no name of an environment variable; rename it in the job's env")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]
    for name, reference in job.secrets.items():
        lines += _secret(name, Secret.parse(reference))
    if job.code.source == "path":
        lines.append(f'export PYTHONPATH={shlex.quote(job.code.path)}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    return lines


def _render(job: Job) -> str:
    q = shlex.quote
    lines = environment_lines(job)
    setup = job.setup.rstrip()
    probes = "".join(
        f"echo {q('rollhook: probe ' + probe.name)}\n"
        f"_rh_run bash -c {q(probe.script)} || _rh_fail {q('the probe ' + probe.name + ' failed')}\n"
        for probe in job.probes
    )
    return _TEMPLATE.format(
        id=job.id,
        run_id=q(job.run_id),
        attempt=job.attempt,
        directory=q(job.directory),
        entry=ENTRY,
        exit_code=EXIT_CODE,
        signalled=SIGNALLED,
        log=LOG,
        environment="".join(f"{line}\n" for line in lines),
        # what activates environments seldom bears `set -u`
        setup=f"_rh_doing=setup; set -e +u\n{setup}\nset +e -u; _rh_doing=\n{_AGAIN}" if setup else "",
        probes=probes,
        stop_signal=job.stop_signal,
        grace=f"{job.stop_grace_seconds:g}",
        kill=KILL_SECONDS,
    )


def _secret(name: str, secret: Secret) -> list[str]:
    """Return the lines that make a variable of a secret on the node; it is in no file and no argument."""
    missing = f'fail "the secret "{shlex.quote(str(secret))}" of {name} is not there on $HOSTNAME"'
    if secret.scheme == "file":
        home, path = ('"$HOME"/', secret.name[2:]) if secret.name.startswith("~/") else ("", secret.name)
        read = f'{name}="$(cat -- {home}{shlex.quote(path)})" && [ -n "${name}" ] || {missing}'
        return [read, f"export {name}"]
    source = secret.name if secret.scheme == "env" else name  # the launcher has set k8s: secrets already
    return [f'[ -n "${{{source}:-}}" ] || {missing}', f'export {name}="${{{source}}}"']
