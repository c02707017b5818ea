"""Build tastemaker/playground/art/{noto,twemoji}.npz from two npm packages. Its output is in the repository.

npm pack emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0
python tools/make_sprites.py FOLDER_OF_THE_TWO_TGZ
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 32
OUT = Path(__file__).parent.parent / "tastemaker/playground/art"
PACKAGES = {"noto": "google", "twemoji": "twitter"}
# Emoji of each class
EMOJI = {
    "person": "standing_person",
    "bicycle": "bike",
    "car": "car",
    "motorcycle": "racing_motorcycle",
    "airplane": "airplane",
    "bus": "bus",
    "train": "steam_locomotive",
    "truck": "truck",
    "boat": "boat",
    "teddy bear": "teddy_bear",
    "potted plant": "potted_plant",
    "cell phone": "iphone",
    "wine glass": "wine_glass",
    "sports ball": "soccer",
    "bird": "bird",
    "cat": "cat2",
    "dog": "dog2",
    "horse": "racehorse",
    "sheep": "sheep",
    "cow": "cow2",
    "elephant": "elephant",
    "bear": "bear",
    "zebra": "zebra_face",
    "giraffe": "giraffe_face",
    "backpack": "school_satchel",
    "umbrella": "umbrella",
    "handbag": "handbag",
    "suitcase": "luggage",
    "kite": "kite",
    "cup": "coffee",
    "bowl": "bowl_with_spoon",
    "banana": "banana",
    "apple": "apple",
    "broccoli": "broccoli",
    "carrot": "carrot",
    "pizza": "pizza",
    "donut": "doughnut",
    "cake": "birthday",
    "chair": "chair",
    "couch": "couch_and_lamp",
    "bed": "bed",
    "toilet": "toilet",
    "tv": "tv",
    "laptop": "computer",
    "book": "closed_book",
    "clock": "alarm_clock",
    "vase": "amphora",
    "scissors": "scissors",
}


def make_sprite(image: Image.Image) -> NDArray[np.uint8]:
    """Crop to the visible part, pad to a square and resize: [32, 32, 4] with straight alpha."""
    box = image.getchannel("A").point(lambda alpha: 255 * (alpha > 8)).getbbox()
    cropped = image.crop(box)
    side = max(cropped.size)
    square = Image.new("RGBA", (side, side))
    square.paste(cropped, ((side - cropped.width) // 2, (side - cropped.height) // 2))
    small: NDArray[np.uint8] = np.asarray(square.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    return np.where(small[..., 3:] > 0, small, 0).astype(np.uint8)  # zeros where transparent, which compresses better


def read_sprites(package: Path, vendor: str) -> NDArray[np.uint8]:
    """Return one sprite of each class: [48, 32, 32, 4]."""
    with tarfile.open(package) as archive:

        def read(name: str) -> bytes:
            file = archive.extractfile(f"package/{name}")
            assert file is not None, name
            return file.read()

        files = {row["short_name"]: row["image"] for row in json.loads(read("emoji.json"))}
        images = [read(f"img/{vendor}/64/{files[emoji]}") for emoji in EMOJI.values()]
    return np.stack([make_sprite(Image.open(io.BytesIO(image)).convert("RGBA")) for image in images])


def main(folder: Path) -> None:
    for style, vendor in PACKAGES.items():
        sprites = read_sprites(folder / f"emoji-datasource-{vendor}-16.0.0.tgz", vendor)
        np.savez_compressed(OUT / f"{style}.npz", names=np.array(list(EMOJI)), sprites=sprites)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
