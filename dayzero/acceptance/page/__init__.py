"""The page of an acceptance: one HTML file that needs nothing else, made from a record or from a comparison of two."""

from dayzero.acceptance.page.comparison import write_comparison_page
from dayzero.acceptance.page.write import write_page

__all__ = ["write_comparison_page", "write_page"]
