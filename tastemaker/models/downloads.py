"""`tastemaker download`: list the published weights that a recipe, model or reward needs, and download them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from rich.console import Console
from rich.markup import escape

from ..config.catalog import default_spec
from ..config.load import YAML_SUFFIXES, list_recipes, load_any_config
from ..config.registries import AUTOENCODERS, MODELS, REWARDS
from ..config.required_files import published_sources as config_sources
from ..config.schema import JudgeRunConfig
from ..config.validate import build_component
from ..console import Table, format_bytes
from ..core.autoencoder import AutoencoderSpec
from ..core.errors import DownloadError as DownloadError
from ..core.model_spec import ModelSpec
from ..core.registry import ConfigError, suggest_name
from ..core.reward import HUB_ID
from ..export.lora import PUBLISHED_LORAS, find_published_lora
from ..rewards.folder_scorer import parse_reward
from .pretrained import WeightsSource, find_cached, select_needed_files


def download(names: Sequence[str], *, only_list: bool, console: Console) -> None:
    """List the weights that these names need, and download what is missing."""
    if "geneval" in names:
        from ..evaluation.geneval import download_geneval

        download_geneval(only_list=only_list, console=console)
    sources = list(dict.fromkeys(source for name in names for source in required_sources(name)))
    if not sources:
        console.print("nothing to download: these need no published weights, or they ship with the package")
        return
    console.print(build_sources_table(sources))
    if only_list:
        return
    for source in sources:
        console.print(
            f"{source} is in {fetch_if_missing(source, console)}", markup=False, highlight=False, soft_wrap=True
        )


def fetch_if_missing(source: WeightsSource, console: Console) -> Path:
    """The local path of the weights. A whole repository is compared with the hub, if it can be reached."""
    cached = find_cached(source)
    if cached is not None and source.file:
        return cached
    try:
        return fetch_source(source, console)
    except DownloadError:
        if cached is None:
            raise
        return cached


def required_sources(name: str) -> list[WeightsSource]:
    """The weights that a recipe, a reward, a model, a published LoRA or a hub id needs."""
    if name in list_recipes() or name.endswith(YAML_SUFFIXES):
        config = load_any_config(name)
        if isinstance(config, JudgeRunConfig):
            if config.judge.model is not None:
                return list(config.judge.model.sources)
            return [] if Path(config.judge.weights).exists() else required_sources(config.judge.weights)
        return list(config_sources(config))
    if name in [*REWARDS, *(alias for known in REWARDS for alias in REWARDS.aliases(known))] or name.startswith("{"):
        return list(parse_reward(name, "download")[1].sources)
    for registry, spec_class in ((MODELS, ModelSpec), (AUTOENCODERS, AutoencoderSpec)):
        if name in registry:
            return list(build_component(spec_class, {"type": name}, "download").sources)
    lora = find_published_lora(name)
    known = [lora] if lora else [source for source in published_sources() if name in (source.hub, str(source))]
    if known:
        return known
    if HUB_ID.fullmatch(name):
        owner, repository, *inside = name.split("/")
        return [WeightsSource(f"{owner}/{repository}", "/".join(inside))]
    known_names = [*list_recipes(), *REWARDS, *MODELS, *PUBLISHED_LORAS]
    raise ConfigError(
        f"download: '{name:.60}' is not a recipe, reward, model or hub id such as "
        f"owner/name{suggest_name(name, known_names)} [TM425]"
    )


def published_sources() -> list[WeightsSource]:
    """The default weights of all rewards."""
    cards = [spec.card for name in REWARDS if (spec := default_spec(name))]
    return list(dict.fromkeys(source for card in cards for source in card.sources))


def build_sources_table(sources: Sequence[WeightsSource]) -> Table:
    """Repository, file, size, license and whether it was downloaded, one row per source."""
    table = Table()
    for name in ("hub", "file", "size", "license", "gated", "downloaded"):
        table.add_column(name, overflow="fold")
    for source in sources:
        gated = "request access on its page" if source.gated else "no"
        size, license = source.size.removeprefix("size "), source.license.removeprefix("license ")
        row = (source.hub, source.file or "all files", size, license, gated, "yes" if find_cached(source) else "no")
        table.add_row(*map(escape, row))  # escaped, because rich would take `[dev]` of FLUX.1 for a style
    return table


def fetch_source(source: WeightsSource, console: Console) -> Path:
    """Download a file or a repository and return its local path; interrupted downloads are resumed."""
    from huggingface_hub import hf_hub_download

    with translate_hub_errors(source):
        if source.file:
            return Path(hf_hub_download(source.hub, source.file))
        # File by file, because a snapshot without some files counts as incomplete when offline.
        files = required_files(source.hub)
        size = format_bytes(sum(files.values()))
        console.print(f"{source}: {len(files)} files, {size}", markup=False, highlight=False)
        return [Path(hf_hub_download(source.hub, file)) for file in files][-1].parent


def required_files(hub: str) -> dict[str, int]:
    """The files of a repository to download and their sizes in bytes; weights first, top-level configs last."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    listed = HfApi().list_repo_tree(hub, recursive=True)
    sizes = {entry.path: entry.size for entry in listed if isinstance(entry, RepoFile)}
    files = [PurePosixPath(name) for name in select_needed_files(list(sizes))]
    if not files:
        raise DownloadError(
            f"{hub} does not contain weights in a supported format; see its page on the hub, or give another "
            "repository [TM426]"
        )
    order = sorted(files, key=lambda name: (len(name.parts) == 1, name.suffix == ".json"))
    return {str(name): sizes[str(name)] for name in order}


@contextmanager
def translate_hub_errors(source: WeightsSource) -> Iterator[None]:
    """Raise errors of the hub and of the network as DownloadError within the block."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{source.hub}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{source} is gated; request access at {page}, then log in with `hf auth login` [TM427]"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"the hub does not have a public repository {source.hub}; check the name at {page} [TM428]"
        ) from error
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise hub_error(source, error) from error
        raise DownloadError(
            f"{source.hub} does not contain the file '{source.file}'; see the files at {page}/tree/main [TM429]"
        ) from error
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError) as error:
        raise hub_error(source, error) from error
    except Exception as error:  # of the HTTP library
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "requests", "hf_xet"):
            raise
        raise hub_error(source, error) from error


def hub_error(source: WeightsSource, error: Exception) -> DownloadError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return DownloadError(
        f"{source} could not be downloaded ({reason}); run the command again to resume, or copy the file to this "
        "machine and give its path [TM430]"
    )
