"""The built-in prompts: word problems and open questions, for runs without ``--data``."""

from __future__ import annotations

WORD_PROBLEMS = (
    "A bakery bakes 45 loaves in the morning and 30 in the afternoon. It sells 62 of them. How many loaves are left?",
    "Mira reads 18 pages every evening. Her book has 270 pages and she has already read 90. How many evenings "
    "until she has finished it?",
    "A train ticket costs 14 dollars and children pay half. What do two adults and three children pay together?",
    "Tom plants 6 rows of 12 carrots. A rabbit eats a quarter of them. How many carrots are left?",
    "A tank holds 240 litres. A pump fills 15 litres a minute and a leak loses 3 litres a minute. How long until "
    "the tank is full?",
    "Lena saves 8 dollars a week and gets 5 dollars more from her uncle every fourth week. How much has she after"
    " 12 weeks?",
    "A farmer has 120 eggs. He packs them in boxes of 10 and sells each box for 4 dollars, keeping two boxes. How"
    " much does he earn?",
    "A cyclist rides 24 kilometres in the first hour and 18 kilometres in each of the next two. How far has she come?",
    "Three friends share a bill of 84 dollars. One of them pays twice as much as each of the others. How much "
    "does he pay?",
    "A class of 28 pupils goes to the museum. Entry is 6 dollars, and every seventh pupil goes in free. What is "
    "the total?",
    "A printer prints 32 pages a minute. How many minutes do 5 copies of a report of 96 pages take?",
    "Omar has 3 boxes with 24 pencils each. He gives 9 pencils to each of his 5 friends. How many pencils does he"
    " keep?",
    "A garden is 15 metres long and 8 metres wide. A metre of fence costs 7 dollars. What does a fence around it cost?",
    "A shop lowers the price of a 60 dollar coat by 20 percent and then takes 5 dollars off. What does the coat "
    "cost now?",
    "Two buses start with 36 and 28 passengers. At the next stop 9 leave the first and 14 enter the second. How "
    "many passengers are in both buses?",
    "A recipe for 4 people needs 300 grams of rice. How many grams are needed for 10 people?",
)

OPEN_QUESTIONS = (
    "Write a short letter that invites a neighbour to a garden party and asks them to bring a chair.",
    "Explain to a ten-year-old why the sky is dark at night although there are so many stars.",
    "Give three arguments for and three against working from home.",
    "Describe a small harbour town on a foggy morning.",
    "What should someone consider before adopting a dog?",
    "Write a Python function that counts how often each word occurs in a text, and explain it.",
    "Summarise how rain forms, in five sentences.",
    "Write the opening of a mystery story set in a library.",
)
