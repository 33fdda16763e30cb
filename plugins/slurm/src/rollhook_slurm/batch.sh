set -uo pipefail
early=
trap 'early=drain' USR1
trap 'early=stop' USR2 TERM
say() { printf '%(%FT%T%z)T %s\n' -1 "$*"; }
die() { say "rollhook: $*" >&2; exit 1; }

[ -r "$base/slurm/node.sh" ] || die "$base is not seen on $HOSTNAME; storage.root must be on a file system that all nodes mount"

# a job that Slurm started again is the next attempt, in a directory of its own
dir=$base attempt=$first_attempt restarts=${SLURM_RESTART_COUNT:-0}
if [ "$restarts" -gt 0 ]; then
    [ "$restarts" -le "$requeues" ] || die "started again $restarts times, and launcher.requeues is $requeues"
    while attempt=$((attempt + 1)) dir=${base%/*}/$attempt; ! mkdir "$dir" 2>/dev/null; do
        [ -d "$dir" ] || die "$dir cannot be made"
    done
fi
up=$dir/slurm/up
mkdir -p "$up/nodes" "$dir/logs/nodes" || die "$dir cannot be written on $HOSTNAME"
printf '%s\n' "$dir" >> "$base/slurm/attempts"
phase() { say "$*"; printf '%(%FT%T%z)T\t%s\n' -1 "$*" >> "$up/phases.tsv"; }

told=
tell() { # stop, or drain: stop and go on in another allocation
    [ -z "$told" ] || return 0
    told=$1
    : > "$up/$1"
    phase "told to $1"
}
trap 'tell drain' USR1
trap 'tell stop' USR2 TERM
[ -z "$early" ] || tell "$early"
trap 'rm -f "$up/token"' EXIT

export ROLLHOOK_SLURM_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr "\n" " ")
export ROLLHOOK_JOB_DIR=$dir ROLLHOOK_JOB_FILES=$base/job ROLLHOOK_ATTEMPT=$attempt ROLLHOOK_SLURM_JOB=$SLURM_JOB_ID
if [ -n "$ray_token" ]; then
    (umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$up/token")
fi
unset SLURM_EXPORT_ENV
head=$SLURMD_NODENAME
step() { # ARGUMENTS...: a step beside others, which neither one task's end nor its failure ends
    srun --overlap --export=ALL --wait=0 --kill-on-bad-exit=0 --input=none --label --open-mode=append \
        --output="$dir/logs/steps.log" "$@"
}
everywhere=(--nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1)
ended() { # PID: wait for it, signals or not, and return its exit code
    local code again
    while :; do
        wait "$1"
        code=$?
        kill -0 "$1" 2>/dev/null || break
    done
    wait "$1" 2>/dev/null
    again=$?
    [ "$again" -eq 127 ] || code=$again
    return "$code"
}

phase "attempt $attempt on $SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST), head $head"
code=
if [ ${#pull[@]} -gt 0 ]; then
    phase "unpacking the container on every node"
    step "${everywhere[@]}" "${pull[@]}" true &
    ended $! || { code=$?; echo "the container could not be unpacked on every node (exit code $code); see $dir/logs/steps.log" > "$up/failure"; }
fi

if [ -z "$code" ] && [ "$strategy" = symmetric ]; then
    step "${everywhere[@]}" "${container[@]}" \
        bash "$base/slurm/node.sh" symmetric &
    ended $!
    code=$?
elif [ -z "$code" ]; then
    step --nodes=1 --ntasks=1 --nodelist="$head" "${container[@]}" bash "$base/slurm/node.sh" head &
    driver=$! workers=
    if [ "$nodes" -gt 1 ]; then
        { step --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --ntasks-per-node=1 --exclude="$head" \
            "${container[@]}" bash "$base/slurm/node.sh" worker; echo $? > "$up/workers-ended"; } &
        workers=$!
    fi
    ended "$driver"
    code=$?
    : > "$up/ended"
    phase "the head's step ended with exit code $code"
    if [ -n "$workers" ]; then
        for ((i = 0; i < end_seconds * 5; i++)); do kill -0 "$workers" 2>/dev/null || break; sleep 0.2; done
    fi
fi
[ -z "$cleanup" ] || step "${everywhere[@]}" bash -c "$cleanup" || say "$cleanup failed"

# the driver's own exit code, if it came to that
if [ -r "$dir/exit_code" ]; then
    read -r code < "$dir/exit_code"
else
    [ -e "$up/failure" ] || cp "$up/nodes/$head.failed" "$up/failure" 2>/dev/null || [ -n "$told" ] || {
        [ -e "$up/ready" ] && when="and left no exit code of the driver" || when="before the driver began"
        echo "the head's step on $head ended with exit code $code $when; see $dir/logs/steps.log and nodes/$head.log" > "$up/failure"
    }
    if [ -n "$told" ]; then
        code=${stopped_code:-143}
        echo "$told" > "$dir/signalled"
    elif [ "$code" -eq 0 ]; then
        code=1
    fi
    echo "$code" > "$dir/exit_code"
fi
[ ! -e "$up/failure" ] || say "rollhook: $(cat "$up/failure")"

if [ "$told" = drain ] && [ "$code" -ne 0 ] && { [ -z "$stopped_code" ] || [ "$code" -eq "$stopped_code" ]; }; then
    if [ "$restarts" -lt "$requeues" ]; then
        phase "the time limit was near: back into the queue ($((restarts + 1)) of $requeues)"
        scontrol requeue "$SLURM_JOB_ID" && exit "$code"
        say "rollhook: scontrol requeue failed"
    else
        echo "the time limit was near, and it was started again $restarts times (launcher.requeues is $requeues)" > "$up/failure"
    fi
fi
phase "ends with exit code $code"
exit "$code"
