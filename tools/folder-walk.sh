#!/usr/bin/env bash
# The commands of docs/from-folder-to-aligned.md: a folder of playground images, an autoencoder, a caption-conditioned DiT,
# post-training with reward gradients and with GRPO, and a sheet of samples of each stage. For one H200: five minutes for the
# autoencoder, ten for the DiT. Runs resume: call it again after an interruption.
#   tools/folder-walk.sh OUT [OVERRIDE...]
# OUT gets pictures/, runs/ and sheets/; OVERRIDEs go to every training run. Environment variables:
#   PICTURES, PROMPTS           number of images and of evaluation prompts
#   STEPS="4000 8000 200 200"   steps of autoencoder, DiT, reward gradients and GRPO
#   STAGES                      which of "pictures vae latents dit gradient grpo measure" to run
#   VAE_SETTINGS, DIT_SETTINGS, ALIGN_SETTINGS   overrides of single runs
# With small networks, on any machine:
#   PICTURES=48 STEPS="3 3 2 2" PROMPTS=6 VAE_SETTINGS="batch_size=8 engine.precision=fp32" ALIGN_SETTINGS="batch.prompts=4" \
#   DIT_SETTINGS="batch.prompts=8 model.width=32 model.depth=1 model.heads=2 engine.compile=false engine.precision=fp32" tools/folder-walk.sh OUT
set -euo pipefail
home=$(cd "$(dirname "$0")/.." && pwd)
out=$1
shift
python=${PYTHON:-python3}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$home PYTHONUNBUFFERED=1
read -r vae dit gradient grpo <<<"${STEPS:-4000 8000 200 200}"
pictures=${PICTURES:-30000}
prompts=${PROMPTS:-504}
stages=" ${STAGES:-pictures vae latents dit gradient grpo measure} "
mkdir -p "$out/sheets"
cd "$out"
seconds=$(date +%s)
finished() { echo "== $1, $(($(date +%s) - seconds)) s after the start"; }
tastemaker() { "$python" -m tastemaker "$@"; }
has_stage() { case $stages in *" $1 "*) return 0 ;; *) return 1 ;; esac; }
autoencoder=(model.autoencoder=runs/vae-playground model.latent_channels=4 model.downsample_factor=4)
prompts_shown=(-p "a photo of a red car and a blue cup" -p "a photo of two cats" -p "a photo of a dog left of a boat" -p "a photo of a green apple")
generate_sheet() { # RUN NAME WEIGHTS: a sheet of sixteen samples
  tastemaker generate "runs/$1" "${prompts_shown[@]}" --count 4 --weights "$3" --out "samples/$2" && cp "samples/$2/sheet.png" "sheets/$2.png"
}

if has_stage pictures && [ ! -f pictures/metadata.jsonl ]; then
  "$python" - "$pictures" <<'PY'
"""Write playground images to a folder, with their captions in metadata.jsonl."""
import json, sys
from pathlib import Path
from tastemaker.data.playground import PlaygroundScenes
from tastemaker.data.image_io import make_contact_sheet, save_image

count, folder, lines = int(sys.argv[1]), Path("pictures"), []
folder.mkdir(exist_ok=True)
data, size = PlaygroundScenes(snap_probability=0.7).load(0), min(count, 500)
for step in range(-(-count // size)):
    batch = data.batch(step, size, 0, 1)
    pixels = batch.pixels.cpu()
    for i, (prompt, image) in enumerate(zip(batch.prompts, pixels)):
        name = f"{step * size + i:06d}.png"
        save_image(image, folder / name)
        lines.append(json.dumps({"file_name": name, "prompt": prompt}))
    if step == 0:
        save_image(make_contact_sheet(pixels[:16], list(batch.prompts[:16]))[None], Path("sheets/pictures.png"))
(folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
PY
  finished pictures
fi
if has_stage vae; then
  tastemaker train vae-playground "data={type: image_collection, path: pictures, image_size: 64}" "validation={data: null, split: 0.02}" \
    "steps=$vae" ${VAE_SETTINGS:-} "$@"
  mkdir -p some && find pictures -name '00000?.png' -exec cp {} some/ \;
  tastemaker reconstruct some --model runs/vae-playground --out copies
  "$python" - <<'PY'
"""Draw images beside their reconstructions on one sheet."""
from pathlib import Path
import torch
from tastemaker.data.image_io import make_contact_sheet, read_image, save_image

files = sorted(Path("copies").rglob("*.png"))[:16]
images = torch.stack([read_image(file) for file in files])
save_image(make_contact_sheet(images, [file.stem for file in files])[None], Path("sheets/copies.png"))
PY
  cp runs/vae-playground/reconstruction.json sheets/ 2>/dev/null || true
  finished autoencoder
fi
if has_stage latents; then
  tastemaker encode pictures --vae runs/vae-playground --size 64 --out latents
  finished latents
fi
if has_stage dit; then
  tastemaker train dit-folder-text "${autoencoder[@]}" "data={type: latent_folder, path: latents}" "steps=$dit" ${DIT_SETTINGS:-} "$@"
  generate_sheet dit-folder-text before ema
  finished DiT
fi
for method in gradient grpo; do
  recipe=grpo-dit-folder steps=$grpo
  [ "$method" = grpo ] || recipe=reward-gradient-dit-folder steps=$gradient
  if has_stage "$method"; then
    tastemaker train "$recipe" "${autoencoder[@]}" "steps=$steps" ${DIT_SETTINGS:-} ${ALIGN_SETTINGS:-} "$@"
    generate_sheet "$recipe" "$method" live
    finished "$method"
  fi
done
if has_stage measure; then
  for run in dit-folder-text reward-gradient-dit-folder grpo-dit-folder; do
    [ ! -d "runs/$run" ] || tastemaker evaluate playeval --model "runs/$run" --num-prompts "$prompts" --out "evaluations/$run"
  done
  tastemaker generate runs/reward-gradient-dit-folder "${prompts_shown[@]}" --count 4 --out samples/solver \
    --scheduler DPMSolverMultistepScheduler --num-inference-steps 10
  finished evaluation
fi
