"""Which memory is page-locked: a limited sum, slot by slot, undone before pages are freed."""

from __future__ import annotations

import mmap

from forebay.devices.slab import MOST_PER_CALL, PinnedWindow
from kit.fake_device import FakeDevice

PAGE = mmap.PAGESIZE


def test_memory_is_registered_in_whole_pages_up_to_the_limit():
    """What does not fit is not registered, and the limit is named."""
    device = FakeDevice()
    window = PinnedWindow(device, 10 * PAGE)
    assert window.covers(PAGE, 5 * PAGE - 1, 0)
    assert device.registered == {PAGE: 5 * PAGE}
    assert not window.covers(100 * PAGE, 6 * PAGE, 0)
    assert window.covers(200 * PAGE, PAGE, 3 * PAGE), "with room for larger batches"
    assert window.nbytes == 8 * PAGE
    assert window.reason == "no more than 41 kB are page-locked"
    window.close()
    assert device.registered == {}
    assert not window.covers(PAGE, 1, 0)


def test_a_refusal_is_kept_in_words_and_not_repeated():
    """The driver is asked once, since each call stalls other work."""
    device = FakeDevice(refuses="out of memory")
    window = PinnedWindow(device, 10 * PAGE)
    assert not window.covers(PAGE, 1, 0)
    assert window.reason == "out of memory"
    device.register = None  # type: ignore[assignment]
    assert not window.covers(PAGE, 1, 0)


def test_a_huge_batch_is_not_registered():
    """A call of that size would stall the machine, or be refused."""
    window = PinnedWindow(FakeDevice(), 1 << 40)
    assert not window.covers(PAGE, MOST_PER_CALL + 1, 0)
    assert "more than 1 GiB" in str(window.reason)
    assert window.covers(PAGE, MOST_PER_CALL, 0)
