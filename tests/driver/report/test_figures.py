import numpy as np
import pytest
from matplotlib.image import imread

from driver.records.phases import PHASES
from driver.report import figures

PASSES = [(0.0, 8, "off"), (1.0, 4, "ngram:4,1,5"), (1.5, 2, "learned:8,4,32"), (2.0, 0, "off")]


def pixels(path):
    image = imread(path)[..., :3]
    assert image.shape == (540, 960, 3)
    return (image * 255).round().astype(int)


def count(image, color):
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return int((abs(image - [red, green, blue]).max(axis=-1) <= 2).sum())


def test_the_legend_of_step_times_covers_no_bar(tmp_path):
    """Bars reach the top of the axes, and all of their colour is there."""
    times = {"timing_s/gen": 2.98, "timing_s/update_actor": 0.01, "timing_s/step": 3.0}
    records = [{"step": step, **times} for step in range(1, 41)]
    figures.plot_step_times(records).savefig(tmp_path / "times.png")
    image = pixels(tmp_path / "times.png")
    rows = (abs(image - [int(figures.PHASE_COLORS[0][i : i + 2], 16) for i in (1, 3, 5)]) <= 2).all(
        -1
    )
    widths = rows.sum(1)
    whole = widths[widths > 0.5 * widths.max()]  # without the legend's own patch
    assert len(whole) > 200 and whole.min() == whole.max()


def test_a_legend_of_all_phases_is_not_wider_than_the_chart():
    phases = {f"timing_s/{name}": 0.1 for name in PHASES}
    figure = figures.plot_step_times([{"step": 1, "timing_s/step": 1.0, **phases}])
    figures.to_svg(figure)  # sets the size
    figure.canvas.draw()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == len(PHASES) + 1
    extent = legend.get_window_extent()
    assert extent.x0 >= 0 and extent.x1 <= figure.bbox.width


def test_each_strategy_covers_its_share_of_time_and_requests(tmp_path):
    colors = figures.strategy_colors(text for _, _, text in PASSES)
    figures.plot_active(PASSES, colors).savefig(tmp_path / "active.png")
    image = pixels(tmp_path / "active.png")
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
    assert len(set(figures.strategy_colors(texts).values())) == len(texts)


def test_histogram_bins_hold_every_length_once():
    for longest in (1, 7, 60, 61, 512, 6144):
        bins = figures._bins(longest)
        assert len(bins) <= 62
        counts, _ = np.histogram(np.arange(1, longest + 1), bins)
        assert counts.sum() == longest
