"""Ids of key/value pages: which are free, which are held. The tensors behind them belong to the runner. No torch."""

from __future__ import annotations


class PagePool:
    """A fixed number of pages. The scheduler alone takes and gives back."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: set[int] = set()
        self.num_pages = num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free page's id, or None when all are held. The page last given back comes first (its memory is warm)."""
        if not self._free:
            return None
        page_id = self._free.pop()
        self._held.add(page_id)
        return page_id

    def give_back(self, page_id: int) -> None:
        """Frees a held page."""
        assert page_id in self._held, f"page {page_id} is not held"
        self._held.remove(page_id)
        self._free.append(page_id)

    def check_integrity(self) -> None:
        """Free and held pages are disjoint and are all there is."""
        assert len(set(self._free)) == len(self._free)
        assert not self._held & set(self._free)
        assert len(self._free) + len(self._held) == self.num_pages
