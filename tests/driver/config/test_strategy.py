from unittest.mock import Mock

import pytest

from driver.common.errors import UserError
from driver.config.strategy import (
    KINDS,
    ORACLE,
    PLAIN,
    Kind,
    Strategy,
    parse_strategies,
    split_strategies,
)
from driver.model.fetch import SMOLLM2_CONFIG
from driver.model.spec import ModelSpec
from driver.report.figures import strategy_colors
from driver.rollout.plan import Cell, GraphCost
from driver.rollout.proposers import make_proposers


@pytest.mark.parametrize("text", ["off", "ngram:4,1,5", "learned:16,15,128", "hybrid:1,1,2"])
def test_text_round_trip(text):
    assert str(Strategy.parse(text)) == text
    assert Strategy.parse(str(Strategy.parse(f" {text} "))) == Strategy.parse(text)


def test_parse_reads_each_number_into_its_place():
    strategy = Strategy.parse("learned:8,4,32")
    assert (strategy.kind, strategy.depth, strategy.top_k, strategy.num_verify) == (
        "learned",
        8,
        4,
        32,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "on",
        "learned",
        "learned:8,4",
        "learned:8,4,32,1",
        "learned:8;4;32",
        "learned:-8,4,32",
        "learned:8.0,4,32",
        "learned:8,4,٣٢",
        "off:1,1,2",
        "False",
        "LEARNED:8,4,32",
        "oracle:8,4,32",
    ],
)
def test_malformed_text_is_refused_with_the_form(text):
    form = r"malformed; write 'off', 'ngram:depth,top_k,num_verify', .*'hybrid:depth"
    with pytest.raises(UserError, match=form):
        Strategy.parse(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("learned:17,1,8", "depth=17; wanted 1 to 16"),
        ("learned:0,4,8", "depth=0; wanted 1 to 16"),
        ("ngram:4,0,8", "top_k=0; wanted 1 to 128"),
        ("learned:1,129,8", "top_k=129; wanted 1 to 128"),
        ("learned:16,16,64", r"depth\*top_k=256; wanted 1 to 255"),
        ("learned:8,4,129", "num_verify=129; wanted 2 to 128"),
        ("learned:8,4,1", "num_verify=1; wanted 2 to 128"),
    ],
)
def test_limits_name_the_number(text, match):
    with pytest.raises(UserError, match=match):
        Strategy.parse(text)


@pytest.mark.parametrize(
    ("text", "levels", "needs_drafter"),
    [
        ("off", 0, False),
        ("ngram:6,1,16", 6, False),
        ("learned:4,1,16", 4, True),
        ("hybrid:4,1,5", 4, True),
        ("hybrid:4,4,16", 15, True),
        ("hybrid:2,1,17", 16, True),
        ("hybrid:8,8,64", 16, True),  # an ancestor list ends there
        ("hybrid:8,4,5", 8, True),
    ],
)
def test_a_hybrid_s_tree_is_as_deep_as_its_rows_allow(text, levels, needs_drafter):
    strategy = Strategy.parse(text)
    assert (strategy.levels, strategy.needs_drafter) == (levels, needs_drafter)


def test_built_in_code_is_checked_too():
    with pytest.raises(UserError, match="kind 'eagle': unknown"):
        Strategy("eagle", 4, 2, 8)
    with pytest.raises(UserError, match="off: takes no numbers"):
        Strategy("off", 4, 2, 8)


@pytest.mark.parametrize(
    "text",
    [
        "[off,ngram:4,1,5,learned:8,4,32]",
        "off, ngram:4,1,5, learned:8,4,32",
        "['off'; \"ngram:4,1,5\"; learned:8,4,32]",
        "off ngram:4,1,5 learned:8,4,32",
    ],
)
def test_typed_lists_keep_their_inner_commas(text):
    assert split_strategies(text) == ["off", "ngram:4,1,5", "learned:8,4,32"]


def test_empty_list_has_no_items():
    assert split_strategies("[]") == []


def test_duplicates_are_refused():
    with pytest.raises(UserError, match="'ngram:4,1,5': listed twice"):
        parse_strategies(["off", "ngram:4,1,5", "ngram:4,1,05"])


def test_every_kind_that_drafts_has_a_proposer():
    """That of the oracle is made by the comparison, which knows the answers."""
    drafts = {kind.name for kind in KINDS.values()} - {PLAIN.name, ORACLE.name}
    assert make_proposers(0, runner=Mock()).keys() == drafts
    alone = {name for name in drafts if not KINDS[name].drafter}
    assert make_proposers(0, runner=None).keys() == alone


def test_an_oracle_is_parsed_where_it_is_allowed_only():
    assert str(Strategy.parse("oracle:8,4,32", ORACLE)) == "oracle:8,4,32"
    assert Strategy.parse("ngram:8,4,32", ORACLE).drafting is not ORACLE


def test_a_new_kind_is_one_entry(monkeypatch):
    """Parsing, the number of launches and the colours follow from it."""
    kind = Kind("suffix", lookup=True, launches=3, colors=("#000000", "#ffffff"))
    monkeypatch.setitem(KINDS, kind.name, kind)
    strategy = Strategy.parse("suffix:4,1,5")
    assert strategy.drafting is kind and (strategy.levels, strategy.needs_drafter) == (4, False)
    cost = GraphCost(ModelSpec.from_config(SMOLLM2_CONFIG))
    plain, same = Cell(5, Strategy("off")), Cell(1, strategy)
    assert cost.nodes(same) == cost.nodes(plain) + 3
    assert strategy_colors([str(strategy)]) == {"suffix:4,1,5": "#999999"}
