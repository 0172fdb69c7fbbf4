"""Targets against results, the tables of the documents, and the comparison of two results."""

import json
import re

import pytest

from profiling.rig import beside, results, tables

META = {
    "card": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "commit": "abc1234",
    "command": "python -m profiling.bench fake",
    "date": "2026-11-27T10:00",
}
WANTED = {"fake": {"a_us": {"at_most": 7.0}, "b_x": {"at_least": 2.0}, "c_x": {"at_least": 1.0}}}


def result(a=6.0, b=1.5, date=META["date"]):
    return {
        "meta": META | {"date": date},
        "rows": [
            {"bench": "fake", "case": "one", "median_us": a},
            {"bench": "fake", "case": "two", "median_us": 3.0},
        ],
        "targets": [
            {"name": "a_us", "wanted": {"at_most": 7.0}, "got": a, "met": True},
            {"name": "b_x", "wanted": {"at_least": 2.0}, "got": b, "met": False},
            {"name": "c_x", "wanted": {"at_least": 1.0}, "got": None, "met": False},
        ],
    }


def write(folder, name, value):
    path = folder / results.TARGETS_CARD / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


@pytest.fixture
def known(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "all_targets", lambda: WANTED)
    write(tmp_path, "fake.json", result())
    return tmp_path


def test_the_newer_figure_counts_and_an_older_one_fills_in(known):
    newer = result(a=9.0, b=None, date="2026-11-28T09:00")
    write(known, "quick/fake.json", newer)
    a, b, c = results.known_targets(known)
    assert (a.got, a.state) == (9.0, "unmet")
    assert (b.got, b.figure.meta["date"]) == (1.5, META["date"])
    assert c.state == "missing"


def test_what_is_added_to_a_result_does_not_renew_the_rest(known, monkeypatch):
    """A figure of `--quick` stays the newest, although the file of an older one is newer."""
    write(known, "quick/fake.json", result(a=9.0, date="2026-11-28T09:00"))
    added = result(a=None, b=3.0, date="2026-11-29T09:00")
    added["meta"]["commit"], added["rows"] = "def5678", added["rows"][1:]
    write(known, "fake.json", results.joined(result(), added))
    a, b, _ = results.known_targets(known)
    assert (a.got, a.commit) == (9.0, "abc1234")
    assert (b.got, b.commit) == (3.0, "def5678")
    rows = results.newest("fake", known)
    assert {case: row["median_us"] for case, row in rows.items()} == {"one": 9.0, "two": 3.0}
    assert {case: row["commit"] for case, row in rows.items()} == {
        "one": "abc1234",
        "two": "def5678",
    }
    monkeypatch.setattr(results, "WHOLE_ONLY", ("a_us",))
    assert results.known_targets(known)[0].got == 6.0


def test_rows_of_another_torch_are_told_apart_from_those_that_are_added():
    new = result(date="2026-11-29T09:00")
    new["meta"]["torch"] = "2.12.0"
    both = results.joined(result(), new)
    assert both["meta"]["note"] == "earlier rows: torch 2.11.0"
    assert "note" not in results.joined(result(), result())["meta"]


def test_a_result_of_a_run_that_failed_says_so_in_the_table(known):
    value = result()
    value["meta"]["note"] = "incomplete: b (RuntimeError)"
    whole = result(date="2026-11-29T09:00")
    write(known, "fake.json", results.joined(value, whole))
    assert tables.provenance(results.known_targets(known))[0].endswith(
        ", incomplete: b (RuntimeError)"
    )


def test_the_newer_of_two_runs_is_read_first(known):
    write(known, "fake-log.json", {})
    write(known, "quick/fake.json", result(date="2026-11-28T09:00"))
    found = results.newest_first(known, "fake")
    assert [path.parent.name for path in found] == ["quick", results.TARGETS_CARD]
    assert len(results.newest_first(known, "fake", "fake-log.json")) == 1


def test_results_of_another_card_do_not_count(known):
    (known / results.TARGETS_CARD).rename(known / "h100-80gb-hbm3")
    assert {target.state for target in results.known_targets(known)} == {"missing"}


def test_targets_of_the_cpu_are_read_from_its_folder(known, monkeypatch):
    monkeypatch.setattr(results, "all_targets", lambda: {"cpu": WANTED["fake"]})
    assert {target.state for target in results.known_targets(known)} == {"missing"}
    (known / results.TARGETS_CARD).rename(known / "cpu")
    (known / "cpu" / "fake.json").rename(known / "cpu" / "cpu.json")
    assert [target.state for target in results.known_targets(known)] == ["met", "unmet", "missing"]


def test_the_real_files_are_read():
    found = results.known_targets()
    assert len(found) == sum(len(table) for table in results.all_targets().values())
    assert any(target.state == "met" for target in found)


def test_the_documents_tables_are_those_of_the_results():
    texts = [path.read_text(encoding="utf-8") for path in tables.DOCUMENTS]
    found = [match["name"] for text in texts for match in tables.MARKED.finditer(text)]
    assert found == list(tables.TABLES)
    assert tables.main(["--check"]) == 0, "run python -m profiling.rig.tables"


# Document, words around a figure, the target whose figure it is.
IN_PROSE = [
    ("README.md", "The (.+) of the table is the median ratio of 20 equal steps", "step_over_off_x"),
    ("docs/adapters.md", "this rollout, (.+) times as fast", "trl_step_over_generate_x"),
    (
        "docs/benchmarks.md",
        "the ratio is (.+) at 128 requests and 3.5 at 32",
        "spec_smollm2_over_vllm_eagle3_x",
    ),
    ("docs/notes/memory.md", "two steps on an H200 had a peak of (.+) GB", "train_7b_peak_gb"),
    ("docs/usage.md", "a pass of SmolLM2 for one request takes (.+) µs", "smollm2_b1_us"),
    (
        "docs/usage.md",
        "accept length was (.+) times that of a frozen",
        "adaptive_over_frozen_accept_x",
    ),
    ("docs/usage.md", "a step of SmolLM2 only (.+) × as fast as one", "step_over_one_gpu_x"),
    ("docs/usage.md", "takes 67 s and (.+) GB on one H200", "train_7b_peak_gb"),
]


@pytest.mark.parametrize(("document", "words", "target"), IN_PROSE)
def test_figures_in_prose_are_the_newest(document, words, target):
    text = " ".join((tables.ROOT / document).read_text(encoding="utf-8").split())
    figures = [each[1] for each in re.finditer(words.replace("(.+)", r"([\d.]+)"), text)]
    got = {found.name: found.got for found in results.known_targets()}[target]
    assert [f"{got:.{len(each.partition('.')[2])}f}" for each in figures] == figures != []


def test_a_changed_table_is_found_and_written(tmp_path, monkeypatch, capsys):
    path = tmp_path / "page.md"
    path.write_text("<!-- results: targets -->\nold\n<!-- end of results -->\n", encoding="utf-8")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", (path,))
    assert tables.main(["--check"]) == 1
    assert capsys.readouterr().err.startswith("page.md: tables differ")
    assert tables.main([]) == 0
    assert "old" not in path.read_text(encoding="utf-8")
    assert tables.main(["--check"]) == 0


def test_a_table_names_card_driver_cuda_torch_and_commit(known):
    text = "x\n<!-- results: targets -->\nold\n<!-- end of results -->\ny"
    out = tables.filled(text, results.known_targets(known))
    assert "old" not in out and out.startswith("x\n<!--") and out.endswith("-->\ny")
    assert "3 targets: 1 met, 1 not met, 1 not measured." in out
    assert "| fake: `b_x` | at least 2.00 × | 1.50 × | not met | abc1234 |" in out
    assert "| fake: `c_x` | at least 1.00 × | - | not measured |  |" in out
    assert "NVIDIA H200, driver 580.1, CUDA 13.0, torch 2.11.0, commit abc1234" in out
    assert tables.filled(out, results.known_targets(known)) == out
    known_names = "headlines, beside, ops, peers, targets"
    with pytest.raises(ValueError, match=f"unknown table speed: use one of {known_names}"):
        tables.filled("<!-- results: speed -->\n<!-- end of results -->", [])


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("sample_b64_us", 33.02, "33 µs"),
        ("verify_chain5_b64_us", 117.449, "117 µs"),
        ("decode_b32_kv4k_of_copy", 0.9322, "93.2 % of copy"),
        ("tail_host_share", 0.034, "3.4 %"),
        ("tiny_identity", 1.0, "100 %"),
        ("smollm2_oracle_drafter", 1 - 1e-6, "99.9999 %"),
        ("trace_over_off_x", 2.4, "2.40 ×"),
        ("tiny_run_rss_gb", 0.84, "0.84 GB"),
        ("shared_noise_over_target_only_x", 1.56, "1.56 ×"),
        ("late_arrivals", 1.0, "100 %"),
        ("vllm_greedy_equal_share", 0.9996, "99.96 %"),
        ("trace_s", 1.39, "1.39 s"),
        ("qwen2_15b_b64_us", 1700.0, "1,700 µs"),
        ("reprefilled_tokens", 0, "0"),
        ("a_us", None, "-"),
    ],
)
def test_figures_have_units(name, value, text):
    assert tables.figure(name, value) == text


def test_the_fastest_system_is_bold_and_what_is_not_measured_is_empty(tmp_path):
    (tmp_path / results.TARGETS_CARD).mkdir()
    meta = {"card": "NVIDIA H200", "torch": "2.11.0", "commit": "abc", "date": "2026-01-01"}
    pair = {"tokens_per_s": 200.0, "vllm_tokens_per_s": 3000.0}
    rows = {
        "peers": [{"case": "smollm2 plain b256", **pair}, {"case": "other", **pair}],
        "grpo": [
            {"case": "full seed 0, 512 tokens", "tokens_per_s": 20.0},
            {"case": "trl_vllm seed 0, 512 tokens", "tokens_per_s": 10.0},
        ],
    }
    for name, of in rows.items():
        content = json.dumps({"meta": meta, "rows": of, "targets": []})
        (tmp_path / results.TARGETS_CARD / f"{name}.json").write_text(content)
    assert beside.speeds_table(tmp_path)[2:] == [
        "| SmolLM2-135M, plain, 256 requests | 200 | **3,000** |  |  |",
        "| GRPO step, 512 tokens a response | **20** |  | 10 |  |",
        "",
        f"NVIDIA H200, torch 2.11.0; {beside.VERSIONS}. Commits: peers abc, grpo abc.",
    ]
