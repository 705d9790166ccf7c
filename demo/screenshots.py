"""Takes the pictures of ``docs/images`` from a real run: ``python -m demo.screenshots --url http://HOST:PORT``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo.browser import Page, chromium, page_of

OUT = Path(__file__).parents[1] / "docs" / "images"
DESKTOP, PHONE = (1200, 1180), (390, 844)


def main() -> int:
    """Run a prompt in a browser and take pictures during and after it, on a desktop and on a phone, light and dark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="a running FlexDraft server")
    parser.add_argument("--mode", default="auto", help="mode of the run (default: auto)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompt", help="default: the page's first example")
    parser.add_argument("--port", type=int, default=7861, help="port of the page while this runs")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with page_of("--url", args.url, port=args.port) as url, chromium() as browser:
        page = Page(browser.new_page(viewport=_size(DESKTOP)), url).wait_served()
        page.number("max-tokens", args.max_tokens).choose("mode", args.mode)
        page.page.click("#settings button")
        if args.prompt:
            page.prompt(args.prompt)
        page.run().wait_steps("fast", max(4, args.max_tokens // 8))
        shoot(page, args.out / "during-desktop-light.png")
        page.wait_done()
        run = args.out / "run.json"
        run.write_text(page.saved(), encoding="utf-8")
        shoot(page, args.out / "after-desktop-light.png")
        page.page.click("#theme")
        shoot(page, args.out / "after-desktop-dark.png")
    with page_of("--replay", str(run), port=args.port) as url, chromium() as browser:
        page = Page(browser.new_page(viewport=_size(PHONE)), url)
        page.page.wait_for_selector("#replay:not([disabled])")
        shoot(page, args.out / "after-phone-light.png")
        page.page.click("#theme")
        page.page.click("#replay")
        page.page.wait_for_function("document.querySelector('#fast-flow .flow').childElementCount < 2")
        page.wait_steps("fast", max(4, args.max_tokens // 8))
        shoot(page, args.out / "during-phone-dark.png", "#fast-head")
    run.unlink()
    return 0


def shoot(page: Page, file: Path, top: str = "#summary") -> None:
    """Take one picture, from the element ``top`` on."""
    page.page.evaluate(f"document.querySelector('{top}').scrollIntoView({{block: 'start'}}); scrollBy(0, -12)")
    page.page.mouse.move(0, 0)
    page.page.wait_for_timeout(400)
    page.page.screenshot(path=str(file))
    print(f"{file} ({file.stat().st_size // 1000} kB)")


def _size(size: tuple[int, int]) -> dict[str, int]:
    return {"width": size[0], "height": size[1]}


if __name__ == "__main__":
    sys.exit(main())
