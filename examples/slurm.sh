#!/usr/bin/env bash
# Train on two nodes of a SLURM cluster, and go on in a new job when the time is over:
#
#   sbatch examples/slurm.sh recipes/qwen3_8b.toml
#
# SLURM starts the processes itself, without torchrun, which would kill them 30 seconds after the signal. Ten minutes
# before the limit every process gets SIGTERM: the run stops at its next safe point, and the job queues itself again.
# A step must therefore take less than ten minutes; otherwise raise the seconds in --signal.
# The submission folder, the Python environment, the model and the data must be on disks that all nodes share.
#SBATCH --job-name=delta
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "usage: sbatch examples/slurm.sh RECIPE [OPTION...]" >&2
    exit 2
fi
run="runs/$(basename "$1" .toml)-$SLURM_JOB_ID"
mkdir -p "$run.job"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export DELTA_FAILURE="$run.job/failed-${SLURM_RESTART_COUNT:-0}" # the first process to fail creates it and reports
again=()
if [ -e "$run/recipe.toml" ]; then
    again=(--resume)
fi
code=0
# shellcheck disable=SC2016  # the variables are those of each task
srun bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
    export LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec python -m delta_cli train "$@"' bash "$@" --run-dir "$run" "${again[@]}" || code=$?
if [ "$code" = 143 ]; then # stopped by SIGTERM, with a checkpoint
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
