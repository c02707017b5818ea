"""`tastemaker export --push`: upload an exported folder to a repository on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import UploadError
from ..core.registry import ConfigError
from ..models.pretrained import HUB_ID

FILE_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")  # of exports that are one file
HTTP_MODULES = ("httpx", "httpx2", "httpcore", "requests", "urllib3", "hf_xet")


def check_push(repository: str, out: Path) -> None:
    """Refuse an upload that would fail, before anything is exported: its name, the login, and the owner."""
    if not HUB_ID.fullmatch(repository):
        raise ConfigError(f"--push: expected OWNER/NAME, got '{repository:.100}'; write for example me/liked [TM2560]")
    if out.suffix in FILE_SUFFIXES:
        raise ConfigError(
            f"--push: '{out}' is one file without a model card; export a folder, for example with --layout diffusers "
            "[TM2561]"
        )
    from huggingface_hub import HfApi, get_token

    if not get_token():
        raise ConfigError(
            "--push: you are not logged in to the hub; run `hf auth login`, or set HF_TOKEN to a token with write "
            "access [TM2562]"
        )
    with translate_errors(repository, "nothing was exported"):
        account = HfApi().whoami()
    owner = repository.partition("/")[0]
    organizations = [str(each.get("name")) for each in account.get("orgs", [])]
    if owner not in (account.get("name"), *organizations):
        known = ", ".join([str(account.get("name")), *organizations])
        raise ConfigError(
            f"--push: you are logged in as {account.get('name')}, who cannot write to '{owner:.60}'; choose one of "
            f"{known:.200}, or log in as somebody else [TM2563]"
        )


def push_folder(folder: Path, repository: str, *, private: bool | None) -> str:
    """Upload the files of an exported folder as one commit and return a sentence about what was done.

    A new repository has the visibility that is the default of its owner, which is public unless an organization chose
    otherwise, as with diffusers' and transformers' `push_to_hub`. An existing one keeps its visibility and gets a
    commit; its other files stay.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    kept = (
        f"the exported folder {folder} is complete and stays; to continue, run `hf upload {repository} {folder}`, "
        "which skips files that have arrived"
    )
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with translate_errors(repository, kept):
        exists = api.repo_exists(repository)
        url = api.create_repo(repository, private=None if exists else private, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=[_literal(name) for name in files],
            commit_message=f"Upload {folder.name} with tastemaker",
        )
    done = f"added a commit to {url}, which existed already and keeps its visibility" if exists else f"created {url}"
    return f"{done}: {len(files)} files"


def _literal(name: str) -> str:
    """A pattern of `fnmatch` that matches this name only."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


@contextmanager
def translate_errors(repository: str, state: str) -> Iterator[None]:
    """Raise errors of the hub and of the network as UploadError within the block; `state` says what is left."""
    try:
        yield
    except Exception as error:
        # Threads that upload files wrap their errors.
        inner = error.__cause__ if type(error) is RuntimeError else None
        translated = _translate(inner if isinstance(inner, Exception) else error, repository, state)
        if translated is None:
            raise
        raise translated from error


def _translate(error: Exception, repository: str, state: str) -> UploadError | None:
    """The message for an error of the hub or of the network; None for any other."""
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return UploadError(
            f"--push {repository}: HF_HUB_OFFLINE is set, so the hub is not reached; {state}; unset it first [TM2564]"
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            return UploadError(
                f"--push {repository}: the hub refused the token ({status}); log in with a token that may write "
                f"there (`hf auth login`); {state} [TM2565]"
            )
        return UploadError(f"--push {repository}: the hub answered {_reason(error)}; {state} [TM2566]")
    if isinstance(error, OSError) or type(error).__module__.split(".")[0] in HTTP_MODULES:
        return UploadError(
            f"--push {repository}: the hub could not be reached ({_reason(error)}); check the connection; {state} "
            "[TM2567]"
        )
    return None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
