"""What the votes of a session teach: a preference model, and which pairs to vote on next.

`preferences.json` in the folder of a session lists the runs that trained a model from its votes, the newest last. What
needs torch is imported where it is used, because the pages of the studio do without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError
from ..core.output_paths import write_text_atomically
from ..core.safe_files import read_json
from .sessions import ORDER_FILE, VOTES_FILE, Session, write_active_order
from .votes import UNDECIDED, read_votes

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from ..core.types import Placement
    from .preference_model import Blocks, Comparisons

MODELS_FILE = "preferences.json"
REPORT_FILE = "preference.json"  # in the run of a preference model that is complete
BATCH_SIZE = 32  # samples that are encoded at once
MAX_CANDIDATES = 1000  # pairs that are ranked: the cost grows with the square
MAX_ORDERED = 200  # pairs that are chosen, one after the other; the balanced order follows
MIN_COMPARISONS = 10


def list_preference_models(session: Session) -> list[Path]:
    """Return the runs that trained a preference model from the votes of a session and are complete, newest first."""
    try:
        names = read_json(session.directory / MODELS_FILE)
        runs = [(session.directory / str(name)).resolve() for name in names]
    except (OSError, ValueError, TypeError):
        return []
    return [run for run in reversed(runs) if (run / REPORT_FILE).is_file()]


def record_preference_model(session: Session, run: Path) -> None:
    """Note that a run trained a preference model from the votes of a session."""
    folder = session.directory.resolve()
    known = [os.path.relpath(each, folder) for each in reversed(list_preference_models(session))]
    name = os.path.relpath(run.resolve(), folder)
    names = [*(each for each in known if each != name), name]
    write_text_atomically(session.directory / MODELS_FILE, json.dumps(names, indent=1) + "\n")


def read_report(run: Path) -> dict[str, Any]:
    """Return the report of a preference model; empty if it cannot be read."""
    try:
        report = read_json(run / REPORT_FILE)
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def choose_preference_recipe(session: Session, console: Console | None = None) -> str:
    """Return the recipe of a preference model that fits what the session shows."""
    from ..search.generation import resolve_source
    from .alignment import is_playground
    from .session_samples import is_picture_folder

    models = [source for source in session.sources if not is_picture_folder(source)]
    if not models:
        return "preference-clip"
    config, _ = resolve_source(models[0].model, models[0].overrides, console=console)
    return "preference-playground" if is_playground(config) else "preference-clip"


def learn_taste(
    session: Session,
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    recipe: str = "",
    voter: str = "",
    console: Console | None = None,
) -> bool:
    """Train a preference model from the votes of a session; False if it was asked to stop.

    Args:
        out: directory of the run, which the reward `preference` loads.
        recipe: of the preference model; by default one that fits the session.
        voter: use only the votes of this voter.
    """
    from ..config.schema import PreferenceRunConfig
    from ..console import message_console
    from ..training.trainer import load_run_config, run_training

    console, out = console or message_console(), Path(out)
    recipe = recipe or choose_preference_recipe(session, console)
    data = {"type": "votes", "path": str(session.directory / VOTES_FILE), "voter": voter}
    settings = [f"data={json.dumps(data)}", f"output_dir={out.parent}", f"name={out.name}"]
    config = load_run_config(recipe, [*settings, *overrides])
    if not isinstance(config, PreferenceRunConfig):
        raise ConfigError(
            f"--recipe: {recipe:.60} does not train a preference model; use preference-playground, preference-clip or "
            "preference-pickscore [TM1500]"
        )
    completed = run_training(config, console=console)
    if completed:
        record_preference_model(session, out)
    return completed


def order_pairs(session: Session, preference: Path | None = None, placement: Placement | None = None) -> int:
    """Order the pairs that nobody has voted on by expected information, the most informative first; returns how many.

    The head is fitted again to all votes so far, so that the order can be renewed after some votes without training.

    Args:
        preference: the run of the preference model, whose network and features are used; by default the newest.
    """
    import torch

    from ..core.types import Placement
    from .pair_selection import select_pairs
    from .preference_model import fit_preference

    if session.kind != "pair":
        raise ConfigError(f"{session.name}: only pairs can be ordered, and this session asks '{session.kind}' [TM1501]")
    model = preference or next(iter(list_preference_models(session)), None)
    if model is None:
        raise ConfigError(
            f"{session.name}: no preference model was trained from these votes; run `tastemaker vote learn "
            f"{session.name}` first, or name one with --preference [TM1502]"
        )
    answered = {tuple(sorted(session.numbers.get(s.file, -1) for s in vote.samples)) for vote in session.votes()}
    rest = [key for key in session.schedule if tuple(sorted(key)) not in answered][:MAX_CANDIDATES]
    blocks = encode_session(session, model, placement or Placement())
    votes = compare_voted(session, blocks)
    if len(votes) < MIN_COMPARISONS:
        raise ConfigError(
            f"{session.name}: {len(votes)} votes are too few to order the next pairs by; vote on at least "
            f"{MIN_COMPARISONS} [TM1503]"
        )
    chosen: list[int] = []
    if rest:
        pairs: Tensor = torch.tensor(rest)
        chosen = select_pairs(fit_preference(votes), blocks, pairs, MAX_ORDERED)
    write_active_order(session, [(rest[k][0], rest[k][1]) for k in chosen])
    return len(chosen)


def restore_balanced_order(session: Session) -> None:
    """Show the pairs in the balanced order again."""
    (session.directory / ORDER_FILE).unlink(missing_ok=True)


def encode_session(session: Session, preference: Path, placement: Placement) -> Blocks:
    """Return the features of all samples of a session, by the network of a preference model: {name: [N, C]}."""
    import torch

    from ..data.image_io import read_image
    from ..rewards.preference import PreferenceReward
    from .preference_model import encode_samples

    scorer = PreferenceReward(path=preference).load(placement)
    parts: list[Blocks] = []
    with torch.no_grad():
        for first in range(0, len(session.samples), BATCH_SIZE):
            samples = session.samples[first : first + BATCH_SIZE]
            images = [read_image(session.directory / each.file).to(placement.device) for each in samples]
            prompts = [session.prompts[each.prompt] for each in samples]
            has_one_size = len({image.shape for image in images}) == 1
            batches = [slice(0, len(images))] if has_one_size else [slice(k, k + 1) for k in range(len(images))]
            parts += [
                encode_samples(scorer.net, torch.stack(images[each]), prompts[each], scorer.layer) for each in batches
            ]
    return {name: torch.cat([part[name] for part in parts]).double().cpu() for name in parts[0]}


def compare_voted(session: Session, blocks: Blocks) -> Comparisons:
    """Return the votes of a session as comparisons of its samples. A tie counts half for each."""
    import torch

    from .preference_model import Comparisons

    rows: list[tuple[int, int, float, int]] = []
    places = {prompt: k for k, prompt in enumerate(session.prompts)}
    for vote in read_votes(session.directory):
        numbers = [session.numbers.get(sample.file, -1) for sample in vote.samples]
        if min(numbers) < 0 or vote.kind != "pair":
            continue
        if vote.choice in UNDECIDED:
            target = 0.5
        else:
            target = 1.0 - float(vote.choice or 0)
        rows.append((numbers[0], numbers[1], target, places.get(vote.prompt, 0)))
    first, second, target_column, prompt = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Comparisons(
        blocks,
        torch.tensor(first, dtype=torch.long),
        torch.tensor(second, dtype=torch.long),
        torch.tensor(target_column, dtype=torch.float64),
        torch.tensor(prompt, dtype=torch.long),
    )
