"""`sglang-ext prepare OWNER/NAME`, against a hub that runs in this process and speaks the hub's HTTP interface."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.tiny import target_config, write_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """Serves folders as models ``tiny/<folder name>``; remembers which files were sent."""

    def __init__(self, models: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = models
        self.sent: list[str] = []


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            folder = self.server.models / parts[3]
            if folder.is_dir():
                files = [{"rfilename": path.name, "size": path.stat().st_size} for path in sorted(folder.iterdir())]
                info = {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": files, "private": False}
                tree = [{"type": "file", "path": f["rfilename"], "size": f["size"], "oid": "0" * 40} for f in files]
                self.reply(json.dumps(tree if "tree" in parts else info).encode(), "application/json", body)
                return
        elif len(parts) == 5 and parts[2] == "resolve":
            file = self.server.models / parts[1] / parts[4]
            if file.is_file():
                if body:
                    self.server.sent.append(file.name)
                self.reply(file.read_bytes(), "application/octet-stream", body)
                return
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound" if len(parts) == 5 else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def reply(self, data: bytes, kind: str, body: bool) -> None:
        etag = hashlib.sha1(data).hexdigest()
        start = 0
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data[start:])


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "models").mkdir()
    server = Hub(tmp_path / "models")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def prepare(hub: Hub, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-m", "sglang_ext.cli", "prepare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_a_supported_model_is_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    source = write_target(hub.models / "llama", target_config())
    (source / "pytorch_model.bin").write_bytes(b"never needed")
    run = prepare(hub, tmp_path, "tiny/llama")
    assert run.returncode == 0, run.stderr
    folder = Path(run.stdout.splitlines()[-1])
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert sorted(hub.sent) == ["config.json", "model.safetensors", "tokenizer.json"]
    again = prepare(hub, tmp_path, "tiny/llama")
    assert again.stdout.splitlines()[-1] == str(folder)
    assert len(hub.sent) == 3
    placed = prepare(hub, tmp_path, "tiny/llama", "--output", str(tmp_path / "out"))
    assert placed.stdout.splitlines()[-1] == str(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(hub: Hub, tmp_path: Path) -> None:
    source = write_target(hub.models / "mixture", target_config())
    config = target_config(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe")
    (source / "config.json").write_text(json.dumps(config))
    run = prepare(hub, tmp_path, "tiny/mixture")
    assert run.returncode == 1
    assert "Qwen3MoeForCausalLM" in run.stderr.splitlines()[-1]
    assert hub.sent == ["config.json"]


def test_a_model_that_does_not_exist_is_one_line(hub: Hub, tmp_path: Path) -> None:
    run = prepare(hub, tmp_path, "tiny/nothing")
    assert run.returncode == 1
    assert run.stdout == ""
    errors = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, run.stderr
    assert "tiny/nothing could not be downloaded" in errors[0]
    assert "Traceback" not in run.stderr
