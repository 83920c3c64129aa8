"""Cached measurements: repeated only where they are not known."""

import json

from fedshift.utils.files import cached_measurement


def test_of_two_processes_that_measure_the_same_the_first_to_end_decides(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path))

    def measure_slowly():
        assert cached_measurement("times.json", "layer", lambda: {"seconds": 1}) == {"seconds": 1}
        assert cached_measurement("times.json", "other", lambda: {"seconds": 3}) == {"seconds": 3}
        return {"seconds": 2}

    for _ in range(2):
        assert cached_measurement("times.json", "layer", measure_slowly) == {"seconds": 1}
    assert sorted(found["seconds"] for found in json.loads((tmp_path / "times.json").read_text()).values()) == [1, 3]
