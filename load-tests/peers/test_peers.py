"""The table and the ratios are what the measured values say."""

import pytest
from peers import DIRECT, MARKS, SHAPES, Row, ratios, table, write
from routers import ROUTERS


def row(rate: float) -> Row:
    rates = {shape: [rate * 2, rate, rate / 2] for shape in SHAPES}
    return Row(rates, {shape: [20.0] for shape in SHAPES}, [250.0], [10.0], [30.0])


def rows(**rates: float) -> dict:
    by_name = {router.name.replace(":", "_"): router for router in ROUTERS}
    return {DIRECT: Row(paced_us=[100.0]), **{by_name[name]: row(rate) for name, rate in rates.items()}}


def test_a_row_has_medians_and_what_the_router_adds_to_no_router():
    text = table(rows(nginx_=1000), 3, 2.0)
    line = next(line for line in text.splitlines() if "nginx" in line)
    assert line.count("1,000 (20.0)") == len(SHAPES)
    assert "| 150 us | 10 / 30 MiB |" in line


def test_ratios_are_to_the_best_of_the_others_and_nginx_is_none_of_them():
    measured = rows(nginx_=9000, tidegate_ring=400, vllm_round_robin=200, sglang_cache_aware=100)
    any_policy, prefix_aware = ratios(measured)
    assert "small JSON 2.00 times (vllm-router round_robin)" in any_policy
    assert "small JSON 4.00 times (sglang-router cache_aware)" in prefix_aware


def test_without_others_there_are_no_ratios():
    assert ratios(rows(nginx_=9000, tidegate_ring=400)) == []


def test_only_what_stands_between_the_marks_is_replaced(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    write(path, "new")
    assert path.read_text() == f"before\n{MARKS[0]}\nnew\n{MARKS[1]}\nafter\n"
    path.write_text("no marks\n")
    with pytest.raises(SystemExit):
        write(path, "new")
