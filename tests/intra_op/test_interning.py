"""Equal things are one thing."""

import numpy as np

from alpa_lite.intra_op.interning import Numbering, Recent, SharedArrays


def test_equal_things_get_equal_numbers():
    number = Numbering()
    first, again = (1, "a"), (1, *"a")
    assert first is not again
    assert [number(first), number((2,)), number(again), number(first)] == [0, 1, 0, 0]


def test_numbers_do_not_depend_on_what_python_forgets():
    number = Numbering()
    numbers = [number((i,)) for i in range(1000)]  # each tuple would be freed and its place taken by the next
    assert numbers == list(range(1000))


def test_equal_arithmetic_gives_the_same_array():
    arrays = SharedArrays()
    a, b = np.arange(4.0).reshape(2, 2), np.ones((2, 2))
    assert arrays.sum(a, b) is arrays.sum(a, b)
    assert arrays.sum(a, b) is not arrays.sum(a, a)
    assert arrays.product(a, 2.0) is arrays.product(a, 2.0)
    assert arrays.product(a, 1.0) is a
    assert arrays.transposed(a) is arrays.transposed(a)
    assert arrays.zeros(3) is arrays.zeros(3)


def test_arithmetic():
    arrays = SharedArrays()
    a, b = np.arange(4.0).reshape(2, 2), np.full((2, 2), 3.0)
    np.testing.assert_array_equal(arrays.sum(a, b), a + b)
    np.testing.assert_array_equal(arrays.product(a, 5.0), 5 * a)
    np.testing.assert_array_equal(arrays.transposed(a), a.T)
    np.testing.assert_array_equal(arrays.diagonal(a), [0.0, 3.0])
    np.testing.assert_array_equal(arrays.zeros(2), [0.0, 0.0])


def test_what_was_asked_for_last_is_not_made_again():
    recent, made = Recent(2), []
    for key in "abacab":
        recent(key, lambda key=key: made.append(key))
    assert made == ["a", "b", "c", "b"]


def test_one_object_stands_for_its_equals():
    number = Numbering()
    first, again = (1, "a"), (1, *"a")
    assert number.one(first) is first and number.one(again) is first
