#!/usr/bin/env bash
# Train all weights that the playground ships, from scratch, on one GPU: reward models and autoencoders first, then the
# generators that need them. Several run in parallel, because one does not fill the GPU. Runs resume after an interruption.
#   tools/playground.sh [rewards|autoencoders|generators ...]
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
weights=tastemaker/playground/weights
logs=runs/logs
mkdir -p "$weights" "$logs"
stages=("$@")
[ $# -gt 0 ] || stages=(rewards autoencoders generators)

train_and_export() { # NAME
  "$python" -m tastemaker train "playground-$1" ${SETTINGS:-} &&
    "$python" -m tastemaker export "runs/playground-$1" --bits 8 --out "$weights/$1.safetensors"
}

train_reward_model() { # KIND SEED
  "$python" -m tastemaker.playground.train_reward_models "$1" --seed "$2" --seconds "${SECONDS_EACH:-45}" --out "$weights"
}

start() { # NAME COMMAND...: in the background, with its own log
  local name=$1
  shift
  ("$@" >"$logs/$name.log" 2>&1 && echo "done: $name" || echo "FAILED: $name, see $logs/$name.log") &
}

for stage in "${stages[@]}"; do
  case $stage in
  rewards)
    start detector1 train_reward_model detector 1
    for seed in 0 1; do start "motion$seed" train_reward_model motion "$seed"; done
    (train_reward_model detector 0 >"$logs/detector0.log" 2>&1 && echo "done: detector0" || echo "FAILED: detector0"
      for kind in scorer judge taste; do start "$kind" train_reward_model "$kind" 0; done
      wait) &
    ;;
  autoencoders) for name in vae vq words-vae; do start "$name" train_and_export "$name"; done ;;
  generators)
    wait # for the autoencoders
    for name in ${GENERATORS:-flow flow16 epsilon causal masked words}; do start "$name" train_and_export "$name"; done
    wait # video and edit start from the weights of flow16
    [ -n "${GENERATORS:-}" ] || for name in video edit; do start "$name" train_and_export "$name"; done
    ;;
  *) echo "there is no stage '$stage'; expected rewards, autoencoders or generators" && exit 2 ;;
  esac
done
wait
