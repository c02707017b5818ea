"""Import and export of votes: the columns of Pick-a-Pic, those of preference pairs, and folders of liked pictures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

from PIL import Image
from rich.console import Console

from ..core import output_paths
from ..core.registry import ConfigError
from ..core.safe_files import MAX_ROWS_BYTES, parse_json, read_text
from ..data.hf_datasets import is_saved_dataset, iterate_rows, save_rows
from .sessions import Ballot, Session, SessionSource, create_session, record_vote
from .votes import ALPHABET, ID_LENGTH, Choice, Vote, VotedSample, VoteLog, now, read_votes, to_pairs

Layout = Literal["pickapic", "pairs"]
PROMPT_COLUMNS, VOTER_COLUMNS = ("caption", "prompt", "text"), ("user_id", "voter")
IMAGE_COLUMNS = (("jpg_0", "jpg_1"), ("image_0", "image_1"), ("image_a", "image_b"))
LABEL_COLUMNS = ("label_0", "label_1")
SUFFIXES = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "GIF": ".gif"}
VOTES_FILE, IMPORTED = "votes.jsonl", "samples/imported"
MAX_IMAGE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ImportReport:
    """What an import did."""

    added: int  # votes
    known: int  # votes that the log had already
    skipped: int  # rows without a label, or with two equal images

    def describe(self, path: Path) -> str:
        known = f", {self.known} were there already" if self.known else ""
        skipped = f", {self.skipped} rows without a preference between two images were skipped" if self.skipped else ""
        return f"{self.added} votes added to {path}{known}{skipped}"


def make_id(*parts: object) -> str:
    """Return an id that depends on the content only, so that a second import adds nothing."""
    number = int.from_bytes(hashlib.sha256(json.dumps(parts, default=str).encode()).digest()[:16], "big")
    return "".join(ALPHABET[number >> 5 * k & 31] for k in reversed(range(ID_LENGTH)))


def import_votes(path: str | Path, directory: str | Path, *, voter: str = "", split: str = "train") -> ImportReport:
    """Add the preferences of a data set to the vote log in a folder, and its images to samples/imported.

    Args:
        path: a .jsonl or .parquet file, or a folder that `datasets` saved. Rows have a caption (or prompt), jpg_0 and
            jpg_1 (bytes or paths) with label_0 and label_1, as Pick-a-Pic's; or a prompt with chosen and rejected.
        directory: folder of the vote log.
        voter: name of the voter; by default the column user_id.
        split: split of a saved DatasetDict.
    """
    path, directory = Path(path), Path(directory)
    output_paths.check_output_directory(directory)
    skipped, votes = 0, []
    for number, row in enumerate(read_rows(path, split), 1):
        vote = read_row(row, path, number, directory, voter)
        skipped += vote is None
        votes += [vote] if vote else []
    if not votes:
        raise ConfigError(
            f"{path}: none of {skipped} rows prefers one image to another; expected the columns caption, jpg_0, jpg_1, "
            "label_0 and label_1, or prompt, chosen and rejected [TM1416]"
        )
    added = VoteLog(directory / VOTES_FILE).append_all(votes)
    return ImportReport(added, len(votes) - added, skipped)


def read_rows(path: Path, split: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file or a saved data set."""
    if path.suffix == ".parquet" or (path.is_dir() and is_saved_dataset(path)):
        yield from iterate_rows(path, split)
        return
    if not path.is_file() or path.suffix not in (".jsonl", ".json"):
        raise ConfigError(
            f"{path}: expected a .jsonl or .parquet file, or a folder that `datasets` saved; for a folder of pictures "
            "that you like, give --liked [TM1417]"
        )
    for number, line in enumerate(read_text(path, MAX_ROWS_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, path)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: expected a JSON object with columns; correct this line [TM1418]")
        yield row


def read_row(row: Mapping[str, Any], path: Path, number: int, directory: Path, voter: str) -> Vote | None:
    """Return the vote of a row, whose images are written to the folder; None if it prefers no image."""
    place = f"{path}, row {number}"
    prompt = next((row[name] for name in PROMPT_COLUMNS if isinstance(row.get(name), str)), None)
    is_pair = "chosen" in row and "rejected" in row
    columns = ("chosen", "rejected") if is_pair else next((c for c in IMAGE_COLUMNS if c[0] in row), None)
    if prompt is None or columns is None:
        raise ConfigError(
            f"{place}: found the columns {', '.join(map(str, row)):.200}; expected caption, jpg_0, jpg_1, label_0 "
            "and label_1, or prompt, chosen and rejected [TM1420]"
        )
    choice: Choice = 0 if is_pair else read_label(row, place)
    if choice is None:
        return None
    files = [save_imported(row[name], path.parent, directory, f"{place}, {name}") for name in columns]
    if files[0] == files[1]:
        return None
    names = [str(row.get(f"model_{k}") or row.get(f"source_{k}") or "imported") for k in (0, 1)]
    samples = tuple(VotedSample(f, Path(f).stem, source) for f, source in zip(files, names, strict=True))
    name = voter or next((str(row[each]) for each in VOTER_COLUMNS if row.get(each) is not None), "imported")
    key = make_id(prompt, files, choice, name, row.get("ranking_id"), row.get("created_at"))
    return Vote(key, str(row.get("created_at") or now()), name, "pair", prompt, samples, choice, session=path.name)


def read_label(row: Mapping[str, Any], place: str) -> Choice:
    """Return the choice of a row in Pick-a-Pic's columns: the image with the higher label; None without a label."""
    if row.get("has_label") is False or row.get("are_different") is False:
        return None
    labels = [row.get(name) for name in LABEL_COLUMNS]
    if any(label is None for label in labels):
        return None
    if any(isinstance(x, bool) or not isinstance(x, int | float) or not 0 <= x <= 1 for x in labels):
        raise ConfigError(f"{place}: label_0 and label_1 must be numbers from 0 to 1, got {labels!r:.80} [TM1421]")
    first, second = (float(str(label)) for label in labels)
    return "tie" if first == second else int(second > first)


def save_imported(value: Any, base: Path, directory: Path, place: str) -> str:
    """Write an image of a row (bytes, {bytes, path} or a path) to the folder under its hash; returns the file."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    found = value
    if isinstance(value, str) and (base / value).is_file() and (base / value).stat().st_size <= MAX_IMAGE_BYTES:
        found = (base / value).read_bytes()
    if not isinstance(found, bytes):
        raise ConfigError(
            f"{place}: expected the bytes of an image, or the path of one of at most 64 MB, got {found!r:.200}; "
            "correct the row, or download the images first if the data set has addresses only [TM1422]"
        )
    try:  # only images are copied, whatever file a row names
        with Image.open(BytesIO(found), formats=[*SUFFIXES]) as image:
            image.verify()
            suffix = SUFFIXES[str(image.format)]
    except (OSError, SyntaxError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{place}: not a PNG, JPEG, WebP or GIF image ({error!s:.100}); remove the row [TM1424]"
        ) from error
    name = f"{IMPORTED}/{hashlib.sha256(found).hexdigest()}{suffix}"
    if not (directory / name).is_file():
        with output_paths.replace_file(directory / name) as partial:
            partial.write_bytes(found)
    return name


def import_liked_pictures(
    liked: str | Path,
    against: str,
    directory: str | Path,
    *,
    seeds: Sequence[int] = (0,),
    voter: str = "me",
    overrides: Sequence[str] = (),
    tiny: bool = False,
    console: Console | None = None,
) -> Session:
    """Prefer your own pictures to a model's samples of the same captions; returns the session with these votes.

    Args:
        liked: folder of pictures; their captions are in metadata.jsonl, or they are the names of the files.
        against: a recipe, a run or an export, which is sampled with the captions; or a folder of its samples.
        directory: folder of the session.
        seeds: of the model's samples; each picture is paired with the samples of its caption.
    """
    sources = [SessionSource("liked pictures", str(liked)), SessionSource("", against)]
    session = create_session(
        directory, sources, seeds=seeds, blind=False, target=1, overrides=overrides, tiny=tiny, console=console
    )
    for key in session.schedule:
        chosen = next(k for k, number in enumerate(key) if session.samples[number].source == 0)
        record_vote(session, voter, Ballot(make_id(session.name, voter, key), "pair", "", key), chosen)
    return session


def export_votes(votes: str | Path, out: str | Path, *, layout: Layout = "pickapic") -> int:
    """Write votes for other tools; returns the number of rows.

    Args:
        votes: a vote log, or the folder that holds it.
        out: a .jsonl file (with paths of images), a .parquet file (with their bytes), or a folder for `datasets`.
        layout: pickapic (caption, jpg_0, jpg_1, label_0, label_1, ...) or pairs (prompt, chosen, rejected).
    """
    path, out = Path(votes), Path(out)
    path = path / VOTES_FILE if path.is_dir() else path
    if layout not in get_args(Layout):
        raise ConfigError(f"--layout: expected pickapic or pairs, got {layout!r:.40}; choose one [TM1425]")
    output_paths.check_output_directory(out) if not out.suffix else output_paths.check_output_file(out)
    with_bytes = out.suffix != ".jsonl"
    maker = format_pickapic if layout == "pickapic" else format_pairs
    rows = list(maker(read_votes(path), path.parent, out.parent, with_bytes=with_bytes))
    if not rows:
        raise ConfigError(f"{path} has no vote on two images; vote first, for example in `tastemaker studio` [TM1426]")
    if with_bytes:
        save_rows(rows, out)
    else:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        output_paths.write_text_atomically(out, text)
    return len(rows)


def format_pickapic(votes: Iterable[Vote], folder: Path, base: Path, *, with_bytes: bool) -> Iterator[dict[str, Any]]:
    """Yield rows with the columns of Pick-a-Pic. A choice among four is a row for each sample that was not chosen."""
    for vote in votes:
        comparisons = list(vote.pairs())
        if vote.kind == "pair":
            comparisons = [(0, 1)]
        for a, b in comparisons:
            samples = (vote.samples[min(a, b)], vote.samples[max(a, b)])
            winner = vote.choice if isinstance(vote.choice, int) else None
            label = 0.5 if winner is None else float(winner == min(a, b))
            uids = [sample.sha256 or sample.file for sample in samples]
            yield {
                "caption": vote.prompt,
                "jpg_0": encode_image(folder / samples[0].file, base, with_bytes=with_bytes),
                "jpg_1": encode_image(folder / samples[1].file, base, with_bytes=with_bytes),
                "label_0": label,
                "label_1": 1 - label,
                "are_different": uids[0] != uids[1],
                "has_label": True,
                "image_0_uid": uids[0],
                "image_1_uid": uids[1],
                "best_image_uid": "tie" if winner is None else uids[int(label < 0.5)],
                "model_0": samples[0].source,
                "model_1": samples[1].source,
                "user_id": vote.voter,
                "ranking_id": vote.id,
                "created_at": vote.time,
            }


def format_pairs(votes: Iterable[Vote], folder: Path, base: Path, *, with_bytes: bool) -> Iterator[dict[str, Any]]:
    """Yield rows with the columns prompt, chosen and rejected, also of likes within a prompt; ties are left out."""
    for pair in to_pairs(votes, folder):
        images = (encode_image(file, base, with_bytes=with_bytes) for file in (pair.chosen, pair.rejected))
        yield {"prompt": pair.prompt, **dict(zip(("chosen", "rejected"), images, strict=True)), "voter": pair.voter}


def encode_image(file: Path, base: Path, *, with_bytes: bool) -> bytes | str:
    """Return the bytes of an image, or its path relative to the folder of the exported file if it is below."""
    if not file.is_file():
        raise ConfigError(f"{file}: the image of a vote is missing; restore it, or remove its votes [TM1427]")
    if with_bytes:
        return file.read_bytes()
    resolved, base = file.resolve(), base.resolve()
    return str(resolved.relative_to(base)) if resolved.is_relative_to(base) else str(resolved)
