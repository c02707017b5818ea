"""`tastemaker download`: published weights, told of first and then fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..codec import CodecSpec
from ..config.load import SUFFIXES, load_any, recipes
from ..config.registries import CODECS, MODELS, REWARDS
from ..config.run import JudgeConfig, RunConfig
from ..config.validate import build
from ..errors import FetchError as FetchError
from ..export.published import PUBLISHED
from ..export.published import known as found_adapters
from ..policy import ModelSpec
from ..pretrained import Published, Source, held, lean
from ..registry import ConfigError, suggest
from ..reward import About
from .listing import usual
from .scoring import named

HUB = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+)?")  # owner/name, or a file in it


@runtime_checkable
class Described(Protocol):
    """A spec that says where its weights come from by default, as all rewards do."""

    @property
    def about(self) -> About: ...


def download(names: Sequence[str], *, only_list: bool, console: Console) -> None:
    """Say what is needed for all of these, and fetch what is not here."""
    if "geneval" in names:
        from .fetching import geneval

        geneval(only_list=only_list, console=console)
    found = list(dict.fromkeys(source for name in names for source in needed(name)))
    if not found:
        console.print("nothing is needed: no weights are published for these, or they ship with the package")
        return
    console.print(table(found))
    if only_list:
        return
    for source in found:
        console.print(f"{source} is in {obtained(source, console)}", markup=False, highlight=False, soft_wrap=True)


def obtained(source: Source, console: Console) -> Path:
    """Where the weights are; whether all of a repository is here, only the hub can tell, if it can be reached."""
    here = held(source)
    if here is not None and source.file:
        return here
    try:
        return fetch(source, console)
    except FetchError:
        if here is None:
            raise
        return here


def needed(name: str) -> list[Source]:
    """The weights behind a recipe, a reward, a model, published adapters, or an id on the hub."""
    if name in recipes() or name.endswith(SUFFIXES):
        config = load_any(name)
        if isinstance(config, JudgeConfig):
            if config.judge.model is not None:
                return sources(config.judge.model)
            return [] if Path(config.judge.weights).exists() else needed(config.judge.weights)
        if not isinstance(config, RunConfig):
            return sources(config.autoencoder)
        return [*sources(config.model), *(s for reward in config.rewards.values() for s in sources(reward.spec))]
    if name in [*REWARDS, *(alias for known in REWARDS for alias in REWARDS.aliases(known))] or name.startswith("{"):
        return sources(named(name, "download")[1])
    for registry, kind in ((MODELS, ModelSpec), (CODECS, CodecSpec)):
        if name in registry:
            return sources(build(kind, {"type": name}, "download"))
    adapters = found_adapters(name)
    known = [adapters] if adapters else [source for source in published() if name in (source.hub, str(source))]
    if known:
        return known
    if HUB.fullmatch(name):
        owner, repository, *inside = name.split("/")
        return [Source(f"{owner}/{repository}", "/".join(inside))]
    everything = [*recipes(), *REWARDS, *MODELS, *PUBLISHED]
    raise ConfigError(f"'{name:.60}' is no recipe, reward, model or id such as owner/name{suggest(name, everything)}")


def published() -> list[Source]:
    """All weights that any reward is known to come from."""
    told = [spec.about for name in REWARDS if (spec := usual(name))]
    return list(dict.fromkeys(source for about in told for source in about.sources))


def sources(spec: Any) -> list[Source]:
    """What a spec needs, with its own settings in the place of what it needs by default."""
    if isinstance(spec, Published):
        return list(spec.sources)
    found: list[Source] = list(spec.about.sources) if isinstance(spec, Described) else []
    for f in fields(spec) if is_dataclass(spec) else ():
        value, usual = getattr(spec, f.name), f.default
        if isinstance(value, str) and value != usual and usual in {source.hub for source in found}:
            here = Path(value).expanduser().exists()
            found = [source for source in found if source.hub != usual]
            found += [] if here or not HUB.fullmatch(value) else [Source(value)]
    return list(dict.fromkeys(found))


def table(found: Sequence[Source]) -> Table:
    shown = Table()
    for name in ("on the hub", "file", "size", "licence", "gated", "here"):
        shown.add_column(name, overflow="fold")
    for source in found:
        gated = "ask on its page first" if source.gated else "no"
        size, licence = source.size.removeprefix("of a size "), source.licence.removeprefix("under a licence ")
        told = (source.hub, source.file or "all of it", size, licence, gated, "yes" if held(source) else "no")
        shown.add_row(*map(escape, told))  # or `FLUX.1 [dev]` would lose what the table takes for a style
    return shown


def fetch(source: Source, console: Console) -> Path:
    """The file or folder on this machine; a part fetched before is gone on with."""
    from huggingface_hub import hf_hub_download

    with told(source):
        if source.file:
            return Path(hf_hub_download(source.hub, source.file))
        # One by one, for a snapshot that leaves files out counts as incomplete where there is no network.
        wanted = files(source.hub)
        console.print(f"{source}: {len(wanted)} files, {amount(sum(wanted.values()))}", markup=False, highlight=False)
        return [Path(hf_hub_download(source.hub, file)) for file in wanted][-1].parent


def files(hub: str) -> dict[str, int]:
    """The files of a repository that are needed, with their bytes: the weights once, and what describes them last."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    listed = HfApi().list_repo_tree(hub, recursive=True)
    sizes = {entry.path: entry.size for entry in listed if isinstance(entry, RepoFile)}
    wanted = [PurePosixPath(name) for name in lean(list(sizes))]
    if not wanted:
        raise FetchError(f"{hub} holds no weights that could be used; look at its page, or name another")
    order = sorted(wanted, key=lambda name: (len(name.parts) == 1, name.suffix == ".json"))
    return {str(name): sizes[str(name)] for name in order}


def amount(count: int) -> str:
    """Bytes as a person would say them."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@contextmanager
def told(source: Source) -> Iterator[None]:
    """Within the block whatever stands between us and the hub becomes a sentence."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{source.hub}"
    try:
        yield
    except errors.GatedRepoError as error:
        way = f"ask for it at {page}, then log in with `hf auth login`"
        raise FetchError(f"{source} is given only to those who asked; {way}") from error
    except errors.RepositoryNotFoundError as error:
        raise FetchError(f"the hub has no {source.hub}, or keeps it private; check the name at {page}") from error
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise unreachable(source, error) from error
        raise FetchError(f"{source.hub} has no file '{source.file}'; see {page}/tree/main") from error
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError) as error:
        raise unreachable(source, error) from error
    except Exception as error:  # of whichever library carries the bytes
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "requests", "hf_xet"):
            raise
        raise unreachable(source, error) from error


def unreachable(source: Source, error: Exception) -> FetchError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return FetchError(
        f"{source} could not be fetched ({reason}); the same command goes on once the hub can be reached, "
        "or copy the file here and give its path"
    )
