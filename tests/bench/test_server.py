"""Server processes: started, paused, resumed, and gone afterwards with everything they started."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from sglang_ext.bench.environment import cpu_model
from sglang_ext.bench.server import ServerProcess, target_arguments
from sglang_ext.core.refusal import Refusal

HEALTHY = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "scheduler"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def process(script: str, folder: Path) -> ServerProcess:
    """A server that runs ``script`` with the port as its last argument."""
    server = ServerProcess("test", [], folder / "log")
    server.command = [sys.executable, "-c", script, server.command[-1]]
    return server


def test_pausing_stops_the_whole_group_and_stopping_ends_it(tmp_path: Path) -> None:
    with process(HEALTHY, tmp_path) as server:
        child = server.scheduler()
        parent = child.parent()
        assert parent is not None
        server.pause()
        assert {child.status(), parent.status()} == {psutil.STATUS_STOPPED}
        server.resume()
        assert psutil.STATUS_STOPPED not in {child.status(), parent.status()}
        assert server.client.is_ready()
        server.pause()  # a paused server must end too
    for member in (child, parent):
        assert not member.is_running() or member.status() == psutil.STATUS_ZOMBIE


def test_a_server_that_ends_is_refused_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(Refusal, match="no such drafter"),
        process("import sys; sys.exit('error: no such drafter')", tmp_path),
    ):
        raise AssertionError("must not come up")


def test_flags_name_what_is_served() -> None:
    assert target_arguments("/t", "cpu", ["--dtype", "float32"]) == [
        "--model-path", "/t", "--device", "cpu", "--dtype", "float32",
    ]  # fmt: skip
    assert target_arguments("/t", None, []) == ["--model-path", "/t"]


def test_the_processor_is_named_as_the_kernel_names_it(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU 9000\n", encoding="utf-8")
    assert cpu_model(tmp_path / "cpuinfo") == "Some CPU 9000"
    assert cpu_model(tmp_path / "absent")
