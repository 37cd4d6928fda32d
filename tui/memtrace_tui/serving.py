"""The terminal browser as a web page, for one visitor: who started it.

A page of any other site that is open in the same web browser can reach an address of this machine, too. So the page's
address holds a token that works once and is traded for a cookie; every request must name this server (``Host``), and
every connection must come from its own page (``Origin``). The page loads nothing from elsewhere. The browser that is
served writes and opens no file (``SERVED``).
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from textual_serve.app_service import AppService
from textual_serve.server import Server

from memtrace_tui.settings import SERVED

_COOKIE = "memtrace"
_MOST_CELLS = 1000  # across or down
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
_PAGE, _SCRIPT = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("served.html", "served.js"))
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GuardedServer(Server):
    """Serves one command to whoever has the token."""

    def __init__(self, command: str, host: str, port: int) -> None:
        super().__init__(command, host=host, port=port, title="memtrace")
        self.token: str | None = secrets.token_urlsafe(24)  # None once it was used
        self._session = secrets.token_urlsafe(24)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}/?token={self.token}"

    async def _make_app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/page.js", self._script),
                web.get("/ws", self.handle_websocket),
                web.static("/static", self.statics_path, show_index=False, follow_symlinks=False),
            ]
        )
        app.on_startup.append(self.on_startup)
        return app

    async def on_startup(self, app: web.Application) -> None:
        """Say where to look."""
        print(f"memtrace: open {self.url}\nmemtrace: the address works once; Ctrl-C ends the server", file=sys.stderr)
        if not is_loopback(self.host):
            print(
                f"memtrace: warning: {self.host} can be reached from other machines, and what is sent is not encrypted",
                file=sys.stderr,
            )

    def initialize_logging(self) -> None:
        """Nothing of what visitors send is printed, no error that it makes either."""
        logging.getLogger().addHandler(logging.NullHandler())

    async def handle_websocket(self, request: web.Request) -> Any:
        """The screen of a visitor; none that nobody has, for its cells are held in memory."""
        sizes = [request.query.get(side, "80") for side in ("width", "height")]
        if not all(size.isdecimal() and len(size) < 9 and int(size) <= _MOST_CELLS for size in sizes):
            return web.Response(status=400, text="memtrace: no such screen\n")
        return await super().handle_websocket(request)

    async def _process_messages(self, websocket: web.WebSocketResponse, app_service: AppService) -> None:
        resize = app_service.set_terminal_size

        async def bounded(width: int, height: int) -> None:
            await resize(min(width, _MOST_CELLS), min(height, _MOST_CELLS))

        app_service.set_terminal_size = bounded  # type: ignore[method-assign]
        await super()._process_messages(websocket, app_service)

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        refused = self._refusal(request)
        try:
            answer = web.Response(status=403, text=f"memtrace: {refused}\n") if refused else await handler(request)
        except web.HTTPException as error:
            error.headers.update(_HEADERS)
            raise
        if not answer.prepared:
            answer.headers.update(_HEADERS)
        return answer

    def _refusal(self, request: web.Request) -> str | None:
        """Why a request is not answered."""
        host = request.headers.get("Host", "")
        origin = request.headers.get("Origin")
        if not self._is_own(host):
            return "this server goes by another name"
        if origin not in (None, f"http://{host}") or (origin is None and request.path == "/ws"):
            return "a page of another site asked for this"
        if request.path == "/" and "token" in request.query:
            return None  # _page judges it
        if not _is_same(request.cookies.get(_COOKIE, ""), self._session):
            return "open the address that was printed when the server was started; it works once"
        return None

    def _is_own(self, host: str) -> bool:
        """Whether ``Host`` is an address of this server: names that resolve here by somebody's will are none."""
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "80")
        if port != str(self.port):
            return False
        if name in (self.host, f"[{self.host}]") or (is_loopback(self.host) and name == "localhost"):
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return address.is_loopback or not is_loopback(self.host)

    async def _page(self, request: web.Request) -> web.StreamResponse:
        given = request.query.get("token")
        if given is None:
            return web.Response(text=_PAGE, content_type="text/html")
        if self.token is None or not _is_same(given, self.token):
            return web.Response(status=403, text="memtrace: this address was used already; start the server again\n")
        self.token = None
        answer = web.Response(status=303, headers={"Location": "/"})
        answer.set_cookie(_COOKIE, self._session, httponly=True, samesite="Strict", path="/")
        return answer

    async def _script(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=_SCRIPT, content_type="text/javascript")


def _is_same(given: str, secret: str) -> bool:
    """Compared in a time that tells nothing; what is given may be no text."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), secret.encode())


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(command: str, host: str, port: int) -> None:
    """Serve until Ctrl-C."""
    os.environ[SERVED] = "1"
    GuardedServer(command, host, port).serve()
