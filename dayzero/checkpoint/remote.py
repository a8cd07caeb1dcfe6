"""Checkpoints that are elsewhere: an object store (obstore) and the hub (huggingface_hub). Both imported on use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

from dayzero.checkpoint.source import Source, is_marker
from dayzero.errors import CheckpointError, MachineError, UsageError
from dayzero.units import MIB

# An unreachable endpoint should be reported while the user still looks; the client's own default waits three minutes.
RETRIES = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}


class StoreSource(Source):
    """``s3://bucket/prefix``. options go to the client's constructor; keys and endpoints that they leave out are the
    client's own business."""

    parallel_reads = 8
    merge_gap_bytes = 1 * MIB  # about what a round trip costs

    def __init__(self, where: str, options: Mapping[str, Any]) -> None:
        super().__init__(where)
        self._obstore = _import_obstore()
        url = urlsplit(where)
        if not url.netloc:
            raise UsageError(f"{where} names no bucket; write s3://bucket/prefix.")
        arguments = {"retry_config": RETRIES, **options}
        prefix = url.path.strip("/")
        if prefix:
            arguments["prefix"] = prefix
        try:
            self._store = self._obstore.store.S3Store(url.netloc, **arguments)
        except (self._obstore.exceptions.BaseError, TypeError, ValueError) as error:
            raise UsageError(f"{where} cannot be opened with these store options: {_first_line(error)}.") from error
        self._stamps: dict[str, str] = {}

    def _list(self) -> dict[str, int]:
        errors = self._obstore.exceptions
        sizes: dict[str, int] = {}
        try:
            top = self._obstore.list_with_delimiter(self._store)["objects"]
            self._keep(top, sizes)
            if any(is_marker(file) for file in sizes):
                for chunk in self._obstore.list(self._store):
                    self._keep(chunk, sizes)
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise MachineError(f"{self.name} refuses these credentials; set the store's keys and try again.") from error
        except (errors.BaseError, OSError) as error:
            # Listing a bucket that is not there comes back as a general error with the store's own code in its text.
            if isinstance(error, (errors.NotFoundError, FileNotFoundError)) or "NoSuchBucket" in str(error):
                raise UsageError(f"{self.name} does not exist; check bucket and prefix.") from error
            raise MachineError(
                f"{self.name} cannot be listed ({_first_line(error)}); check network, endpoint and credentials."
            ) from error
        return sizes

    def _keep(self, objects: Iterable[Mapping[str, Any]], sizes: dict[str, int]) -> None:
        for item in objects:
            file = item["path"]
            if file and not any(part.startswith(".") for part in file.split("/")[:-1]):
                sizes[file] = item["size"]
                self._stamps[file] = f"etag:{item['e_tag']} {item['last_modified'].isoformat()}"

    def _fetch(self, file: str, start: int, length: int) -> bytes:
        errors = self._obstore.exceptions
        try:
            return bytes(self._obstore.get_range(self._store, file, start=start, length=length))
        except (errors.NotFoundError, FileNotFoundError) as error:
            raise FileNotFoundError(file) from error
        except (errors.BaseError, OSError) as error:
            if self._has_shrunk(file, start + length):
                return b""
            raise MachineError(
                f"{file} of {self.name} cannot be read at byte {start} ({_first_line(error)}); "
                "check network, endpoint and credentials."
            ) from error

    def _has_shrunk(self, file: str, end: int) -> bool:
        """Whether the object is now too short for a range. A store answers such a range with a general error."""
        try:
            return bool(self._obstore.head(self._store, file)["size"] < end)
        except (self._obstore.exceptions.BaseError, OSError):
            return False

    def stamp(self, file: str) -> str:
        self.size(file)
        return self._stamps[file]


class HubClient(Protocol):
    """What a hub source needs of the hub."""

    def describe(self, repo: str, revision: str | None) -> tuple[str, dict[str, int], dict[str, str], dict[str, str]]:
        """(commit, file -> size, file -> SHA-256, file -> content id)."""

    def read(self, repo: str, commit: str, file: str, start: int, length: int) -> bytes:
        """Bytes [start, start+length) of a file at a commit; FileNotFoundError when the hub has it no more."""


class HubSource(Source):
    """``org/name[@revision]`` on the hub. The revision is resolved to a commit once, so that all reads agree."""

    parallel_reads = 8
    merge_gap_bytes = 1 * MIB

    def __init__(self, repo: str, revision: str | None, client: HubClient | None = None) -> None:
        super().__init__(f"{repo}@{revision}" if revision else repo)
        self.repo = repo
        self._client = client or HttpHubClient(self.name)
        self.commit, self._listed, self._hashes, self._ids = self._client.describe(repo, revision)

    def _list(self) -> dict[str, int]:
        return dict(self._listed)

    def _fetch(self, file: str, start: int, length: int) -> bytes:
        return self._client.read(self.repo, self.commit, file, start, length)

    def stamp(self, file: str) -> str:
        self.size(file)
        return f"id:{self._ids.get(file, self.commit)}"

    def hashes(self) -> dict[str, str]:
        return dict(self._hashes)


class HttpHubClient:
    """The hub through huggingface_hub: metadata by its API, ranges by HTTP with its session and headers.

    MachineError when the package or the network is missing, UsageError when there is no such repository or it is gated.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            import huggingface_hub
            from huggingface_hub import errors, utils
        except ImportError as error:
            raise MachineError(
                f"{name} is no folder here, and reading it from the hub needs the package huggingface_hub; "
                "install it, or give a local folder."
            ) from error
        self._hub = huggingface_hub
        self._errors = errors
        self._utils = utils
        # The client has changed its HTTP library; the bases of its own error name the family in use. OSError covers
        # refused connections and the offline switch.
        self._network: tuple[type[BaseException], ...] = (*errors.HfHubHTTPError.__bases__, OSError)

    def describe(self, repo: str, revision: str | None) -> tuple[str, dict[str, int], dict[str, str], dict[str, str]]:
        errors = self._errors
        try:
            info = self._hub.HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=20)
        except errors.GatedRepoError as error:
            raise UsageError(f"{self.name} is gated; accept its licence on the hub and log in, then retry.") from error
        except errors.RevisionNotFoundError as error:
            raise UsageError(f"{self.name}: the hub has no revision {revision} of {repo}.") from error
        except errors.RepositoryNotFoundError as error:
            raise UsageError(
                f"{self.name} is neither a folder here nor a repository on the hub that this login may read."
            ) from error
        except errors.HFValidationError as error:
            raise UsageError(f"{self.name} is neither a folder here nor a valid hub id (org/name).") from error
        except self._network as error:
            raise MachineError(
                f"{self.name} is no folder here, and the hub cannot be reached ({_first_line(error)}); "
                "go online, or give a local folder."
            ) from error
        siblings = info.siblings or []
        sizes = {s.rfilename: int(s.size or 0) for s in siblings}
        hashes = {s.rfilename: str(s.lfs.sha256) for s in siblings if s.lfs}
        return str(info.sha), sizes, hashes, {s.rfilename: str(s.blob_id) for s in siblings}

    def read(self, repo: str, commit: str, file: str, start: int, length: int) -> bytes:
        utils, errors = self._utils, self._errors
        url = self._hub.hf_hub_url(repo, file, revision=commit)
        headers = {**utils.build_hf_headers(), "Range": f"bytes={start}-{start + length - 1}"}
        try:
            with utils.get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
                utils.hf_raise_for_status(response)
                whole_file = start == 0 and response.headers.get("Content-Length") == str(length)
                if response.status_code != 206 and not whole_file:
                    # Reading on would download the whole shard.
                    raise CheckpointError(f"the hub does not serve ranges of {file} of {self.name}; download it first.")
                return bytes(response.read())
        except errors.EntryNotFoundError as error:
            raise FileNotFoundError(file) from error
        except self._network as error:
            raise MachineError(
                f"{file} of {self.name} cannot be read at byte {start} ({_first_line(error)}); check the network."
            ) from error


def _import_obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise MachineError("reading s3:// needs the package obstore; install it, or give a local folder.") from error
    return obstore


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0].rstrip(".") if lines else type(error).__name__)[:200]
