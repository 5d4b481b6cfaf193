"""The guard's own judgement."""

import guard


def test_more_than_the_tolerance_is_named_and_less_is_not():
    baseline = {"a": 1000, "b": 1000, "c": 1000}
    (found,) = guard.worse({"a": 1101, "b": 1099, "c": 500}, baseline)
    assert found.startswith("a takes 1,101 instructions, +10%")


def test_paths_without_a_baseline_and_baselines_without_a_path_are_named():
    found = guard.worse({"new": 1}, {"old": 1})
    assert [line.split()[0] for line in found] == ["new", "old"]
