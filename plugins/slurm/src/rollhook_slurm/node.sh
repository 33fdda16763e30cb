set -uo pipefail
_rh_role=$1 _rh_doing=
_rh_node=${SLURMD_NODENAME:-$HOSTNAME}
_rh_up=$ROLLHOOK_JOB_DIR/slurm/up
[ "$_rh_role" = status ] || exec >> "$ROLLHOOK_JOB_DIR/logs/nodes/$_rh_node.log" 2>&1
_rh_fail() { echo "rollhook: $1" >&2; _rh_doing=''; [ "$_rh_role" = status ] || printf '%s\n' "$1" > "$_rh_up/nodes/$_rh_node.failed"; exit 1; }
fail() { _rh_fail "$1"; }
trap '_rh_code=$?; [ -z "$_rh_doing" ] || _rh_fail "$_rh_doing failed on $_rh_node with exit code $_rh_code"' EXIT

export ROLLHOOK_SLURM_NODE=$_rh_node ROLLHOOK_SLURM_INDEX=${SLURM_NODEID:-0} ROLLHOOK_SLURM_CPUS=${SLURM_CPUS_ON_NODE:-}
# an MPI-aware library would take Ray's processes for ranks of this step
for _rh_name in $(compgen -e); do
    case $_rh_name in
        SLURM_CONF) ;;
        SLURM*|SRUN_*|SBATCH_*|PMI_*|PMI2_*|PMIX_*|PALS_*|OMPI_*|PRTE_*|MPI_*) unset "$_rh_name" ;;
    esac
done
ulimit -Sn 65535 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"
export PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1 RAY_USAGE_STATS_ENABLED=0 RAY_enable_metrics_collection=0
if [ -e "$_rh_up/token" ]; then export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$_rh_up/token; fi

credentials() { # FILE: set what it sets; nothing of it is printed
    [ -r "$1" ] || fail "the credentials file $1 cannot be read on $_rh_node"
    case $(stat -Lc %a -- "$1") in
        *00) ;;
        *) fail "the credentials file $1 may be read by others (mode $(stat -Lc %a -- "$1")): chmod 600" ;;
    esac
    _rh_doing="reading the credentials file $1"
    set -a +u
    . "$1" >/dev/null 2>&1
    set +a -u
    _rh_doing=
}
