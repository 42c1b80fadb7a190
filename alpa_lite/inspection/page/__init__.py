"""Pages, drawings and figures of plans.

Input: a plan, or two. Output: self-contained HTML pages, fragments for notebooks, and figures for papers.
Read `html` first.
"""
