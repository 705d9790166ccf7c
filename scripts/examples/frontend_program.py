"""SGLang frontend programs against a running server: constrained generation, choices, forks and streaming.

    python scripts/examples/frontend_program.py --url http://127.0.0.1:30000

The programs know nothing of speculation: with ``--speculative-algorithm flexdraft`` they give the same text, sooner.
"""

from __future__ import annotations

import argparse
from typing import Any

import sglang as sgl

MAX_TOKENS = 24


@sgl.function
def extract(s: Any, sentence: str) -> None:
    """Fill the fields of a form; a regular expression keeps each one in shape."""
    s += f'Sentence: "{sentence}"\nFirst name: ' + sgl.gen("name", max_tokens=8, regex="[A-Z][a-z]{1,9}")
    s += "\nAge: " + sgl.gen("age", max_tokens=4, regex="[0-9]{1,3}") + " years\n"


@sgl.function
def classify(s: Any, question: str) -> None:
    """Choose among given answers, then explain the choice."""
    s += sgl.user(question)
    s += sgl.assistant("The answer is " + sgl.select("answer", choices=["yes", "no", "maybe"]))
    s += sgl.user("Why?")
    s += sgl.assistant(sgl.gen("reason", max_tokens=MAX_TOKENS, stop="\n"))


@sgl.function
def tips(s: Any, topic: str) -> None:
    """Work out two points side by side from one shared beginning, then join them."""
    s += sgl.user(f"Give two tips for {topic}.")
    s += sgl.assistant_begin() + "1. Start early. 2. Sleep well.\n"
    forks = s.fork(2)
    for number, fork in enumerate(forks, start=1):
        fork += f"More about tip {number}:" + sgl.gen("more", max_tokens=MAX_TOKENS, stop="\n")
    for number, fork in enumerate(forks, start=1):
        s += f"Tip {number}: {fork['more'].strip()}\n"
    s += "In short:" + sgl.gen("summary", max_tokens=MAX_TOKENS, stop="\n") + sgl.assistant_end()


@sgl.function
def story(s: Any, hero: str) -> None:
    """A text to be streamed."""
    s += sgl.user(f"Tell a very short story about {hero}.")
    s += sgl.assistant(sgl.gen("story", max_tokens=2 * MAX_TOKENS))


def run_all(url: str) -> dict[str, str]:
    """Run every program on the server at ``url`` at temperature 0 and return what each generated."""
    backend = sgl.RuntimeEndpoint(url)
    options = {"temperature": 0, "backend": backend}
    form = extract.run(sentence="Alice, who is 31, met her brother.", **options)
    choice = classify.run(question="Is ice colder than water?", **options)
    advice = tips.run(topic="an exam", **options)
    told = story.run(hero="a lighthouse", stream=True, **options)
    streamed = "".join(told.text_iter("story"))
    return {
        "name": form["name"],
        "age": form["age"],
        "answer": choice["answer"],
        "reason": choice["reason"],
        "summary": advice["summary"],
        "tips": advice.text(),
        "streamed": streamed,
        "story": told["story"],
    }


def main() -> None:
    """Print what the programs produce."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="address of the server")
    for name, text in run_all(parser.parse_args().url).items():
        print(f"{name}: {text}")


if __name__ == "__main__":
    main()
