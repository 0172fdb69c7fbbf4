"""A task of your own: python -m driver.train task.name=examples/own_task.py:Reverse

Two methods make a task. `demonstration` is optional; the warm-up of a new model needs it.
"""

import random


class Reverse:
    def prompt(self, split, index):
        draw = random.Random(f"{split}/{index}")
        word = "".join(draw.choices("0123456789", k=draw.randint(2, 6)))
        return f"{word}=", word[::-1]

    def reward(self, prompt, response, answer):
        return float(response == answer)

    def demonstration(self, prompt, answer):
        return answer
