"""Downloading a target from a model hub, checked before the large files are fetched."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.families import target_shape
from sglang_ext.models.files import read_json_object
from sglang_ext.targets import folder
from sglang_ext.targets.cache import readable_errors, say

_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt"]


def download(model_id: str, out_dir: Path | None) -> Path:
    """Return the folder of a hub model, in the hub's cache or in ``out_dir``; an interrupted download continues.

    Raises:
        Refusal: if the model does not exist, is of an unsupported family, or cannot be reached.
    """
    import httpx
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    unreachable = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.HTTPError)
    with readable_errors(out_dir or Path(model_id)):
        try:  # inside: some of the hub's errors are OSErrors too
            say(f"downloading {model_id}")
            config = Path(hf_hub_download(model_id, "config.json", local_dir=out_dir))
            target_shape(read_json_object(config), f"{model_id} (config.json)")
            path = Path(snapshot_download(model_id, allow_patterns=_PATTERNS, local_dir=out_dir))
        except unreachable as error:
            reason = str(error).strip().splitlines()
            raise Refusal(
                f"{model_id} could not be downloaded ({reason[0] if reason else type(error).__name__})",
                "the hub must be reachable and the model public, or a token set with `hf auth login`",
                "check the name and the network, or name a local folder",
            ) from error
    folder.check(path)
    return path
