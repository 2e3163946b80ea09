"""Names of people, animals, places and cities, and invented ones that can only be copied."""

from random import Random

GIRLS = (
    "Mia", "Lily", "Anna", "Lucy", "Emma", "Zoe", "Nora", "Ella",
    "Ruby", "Ivy", "Rose", "Clara", "Eva", "Luna", "Maya", "Tess",
)  # fmt: skip
BOYS = (
    "Tom", "Max", "Ben", "Leo", "Sam", "Finn", "Jack", "Tim",
    "Oscar", "Hugo", "Theo", "Noah", "Felix", "Milo", "Otto", "Bob",
)  # fmt: skip
OTHERS = (
    "Alice", "Amir", "Amy", "Andre", "Arthur", "Beth", "Boris", "Carla", "Carlos", "Cora",
    "Dan", "Daniel", "David", "Dora", "Edgar", "Elena", "Eric", "Erin", "Esther", "Fatima",
    "Frank", "Frida", "George", "Gina", "Grace", "Greta", "Hana", "Hannah", "Harry", "Helen",
    "Henry", "Ines", "Ingrid", "Iris", "Isaac", "Ivan", "Jane", "Jason", "John", "Jonas",
    "Julia", "Karen", "Karl", "Kate", "Kevin", "Kim", "Lara", "Laura", "Linda", "Lukas",
    "Maria", "Mark", "Martin", "Mary", "Nadia", "Nina", "Olga", "Omar", "Paul", "Paula",
    "Peter", "Petra", "Priya", "Ralph", "Rita", "Robert", "Robin", "Rosa", "Sara", "Simon",
    "Sofia", "Stefan", "Susan", "Tara", "Thomas", "Tina", "Vera", "Victor", "Walter", "Yuki",
)  # fmt: skip
PEOPLE = GIRLS + BOYS

ANIMALS = (
    "rabbit", "dog", "cat", "fox", "bear", "mouse", "frog",
    "duck", "owl", "pig", "hen", "turtle", "horse", "squirrel",
)  # fmt: skip
PLACES = (
    "at the beach", "in the forest", "in the garden", "by the river", "on the farm",
    "in the park", "at the lake", "on the hill", "in the village", "in the meadow",
    "by the pond", "near the old mill",
)  # fmt: skip
CITIES = (
    "Rome", "Paris", "London", "Berlin", "Madrid", "Oslo", "Vienna", "Lisbon", "Athens",
    "Dublin", "Prague", "Warsaw", "Helsinki", "Stockholm", "Copenhagen", "Amsterdam",
    "Brussels", "Zurich", "Geneva", "Milan", "Venice", "Naples", "Barcelona", "Seville",
    "Porto", "Tokyo", "Kyoto", "Osaka", "Seoul", "Beijing", "Shanghai", "Delhi", "Mumbai",
    "Cairo", "Nairobi", "Lagos", "Accra", "Tunis", "Boston", "Chicago", "Denver", "Seattle",
    "Dallas", "Austin", "Miami", "Toronto", "Montreal", "Vancouver", "Lima", "Bogota", "Quito",
    "Havana", "Sydney", "Perth", "Auckland", "New York", "Hong Kong", "Buenos Aires",
    "San Francisco", "Cape Town", "Budapest", "Hamburg", "Munich", "Lyon", "Turin", "Kyiv",
    "Riga", "Tallinn", "Istanbul", "Ankara", "Dubai", "Bangkok", "Manila", "Jakarta",
    "Santiago", "Salvador", "Kingston", "Houston", "Phoenix", "Portland",
)  # fmt: skip

ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "st", "tr")
VOWELS = ("a", "e", "i", "o", "u")
CODAS = ("", "", "", "n", "r", "l", "s", "m")


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def made_word(rng: Random) -> str:
    """Returns a pronounceable word of two or three syllables without a meaning."""
    syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.randint(2, 3))]
    return "".join(syllables) + rng.choice(CODAS)


def any_person(rng: Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(PEOPLE + OTHERS)
    return made_word(rng).capitalize()


def any_city(rng: Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(CITIES)
    return made_word(rng).capitalize()
