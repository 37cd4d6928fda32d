"""The browser as a web page: only who has the token drives it, from its own page, and it touches no file."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from memtrace_tui import main_screen, serving
from memtrace_tui.data.source import source_lines
from memtrace_tui.serving import GuardedServer, is_loopback
from memtrace_tui.settings import SERVED, Settings
from support import trace_path
from textual_serve.app_service import AppService

from memtrace.cli import main
from memtrace.errors import UsageError
from memtrace.snapshot.stacks import Frame

ECHO = f"""{sys.executable} -c 'print("__GANGLION__", flush=True); import time; time.sleep(5)'"""


class Visit:
    """A server and a web browser that has not opened it yet."""

    def __init__(self, server: GuardedServer, client: TestClient) -> None:
        self.server, self.client = server, client
        self.own = f"http://localhost:{server.port}"

    async def get(self, path: str, **headers: str) -> aiohttp.ClientResponse:
        return await self.client.get(
            path, headers={"Host": f"localhost:{self.server.port}", **headers}, allow_redirects=False
        )

    async def enter(self) -> dict[str, str]:
        answer = await self.get(f"/?token={self.server.token}")
        assert answer.status == 303
        return {"Cookie": answer.headers["Set-Cookie"].split(";")[0]}


@pytest.fixture
async def visit() -> AsyncIterator[Visit]:
    server = GuardedServer(ECHO, "localhost", 8000)
    async with TestClient(TestServer(await server._make_app()), cookie_jar=aiohttp.DummyCookieJar()) as client:
        server.port = client.port or 0
        yield Visit(server, client)


async def test_nothing_is_answered_without_the_token(visit: Visit) -> None:
    paths = ["/", "/page.js", "/ws", "/static/js/textual.js", "/static/", "/download/x", "/?token=", "/?token=wrong"]
    for path in paths:
        answer = await visit.get(path, Origin=visit.own)
        assert answer.status == 403, path
        assert "textual" not in await answer.text()


async def test_the_address_works_once_and_then_its_cookie_does(visit: Visit) -> None:
    token = visit.server.token
    cookie = await visit.enter()
    assert (await visit.get("/", **cookie)).status == 200
    assert (await visit.get(f"/?token={token}")).status == 403
    assert (await visit.get(f"/?token={token}", **cookie)).status == 403
    first = await visit.get("/page.js", **cookie)
    assert first.status == 200 and token not in await first.text()


async def test_cookies_are_for_this_page_alone(visit: Visit) -> None:
    answer = await visit.get(f"/?token={visit.server.token}")
    said = answer.headers["Set-Cookie"]
    assert "HttpOnly" in said and "SameSite=Strict" in said
    assert visit.server.token is None or visit.server.token not in said


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "localhost:1", "localhost", "", "10.0.0.1:{port}"]
)
async def test_another_name_for_this_server_is_refused(visit: Visit, host: str) -> None:
    """A page of another site can let its own name point here."""
    cookie = await visit.enter()
    for path in ("/", "/ws"):
        answer = await visit.get(path, Host=host.format(port=visit.server.port), Origin=visit.own, **cookie)
        assert answer.status in (400, 403)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "https://localhost:{port}", ""]
)
async def test_a_page_of_another_site_is_refused(visit: Visit, origin: str) -> None:
    cookie = await visit.enter()
    given = origin.format(port=visit.server.port)
    for path in ("/", "/ws", "/static/js/textual.js"):
        assert (await visit.get(path, Origin=given, **cookie)).status == 403


async def test_the_socket_needs_cookie_and_origin(visit: Visit) -> None:
    cookie = await visit.enter()
    host = {"Host": f"localhost:{visit.server.port}"}
    for headers in ({}, {"Origin": visit.own}, cookie):
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await visit.client.ws_connect("/ws", headers=host | headers)
    async with visit.client.ws_connect("/ws", headers=host | cookie | {"Origin": visit.own}) as socket:
        await socket.send_json(["ping", "x"])
        assert (await socket.receive_json(timeout=20)) == ["pong", "x"]


async def test_what_is_no_text_is_refused_and_not_printed(visit: Visit, capsys: pytest.CaptureFixture[str]) -> None:
    visit.server.initialize_logging()
    assert (await visit.get("/", Cookie="memtrace=\udcff\udcfe")).status == 403
    assert (await visit.get("/?token=%ED%A0%80%ff")).status == 403
    headers = {"Host": f"localhost:{visit.server.port}", "Origin": visit.own} | await visit.enter()
    async with visit.client.ws_connect("/ws", headers=headers) as socket:
        await socket.send_str("secret of a visitor")
        await socket.receive(timeout=20)
    assert "secret" not in capsys.readouterr().err


async def test_a_screen_is_one_that_somebody_has(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"Host": f"localhost:{visit.server.port}", "Origin": visit.own} | await visit.enter()
    for size in (
        "width=999999999",
        "height=1001",
        "width=-5",
        "height=x",
        "width=" + "9" * 5000,
        "width=0000000009999999",
    ):
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await visit.client.ws_connect(f"/ws?{size}", headers=headers)
    told = []

    async def sent(self: AppService, meta: dict[str, Any]) -> bool:
        told.append(meta)
        return True

    monkeypatch.setattr(AppService, "send_meta", sent)
    async with visit.client.ws_connect("/ws?width=80&height=24", headers=headers) as socket:
        await socket.send_json(["resize", {"width": 10**9, "height": 30}])
        await socket.send_json(["ping", "x"])
        assert (await socket.receive_json(timeout=20)) == ["pong", "x"]
    assert told[0] == {"type": "resize", "width": 1000, "height": 30}


async def test_the_page_loads_nothing_from_elsewhere(visit: Visit) -> None:
    cookie = await visit.enter()
    answer = await visit.get("/", **cookie)
    page = await answer.text()
    assert "<title>memtrace</title>" in page
    assert not re.search(r"(?:https?:)?//", page)
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "http" not in policy and "frame-ancestors 'none'" in policy
    for path in re.findall(r'(?:src|href)="(/[^"]*)"|url\("(/[^"]*)"\)', page):
        assert (await visit.get("".join(path), **cookie)).status == 200
    for folder in ("/static", "/static/", "/static/js"):
        assert (await visit.get(folder, **cookie)).status in (403, 404)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("127.1.2.3", True), ("0.0.0.0", False), ("::", False),
     ("192.168.1.5", False), ("mymachine", False), ("localhost.evil.example", False)],
)  # fmt: skip
async def test_other_machines_are_warned_of(host: str, loopback: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_loopback(host) is loopback
    server = GuardedServer(ECHO, host, 8000)
    await server.on_startup(await server._make_app())
    said = capsys.readouterr().err
    assert ("warning" in said) is not loopback and f":8000/?token={server.token}" in said


def test_what_is_served_touches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "secret.py"
    source.write_text("password = 1\n")
    frame = Frame(str(source), 1, "f")
    assert source_lines(frame, 5)
    monkeypatch.setenv(SERVED, "1")
    assert source_lines(frame, 5) == []
    Settings().save(tmp_path / "config" / "browser.json")
    with pytest.raises(UsageError, match="writes no files"):
        main_screen._write(str(tmp_path / "x.csv"), "a")
    assert [path.name for path in tmp_path.iterdir()] == ["secret.py"]


def test_the_served_process_begins_with_a_safe_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole command, run in a folder with a module of every name that it might import."""
    commands: list[str] = []
    monkeypatch.setattr(serving, "serve", lambda command, host, port: commands.append(command))
    assert main(["browse", str(trace_path("tiny-llama_3-steps")), "--serve"]) == 0
    for name in sys.stdlib_module_names | {"memtrace", "memtrace_tui", "textual", "numpy", "rich"}:
        (tmp_path / f"{name}.py").write_text("open('EXECUTED', 'w')\n")
    [command] = commands
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "needs a terminal" in done.stderr  # it began, and has none
    assert not (tmp_path / "EXECUTED").exists()
