"""A local S3 server for tests, reached as a user reaches one: by ``s3://`` and the store's own environment."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BUCKET = "releases"


@contextmanager
def s3_server() -> Iterator[pytest.MonkeyPatch]:
    """Runs the server and points the environment at it."""
    pytest.importorskip("moto.server")
    pytest.importorskip("obstore")
    boto3 = pytest.importorskip("boto3")
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    patch = pytest.MonkeyPatch()
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        patch.delenv(name, raising=False)
        patch.delenv(name.lower(), raising=False)
    settings = {
        "NO_PROXY": "127.0.0.1", "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
    }  # fmt: skip
    for name, value in settings.items():
        patch.setenv(name, value)
    try:
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket=BUCKET)
        yield patch
    finally:
        patch.undo()
        server.stop()


def upload(folder: Path, prefix: str) -> str:
    """Put a folder's files below ``prefix``; returns what a user would type."""
    import obstore

    store = obstore.store.S3Store(BUCKET)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            obstore.put(store, f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"
