"""Views of a plan; nothing here changes one.

Input: a plan, and for some views a lowered program. Output: tables and timelines (`text/`), the reasons behind a
decision (`why/`), and pages and figures (`page/`).
Read `text/tables` first; `views` connects these functions with the methods of plans.
"""
