"""Open questions without a right answer, to generate text without a reward."""

from .base import Prompt, Split, Task, prompt_id

SUBJECTS = (
    "the tides", "a bicycle", "bread", "the printing press", "rain", "chess", "a compass",
    "sleep", "the number zero", "paper", "a lighthouse", "honey", "earthquakes", "the violin",
)  # fmt: skip
FORMS = (
    "Question: How does {0} work?\nAnswer:",
    "Write a short story about {0}.\n\n",
    "A list of facts about {0}:\n1.",
    "def {1}(n):\n    # a function about {0}\n",
)


class QuestionsTask(Task):
    """Open questions with long, varied responses. Every reward is 0, so they train nothing."""

    name = "questions"

    def prompt(self, split: Split, index: int) -> Prompt:
        name = prompt_id(self.name, split, index)
        subject = SUBJECTS[index % len(SUBJECTS)]
        form = FORMS[index // len(SUBJECTS) % len(FORMS)]
        return Prompt(name, form.format(subject, subject.split()[-1]), "")

    def reward(self, prompt: Prompt, response: str, finished: bool = True) -> float:
        return 0.0

    def size(self, split: Split) -> int:
        return len(SUBJECTS) * len(FORMS)
