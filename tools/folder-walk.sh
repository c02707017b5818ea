#!/usr/bin/env bash
# The walk of docs/from-folder-to-aligned.md, from nothing: a folder of the playground's pictures, an autoencoder, a DiT told
# captions, the same aligned by the gradient of a reward and by GRPO, and a sheet of pictures of each stage. Meant for one H200:
# five minutes for the autoencoder, ten for the DiT. Runs resume: call it again after an interruption.
#   tools/folder-walk.sh OUT [SETTING...]
# OUT gets pictures/, runs/ and sheets/; SETTINGs go to every training. PICTURES, STEPS (of the autoencoder, the DiT, the
# gradient and GRPO), PROMPTS and STAGES, of "pictures vae latents dit gradient grpo measure", say how much is done;
# $VAE_SETTINGS, $DIT_SETTINGS and $ALIGN_SETTINGS go to those runs alone. At small size, on any machine:
#   PICTURES=48 STEPS="3 3 2 2" PROMPTS=6 VAE_SETTINGS="rows=8 engine.precision=fp32" ALIGN_SETTINGS="batch.prompts=4" \
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
said() { echo "== $1, $(($(date +%s) - seconds)) s after the start"; }
taste() { "$python" -m tastemaker "$@"; }
wanted() { case $stages in *" $1 "*) return 0 ;; *) return 1 ;; esac; }
codec=(model.codec=runs/vae-playground model.channels=4 model.factor=4)
asked=(-p "a photo of a red car and a blue cup" -p "a photo of two cats" -p "a photo of a dog left of a boat" -p "a photo of a green apple")
paint() { # RUN NAME WEIGHTS: sixteen pictures, one sheet
  taste generate "runs/$1" "${asked[@]}" --count 4 --weights "$3" --out "made/$2" && cp "made/$2/sheet.png" "sheets/$2.png"
}

if wanted pictures && [ ! -f pictures/metadata.jsonl ]; then
  "$python" - "$pictures" <<'PY'
"""The playground's pictures as anybody's folder: files, and their captions in one list."""
import json, sys
from pathlib import Path
from tastemaker.data.playground import PlaygroundScenes
from tastemaker.data.image_io import save_picture, sheet

count, folder, lines = int(sys.argv[1]), Path("pictures"), []
folder.mkdir(exist_ok=True)
data, size = PlaygroundScenes(snapped=0.7).load(0), min(count, 500)
for step in range(-(-count // size)):
    batch = data.batch(step, size, 0, 1)
    pixels = batch.pixels.cpu()
    for i, (prompt, picture) in enumerate(zip(batch.prompts, pixels)):
        name = f"{step * size + i:06d}.png"
        save_picture(picture, folder / name)
        lines.append(json.dumps({"file_name": name, "prompt": prompt}))
    if step == 0:
        save_picture(sheet(pixels[:16], list(batch.prompts[:16]))[None], Path("sheets/pictures.png"))
(folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
PY
  said pictures
fi
if wanted vae; then
  taste train vae-playground "data={type: gallery, path: pictures, size: 64}" "validation={data: null, share: 0.02}" \
    "steps=$vae" ${VAE_SETTINGS:-} "$@"
  mkdir -p few && find pictures -name '00000?.png' -exec cp {} few/ \;
  taste reconstruct few --model runs/vae-playground --out copies
  "$python" - <<'PY'
"""Pictures beside their copies, on one sheet."""
from pathlib import Path
import torch
from tastemaker.data.image_io import read_picture, save_picture, sheet

files = sorted(Path("copies").rglob("*.png"))[:16]
save_picture(sheet(torch.stack([read_picture(file) for file in files]), [file.stem for file in files])[None], Path("sheets/copies.png"))
PY
  cp runs/vae-playground/copies.json sheets/ 2>/dev/null || true
  said autoencoder
fi
if wanted latents; then
  taste encode pictures --vae runs/vae-playground --size 64 --out latents
  said latents
fi
if wanted dit; then
  taste train dit-folder-text "${codec[@]}" "data={type: latent_folder, path: latents}" "steps=$dit" ${DIT_SETTINGS:-} "$@"
  paint dit-folder-text before ema
  said DiT
fi
for method in gradient grpo; do
  recipe=grpo-dit-folder steps=$grpo
  [ "$method" = grpo ] || recipe=reward-gradient-dit-folder steps=$gradient
  if wanted "$method"; then
    taste train "$recipe" "${codec[@]}" "steps=$steps" ${DIT_SETTINGS:-} ${ALIGN_SETTINGS:-} "$@"
    paint "$recipe" "$method" live
    said "$method"
  fi
done
if wanted measure; then
  for run in dit-folder-text reward-gradient-dit-folder grpo-dit-folder; do
    [ ! -d "runs/$run" ] || taste evaluate playeval --model "runs/$run" --prompts "$prompts" --out "exams/$run"
  done
  taste generate runs/reward-gradient-dit-folder "${asked[@]}" --count 4 --out made/solver \
    --scheduler DPMSolverMultistepScheduler --steps 10
  said measured
fi
