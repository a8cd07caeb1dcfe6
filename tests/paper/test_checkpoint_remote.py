"""Object stores against a local S3 server, and the hub against a stand-in for its client."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dayzero.checkpoint import remote
from dayzero.checkpoint.index import read_index
from dayzero.checkpoint.remote import HttpHubClient, HubSource
from dayzero.checkpoint.source import Source, checked, open_source
from dayzero.checkpoint.verify import verify_hashes
from dayzero.errors import CheckpointError, MachineError, UsageError
from tests.paper.files import write_checkpoint, write_safetensors

SHARDS = {
    "model-00001-of-00002.safetensors": {"a": ("U8", [4000], bytes(range(250)) * 16), "b": ("F32", [3], bytes(12))},
    "model-00002-of-00002.safetensors": {"c": ("BF16", [64], bytes(128))},
}
BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    pytest.importorskip("moto.server")
    from moto.server import ThreadedMotoServer

    thread = ThreadedMotoServer("127.0.0.1", port=0)
    thread.start()
    host, port = thread.get_host_and_port()
    yield f"http://{host}:{port}"
    thread.stop()


@pytest.fixture
def options(server: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return {
        "endpoint": server,
        "access_key_id": "x",
        "secret_access_key": "y",
        "region": "us-east-1",
        "virtual_hosted_style_request": False,
        "client_options": {"allow_http": True},
    }


@pytest.fixture
def bucket(options: dict[str, Any], tmp_path: Path) -> Iterator[Any]:
    """A store over the bucket, holding the checkpoint at models/tiny and other things beside it."""
    boto3 = pytest.importorskip("boto3")
    obstore = pytest.importorskip("obstore")
    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint"],
        aws_access_key_id="x",
        aws_secret_access_key="y",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    store = obstore.store.S3Store(BUCKET, **options)
    write_checkpoint(tmp_path, SHARDS)
    for path in tmp_path.iterdir():
        obstore.put(store, f"models/tiny/{path.name}", path.read_bytes())
    obstore.put(store, "models/tiny/original/params.json", b"{}")
    obstore.put(store, "models/tiny/.cache/lock", b"")
    obstore.put(store, "other/notes.txt", b"x")
    obstore.put(store, "pickles/pytorch_model.bin", b"x")
    yield store
    for chunk in obstore.list(store):
        for item in chunk:
            obstore.delete(store, item["path"])


def test_store_reads_like_a_folder(bucket: Any, options: dict[str, Any], tmp_path: Path) -> None:
    source = open_source(f"s3://{BUCKET}/models/tiny/", store_options=options)
    local = open_source(str(tmp_path))
    assert source.files() == {**local.files(), "original/params.json": 2}
    assert source.path("config.json") is None
    assert source.text("config.json") == local.text("config.json")
    ours, theirs = read_index(source), read_index(local)
    assert ours.problems == []
    assert ours.entries == theirs.entries
    entry = ours.entries["a"]
    before = source.num_reads
    ranges = [(entry.start + 3990, 10), (entry.start, 5)]
    assert source.read_ranges(entry.file, ranges) == [bytes(range(240, 250)), bytes(range(5))]
    assert source.num_reads == before + 1
    # Headers, the index file and the ranges: never the tensors.
    assert source.bytes_read < sum(source.files().values())
    assert source.hashes() == {}


def test_hashing_a_store_resumes_by_entity_tag(bucket: Any, options: dict[str, Any], tmp_path: Path) -> None:
    import obstore

    where = f"s3://{BUCKET}/models/tiny"
    config = "2a3a5c9cd1bd1ccbdfbcd4f13f0fa9e2d6cf0cf8a1d1a5be1cbf6d6de1f2f3a4"
    state = tmp_path / "state.json"
    assert verify_hashes(open_source(where, store_options=options), {"config.json": config}, state)[0].verdict == "fail"
    again = open_source(where, store_options=options)
    verify_hashes(again, {"config.json": config}, state)
    assert again.bytes_read == 0
    obstore.put(bucket, "models/tiny/config.json", b'{"model_type": "text"}')
    third = open_source(where, store_options=options)
    verify_hashes(third, {"config.json": config}, state)
    assert third.bytes_read > 0


def test_object_that_vanishes_or_shrinks_half_way(bucket: Any, options: dict[str, Any]) -> None:
    import obstore

    source = open_source(f"s3://{BUCKET}/models/tiny", store_options=options)
    first, second = SHARDS
    obstore.delete(bucket, f"models/tiny/{first}")
    with pytest.raises(CheckpointError, match=f"{first}.*disappeared"):
        source.read(first, 0, 8)
    obstore.put(bucket, f"models/tiny/{second}", b"12345")
    with pytest.raises(CheckpointError, match=f"{second}.*early"):
        source.read(second, 0, 8)
    with pytest.raises(CheckpointError, match=f"{second}.*lacks byte 8: it became shorter"):
        source.read(second, 8, 8)


def test_store_without_a_checkpoint(bucket: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"s3://checkpoints/other is no checkpoint.*notes\.txt"):
        open_source(f"s3://{BUCKET}/other", store_options=options)
    with pytest.raises(UsageError, match="found no files"):
        open_source(f"s3://{BUCKET}/nothing/here", store_options=options)
    with pytest.raises(UsageError, match="found no files"):
        open_source(f"s3://{BUCKET}", store_options=options)
    with pytest.raises(UsageError, match="pickle"):
        open_source(f"s3://{BUCKET}/pickles", store_options=options)
    with pytest.raises(UsageError, match="does not exist"):
        open_source("s3://no-such-bucket/x", store_options=options)
    with pytest.raises(UsageError, match="names no bucket"):
        open_source("s3://", store_options=options)
    with pytest.raises(UsageError, match="store options"):
        open_source(f"s3://{BUCKET}/x", store_options={**options, "no_such_option": "1"})


def test_store_that_does_not_answer(options: dict[str, Any]) -> None:
    from datetime import timedelta

    dead = {
        **options,
        "endpoint": "http://127.0.0.1:9",
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    }
    with pytest.raises(MachineError, match="cannot be listed.*check network") as caught:
        open_source("s3://bucket/x", store_options=dead)
    assert caught.value.exit_code == 3


class FakeHub:
    """A repository in a folder, behind the two calls a hub source makes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[tuple[str, str, int, int]] = []

    def describe(self, repo: str, revision: str | None) -> tuple[str, dict[str, int], dict[str, str], dict[str, str]]:
        sizes = {path.name: path.stat().st_size for path in sorted(self.folder.iterdir())}
        return "c0ffee", sizes, {"model.safetensors": "ab" * 32}, {name: f"id-{name}" for name in sizes}

    def read(self, repo: str, commit: str, file: str, start: int, length: int) -> bytes:
        self.calls.append((commit, file, start, length))
        with open(self.folder / file, "rb") as handle:
            handle.seek(start)
            return handle.read(length)


def test_hub_source_pins_the_commit_and_reads_ranges(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"model.safetensors": {"w": ("U8", [4], b"abcd")}})
    hub = FakeHub(tmp_path)
    source: Source = checked(HubSource("org/name", "main", hub))
    entry = read_index(source).entries["w"]
    assert source.read(entry.file, entry.start, 4) == b"abcd"
    assert {commit for commit, *_ in hub.calls} == {"c0ffee"}
    assert source.name == "org/name@main"
    assert source.hashes() == {"model.safetensors": "ab" * 32}
    assert source.stamp("config.json") == "id:id-config.json"
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="disappeared"):
        source.read("model.safetensors", 0, 8)


class Stream:
    """An HTTP answer, as the hub's session gives it."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status_code, self.body, self.headers = status, body, {"Content-Length": str(len(body))}
        self.was_read = False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def read(self) -> bytes:
        self.was_read = True
        return self.body


@pytest.fixture
def hub_client(monkeypatch: pytest.MonkeyPatch) -> HttpHubClient:
    pytest.importorskip("huggingface_hub")
    return HttpHubClient("org/name")


def answer(monkeypatch: pytest.MonkeyPatch, client: HttpHubClient, stream: Stream | Exception) -> list[dict[str, Any]]:
    """Makes the client's session give this answer; returns the requests it will have seen."""
    seen: list[dict[str, Any]] = []

    class Session:
        def stream(self, method: str, url: str, **more: Any) -> Stream:
            seen.append({"method": method, "url": url, **more})
            if isinstance(stream, Exception):
                raise stream
            return stream

    monkeypatch.setattr(client._utils, "get_session", Session)
    monkeypatch.setattr(client._utils, "hf_raise_for_status", lambda response: None)
    return seen


def test_hub_range_request(monkeypatch: pytest.MonkeyPatch, hub_client: HttpHubClient) -> None:
    seen = answer(monkeypatch, hub_client, Stream(206, b"abcd"))
    assert hub_client.read("org/name", "c0ffee", "sub/w.safetensors", 8, 4) == b"abcd"
    assert seen[0]["headers"]["Range"] == "bytes=8-11"
    assert "org/name/resolve/c0ffee/sub/w.safetensors" in seen[0]["url"]


def test_hub_that_ignores_ranges_is_not_read_whole(monkeypatch: pytest.MonkeyPatch, hub_client: HttpHubClient) -> None:
    whole = Stream(200, b"x" * 1000)
    answer(monkeypatch, hub_client, whole)
    with pytest.raises(CheckpointError, match="does not serve ranges"):
        hub_client.read("org/name", "c0ffee", "w.safetensors", 0, 8)
    assert not whole.was_read
    small = Stream(200, b"{}")
    answer(monkeypatch, hub_client, small)
    assert hub_client.read("org/name", "c0ffee", "config.json", 0, 2) == b"{}"


def test_hub_read_that_breaks_off(monkeypatch: pytest.MonkeyPatch, hub_client: HttpHubClient) -> None:
    answer(monkeypatch, hub_client, ConnectionError("reset by peer"))
    with pytest.raises(MachineError, match=r"w\.safetensors .*byte 16 .*reset by peer"):
        hub_client.read("org/name", "c0ffee", "w.safetensors", 16, 8)


def fail_describing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    import huggingface_hub

    def refuse(self: object, *args: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)


def test_hub_id_offline_is_the_machines_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("huggingface_hub.errors")
    base = errors.HfHubHTTPError.__bases__[0]
    for error in (errors.OfflineModeIsEnabled("offline"), ConnectionError("refused"), base("no route")):
        fail_describing(monkeypatch, error)
        with pytest.raises(
            MachineError, match=r"org/name.*no folder here.*go online, or give a local folder"
        ) as caught:
            open_source("org/name@v1.0")
        assert caught.value.exit_code == 3


def test_hub_answers_of_the_users_making(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("huggingface_hub.errors")
    for kind, word in (
        (errors.GatedRepoError, "gated"),
        (errors.RevisionNotFoundError, "no revision v9"),
        (errors.RepositoryNotFoundError, "neither a folder here nor a repository"),
        (errors.HFValidationError, "nor a valid hub id"),
    ):
        fail_describing(monkeypatch, kind.__new__(kind))
        with pytest.raises(UsageError, match=word):
            open_source("org/name@v9")


def test_hub_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.hf_api import BlobLfsInfo, RepoSibling

    class Info:
        sha = "c0ffee"
        siblings = (
            RepoSibling("config.json", size=2, blob_id="i1"),
            RepoSibling(
                "model.safetensors", size=9, blob_id="i2", lfs=BlobLfsInfo(size=9, sha256="ab" * 32, pointer_size=1)
            ),
        )

    asked: list[dict[str, Any]] = []

    def model_info(self: object, repo: str, **more: Any) -> type[Info]:
        asked.append({"repo": repo, **more})
        return Info

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    source = open_source("org/name@refs/pr/1")
    assert source.files() == {"config.json": 2, "model.safetensors": 9}
    assert source.hashes() == {"model.safetensors": "ab" * 32}
    assert asked[0]["repo"] == "org/name"
    assert asked[0]["revision"] == "refs/pr/1"
    assert asked[0]["files_metadata"] is True


@pytest.mark.parametrize("where, package", [("org/name", "huggingface_hub"), ("s3://bucket/x", "obstore")])
def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, where: str, package: str) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MachineError, match=f"needs the package {package}"):
        open_source(where)


def test_a_local_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    write_safetensors(tmp_path / "org" / "name" / "model.safetensors", {"w": ("U8", [1], b"x")})
    monkeypatch.chdir(tmp_path)
    assert open_source("org/name").path("model.safetensors") is not None


def test_retries_end_while_the_user_still_looks() -> None:
    assert remote.RETRIES["retry_timeout"].total_seconds() <= 30
