#!/bin/bash
# Not run by its authors as yet: they had no TPU. Seen: bash -n, shellcheck, and that gcloud knows the commands and flags.
#
#   NAME=jrl ZONE=us-east5-a TYPE=v6e-16 jrl/launch/tpu_vm.sh create       # or: queue, which waits for capacity
#   NAME=jrl ZONE=us-east5-a jrl/launch/tpu_vm.sh install https://github.com/OWNER/jrl.git
#   NAME=jrl ZONE=us-east5-a jrl/launch/tpu_vm.sh run --config=configs/gsm8k_grpo.py --config.run_dir=/mnt/shared/runs/gsm8k
#   NAME=jrl ZONE=us-east5-a jrl/launch/tpu_vm.sh delete
#
# For v4 to v6e, by the Cloud TPU API, which does not know later ones. The run directory has to be on storage that all workers
# mount, such as Filestore or a bucket by gcsfuse. SPOT=1 asks for machines that are cheaper and may be taken away; VERSION is
# their software, by default that of the type.

set -euo pipefail

usage() {
  sed -n '4,7s/^# *//p' "$0" >&2
  exit 2
}

[[ $# -ge 1 && -n "${NAME:-}" && -n "${ZONE:-}" ]] || usage
action=$1
shift

where=(--zone="$ZONE")
spot=()
if [[ -n "${SPOT:-}" ]]; then
  spot=(--spot)
fi

software() {
  case "${TYPE:?such as v6e-16}" in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    *) echo tpu-ubuntu2204-base ;;
  esac
}

on_all_workers() {
  gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" --worker=all --command="$1"
}

case "$action" in
  create)
    gcloud compute tpus tpu-vm create "$NAME" "${where[@]}" --accelerator-type="${TYPE:?such as v6e-16}" \
      --version="${VERSION:-$(software)}" ${spot[@]+"${spot[@]}"}
    ;;
  queue)
    gcloud compute tpus queued-resources create "$NAME" "${where[@]}" --node-id="$NAME" \
      --accelerator-type="${TYPE:?such as v6e-16}" --runtime-version="${VERSION:-$(software)}" ${spot[@]+"${spot[@]}"}
    ;;
  install)
    # uv brings a Python that is new enough; that of the machines may not be.
    on_all_workers "set -e
      curl -LsSf https://astral.sh/uv/install.sh | sh
      rm -rf jrl && git clone $(printf %q "${1:?the address of the repository}") jrl && cd jrl
      ~/.local/bin/uv venv --python 3.12 --seed .venv
      .venv/bin/python -m pip install --quiet -e '.[tpu,data,rewards]'"
    ;;
  run)
    environment=(
      # The workers of the slice find each other by what the machine knows of it.
      JRL_CLUSTER=tpu
      # Where the compiled programs are kept, so that a resumed run compiles nothing.
      "JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-/tmp/jax_cache}"
      # Flags of the TPU compiler, --xla_tpu_...; those that overlap communication with computation are on by default.
      "LIBTPU_INIT_ARGS=${LIBTPU_INIT_ARGS:-}"
      # For models that are not open to all.
      "HF_TOKEN=${HF_TOKEN:-}"
    )
    # Transparent huge pages: without them v5e and later start slowly.
    on_all_workers "sudo sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled'
      cd jrl && exec env $(printf '%q ' "${environment[@]}") .venv/bin/python -m jrl.main $(printf '%q ' "$@")"
    ;;
  delete)
    gcloud compute tpus tpu-vm delete "$NAME" "${where[@]}" --quiet
    # A queued resource stays behind its machines, and keeps its name; there is none after "create".
    gcloud compute tpus queued-resources delete "$NAME" "${where[@]}" --force --quiet 2>/dev/null || true
    ;;
  *)
    usage
    ;;
esac
