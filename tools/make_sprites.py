"""Builds tastemaker/playground/art/{noto,twemoji}.npz from two npm packages; run once, what it wrote is what ships.

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
# The name of the emoji of each class, where it is another than the class's own.
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


def sprite(image: Image.Image) -> NDArray[np.uint8]:
    """Cut to what shows, squared around its middle, 32 pixels a side: [32, 32, 4], straight alpha."""
    box = image.getchannel("A").point(lambda alpha: 255 * (alpha > 8)).getbbox()
    cut = image.crop(box)
    side = max(cut.size)
    square = Image.new("RGBA", (side, side))
    square.paste(cut, ((side - cut.width) // 2, (side - cut.height) // 2))
    small: NDArray[np.uint8] = np.asarray(square.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    return np.where(small[..., 3:] > 0, small, 0).astype(np.uint8)  # nothing hides where nothing shows: it packs better


def sprites(package: Path, vendor: str) -> NDArray[np.uint8]:
    """One of each class: [48, 32, 32, 4]."""
    with tarfile.open(package) as archive:

        def content(name: str) -> bytes:
            file = archive.extractfile(f"package/{name}")
            assert file is not None, name
            return file.read()

        files = {row["short_name"]: row["image"] for row in json.loads(content("emoji.json"))}
        pictures = [content(f"img/{vendor}/64/{files[emoji]}") for emoji in EMOJI.values()]
    return np.stack([sprite(Image.open(io.BytesIO(picture)).convert("RGBA")) for picture in pictures])


def main(folder: Path) -> None:
    for style, vendor in PACKAGES.items():
        made = sprites(folder / f"emoji-datasource-{vendor}-16.0.0.tgz", vendor)
        np.savez_compressed(OUT / f"{style}.npz", names=np.array(list(EMOJI)), sprites=made)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
