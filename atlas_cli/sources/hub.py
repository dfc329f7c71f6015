"""Repositories on the Hugging Face Hub: asked for and fetched by the official client."""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atlas_cli.errors import AtlasError, UnreachableError, UsageError
from atlas_cli.io.files import (
    CachedDigest,
    is_plain,
    load_digests,
    named_sha256,
    save_digests,
    sha256_of,
    stat_files,
)

_TRIES = 3  # a connection can be cut in the middle of a large file
_BRANCH = "main"
_TIMEOUT = 15.0  # seconds after which a silent server counts as unreachable
_DISK_TROUBLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR}


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit, with the names of its files (offline: of those at hand).

    `cache` is the folder that downloads go to, if it is not the one that all programs share.
    """

    repository: str
    commit: str
    files: tuple[str, ...]
    offline: bool = False
    cache: Path | None = None

    def fetch(self, patterns: Sequence[str]) -> Path:
        """Download the files that match, unless they are here, and give their common folder."""
        folders = [
            _folder_of(_download(self, name), name)
            for name in self.files
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]
        if not folders:
            raise UnreachableError(f"{self.repository}: has no file {' or '.join(patterns)}")
        return folders[0]

    def has_downloaded(self, name: str) -> bool:
        """Whether a file is in the cache that all programs share."""
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(self.repository, name, revision=self.commit), str)


def ask(repository: str, revision: str | None) -> Snapshot:
    """The commit that a revision means now, and the names of its files. Downloads nothing.

    Raises UnreachableError; its `cut` says whether the Hub did not answer at all.
    """
    _quieten()
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(repository, revision=revision, timeout=_TIMEOUT)
    except _client_errors() as problem:
        raise _explained(problem, repository, revision) from problem
    except Exception as problem:  # the client trusts what the Hub answers
        raise _strange(problem, repository) from problem
    files: list[Any] = [sibling.rfilename for sibling in info.siblings or ()]
    if strange := [name for name in files if not is_plain(name)]:
        raise UnreachableError(f"{repository}: lists a file outside its folder: {strange[0]}")
    if not files:
        raise UnreachableError(f"{repository}: is an empty repository")
    return Snapshot(repository, str(info.sha), tuple(sorted(files)))


def ask_licence(repository: str) -> str | None:
    """The licence that the card of a model names, if it has one and the Hub answers."""
    _quieten()
    from huggingface_hub import HfApi

    try:
        card = HfApi().model_info(repository, timeout=_TIMEOUT).card_data
    except Exception:  # what is not known is said to be unknown
        return None
    found = getattr(card, "license", None)
    return found if isinstance(found, str) else None


def ask_collection(slug: str) -> list[tuple[str, str]]:
    """The kind (model, dataset, space, paper) and the name of every item of a collection."""
    _quieten()
    from huggingface_hub import HfApi

    try:
        found = HfApi().get_collection(slug)
    except _client_errors() as problem:
        raise _explained(problem, slug, None, "collection") from problem
    except Exception as problem:
        raise _strange(problem, slug) from problem
    return [(item.item_type, item.item_id) for item in found.items]


def _quieten() -> None:
    """Have the client say nothing, and show progress on a terminal only."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if sys.stderr is None or not sys.stderr.isatty():
        disable_progress_bars()


def open_snapshot(repository: str, revision: str | None, likely: Sequence[str]) -> Snapshot:
    """Settle which commit a revision means. Without a network, the cache is asked.

    `likely` names small files of which one is in every repository that atlas can use.
    """
    try:
        found = ask(repository, revision)
    except UnreachableError as problem:
        cached = _from_cache(repository, revision, likely) if problem.cut else None
        if cached is None:
            raise
        return cached
    # One request by branch or tag, so that the cache remembers which commit it meant.
    anchor = next((name for name in likely if name in found.files), found.files[0])
    by_name = replace(found, commit=revision or _BRANCH)
    return replace(found, commit=_folder_of(_download(by_name, anchor), anchor).name)


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


def _download(snapshot: Snapshot, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    repository, revision = snapshot.repository, snapshot.commit
    for attempt in range(_TRIES):
        try:
            with warnings.catch_warnings(action="ignore"):  # of a full disk, before it is full
                path = hf_hub_download(
                    *(repository, name),
                    revision=revision,
                    local_files_only=snapshot.offline,
                    cache_dir=snapshot.cache,
                )
            return Path(path)
        except _client_errors() as problem:
            if attempt == _TRIES - 1 or not _is_cut(problem):
                called = revision if revision != _BRANCH else None
                raise _explained(problem, repository, called, cache=snapshot.cache) from problem
        except Exception as problem:
            raise _strange(problem, repository) from problem
    raise AssertionError("the last try either returned or raised")


def _folder_of(path: Path, name: str) -> Path:
    """The root of the snapshot that holds `name` at `path`."""
    return path.parents[len(Path(name).parts) - 1]


def check_repository(name: str, option: str = "") -> None:
    """Raise UsageError, on behalf of an option, unless a repository can have this name."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UsageError(f"{option}{name}: expected OWNER/NAME")


def push_files(
    files: Mapping[str, Path | bytes], repository: str, message: str, *, private: bool = False
) -> str:
    """Upload files, or bytes under their names, in one commit, and give the repository's address.

    The repository is made if need be; what else it holds stays.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    added = [
        CommitOperationAdd(name, found if isinstance(found, bytes) else str(found))
        for name, found in files.items()
    ]
    try:
        HfApi().create_repo(repository, exist_ok=True, private=private or None)
        info = HfApi().create_commit(repository, added, commit_message=message)
    except _client_errors() as problem:
        raise _explained(problem, repository, None) from problem
    return str(info.repo_url)


def _strange(problem: Exception, repository: str) -> AtlasError:
    from huggingface_hub import constants

    said = (str(problem).splitlines() or [""])[0][:100]
    return UnreachableError(
        f"{repository}: {constants.ENDPOINT} answers as no Hub does "
        f"({type(problem).__name__}: {said})"
    )


def verify(path: Path) -> None:
    """Raise UnreachableError, and drop a file, whose bytes are not those that the Hub named.

    A file that has been looked at is known by its size and times.
    """
    named = named_sha256(path)
    if named is None:
        return
    stats = stat_files([path])
    found = load_digests("files", stats, [path.name])
    if not found:
        found = {path.name: CachedDigest(sha256_of(path))}
        save_digests("files", stats, found)
    if found[path.name].digest != named:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise UnreachableError(
            f"{path.name}: what arrived is not what the Hub named: sha256 "
            f"{found[path.name].digest[:12]}..., expected {named[:12]}...; it is dropped, try again"
        )


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


def _explained(
    problem: Exception,
    repository: str,
    revision: str | None,
    kind: str = "model",
    cache: Path | None = None,
) -> AtlasError:
    """One line that names the repository and the way out."""
    from huggingface_hub import constants, errors

    name = f"{repository}@{revision}" if revision else repository
    if isinstance(problem, OSError) and problem.errno in _DISK_TROUBLE:
        place, setting = cache or constants.HF_HUB_CACHE, "ATLAS_CACHE" if cache else "HF_HOME"
        return AtlasError(
            f"{problem.filename or place}: cannot keep downloads: "
            f"{problem.strerror}; set {setting} to a folder that can be written"
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
        return UnreachableError(f"{name}: no such {kind} on the Hub, nor a local path of that name")
    if isinstance(problem, ValueError):
        return UnreachableError(f"{name}: not a name the Hub accepts")
    if constants.is_offline_mode():
        return UnreachableError(f"{name}: not downloaded yet, and HF_HUB_OFFLINE is set", cut=True)
    reason = f"it answered {status}" if status else "no answer"
    said = f"{name}: {constants.ENDPOINT} could not be reached ({reason})"
    return UnreachableError(said, cut=True)
