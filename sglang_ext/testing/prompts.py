"""Prompts of the server suite: short, varied, and none of them from a data set."""

from __future__ import annotations

from sglang_ext.testing.server import Request

_QUESTIONS = (
    "What is 17 + 25?",
    "A box holds 12 eggs. How many eggs are in 7 boxes?",
    "Tom has 3 apples and buys 5 more, then eats 2. How many are left?",
    "Write 1000 in words.",
    "List the first ten prime numbers.",
    "Convert 5 kilometres to metres.",
    "Write a Python function that reverses a string.",
    "Write a SQL query that counts the rows of a table named users.",
    "Show a bash loop that prints the numbers 1 to 5.",
    "Explain what a list comprehension is.",
    "What does HTTP status 404 mean?",
    "Write a haiku about the sea.",
    "Tell me a story about a brave little robot.",
    "Write the opening line of a detective novel.",
    "Describe a sunset in one sentence.",
    "Give me three names for a cat.",
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "Why is the sky blue?",
    "How do plants make food?",
    "Name the planets of the solar system in order.",
    "What is photosynthesis?",
    "When did the Second World War end?",
    "What is the boiling point of water in Celsius?",
    "Translate 'good morning' into Spanish.",
    "Translate 'thank you very much' into French.",
    "Say hello in Japanese.",
    "Repeat the word banana five times.",
    "Count from 1 to 20.",
    "Say the alphabet.",
    "Give me a recipe for pancakes.",
    "How do I make a cup of tea?",
    "What should I pack for a trip to the mountains?",
    "Write a polite email asking for a day off.",
    "Summarise the plot of Cinderella in two sentences.",
    "Give one reason to learn a musical instrument.",
    "What are the benefits of drinking water?",
    "Is a tomato a fruit or a vegetable?",
    "Finish the sentence: The early bird",
    "Answer with one word: what colour is grass?",
)

_RAW = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    '{"name": "Alice", "age": 30, "city": "',
    "1, 2, 4, 8, 16, 32,",
)


def chat(question: str) -> str:
    """Return ``question`` as the default target's chat template writes it."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = (*(chat(question) for question in _QUESTIONS), *_RAW)

LONG_TEXT = " ".join(
    f"On day {day} the ship sailed {day * 7 % 50} miles north and the crew ate {day % 9 + 1} loaves of bread."
    for day in range(1, 41)
)
"""Some 900 tokens of text that does not repeat itself exactly."""


def requests(count: int | None = None, tokens: int = 20, **sampling: object) -> list[Request]:
    """Return the first ``count`` prompts (all by default) as greedy requests of ``tokens`` new tokens."""
    return [Request(prompt, {"max_new_tokens": tokens, **sampling}) for prompt in PROMPTS[:count]]
