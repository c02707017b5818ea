"""Attacks by files and names that users are given: picture bombs, archives, tables, prompts and paths."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from PIL import Image

from .lab import Lab, Result, attack, expect, train_arguments
from .server import make_png


def expect_bounded(result: Result, gib: float = 2.0) -> None:
    """Expect success or a message, without a traceback, within a bound of memory."""
    if result.code:
        result.expect_message()
    expect("Traceback" not in result.output, f"a traceback: {result.last_line}")
    result.expect_memory(gib)


def make_gif(frames: int, size: int) -> bytes:
    """Return a GIF of many frames that are all alike, which is small at any length."""
    file = io.BytesIO()
    images = [Image.new("P", (size, size), i % 2) for i in range(frames)]
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], optimize=False)
    return file.getvalue()


@attack("picture-bombs", "a message, or scores, within 2 GiB", quick=True)
def plant_picture_bombs(lab: Lab) -> None:
    bombs = {
        "177 megapixels in a PNG": ("bomb.png", make_png(13312, 13312)),
        "a gigapixel in a PNG": ("giga.png", make_png(32768, 32768)),
        "500 frames of a megapixel in a GIF": ("frames.gif", make_gif(500, 1024)),
        "240 frames of a megapixel in a GIF": ("below.gif", make_gif(240, 1000)),
        "120 frames of a megapixel in a GIF": ("fits.gif", make_gif(120, 1000)),
        "half a PNG": ("half.png", make_png(1024, 1024)[:500]),
        "a PNG of 0 x 0": ("empty.png", make_png(0, 0)),
        "text": ("text.png", b"not a picture"),
    }
    for name, (file, content) in list(bombs.items())[: lab.count(8, 1)]:
        with lab.attempt(f"{name} ({len(content) / 1000:.0f} kB)"):
            folder = lab.folder / Path(file).stem
            folder.mkdir()
            (folder / file).write_bytes(content)
            expect_bounded(lab.run("score", str(folder), "--reward", "brightness", memory=5.0))
    sets = {"33 PNGs of 63 megapixels": ("many", 33, 7936), "300 frames of a megapixel": ("long.frames", 300, 1024)}
    for name, (folder_name, count, side) in sets.items() if not lab.quick else ():
        with lab.attempt(f"{name}, each within the limit"):
            folder = lab.folder / folder_name
            folder.mkdir()
            for number in range(count):
                (folder / f"{number:05d}.png").write_bytes(make_png(side, side))
            expect_bounded(lab.run("score", str(folder), "--reward", "brightness", seconds=300, memory=6.0))


def make_tar(path: Path, names: list[str]) -> None:
    image = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 0, 0)).save(image, "PNG")
    with tarfile.open(path, "w") as tar:
        for name in names:
            for suffix, content in ((".png", image.getvalue()), (".txt", b"a red square")):
                member = tarfile.TarInfo(name + suffix)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        for kind, target in ((tarfile.SYMTYPE, "/etc/passwd"), (tarfile.LNKTYPE, "../../etc/passwd")):
            link = tarfile.TarInfo(f"link{kind.decode()}.png")
            link.type, link.linkname = kind, target
            tar.addfile(link)


@attack("archives", "a member outside its folder is refused with a message, and nothing is written outside")
def plant_archives(lab: Lab) -> None:
    for i, name in enumerate(("../../outside", "/outside", "a/../../outside")):
        with lab.attempt(name):
            shard = lab.folder / f"shard-{i}.tar"
            make_tar(shard, [name])
            data = f"data={{type: image_collection, path: {shard}, image_size: 16, batch_size: 1}}"
            data = data.replace(", batch_size: 1", "")
            command = (
                "train",
                "vae-playground",
                "--tiny",
                data,
                "steps=1",
                f"output_dir={lab.folder}",
                f"name=run-{i}",
            )
            lab.run(*command).expect_message(f"shard-{i}.tar")
            expect(not list(lab.folder.parent.glob("outside*")), "a file was written outside")


@attack("hostile-tables", "prompt files with long fields, surrogates or deep JSON: read, or refused with a message")
def plant_tables(lab: Lab) -> None:
    deep = '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"
    tables = {
        "a CSV field of 200,000 characters": ("long.csv", f'prompt,note\na red,"{"x" * 200_000}"\n'.encode()),
        "a lone surrogate in JSON": ("surrogate.jsonl", b'{"prompt": "a red \\ud800"}\n'),
        "100,000 brackets": ("deep.jsonl", deep.encode()),
        "bytes that are no text": ("binary.txt", b"a red \xff\xfe\n"),
        "a null byte": ("null.jsonl", b'{"prompt": "a red \\u0000"}\n'),
        "a number of 5,000 digits": ("digits.jsonl", b'{"prompt": "a red", "n": ' + b"9" * 5000 + b"}\n"),
    }
    for name, (file, content) in tables.items():
        with lab.attempt(name):
            (lab.folder / file).write_bytes(content)
            data = f"data={{type: prompts, path: {lab.folder / file}}}"
            command = train_arguments(lab.folder, Path(file).stem, 2, data, "sample.every=1")
            expect_bounded(lab.run(*command))


@attack("hostile-names", "names of 300 characters and lone surrogates: a message")
def give_names(lab: Lab) -> None:
    commands = {
        "a run's name of 300 characters": train_arguments(lab.folder, "n" * 300, 1),
        "a run's name with a surrogate": train_arguments(lab.folder, "x\udcff", 1),
        "a recipe of 300 characters": ["train", "r" * 300],
        "a recipe with a surrogate": ["train", "x\udcff"],
        "a prompt with a surrogate": [
            "generate",
            "grpo-toy-flow",
            "-p",
            "a red \udcff",
            "--out",
            str(lab.folder / "g"),
        ],
        "a folder of 300 characters": ["report", "d" * 300],
        "a reward's name of 300 characters": train_arguments(
            lab.folder, "run", 1, f"rewards={{{'r' * 300}: {{type: color}}}}"
        ),
        "a path of 5,000 characters": ["score", "/".join(["d" * 200] * 25), "--reward", "brightness"],
    }
    for name, command in commands.items():
        with lab.attempt(name):
            expect_bounded(lab.run(*command))


@attack("long-prompts", "captions are drawn in linear time: samples within 60 s", quick=True)
def give_long_prompts(lab: Lab) -> None:
    texts = {
        "20,000 characters without a space": "red " + "x" * 20_000,
        "1,600 characters": "a red bird " * 145,
        "a million characters": "a red bird " * 90_000,
        "20,000 wide characters": "red " + "界" * 20_000,
    }
    for i, (name, text) in enumerate(list(texts.items())[: lab.count(4, 1)]):
        with lab.attempt(name):
            prompts = lab.folder / f"prompts-{i}.jsonl"
            prompts.write_text(json.dumps({"prompt": text}) + "\n")
            out = lab.folder / f"generated-{i}"
            result = lab.run("generate", "grpo-toy-flow", "--prompts", str(prompts), "--out", str(out), seconds=60)
            expect_bounded(result)
