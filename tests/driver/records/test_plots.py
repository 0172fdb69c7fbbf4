import io

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from driver.common.errors import UserError
from driver.records import plots
from driver.records.phases import PHASES
from driver.records.progress import Progress, step_line

pytestmark = pytest.mark.figures
RECORDS = [
    {"step": step, plots.TRAIN_REWARD: step / 10, plots.ACCEPT_LENGTH: 1 + step / 10}
    for step in range(1, 9)
]
PASSES = [(0.0, 8, "off"), (1.0, 4, "ngram:4,1,5"), (1.5, 2, "learned:8,4,32"), (2.0, 0, "off")]
TIMES = [
    {"step": step, "timing_s/gen": 2.0 / step, "timing_s/update_actor": 0.5, "timing_s/step": 3.0}
    for step in range(1, 9)
]


def pixels(path):
    image = imread(path)[..., :3]
    assert image.shape == (540, 960, 3)
    return (image * 255).round().astype(int)


def count(image, color):
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return int((abs(image - [red, green, blue]).max(axis=-1) <= 2).sum())


@pytest.mark.parametrize(
    ("draw", "drawn", "nothing"),
    [
        (plots.plot_rewards, (RECORDS,), ([],)),
        (plots.plot_accept_length, (RECORDS,), ([{"step": 0}],)),
        (plots.plot_step_times, (TIMES,), ([{"step": 0}],)),
        (plots.plot_lengths, ([3, 5, 40, 64], 64), ([], 64)),
        (plots.plot_active, (PASSES,), ([],)),
    ],
)
def test_figures_show_their_data_and_say_when_there_is_none(tmp_path, draw, drawn, nothing):
    plots.save(draw(*drawn), tmp_path / "sub" / "data.png")
    plots.save(draw(*nothing), tmp_path / "empty.png")
    data, empty = pixels(tmp_path / "sub" / "data.png"), pixels(tmp_path / "empty.png")

    def colored(image):
        return int((np.ptp(image, axis=-1) > 30).sum())

    assert colored(empty) == 0
    assert (empty < 128).any()
    assert colored(data) > 1000


def test_rewards_leave_gaps_for_null_and_absent_values(tmp_path):
    records = [*RECORDS, {"step": 9, plots.TRAIN_REWARD: None}, {"step": 10}]
    plots.save(plots.plot_rewards(records), tmp_path / "gaps.png")
    plots.save(plots.plot_rewards(RECORDS), tmp_path / "whole.png")
    assert (pixels(tmp_path / "gaps.png") == pixels(tmp_path / "whole.png")).all()
    held_out = [{"step": 0, plots.HELD_OUT: 0.5}, {"step": 5, plots.HELD_OUT: 0.7}]
    plots.save(plots.plot_rewards(held_out), tmp_path / "held_out.png")
    assert count(pixels(tmp_path / "held_out.png"), plots._ORANGE) > 300


def test_a_step_without_speculation_is_a_gap(tmp_path):
    """The line of the other steps is not drawn across it."""
    values = {1: 2.0, 2: 2.0, 3: None, 4: None, 5: None, 6: 2.0, 7: 2.0}
    records = [{"step": step, plots.ACCEPT_LENGTH: value} for step, value in values.items()]
    plots.save(plots.plot_accept_length(records), tmp_path / "gap.png")
    plots.save(plots.plot_accept_length([records[0], records[-1]]), tmp_path / "whole.png")
    gap, whole = (count(pixels(tmp_path / f"{name}.png"), plots._BLUE) for name in ("gap", "whole"))
    assert gap < 0.6 * whole


def test_the_legend_of_step_times_covers_no_bar(tmp_path):
    """Bars reach the top of the axes, and all of their colour is there."""
    times = {"timing_s/gen": 2.98, "timing_s/update_actor": 0.01, "timing_s/step": 3.0}
    records = [{"step": step, **times} for step in range(1, 41)]
    plots.save(plots.plot_step_times(records), tmp_path / "times.png")
    image = pixels(tmp_path / "times.png")
    rows = (abs(image - [int(plots.PHASE_COLORS[0][i : i + 2], 16) for i in (1, 3, 5)]) <= 2).all(
        -1
    )
    widths = rows.sum(1)
    whole = widths[widths > 0.5 * widths.max()]  # without the legend's own patch
    assert len(whole) > 200 and whole.min() == whole.max()


def test_a_legend_of_all_phases_is_not_wider_than_the_chart():
    phases = {f"timing_s/{name}": 0.1 for name in PHASES}
    figure = plots.plot_step_times([{"step": 1, "timing_s/step": 1.0, **phases}])
    plots.to_svg(figure)  # sets the size
    figure.canvas.draw()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == len(PHASES) + 1
    extent = legend.get_window_extent()
    assert extent.x0 >= 0 and extent.x1 <= figure.bbox.width


def test_each_strategy_covers_its_share_of_time_and_requests(tmp_path):
    plots.save(plots.plot_active(PASSES), tmp_path / "active.png")
    image = pixels(tmp_path / "active.png")
    colors = plots.strategy_colors([text for _, _, text in PASSES])
    assert list(colors) == ["off", "ngram:4,1,5", "learned:8,4,32"]
    areas = [count(image[80:], color) for color in colors.values()]  # below the legend's top
    # 1 s x 8, 0.5 s x 4 and 0.5 s x 2 requests.
    assert areas[1] / areas[2] == pytest.approx(2, rel=0.2)
    assert areas[0] > 3 * areas[1]


def test_colors_of_strategies_differ():
    texts = [
        "off",
        "ngram:2,1,3",
        "ngram:4,1,5",
        "learned:4,1,5",
        "learned:4,2,8",
        "learned:8,4,32",
        "hybrid:4,1,5",
        "hybrid:4,4,16",
    ]
    assert len(set(plots.strategy_colors(texts).values())) == len(texts)


def test_histogram_bins_hold_every_length_once():
    for longest in (1, 7, 60, 61, 512, 6144):
        bins = plots._bins(longest)
        assert len(bins) <= 62
        counts, _ = np.histogram(np.arange(1, longest + 1), bins)
        assert counts.sum() == longest


def test_an_unwritable_place_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="x.png: cannot be written"):
        plots.save(plots.plot_rewards(RECORDS), tmp_path / "file" / "x.png")


def test_a_step_is_one_line_whatever_its_width():
    out = io.StringIO()
    with Progress(steps=2, console=Console(file=out, width=20)) as progress:
        progress.note("[bold] stays")
        progress.step(1, dict.fromkeys(RECORDS[0], 0.25) | {"timing_s/step": float("nan")})
    assert out.getvalue().splitlines() == [
        "[bold] stays",
        "step 1  reward 0.250  accept 0.25  s nan",
    ]
    assert step_line(4, {}) == "step 4"
    first = {"timing_s/step": 40.0, "timing_s/load": 1.0, "timing_s/warmup": 36.0}
    assert step_line(1, first) == "step 1  s 3.0"  # what came before it is not its own
