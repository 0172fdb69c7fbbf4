"""Which responses of an update are trained on, and in which order."""

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from ..rollout.request import Response

Row = list[int]  # indices of responses


def in_order(responses: Sequence[Response], part: Sequence[int]) -> Row:
    """Some responses in the order of their update: groups by the length of their longest response.

    So the first groups are known while others run: a finished group precedes each group with an
    unfinished response that has more tokens. Groups of equal length are in the order of their ids.
    The responses are whole groups; `part` are their indices.
    """
    longest: dict[int, int] = defaultdict(int)
    for response in responses:
        group = response.request.group
        longest[group] = max(longest[group], len(response.token_ids))

    def place(index: int) -> tuple[int, int, int]:
        request = responses[index].request
        return longest[request.group], request.group, request.id

    return sorted(part, key=place)


def kept_of(responses: Sequence[Response], keep: Sequence[bool] | None) -> Row:
    """Indices of the responses that are trained on.

    By request id: the cut into minibatches must not depend on which response finished first.
    """
    kept = [i for i in range(len(responses)) if keep is None or keep[i]]
    return sorted(kept, key=lambda i: responses[i].request.id)


def key_of(responses: Sequence[Response], row: Row, advantages: Tensor) -> list[tuple[int, float]]:
    return [(responses[i].request.id, float(advantages[i])) for i in row]


def num_tokens(response: Response) -> int:
    return len(response.request.prompt_ids) + len(response.token_ids)


def max_length_of(responses: Sequence[Response]) -> int:
    return max(r.request.params.max_new_tokens for r in responses)


def cut(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """`items` in at most `parts` consecutive parts of nearly equal size, none empty."""
    bounds = [len(items) * i // parts for i in range(parts + 1)]
    return [items[a:b] for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
