"""Generated documents about a few topics, so that what a map must find is known."""

import random

TOPICS = {
    "sea": "harbour tide sail anchor mast rope keel wave storm gull deck cargo",
    "kitchen": "onion butter oven pepper spoon recipe flour garlic simmer roast plate salt",
    "court": "judge jury appeal verdict clause statute lawyer witness oath trial bail fine",
}
COMMON = "the a of in and to with for on at by it was is that from".split()


def write_text(topic: str, rng: random.Random, num_words: int = 120) -> str:
    """Words of a topic among common ones, in sentences on lines."""
    own = TOPICS[topic].split()
    words = [rng.choice(own if rng.random() < 0.4 else COMMON) for _ in range(num_words)]
    lines = [" ".join(words[i : i + 12]) + "." for i in range(0, num_words, 12)]
    return "\n".join(lines)


def topic_texts(counts: dict[str, int], seed: int = 0) -> list[str]:
    """So many texts of each topic."""
    rng = random.Random(seed)
    return [write_text(topic, rng) for topic, count in counts.items() for _ in range(count)]


def topic_of(text: str) -> str:
    """The topic whose words stand in a text."""
    words = set(text.replace(".", " ").split())
    return max(TOPICS, key=lambda topic: len(words & set(TOPICS[topic].split())))
