set -uo pipefail
role=$1 doing=
node=${SLURMD_NODENAME:-$HOSTNAME}
up=$ROLLHOOK_JOB_DIR/slurm/up
[ "$role" = status ] || exec >> "$ROLLHOOK_JOB_DIR/logs/nodes/$node.log" 2>&1
fail() { echo "rollhook: $1" >&2; doing=''; [ "$role" = status ] || printf '%s\n' "$1" > "$up/nodes/$node.failed"; exit 1; }
trap 'code=$?; [ -z "$doing" ] || fail "$doing failed on $node with exit code $code"' EXIT

export ROLLHOOK_SLURM_NODE=$node ROLLHOOK_SLURM_INDEX=${SLURM_NODEID:-0} ROLLHOOK_SLURM_CPUS=${SLURM_CPUS_ON_NODE:-}
# an MPI-aware library would take Ray's processes for ranks of this step
for name in $(compgen -e); do
    case $name in
        SLURM_CONF) ;;
        SLURM*|SRUN_*|SBATCH_*|PMI_*|PMI2_*|PMIX_*|PALS_*|OMPI_*|PRTE_*|MPI_*) unset "$name" ;;
    esac
done
ulimit -Sn 65535 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"
export PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1 RAY_USAGE_STATS_ENABLED=0 RAY_enable_metrics_collection=0
if [ -e "$up/token" ]; then export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$up/token; fi

credentials() { # FILE: set what it sets; nothing of it is printed
    [ -r "$1" ] || fail "the credentials file $1 cannot be read on $node"
    case $(stat -Lc %a -- "$1") in
        *00) ;;
        *) fail "the credentials file $1 may be read by others (mode $(stat -Lc %a -- "$1")): chmod 600" ;;
    esac
    doing="reading the credentials file $1"
    set -a +u
    . "$1" >/dev/null 2>&1
    set +a -u
    doing=
}
