"""Subset the fonts of the playground's signs to Latin letters and digits. Its output is in the repository.

pip install fonttools
apt-get download fonts-dejavu-core fonts-open-sans fonts-quicksand
for package in *.deb; do dpkg-deb -x $package unpacked; done
python tools/make_fonts.py unpacked/usr/share/fonts/truetype
"""

from __future__ import annotations

import string
import sys
from pathlib import Path

from fontTools import subset

OUT = Path(__file__).parent.parent / "tastemaker/playground/art/fonts"
# No license reserves one of these names, so subset fonts may keep them.
FONTS = (
    "dejavu/DejaVuSans-Bold.ttf",
    "dejavu/DejaVuSansMono-Bold.ttf",
    "dejavu/DejaVuSerif-Bold.ttf",
    "open-sans/OpenSans-Bold.ttf",
    "open-sans/OpenSans-CondBold.ttf",
    "quicksand/Quicksand-Bold.ttf",
)


def main(folder: Path) -> None:
    options = subset.Options(layout_features=["kern"], hinting=False, name_IDs=[0, 1, 2, 3, 4, 5, 6, 13, 14])
    for name in FONTS:
        font = subset.load_font(str(folder / name), options)
        subsetter = subset.Subsetter(options)
        subsetter.populate(text=string.ascii_letters + string.digits)
        subsetter.subset(font)
        subset.save_font(font, str(OUT / Path(name).name), options)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
