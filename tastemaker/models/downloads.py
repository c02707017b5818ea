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

from ..config.catalog import default_spec
from ..config.load import SUFFIXES, list_recipes, load_any_config
from ..config.registries import AUTOENCODERS, MODELS, REWARDS
from ..config.schema import JudgeRunConfig, RunConfig
from ..config.validate import build_component
from ..core.autoencoder import AutoencoderSpec
from ..core.errors import DownloadError as DownloadError
from ..core.policy import ModelSpec
from ..core.registry import ConfigError, suggest_name
from ..core.reward import RewardCard
from ..export.published_loras import PUBLISHED_LORAS
from ..export.published_loras import find_published_lora as found_adapters
from ..rewards.scoring import parse_reward
from .pretrained import HasWeightsSources, WeightsSource, find_cached, select_needed_files

HUB = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+)?")  # owner/name, or a file in it


@runtime_checkable
class HasDefaultSources(Protocol):
    """A spec that says where its weights come from by default, as all rewards do."""

    @property
    def about(self) -> RewardCard: ...


def download(names: Sequence[str], *, only_list: bool, console: Console) -> None:
    """Say what is needed for all of these, and fetch what is not here."""
    if "geneval" in names:
        from ..evaluation.geneval_download import download_geneval

        download_geneval(only_list=only_list, console=console)
    found = list(dict.fromkeys(source for name in names for source in required_sources(name)))
    if not found:
        console.print("nothing is needed: no weights are published for these, or they ship with the package")
        return
    console.print(table(found))
    if only_list:
        return
    for source in found:
        console.print(
            f"{source} is in {fetch_if_missing(source, console)}", markup=False, highlight=False, soft_wrap=True
        )


def fetch_if_missing(source: WeightsSource, console: Console) -> Path:
    """Where the weights are; whether all of a repository is here, only the hub can tell, if it can be reached."""
    here = find_cached(source)
    if here is not None and source.file:
        return here
    try:
        return fetch_source(source, console)
    except DownloadError:
        if here is None:
            raise
        return here


def required_sources(name: str) -> list[WeightsSource]:
    """The weights behind a recipe, a reward, a model, published adapters, or an id on the hub."""
    if name in list_recipes() or name.endswith(SUFFIXES):
        config = load_any_config(name)
        if isinstance(config, JudgeRunConfig):
            if config.judge.model is not None:
                return spec_sources(config.judge.model)
            return [] if Path(config.judge.weights).exists() else required_sources(config.judge.weights)
        if not isinstance(config, RunConfig):
            return spec_sources(config.autoencoder)
        return [
            *spec_sources(config.model),
            *(s for reward in config.rewards.values() for s in spec_sources(reward.spec)),
        ]
    if name in [*REWARDS, *(alias for known in REWARDS for alias in REWARDS.aliases(known))] or name.startswith("{"):
        return spec_sources(parse_reward(name, "download")[1])
    for registry, kind in ((MODELS, ModelSpec), (AUTOENCODERS, AutoencoderSpec)):
        if name in registry:
            return spec_sources(build_component(kind, {"type": name}, "download"))
    adapters = found_adapters(name)
    known = [adapters] if adapters else [source for source in published_sources() if name in (source.hub, str(source))]
    if known:
        return known
    if HUB.fullmatch(name):
        owner, repository, *inside = name.split("/")
        return [WeightsSource(f"{owner}/{repository}", "/".join(inside))]
    everything = [*list_recipes(), *REWARDS, *MODELS, *PUBLISHED_LORAS]
    raise ConfigError(
        f"'{name:.60}' is no recipe, reward, model or id such as owner/name{suggest_name(name, everything)}"
    )


def published_sources() -> list[WeightsSource]:
    """All weights that any reward is known to come from."""
    told = [spec.about for name in REWARDS if (spec := default_spec(name))]
    return list(dict.fromkeys(source for about in told for source in about.sources))


def spec_sources(spec: Any) -> list[WeightsSource]:
    """What a spec needs, with its own settings in the place of what it needs by default."""
    if isinstance(spec, HasWeightsSources):
        return list(spec.sources)
    found: list[WeightsSource] = list(spec.about.sources) if isinstance(spec, HasDefaultSources) else []
    for f in fields(spec) if is_dataclass(spec) else ():
        value, usual = getattr(spec, f.name), f.default
        if isinstance(value, str) and value != usual and usual in {source.hub for source in found}:
            here = Path(value).expanduser().exists()
            found = [source for source in found if source.hub != usual]
            found += [] if here or not HUB.fullmatch(value) else [WeightsSource(value)]
    return list(dict.fromkeys(found))


def table(found: Sequence[WeightsSource]) -> Table:
    shown = Table()
    for name in ("on the hub", "file", "size", "licence", "gated", "here"):
        shown.add_column(name, overflow="fold")
    for source in found:
        gated = "ask on its page first" if source.gated else "no"
        size, licence = source.size.removeprefix("of a size "), source.licence.removeprefix("under a licence ")
        told = (source.hub, source.file or "all of it", size, licence, gated, "yes" if find_cached(source) else "no")
        shown.add_row(*map(escape, told))  # or `FLUX.1 [dev]` would lose what the table takes for a style
    return shown


def fetch_source(source: WeightsSource, console: Console) -> Path:
    """The file or folder on this machine; a part fetched before is gone on with."""
    from huggingface_hub import hf_hub_download

    with translate_hub_errors(source):
        if source.file:
            return Path(hf_hub_download(source.hub, source.file))
        # One by one, for a snapshot that leaves files out counts as incomplete where there is no network.
        wanted = required_files(source.hub)
        console.print(
            f"{source}: {len(wanted)} files, {format_bytes(sum(wanted.values()))}", markup=False, highlight=False
        )
        return [Path(hf_hub_download(source.hub, file)) for file in wanted][-1].parent


def required_files(hub: str) -> dict[str, int]:
    """The files of a repository that are needed, with their bytes: the weights once, and what describes them last."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    listed = HfApi().list_repo_tree(hub, recursive=True)
    sizes = {entry.path: entry.size for entry in listed if isinstance(entry, RepoFile)}
    wanted = [PurePosixPath(name) for name in select_needed_files(list(sizes))]
    if not wanted:
        raise DownloadError(f"{hub} holds no weights that could be used; look at its page, or name another")
    order = sorted(wanted, key=lambda name: (len(name.parts) == 1, name.suffix == ".json"))
    return {str(name): sizes[str(name)] for name in order}


def format_bytes(count: int) -> str:
    """Bytes as a person would say them."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@contextmanager
def translate_hub_errors(source: WeightsSource) -> Iterator[None]:
    """Within the block whatever stands between us and the hub becomes a sentence."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{source.hub}"
    try:
        yield
    except errors.GatedRepoError as error:
        way = f"ask for it at {page}, then log in with `hf auth login`"
        raise DownloadError(f"{source} is given only to those who asked; {way}") from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(f"the hub has no {source.hub}, or keeps it private; check the name at {page}") from error
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise hub_error(source, error) from error
        raise DownloadError(f"{source.hub} has no file '{source.file}'; see {page}/tree/main") from error
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError) as error:
        raise hub_error(source, error) from error
    except Exception as error:  # of whichever library carries the bytes
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "requests", "hf_xet"):
            raise
        raise hub_error(source, error) from error


def hub_error(source: WeightsSource, error: Exception) -> DownloadError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return DownloadError(
        f"{source} could not be fetched ({reason}); the same command goes on once the hub can be reached, "
        "or copy the file here and give its path"
    )
