#!/usr/bin/env bash
# Trains everything the playground ships, from nothing, on one GPU: judges and codecs first, then the generators that need
# them, side by side, for one alone would leave the GPU waiting. Runs resume: call it again after an interruption.
#   tools/playground.sh [judges|codecs|generators ...]
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
weights=tastemaker/playground/weights
logs=runs/logs
mkdir -p "$weights" "$logs"
stages=("$@")
[ $# -gt 0 ] || stages=(judges codecs generators)

codec() { # NAME: train and ship a codec
  "$python" -m tastemaker train "playground-$1" ${SETTINGS:-} &&
    "$python" -m tastemaker export "runs/playground-$1" --bits 8 --out "$weights/$1.safetensors"
}

judge() { # KIND SEED
  "$python" -m tastemaker.playground.train_reward_models "$1" --seed "$2" --seconds "${SECONDS_EACH:-45}" --out "$weights"
}

start() { # NAME COMMAND...: in the background, with a log of its own
  local name=$1
  shift
  ("$@" >"$logs/$name.log" 2>&1 && echo "done: $name" || echo "FAILED: $name, see $logs/$name.log") &
}

for stage in "${stages[@]}"; do
  case $stage in
  judges)
    start detector1 judge detector 1
    for seed in 0 1; do start "motion$seed" judge motion "$seed"; done
    (judge detector 0 >"$logs/detector0.log" 2>&1 && echo "done: detector0" || echo "FAILED: detector0"
      for kind in scorer judge taste; do start "$kind" judge "$kind" 0; done
      wait) &
    ;;
  codecs) for name in vae vq words-vae; do start "$name" codec "$name"; done ;;
  generators)
    wait # for the codecs
    for name in ${GENERATORS:-flow flow16 epsilon causal masked words}; do start "$name" codec "$name"; done
    wait # video begins with what flow16 knows
    [ -n "${GENERATORS:-}" ] || start video codec video
    ;;
  *) echo "no stage is called '$stage'; expected judges, codecs or generators" && exit 2 ;;
  esac
done
wait
