"""A real server with the default target, the demo beside it, and a browser that looks at it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from demo.browser import Page, chromium, find_chromium, page_of
from sglang_ext.testing.server import Launch, Server, free_port


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.server)
            if find_chromium() is None:
                item.add_marker(pytest.mark.skip(reason="no Chromium on this machine"))


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A FlexDraft server in float32: the running one named by ``--running flexdraft=URL``, or one of our own."""
    for option in pytestconfig.getoption("--running"):
        name, _, where = option.partition("=")
        if name == "flexdraft":
            yield Server(where.partition(",")[0]).wait_ready()
            return
    from sglang_ext.targets import prepare

    target = prepare(pytestconfig.getoption("--target"))
    flags = ("--speculative-algorithm", "flexdraft")
    launch = Launch(target, flags, threads=pytestconfig.getoption("--server-threads"))
    started = Server.launch(launch, tmp_path_factory.mktemp("demo") / "server.log")
    try:
        yield started.wait_ready()
    finally:
        started.stop()


class Proxy:
    """Forwards to a server until it is cut, so that a server can be made to vanish without ending the real one.

    Attributes:
        url: its address.
        connections: connections its clients hold open.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._port = free_port()
        self._sockets: list[socket.socket] = []
        self.connections = 0
        self.url = f"http://127.0.0.1:{self._port}"

    def listen(self) -> None:
        """Begin to answer."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Vanish: no new connections, and the open ones end at once."""
        for one in list(self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            upstream = socket.create_connection(self._target)
            self.connections += 1
            self._sockets += [client, upstream]
            threading.Thread(target=self._pump, args=(upstream, client), daemon=True).start()
            threading.Thread(target=self._serve, args=(client, upstream), daemon=True).start()

    def _serve(self, client: socket.socket, upstream: socket.socket) -> None:
        self._pump(client, upstream)
        self.connections -= 1

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def demo(*flags: str) -> AbstractContextManager[str]:
    """Run ``python -m demo`` on a free port; the context gives the page's address."""
    return page_of(*flags, port=free_port())


@pytest.fixture(scope="session")
def upstream(server: Server) -> Iterator[Proxy]:
    """The real server behind something that counts the demo's connections."""
    between = Proxy(server.url)
    between.listen()
    yield between
    between.cut()


@pytest.fixture(scope="session")
def demo_url(upstream: Proxy) -> Iterator[str]:
    """The demo of the real server."""
    with demo("--url", upstream.url) as url:
        yield url


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium."""
    with chromium() as started:
        yield started


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Page]]:
    """Open pages, each in a context of its own as if by another visitor; no page may have script errors."""
    contexts: list[Any] = []
    pages: list[Page] = []

    def open_one(url: str, width: int = 1280, height: int = 900) -> Page:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}))
        pages.append(Page(contexts[-1].new_page(), url))
        return pages[-1]

    yield open_one
    for context in contexts:
        context.close()
    assert [error for page in pages for error in page.errors] == []


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """The real server behind a connection that can be cut."""
    between = Proxy(server.url)
    between.listen()
    yield between
    between.cut()
