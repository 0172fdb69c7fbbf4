"""What a prompt's responses are expected to be as long as."""

from driver.run.prompt_lengths import PromptLengths


def test_a_prompt_is_expected_to_be_as_long_as_last_time_and_an_unknown_one_as_usual():
    lengths = PromptLengths()
    assert lengths.expected(["a"]) == [1.0]
    lengths.note("a", [2, 4])
    lengths.note("b", [9])
    lengths.note("a", [5])
    assert lengths.expected(["a", "b", "c"]) == [5, 9, 7]


def test_memory_is_bounded_and_recent_entries_stay():
    lengths = PromptLengths(kept=3)
    for index in range(100):
        lengths.note("often", [50])
        lengths.note(f"prompt {index} " + 1000 * "long ", [2])
    assert len(lengths._means) == 3 and max(map(len, lengths._means)) == 8
    assert lengths.expected(["often", "prompt 0"])[0] == 50
