"""The fit, the verdict and the drawing, on made-up points."""

import re
from xml.etree import ElementTree

import chart
import lines
import pytest
import table
from lines import Curve, Line, Point

SVG = "{http://www.w3.org/2000/svg}"


def points(power: float, sizes=(10, 100, 1000), factor: float = 3.0) -> tuple[Point, ...]:
    return tuple(Point(size, (factor * size**power * 0.9, factor * size**power, factor * size**power * 1.1)) for size in sizes)


def line(power: float, expected: float | None = 0.0) -> Line:
    return Line("a line", "us", points(power), expected, "because")


@pytest.mark.parametrize("power", [-0.5, 0.0, 0.3, 1.0, 2.0])
def test_the_slope_of_a_power_is_its_exponent(power):
    assert lines.slope(points(power)) == pytest.approx(power)


def test_the_slope_is_that_of_the_medians_whatever_the_outliers():
    steady = [Point(size, (5.0, 5.0, 500.0 * size)) for size in (1, 10, 100)]
    assert lines.slope(steady) == pytest.approx(0.0)


def test_the_slope_is_the_least_squares_one_where_points_are_on_no_line():
    # by hand: y = 0, 1, 0.5 at x = 0, 1, 2 in powers of ten
    scattered = [Point(1, (1.0,)), Point(10, (10.0,)), Point(100, (10**0.5,))]
    assert lines.slope(scattered) == pytest.approx(0.25)


def test_what_is_within_the_noise_or_has_no_logarithm_is_not_fitted():
    odd = [Point(0, (7.0,)), Point(1, (1e9,), is_clear=False), Point(2, (-1.0,))]
    assert lines.slope([*odd, *points(0.5)]) == pytest.approx(0.5)
    assert lines.slope([*odd, Point(5, (1.0,))]) is None


def test_a_straight_line_tells_what_each_unit_adds_to_a_large_constant():
    grows = [Point(size, (30.0 + 0.05 * size,)) for size in (4, 16, 64, 256, 512)]
    assert lines.straight(grows) == pytest.approx((30.0, 0.05))
    assert lines.slope(grows) < 0.15


def test_a_line_may_rise_by_the_tolerance_and_no_more():
    assert line(0.14).verdict == "ok"
    assert line(0.16).verdict == "EXCEEDED"
    assert line(1.14, expected=1.0).verdict == "ok"
    assert line(-1.0).verdict == "ok"
    assert line(9.0, expected=None).verdict == "not judged"


def test_a_ratio_is_of_the_last_to_the_first():
    for last, verdict in ((11.4, "ok"), (11.6, "EXCEEDED")):
        two = (Point(1, (10.0,)), Point(2, (last,)))
        assert Line("cores", "us", two, 1.0, "because", is_ratio=True).verdict == verdict


def test_a_run_fails_by_any_line_that_exceeds_or_cannot_be_judged():
    def failed(*of: Line) -> bool:
        return lines.has_failed([Curve("c", "C", "size", of)])

    assert not failed(line(0.0), line(0.1), line(5.0, expected=None))
    assert failed(line(0.0), line(0.5))
    assert failed(Line("one point", "us", points(0.0)[:1], 0.0, "because"))


def test_rounds_become_points_with_a_value_each():
    assert lines.points_of([{1: 5.0, 2: 6.0}, {1: 7.0, 2: 8.0}]) == (Point(1, (5.0, 7.0)), Point(2, (6.0, 8.0)))


def test_the_chart_has_all_points_ranges_and_slopes():
    curves = [Curve(name, f"{name} & more", "size", (line(0.0), line(0.5))) for name in ("a", "b", "c")]
    root = ElementTree.fromstring(chart.draw(curves, "title"))
    assert len(root.findall(f".//{SVG}circle")) == 3 * 2 * 3
    assert len(root.findall(f".//{SVG}line[@class='range']")) == 3 * 2 * 3
    text = " ".join(found.text for found in root.iter(f"{SVG}text"))
    assert text.count("slope +0.500 (expected 0, limit 0.15) EXCEEDED") == 3
    assert text.count("slope +0.000") == 3


def test_points_of_the_chart_lie_within_their_panels_and_rise_with_their_values():
    root = ElementTree.fromstring(chart.draw([Curve("a", "A", "size", (line(1.0, expected=1.0),))], "title"))
    places = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter(f"{SVG}circle")]
    assert all(chart.LEFT < x < chart.PANEL_WIDTH and chart.TOP < y < chart.TOP + chart.PLOT_HEIGHT for x, y in places)
    assert places == sorted(places, key=lambda place: (place[0], -place[1]))
    assert places[0][1] > places[-1][1]


def test_the_table_shows_medians_ranges_and_verdicts():
    text = table.markdown(Curve("a", "A curve", "size", (line(0.0),), ["a note"]))
    assert "| 1,000 | 3.00 (2.70 to 3.30) |" in text
    assert re.search(r"a line \| slope \+0\.000 \| 0 \| 0\.15 \| ok \| because", text)
    assert "* a note" in text
