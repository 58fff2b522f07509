"""Text batches: windows of the text, the same for the same seed."""

import numpy
import pytest

from sbp.data import batches, default_text
from sbp.data.text import DataError


def test_windows_of_the_text_and_the_next_byte(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))
    found = next(batches(path, batch=5, sequence=7))
    assert found["tokens"].shape == found["targets"].shape == (5, 7)
    assert found["tokens"].dtype == numpy.int64
    numpy.testing.assert_array_equal(found["tokens"] + 1, found["targets"])
    numpy.testing.assert_array_equal(numpy.diff(found["tokens"], axis=1), 1)


def test_every_window_can_be_drawn(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"abcd")
    starts = {chr(item["tokens"][0, 0]) for item, _ in zip(batches(path, batch=1, sequence=2), range(50))}
    assert starts == {"a", "b"}


def test_the_seed_decides():
    def three(seed):
        return numpy.concatenate([item["tokens"] for item, _ in zip(batches(seed=seed), range(3))])

    numpy.testing.assert_array_equal(three(1), three(1))
    assert not numpy.array_equal(three(1), three(2))


def test_the_default_text_is_english():
    text = default_text()
    assert len(text) > 200_000 and text == default_text()
    assert b" the " in text


@pytest.mark.parametrize(
    "content, arguments, message",
    [
        (None, {}, r"cannot read the text .*missing.*No such file"),
        (b"short", {"sequence": 5}, r"has 5 bytes, a sequence of 5 needs 6"),
        (b"short", {"batch": 0}, r"batch 0"),
    ],
)
def test_errors_come_with_the_call(tmp_path, content, arguments, message):
    path = tmp_path / "missing"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        batches(path, **arguments)
