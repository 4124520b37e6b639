#!/bin/bash
# Not run by its authors as yet: they had no SLURM cluster. Checked with bash -n and shellcheck only.
#
#   sbatch --nodes=4 --gpus-per-node=8 jrl/launch/slurm.sh --config=configs/gsm8k_grpo.py --config.run_dir=/shared/runs/gsm8k
#
# One process on each node, which joins the others by itself. Everything after the script's name goes to jrl.main. The run
# directory and this checkout have to be on storage that all nodes share; VENV is a virtual environment there, with jrl installed.
#
#SBATCH --job-name=jrl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
# SIGTERM to the processes ten minutes before the time is up: the run saves and leaves, and --config.resume=True continues it.
#SBATCH --signal=TERM@600
# The script is started again after a node failed, or when the job is requeued; it resumes then.
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$PWD}"
# shellcheck disable=SC1091
source "${VENV:-.venv}/bin/activate"

# Where the compiled programs are kept: shared, so that a restart compiles nothing.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}"
# The share of each GPU's memory that JAX takes at the start; the rest is for NCCL's buffers and cuBLAS.
export XLA_CLIENT_MEM_FRACTION="${XLA_CLIENT_MEM_FRACTION:-0.9}"
# Communication runs while matrices are multiplied.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_latency_hiding_scheduler=true"
# NCCL says what is wrong with it, and nothing else; INFO says which network it has chosen.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# The interface by which NCCL's processes find each other, where the first one is not the right one: export NCCL_SOCKET_IFNAME=ib0
# The InfiniBand adapters that NCCL uses, where not all of them are: export NCCL_IB_HCA=mlx5_0,mlx5_1
# The model is read from disk, since the nodes often have no way out; unset it to let a node download.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

resume=()
if [[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]]; then
  resume=(--config.resume=True)
fi

# When one process fails the others stop within a minute; --kill-on-bad-exit is for those that cannot.
srun --kill-on-bad-exit=1 --wait=120 --label python -m jrl.main "$@" ${resume[@]+"${resume[@]}"}
