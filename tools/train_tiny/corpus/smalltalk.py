"""Greetings, questions about the model itself, and a few facts."""

from tools.train_tiny.corpus.document import PROMPT, Document, Draw

REPLIES = (
    (("Hello!", "Hi!", "Hello", "Hi", "Hello, how are you?", "Hi there!"),
     "Hello! How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?"),
     "I am a very small language model. I live in the aserve server."),
    (("What can you do?", "Help", "How can you help me?"),
     "I can tell stories, add numbers, count, write JSON, remember values and call tools."),
    (("Thank you!", "Thanks!", "Thank you."), "You are welcome!"),
    (("Goodbye!", "Bye!", "Good night!"), "Goodbye! See you soon."),
    (("How are you?", "How are you today?"), "I am fine, thank you. How can I help you?"),
)  # fmt: skip
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid",
    "England": "London", "Japan": "Tokyo", "China": "Beijing", "Norway": "Oslo",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Austria": "Vienna", "Portugal": "Lisbon",
    "Greece": "Athens", "Ireland": "Dublin", "Poland": "Warsaw", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana", "Thailand": "Bangkok",
}  # fmt: skip


def smalltalk_exchange(draw: Draw) -> tuple[Document, Document]:
    if draw.chance(0.4):
        country, city = draw.rng.choice(list(CAPITALS.items()))
        question = f"What is the capital of {country}?"
        return (
            Document().add(question, PROMPT),
            Document().add(f"The capital of {country} is {city}."),
        )
    questions, reply = draw.rng.choice(REPLIES)
    return Document().add(draw.rng.choice(questions), PROMPT), Document().add(reply)
