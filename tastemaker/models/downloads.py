"""`tastemaker download`: list the published weights that a recipe, model or reward needs, and download them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..config.catalog import default_spec
from ..config.load import YAML_SUFFIXES, list_recipes, list_trainable_recipes, load_any_config, read_recipe
from ..config.registries import AUTOENCODERS, MODELS, REWARDS
from ..config.required_files import published_sources as config_sources
from ..config.schema import JudgeRunConfig, RunConfig
from ..config.validate import build_component
from ..console import Table, format_bytes
from ..core.autoencoder import AutoencoderSpec
from ..core.cards import PUBLISHED_JUDGES, parse_hub_id
from ..core.errors import DownloadError as DownloadError
from ..core.model_spec import ModelSpec
from ..core.registry import ConfigError, suggest_name
from ..core.reward import HUB_ID, RewardSpec
from ..export.lora import PUBLISHED_LORAS, find_published_lora
from ..rewards.backbones.published_files import PublishedFile
from ..rewards.clip_heads import VADER_HEADS, CompressionScoreReward, WeatherReward, check_vader_head
from ..rewards.folder_scorer import parse_reward
from .pretrained import WeightsSource, find_cached, select_needed_files
from .showo.model import PUBLISHED_SHOWO

CONFIG_FILE = "config.json"  # of a model of transformers; a folder without it counts as incomplete

VADER_HEADS_NAME = "vader-heads"  # all heads in VADER's repository


def download(names: Sequence[str], *, only_list: bool, console: Console) -> None:
    """List the weights that these names need, and download what is missing."""
    if "geneval" in names:
        from ..evaluation.geneval import download_geneval

        download_geneval(only_list=only_list, console=console)
    heads = list(dict.fromkeys(head for name in names for head in required_heads(name)))
    if heads:
        download_heads(heads, only_list=only_list, console=console)
    hub_names = [name for name in names if name != VADER_HEADS_NAME]
    sources = list(dict.fromkeys(source for name in hub_names for source in required_sources(name)))
    if not sources and heads:
        return
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


def required_heads(name: str) -> list[PublishedFile]:
    """The heads of VADER that a recipe or reward needs, or all of them."""
    if name == VADER_HEADS_NAME:
        return list(VADER_HEADS.values())
    if name in list_recipes() or name.endswith(YAML_SUFFIXES):
        config = load_any_config(name)
        rewards = config.rewards.values() if isinstance(config, RunConfig) else ()
        specs = [reward.spec for reward in rewards if not reward.servers]
    elif name in _reward_names() or name.startswith("{"):
        specs = [parse_reward(name, "download")[1]]
    else:
        return []
    return [head for spec in specs for head in _heads(spec)]


def _heads(spec: Any) -> list[PublishedFile]:
    """The published heads of a reward and of the rewards inside it, if no other file is given."""
    if isinstance(spec, WeatherReward):
        return [VADER_HEADS[f"{spec.kind}_reward.pt"]] if not spec.head else []
    if isinstance(spec, CompressionScoreReward):
        return [VADER_HEADS[spec.head]] if spec.head in VADER_HEADS else []
    values = [getattr(spec, field.name) for field in fields(spec)] if is_dataclass(spec) else []
    inner = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return [head for each in inner if isinstance(each, RewardSpec) for head in _heads(each)]


def download_heads(heads: Sequence[PublishedFile], *, only_list: bool, console: Console) -> None:
    """Download heads from VADER's repository and check that they compute the recorded scores."""
    from ..evaluation.geneval import fetch_verified, print_line

    for head in heads:
        state = "downloaded" if head.path.is_file() else "not downloaded"
        print_line(console, f"{head.name} is {head.url} ({head.size}, {head.license}), {state}")
        if only_list:
            continue
        path = fetch_verified(head, console)
        try:
            check_vader_head(path)
        except ConfigError:
            path.unlink()  # a damaged download
            raise
        print_line(console, f"{head.name} is in {path}")


def _reward_names() -> list[str]:
    return [*REWARDS, *(alias for known in REWARDS for alias in REWARDS.aliases(known))]


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
    if name in list_recipes() and name not in list_trainable_recipes():  # a part, such as models/dit-xl
        part = read_recipe(name).get("model")
        return list(build_component(ModelSpec, part, "download").sources) if part else []
    if name in list_recipes() or name.endswith(YAML_SUFFIXES):
        config = load_any_config(name)
        if isinstance(config, JudgeRunConfig):
            if config.judge.model is not None:
                return list(config.judge.model.sources)
            return [] if Path(config.judge.weights).exists() else required_sources(config.judge.weights)
        return list(config_sources(config))
    if name in _reward_names() or name.startswith("{"):
        return list(parse_reward(name, "download")[1].sources)
    for registry, spec_class in ((MODELS, ModelSpec), (AUTOENCODERS, AutoencoderSpec)):
        if name in registry:
            return list(build_component(spec_class, {"type": name}, "download").sources)
    if name in PUBLISHED_JUDGES:
        return [PUBLISHED_JUDGES[name]]
    lora = find_published_lora(name)
    known = [lora] if lora else [source for source in published_sources() if name in (source.hub, str(source))]
    if known:
        return known
    if name in PUBLISHED_SHOWO:
        return list(build_component(ModelSpec, {"type": "showo", "weights": name}, "download").sources)
    if HUB_ID.fullmatch(name):
        return [parse_hub_id(name)]
    known_names = [*list_recipes(), *REWARDS, *MODELS, *PUBLISHED_LORAS, *PUBLISHED_SHOWO, *PUBLISHED_JUDGES]
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
        file = source.file or (f"{source.folder}/" if source.folder else "all files")
        row = (source.hub, file, size, license, gated, "yes" if find_cached(source) else "no")
        table.add_row(*map(escape, row))  # escaped, because rich would take `[dev]` of FLUX.1 for a style
    return table


def fetch_source(source: WeightsSource, console: Console) -> Path:
    """Download a file or a repository and return its local path; interrupted downloads are resumed."""
    from huggingface_hub import hf_hub_download

    with translate_hub_errors(source):
        if source.file:
            return Path(hf_hub_download(source.hub, source.file))
        # File by file, because a snapshot without some files counts as incomplete when offline.
        files = required_files(source.hub, source.folder)
        size = format_bytes(sum(files.values()))
        console.print(f"{source}: {len(files)} files, {size}", markup=False, highlight=False)
        return [Path(hf_hub_download(source.hub, file)) for file in files][-1].parent


def required_files(hub: str, folder: str = "") -> dict[str, int]:
    """The files of a repository, or of a folder in it, to download and their sizes in bytes.

    Weights come first and top-level configs last, config.json after all others.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    listed = (
        HfApi().list_repo_tree(hub, folder, recursive=True) if folder else HfApi().list_repo_tree(hub, recursive=True)
    )
    sizes = {entry.path: entry.size for entry in listed if isinstance(entry, RepoFile)}
    files = [PurePosixPath(name) for name in select_needed_files(list(sizes))]
    if not files:
        raise DownloadError(
            f"{WeightsSource(hub, folder=folder)} does not contain weights in a supported format; see its page on the "
            "hub, or give another repository [TM426]"
        )
    depth = len(PurePosixPath(folder).parts) + 1
    order = sorted(files, key=lambda path: (len(path.parts) == depth, path.suffix == ".json", path.name == CONFIG_FILE))
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
        missing = f"file '{source.file}'" if source.file else f"folder '{source.folder}'"
        raise DownloadError(
            f"{source.hub} does not contain the {missing}; see the files at {page}/tree/main [TM429]"
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
