#!/usr/bin/env bash
# Train on two machines with torchrun. Run the same command on each, with its number and the first one's address:
#
#   examples/two_nodes.sh 0 10.0.0.1 recipes/qwen3_8b.toml --run-dir /shared/runs/first     # on 10.0.0.1
#   examples/two_nodes.sh 1 10.0.0.1 recipes/qwen3_8b.toml --run-dir /shared/runs/first     # on the other
#
# NODES, GPUS (of each machine) and PORT change 2, 8 and 29500. docs/parallel.md says what the machines must share.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: $0 NUMBER ADDRESS-OF-THE-FIRST RECIPE [OPTION...]" >&2
    exit 2
fi
number=$1 first=$2
shift 2
exec torchrun --nnodes "${NODES:-2}" --node-rank "$number" --nproc-per-node "${GPUS:-8}" \
    --master-addr "$first" --master-port "${PORT:-29500}" -m delta_cli train "$@"
