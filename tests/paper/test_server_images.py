"""Images through every endpoint: what reaches the engine, what is counted, and every 400 with its field."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dayzero.arch.pixels import FitAndPad
from dayzero.chat.service import ChatService
from dayzero.chat.stand_ins import stand_in_files
from dayzero.checkpoint.source import open_source
from dayzero.engine.media import ImageInfo, why_not
from dayzero.errors import UsageError
from dayzero.server.fetch import FetchRules, fetch
from tests.paper.image_files import animation, data_uri, file_of, picture, png_claiming, png_uri
from tests.paper.server_support import ScriptedEngine, World, chat_with, client, full_chat, make

FAMILY, VOCAB, STOP = "kimi_k3", 512, 258
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
A, B, C = png_uri(30, 41, 1), png_uri(30, 41, 2), png_uri(84, 20, 3)  # 2 x 2, 2 x 2 and 1 x 3 tokens


@cache
def chat() -> ChatService:
    """The vocabulary of a twin whose format has words for images."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {"config.json": "{}", **stand_in_files(FAMILY, VOCAB, [STOP])}.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        return ChatService(open_source(folder), family=FAMILY)


def world(**config: Any) -> World:
    tokenizer = chat().tokenizer
    assert tokenizer is not None
    pad = tokenizer.id_of("<|media_pad|>")
    assert pad is not None
    engine = ScriptedEngine(reply=lambda request: [65, 66], stop_id=STOP)
    images = ImageInfo(pad_id=pad, fit=FitAndPad(14, 2, 65536, 512))
    engine.info = msgspec.structs.replace(engine.info, vocab=VOCAB, stop_ids=[STOP], images=images)
    return make(engine, chat(), **config)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}]} | more


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_images_reach_the_engine_where_their_placeholders_stand() -> None:
    on = world()
    answer = client(on).post(CHAT, json=ask(text("a"), image(A), text("b"), image(B), image(C)))
    assert answer.status_code == 200, answer.text
    (request,) = on.engine.seen
    info = on.engine.info.images
    assert info is not None and why_not(request, info) is None
    assert [(i.rows, i.columns) for i in request.media] == [(2, 2), (2, 2), (1, 3)]
    assert request.media[0].key != request.media[1].key
    assert request.prompt.count(info.pad_id) == 11
    shown = client(on).post("/tokenize", json={"model": "tiny", "messages": ask(image(A))["messages"]}).json()
    assert "<|media_begin|>image 30x41<|media_content|>" + 4 * "<|media_pad|>" + "<|media_end|>" in shown["prompt"]


def test_prompt_tokens_count_every_placeholder() -> None:
    on = client(world())
    without = on.post(CHAT, json=ask(text("a"))).json()["usage"]["prompt_tokens"]
    counts = [on.post(CHAT, json=ask(text("a"), image(u))).json()["usage"]["prompt_tokens"] for u in (A, C)]
    size = len("image 30x41") + 3  # letters are ids of their own there; three markers
    assert counts == [without + size + 4, without + size + 3]


IMAGE_TEMPLATE = """\
{%- for m in messages %}<|start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}
{%- if part.type == 'image' or 'image_url' in part %}<|end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{% endfor %}"""


def test_a_template_writes_one_placeholder_and_as_many_are_sent_as_there_are_tokens() -> None:
    """``<|end|>`` stands for the image token in this template; a user who spells it gets letters."""
    engine = ScriptedEngine(reply=lambda request: [65, 66])
    images = ImageInfo(pad_id=258, fit=FitAndPad(14, 2, 65536, 512))
    engine.info = msgspec.structs.replace(engine.info, images=images)
    on = make(engine, chat_with(IMAGE_TEMPLATE))
    answer = client(on).post(CHAT, json=ask(text("a<|end|>"), image(A), text("b"), image(C)))
    assert answer.status_code == 200, answer.text
    (request,) = engine.seen
    assert why_not(request, images) is None and request.prompt.count(258) == 7
    assert client(on).get("/v1/models").json()["data"][0]["capabilities"]["images"] is True
    assert answer.json()["usage"]["prompt_tokens"] == len(request.prompt)
    blind = make(engine, full_chat())  # its template has no place for images
    assert client(blind).get("/v1/models").json()["data"][0]["capabilities"]["images"] is False
    answer = client(blind).post(CHAT, json=ask(text("a"), image(A)))
    assert (answer.status_code, "chat format does not take" in answer.text) == (400, True)


def test_all_choices_carry_the_images() -> None:
    on = world()
    assert client(on).post(CHAT, json=ask(image(A), n=3)).status_code == 200
    assert [len(request.media) for request in on.engine.seen] == [1, 1, 1]


def test_the_other_apis_take_images_too() -> None:
    on = world()
    kind, _, body = A.partition(":")[2].partition(";base64,")
    source = {"type": "base64", "media_type": kind, "data": body}
    content = [text("what?"), {"type": "image", "source": source}]
    asked = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    first = client(on).post(MESSAGES, json=asked)
    assert first.status_code == 200, first.text
    counted = client(on).post(MESSAGES + "/count_tokens", json={k: asked[k] for k in ("model", "messages")}).json()
    assert counted["input_tokens"] == first.json()["usage"]["input_tokens"] + 3, "the cached ones are told apart"
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": A, "detail": "auto"}]}]
    second = client(on).post(RESPONSES, json={"model": "tiny", "input": items, "store": False})
    assert second.status_code == 200, second.text
    keys = [request.media[0].key for request in on.engine.seen]
    assert len(keys) == 2 and keys[0] == keys[1]


def test_a_resolution_that_is_asked_for_has_no_effect_and_is_named() -> None:
    detailed = {"type": "image_url", "image_url": {"url": A, "detail": "low"}}
    for parts, said in (([image(A)], None), ([detailed], "messages[].content[].image_url.detail")):
        answer = client(world()).post(CHAT, json=ask(*parts))
        assert answer.headers.get("x-dayzero-ignored") == said


def test_models_say_that_images_are_taken() -> None:
    assert client(world()).get("/v1/models").json()["data"][0]["capabilities"]["images"] is True
    assert client(make()).get("/v1/models").json()["data"][0]["capabilities"]["images"] is False


BAD = {
    "no base64": ("data:image/png,AAAA", "base64"),
    "broken base64": ("data:image/png;base64,%%%", "no valid base64"),
    "no image": (data_uri(b"hello"), "not a known format"),
    "cut": (data_uri(file_of(picture(50, 50))[:200]), "cannot be read"),
    "animated": (data_uri(animation(), "image/gif"), "animated"),
    "bomb": (data_uri(png_claiming(9000, 9000)), "9000x9000 pixels"),
    "file": ("file:///etc/passwd", "must be http, https or a data: URI, not file:///etc/passwd."),
    "scheme": ("gopher://somewhere/x", "must be http, https or a data: URI"),
    "empty": ("", "must be http, https or a data: URI, not a text without a scheme."),
    "no scheme": ("/etc/passwd", "must be http, https or a data: URI, not a text without a scheme."),
    "http": ("http://127.0.0.1:9/x.png", "not fetched here"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_400_with_the_message_they_stand_in(name: str) -> None:
    url, said = BAD[name]
    on = world()
    body = ask(text("a"))
    body["messages"] += [{"role": "assistant", "content": "b"}, {"role": "user", "content": [image(url)]}]
    answer = client(on).post(CHAT, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[2].content"), answer.text
    assert said in error["message"] and error["message"].endswith(".") and "\n" not in error["message"]
    assert not on.engine.seen


def test_limits_on_images_are_400() -> None:
    answer = client(world(max_images=2)).post(CHAT, json=ask(image(A), image(B), image(C)))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "3 images; at most 2" in answer.json()["error"]["message"]
    for url in (A, "DATA" + A[4:]):
        answer = client(world(max_image_bytes=100)).post(CHAT, json=ask(image(url)))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content")
        assert "larger than 100 bytes" in answer.json()["error"]["message"]
    answer = client(world(max_image_pixels=30 * 41 - 1)).post(CHAT, json=ask(image(A)))
    assert answer.status_code == 400 and "30x41 pixels" in answer.json()["error"]["message"]
    long = client(world()).post(CHAT, json=ask(image(png_uri(1260, 1260))))  # 2025 tokens of at most 2000
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded"), long.text


# --- by address ----------------------------------------------------------------------------------------------------


class _Site(BaseHTTPRequestHandler):
    """/ok.png, /moved -> /ok.png, /round -> /round, /away -> another host, /large, everything else 404."""

    def do_GET(self) -> None:
        body = {"/ok.png": file_of(picture(30, 41, 1)), "/large": bytes(5000)}.get(self.path)
        to = {"/moved": "/ok.png", "/round": "/round", "/away": "http://other.example/x"}.get(self.path)
        self.send_response(302 if to else 200 if body else 404)
        if to:
            self.send_header("location", to)
        self.send_header("content-length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://localhost:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_a_named_host_is_fetched_from_and_gives_the_same_image() -> None:
    on = world(image_hosts=("localhost",))
    with site() as address:
        for path in ("/ok.png", "/moved"):
            answer = client(on).post(CHAT, json=ask(image(address + path)))
            assert answer.status_code == 200, answer.text
    client(on).post(CHAT, json=ask(image(A)))
    assert len({request.media[0].key for request in on.engine.seen}) == 1 and len(on.engine.seen) == 3


def test_addresses_inside_are_refused_unless_they_are_named() -> None:
    take = partial(FetchRules, max_bytes=4000, seconds=5.0)
    with site() as address:
        assert fetch(address + "/ok.png", take(("localhost",)))
        for hosts, path, said in (
            (("*",), "/ok.png", "no public address"),
            (("example.org",), "/ok.png", "not fetched from localhost"),
            (("localhost",), "/away", "not fetched from other.example"),
            (("localhost",), "/round", "redirects more than 3 times"),
            (("localhost",), "/large", "larger than 4000 bytes"),
            (("localhost",), "/none?secret=1", "the answer is 404"),
        ):
            with pytest.raises(UsageError, match=said) as caught:
                fetch(address + path, take(hosts))
            assert "secret" not in str(caught.value)
    for nowhere in (
        "http://[::1",
        "http://localhost:99999999/",
        "http://\x00/",
        "http:///x",
        "https://" + "a" * 70 + "/",
    ):
        with pytest.raises(UsageError):
            fetch(nowhere, take(("*",)))


def test_a_host_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://localhost:{deaf.getsockname()[1]}/x.png"
        with pytest.raises(UsageError, match="cannot be fetched"):
            fetch(url, FetchRules(("localhost",), 1000, 0.2))
