"""Open-Sora 1.2's names of resolutions and durations, its timestep shift, and its prompt format."""

from __future__ import annotations

import html
import math
import re
import unicodedata
import urllib.parse

from ..nets.opensora_vae import CHUNK_FRAMES, CHUNK_LATENTS

# Height : width; below, the sizes the model was trained on, as height x width in the same order.
ASPECT_RATIOS = ["3:8", "9:21", "12:25", "1:2", "9:17", "27:50", "9:16", "5:8", "2:3", "3:4", "1:1"]
ASPECT_RATIOS += ["4:3", "3:2", "16:9", "17:9", "2:1", "50:27"]
RESOLUTIONS = {
    "144p": "117x312 125x291 133x277 135x270 139x262 141x260 144x256 151x241 156x234 166x221 192x192 221x165 "
    "235x156 256x144 263x139 271x135 277x132",
    "240p": "196x522 210x490 222x462 226x452 232x438 236x436 240x426 252x404 262x393 276x368 320x320 370x278 "
    "392x262 426x240 440x232 452x226 462x222",
    "360p": "294x784 314x732 332x692 340x680 350x662 352x652 360x640 380x608 392x588 416x554 480x480 554x416 "
    "588x392 640x360 660x350 678x340 692x332",
    "480p": "392x1046 420x980 444x925 452x904 466x880 470x870 480x854 506x810 522x784 554x738 640x640 740x555 "
    "784x522 854x480 880x466 906x454 924x444",
    "720p": "588x1568 628x1466 666x1388 678x1356 698x1318 706x1306 720x1280 758x1212 784x1176 832x1110 960x960 "
    "1108x832 1176x784 1280x720 1320x698 1358x680 1386x666",
    "1080p": "882x2352 942x2198 998x2080 1018x2036 1048x1980 1058x1958 1080x1920 1138x1820 1176x1764 1248x1664 "
    "1440x1440 1662x1246 1764x1176 1920x1080 1980x1048 2036x1018 2078x998",
    "2k": "1176x3136 1256x2930 1330x2770 1358x2716 1398x2640 1412x2612 1440x2560 1518x2428 1568x2352 1662x2216 "
    "1920x1920 2218x1664 2352x1568 2560x1440 2638x1396 2716x1358 2772x1330",
    "4k": "1764x4704 1886x4400 1996x4158 2036x4072 2096x3960 2118x3918 2160x3840 2276x3642 2352x3528 2494x3326 "
    "2880x2880 3326x2494 3528x2352 3840x2160 3958x2096 4072x2036 4156x1994",
}
DURATIONS = {"2s": 51, "4s": 102, "8s": 204, "16s": 408, "32s": 816}
DURATIONS |= {"1x": 51, "2x": 102, "4x": 204, "8x": 408, "16x": 816}
IMAGE_FPS = 120  # frame rate of a single image
BASE_SIDE = 512  # pixels per side at which the timestep shift is 1
FILES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
# Replacements that clean the training captions, applied in this order.
RULES = (
    (r"https?:\S*|\bwww\.\S+|\b[a-z0-9.-]+\.(?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)", ""),
    (r"<[^<>]*>|@\w+|[\u31c0-\u9fff]+", ""),
    (r"[-\u058a\u05be\u1400\u1806\u2010-\u2015\u2212\u2e3a\u2e3b\u301c\u3030\ufe31\ufe32\ufe58\ufe63\uff0d]+", "-"),
    (r"[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
    (r"[\u2018\u2019]", "'"),
    (r"&quot;?|&amp", ""),
    (r"\d{1,3}(?:\.\d{1,3}){3}", " "),
    (r"\d:\d\d\s+$", ""),
    (rf"#\d{{1,3}}\b|#\d{{5,}}\b|\b\d{{6,}}\b|\S+\.(?:{FILES})", ""),
    (r"[\"']{2,}", '"'),
    (r"\\n|\.{2,}|[#\u00ae\u2022\u00a9\u2122&@\u00b7\u00ba\u00bd\u00be\u00bf\u00a1\u00a7~()\[\]{}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
RULES_AFTER_SPLITTING = (  # applied after words joined by hyphens and underscores are split
    (r"\b[a-z]{1,3}\d{3,15}\b|\b[a-z]+\d+[a-z]+\b|\b\d+[a-z]+\d+\b", ""),
    (r"(?:worldwide\s+)?(?:free\s+)?shipping|(?:free\s)?download(?:\sfree)?|\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{FILES})(?:\simages?)?|\bpage\s+\d+\b", ""),
    (r"\b\d*[a-z]+\d+[a-z]+\d+[a-z\d]*\b", " "),
    (r"\b\d+\.?\d*[x\u0445\u00d7]\d+\.?\d*\b", ""),
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),
    (r"^['_,:;-]|['_,:+-]$", ""),
)
JOINED = re.compile(r"[-_]")  # a caption with many of these was made from a file name


def resolve_size(resolution: str, aspect_ratio: str) -> tuple[int, int]:
    """Height and width of a name and an aspect ratio, such as 240p and 3:4, or of pixels, such as 276x368."""
    pixels = re.fullmatch(r"(\d+)x(\d+)", resolution)
    if pixels:
        height, width = int(pixels[1]), int(pixels[2])
        if not (16 <= height <= 8192 and 16 <= width <= 8192):
            raise ValueError(
                f"'resolution': expected 16 to 8192 pixels per side, got {resolution}; correct 'resolution' [TM491]"
            )
        return height, width
    if resolution not in RESOLUTIONS:
        known = ", ".join(RESOLUTIONS)
        raise ValueError(
            f"'resolution': expected {known}, or height and width such as 276x368, got {resolution:.40}; correct "
            "'resolution' [TM492]"
        )
    if aspect_ratio not in ASPECT_RATIOS:
        known = ", ".join(ASPECT_RATIOS)
        raise ValueError(
            f"'aspect_ratio': expected height:width as one of {known}, got {aspect_ratio:.40}; correct 'aspect_ratio' "
            "[TM493]"
        )
    return resolve_size(RESOLUTIONS[resolution].split()[ASPECT_RATIOS.index(aspect_ratio)], aspect_ratio)


def resolve_num_frames(duration: str | int) -> int:
    """Number of frames of a duration, such as 2s; a number is returned as it is."""
    frames = DURATIONS.get(str(duration), -1)
    if frames < 0 and str(duration).isdecimal():
        frames = int(duration)
    if not 1 <= frames <= 4096:
        known = ", ".join(DURATIONS)
        raise ValueError(
            f"'duration': expected one of {known}, or 1 to 4096 frames, got {duration!s:.40}; correct 'duration' "
            "[TM494]"
        )
    return frames


def timestep_shift(height: int, width: int, frames: int) -> float:
    """The `shift` of a rectified flow: larger and longer videos spend more steps at high noise.

    Videos shorter than a chunk count as images; the published formula would give them a shift of 0.
    """
    return math.sqrt(height * width) / BASE_SIDE * math.sqrt(max(1, frames // CHUNK_FRAMES * CHUNK_LATENTS))


def add_score_tags(prompt: str, aesthetic: float | None, motion: float | None, camera: str | None) -> str:
    """The prompt with scores and camera motion in the format of the training captions, unless it has them."""
    tags = {
        "aesthetic score": None if aesthetic is None else f"{aesthetic:.1f}",
        "motion score": None if motion is None else f"{motion:.1f}",
        "camera motion": camera,
    }
    added = [f"{name}: {value}." for name, value in tags.items() if value is not None and f"{name}:" not in prompt]
    return " ".join([prompt, *added])


def clean_opensora_prompt(text: str) -> str:
    """Clean a prompt twice, like the training captions: lower case, without URLs, handles, codes and symbols."""
    for _ in range(2):
        text = _apply_replacements(html.unescape(urllib.parse.unquote_plus(text)).strip().lower(), RULES)
        text = JOINED.sub(" ", text) if len(JOINED.findall(text)) > 3 else text
        text = html.unescape(html.unescape(unicodedata.normalize("NFC", text)))
        text = _apply_replacements(text, RULES_AFTER_SPLITTING).strip()
    return text


def _apply_replacements(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text
