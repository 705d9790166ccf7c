"""Example prompts, by what kind of text they lead to."""

from __future__ import annotations

EXAMPLES: tuple[tuple[str, str], ...] = (
    ("Math", "A train travels 180 km in 3 hours. What is its speed? Explain."),
    ("Code", "Write a Python function that returns the n-th Fibonacci number, with a docstring and an example."),
    ("Chat", "What should I pack for a weekend in the mountains?"),
    ("Story", "Tell me a short story about a lighthouse keeper who finds a map."),
)

BATCH_PROMPTS: tuple[str, ...] = (
    "A box holds 12 eggs. How many eggs are in 7 boxes? Explain.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "Tell me a short story about a brave little robot.",
    "Name the planets of the solar system in order.",
    "How do I make a cup of tea?",
    "Write a SQL query that counts the rows of a table named users.",
    "A baker makes 60 rolls and packs them into bags of 6. How many bags does she fill? Explain.",
    "What is photosynthesis?",
    "Write a polite email asking for a day off.",
    "List the first ten prime numbers.",
    "Describe a sunset at the sea.",
    "Explain what a list comprehension is.",
    "Give me a recipe for pancakes.",
    "If 5 pens cost 15 dollars, how much do 8 pens cost? Explain.",
    "Who wrote Romeo and Juliet, and what is it about?",
)
