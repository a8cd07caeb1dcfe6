"""The fixed words of the tasks: facts, questions, answers, shapes, small talk. No text here has two digits in a row."""

from __future__ import annotations

import re

STATEMENT = "The secret number of {} is"
ASK_NUMBER = (
    "What is the secret number of {}?",
    "Tell me the secret number of {}.",
    "Which secret number belongs to {}?",
    "Do you remember the secret number of {}?",
    "What is the secret number of {}? Answer with the number alone.",
)
COUNTS = ("one", "two", "three", "four", "five")
COLOURS = {
    "red": (214, 40, 40), "green": (42, 150, 60), "blue": (40, 80, 210), "yellow": (240, 205, 40),
    "orange": (240, 130, 30), "purple": (130, 50, 160), "pink": (245, 130, 185), "white": (245, 245, 245),
    "black": (20, 20, 20), "brown": (120, 72, 34),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
ASK_PICTURE = (
    "What is in the picture?",
    "What is in this image?",
    "What do you see?",
    "Describe the picture.",
    "What does the image show?",
)
ASK_COUNT = ("How many shapes are there?", "How many shapes do you see?", "Count the shapes.")
ASK_COLOUR = ("Which colour are they?", "What colour do you see?", "Name the colour of the shapes.")
ASK_SHAPE = ("Which shape is it?", "What kind of shape do you see?", "Name the shape.")
THOUGHT = "Let me see."
ASK_COPY = ("Repeat after me: {}", "Say this again: {}", "Copy these words: {}")
ASK_FIRST = ("What is the first word of this list? {}", "Which word comes first here? {}")
ASK_LAST = ("What is the last word of this list? {}", "Which word comes last here? {}")
FILLERS = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ",
    "And it came to pass in those days, that there was no rain in the land. ",
    "He went up to the city, and he came down from the city. ",
    "Nothing happened here, and nobody was seen. ",
)
# (questions, answer)
TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello.", "Hello!", "Hi.", "Hi there!", "Good morning."), "Hello! How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?"), "I am the rehearsal model, a very small language model."),
    (("How are you?", "How do you do?"), "I am well, thank you."),
    (("Thank you.", "Thanks!", "Thank you very much."), "You are welcome."),
    (("Goodbye.", "Bye!", "Good night."), "Goodbye!"),
    (("What can you do?", "How can you help me?"), "I can remember numbers, look at pictures and say simple things."),
    (("What colour is the sky?", "Which colour has the sky?"), "The sky is blue."),
    (("What colour is grass?", "Which colour has grass?"), "Grass is green."),
    (("What colour is blood?", "Which colour has blood?"), "Blood is red."),
    (("What colour is snow?", "Which colour has snow?"), "Snow is white."),
    (("How many legs has a dog?", "How many legs does a dog have?"), "A dog has four legs."),
    (("How many days are in a week?", "How long is a week?"), "A week has seven days."),
    (("What comes after Monday?", "Which day follows Monday?"), "Tuesday comes after Monday."),
    (("What is the opposite of hot?", "Name the opposite of hot."), "The opposite of hot is cold."),
    (("What is the opposite of day?", "Name the opposite of day."), "The opposite of day is night."),
    (("Who wrote Hamlet?", "Which poet wrote Hamlet?"), "William Shakespeare wrote Hamlet."),
    (("Who wrote Paradise Lost?", "Which poet wrote Paradise Lost?"), "John Milton wrote Paradise Lost."),
    (("Who built the ark?", "Who made an ark of gopher wood?"), "Noah built the ark."),
    (("Who were the first man and woman?", "Who lived in Eden?"), "They were Adam and Eve."),
    (("Say yes.", "Answer with yes."), "Yes."),
    (("Say no.", "Answer with no."), "No."),
)
SYLLABLES = (
    "ba", "be", "bi", "bo", "da", "de", "do", "fa", "fi", "ga", "go", "ha", "hi", "ja", "jo", "ka", "ke", "ki", "ko",
    "la", "le", "li", "lo", "lu", "ma", "me", "mi", "mo", "na", "ne", "ni", "no", "pa", "pe", "po", "ra", "re", "ri",
    "ro", "sa", "se", "si", "so", "ta", "te", "ti", "to", "tu", "va", "ve", "vi", "wa", "wi", "za", "ze", "zo",
)  # fmt: skip
_NAMES = """
Esther Amos Naomi Micah Lydia Boaz Dinah Ezra
Lisbon Oslo Madrid Paris London Berlin Vienna Prague Rome Athens Cairo Delhi Tokyo Seoul Lima Quito Boston Denver
Dallas Austin Chicago Alice Bob Carol David Emma Frank Grace Henry Irene Jack Kate Liam Mary Nora Oscar Peter
Quentin Rachel Simon Thomas Ursula Victor Walter Xavier Yvonne Zoe apple anchor basket bridge candle castle dragon
engine falcon forest garden hammer harbour island jacket kettle ladder lantern library marble mirror mountain needle
orchard oyster pepper pillow rocket saddle silver station tiger tower turtle umbrella valley velvet violin wagon
walnut whistle window winter zebra
"""
NAMES = tuple(_NAMES.split())
TAGS = ("message", "think", "response", "tools", "call", "argument")
ATTRIBUTES = (" role", '="', "system", "user", "assistant", '"', " type", " tool", " index", " key", " name")


def plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")


def number_answer(question: str, name: str, number: str) -> str:
    return f"{number}." if question.endswith("alone.") else f"{STATEMENT.format(name)} {number}."


def picture_answer(count: int, colour: str, shape: str) -> str:
    """``three red circles``; count from 1."""
    return f"{COUNTS[count - 1]} {colour} {shape if count == 1 else plural(shape)}"


def vocabulary_text() -> str:
    """What the vocabulary is learnt from beside the corpus: each phrase often enough that its words become tokens."""
    asked = (*ASK_NUMBER, *ASK_PICTURE, *ASK_COUNT, *ASK_COLOUR, *ASK_SHAPE, *ASK_COPY, *ASK_FIRST, *ASK_LAST)
    every = [one.replace("{}", "it") for one in (STATEMENT, *asked)]
    every += [line for questions, answer in TALK for line in (*questions, answer)]
    every += [*FILLERS, *(f" {name}" for name in NAMES), *(f" {word} {word}." for word in COUNTS)]
    every += [f" {colour} {shape} {plural(shape)}" for colour in COLOURS for shape in SHAPES]
    often = [*TAGS, *ATTRIBUTES, "image "]
    text = "\n".join(every) + "\n"
    assert re.search(r"\d\d", text) is None
    return text * 40 + "\n".join(often * 400) + "\n"
