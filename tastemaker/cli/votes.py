"""The command vote: voting sessions, their results, and votes of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..core.errors import ConfigError
from .options import (
    EXIT_INTERRUPTED,
    LOOK,
    Precision,
    PromptFileOption,
    RewardDeviceOption,
    RunDeviceOption,
    Tiny,
    merge_overrides,
    print_next_steps,
    stderr_console,
)

app = typer.Typer()
vote = typer.Typer(no_args_is_help=True)
app.add_typer(
    vote,
    name="vote",
    rich_help_panel=LOOK,
    help="Compare models by votes: create a session for the studio, and read its result.",
    epilog="Example: tastemaker vote create taste --source runs/a --source runs/b",
)

Seeds = Annotated[str, typer.Option(help="Seeds: a number from 0, a list such as 0,1,5, or a range such as 0-3.")]
Voter = Annotated[str, typer.Option(help="Only this voter.")]
VotesArgument = Annotated[Path, typer.Argument(help="Folder of a session, or a votes.jsonl.")]


def parse_seeds(text: str) -> list[int]:
    """Return the numbers of "0,1,5" or "0-3"."""
    try:
        seeds: list[int] = []
        for part in text.split(","):
            first, dash, last = part.partition("-")
            seeds += range(int(first), int(last) + 1) if dash else [int(first)]
        return seeds
    except ValueError as error:
        raise ConfigError(
            f"--seeds: expected numbers such as 0,1 or 0-3, got {text!r:.60}; correct it [TM1428]"
        ) from error


def session_folder(session: str, runs: Path) -> Path:
    """Return the folder of a session: a path, or a name, which stands for a folder where the studio finds it."""
    return Path(session) if "/" in session else runs / ".studio" / "votes" / session


@vote.command(epilog="Example: tastemaker vote create taste --source before=runs/a@step-000100 --source after=runs/a")
def create(
    session: Annotated[str, typer.Argument(help="Name of the session, or a folder.")],
    source: Annotated[
        list[str] | None,
        typer.Option(help="Recipe, run, RUN@step-000100, RUN@reference or folder of pictures; repeatable."),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="Prompt; repeatable.")] = None,
    prompts: PromptFileOption = None,
    seeds: Seeds = "0-1",
    kind: Annotated[Literal["pair", "best_of", "like"], typer.Option(help="What voters are asked.")] = "pair",
    target: Annotated[
        int | None, typer.Option(min=1, help="Votes of each voter; default: prompts times seeds.")
    ] = None,
    show_sources: Annotated[bool, typer.Option("--show-sources", help="Show what each sample is from.")] = False,
    runs: Annotated[Path, typer.Option(help="Directory of runs, which the studio serves.")] = Path("runs"),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of the recipes as key=value; repeatable.")
    ] = None,
    tiny: Tiny = False,
    device: RunDeviceOption = None,
) -> None:
    """Create a voting session: generate samples with the same prompts and seeds. Resumes if interrupted."""
    from ..data.prompts import open_prompt_file
    from ..preferences.sessions import SESSION_FILE, complete_session, create_session

    folder, settings, console = session_folder(session, runs), merge_overrides(overrides, device), stderr_console()
    texts = list(prompt or ())
    if prompts:
        data = open_prompt_file(prompts).load(0)
        texts += data.first_prompts(len(data)).prompts
    if not source and (folder / SESSION_FILE).is_file():
        created = complete_session(folder, settings, tiny=tiny, console=console)
    else:
        created = create_session(
            folder,
            source or (),
            texts,
            parse_seeds(seeds),
            kind,
            blind=not show_sources,
            target=target,
            overrides=settings,
            tiny=tiny,
            console=console,
        )
    typer.echo(f"{len(created.samples)} samples and {len(created.schedule)} ballots in {created.directory}")
    print_next_steps(f"tastemaker studio {runs}", f"tastemaker vote stats {session}")


@vote.command("import", epilog="Example: tastemaker vote import pickapic.parquet --out votes")
def import_command(
    path: Annotated[
        Path, typer.Argument(help="A .jsonl or .parquet file, a saved data set, or with --liked a folder.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the vote log.")] = Path("votes"),
    liked: Annotated[bool, typer.Option("--liked", help="PATH is a folder of pictures that you like.")] = False,
    against: Annotated[str, typer.Option(help="With --liked: recipe, run or folder of the other side.")] = "",
    seeds: Seeds = "0",
    voter: Annotated[str, typer.Option(help="Name of the voter; default: the column user_id.")] = "",
    split: Annotated[str, typer.Option(help="Split of a saved data set.")] = "train",
    tiny: Tiny = False,
    device: RunDeviceOption = None,
) -> None:
    """Import votes with the columns of Pick-a-Pic or of chosen and rejected images, or a folder of liked pictures."""
    from ..preferences.interchange import import_liked_pictures, import_votes

    if liked != bool(against):
        raise ConfigError(
            "vote import: --liked and --against belong together; give for example --liked --against runs/a [TM1429]"
        )
    if liked:
        session = import_liked_pictures(
            path,
            against,
            out,
            seeds=parse_seeds(seeds),
            voter=voter or "me",
            overrides=merge_overrides(None, device),
            tiny=tiny,
            console=stderr_console(),
        )
        typer.echo(f"{len(session.votes())} votes in {out}: your pictures are preferred to the samples of {against}")
    else:
        typer.echo(import_votes(path, out, voter=voter, split=split).describe(out))
    print_next_steps(f"tastemaker align --votes {out / 'votes.jsonl'} --model RECIPE")


@vote.command("export", epilog="Example: tastemaker vote export runs/.studio/votes/taste --out votes.parquet")
def export_command(
    votes: VotesArgument,
    out: Annotated[Path, typer.Option(help="A .jsonl or .parquet file, or a folder for `datasets`.")] = Path(
        "votes.parquet"
    ),
    layout: Annotated[
        Literal["pickapic", "pairs"], typer.Option(help="Columns: Pick-a-Pic's, or prompt, chosen and rejected.")
    ] = "pickapic",
) -> None:
    """Export votes in the columns of Pick-a-Pic, or as pairs of chosen and rejected images."""
    from ..preferences.interchange import export_votes

    typer.echo(f"{export_votes(votes, out, layout=layout)} rows in {out}")


@vote.command(epilog="Example: tastemaker vote stats taste --reward pickscore")
def stats(
    session: Annotated[str, typer.Argument(help="Name or folder of a session.")],
    reward: Annotated[
        list[str] | None, typer.Option(help="Reward to compare with the votes, such as pickscore; repeatable.")
    ] = None,
    voter: Voter = "",
    runs: Annotated[Path, typer.Option(help="Directory of runs, which the studio serves.")] = Path("runs"),
    device: RewardDeviceOption = "auto",
    precision: Annotated[Precision, typer.Option(help="Precision of the rewards.")] = "fp32",
) -> None:
    """Print win rates, the stopping rule's verdict, and agreement between voters and with rewards."""
    from ..preferences.session_results import summarize_session
    from ..preferences.sessions import load_session

    opened = load_session(session_folder(session, runs))
    if reward:
        from ..preferences.session_samples import score_session
        from ..training.precision import choose_placement

        score_session(opened, reward, choose_placement(device, precision))
    result = summarize_session(opened, voter)
    for name, count in result.voters.items():
        typer.echo(f"{name}: {count} votes")
    for line in result.sentences():
        typer.echo(line)


@vote.command(epilog="Example: tastemaker vote learn taste --active")
def learn(
    session: Annotated[str, typer.Argument(help="Name or folder of a session.")],
    recipe: Annotated[str, typer.Option(help="Recipe of the preference model; default: one that fits.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="Directory of the preference model; default: RUNS/preference-SESSION.")
    ] = None,
    voter: Voter = "",
    active: Annotated[
        bool, typer.Option("--active", help="Then order the next pairs by expected information.")
    ] = False,
    runs: Annotated[Path, typer.Option(help="Directory of runs, which the studio serves.")] = Path("runs"),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of the recipe as key=value; repeatable.")
    ] = None,
    device: RunDeviceOption = None,
) -> None:
    """Train a preference model, which is a reward, from the votes of a session."""
    from ..preferences.session_taste import learn_taste, order_pairs, read_report
    from ..preferences.sessions import load_session

    opened = load_session(session_folder(session, runs))
    place = out or runs / f"preference-{opened.name}"
    settings = merge_overrides(overrides, device)
    if not learn_taste(opened, place, settings, recipe=recipe, voter=voter, console=stderr_console()):
        raise typer.Exit(EXIT_INTERRUPTED)
    typer.echo(f"{place}: {read_report(place).get('summary', '')}")
    if active:
        typer.echo(f"{order_pairs(opened, place)} pairs ordered by expected information")
    print_next_steps(
        f"tastemaker align --votes {opened.directory / 'votes.jsonl'} --model RECIPE",
        f"tastemaker vote order {session}",
    )


@vote.command(epilog="Example: tastemaker vote order taste")
def order(
    session: Annotated[str, typer.Argument(help="Name or folder of a session.")],
    preference: Annotated[
        Path | None, typer.Option(help="Run of a preference model; default: the newest one of this session.")
    ] = None,
    balanced: Annotated[bool, typer.Option("--balanced", help="Go back to the balanced order.")] = False,
    runs: Annotated[Path, typer.Option(help="Directory of runs, which the studio serves.")] = Path("runs"),
    device: RewardDeviceOption = "auto",
) -> None:
    """Order the next pairs of a session by expected information, with the votes so far."""
    from ..preferences.sessions import load_session

    opened = load_session(session_folder(session, runs))
    if balanced:
        from ..preferences.session_taste import restore_balanced_order

        restore_balanced_order(opened)
        typer.echo("the pairs are shown in the balanced order")
    else:
        from ..preferences.session_taste import order_pairs
        from ..training.precision import choose_placement

        count = order_pairs(opened, preference, choose_placement(device, "fp32"))
        typer.echo(f"{count} pairs ordered by expected information")
    print_next_steps(f"tastemaker studio {runs}")
