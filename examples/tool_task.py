"""A task with several turns: python -m driver.train task.name=examples/tool_task.py:Guess

The model guesses a number, and the environment answers higher or lower. A turn ends with a text in
`stop`, which must be one token of the model. `respond` answers it, or ends the response with None.
"""

import random
import re


class Guess:
    stop = ("?",)

    def prompt(self, split, index):
        return "0-99:", str(random.Random(f"{split}/{index}").randint(0, 99))

    def respond(self, prompt, turn, text, answer):
        guess = text.removesuffix("?")
        if not guess.isdecimal() or int(guess) == int(answer):
            return None
        return "<" if int(answer) < int(guess) else ">"

    def reward(self, prompt, response, answer):
        return float(re.split("[?<>]+", response.removesuffix("?"))[-1] == answer)

    def demonstration(self, prompt, answer):
        low, high, turns = 0, 99, []
        while True:
            guess = (low + high) // 2
            turns.append(f"{guess}?")
            if guess == int(answer):
                return turns
            low, high = (guess + 1, high) if guess < int(answer) else (low, guess - 1)
