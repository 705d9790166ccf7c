"""The page: its components, where they stand, and which handler each one calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from demo.controls import MODES, MOST_BACKGROUND, MOST_TOKENS, PRUNING_CHOICES
from demo.handlers import Handlers
from demo.markup import element
from demo.pool import Pool
from demo.prompts import BATCH_PROMPTS, EXAMPLES
from demo.recording import Recording
from demo.settings import LIVE, TURNS

STATIC = Path(__file__).parent / "static"
CSS = (STATIC / "style.css").read_text(encoding="utf-8")
FLOW_JS = (STATIC / "flow.js").read_text(encoding="utf-8")
TITLE = "Drafts, accepted and rejected"
_TOGGLE_DARK = "() => { document.body.classList.toggle('dark'); }"
_LEGEND = element(
    "div",
    '<span><span class="t a">accepted draft</span></span><span><span class="t b">bonus token</span> (the target’s own)'
    '</span><span><s class="t r">rejected draft</s></span><span>plain token</span>',
    "legend",
)
_TIMINGS = [("one after the other, shown in step (measured)", TURNS), ("both live at once (not measured)", LIVE)]


def build(pool: Pool, first: Recording | None = None) -> tuple[gr.Blocks, Handlers]:
    """Return the page and its handlers; :func:`launch_options` belong to its ``launch``."""
    page: dict[str, Any] = {}
    with gr.Blocks(title=TITLE, analytics_enabled=False) as blocks:
        _top(page)
        with gr.Tab("Side by side"):
            _prompt(page)
            _panels(page)
        with gr.Tab("Batch"):
            _batch(page)
        handlers = Handlers(pool, page, first)
        _wire(blocks, page, handlers)
    return blocks, handlers


def launch_options() -> dict[str, Any]:
    """Return the look of the page and what Gradio must not do."""
    return {
        "css": CSS,
        "theme": gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        "share": False,
        "footer_links": [],
        "ssr_mode": False,
        "quiet": True,
    }


def _top(page: dict[str, Any]) -> None:
    with gr.Row():
        gr.HTML(
            element(
                "div",
                f"<h1>{TITLE}</h1><p>The same answer twice: plain decoding, and speculative decoding that "
                "checks several guessed tokens per step.</p>",
                "demo-title",
            ),
        )
        dark = gr.Button("Dark / light", size="sm", scale=0, min_width=120, elem_id="theme")
        dark.click(None, js=_TOGGLE_DARK)
    page["serving"] = gr.HTML("", elem_id="serving")
    page["banner"] = gr.HTML("", elem_id="banner")
    page["connect"] = gr.Button("Connect again", visible=False, size="sm", elem_id="connect")


def _prompt(page: dict[str, Any]) -> None:
    page["prompt"] = gr.Textbox(
        EXAMPLES[0][1], label="Prompt", lines=2, max_lines=8, elem_id="prompt", submit_btn=False
    )
    with gr.Row():
        for name, prompt in EXAMPLES:
            button = gr.Button(name, size="sm", min_width=70)
            button.click(lambda prompt=prompt: prompt, outputs=page["prompt"], queue=False, api_visibility="private")
    with gr.Row():
        page["run"] = gr.Button("Run", variant="primary", min_width=90, interactive=False, elem_id="run")
        page["stop"] = gr.Button("Stop", variant="stop", min_width=90, interactive=False, elem_id="stop")
        page["replay"] = gr.Button("Replay", min_width=90, interactive=False, elem_id="replay")
        page["speed"] = gr.Dropdown(
            [("¼ speed", 0.25), ("½ speed", 0.5), ("measured speed", 1.0), ("2× speed", 2.0), ("4× speed", 4.0)],
            value=1.0,
            label="Replay at",
            min_width=120,
            elem_id="speed",
            container=False,
        )
    page["follow_up"] = gr.Checkbox(False, label="Follow-up: keep the conversation so far", elem_id="follow-up")
    with gr.Accordion("Settings", open=False, elem_id="settings"):
        _settings(page)


def _settings(page: dict[str, Any]) -> None:
    page["system"] = gr.Textbox("", label="System prompt", elem_id="system")
    with gr.Row():
        page["temperature"] = gr.Slider(0, 2, 0, step=0.05, label="Temperature (0 is greedy)", elem_id="temperature")
        page["top_p"] = gr.Slider(0.05, 1, 1, step=0.05, label="Top-p")
        page["max_tokens"] = gr.Slider(1, MOST_TOKENS, 128, step=1, label="Max tokens", elem_id="max-tokens")
        page["seed"] = gr.Textbox("", label="Seed", elem_id="seed", info=" ", placeholder="none")
    with gr.Row():
        page["drafter"] = gr.Dropdown([], label="Drafter", interactive=False, elem_id="drafter")
        page["mode"] = gr.Radio(list(MODES), value=MODES[0], label="Mode", elem_id="mode")
        page["pruning"] = gr.Dropdown(
            list(PRUNING_CHOICES),
            value=PRUNING_CHOICES[0],
            label="Pruning",
            elem_id="pruning",
            interactive=False,
            info=" ",
        )
        page["threshold"] = gr.Slider(
            0.01,
            0.99,
            0.1,
            step=0.01,
            label="Pruning threshold (unless as the server)",
            interactive=False,
            elem_id="threshold",
        )
    with gr.Row():
        page["background"] = gr.Slider(
            0,
            MOST_BACKGROUND,
            0,
            step=1,
            label="Background requests",
            elem_id="background",
            info="sent beside each panel, also while it runs: watch the mode change as the batch grows",
        )
        page["timing"] = gr.Radio(_TIMINGS, value=TURNS, label="Timing", elem_id="timing")


def _panels(page: dict[str, Any]) -> None:
    page["summary"] = gr.HTML("", elem_id="summary")
    page["past"] = gr.HTML("", elem_id="past")
    gr.HTML(_LEGEND)
    with gr.Row():
        for side in ("plain", "fast"):
            with gr.Column(min_width=300):
                page[f"{side}_head"] = gr.HTML("", elem_id=f"{side}-head")
                page[f"{side}_flow"] = gr.HTML(
                    "",
                    html_template=_FLOW.format(side),
                    js_on_load=FLOW_JS,
                    apply_default_css=False,
                    elem_id=f"{side}-flow",
                )
                if side == "fast":
                    page["fast_strip"] = gr.HTML("", elem_id="fast-strip")
    page["plots"] = gr.HTML("", elem_id="plots")
    with gr.Row():
        page["save"] = gr.DownloadButton("Save this run (JSON)", interactive=False, size="sm", elem_id="save")
        page["open"] = gr.UploadButton("Open a saved run", file_types=[".json"], size="sm", elem_id="open")
    page["curl"] = gr.Code(
        "",
        label="The same request as a command",
        language="shell",
        elem_id="curl",
        wrap_lines=True,
        lines=2,
        max_lines=6,
    )


_FLOW = (
    '<div class="flow-box"><div class="flow" tabindex="0" role="region" aria-label="{} text, arrow keys walk through '
    'the steps"></div><div class="tip" role="status" hidden></div></div>'
)


def _batch(page: dict[str, Any]) -> None:
    gr.Markdown("Several prompts at once, plainly and then speculatively; sampling, mode and pruning as in Settings.")
    with gr.Row():
        page["batch_count"] = gr.Slider(
            1, len(BATCH_PROMPTS), 4, step=1, label="Prompts at once", elem_id="batch-count"
        )
        page["batch_run"] = gr.Button("Run the batch", variant="primary", interactive=False, elem_id="batch-run")
        page["batch_stop"] = gr.Button("Stop", variant="stop", elem_id="batch-stop")
    page["batch_view"] = gr.HTML("", elem_id="batch-view")


def _wire(blocks: gr.Blocks, page: dict[str, Any], handlers: Handlers) -> None:
    names = (
        "prompt",
        "system",
        "follow_up",
        "temperature",
        "top_p",
        "max_tokens",
        "seed",
        "drafter",
        "mode",
        "pruning",
    )
    controls = [page[name] for name in (*names, "threshold", "background", "timing")]
    everything = [*page.values()]
    # Streams of different pages must not wait for each other, and no spinner may cover what is streamed.
    stream: dict[str, Any] = {"concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private"}
    quick: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    blocks.load(handlers.load, outputs=everything, **stream)
    blocks.unload(handlers.close)
    page["connect"].click(handlers.connect, outputs=everything, **stream)
    for trigger in (page["run"].click, page["prompt"].submit):
        trigger(handlers.run, inputs=controls, outputs=everything, **stream)
    page["replay"].click(handlers.replay, inputs=page["speed"], outputs=everything, **stream)
    for name in ("stop", "batch_stop"):
        page[name].click(handlers.stop, **quick)
    page["background"].change(handlers.background, inputs=page["background"], **quick)
    page["open"].upload(handlers.open_run, inputs=page["open"], outputs=everything, **quick)
    page["batch_run"].click(handlers.batch, inputs=[page["batch_count"], *controls], outputs=everything, **stream)
