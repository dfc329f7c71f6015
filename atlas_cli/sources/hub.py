"""One revision of a repository on the Hugging Face Hub, fetched by the official client."""

from __future__ import annotations

import errno
import fnmatch
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atlas_cli.errors import AtlasError, UnreachableError

_TRIES = 3  # a connection can be cut in the middle of a large file
_TIMEOUT = 15.0  # seconds after which a silent server counts as unreachable
_DISK_TROUBLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR}


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit, with the names of its files (offline: of those at hand)."""

    repository: str
    commit: str
    files: tuple[str, ...]
    offline: bool = False

    def fetch(self, patterns: Sequence[str]) -> Path:
        """Download the files that match, unless they are here, and give their common folder."""
        folders = [
            _folder_of(_download(self.repository, name, self.commit, self.offline), name)
            for name in self.files
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]
        if not folders:
            raise UnreachableError(f"{self.repository}: has no file {' or '.join(patterns)}")
        return folders[0]


def open_snapshot(repository: str, revision: str | None, likely: Sequence[str]) -> Snapshot:
    """Settle which commit a revision means. Without a network, the cache is asked.

    `likely` names small files of which one is in every repository that atlas can use.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if sys.stderr is None or not sys.stderr.isatty():
        disable_progress_bars()
    try:
        info = HfApi().model_info(repository, revision=revision, timeout=_TIMEOUT)
    except _client_errors() as problem:
        cached = _from_cache(repository, revision, likely) if _is_cut(problem) else None
        if cached is None:
            raise _explained(problem, repository, revision) from problem
        return cached
    files = tuple(sorted(sibling.rfilename for sibling in info.siblings or ()))
    if not files:
        raise UnreachableError(f"{repository}: is an empty repository")
    # One request by branch or tag, so that the cache remembers which commit it meant.
    anchor = next((name for name in likely if name in files), files[0])
    folder = _folder_of(_download(repository, anchor, revision, offline=False), anchor)
    return Snapshot(repository, folder.name, files)


def _from_cache(repository: str, revision: str | None, likely: Sequence[str]) -> Snapshot | None:
    """The snapshot that earlier downloads left behind, if they did."""
    from huggingface_hub import try_to_load_from_cache

    for name in likely:
        path = try_to_load_from_cache(repository, name, revision=revision)
        if isinstance(path, str):
            folder = _folder_of(Path(path), name)
            found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
            return Snapshot(repository, folder.name, tuple(found), offline=True)
    return None


def _download(repository: str, name: str, revision: str | None, offline: bool) -> Path:
    from huggingface_hub import hf_hub_download

    for attempt in range(_TRIES):
        try:
            path = hf_hub_download(repository, name, revision=revision, local_files_only=offline)
            return Path(path)
        except _client_errors() as problem:
            if attempt == _TRIES - 1 or not _is_cut(problem):
                raise _explained(problem, repository, revision) from problem
    raise AssertionError("the last try either returned or raised")


def _folder_of(path: Path, name: str) -> Path:
    """The root of the snapshot that holds `name` at `path`."""
    return path.parents[len(Path(name).parts) - 1]


def push_folder(folder: Path, repository: str) -> str:
    """Upload a folder to a repository, which is made if need be, and give its address."""
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repository, exist_ok=True)
        info = HfApi().upload_folder(
            repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name}"
        )
    except _client_errors() as problem:
        raise _explained(problem, repository, None) from problem
    return str(info.repo_url)


# What the client raises -----------------------------------------------------------------------


def _client_errors() -> tuple[type[Exception], ...]:
    """All that the client raises, whichever HTTP library its version stands on."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    return (OSError, HFValidationError, HfHubHTTPError.__bases__[0])


def _status(problem: BaseException | None) -> int | None:
    """The HTTP status behind an exception, or None if no answer came."""
    while problem is not None:
        response = getattr(problem, "response", None)
        if response is not None:
            return int(response.status_code)
        problem = problem.__cause__
    return None


def _is_cut(problem: BaseException) -> bool:
    """Whether the connection failed, rather than the answer being no."""
    status = _status(problem)
    trouble = getattr(problem, "errno", None) in _DISK_TROUBLE
    return not trouble and not isinstance(problem, ValueError) and (status is None or status >= 500)


def _explained(problem: Exception, repository: str, revision: str | None) -> AtlasError:
    """One line that names the repository and the way out."""
    from huggingface_hub import constants, errors

    name = f"{repository}@{revision}" if revision else repository
    if isinstance(problem, OSError) and problem.errno in _DISK_TROUBLE:
        return AtlasError(
            f"{problem.filename or constants.HF_HUB_CACHE}: cannot keep downloads: "
            f"{problem.strerror}; set HF_HOME to a folder that can be written"
        )
    status = _status(problem)
    if isinstance(problem, errors.RevisionNotFoundError):
        return UnreachableError(f"{name}: the repository has no such revision")
    if isinstance(problem, errors.GatedRepoError):
        return UnreachableError(
            f"{name}: access has to be asked for on its page, then set HF_TOKEN"
        )
    if status in {401, 403}:
        return UnreachableError(f"{name}: not allowed ({status}); set HF_TOKEN or check the name")
    if status == 404:
        return UnreachableError(f"{name}: no such model on the Hub, nor a local path of that name")
    if isinstance(problem, ValueError):
        return UnreachableError(f"{name}: not a name the Hub accepts")
    if constants.is_offline_mode():
        return UnreachableError(f"{name}: not downloaded yet, and HF_HUB_OFFLINE is set")
    reason = f"it answered {status}" if status else "no answer"
    return UnreachableError(f"{name}: {constants.ENDPOINT} could not be reached ({reason})")
